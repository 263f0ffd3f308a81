"""Followers as the agent has them, for tests that have no agent."""

from podwire.agent.identity_duty import IdentityNews
from podwire.agent.store_follower import StoreFollower
from podwire.control.identity.feed import KINDS, IdentityFeed
from podwire.model.store import Store


def follow_identities(store: Store, feed: IdentityFeed) -> StoreFollower:
    """Make what keeps the feed as new as the store."""
    return StoreFollower("identities", store, KINDS, IdentityNews(feed))
