"""Policies and CIDR groups of the store, decoded and handed to the engine.

Called by the agent's policy duty and by tests, under the node's turn. Never asks the store. Invariant: an object that
cannot be read changes nothing: its earlier version stays in force, and `problems` names it.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from podwire.control.policy.engine import PolicyEngine
from podwire.control.policy.rule import CidrGroup, PolicyId, PolicyRules
from podwire.control.policy.rules_cilium import (
    KIND,
    KIND_CLUSTERWIDE,
    decode_cidr_group,
    decode_cilium_policy,
)
from podwire.control.policy.rules_k8s import KIND as KIND_K8S
from podwire.control.policy.rules_k8s import decode_network_policy
from podwire.model.errors import InvalidRequest
from podwire.model.store import ObjectKey, Revisions, StoredObject, StoreEvent, value_of

GROUPS: Final = "ciliumcidrgroups"

_log = logging.getLogger(__name__)

Decode = Callable[[Mapping[str, Any]], tuple[PolicyRules, ...]]


def _decode_k8s(document: Mapping[str, Any]) -> tuple[PolicyRules, ...]:
    return (decode_network_policy(document),)


_DECODERS: Final[Mapping[str, tuple[str, Decode]]] = {
    "networkpolicies": (KIND_K8S, _decode_k8s),
    "ciliumnetworkpolicies": (KIND, decode_cilium_policy),
    "ciliumclusterwidenetworkpolicies": (KIND_CLUSTERWIDE, decode_cilium_policy),
}
POLICY_KINDS: Final = (*_DECODERS, GROUPS)
"""Kinds of the store that are policy."""


class PolicyObjects:
    """What the store has of policy, as this node understands it."""

    def __init__(self, engine: PolicyEngine) -> None:
        self._engine = engine
        self.rules: dict[PolicyId, tuple[PolicyRules, ...]] = {}
        """Policies in force, for traces and lists."""
        self.groups: dict[str, CidrGroup] = {}
        self.problems: dict[ObjectKey, str] = {}
        """Objects whose newest version is not in force, and why."""
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
            self.problems[key] = error.message
            _log.error(
                "a policy cannot be read; its last readable version stays in force",
                extra={"object": str(key), "error": error.message},
            )
        except Exception as error:
            self.bugs += 1
            self.problems[key] = f"{type(error).__name__}: {error}"
            _log.exception("a policy met a bug", extra={"object": str(key)})
        else:
            self.problems.pop(key, None)

    def _put(self, stored: StoredObject) -> None:
        key = stored.key
        self._known.add(key)
        if stored.fault:
            raise InvalidRequest(stored.fault)
        if key.kind == GROUPS:
            group = value_of(stored, CidrGroup) or decode_cidr_group(stored.document)
            self._engine.set_group(group)
            self.groups[key.name] = group
        else:
            policy_id, decode = name_policy(key), _DECODERS[key.kind][1]
            rules = value_of(stored, tuple) or decode(stored.document)
            self._engine.set_policy(policy_id, rules)
            self.rules[policy_id] = rules

    def _remove(self, key: ObjectKey) -> None:
        if key.kind == GROUPS:
            if key.name in self.groups:
                self._engine.remove_group(key.name)
                del self.groups[key.name]
        elif (policy_id := name_policy(key)) in self.rules:
            self._engine.remove_policy(policy_id)
            del self.rules[policy_id]
        # Only now: what could not be removed is tried again with the next list.
        self._known.discard(key)


def oldest_revision(revisions: Revisions) -> int:
    """Give a revision up to which every kind of policy was taken in; 0 while one of them was not."""
    return min(revisions.get(kind, 0) for kind in POLICY_KINDS)


def name_policy(key: ObjectKey) -> PolicyId:
    """Give a policy's name as rules carry it."""
    return PolicyId(_DECODERS[key.kind][0], key.namespace, key.name)
