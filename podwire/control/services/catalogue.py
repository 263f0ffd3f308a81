"""All services, and what the programs translate because of them.

Called by `agent.duties.cluster.services`, one thread at a time. Pure. Objects are taken in one by one; `take_change`
computes anew only what they touch, so that one slice of ten thousand services costs what it has. Invariant: a frontend
belongs to one service: of two that claim one address and port the older has it, whoever was heard first.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from podwire.control.services.facts import (
    Endpoint,
    ServiceFacts,
    ServiceName,
    SliceFacts,
    decode_service,
    decode_slice,
)
from podwire.model.interfaces import BackEnd, Frontend, ServiceTable
from podwire.model.store import ObjectKey, StoredObject, StoreEvent
from podwire.model.store.kinds import ENDPOINT_SLICE, SERVICE

KINDS: Final = (SERVICE.plural, ENDPOINT_SLICE.plural)

Claims = Mapping[Frontend, tuple[BackEnd, ...]]


@dataclass(frozen=True)
class ServiceChange:
    """What is to be translated from now on, beside what is already."""

    put: ServiceTable
    gone: Sequence[Frontend]


@dataclass(frozen=True)
class ServiceView:
    """One service as this node knows it, for people."""

    name: ServiceName
    claims: Claims
    is_translated: bool
    problem: str


@dataclass
class Catalogue:
    """What is known of services."""

    node: str
    """This node's name: what is local."""
    _services: dict[ServiceName, ServiceFacts] = field(default_factory=dict)
    _slices: dict[ServiceName, dict[ObjectKey, SliceFacts]] = field(default_factory=dict)
    _slice_owner: dict[ObjectKey, ServiceName] = field(default_factory=dict)
    _claims: dict[ServiceName, Claims] = field(default_factory=dict)
    _created: dict[ServiceName, str] = field(default_factory=dict)
    """When the services with claims were made; as old as the claims, because objects may have gone since."""
    _claimants: dict[Frontend, set[ServiceName]] = field(default_factory=dict)
    _dirty: set[ServiceName] = field(default_factory=set)

    def replace(self, kind: str, objects: Sequence[StoredObject]) -> None:
        """Take in a whole list of one of KINDS."""
        if kind == SERVICE.plural:
            self._dirty |= self._services.keys()
            self._services = {}
        else:
            self._dirty |= self._slices.keys()
            self._slices, self._slice_owner = {}, {}
        for stored in objects:
            self._take_in(stored)

    def apply(self, event: StoreEvent) -> None:
        """Take in one change."""
        if event.deleted:
            self._forget(event.object.key)
        else:
            self._take_in(event.object)

    def _take_in(self, stored: StoredObject) -> None:
        self._forget(stored.key)
        if stored.key.kind == SERVICE.plural:
            service = decode_service(stored)
            if service is not None:
                self._services[service.name] = service
                self._dirty.add(service.name)
            return
        slice_ = decode_slice(stored)
        if slice_ is not None:
            self._slices.setdefault(slice_.service, {})[stored.key] = slice_
            self._slice_owner[stored.key] = slice_.service
            self._dirty.add(slice_.service)

    def _forget(self, key: ObjectKey) -> None:
        if key.kind == SERVICE.plural:
            name = ServiceName(key.namespace, key.name)
            if self._services.pop(name, None) is not None:
                self._dirty.add(name)
            return
        owner = self._slice_owner.pop(key, None)
        if owner is not None:
            self._slices[owner].pop(key)
            if not self._slices[owner]:
                del self._slices[owner]
            self._dirty.add(owner)

    def take_change(self) -> ServiceChange:
        """Give what follows from all that was taken in since the last call."""
        dirty, self._dirty = self._dirty, set()
        touched: set[Frontend] = set()
        for name in dirty:
            old, new = self._claims.get(name, {}), self._claim(name)
            created = self._services[name].created if new else ""
            # Made anew it is younger, and what it claims may be another's now.
            is_renewed = self._created.get(name, "") != created
            touched |= {
                frontend
                for frontend in (*old, *new)
                if is_renewed or old.get(frontend) != new.get(frontend)
            }
            for frontend in old.keys() - new.keys():
                self._claimants[frontend].discard(name)
            for frontend in new.keys() - old.keys():
                self._claimants.setdefault(frontend, set()).add(name)
            if new:
                self._claims[name], self._created[name] = new, created
            else:
                self._claims.pop(name, None)
                self._created.pop(name, None)
        return self._settle(touched)

    def _settle(self, touched: Iterable[Frontend]) -> ServiceChange:
        put, gone = {}, []
        for frontend in touched:
            holder = self._holder(frontend)
            if holder is None:
                self._claimants.pop(frontend, None)
                gone.append(frontend)
            else:
                put[frontend] = self._claims[holder][frontend]
        return ServiceChange(put, gone)

    def _holder(self, frontend: Frontend) -> ServiceName | None:
        claimants = self._claimants.get(frontend)
        return min(claimants, key=self._age) if claimants else None

    def _age(self, name: ServiceName) -> tuple[str, ServiceName]:
        return self._created[name], name

    def table(self) -> ServiceTable:
        """Give everything that is translated; after `take_change`."""
        return {
            frontend: self._claims[holder][frontend]
            for frontend in self._claimants
            if (holder := self._holder(frontend)) is not None
        }

    def views(self) -> Iterator[ServiceView]:
        """Show every service, by name; after `take_change`."""
        for name, service in sorted(self._services.items()):
            claims = self._claims.get(name, {})
            others = {
                str(holder)
                for frontend in claims
                if (holder := self._holder(frontend)) not in (None, name)
            }
            problem = service.left_because
            if others:
                problem = f"an address or port is that of {', '.join(sorted(others))}"
            shown = claims or self._resolve(service)
            yield ServiceView(name, shown, bool(claims), problem)

    def _claim(self, name: ServiceName) -> Claims:
        service = self._services.get(name)
        if service is None or service.left_because or not service.addresses:
            return {}
        return self._resolve(service)

    def _resolve(self, service: ServiceFacts) -> Claims:
        slices = self._slices.get(service.name, {}).values()
        claims: dict[Frontend, tuple[BackEnd, ...]] = {}
        for address in service.addresses:
            for port in service.ports:
                back_ends = _choose(
                    _list_back_ends(slices, (port.name, port.protocol), address.version),
                    self.node if service.is_local_only else None,
                )
                claims[Frontend(address, port.port, port.protocol)] = tuple(
                    sorted(back_ends, key=lambda one: (one.address.packed, one.port))
                )
            if service.ports:
                claims[Frontend(address)] = ()
        return claims


def _list_back_ends(
    slices: Iterable[SliceFacts], port: tuple[str, int], version: int
) -> Iterator[tuple[BackEnd, Endpoint]]:
    for one in slices:
        number = one.ports.get(port)
        if number is None:
            continue
        for endpoint in one.endpoints:
            for address in endpoint.addresses:
                if address.version == version:
                    yield BackEnd(address, number, port[1]), endpoint


def _choose(candidates: Iterable[tuple[BackEnd, Endpoint]], node: str | None) -> set[BackEnd]:
    """Take those that are ready; without any, those that drain (as kube-proxy). `node`: only of this one."""
    here = [(one, endpoint) for one, endpoint in candidates if node in (None, endpoint.node)]
    ready = {one for one, endpoint in here if endpoint.is_ready}
    return ready or {one for one, endpoint in here if endpoint.is_draining}
