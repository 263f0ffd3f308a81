"""Recognise ADDs that came too late: after a DEL of their attachment, or after a GC that does not name it.

Used only by `agent.cni.dispatch`. A launcher may reach the agent long after it started. If its ADD were carried out
then, it would create something that nobody wants any more and that nobody would end. Times are those of the launchers'
starts, CLOCK_BOOTTIME in nanoseconds. Invariants: memory is bounded. Forgetting for the sake of that bound can refuse
too many ADDs, never too few. Forgetting what is older than any launcher lives has no effect.
"""

import threading
from collections.abc import Iterator
from typing import Final

import msgspec

from podwire.model.endpoint import AttachmentKey
from podwire.model.ids import ContainerId, InterfaceName, NetworkName
from podwire.model.request import AttachRequest

KEPT_NS: Final = 900 * 10**9
"""Longer than any launcher lives: wire.AGENT_WAIT_MAX_S and wire.REPLY_WAIT_MS together."""
DELETES_KEPT: Final = 65_536
LISTS_KEPT: Final = 256
NAMES_KEPT: Final = 100_000
"""In all lists of GC together; no single one has more (`cni.netconf.ATTACHMENTS_MAX`)."""


class TakenDeletes:
    """The DELs that were taken lately: an ADD that started before a DEL of its attachment is refused.

    Bounded: what is forgotten raises a floor, below which every ADD is refused. So the answer is
    never a wrong yes.
    """

    def __init__(self, kept: int = DELETES_KEPT, kept_ns: int = KEPT_NS) -> None:
        self._kept = kept
        self._kept_ns = kept_ns
        self._until_ns: dict[AttachmentKey, int] = {}
        self._floor_ns = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._until_ns)

    def note(self, key: AttachmentKey, until_ns: int, now_ns: int) -> None:
        """Remember that ADDs of `key` that started before `until_ns` (CLOCK_BOOTTIME) are over."""
        with self._lock:
            # Taken out and put in anew: the dictionary is in the order of noting, and the oldest come first.
            self._until_ns[key] = max(until_ns, self._until_ns.pop(key, 0))
            for oldest in list(self._list_surplus(now_ns)):
                self._floor_ns = max(self._floor_ns, self._until_ns.pop(oldest))

    def overtook(self, key: AttachmentKey, started_ns: int) -> bool:
        """Tell whether an ADD that started at `started_ns` must not be carried out any more."""
        with self._lock:
            return started_ns < max(self._until_ns.get(key, 0), self._floor_ns)

    def _list_surplus(self, now_ns: int) -> Iterator[AttachmentKey]:
        surplus = len(self._until_ns) - self._kept
        for key, until_ns in self._until_ns.items():
            if surplus <= 0 and until_ns >= now_ns - self._kept_ns:
                return
            surplus -= 1
            yield key


class _List(msgspec.Struct, frozen=True):
    started_ns: int
    valid: frozenset[tuple[ContainerId, InterfaceName]]


class TakenLists:
    """The last GC of each network: an ADD that started before it and is not in its list is refused.

    One per network is enough: what a newer list names is wanted, whatever an older one said. Used on one thread.
    """

    def __init__(self, lists: int = LISTS_KEPT, names: int = NAMES_KEPT) -> None:
        self._kept = lists
        self._names = names
        self._lists: dict[NetworkName, _List] = {}
        self._floor_ns = 0

    def __len__(self) -> int:
        return len(self._lists)

    def note(self, request: AttachRequest, now_ns: int) -> None:
        """Remember a GC with its list."""
        new = _List(request.started_boottime_ns, frozenset(request.valid_attachments or ()))
        # Requests may overtake each other on their way: the list of the launcher that started last counts.
        old = self._lists.pop(request.network, new)
        self._lists[request.network] = max(old, new, key=lambda listed: listed.started_ns)
        for network in [
            network for network, it in self._lists.items() if it.started_ns < now_ns - KEPT_NS
        ]:
            del self._lists[network]
        while len(self._lists) > self._kept or self._count_names() > self._names:
            oldest = self._lists.pop(next(iter(self._lists)))
            self._floor_ns = max(self._floor_ns, oldest.started_ns)

    def _count_names(self) -> int:
        return sum(len(listed.valid) for listed in self._lists.values())

    def overtook(self, key: AttachmentKey, started_ns: int) -> bool:
        """Tell whether an ADD that started at `started_ns` must not be carried out any more."""
        # Whether a forgotten list named the attachment is not known, so the ADD is refused; its runtime tries again.
        if started_ns < self._floor_ns:
            return True
        last = self._lists.get(key.network)
        return (
            last is not None
            and started_ns < last.started_ns
            and (key.container_id, key.if_name) not in last.valid
        )
