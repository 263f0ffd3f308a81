"""Services that name their pods by labels, where no controller writes EndpointSlices: without Kubernetes.

Owned by `control.services.catalogue`, fed by `agent.duties.cluster.services`. Pure. Every pod that is published counts
as ready, because nobody probes it. Invariant: what `slices` gives follows from the pods, identities and services that
were put in, whatever came first. Only `selects` may be called from another thread.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from podwire.control.services.facts import (
    Endpoint,
    ServiceFacts,
    ServiceName,
    ServicePort,
    SliceFacts,
)
from podwire.model.endpoint import IPAddress
from podwire.model.identity import IdentityFacts
from podwire.model.labels import NAMESPACE_KEY, SOURCE_K8S, SOURCE_RESERVED, split_label

Labels = frozenset[tuple[str, str]]
FindFacts = Callable[[int], IdentityFacts | None]
"""What an identity means; None while nobody has said."""

_NOBODY: Final = frozenset[ServiceName]()
_ELSEWHERE: Final = ""
"""The node of pods of other nodes: all that counts is that it is not this one."""


@dataclass
class SelectedPods:
    """Which pods answer for which services."""

    node: str
    find_facts: FindFacts
    _asking: dict[ServiceName, ServiceFacts] = field(default_factory=dict)
    _pods: dict[IPAddress, int] = field(default_factory=dict)
    _own: set[IPAddress] = field(default_factory=set)
    _by_identity: dict[int, set[IPAddress]] = field(default_factory=dict)
    _chosen_by: dict[int, frozenset[ServiceName]] = field(default_factory=dict)
    """The services that choose an identity, of every identity that pods have or had: others ask about the last one
    when it is gone."""

    @property
    def is_asked(self) -> bool:
        """Whether any service names its pods by labels."""
        return bool(self._asking)

    def selects(self, identity: int) -> bool:
        """Tell whether any service chooses pods of an identity; from any thread."""
        return bool(self._chosen_by.get(identity))

    def put_service(self, service: ServiceFacts) -> None:
        """Take in a service, with a selector or without."""
        self.remove_service(service.name)
        if not service.selector:
            return
        self._asking[service.name] = service
        for identity, chosen_by in self._chosen_by.items():
            if self._is_chosen(service, identity):
                self._chosen_by[identity] = chosen_by | {service.name}

    def remove_service(self, name: ServiceName) -> None:
        """Forget a service."""
        if self._asking.pop(name, None) is not None:
            for identity, chosen_by in self._chosen_by.items():
                self._chosen_by[identity] = chosen_by - {name}

    def forget_pods(self) -> None:
        """Forget all pods: nobody asks for any, and there may be many."""
        self._pods.clear()
        self._own.clear()
        self._by_identity.clear()
        self._chosen_by.clear()

    def replace_own(self, pods: Mapping[IPAddress, int]) -> set[ServiceName]:
        """Take all pods of this node; gives the services that this is about."""
        return self._replace(pods, self._own, own=True)

    def replace_others(self, pods: Mapping[IPAddress, int]) -> set[ServiceName]:
        """Take all pods of other nodes."""
        return self._replace(pods, self._pods.keys() - self._own, own=False)

    def change_others(self, pods: Mapping[IPAddress, int | None]) -> set[ServiceName]:
        """Take changes of pods of other nodes; None: there is no such pod any more."""
        touched: set[ServiceName] = set()
        for address, identity in pods.items():
            if address not in self._own:  # this node knows best
                touched |= self._put(address, identity, own=False)
        return touched

    def learn(self, identities: Iterable[int]) -> set[ServiceName]:
        """Hear that identities mean something, something else, or nothing any more."""
        touched: set[ServiceName] = set()
        for identity in identities:
            if identity in self._chosen_by:
                touched |= self._chosen_by[identity]
                self._chosen_by[identity] = self._find_choosing(identity)
                touched |= self._chosen_by[identity]
        return touched

    def slices(self, service: ServiceFacts) -> Iterator[SliceFacts]:
        """Give the pods of a service as a controller would write them down: one slice for each identity and node."""
        if service.name not in self._asking:
            return
        for identity, chosen_by in self._chosen_by.items():
            facts = self.find_facts(identity) if service.name in chosen_by else None
            if facts is None:
                continue
            ports = dict(_list_ports(service.ports, facts))
            addresses = self._by_identity[identity]
            for node, here in (
                (self.node, addresses & self._own),
                (_ELSEWHERE, addresses - self._own),
            ):
                hints = frozenset({node} if service.prefers_node else ())
                endpoint = Endpoint(True, False, node, hints)
                if here:
                    yield SliceFacts(service.name, ports, tuple(here), (endpoint,) * len(here))

    def _replace(
        self, pods: Mapping[IPAddress, int], before: Iterable[IPAddress], *, own: bool
    ) -> set[ServiceName]:
        touched: set[ServiceName] = set()
        for address in [known for known in before if known not in pods]:
            touched |= self._put(address, None, own=own)
        for address, identity in pods.items():
            if own or address not in self._own:
                touched |= self._put(address, identity, own=own)
        return touched

    def _put(self, address: IPAddress, identity: int | None, *, own: bool) -> set[ServiceName]:
        """Note whose an address is; gives the services for which that makes a difference."""
        before, was_own = self._pods.get(address), address in self._own
        if before == identity and was_own == own:
            return set()
        touched: set[ServiceName] = set()
        if before is not None:
            touched |= self._chosen_by.get(before, _NOBODY)
            self._by_identity[before].discard(address)
            del self._pods[address]
            self._own.discard(address)
        if identity is None:
            return touched
        self._pods[address] = identity
        if own:
            self._own.add(address)
        if identity not in self._by_identity:
            self._by_identity[identity] = set()
            self._chosen_by[identity] = self._find_choosing(identity)
        self._by_identity[identity].add(address)
        return touched | self._chosen_by[identity]

    def _find_choosing(self, identity: int) -> frozenset[ServiceName]:
        facts = self.find_facts(identity)
        if facts is None:
            return _NOBODY
        namespace, labels = _read_labels(facts)
        return frozenset(
            name
            for name, service in self._asking.items()
            if name.namespace == namespace and labels.issuperset(service.selector)
        )

    def _is_chosen(self, service: ServiceFacts, identity: int) -> bool:
        facts = self.find_facts(identity)
        if facts is None:
            return False
        namespace, labels = _read_labels(facts)
        return service.name.namespace == namespace and labels.issuperset(service.selector)


def _read_labels(facts: IdentityFacts) -> tuple[str, Labels]:
    """Give namespace and labels. A key of a selector names no source, and means each but `reserved`."""
    namespace, labels = "", set[tuple[str, str]]()
    for label in map(split_label, facts.labels):
        if label.source == SOURCE_K8S and label.key == NAMESPACE_KEY:
            namespace = label.value
        elif label.source != SOURCE_RESERVED:
            labels.add((label.key, label.value))
    return namespace, frozenset(labels)


def _list_ports(
    ports: Iterable[ServicePort], facts: IdentityFacts
) -> Iterator[tuple[tuple[str, int], int]]:
    """Give the numbers that ports of a service have at pods of an identity; one of a name that they lack has none."""
    named = {
        (named_port.name, named_port.protocol): named_port.port for named_port in facts.named_ports
    }
    for port in ports:
        if isinstance(port.target, int):
            yield (port.name, port.protocol), port.target or port.port
        elif (number := named.get((port.target, port.protocol))) is not None:
            yield (port.name, port.protocol), number
