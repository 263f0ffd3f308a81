"""Orphans: blocks and claimed addresses of nodes that are gone for good, given back after a long time.

Used by `agent.duties.addresses` on the node that holds the lease `duty/addresses`. A node is gone when it has neither
a Node object nor a living lease. Invariant: nothing is given back on one observation. Two observations, GRACE_S apart,
must agree, and the object must not have changed in between.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from podwire.control.ipam.documents import (
    decode_block,
    decode_claimed,
    encode_block,
    released,
    rewrite,
)
from podwire.model.errors import Conflict, NotFound
from podwire.model.store import ObjectKey, Store, StoredObject
from podwire.model.store.kinds import IP_ADDRESS, IP_BLOCK

GRACE_S: Final = 15 * 60.0


@dataclass
class OrphanCollector:
    """What was seen without a node, since when, and at which revision."""

    seen: dict[ObjectKey, tuple[int, float]] = field(default_factory=dict)

    def look(
        self, objects: Iterable[StoredObject], living: Collection[str], now_s: float
    ) -> list[StoredObject]:
        """Take one observation; gives the objects that had no node throughout, `now_s` being monotonic.

        `living`: nodes that have an object or a living lease.
        """
        suspects: dict[ObjectKey, tuple[int, float]] = {}
        due: list[StoredObject] = []
        for stored in objects:
            node = node_of(stored)
            if not node or node in living:
                continue
            revision, since_s = self.seen.get(stored.key, (stored.revision, now_s))
            # The object was written since it was first seen without a node, so somebody uses it: the grace begins
            # again.
            if revision != stored.revision:
                since_s = now_s
            suspects[stored.key] = (stored.revision, since_s)
            if now_s - since_s >= GRACE_S:
                due.append(stored)
        self.seen = suspects
        return due


def node_of(stored: StoredObject) -> str:
    """Name the node that has a block or a claimed address; "" if no node has it."""
    if stored.key.kind == IP_BLOCK.plural:
        block = decode_block(stored)
        return block.node if block is not None else ""
    claimed = decode_claimed(stored)
    return claimed.node if claimed is not None else ""


def give_back(store: Store, orphan: StoredObject) -> bool:
    """Give back what a node that is gone had; False when it changed meanwhile. Raises Unavailable."""
    try:
        if orphan.key.kind == IP_ADDRESS.plural:
            store.delete(orphan.key, revision=orphan.revision, uid=orphan.uid)
            return True
        block = decode_block(orphan)
        if block is None:
            return False
        store.update(rewrite(orphan, encode_block(released(block))))
    except (Conflict, NotFound):
        return False
    return True
