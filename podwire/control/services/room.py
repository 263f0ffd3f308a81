"""Which services get the rows that the programs have: first those of namespaces that take little, then the older ones.

Called by `control.services.catalogue`. Pure. Invariant: what one service needs keeps no older one of its namespace out,
nor a service with which another namespace takes less in all; as soon as everything fits, nobody is left out. While
everything fits, a change costs what it touches.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from podwire.control.services.facts import ServiceName

FRONTENDS: Final = 61_440
SLOTS: Final = 122_880
"""As many as the maps have rows (maps.h), but for a sixteenth: while a list changes both forms of it are there."""


class Need(msgspec.Struct, frozen=True):
    """What one service takes."""

    created: str
    frontends: int
    slots: int
    """Back ends of all its frontends."""


@dataclass
class Room:
    """What services need, and which of them get none."""

    frontends: int = FRONTENDS
    slots: int = SLOTS
    _needs: dict[ServiceName, Need] = field(default_factory=dict)
    _used: tuple[int, int] = 0, 0
    refused: frozenset[ServiceName] = frozenset()
    """Those without room."""

    def weigh(self, name: ServiceName, need: Need | None) -> None:
        """Take in what a service needs now; None: nothing."""
        frontends, slots = self._used
        old = self._needs.pop(name, None)
        if old is not None:
            frontends, slots = frontends - old.frontends, slots - old.slots
        if need is not None:
            self._needs[name] = need
            frontends, slots = frontends + need.frontends, slots + need.slots
        self._used = frontends, slots

    def settle(self) -> frozenset[ServiceName]:
        """Give room to those who come first; gives those for whom something has changed by that."""
        before = self.refused
        frontends, slots = self._used
        fits = frontends <= self.frontends and slots <= self.slots
        self.refused = frozenset() if fits else frozenset(self._find_refused())
        return before ^ self.refused

    def _find_refused(self) -> Iterator[ServiceName]:
        frontends, slots = self.frontends, self.slots
        for name, need in self._in_order():
            if need.frontends > frontends or need.slots > slots:
                yield name
            else:
                frontends, slots = frontends - need.frontends, slots - need.slots

    def _in_order(self) -> list[tuple[ServiceName, Need]]:
        """Give all in the order in which they get room: by what their namespace takes up to each of them.

        By age alone a tenant could let an old service of his grow, and take the room of everybody's younger ones.
        """
        by_age = sorted(self._needs.items(), key=lambda item: (item[1].created, item[0]))
        taken: dict[str, tuple[int, int]] = {}
        share: dict[ServiceName, float] = {}
        for name, need in by_age:
            frontends, slots = taken.get(name.namespace, (0, 0))
            taken[name.namespace] = frontends, slots = (
                frontends + need.frontends,
                slots + need.slots,
            )
            share[name] = max(frontends / self.frontends, slots / self.slots)
        return sorted(by_age, key=lambda item: share[item[0]])
