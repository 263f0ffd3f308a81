"""Collect numbers that are not in use: mark them, give them up, delete them after a rest. Also: what is in use.

The identity duty calls it from time to time. `Collector` is pure: time and what is in use are parameters. Invariant: a
number is given up only long after the mark that every agent could see, and gets no other meaning before it has rested.
Every write names the state that it is based on, so an agent that takes a number into use at the same moment wins.
"""

import enum
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from podwire.control.cluster.published import decode_endpoints
from podwire.control.identity.key import NumberSpace
from podwire.control.identity.known import (
    API_VERSION,
    IDENTITIES,
    RESTING_SINCE,
    UNUSED_SINCE,
    KnownIdentity,
    annotations,
    decode,
)
from podwire.model.documents.lenient import members_of
from podwire.model.errors import Conflict, InvalidRequest, NotFound, Unavailable
from podwire.model.store import ObjectKey, Store, StoredObject, UnreadableObject, look_at
from podwire.model.store.kinds import NODE_ENDPOINTS

NODES: Final = "nodes"
UNUSED_S: Final = 15 * 60.0
MARKED_S: Final = 60 * 60.0
REST_S: Final = 24 * 60 * 60.0
SKEW_S: Final = 5 * 60.0
"""A mark from further in the future is of a wrong clock, and made again."""
ATTEMPTS: Final = 8

_log = logging.getLogger(__name__)


class Move(enum.Enum):
    """What is to be done about a number."""

    MARK = "mark"
    CLEAR = "clear"
    REST = "rest"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Decision:
    """One thing to do about one number, based on the state it was seen in."""

    move: Move
    stored: StoredObject


@dataclass
class Collector:
    """Decides what becomes of unused numbers; remembers since when it has seen each of them unused."""

    space: NumberSpace = field(default_factory=NumberSpace)
    """Numbers outside are fixed by somebody and never collected."""
    _unused: dict[tuple[int, int], float] = field(default_factory=dict)
    """(number, revision of its object) -> monotonic time."""

    def decide(
        self,
        identities: Iterable[StoredObject],
        in_use: Collection[int],
        *,
        now: datetime,
        monotonic_s: float,
    ) -> list[Decision]:
        """Give what is to be done now. `in_use` must not be older than `identities`.

        A number goes on only after it was seen unused in this state for UNUSED_S by this collector's own clock: a
        jump of the wall clock cannot shorten that.
        """
        before, self._unused = self._unused, {}
        decisions: list[Decision] = []
        for stored in identities:
            known = decode(stored)
            if known is None or known.number not in self.space:
                continue
            if known.number in in_use:
                if known.is_marked or known.is_resting:
                    decisions.append(Decision(Move.CLEAR, stored))
                continue
            state = (known.number, known.revision)
            since_s = self._unused[state] = before.get(state, monotonic_s)
            move = _next_move(known, annotations(stored), now)
            if move is not None and (monotonic_s - since_s >= UNUSED_S or move is Move.CLEAR):
                decisions.append(Decision(move, stored))
        return decisions


def _next_move(known: KnownIdentity, marks: Mapping[str, str], now: datetime) -> Move | None:
    """Give what is next for an unused number, None when its time has not come."""
    if not (known.is_marked or known.is_resting):
        return Move.MARK
    name, wait_s, move = (
        (RESTING_SINCE, REST_S, Move.DELETE)
        if known.is_resting
        else (UNUSED_SINCE, MARKED_S, Move.REST)
    )
    age_s = _age_s(marks[name], now)
    # A clock that was ahead, or a hand-written mark, must neither delete a number early nor keep it for ever.
    if age_s is None or age_s < -SKEW_S:
        return Move.CLEAR
    return move if age_s >= wait_s else None


def _age_s(text: str, now: datetime) -> float | None:
    """Give how long ago a time was; None for what is no time."""
    try:
        when = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    return None if when.tzinfo is None else (now - when).total_seconds()


