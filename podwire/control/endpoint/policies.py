"""Policies and CIDR groups of the store, decoded and handed to the engine.

Called by the agent's policy duty and by tests, under the node's turn. Never asks the store. Invariant: a policy is
enforced whole, or stands as it was last read, or closes whom it could select; `problems` names the latter two, and
`closed` the last.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from podwire.control.policy import reading
from podwire.control.policy.engine import PolicyEngine
from podwire.control.policy.reading import Unenforceable, close_policy, name_policy, read_policy
from podwire.control.policy.rule import CidrGroup, PolicyId, PolicyRules
from podwire.control.policy.rules_cilium import decode_cidr_group
from podwire.model.errors import InvalidRequest
from podwire.model.store import (
    ObjectKey,
    ReadableObject,
    Revisions,
    StoredObject,
    StoreEvent,
    value_of,
)

GROUPS: Final = "ciliumcidrgroups"
POLICY_KINDS: Final = (*reading.POLICY_KINDS, GROUPS)
"""Kinds of the store that are policy."""

_log = logging.getLogger(__name__)


class ClosedPolicy(msgspec.Struct, frozen=True):
    """A policy that closes in place of what it says."""

    uid: str
    """Of its object."""
    how: Unenforceable


class PolicyObjects:
    """What the store has of policy, as this node understands it."""

    def __init__(self, engine: PolicyEngine) -> None:
        self._engine = engine
        self.rules: dict[PolicyId, tuple[PolicyRules, ...]] = {}
        """Policies in force, for traces and lists."""
        self.groups: dict[str, CidrGroup] = {}
        self.problems: dict[ObjectKey, str] = {}
        """Objects whose newest version is not in force, and why."""
        self.closed: dict[ObjectKey, ClosedPolicy] = {}
        """Policies that close in place of what they say."""
        self.bugs = 0
        """How often an object could not be taken in for a reason that nobody thought of."""
        self._known: set[ObjectKey] = set()

    def replace(self, kind: str, objects: Sequence[StoredObject]) -> None:
        """Take in a whole list of one kind."""
        listed = {stored.key for stored in objects}
        for key in [key for key in self._known if key.kind == kind and key not in listed]:
            self._take(key, partial(self._remove, key))
        for stored in objects:
            self._take(stored.key, partial(self._put, stored))

    def apply(self, event: StoreEvent) -> None:
        """Take in one change."""
        act = partial(self._remove, event.object.key)
        if not event.deleted:
            act = partial(self._put, event.object)
        self._take(event.object.key, act)

    def _take(self, key: ObjectKey, act: Callable[[], None]) -> None:
        """Do something about one object; whatever goes wrong with it, the others are not concerned."""
        try:
            act()
        except InvalidRequest as error:
            self._keep_last(key, error.message)
        except Exception as error:
            self.bugs += 1
            _log.exception("a policy met a bug", extra={"object": str(key)})
            self._keep_last(key, f"{type(error).__name__}: {error}")
        else:
            if key not in self.closed:
                self.problems.pop(key, None)

    def _keep_last(self, key: ObjectKey, problem: str) -> None:
        """Let the last readable version of an object stand, or what it closes; without one a policy closes."""
        if key in self.closed:
            return
        if key.kind == GROUPS or name_policy(key) in self.rules:
            self.problems[key] = problem
            _log.error(
                "a policy cannot be read; what was in force of it stays",
                extra={"object": str(key), "error": problem},
            )
        elif (closing := close_policy(key, {}, problem)) is not None:
            self._close(key, "", closing)
        else:
            self.problems[key] = problem

    def _put(self, stored: StoredObject) -> None:
        key = stored.key
        self._known.add(key)
        if stored.fault:
            raise InvalidRequest(stored.fault)
        if key.kind == GROUPS:
            group = value_of(stored, CidrGroup) or decode_cidr_group(stored.document)
            self._engine.set_group(group)
            self.groups[key.name] = group
            return
        said = stored.value if isinstance(stored, ReadableObject) else None
        if not isinstance(said, tuple | Unenforceable):
            said = read_policy(key, stored.document)
        if isinstance(said, Unenforceable):
            self._close(key, stored.uid, said)
            return
        self._engine.set_policy(name_policy(key), said)
        self.rules[name_policy(key)] = said
        self.closed.pop(key, None)

    def _close(self, key: ObjectKey, uid: str, how: Unenforceable) -> None:
        """Have a policy close in place of what it says, until it is corrected or deleted."""
        policy = name_policy(key)
        self._engine.set_policy(policy, how.rules)
        self.rules[policy] = how.rules
        closed = ClosedPolicy(uid, how)
        if self.closed.get(key) != closed:
            _log.error(
                "a policy cannot be enforced whole, and closes",
                extra={"object": str(key), "cause": how.closes, "error": how.reason},
            )
        self.closed[key] = closed
        self.problems[key] = how.message

    def _remove(self, key: ObjectKey) -> None:
        if key.kind == GROUPS:
            if key.name in self.groups:
                self._engine.remove_group(key.name)
                del self.groups[key.name]
        elif (policy_id := name_policy(key)) in self.rules:
            self._engine.remove_policy(policy_id)
            del self.rules[policy_id]
        self.closed.pop(key, None)
        # Only now: what could not be removed is tried again with the next list.
        self._known.discard(key)


def oldest_revision(revisions: Revisions) -> int:
    """Give a revision up to which every kind of policy was taken in; 0 while one of them was not."""
    return min(revisions.get(kind, 0) for kind in POLICY_KINDS)
