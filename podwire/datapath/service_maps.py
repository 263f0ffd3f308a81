"""The maps of services: frontends, their lists of back ends, and back ends.

Called by `datapath.node` under the node's turn, and by the readers behind `podwire bpf service list`. Never decides
what is translated. Invariants: a back end has its row before a slot names it, and a slot its row before a frontend
counts it; rows go the other way round. Flows remember the number of their back end, and a datagram goes on to it for as
long as the number has a row: so a number is used again only when no flow can remember it.
"""

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Final

import msgspec

from podwire.datapath import abi
from podwire.datapath.maps import NodeMaps, from_mapped, to_mapped, u32, write_settings_flag
from podwire.datapath.service_image import (
    SLOT_BYTES,
    BackEndNumbers,
    SlotList,
    SlotLists,
    frontend_key,
    size_of,
)
from podwire.kernel import bpf
from podwire.model.errors import Exhausted
from podwire.model.interfaces import NO_AFFINITY, Affinity, BackEnd, Frontend, ServiceTable

NUMBERS: Final = 1 << 31
NUMBERS_PER_SECOND: Final = 1 << 17
"""Nobody uses them up as fast as that: each is a row written, and some microseconds in Python."""


class ServiceRow(msgspec.Struct, frozen=True):
    """One frontend, for people."""

    frontend: Frontend
    service: int
    slots: tuple[int, ...]
    """Numbers of back ends; 0 where a slot has no row."""
    back_ends: tuple[BackEnd, ...]
    affinity_s: int
    place: int
    """Where pods remember who answered them, where there is affinity."""


def _sum_sizes(put: ServiceTable, affinity: Affinity) -> int:
    return sum(size_of(len(ends), affinity.get(frontend, 0)) for frontend, ends in put.items())


