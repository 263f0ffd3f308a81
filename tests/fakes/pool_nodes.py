"""Nodes that take addresses from pools of one store: the real claims, knowledge and follower, without an agent."""

from collections.abc import Callable, Mapping
from typing import Any

from podwire.agent.ipam_duty import IpamNews
from podwire.agent.store_follower import StoreFollower
from podwire.control.apply import apply_documents
from podwire.control.ipam.claims import Claims
from podwire.control.ipam.known import Known
from podwire.control.ipam.pool import PoolIpam
from podwire.model.endpoint import AttachmentKey
from podwire.model.ids import ContainerId, InterfaceName, NetworkName
from podwire.model.store import Store


def pool_document(name: str, cidr: str, **spec: Any) -> dict[str, Any]:
    """Write an IPPool."""
    return {
        "apiVersion": "podwire.io/v1",
        "kind": "IPPool",
        "metadata": {"name": name},
        "spec": {"cidr": cidr, **spec},
    }


def apply(store: Store, *documents: Mapping[str, Any]) -> None:
    """Apply documents as people do."""
    apply_documents(store, documents)


def key_of(container: object) -> AttachmentKey:
    """Name an attachment."""
    return AttachmentKey(
        NetworkName("podwire"), ContainerId(f"c{container}"), InterfaceName("eth0")
    )


class PoolNode:
    """One node's pool mode."""

    def __init__(self, store: Store, name: str, *, monotonic: Callable[[], float] | None = None):
        self.store = store
        self.known = Known(name)
        self.claims = Claims(store, self.known)
        self.ipam = PoolIpam(self.claims, **({"monotonic": monotonic} if monotonic else {}))
        self.news = IpamNews(self.ipam)
        self.follower = StoreFollower(f"ipam-{name}", store, IpamNews.KINDS, self.news)
        self.follower.load()

    def hear(self) -> None:
        """Take in what the store says by now."""
        while self.follower.step(0):
            pass

    def start(self) -> None:
        """Follow on a thread of its own."""
        self.follower.start()

    def close(self) -> None:
        """End the thread."""
        self.follower.stop()
