"""The endpoints of this node, in memory: each with its record, state and log, found by every name people use.

Written only under the node's turn, by `control.attach`, `control.endpoint` and the duties that change labels. The
doors may read it at any time: a reader sees one whole endpoint or none, because views are replaced, never changed.
After a restart the journal is authoritative.
"""

import ipaddress
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from podwire.control.endpoint.states import ENDING, Event, State, next_state
from podwire.model.endpoint import AttachmentKey, EndpointRecord, IPAddress
from podwire.model.errors import Bug
from podwire.model.ids import ContainerId, EndpointId, InterfaceName
from podwire.model.interfaces import Clock, EndpointConfig
from podwire.model.store import Revisions

LOG_ENTRIES = 256


class LogEntry(msgspec.Struct, frozen=True):
    """One line of an endpoint's log: when (CLOCK_BOOTTIME), from where to where, why."""

    boottime_ns: int
    old: State | None
    new: State
    cause: str


class Endpoint:
    """One endpoint. `state` moves only through `report`."""

    def __init__(self, record: EndpointRecord, state: State, clock: Clock, *, cause: str) -> None:
        self.record = record
        self.config = EndpointConfig()
        """What the datapath was last told; the default until the first regeneration."""
        self.realized_revisions: Revisions = {}
        """Of each kind of policy: up to which it is in force here."""
        self.policy_error = ""
        """Why its newest policy could not be written; "" when it is in force."""
        self.state = state
        self.log: deque[LogEntry] = deque(maxlen=LOG_ENTRIES)
        self._clock = clock
        self.log.append(LogEntry(clock.boottime_ns(), None, state, cause))

    @property
    def is_ending(self) -> bool:
        """Tell whether a DEL, GC or failed ADD has been accepted for it."""
        return self.state in ENDING

    def report(self, event: Event) -> None:
        """Move by `event` and write one log line, or raise IllegalTransition and change nothing."""
        old, self.state = self.state, next_state(self.state, event)
        self.log.append(LogEntry(self._clock.boottime_ns(), old, self.state, event.cause))


class EndpointTable:
    """All endpoints by id, and the indexes over them."""

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        self.changed = changed
        """Called after an endpoint came, got another record, or went; must be quick."""
        self._by_id: dict[EndpointId, Endpoint] = {}
        self._by_key: dict[AttachmentKey, EndpointId] = {}
        self._by_address: dict[IPAddress, EndpointId] = {}
        self._by_container: dict[ContainerId, set[EndpointId]] = {}

    def __iter__(self) -> Iterator[Endpoint]:
        """Go over a snapshot, lowest id first."""
        # Doors iterate without the turn. `dict.copy` is one step under the interpreter's lock; iterating the dict
        # itself would fail when another thread inserts.
        return iter([endpoint for _, endpoint in sorted(self._by_id.copy().items())])

    def __len__(self) -> int:
        return len(self._by_id)

    def insert(self, endpoint: Endpoint) -> None:
        """Add an endpoint; its id must be new. A key or address still held by an ending endpoint moves to this one.

        `changed` hears of it with its next record: an ADD that has just begun must not wake a thread.
        """
        record = endpoint.record
        if record.id in self._by_id:
            raise Bug(f"insert endpoint {record.id}: the id is taken")
        self._by_id[record.id] = endpoint
        self._by_key[record.key] = record.id
        self._by_container.setdefault(record.key.container_id, set()).add(record.id)
        for address in record.addresses:
            self._by_address[address] = record.id

    def replace_record(self, record: EndpointRecord, *, quietly: bool = False) -> None:
        """Give an endpoint another record with the same id, key and addresses; `quietly`: the caller tells of it."""
        self._by_id[record.id].record = record
        if not quietly:
            self.changed()

    def discard(self, endpoint_id: EndpointId) -> None:
        """Forget an endpoint and the index entries that still lead to it."""
        endpoint = self._by_id.pop(endpoint_id, None)
        if endpoint is None:
            return
        key = endpoint.record.key
        # The key or an address may lead to a newer endpoint by now: a pod was created anew while the old device was
        # dying.
        if self._by_key.get(key) == endpoint_id:
            del self._by_key[key]
        siblings = self._by_container[key.container_id]
        siblings.discard(endpoint_id)
        if not siblings:
            del self._by_container[key.container_id]
        for address in endpoint.record.addresses:
            if self._by_address.get(address) == endpoint_id:
                del self._by_address[address]
        self.changed()

    def get(self, endpoint_id: EndpointId) -> Endpoint | None:
        """Find by number."""
        return self._by_id.get(endpoint_id)

    def get_by_key(self, key: AttachmentKey) -> Endpoint | None:
        """Find by attachment."""
        endpoint_id = self._by_key.get(key)
        return None if endpoint_id is None else self._by_id.get(endpoint_id)

    def get_by_address(self, text: str) -> Endpoint | None:
        """Find by address; ValueError when `text` is none."""
        endpoint_id = self._by_address.get(ipaddress.ip_address(text))
        return None if endpoint_id is None else self._by_id.get(endpoint_id)

    def list_by_container(
        self, container_id: ContainerId, if_name: InterfaceName | None = None
    ) -> list[Endpoint]:
        """Find all endpoints of a container, or those of one of its interfaces (one for each network)."""
        return [
            self._by_id[endpoint_id]
            for endpoint_id in sorted(self._by_container.get(container_id, ()))
            if if_name in (None, self._by_id[endpoint_id].record.key.if_name)
        ]

    def list_by_pod(self, namespace: str, pod: str) -> list[Endpoint]:
        """Find all endpoints of a pod, newest first: the newest owns the name."""
        endpoints = [
            endpoint
            for endpoint in self
            if (endpoint.record.namespace, endpoint.record.pod) == (namespace, pod)
        ]
        return endpoints[::-1]