class ServiceMaps:
    """What services have in the maps, and the way to change it. Not thread-safe."""

    def __init__(self, maps: NodeMaps) -> None:
        self._maps = maps
        # What an earlier agent wrote is in force, and its flows remember its numbers.
        self._read()
        # Numbers that were used and are gone leave no row: time says how far they may have come. They come round
        # after four hours; what flows remember of a removed back end ends with their next datagram, or after 120 s.
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._next = int(now_s * NUMBERS_PER_SECOND) % NUMBERS

    def _read(self) -> None:
        """Take what the maps hold for what is in force."""
        self._back_ends = BackEndNumbers()
        self._lists = SlotLists()
        self._more_users: Counter[int] = Counter()
        """In how many slots beside one each back end stands that stands in several."""
        self._idle: set[int] = set()
        """Back ends that stand in none."""
        for _, value in _read_back_ends(self._maps):
            self._back_ends.put(_back_end(value), value.back_end)
            self._idle.add(value.back_end)
        self._read_lists()
        self._list_numbers = {service_list.number for service_list in self._lists.values()}
        self._places = Counter(
            service_list.place for service_list in self._lists.values() if service_list.affinity_s
        )
        self._rows = sum(service_list.size for service_list in self._lists.values())
        for service_list in self._lists.values():
            self._count(service_list.slots, 1)
        self._is_known = True

    def _read_lists(self) -> None:
        """Read the lists, and remove slots of which none knows: an agent was killed while it changed a list."""
        values = [
            abi.ServiceValue.unpack(raw) for _, raw in self._maps.pw_services.items(bpf.Update.LOCK)
        ]
        slots = {value.service: array("I", bytes(SLOT_BYTES * value.back_ends)) for value in values}
        members: list[abi.ServiceSlotKey] = []
        lost: list[bytes] = []
        for key, raw in self._maps.pw_service_list.items():
            at = abi.ServiceSlotKey.unpack(key)
            if at.slot & abi.SLOT_OF_MEMBER:
                members.append(at)
            elif (known := slots.get(at.service)) is not None and at.slot < len(known):
                known[at.slot] = abi.ServiceSlotValue.unpack(raw).back_end
            else:
                lost.append(key)
        kept = {value.service: set(slots[value.service]) for value in values if value.affinity_s}
        lost += [
            at.pack()
            for at in members
            if at.slot & ~abi.SLOT_OF_MEMBER not in kept.get(at.service, ())
        ]
        self._maps.pw_service_list.delete_batch(lost)
        for value in values:
            frontend = Frontend(from_mapped(value.addr), value.port, value.protocol)
            one = SlotList(
                value.service, slots[value.service], value.affinity_s, value.affinity_place
            )
            self._lists.put(frontend, one)

    @property
    def fill(self) -> tuple[int, int]:
        """Give how many frontends are in use, and how many may be."""
        return len(self._lists), self._maps.pw_services.info.max_entries

    def write(self, wanted: ServiceTable, affinity: Affinity = NO_AFFINITY) -> int:
        """Make the maps hold exactly these; gives how many rows were written or deleted."""
        self._read_after_failure()
        gone = [frontend for frontend in self._lists if frontend not in wanted]
        # Looked at one by one: after a restart nearly all are in force, and as objects they are large.
        differ = {
            frontend: ends
            for frontend, ends in wanted.items()
            if not self._is_in_force(frontend, ends, affinity.get(frontend, 0))
        }
        return self.change(differ, gone, affinity)

    def _is_in_force(
        self, frontend: Frontend, back_ends: Sequence[BackEnd], affinity_s: int
    ) -> bool:
        present = self._lists.get(frontend)
        return (
            present is not None
            and (len(present.slots), present.affinity_s) == (len(back_ends), affinity_s)
            and sorted(present.slots) == sorted(map(self._back_ends.find, back_ends))
        )

    def change(
        self, put: ServiceTable, gone: Iterable[Frontend], affinity: Affinity = NO_AFFINITY
    ) -> int:
        """Translate `put` so, and `gone` no more; gives how many rows were written or deleted.

        Exhausted: there is no room, and nothing was changed.
        """
        self._read_after_failure()
        put, gone = dict(put), [frontend for frontend in gone if frontend in self._lists]
        self._check_room(put, set(gone), affinity)
        self._is_known = False
        if self._fits_beside(put, affinity):
            written = self._change(put, gone, affinity)
        else:
            # What is there and what comes do not fit together: what goes makes room first, list by list.
            written = self._change({}, gone, affinity)
            for frontend in sorted(put, key=self._growth_to(put)):
                written += self._change({frontend: put[frontend]}, [], affinity)
        self._is_known = True
        return written

    def _read_after_failure(self) -> None:
        """Look at what a change that failed has left: any part of it may be in force."""
        if not self._is_known:
            self._read()

    def _growth_to(self, put: ServiceTable) -> Callable[[Frontend], int]:
        def growth(frontend: Frontend) -> int:
            present = self._lists.get(frontend)
            return len(put[frontend]) - (len(present.slots) if present is not None else 0)

        return growth

    def _change(self, put: ServiceTable, gone: Sequence[Frontend], affinity: Affinity) -> int:
        # Where the row of an address is known, its ports without a row are refused: it comes last and goes first.
        put = dict(sorted(put.items(), key=lambda item: _is_whole_address(item[0])))
        gone = sorted(gone, key=_is_whole_address, reverse=True)
        fresh = self._find_fresh(put)
        self._add_back_ends(fresh)
        written = len(fresh)
        for frontend, back_ends in put.items():
            numbers = [self._back_ends.find(back_end) for back_end in back_ends]
            written += self._write_list(frontend, numbers, affinity.get(frontend, 0))
        write_settings_flag(
            self._maps, abi.SettingsFlags.SERVICES, wanted=len(self._lists) > len(gone)
        )
        written += self._remove_lists(gone)
        return written + self._remove_unused()

    def _check_room(self, put: ServiceTable, gone: Set[Frontend], affinity: Affinity) -> None:
        """Exhausted where it does not fit in the end. There are no more back ends than slots, and as much room."""
        found = (self._lists.get(frontend) for frontend in gone | put.keys())
        replaced = [present for present in found if present is not None]
        slots = self._rows - sum(present.size for present in replaced) + _sum_sizes(put, affinity)
        rooms = (
            (len(self._lists) - len(replaced) + len(put), self._maps.pw_services),
            (slots, self._maps.pw_service_list),
        )
        for rows, room in rooms:
            if rows > room.info.max_entries:
                raise Exhausted(
                    f"write {rows} rows of services: map {room.info.name!r} has room for"
                    f" {room.info.max_entries}",
                    hint="the services that were there stay as they were",
                )

    def _fits_beside(self, put: ServiceTable, affinity: Affinity) -> bool:
        """Tell whether all of it fits beside what is there: rows that go, go last."""
        slots = self._rows + _sum_sizes(put, affinity)
        frontends = len(self._lists) + sum(frontend not in self._lists for frontend in put)
        back_ends = len(self._back_ends) + len(self._find_fresh(put))
        return (
            frontends <= self._maps.pw_services.info.max_entries
            and slots <= self._maps.pw_service_list.info.max_entries
            and back_ends <= self._maps.pw_back_ends.info.max_entries
        )

    def _find_fresh(self, put: ServiceTable) -> set[BackEnd]:
        """Give the back ends that have no row yet."""
        # Not by the difference of sets: that walks all that there are, 0.2 s for a hundred thousand.
        return {end for ends in put.values() for end in ends if end not in self._back_ends}

    def _take_number(self) -> int:
        while True:
            number, self._next = self._next, (self._next + 1) % NUMBERS
            if number and number not in self._list_numbers and not self._is_back_end(number):
                return number

    def _is_back_end(self, number: int) -> bool:
        return self._maps.pw_back_ends.lookup(u32(number)) is not None

    def _add_back_ends(self, fresh: Iterable[BackEnd]) -> None:
        numbered = {back_end: self._take_number() for back_end in fresh}
        for back_end, number in numbered.items():
            self._back_ends.put(back_end, number)
            self._idle.add(number)
        self._maps.pw_back_ends.update_batch(
            [
                (
                    u32(number),
                    abi.BackEndValue(
                        number, 0, to_mapped(back_end.address), back_end.port, back_end.protocol
                    ).pack(),
                )
                for back_end, number in numbered.items()
            ]
        )

    def _count(self, numbers: Iterable[int], by: int) -> None:
        """Note that back ends stand in one slot more, or less. Most stand in one, and that takes no memory."""
        for number in numbers:
            if by > 0 and number in self._idle:
                self._idle.discard(number)
            elif by < 0 and number not in self._more_users:
                self._idle.add(number)
            else:
                self._more_users[number] += by
                if not self._more_users[number]:
                    del self._more_users[number]

    def _remove_unused(self) -> int:
        """Remove back ends that stand in no slot any more: their flows of datagrams end with that."""
        gone, self._idle = self._idle, set()
        rows = {number: self._maps.pw_back_ends.lookup(u32(number)) for number in gone}
        self._back_ends.remove(
            _back_end(abi.BackEndValue.unpack(raw)) for raw in rows.values() if raw is not None
        )
        self._maps.pw_back_ends.delete_batch([u32(number) for number in gone])
        return len(gone)

    def _write_list(self, frontend: Frontend, numbers: Sequence[int], affinity_s: int) -> int:
        """Bring one list into force: slots that stay keep their back ends, so that little is written."""
        present = self._lists.get(frontend)
        if present is not None and (sorted(present.slots), present.affinity_s) == (
            sorted(numbers),
            affinity_s,
        ):
            return 0
        wanted = self._arrange_list(present, numbers, affinity_s)
        is_same = present is not None and present.number == wanted.number
        rows, old = wanted.rows(), present.rows() if present is not None else {}
        self._count(wanted.slots, 1)
        changed = [slot for slot, number in rows.items() if not is_same or old.get(slot) != number]
        self._maps.pw_service_list.update_batch(
            [
                (_slot(wanted.number, slot), _slot_value(wanted.number, rows[slot]))
                for slot in changed
            ]
        )
        self._write_frontend(frontend, wanted)
        surplus = [slot for slot in old if not is_same or slot not in rows]
        if present is not None:
            self._maps.pw_service_list.delete_batch(
                [_slot(present.number, slot) for slot in surplus]
            )
            self._release(present, is_over=not is_same)
        self._lists.put(frontend, wanted)
        self._rows += len(rows) - len(old)
        return len(changed) + 1 + len(surplus)

    def _arrange_list(
        self, present: SlotList | None, numbers: Sequence[int], affinity_s: int
    ) -> SlotList:
        """Give the list a number and slots. Where affinity begins or ends it is another one: what pods remember of
        the list before means nothing for it."""
        if present is not None and bool(present.affinity_s) == bool(affinity_s):
            slots = _arrange(present.slots, numbers)
            return SlotList(present.number, slots, affinity_s, present.place)
        number = self._take_number()
        self._list_numbers.add(number)
        return SlotList(number, list(numbers), affinity_s, self._take_place() if affinity_s else 0)

    def _take_place(self) -> int:
        """Give the place that the fewest services have, and of these the first."""
        place = min(range(abi.AFFINITY_PLACES), key=self._places.__getitem__)
        self._places[place] += 1
        return place

    def _release(self, one: SlotList, *, is_over: bool) -> None:
        """Give back what a list has; `is_over`: also what its next form would go on with."""
        self._count(one.slots, -1)
        if is_over:
            self._list_numbers.discard(one.number)
            if one.affinity_s:
                self._places[one.place] -= 1

    def _write_frontend(self, frontend: Frontend, one: SlotList) -> None:
        value = abi.ServiceValue(
            service=one.number,
            back_ends=len(one.slots),
            affinity_place=one.place,
            affinity_s=one.affinity_s,
            addr=to_mapped(frontend.address),
            port=frontend.port,
            protocol=frontend.protocol,
        )
        # In place where there is a row: a program may hold it (datapath rule 20).
        self._maps.pw_services.update(frontend_key(frontend), value.pack(), bpf.Update.LOCK)

    def _remove_lists(self, gone: Sequence[Frontend]) -> int:
        self._maps.pw_services.delete_batch([frontend_key(frontend) for frontend in gone])
        lists = [self._lists.pop(frontend) for frontend in gone]
        for service_list in lists:
            self._release(service_list, is_over=True)
        slots = [
            _slot(service_list.number, slot)
            for service_list in lists
            for slot in service_list.rows()
        ]
        self._maps.pw_service_list.delete_batch(slots)
        self._rows -= len(slots)
        return len(gone) + len(slots)


