"""A node without a kernel: the real control services and journal around a datapath in memory."""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from podwire.control.attach.ending import Endings
from podwire.control.attach.restore import Restorer, RestoreReport
from podwire.control.attach.service import AttachService
from podwire.control.attach.steps import Context
from podwire.control.endpoint.enforce import Enforcer, rows_of
from podwire.control.endpoint.host_ports import HostPorts, ReservedPort
from podwire.control.endpoint.policies import PolicyObjects
from podwire.control.endpoint.queue import RegenerationQueue
from podwire.control.endpoint.regenerate import Regenerator
from podwire.control.endpoint.table import EndpointTable
from podwire.control.flows.ring import FlowRing
from podwire.control.identity.allocator import IdentityAllocator
from podwire.control.identity.feed import IdentityFeed
from podwire.control.identity.filter import LabelFilter
from podwire.control.identity.known import KnownIdentities
from podwire.control.identity.resolver import IdentityResolver
from podwire.control.identity.sources import LabelSources
from podwire.control.ipam.node import NodeIpam
from podwire.control.policy.engine import PolicyEngine
from podwire.control.policy.resolve.rule_numbers import Numbers
from podwire.journal.directories import RunDirectories
from podwire.journal.records import SqliteJournal
from podwire.model.endpoint import EndpointRecord
from podwire.model.errors import StorageFailure
from podwire.model.interfaces import EndpointConfig
from podwire.model.store import Store
from tests.fakes.datapath import FakeDatapath
from tests.fakes.followers import follow_identities
from tests.fakes.policy import FakePolicyDatapath
from tests.fakes.store import MemoryStore


class FakeClock:
    """Time that moves only when asked, one nanosecond a look."""

    def __init__(self) -> None:
        self.now_ns = 1_000
        self.boot = "boot-1"

    def boottime_ns(self) -> int:
        self.now_ns += 1
        return self.now_ns

    def boot_id(self) -> str:
        return self.boot


class FailingJournal(SqliteJournal):
    """The real journal, whose n-th next write finds the disk full."""

    _countdown = 0

    def fail_write(self, nth: int) -> None:
        self._countdown = nth

    def write(self, record: EndpointRecord) -> None:
        if self._countdown:
            self._countdown -= 1
            if self._countdown == 0:
                raise StorageFailure("write journal: no space left on device")
        super().write(record)


@dataclass
class PolicyHalf(FakePolicyDatapath):
    """The policy of a node whose rows are those that its other half has, as in the kernel."""

    other: FakeDatapath = field(default_factory=FakeDatapath)

    def update_endpoints(self, rows: Iterable[tuple[EndpointRecord, EndpointConfig]]) -> None:
        self._begin("update_endpoints", 0)
        for record, config in rows:
            self._step()
            self.other.rows[record.device.host_ifindex] = config

    def remove_slots(self, slots: Iterable[int]) -> None:
        gone = set(slots)
        named = {row.slot for row in self.other.rows.values() if row is not None}
        assert not gone & named, "a row names the slot"
        super().remove_slots(gone)


class FakeNode:
    """Build the object graph as the agent does; `restart` builds it again over the same journal and datapath."""

    def __init__(
        self,
        directory: Path,
        cidrs: tuple[str, ...] = ("10.77.0.0/24", "fd77::/64"),
        store: Store | None = None,
    ) -> None:
        self._directory = directory
        self._cidrs = cidrs
        self.clock = FakeClock()
        self.encrypted: frozenset[str] = frozenset()
        """Addresses of nodes whose rows say so."""
        self.datapath = FakeDatapath()
        self.reserved_ports: list[ReservedPort] = []
        self.policy_datapath = PolicyHalf(other=self.datapath)
        self.store = store or MemoryStore()
        self._build()

    def _build(self) -> None:
        self.journal = FailingJournal(self._directory / "journal.db")
        self.table = EndpointTable()
        self.ipam = NodeIpam(self._cidrs)
        self.flows = FlowRing(16)
        directories = RunDirectories(self._directory / "endpoints")
        self._build_policy(directories)
        regenerator = Regenerator(
            table=self.table,
            datapath=self.datapath,
            directories=directories,
            clock=self.clock,
            base=lambda endpoint: EndpointConfig(
                trace=self.flows.watch.includes(endpoint.record.id)
            ),
            enforcer=self.enforcer,
        )
        context = Context(
            self.datapath, regenerator, HostPorts(self.table, self.datapath, self.reserved_ports)
        )
        self.endings = Endings(
            table=self.table,
            journal=self.journal,
            ipam=self.ipam,
            context=context,
            directories=directories,
        )
        self.service = AttachService(
            journal=self.journal,
            datapath=self.datapath,
            ipam=self.ipam,
            table=self.table,
            endings=self.endings,
            context=context,
            identities=self.identities,
            clock=self.clock,
            turn=threading.RLock(),
        )
        self.restorer = Restorer(
            journal=self.journal,
            datapath=self.datapath,
            ipam=self.ipam,
            table=self.table,
            endings=self.endings,
            regenerator=regenerator,
            directories=directories,
            clock=self.clock,
        )

    def _build_policy(self, directories: RunDirectories) -> None:
        engine = PolicyEngine(
            datapath=self.policy_datapath,
            rows=partial(rows_of, self.table),
            numbers=msgspec.json.decode(self.journal.read_fact("numbers") or "{}", type=Numbers),
            remember=self._remember,
            cidrs=self.policy_datapath.cidrs,
        )
        self.enforcer = Enforcer(
            engine, self.table, self.policy_datapath, directories, RegenerationQueue(), self.clock
        )
        self.policies = PolicyObjects(engine)
        self.identities = IdentityResolver(
            IdentityAllocator(self.store, KnownIdentities()),
            LabelSources(),
            LabelFilter.parse(),
            wait_s=0.2,
        )
        self.identities.allocator.known.listen(self.enforcer.queue_identity_change)
        for record in self.journal.list_records():
            self.identities.adopt(record)
        self.follower = follow_identities(self.store, IdentityFeed(self.identities))
        self.follower.step(0)

    def _remember(self, numbers: Numbers) -> None:
        self.journal.write_fact("numbers", msgspec.json.encode(numbers).decode())

    def restart(self) -> RestoreReport:
        """Forget everything in memory and come back as after `kill -9`."""
        self.journal.close()
        self._build()
        report = self.restorer.restore()
        self.service.settle()
        return report

    def lose_journal(self) -> None:
        """Move the journal's files away, as a person does with a damaged one."""
        self.journal.close()
        for path in self._directory.glob("journal.db*"):
            path.unlink()

    def reboot(self) -> None:
        """Give the machine another boot id and an empty kernel."""
        self.clock.boot = "boot-2"
        self.datapath = FakeDatapath()
        self.policy_datapath = PolicyHalf(other=self.datapath)

    def assert_empty(self) -> None:
        """Fail unless nothing is left in kernel, journal, table and address pool."""
        assert self.datapath.is_empty(), self.datapath
        assert list(self.journal.list_records()) == []
        assert len(self.table) == 0
        assert not self.ipam.holders()
        self.enforcer.collect_waste()
        assert not self.policy_datapath.slots, self.policy_datapath.slots

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.journal.close()