def carry_out(store: Store, decisions: Iterable[Decision], now: datetime) -> dict[Move, int]:
    """Write decisions; what changed meanwhile is left for the next time. Gives how many of each were done."""
    stamp = now.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    changes: Mapping[Move, Mapping[str, str | None]] = {
        Move.MARK: {UNUSED_SINCE: stamp},
        Move.REST: {RESTING_SINCE: stamp},
        Move.CLEAR: {UNUSED_SINCE: None, RESTING_SINCE: None},
    }
    done: dict[Move, int] = {}
    for decision in decisions:
        stored = decision.stored
        try:
            if decision.move is Move.DELETE:
                store.delete(stored.key, revision=stored.revision, uid=stored.uid)
            else:
                marks = {"metadata": {"annotations": changes[decision.move]}}
                store.patch(stored.key, marks, revision=stored.revision, uid=stored.uid)
        # Somebody took the number into use, or another collector was faster. Both are right.
        except (Conflict, NotFound):
            continue
        done[decision.move] = done.get(decision.move, 0) + 1
    return done


def collect(
    store: Store, collector: Collector, *, now: datetime, monotonic_s: float
) -> dict[Move, int]:
    """Read identities, then which of them are used, and carry out what the collector decides. Raises Unavailable.

    If one node's publication cannot be read, nothing is collected, because the node may use any number.
    """
    # Identities are listed first. A number that a node takes into use between the two lists then shows in `in_use`,
    # and any write to it since makes the decision fail.
    identities = store.list(IDENTITIES)[0]
    try:
        named = read_named(store.list(NODE_ENDPOINTS.plural)[0])
        in_use = named | read_holds(store.list(NODES)[0])
    except InvalidRequest as error:
        _log.warning("collect no identities", extra={"error": error.message})
        return {}
    decisions = collector.decide(identities, in_use, now=now, monotonic_s=monotonic_s)
    return carry_out(store, decisions, now)


def read_named(endpoints: Sequence[StoredObject]) -> frozenset[int]:
    """Give all identities that nodes have published of their pods. Raises InvalidRequest for what cannot be read."""
    return frozenset(
        int(identity)
        for stored in endpoints
        for identity in decode_endpoints(stored).identities.values()
    )


def read_holds(nodes: Sequence[StoredObject]) -> frozenset[int]:
    """Give all numbers that nodes have published as held. Raises InvalidRequest for what the store cannot read."""
    numbers: set[int] = set()
    for node in nodes:
        if node.fault:
            raise InvalidRequest(f"read what node {node.key.name!r} holds: {node.fault}")
        holds = members_of(node.document, "spec").get("holds")
        if isinstance(holds, list | tuple):
            numbers.update(number for number in holds if isinstance(number, int))
    return frozenset(numbers)


def publish_holds(store: Store, node_name: str, numbers: Collection[int]) -> None:
    """Write which numbers this node uses into its Node object, and nothing else of it."""
    key = ObjectKey(NODES, "", node_name)
    holds = sorted(numbers)
    for _ in range(ATTEMPTS):
        stored = look_at(store, key)
        if stored is not None and _is_damaged(stored):
            # The rest of the object would look like a node that has published nothing: others would forget the node.
            raise Unavailable(
                f"publish what node {node_name!r} holds: its object must be written anew first"
            )
        try:
            if stored is None:
                store.create(StoredObject(key=key, document=_node_document(node_name, holds)))
            elif (stored.document.get("spec") or {}).get("holds") != holds:
                store.patch(key, {"spec": {"holds": holds}}, uid=stored.uid)
        except (Conflict, NotFound, UnreadableObject):
            continue
        return
    raise Unavailable(f"publish what node {node_name!r} holds: others keep changing it")


def _is_damaged(stored: StoredObject) -> bool:
    return bool(stored.fault) or not isinstance(stored.document.get("spec") or {}, Mapping)


def _node_document(name: str, holds: list[int]) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": "Node",
        "metadata": {"name": name},
        "spec": {"holds": holds},
    }
