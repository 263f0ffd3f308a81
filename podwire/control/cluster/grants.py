"""Which ranges pools give to pods, and what stays after a pool is deleted, so that nothing in use is withdrawn.

Used by `control.cluster.state`. Pure. A range or address that a node published while a pool had it stays that node's
for as long as the node keeps publishing it, also across restarts (`dump`). Nothing new is given from a pool that is
gone. Whatever else gives ranges to pods, such as a core Node's podCIDRs, belongs here: the planner asks for `Grants`
alone.
"""

import ipaddress
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import msgspec

from podwire.control.cluster.belief import Grants
from podwire.model.endpoint import IPNetwork
from podwire.model.networks import is_within, read_network
from podwire.model.store import StoredObject

Published = Iterable[tuple[str, IPNetwork]]
"""Nodes, and the ranges and single addresses that they publish."""


class _Kept(msgspec.Struct, frozen=True):
    """What is kept across restarts."""

    pools: Mapping[str, str] = {}
    left: Mapping[str, tuple[str, ...]] = {}


class PoolGrants:
    """The pools of the cluster. Not thread-safe."""

    def __init__(self) -> None:
        self._pools: dict[str, IPNetwork] = {}
        self._left: dict[str, frozenset[IPNetwork]] = {}
        """By node: what it has of pools that are gone."""

    @classmethod
    def load(cls, text: str) -> Self:
        """Take what `dump` gave in an earlier life; "" = there was none."""
        kept = msgspec.json.decode(text or "{}", type=_Kept)
        made = cls()
        made._pools = {name: ipaddress.ip_network(pool) for name, pool in kept.pools.items()}
        made._left = {
            node: frozenset(map(ipaddress.ip_network, several))
            for node, several in kept.left.items()
        }
        return made

    def dump(self) -> str:
        """Give what has to outlive this agent."""
        kept = _Kept(
            {name: str(network) for name, network in sorted(self._pools.items())},
            {node: tuple(sorted(map(str, some))) for node, some in sorted(self._left.items())},
        )
        return msgspec.json.encode(kept).decode()

    def current(self) -> Grants:
        """Give what is granted now."""
        return Grants(tuple(sorted(set(self._pools.values()), key=str)), dict(self._left))

    def replace(self, pools: Iterable[StoredObject], published: Published) -> bool:
        """Take all pools there are; tells whether that changes anything. `published` is read only if one is gone."""
        after = {
            stored.key.name: cidr for stored in pools if (cidr := _read_cidr(stored)) is not None
        }
        before, self._pools = self._pools, after
        # By range and not by name: a pool that was renamed grants what it granted.
        gone = set(before.values()) - set(after.values())
        if gone:
            self._keep(lambda network: any(is_within(network, cidr) for cidr in gone), published)
        return before != after

    def put(self, pool: StoredObject, published: Published) -> bool:
        """Take one pool, new or changed; tells whether that changes anything."""
        return self._change(pool.key.name, _read_cidr(pool), published)

    def remove(self, name: str, published: Published) -> bool:
        """Take one pool away; tells whether that changes anything."""
        return self._change(name, None, published)

    def forget(self, is_published: Callable[[str, IPNetwork], bool]) -> None:
        """Let go of what nodes had of pools that are gone, and do not publish any more."""
        left = {
            node: frozenset(network for network in several if is_published(node, network))
            for node, several in self._left.items()
        }
        self._left = {node: several for node, several in left.items() if several}

    def _change(self, name: str, cidr: IPNetwork | None, published: Published) -> bool:
        before = self._pools.pop(name, None)
        if cidr is not None:
            self._pools[name] = cidr
        # What nodes publish of the old range is noted as theirs, so that a pool that shrinks cuts no pod off.
        if before is not None and before != cidr:
            self._keep(lambda network: is_within(network, before), published)
        return before != cidr

    def _keep(self, was_granted: Callable[[IPNetwork], bool], published: Published) -> None:
        for node, network in published:
            if was_granted(network):
                self._left[node] = self._left.get(node, frozenset()) | {network}


def _read_cidr(pool: StoredObject) -> IPNetwork | None:
    """Give a pool's range; None of one that cannot be read, which grants nothing."""
    spec: Any = pool.document.get("spec")
    try:
        return read_network(spec["cidr"])
    except (TypeError, KeyError, ValueError):
        return None
