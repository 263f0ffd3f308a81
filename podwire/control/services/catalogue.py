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

import msgspec

from podwire.control.services.choose import Candidate, Place, choose_local, choose_near
from podwire.control.services.facts import (
    ServiceFacts,
    ServiceName,
    SliceFacts,
    decode_service,
    decode_slice,
)
from podwire.control.services.reading import Left
from podwire.control.services.records import (
    NOTHING,
    Claimed,
    Claims,
    pack_claims,
    pack_frontend,
    pack_service,
    pack_slice,
    read_slice_service,
    unpack_claims,
    unpack_frontend,
    unpack_service,
    unpack_slice,
)
from podwire.control.services.room import Need, Room
from podwire.control.services.sctp import is_translated, keeps_port, list_left_ports, stack_of
from podwire.control.services.selected import SelectedPods
from podwire.model.endpoint import IPNetwork
from podwire.model.interfaces import Affinity, BackEnd, Frontend, ServiceTable
from podwire.model.store import ObjectKey, StoredObject, StoreEvent
from podwire.model.store.kinds import ENDPOINT_SLICE, SERVICE

KINDS: Final = (SERVICE.plural, ENDPOINT_SLICE.plural)
NO_ROOM: Final = Left("no-room", "there is no room for it beside the other services")


class ServiceChange(msgspec.Struct, frozen=True):
    """What is to be translated from now on, beside what is already."""

    put: ServiceTable
    gone: Sequence[Frontend]
    affinity: Affinity
    """Of `put`."""
    touched: Collection[ServiceName] = ()
    """The services that were computed anew."""


class ServiceCounts(msgspec.Struct, frozen=True):
    """How many there are, for metrics."""

    translated: int
    left: Mapping[str, int]
    """Services of which something is left to the stack, by reason."""
    known: int
    frontends: int
    back_ends: int
    """In all lists together."""


class ServiceView(msgspec.Struct, frozen=True):
    """One service as this node knows it, for people."""

    name: ServiceName
    claims: Claims
    is_translated: bool
    problem: str


@dataclass(slots=True)
class _Known:
    """What is known of one service, in records: there may be ten thousand (`control.services.records`)."""

    name: ServiceName
    service: bytes = b""
    claims: bytes = b""
    slices: tuple[str, ...] = ()
    """Under which its slices are kept."""


