"""Followers as the agent has them, for tests that have no agent."""

from podwire.agent.duties.follower import StoreFollower
from podwire.agent.duties.identity import IdentityNews
from podwire.control.identity.feed import KINDS, IdentityFeed
from podwire.model.store import Store


def follow_identities(store: Store, feed: IdentityFeed) -> StoreFollower:
    """Make what keeps the feed as new as the store."""
    return StoreFollower("identities", store, KINDS, IdentityNews(feed))
