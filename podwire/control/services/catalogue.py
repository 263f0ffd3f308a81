"""All services, and what the programs translate because of them.

Called by `agent.duties.cluster.services`, one thread at a time. Pure. Objects are taken in one by one; `take_change`
computes anew only what they touch, so that one slice of ten thousand services costs what it has. Invariant: a frontend
belongs to one service: of two that claim one address and port the one whose cluster address it is has it, then the
older, whoever was heard first.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from podwire.control.services.choose import Candidate, Place, choose_local, choose_near
from podwire.control.services.facts import (
    ServiceFacts,
    ServiceName,
    SliceFacts,
    decode_service,
    decode_slice,
)
from podwire.control.services.room import Need, Room
from podwire.control.services.selected import SelectedPods
from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.interfaces import Affinity, BackEnd, Frontend, ServiceTable
from podwire.model.store import ObjectKey, StoredObject, StoreEvent
from podwire.model.store.kinds import ENDPOINT_SLICE, SERVICE

KINDS: Final = (SERVICE.plural, ENDPOINT_SLICE.plural)

Claims = Mapping[Frontend, tuple[BackEnd, ...]]


@dataclass(frozen=True)
class ServiceChange:
    """What is to be translated from now on, beside what is already."""

    put: ServiceTable
    gone: Sequence[Frontend]
    affinity: Affinity
    """Of `put`."""
    touched: Collection[ServiceName] = ()
    """The services that were computed anew."""


@dataclass(frozen=True)
class ServiceCounts:
    """How many there are, for metrics."""

    translated: int
    left: Mapping[str, int]
    """Services of which something is left to the stack, by reason."""
    known: int
    frontends: int
    back_ends: int
    """In all lists together."""


@dataclass(frozen=True)
class ServiceView:
    """One service as this node knows it, for people."""

    name: ServiceName
    claims: Claims
    is_translated: bool
    problem: str


@dataclass(frozen=True, slots=True)
class _Claimed:
    """What one service claims, as old as the claims, because objects may have gone since."""

    claims: Claims
    created: str
    external: tuple[IPAddress, ...]
    affinity_s: int


_NOTHING: Final = _Claimed({}, "", (), 0)


@dataclass
class Catalogue:
    """What is known of services."""

    place: Place
    """Where the pods are that ask."""
    pods: Sequence[IPNetwork] = ()
    """The ranges of all pods, as far as they are known."""
    selected: SelectedPods | None = None
    """Pods that services choose by labels; None where a controller writes EndpointSlices of them."""
    room: Room = field(default_factory=Room)
    _services: dict[ServiceName, ServiceFacts] = field(default_factory=dict)
    _slices: dict[ServiceName, dict[ObjectKey, SliceFacts]] = field(default_factory=dict)
    _slice_owner: dict[ObjectKey, ServiceName] = field(default_factory=dict)
    _claimed: dict[ServiceName, _Claimed] = field(default_factory=dict)
    _claimants: dict[Frontend, tuple[ServiceName, ...]] = field(default_factory=dict)
    """The first one has it."""
    _dirty: set[ServiceName] = field(default_factory=set)

    def replace(self, kind: str, objects: Sequence[StoredObject]) -> None:
        """Take in a whole list of one of KINDS."""
        if kind == SERVICE.plural:
            given = {stored.key for stored in objects}
            for name in list(self._services):
                if (key := ObjectKey(kind, name.namespace, name.name)) not in given:
                    self._forget(key)
        else:
            self._dirty |= self._slices.keys()
            self._slices, self._slice_owner = {}, {}
        for stored in objects:
            self._take_in(stored)

    def move(self, place: Place) -> None:
        """Take in that this node is elsewhere: other hints are for it."""
        if place != self.place:
            self.place = place
            self._dirty |= self._services.keys()

    def apply(self, event: StoreEvent) -> None:
        """Take in one change."""
        if event.deleted:
            self._forget(event.object.key)
        else:
            self._take_in(event.object)

    def change_pods(self, change: Callable[[SelectedPods], set[ServiceName]]) -> None:
        """Have pods taken in by whom services choose them."""
        if self.selected is not None:
            self._dirty |= change(self.selected)

    def _take_in(self, stored: StoredObject) -> None:
        if stored.key.kind == SERVICE.plural:
            service = decode_service(stored, self.pods)
            if service is None:
                self._forget(stored.key)
                return
            self._services[service.name] = service
            self._dirty.add(service.name)
            if self.selected is not None:
                self.selected.put_service(service)
            return
        self._forget(stored.key)
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
                if self.selected is not None:
                    self.selected.remove_service(name)
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
        for name, new in self._claim_all(dirty).items():
            old = self._claimed.get(name, _NOTHING)
            # Made anew it is younger, and what it claims may be another's now.
            is_renewed = (old.created, old.external, old.affinity_s) != (
                new.created,
                new.external,
                new.affinity_s,
            )
            changed = {
                frontend
                for frontend in (*old.claims, *new.claims)
                if is_renewed or old.claims.get(frontend) != new.claims.get(frontend)
            }
            if new.claims:
                self._claimed[name] = new
            else:
                self._claimed.pop(name, None)
            for frontend in changed:
                self._stand_in_line(frontend, name, wanted=frontend in new.claims)
            touched |= changed
        put, gone = self._settle(touched)
        return ServiceChange(put, gone, self.affinity(put), dirty)

    def _claim_all(self, dirty: Iterable[ServiceName]) -> Mapping[ServiceName, _Claimed]:
        """Compute what these claim, and what others do who get or lose room by it."""
        wanted = {name: self._claim(name) for name in dirty}
        for name, new in wanted.items():
            # With affinity each back end has two rows (datapath.service_maps).
            slots = sum(map(len, new.claims.values())) * (2 if new.affinity_s else 1)
            need = Need(new.created, len(new.claims), slots) if new.claims else None
            self.room.weigh(name, need)
        wanted |= {name: self._claim(name) for name in self.room.settle() if name not in wanted}
        return wanted | dict.fromkeys(self.room.refused & wanted.keys(), _NOTHING)

    def _stand_in_line(self, frontend: Frontend, name: ServiceName, *, wanted: bool) -> None:
        line = [claimant for claimant in self._claimants.get(frontend, ()) if claimant != name]
        if wanted:
            line = sorted((*line, name), key=lambda claimant: self._rank(claimant, frontend))
        if line:
            self._claimants[frontend] = tuple(line)
        else:
            self._claimants.pop(frontend, None)

    def _rank(self, name: ServiceName, frontend: Frontend) -> tuple[bool, str, ServiceName]:
        claimed = self._claimed[name]
        return frontend.address in claimed.external, claimed.created, name

    def _settle(self, touched: Iterable[Frontend]) -> tuple[ServiceTable, list[Frontend]]:
        put: dict[Frontend, Sequence[BackEnd]] = {}
        gone: list[Frontend] = []
        for frontend in touched:
            holder = self.holder(frontend)
            if holder is None:
                gone.append(frontend)
            else:
                put[frontend] = self._claimed[holder].claims[frontend]
        return put, gone

    def holder(self, frontend: Frontend) -> ServiceName | None:
        """Say whose an address and port are; from any thread."""
        line = self._claimants.get(frontend)
        return line[0] if line else None

    def table(self) -> ServiceTable:
        """Give everything that is translated; after `take_change`."""
        return {
            frontend: self._claimed[line[0]].claims[frontend]
            for frontend, line in self._claimants.items()
        }

    def affinity(self, table: ServiceTable) -> Affinity:
        """Give for how long pods keep their back ends, of a part of `table`; after `take_change`."""
        kept = {one: self._claimed[self._claimants[one][0]].affinity_s for one in table if one.port}
        return {one: affinity_s for one, affinity_s in kept.items() if affinity_s}

    def views(self) -> Iterator[ServiceView]:
        """Show every service, by name; after `take_change`."""
        for _, service in sorted(self._services.items()):
            yield self._view(service)

    def view(self, name: ServiceName) -> ServiceView | None:
        """Show one service; None: there is none."""
        service = self._services.get(name)
        return self._view(service) if service is not None else None

    def _view(self, service: ServiceFacts) -> ServiceView:
        name = service.name
        claims = self._claimed.get(name, _NOTHING).claims
        others = {
            str(holder)
            for frontend in claims
            if (holder := self.holder(frontend)) not in (None, name)
        }
        problems = [left.message for left in service.left]
        if others:
            problems.append(f"an address or port is that of {', '.join(sorted(others))}")
        if name in self.room.refused:
            problems.append("there is no room for it beside the older services")
        shown = claims or self._resolve(service)
        return ServiceView(name, shown, bool(claims), "; ".join(problems))

    def count(self) -> ServiceCounts:
        """Count what there is; from any thread."""
        known, claimed = list(self._services.values()), list(self._claimed.values())
        left = Counter(reason for one in known for reason in {left.reason for left in one.left})
        if self.room.refused:
            left["no-room"] = len(self.room.refused)
        return ServiceCounts(
            translated=len(claimed),
            left=left,
            known=len(known),
            frontends=len(self._claimants),
            back_ends=sum(len(ends) for one in claimed for ends in one.claims.values()),
        )

    def list_lacking(self, names: Iterable[ServiceName]) -> Iterator[ServiceFacts]:
        """Give those of which something is left to the stack, and of which this node has a back end."""
        for name in names:
            service = self._services.get(name)
            if service is not None and service.left and self._has_local_back_end(name):
                yield service

    def _has_local_back_end(self, name: ServiceName) -> bool:
        slices = self._slices.get(name, {}).values()
        return any(
            endpoint.node == self.place.node for slice_ in slices for endpoint in slice_.endpoints
        )

    def _claim(self, name: ServiceName) -> _Claimed:
        service = self._services.get(name)
        if service is None or service.is_left:
            return _NOTHING
        claims = self._resolve(service)
        if not claims:
            return _NOTHING
        return _Claimed(claims, service.created, service.external, service.affinity_s)

    def _resolve(self, service: ServiceFacts) -> Claims:
        slices = list(self._slices.get(service.name, {}).values())
        if self.selected is not None:
            slices += self.selected.slices(service)
        claims: dict[Frontend, tuple[BackEnd, ...]] = {}
        # What a pod sends to an external address may leave this node, whatever externalTrafficPolicy says.
        choosing = dict.fromkeys(service.external, choose_near) | dict.fromkeys(
            service.addresses, choose_local if service.is_local_only else choose_near
        )
        for port in service.ports:
            chosen: dict[
                object, tuple[BackEnd, ...]
            ] = {}  # one list for all addresses that share it
            for address, choose in choosing.items():
                key = address.version, choose
                if key not in chosen:
                    listed = _list_back_ends(slices, (port.name, port.protocol), address.version)
                    chosen[key] = _in_order(choose(listed, self.place))
                claims[Frontend(address, port.port, port.protocol)] = chosen[key]
        if service.ports:
            claims |= {Frontend(address): () for address in service.addresses}
        return claims


def _in_order(back_ends: Iterable[BackEnd]) -> tuple[BackEnd, ...]:
    return tuple(sorted(back_ends, key=lambda back_end: (back_end.address.packed, back_end.port)))


def _list_back_ends(
    slices: Iterable[SliceFacts], port: tuple[str, int], version: int
) -> Iterator[Candidate]:
    for slice_ in slices:
        number = slice_.ports.get(port)
        if number is None:
            continue
        for address, endpoint in zip(slice_.addresses, slice_.endpoints, strict=True):
            if address.version == version:
                yield BackEnd(address, number, port[1]), endpoint