class ClaimTable(Mapping[Frontend, Sequence[BackEnd]]):
    """Some frontends with those who answer; read from the claims of their holders when it is asked for."""

    def __init__(self, keys: Collection[bytes], find: Callable[[bytes], bytes]) -> None:
        self._keys = keys
        self._find = find
        self._last: tuple[bytes, Claims] = b"", {}
        """The claims that were read last: those of one service are asked for in a row."""

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Frontend]:
        return map(unpack_frontend, self._keys)

    def __contains__(self, frontend: object) -> bool:
        return isinstance(frontend, Frontend) and pack_frontend(frontend) in self._keys

    def __getitem__(self, frontend: Frontend) -> Sequence[BackEnd]:
        key = pack_frontend(frontend)
        if key not in self._keys:
            raise KeyError(frontend)
        record = self._find(key)
        if record is not self._last[0]:
            self._last = record, unpack_claims(record).claims
        return self._last[1][frontend]


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
    _known: dict[ServiceName, _Known] = field(default_factory=dict)
    _slices: dict[str, bytes] = field(default_factory=dict)
    """By namespace and name."""
    _claimants: dict[bytes, ServiceName | tuple[ServiceName, ...]] = field(default_factory=dict)
    """By frontend who claims it, where there are several in a line: the first one has it."""
    _affinity_s: dict[ServiceName, int] = field(default_factory=dict)
    """Of those services whose claims have any."""
    _left: dict[ServiceName, tuple[Left, ...]] = field(default_factory=dict)
    """Of those services of which something is left to the stack, whoever answers."""
    _left_ports: dict[ServiceName, tuple[Left, ...]] = field(default_factory=dict)
    """Of those some of whose ports are, because of the back ends that answer."""
    _totals: Counter[str] = field(default_factory=Counter)
    _dirty: set[ServiceName] = field(default_factory=set)

    def replace(self, kind: str, objects: Sequence[StoredObject]) -> None:
        """Take in a whole list of one of KINDS."""
        if kind == SERVICE.plural:
            given = {(stored.key.namespace, stored.key.name) for stored in objects}
            for name in list(self._known):
                if (name.namespace, name.name) not in given:
                    self._forget_service(name)
        else:
            for known in self._known.values():
                if known.slices:
                    known.slices = ()
                    self._dirty.add(known.name)
            self._slices = {}
        for stored in objects:
            self._take_in(stored)

    def move(self, place: Place) -> None:
        """Take in that this node is elsewhere: other hints are for it."""
        if place != self.place:
            self.place = place
            self._dirty |= self._known.keys()

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
        if stored.key.kind != SERVICE.plural:
            self._take_slice(stored)
            return
        service = decode_service(stored, self.pods)
        if service is None:
            self._forget(stored.key)
            return
        known = self._note(service.name)
        self._totals["known"] += not known.service
        known.service = pack_service(service)
        if service.left:
            self._left[known.name] = service.left
        else:
            self._left.pop(known.name, None)
        if self.selected is not None:
            self.selected.put_service(service)

    def _take_slice(self, stored: StoredObject) -> None:
        self._forget(stored.key)
        slice_ = decode_slice(stored)
        if slice_ is not None:
            known, key = self._note(slice_.service), _slice_key(stored.key)
            self._slices[key] = pack_slice(slice_)
            known.slices = (*known.slices, key)

    def _note(self, name: ServiceName) -> _Known:
        """Give what is known of a service of which something is new."""
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = _Known(name)
        self._dirty.add(known.name)
        return known

    def _forget(self, key: ObjectKey) -> None:
        if key.kind == SERVICE.plural:
            self._forget_service(ServiceName(key.namespace, key.name))
            return
        record = self._slices.pop(_slice_key(key), None)
        if record is not None:
            known = self._note(read_slice_service(key.namespace, record))
            known.slices = tuple(slice_ for slice_ in known.slices if slice_ != _slice_key(key))

    def _forget_service(self, name: ServiceName) -> None:
        known = self._known.get(name)
        if known is None or not known.service:
            return
        known.service = b""
        self._dirty.add(known.name)
        self._totals["known"] -= 1
        self._left.pop(name, None)
        if self.selected is not None:
            self.selected.remove_service(name)

    def take_change(self) -> ServiceChange:
        """Give what follows from all that was taken in since the last call."""
        dirty, self._dirty = self._dirty, set()
        touched: dict[bytes, None] = {}
        claims = self._claim_all(dirty)
        for name, record in claims.items():
            touched |= dict.fromkeys(self._exchange(self._known[name], record))
        for known in [self._known[name] for name in dirty]:
            if not (known.service or known.slices or known.claims):
                del self._known[known.name]
        put = self._table_of({key: None for key in touched if key in self._claimants})
        gone = [unpack_frontend(key) for key in touched if key not in self._claimants]
        return ServiceChange(put, gone, self.affinity(put), dirty | claims.keys())

    def _exchange(self, known: _Known, record: bytes) -> Sequence[bytes]:
        """Put the claims of a service in the place of those before; gives the frontends that this is about."""
        if record == known.claims:
            return ()
        old, new = unpack_claims(known.claims), unpack_claims(record)
        known.claims = record
        self._totals["translated"] += is_translated(new.claims) - is_translated(old.claims)
        self._totals["back ends"] += _count_back_ends(new) - _count_back_ends(old)
        if new.affinity_s:
            self._affinity_s[known.name] = new.affinity_s
        else:
            self._affinity_s.pop(known.name, None)
        if left := list_left_ports(new.claims):
            self._left_ports[known.name] = left
        else:
            self._left_ports.pop(known.name, None)
        # Made anew it is younger, and what it claims may be another's now.
        is_renewed = (old.created, old.external, old.affinity_s) != (
            new.created,
            new.external,
            new.affinity_s,
        )
        changed = [
            frontend
            for frontend in {**old.claims, **new.claims}
            if is_renewed or old.claims.get(frontend) != new.claims.get(frontend)
        ]
        for frontend in changed:
            self._stand_in_line(frontend, known.name, wanted=frontend in new.claims)
        return [pack_frontend(frontend) for frontend in changed]

    def _claim_all(self, dirty: Iterable[ServiceName]) -> Mapping[ServiceName, bytes]:
        """Compute what these claim, and what others do who get or lose room by it."""
        wanted: dict[ServiceName, bytes] = {}
        for name in dirty:
            new = self._claim(name)
            # With affinity each back end has two rows (datapath.service_maps).
            slots = _count_back_ends(new) * (2 if new.affinity_s else 1)
            need = Need(new.created, len(new.claims), slots) if new.claims else None
            self.room.weigh(name, need)
            wanted[name] = pack_claims(new)
        for name in self.room.settle():
            if name not in wanted:
                wanted[name] = pack_claims(self._claim(name))
        return wanted | dict.fromkeys(self.room.refused & wanted.keys(), b"")

    def _stand_in_line(self, frontend: Frontend, name: ServiceName, *, wanted: bool) -> None:
        key = pack_frontend(frontend)
        line = [claimant for claimant in self._line(key) if claimant != name]
        if wanted:
            line.append(name)
        if len(line) > 1:
            line.sort(key=lambda claimant: self._rank(claimant, frontend))
            self._claimants[key] = tuple(line)
        elif line:
            self._claimants[key] = line[0]
        else:
            self._claimants.pop(key, None)

    def _line(self, key: bytes) -> tuple[ServiceName, ...]:
        claimants = self._claimants.get(key, ())
        return claimants if isinstance(claimants, tuple) else (claimants,)

    def _rank(self, name: ServiceName, frontend: Frontend) -> tuple[bool, str, ServiceName]:
        claimed = unpack_claims(self._known[name].claims)
        return frontend.address in claimed.external, claimed.created, name

    def holder(self, frontend: Frontend) -> ServiceName | None:
        """Say whose an address and port are; from any thread."""
        return next(iter(self._line(pack_frontend(frontend))), None)

    def table(self) -> ServiceTable:
        """Give everything that is translated; after `take_change`, and until the next one."""
        return self._table_of(self._claimants)

    def _table_of(self, keys: Collection[bytes]) -> ServiceTable:
        return ClaimTable(keys, lambda key: self._known[self._line(key)[0]].claims)

    def affinity(self, table: ServiceTable) -> Affinity:
        """Give for how long pods keep their back ends, of a part of `table`; after `take_change`."""
        if not self._affinity_s:
            return {}
        kept = {
            frontend: self._affinity_s.get(self._line(pack_frontend(frontend))[0], 0)
            for frontend in table
            if frontend.port
        }
        return {frontend: affinity_s for frontend, affinity_s in kept.items() if affinity_s}

    def views(self) -> Iterator[ServiceView]:
        """Show every service, by name; after `take_change`."""
        for name in sorted(self._known):
            if (service := self._service(name)) is not None:
                yield self._view(service)

    def view(self, name: ServiceName) -> ServiceView | None:
        """Show one service; None: there is none."""
        service = self._service(name)
        return self._view(service) if service is not None else None

    def _service(self, name: ServiceName) -> ServiceFacts | None:
        known = self._known.get(name)
        if known is None or not known.service:
            return None
        return unpack_service(known.name, known.service)

    def _view(self, service: ServiceFacts) -> ServiceView:
        name = service.name
        claims = unpack_claims(self._known[name].claims).claims
        others = {
            str(holder)
            for frontend in claims
            if (holder := self.holder(frontend)) not in (None, name)
        }
        problems = [left.message for left in self.left(name)]
        if others:
            problems.append(f"an address or port is that of {', '.join(sorted(others))}")
        shown = claims or self._resolve(service)
        return ServiceView(name, shown, is_translated(claims), "; ".join(problems))

    def count(self) -> ServiceCounts:
        """Count what there is; from any thread."""
        left = Counter(
            reason
            for name in {*list(self._left), *list(self._left_ports)}
            for reason in {why.reason for why in self.left(name)}
        )
        if self.room.refused:
            left[NO_ROOM.reason] = len(self.room.refused)
        return ServiceCounts(
            translated=self._totals["translated"],
            left=left,
            known=self._totals["known"],
            frontends=len(self._claimants),
            back_ends=self._totals["back ends"],
        )

    def left(self, name: ServiceName) -> tuple[Left, ...]:
        """Say what of a service is left to the stack; after `take_change`, from any thread."""
        no_room = (NO_ROOM,) if name in self.room.refused else ()
        return (*self._left.get(name, ()), *self._left_ports.get(name, ()), *no_room)

    def list_lacking(self, names: Iterable[ServiceName]) -> Iterator[ServiceFacts]:
        """Give those of which something is left to the stack, and of which this node has a back end."""
        for name in names:
            if not self.left(name) or not self._has_local_back_end(name):
                continue
            service = self._service(name)
            if service is not None:
                yield service

    def _has_local_back_end(self, name: ServiceName) -> bool:
        return any(
            endpoint.node == self.place.node
            for slice_ in self._slices_of(name)
            for endpoint in slice_.endpoints
        )

    def _slices_of(self, name: ServiceName) -> list[SliceFacts]:
        known = self._known.get(name)
        keys = known.slices if known is not None else ()
        return [unpack_slice(name.namespace, self._slices[key]) for key in keys]

    def _claim(self, name: ServiceName) -> Claimed:
        service = self._service(name)
        if service is None or service.is_left:
            return NOTHING
        claims = self._resolve(service)
        if not claims:
            return NOTHING
        return Claimed(claims, service.created, service.external, service.affinity_s)

    def _resolve(self, service: ServiceFacts) -> Claims:
        slices = self._slices_of(service.name)
        if self.selected is not None:
            slices += self.selected.slices(service)
        claims: dict[Frontend, tuple[BackEnd, ...]] = {}
        # What a pod sends to an external address may leave this node, whatever externalTrafficPolicy says.
        choosing = dict.fromkeys(service.external, choose_near) | dict.fromkeys(
            service.addresses, choose_local if service.is_local_only else choose_near
        )
        for port in service.ports:
            may_translate = keeps_port(port, slices)
            chosen: dict[
                object, tuple[BackEnd, ...]
            ] = {}  # one list for all addresses that share it
            for address, choose in choosing.items():
                key = address.version, choose
                if key not in chosen and not may_translate:
                    chosen[key] = (stack_of(address.version, port.protocol),)
                elif key not in chosen:
                    listed = _list_back_ends(slices, (port.name, port.protocol), address.version)
                    chosen[key] = _in_order(choose(listed, self.place))
                claims[Frontend(address, port.port, port.protocol)] = chosen[key]
        if service.ports:
            claims |= {Frontend(address): () for address in service.addresses}
        return claims


def _slice_key(key: ObjectKey) -> str:
    return f"{key.namespace}/{key.name}"


def _count_back_ends(claimed: Claimed) -> int:
    return sum(map(len, claimed.claims.values()))


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
