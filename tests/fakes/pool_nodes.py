"""Nodes that take addresses from pools of one store: the real claims, knowledge and follower, without an agent."""

import time
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from typing import Any, Final

from podwire.agent.duties.addresses import TICK_S, IpamDuty, IpamNews
from podwire.agent.duties.follower import StoreFollower
from podwire.control.documents.apply import apply_documents
from podwire.control.ipam.claiming.claims import Claims
from podwire.control.ipam.documents import decode_block
from podwire.control.ipam.interface import Wish
from podwire.control.ipam.pool import PoolIpam
from podwire.control.ipam.pool_cache import PoolCache
from podwire.model.endpoint import AttachmentKey
from podwire.model.ids import ContainerId, EndpointId, IdentityId, InterfaceName, NetworkName
from podwire.model.store import Store
from tests.waiting import DEADLINE_S

WAIT_S: Final = 30.0


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
        self.known = PoolCache(name)
        self.claims = Claims(store, self.known)
        self.ipam = PoolIpam(self.claims, monotonic=monotonic or time.monotonic)
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


class Nodes:
    """Nodes of one store, whose followers run."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.made: list[PoolNode] = []

    def __call__(self, name: str) -> PoolNode:
        node = PoolNode(self.store, name)
        node.start()
        self.made.append(node)
        return node

    def close(self) -> None:
        for node in self.made:
            node.close()


def add(
    node: "PoolNode | Ticking",
    owner: int,
    *wanted: str,
    pools: tuple[str, ...] = (),
    identity: int = 0,
    namespace: str = "default",
) -> list[str]:
    """Do what an ADD does."""
    wish = Wish(
        key=key_of(f"{node.known.node}-{owner}"),
        identity=IdentityId(identity),
        wanted=tuple(ip_address(address) for address in wanted),
        pools=pools,
        namespace=namespace,
    )
    with node.ipam.reserved(wish) as addresses:
        addresses.fill(lambda: False, WAIT_S)
        found = addresses.take(EndpointId(owner))
    return [str(entry) for entry in found if entry is not None]


def wait_until(node: "PoolNode | Ticking", condition: object) -> None:
    """Wait for something to be heard."""
    assert callable(condition)
    until_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until_s, "not heard in time"
        with node.ipam.lock:
            node.ipam.changed.wait(0.05)


def claimed_blocks(store: Store) -> dict[str, str]:
    """Give block -> node of what is claimed."""
    found = [decode_block(stored) for stored in store.list("ipblocks")[0]]
    return {str(entry.cidr): entry.node for entry in found if entry is not None and entry.node}


class Facts:
    """Facts of a journal."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}

    def write_fact(self, name: str, value: str) -> None:
        self.kept[name] = value

    def read_fact(self, name: str) -> str:
        return self.kept.get(name, "")


class Ticking:
    """A node with its duty, whose time moves when asked."""

    def __init__(self, store: Store, name: str, facts: Facts | None = None) -> None:
        self.now_s = 1000.0
        known = PoolCache(name)
        ipam = PoolIpam(Claims(store, known))
        self.facts = facts or Facts()
        self.reports: list[str] = []
        """What was said of pools in `podwire status`, the newest last."""
        self.duty = IpamDuty(
            ipam=ipam,
            store=store,
            facts=self.facts,
            report=self.reports.append,
            monotonic=lambda: self.now_s,
        )
        self.known, self.claims, self.ipam = known, ipam.claims, ipam
        self.duty.prepare()

    def hear_and_work(self) -> None:
        """Hear what there is, and do what is due as the duty's thread does."""
        while self.duty.follower.step(0):
            pass
        assert self.duty._worker.do_round() == TICK_S, self.reports[-1]
        while self.duty.follower.step(0):
            pass

    def settle(self) -> None:
        """Tick, and hear what became of it."""
        self.duty.tick()
        while self.duty.follower.step(0):
            pass
