"""What identities depend on, as the store says it: identities, namespaces, workloads.

The agent's follower of the store calls it, on its thread. It passes what the store says to `KnownIdentities` and
`LabelSources`, and collects which endpoints must be checked until somebody takes that note. Never asks the store.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from podwire.control.identity.bound_pods import BoundPods
from podwire.control.identity.known import IDENTITIES, IdentityChange
from podwire.control.identity.resolver import IdentityResolver
from podwire.control.identity.sources import NAMESPACES, WORKLOADS, SourceChange
from podwire.control.kubernetes.own_pods import OwnPods
from podwire.model.endpoint import EndpointRecord
from podwire.model.store import StoredObject, StoreEvent
from podwire.model.store.kinds import POD

KINDS: Final = (IDENTITIES, NAMESPACES, WORKLOADS)


class Doubt(msgspec.Struct, frozen=True):
    """Which endpoints may not be what they should be any more."""

    change: SourceChange = msgspec.field(default_factory=SourceChange)
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

    resolver: IdentityResolver
    pods: OwnPods | None = None
    """With the store `kubernetes`."""
    bound: BoundPods | None = None
    """Told of pods that were bound to this node or changed."""
    _doubt: Doubt = field(default_factory=Doubt)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _doubted: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.resolver.allocator.known.listen(self._note_reassigned)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Give the kinds to follow."""
        return KINDS if self.pods is None else (*KINDS, POD.plural)

    def heard(self) -> None:
        """Note that the store has answered, and has nothing newer than what was handed over."""
        self.resolver.allocator.heard()

    def came_back(self) -> None:
        """Let ADDs that wait for the store look at once."""
        self.resolver.store_came_back()

    def replace(self, kind: str, objects: Sequence[StoredObject], revision: int) -> None:
        """Take in a whole list of one of `kinds`."""
        if self.pods is not None and kind == POD.plural:
            self.pods.replace(objects)
        elif kind == IDENTITIES:
            self.resolver.allocator.known.replace(objects, revision)
        else:
            self.resolver.sources.replace(kind, objects)
        self._suspect(Doubt(everybody=True))

    def apply(self, event: StoreEvent) -> None:
        """Take in one change of one of `kinds`, which no list holds already."""
        if self.pods is not None and event.object.key.kind == POD.plural:
            self.pods.apply(event)
            changed = self.pods.take_changed()
            self._suspect(Doubt(SourceChange(pods=changed)))
            if self.bound is not None and not event.deleted:
                self.bound.note(changed)
        elif event.object.key.kind == IDENTITIES:
            self.resolver.allocator.known.apply(event)
        else:
            self._suspect(Doubt(self.resolver.sources.apply(event)))

    def wait_for_doubt(self, timeout_s: float) -> bool:
        """Wait until there are endpoints to look at that were not waited for before; False after `timeout_s`."""
        doubted = self._doubted.wait(timeout_s)
        # Cleared after the wait and before the doubt is taken: a change in between sets it again, and at worst one
        # look finds nothing.
        self._doubted.clear()
        return doubted

    def wake(self) -> None:
        """End `wait_for_doubt`."""
        self._doubted.set()

    def take_doubt(self) -> Doubt:
        """Give which endpoints to look at, once."""
        with self._lock:
            doubt, self._doubt = self._doubt, Doubt()
            return doubt

    def _suspect(self, more: Doubt) -> None:
        with self._lock:
            self._doubt = Doubt(
                self._doubt.change | more.change, self._doubt.everybody or more.everybody
            )
        if more:
            self._doubted.set()

    def _note_reassigned(self, change: IdentityChange) -> None:
        if change.reassigned:
            self._suspect(Doubt(everybody=True))
