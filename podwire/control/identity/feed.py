"""List and watch of what identities are made of: identities, namespaces, workloads.

Called by the identity duty on a thread of its own: it waits for the store. What the store says is handed to
`KnownIdentities` and `LabelSources`; what endpoints must be looked at for is collected until somebody takes it.
Invariant: nothing is missed. After a gap everything is listed again, and no change older than a list undoes it.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from podwire.control.identity.known import IDENTITIES, IdentityChange
from podwire.control.identity.resolver import IdentityResolver
from podwire.control.identity.sources import NAMESPACES, WORKLOADS, SourceChange
from podwire.model.endpoint import EndpointRecord
from podwire.model.store import Compacted, Store, StoredObject, StoreEvent, Watch

KINDS: Final = (IDENTITIES, NAMESPACES, WORKLOADS)


@dataclass(frozen=True, slots=True)
class Doubt:
    """Which endpoints may not be what they should be any more."""

    change: SourceChange = field(default_factory=SourceChange)
    everybody: bool = False
    """After a list, or when a number of this node means something else now."""

    def __bool__(self) -> bool:
        return self.everybody or bool(self.change)

    def may_touch(self, record: EndpointRecord) -> bool:
        """Tell whether this endpoint may be concerned."""
        return self.everybody or self.change.may_touch(record)


@dataclass
class IdentityFeed:
    """Keeps what the resolver knows as new as the store."""

    store: Store
    resolver: IdentityResolver
    _watch: Watch | None = None
    _revisions: dict[str, int] = field(default_factory=dict)
    _doubt: Doubt = field(default_factory=Doubt)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.resolver.allocator.known.listen(self._note_reassigned)

    def step(self, timeout_s: float) -> bool:
        """List if need be, else wait for changes; tells whether anything came. Raises Unavailable: call again later."""
        watch = self._watch
        if watch is None:
            self._relist()
            return True
        try:
            events = watch.next(timeout_s)
        except Compacted:
            self.close()
            return True
        self.resolver.allocator.heard()
        for event in events:
            self.apply(event)
        return bool(events)

    def close(self) -> None:
        """Stop watching; the next step lists again."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def replace(self, kind: str, objects: Sequence[StoredObject], revision: int) -> None:
        """Take in a whole list of one of KINDS."""
        self._revisions[kind] = revision
        if kind == IDENTITIES:
            self.resolver.allocator.known.replace(objects, revision)
        else:
            self.resolver.sources.replace(kind, objects)
        self._suspect(Doubt(everybody=True))

    def apply(self, event: StoreEvent) -> None:
        """Take in one change of one of KINDS."""
        kind = event.object.key.kind
        if event.revision <= self._revisions.get(kind, 0):
            return
        if kind == IDENTITIES:
            self.resolver.allocator.known.apply(event)
        else:
            self._suspect(Doubt(self.resolver.sources.apply(event)))

    def take_doubt(self) -> Doubt:
        """Give which endpoints to look at, once."""
        with self._lock:
            doubt, self._doubt = self._doubt, Doubt()
            return doubt

    def _relist(self) -> None:
        lists = [(kind, *self.store.list(kind)) for kind in KINDS]
        watch = self.store.watch(min(revision for _, _, revision in lists), KINDS)
        for kind, objects, revision in lists:
            self.replace(kind, objects, revision)
        self._watch = watch
        self.resolver.allocator.heard()
        self.resolver.store_came_back()

    def _suspect(self, more: Doubt) -> None:
        with self._lock:
            self._doubt = Doubt(
                self._doubt.change | more.change, self._doubt.everybody or more.everybody
            )

    def _note_reassigned(self, change: IdentityChange) -> None:
        if change.reassigned:
            self._suspect(Doubt(everybody=True))
