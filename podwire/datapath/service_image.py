"""What the maps of services hold, in as few bytes as it takes: there may be a hundred thousand back ends.

Owned by `datapath.service_maps`, which keeps it equal to the maps. Never touches the kernel. Everything is kept in the
bytes that the maps have as keys: an object of Python for each back end would take ten times as much. Not thread-safe.
"""

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from podwire.datapath import abi
from podwire.datapath.maps import from_mapped, to_mapped
from podwire.model.interfaces import BackEnd, Frontend

SLOT_BYTES: Final = 4
_LIST: Final = struct.Struct("=IIH")
_NUMBER_BYTES: Final = 4
_BACK_END: Final = struct.Struct("=16sHB")
_ENTRY_BYTES: Final = _BACK_END.size + _NUMBER_BYTES
_FIRST_PLACES: Final = 64


@dataclass
class SlotList:
    """One frontend's list of back ends: its number, and whose number stands in each slot."""

    number: int
    slots: Sequence[int] = field(default_factory=list)
    affinity_s: int = 0
    place: int = 0

    @property
    def size(self) -> int:
        """How many rows it has."""
        return size_of(len(self.slots), self.affinity_s)

    def rows(self) -> dict[int, int]:
        """Give what stands in its slots; with affinity, also in those that say who is in the list."""
        rows = dict(enumerate(self.slots))
        if self.affinity_s:
            rows |= {abi.SLOT_OF_MEMBER | number: number for number in self.slots}
        return rows


def size_of(back_ends: int, affinity_s: int) -> int:
    """Tell how many rows a list of so many back ends has."""
    return back_ends * (2 if affinity_s else 1)


class SlotLists:
    """The list of each frontend. What `get` gives is a copy: a list is changed by putting another one in its place."""

    def __init__(self) -> None:
        self._packed: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._packed)

    def __contains__(self, frontend: Frontend) -> bool:
        return frontend_key(frontend) in self._packed

    def __iter__(self) -> Iterator[Frontend]:
        for key in self._packed:
            row = abi.ServiceKey.unpack(key)
            yield Frontend(from_mapped(row.addr), row.port, row.protocol)

    def get(self, frontend: Frontend) -> SlotList | None:
        """Give the list of a frontend; None: it has none."""
        packed = self._packed.get(frontend_key(frontend))
        return None if packed is None else _unpack(packed)

    def put(self, frontend: Frontend, one: SlotList) -> None:
        """Note a frontend's list."""
        packed = _LIST.pack(one.number, one.affinity_s, one.place) + array("I", one.slots).tobytes()
        self._packed[frontend_key(frontend)] = packed

    def pop(self, frontend: Frontend) -> SlotList:
        """Forget the list of a frontend that has one, and give it."""
        return _unpack(self._packed.pop(frontend_key(frontend)))

    def values(self) -> Iterator[SlotList]:
        """Give all lists."""
        return map(_unpack, self._packed.values())


def _unpack(packed: bytes) -> SlotList:
    number, affinity_s, place = _LIST.unpack_from(packed)
    slots = array("I")
    slots.frombytes(packed[_LIST.size :])
    return SlotList(number, slots, affinity_s, place)


def frontend_key(frontend: Frontend) -> bytes:
    """Give the key of a frontend's row."""
    return abi.ServiceKey(to_mapped(frontend.address), frontend.port, frontend.protocol).pack()


class BackEndNumbers:
    """The number of each back end: a hash table in two flat arrays, in which an entry takes some 33 bytes.

    `_places` holds, where the hash of an entry points to or behind it, the entry's position plus one; 0 = free.
    """

    def __init__(self) -> None:
        self._entries = bytearray()
        self._places = array("I", bytes(4 * _FIRST_PLACES))

    def __len__(self) -> int:
        return len(self._entries) // _ENTRY_BYTES

    def __contains__(self, back_end: BackEnd) -> bool:
        return self.find(back_end) != 0

    def __iter__(self) -> Iterator[int]:
        """Give all numbers."""
        for at in range(_BACK_END.size, len(self._entries), _ENTRY_BYTES):
            yield int.from_bytes(self._entries[at : at + _NUMBER_BYTES], "little")

    def find(self, back_end: BackEnd) -> int:
        """Give the number of a back end; 0: it has none."""
        key = _pack_back_end(back_end)
        position = self._places[self._probe(key)]
        if not position:
            return 0
        end = position * _ENTRY_BYTES
        return int.from_bytes(self._entries[end - _NUMBER_BYTES : end], "little")

    def put(self, back_end: BackEnd, number: int) -> None:
        """Note the number of a back end."""
        key, entry_number = _pack_back_end(back_end), number.to_bytes(_NUMBER_BYTES, "little")
        if 3 * len(self) >= 2 * len(self._places):
            self._rehash(2 * len(self._places))
        place = self._probe(key)
        if position := self._places[place]:
            end = position * _ENTRY_BYTES
            self._entries[end - _NUMBER_BYTES : end] = entry_number
            return
        self._entries += key + entry_number
        self._places[place] = len(self)

    def remove(self, back_ends: Iterable[BackEnd]) -> None:
        """Forget back ends."""
        for back_end in back_ends:
            place = self._probe(_pack_back_end(back_end))
            if position := self._places[place]:
                self._free(place)
                self._move_last_to(position)
        if 12 * len(self) < len(self._places) > _FIRST_PLACES:
            self._rehash(max(_FIRST_PLACES, len(self._places) // 4))

    def _key(self, position: int) -> bytes:
        start = (position - 1) * _ENTRY_BYTES
        return bytes(self._entries[start : start + _BACK_END.size])

    def _probe(self, key: bytes) -> int:
        """Give the place of a key, or the free one that it would have."""
        places = self._places
        last = len(places) - 1
        place = hash(key) & last
        while (position := places[place]) and self._key(position) != key:
            place = place + 1 & last
        return place

    def _free(self, hole: int) -> None:
        """Free a place; what would not be found any more behind the hole moves into it (Knuth, 6.4, algorithm R)."""
        places = self._places
        last = len(places) - 1
        place = hole
        while True:
            place = place + 1 & last
            position = places[place]
            if not position:
                break
            home = hash(self._key(position)) & last
            # Its search begins at `home` and must not meet the hole before `place`.
            if (place - home & last) >= (place - hole & last):
                places[hole] = position
                hole = place
        places[hole] = 0

    def _move_last_to(self, position: int) -> None:
        """Fill the gap that an entry has left, whose place is free already."""
        if position != len(self):
            self._places[self._probe(self._key(len(self)))] = position
            start = (position - 1) * _ENTRY_BYTES
            self._entries[start : start + _ENTRY_BYTES] = self._entries[-_ENTRY_BYTES:]
        del self._entries[-_ENTRY_BYTES:]

    def _rehash(self, places: int) -> None:
        self._places = array("I", bytes(4 * places))
        for position in range(1, len(self) + 1):
            self._places[self._probe(self._key(position))] = position


def _pack_back_end(back_end: BackEnd) -> bytes:
    return _BACK_END.pack(to_mapped(back_end.address), back_end.port, back_end.protocol)
