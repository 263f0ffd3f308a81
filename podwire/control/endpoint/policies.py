"""Policies and CIDR groups of the store, decoded and handed to the engine.

Called by the agent's store feed and by tests, under the node's turn. Never asks the store. Invariant: an object that
cannot be read changes nothing: what was in force of it stays, and `problems` names it.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
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
from podwire.model.store import ObjectKey, StoredObject, StoreEvent

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
        self._known: set[ObjectKey] = set()

    def replace(self, kind: str, objects: Sequence[StoredObject]) -> None:
        """Take in a whole list of one kind."""
        listed = {one.key for one in objects}
        for key in [one for one in self._known if one.kind == kind and one not in listed]:
            self._remove(key)
        for one in objects:
            self._put(one)

    def apply(self, event: StoreEvent) -> None:
        """Take in one change."""
        if event.deleted:
            self._remove(event.object.key)
        else:
            self._put(event.object)

    def _put(self, stored: StoredObject) -> None:
        key = stored.key
        self._known.add(key)
        try:
            if key.kind == GROUPS:
                group = decode_cidr_group(stored.document)
                self.groups[key.name] = group
                self._engine.set_group(group)
            else:
                policy_id, decode = name_policy(key), _DECODERS[key.kind][1]
                rules = decode(stored.document)
                self.rules[policy_id] = rules
                self._engine.set_policy(policy_id, rules)
        except InvalidRequest as error:
            self.problems[key] = error.message
            _log.error(
                "a policy cannot be read; its last readable version stays in force",
                extra={"object": str(key), "error": error.message},
            )
        else:
            self.problems.pop(key, None)

    def _remove(self, key: ObjectKey) -> None:
        self._known.discard(key)
        self.problems.pop(key, None)
        if key.kind == GROUPS:
            if self.groups.pop(key.name, None) is not None:
                self._engine.remove_group(key.name)
        elif self.rules.pop(name_policy(key), None) is not None:
            self._engine.remove_policy(name_policy(key))


def name_policy(key: ObjectKey) -> PolicyId:
    """Give a policy's name as rules carry it."""
    return PolicyId(_DECODERS[key.kind][0], key.namespace, key.name)