def _is_whole_address(frontend: Frontend) -> bool:
    return not frontend.port


def _arrange(old: Sequence[int], numbers: Sequence[int]) -> list[int]:
    """Give each number a slot: the one that it has, where that is within the new length."""
    missing = set(numbers)
    slots: list[int] = []
    for number in old[: len(numbers)]:
        slots.append(number if number in missing else 0)
        missing.discard(number)
    rest = [number for number in numbers if number in missing]
    slots += [0] * (len(numbers) - len(slots))
    return [number or rest.pop() for number in slots]


def read_services(maps: NodeMaps) -> Iterator[ServiceRow]:
    """Walk the frontends with their back ends."""
    by_number = dict(_read_back_ends(maps))
    for _, raw in maps.pw_services.items(bpf.Update.LOCK):
        value = abi.ServiceValue.unpack(raw)
        found = (
            maps.pw_service_list.lookup(_slot(value.service, slot))
            for slot in range(value.back_ends)
        )
        slots = [abi.ServiceSlotValue.unpack(slot).back_end if slot else 0 for slot in found]
        yield ServiceRow(
            Frontend(from_mapped(value.addr), value.port, value.protocol),
            value.service,
            tuple(slots),
            tuple(_back_end(by_number[number]) for number in slots if number in by_number),
            value.affinity_s,
            value.affinity_place,
        )


def _read_back_ends(maps: NodeMaps) -> Iterator[tuple[int, abi.BackEndValue]]:
    for key, raw in maps.pw_back_ends.items():
        yield int.from_bytes(key, "little"), abi.BackEndValue.unpack(raw)


def _back_end(value: abi.BackEndValue) -> BackEnd:
    return BackEnd(from_mapped(value.addr), value.port, value.protocol)


def _slot(service: int, slot: int) -> bytes:
    return abi.ServiceSlotKey(service, slot).pack()


def _slot_value(service: int, back_end: int) -> bytes:
    return abi.ServiceSlotValue(service, back_end).pack()
