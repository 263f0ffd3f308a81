"""Writes of objects: each a condition and an operation, committed alone or together in one transaction.

Used by `store.etcd.store`. Must never write when the condition does not hold. Invariant: when the answer to a write is
lost and the write is sent again, the mark in its value identifies it, so it is neither done twice nor taken for
another's.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from podwire.model.errors import PodwireError, StorageFailure
from podwire.model.store import ObjectKey, StoredObject
from podwire.store.documents import changed, exists, find_conflict, none_there
from podwire.store.etcd import wire
from podwire.store.etcd.cluster import Cluster
from podwire.store.etcd.keys import decode_object, decode_value, object_key
from podwire.store.etcd.wire import Body, KeyValue

PART_MAX: Final = 128
"""Operations of one transaction: etcd's own limit, `--max-txn-ops`."""
PART_MAX_BYTES: Final = 1_200_000
"""Of values in one transaction: etcd's limit is 1.5 MiB a request, keys and conditions included."""


class Change(msgspec.Struct, frozen=True):
    """One write. `made` gets its revision when it is committed; `expected` is what the key must be at, 0: not there."""

    verb: str
    made: StoredObject
    expected: int
    value: bytes = b""
    """Empty: the key is removed."""
    mark: str = ""

    @property
    def key(self) -> bytes:
        """The key of etcd."""
        return object_key(self.made.key)

    def operation(self) -> Body:
        """Write what is done."""
        return wire.put(self.key, self.value) if self.value else wire.delete(self.key)

    def is_done(self, pair: KeyValue | None) -> bool:
        """Tell whether what is there now is what this write left."""
        if pair is None or not self.value:
            return pair is None and not self.value
        try:
            return decode_value(pair).mark == self.mark
        except StorageFailure:
            return False

    def settle(self, revision: int) -> None:
        """Note the revision in what the caller holds. Deleted objects keep that of their last change."""
        if self.value:
            msgspec.structs.force_setattr(self.made, "revision", revision)

    def explain(self, pair: KeyValue | None) -> PodwireError | None:
        """Say why the condition does not hold; None when it does."""
        revision = 0 if pair is None else pair.mod_revision
        if revision == self.expected:
            return None
        if pair is None:
            return none_there(self.verb, self.made.key)
        if not self.expected:
            return exists(self.made.key, revision)
        return changed(self.verb, self.made.key, revision, self.expected)


Changes = list[Change]


def check_found(
    verb: str, key: ObjectKey, pair: KeyValue | None, revision: int | None, uid: str
) -> StoredObject:
    """Give what is to be changed, if it still is what the caller has seen. NotFound, Conflict."""
    if pair is None:
        raise none_there(verb, key)
    old = decode_object(pair)
    if conflict := find_conflict(verb, key, (old.uid, old.revision), uid, revision):
        raise conflict
    return old


async def commit(cluster: Cluster, changes: Sequence[Change]) -> None:
    """Do changes in transactions of as many as etcd takes; each is done whole or not at all."""
    done = 0
    for part in _split(changes):
        try:
            await _commit_part(cluster, part)
        except PodwireError as error:
            if done:
                error.hint = f"{done} of {len(changes)} writes were done before; {error.hint}"
            raise
        done += len(part)


async def _commit_part(cluster: Cluster, part: Sequence[Change]) -> None:
    answer, is_doubtful = await cluster.transact(
        [wire.equal(change.key, change.expected) for change in part],
        [change.operation() for change in part],
        # On failure the same transaction reads what is there, so the explanation is of the moment of the refusal.
        [wire.read(change.key) for change in part],
    )
    if answer.succeeded:
        for change in part:
            change.settle(answer.header.revision)
        return
    pairs = answer.values()
    # The conditions fail when the first attempt was carried out and its answer was lost: then it is our own mark that
    # is there.
    if is_doubtful and all(change.is_done(now) for change, now in zip(part, pairs, strict=True)):
        for change, now in zip(part, pairs, strict=True):
            change.settle(now.mod_revision if now else 0)
        return
    for change, now in zip(part, pairs, strict=True):
        if (error := change.explain(now)) is not None:
            raise error


def _split(changes: Sequence[Change]) -> list[list[Change]]:
    parts: list[list[Change]] = []
    size = 0
    for change in changes:
        size += len(change.value)
        if not parts or len(parts[-1]) == PART_MAX or size > PART_MAX_BYTES:
            parts.append([])
            size = len(change.value)
        parts[-1].append(change)
    return parts
