"""The duty of policies on a real store: every change comes into force, and no failure keeps others out or ends it."""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from podwire.agent.duties import policy as policy_duty
from podwire.agent.duties import shared_watch
from podwire.agent.duties.policy import PolicyDuty
from podwire.agent.duties.shared_watch import SharedWatch
from podwire.control.endpoint.policies import POLICY_KINDS
from podwire.control.endpoint.queue import Level
from podwire.control.endpoint.states import State
from podwire.control.endpoint.table import Endpoint
from podwire.control.policy import reading
from podwire.control.policy.rule import PolicyRules
from podwire.model.errors import StorageFailure, Unavailable
from podwire.model.ids import EndpointId
from podwire.model.store import Known, ObjectKey, StoredObject
from podwire.store.remembered import RememberedObjects
from podwire.store.sqlite import SqliteStore
from podwire.store.sqlite_watch import SqliteWatch
from tests.fakes.node import FakeNode
from tests.unit.policies import cidr_group, network_policy
from tests.unit.test_attach_service import NETNS, request
from tests.waiting import wait_for

NETPOL = "networkpolicies"
WAIT_S = 10.0
WEB = "k8s:app=web"


class Bench:
    """A node with one pod `app=web`, and the duty over a file."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "store.db"
        self.store: SqliteStore = SqliteStore(self.path, busy_timeout_s=0.2)
        self.node = FakeNode(directory, store=self.store)
        self.reports: list[str] = []
        self.duty: PolicyDuty = self.make_duty()

    def make_duty(self, memory: RememberedObjects | None = None) -> PolicyDuty:
        return PolicyDuty(
            store=self.store,
            objects=self.node.policies,
            enforcer=self.node.enforcer,
            turn=threading.RLock(),
            observe=lambda _op, _phase, _ms: None,
            report=self.reports.append,
            shared=SharedWatch(self.store, memory, name="policy-watch"),
        )

    def put(self, document: dict[str, Any], kind: str = NETPOL) -> int:
        metadata = document["metadata"]
        key = ObjectKey(kind, metadata.get("namespace", ""), metadata["name"])
        old = self.store.get(key)
        if old is None:
            return self.store.create(StoredObject(key=key, document=document)).revision
        new = StoredObject(key=key, revision=old.revision, document=document)
        return self.store.update(new).revision

    def delete(self, name: str) -> None:
        self.store.delete(ObjectKey(NETPOL, "default", name))

    def names(self) -> set[str]:
        """Name the policies in force."""
        return {policy.policy.name for policy in self.node.enforcer.engine.list_policies()}

    def closed(self) -> set[str]:
        """Name the policies that close in place of what they say."""
        found = self.node.enforcer.engine.list_policies()
        return {entry.policy.name for entry in found if entry.closed_because}

    def wait_for(self, *names: str) -> None:
        wait_for(lambda: self.names() == set(names) and not self.node.enforcer.engine.is_pending)

    def close(self) -> None:
        self.duty.stop()
        self.node.follower.stop()
        self.node.journal.close()
        self.store.close()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(shared_watch, "AWAY_BASE_S", 0.02)
    monkeypatch.setattr(policy_duty, "RETRY_S", 0.05)
    with closing(Bench(tmp_path)) as made:
        yield made


@pytest.fixture
def running(bench: Bench) -> Bench:
    bench.duty.load()
    bench.duty.start()
    return bench


def test_what_the_store_has_is_taken_in_before_anything_is_built(bench: Bench) -> None:
    revision = bench.put(network_policy("a"))
    bench.duty.load()
    bench.node.service.add(request(labels=(WEB,)), NETNS)
    assert bench.names() == {"a"}
    assert bench.node.enforcer.revision == revision
    [endpoint] = bench.node.table
    assert endpoint.config.slot


def test_changes_come_into_force(running: Bench) -> None:
    running.node.service.add(request(labels=(WEB,)), NETNS)
    running.put(network_policy("a"))
    running.wait_for("a")
    revision = running.put(network_policy("b"))
    running.wait_for("a", "b")
    wait_for(lambda: running.node.enforcer.revision >= revision)
    running.delete("a")
    running.wait_for("b")


def test_other_kinds_move_the_revision_too(running: Bench) -> None:
    revision = running.put({"metadata": {"name": "p"}}, "pods")
    wait_for(lambda: running.node.enforcer.revision >= revision)


def test_the_revision_never_gets_ahead_of_what_was_taken_in(running: Bench) -> None:
    for number in range(20):
        running.put(network_policy(f"p{number}"))
    revision = running.put(network_policy("last"))
    wait_for(lambda: running.node.enforcer.revision >= revision)
    assert len(running.node.policies.rules) == 21


@pytest.mark.parametrize("document", [{"metadata": {"name": "bad", "namespace": "default"}}])
def test_an_object_that_cannot_be_read_is_named_and_the_others_come_in(
    running: Bench, document: dict[str, Any]
) -> None:
    running.put(document)
    running.put(network_policy("good"))
    running.wait_for("bad", "good")
    assert running.closed() == {"bad"}
    wait_for(lambda: [key.name for key in running.node.policies.problems] == ["bad"])


def _fail_for(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception) -> "Callable[[], None]":
    readers = reading._READERS[NETPOL]
    failing = True

    def decode_or_fail(document: Any) -> tuple[PolicyRules, ...]:
        if failing and document["metadata"]["name"] == name:
            raise error
        return readers.rules(document)

    monkeypatch.setitem(reading._READERS, NETPOL, readers._replace(rules=decode_or_fail))

    def heal() -> None:
        nonlocal failing
        failing = False

    return heal


@pytest.mark.parametrize(
    "error",
    [KeyError("x"), RecursionError("deep"), StorageFailure("full")],
    ids=lambda one: type(one).__name__,
)
@pytest.mark.parametrize("how", ["listed", "changed"])
def test_a_bug_about_one_object_keeps_no_other_out_and_is_tried_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception, how: str
) -> None:
    monkeypatch.setattr(policy_duty, "LIST_AGAIN_S", 0.05)
    monkeypatch.setattr(shared_watch, "WATCH_S", 0.05)
    heal = _fail_for(monkeypatch, "b", error)
    names = ["a", "b", "c"]
    if how == "listed":
        for name in names:
            bench.put(network_policy(name))
    bench.duty.load()
    bench.duty.start()
    if how == "changed":
        with bench.store.together():
            for name in names:
                bench.put(network_policy(name))
    bench.wait_for("a", "b", "c")
    assert bench.closed() == {"b"}
    [(key, problem)] = wait_for(lambda: list(bench.node.policies.problems.items()))
    assert key.name == "b"
    assert type(error).__name__ in problem
    heal()
    wait_for(lambda: not bench.node.policies.problems)
    bench.wait_for("a", "b", "c")
    assert not bench.closed()


def test_an_unreadable_version_leaves_the_last_one_in_force(
    running: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.put(network_policy("a"))
    running.wait_for("a")
    _fail_for(monkeypatch, "a", KeyError("x"))
    running.put(network_policy("a", policyTypes=["Egress"]))
    wait_for(lambda: bool(running.node.policies.problems))
    assert running.names() == {"a"}


def test_what_the_store_itself_cannot_read_leaves_the_last_one_in_force_and_others_come_in(
    running: Bench, tmp_path: Path
) -> None:
    running.put(network_policy("a"))
    running.wait_for("a")
    whole = running.store.get(ObjectKey(NETPOL, "default", "a"))
    assert whole is not None
    with closing(sqlite3.connect(running.path)) as other, other:
        for table in ("object", "change"):
            other.execute(f"UPDATE {table} SET document = 'x' WHERE name = 'a'")
    running.duty.follower.list_again()
    running.put(network_policy("b"))
    running.wait_for("a", "b")
    wait_for(lambda: [problem.name for problem in running.node.policies.problems] == ["a"])
    running.store.update(whole)
    wait_for(lambda: not running.node.policies.problems)
    assert running.names() == {"a", "b"}


@pytest.mark.parametrize(
    "error",
    [StorageFailure("the file was replaced"), ValueError("a bug"), OSError("descriptor")],
    ids=lambda one: type(one).__name__,
)
def test_a_watch_that_fails_is_opened_again_and_nothing_is_missed(
    running: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    real, failures = SqliteWatch.next, [error, error]

    def fail_twice(watch: SqliteWatch, timeout_s: float) -> Any:
        if failures and threading.current_thread().name == "policy-watch":
            raise failures.pop()
        return real(watch, timeout_s)

    monkeypatch.setattr(SqliteWatch, "next", fail_twice)
    running.put(network_policy("a"))
    running.wait_for("a")
    wait_for(lambda: not failures)
    running.put(network_policy("b"))
    running.wait_for("a", "b")
    wait_for(lambda: running.reports[-1] == "")
    assert any(str(error) in report for report in running.reports)
    assert len(running.store._watches) <= 2  # of policies and of identities


def test_events_that_cannot_be_taken_in_at_first_are_not_lost(
    running: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures = running.node.enforcer.engine.apply, [StorageFailure("full"), OSError("full")]

    def fail_twice() -> Any:
        if failures:
            raise failures.pop()
        return real()

    monkeypatch.setattr(running.node.enforcer.engine, "apply", fail_twice)
    running.put(network_policy("a"))
    running.wait_for("a")


def test_what_cannot_be_done_is_not_tried_again_at_the_pace_of_collecting(
    running: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[float] = []

    def fail() -> Any:
        tries.append(time.monotonic())
        running.duty._uncollected_since_s = tries[
            0
        ]  # as when the change before was done a moment ago
        raise StorageFailure("full")

    monkeypatch.setattr(policy_duty, "RETRY_S", 0.3)
    monkeypatch.setattr(policy_duty, "QUIET_S", 0.001)
    running.put(network_policy("a"))
    running.wait_for("a")
    monkeypatch.setattr(running.node.enforcer.engine, "apply", fail)
    running.put(network_policy("b"))
    wait_for(lambda: len(tries) >= 3)
    assert tries[2] - tries[1] > 0.2


def test_stopping_does_not_wait_for_a_store_that_is_away(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_watch, "AWAY_BASE_S", 60.0)
    monkeypatch.setattr(shared_watch, "AWAY_CAP_S", 60.0)
    bench.duty.load()

    def refuse(_watch: SqliteWatch, _timeout_s: float) -> Any:
        raise StorageFailure("the store is broken")

    monkeypatch.setattr(SqliteWatch, "next", refuse)
    bench.duty.start()
    wait_for(lambda: "the store is broken" in bench.reports)
    begin_s = time.monotonic()
    bench.duty.stop()
    assert time.monotonic() - begin_s < 20


def test_a_slot_that_nobody_names_is_collected(running: Bench) -> None:
    running.node.service.add(request(labels=(WEB,)), NETNS)
    for _ in range(3):
        running.put(network_policy("a"))
        running.wait_for("a")
        running.put(network_policy("a", ingress=[]))
    running.put(cidr_group(), "ciliumcidrgroups")
    endpoint = running.node.table.get(EndpointId(1))
    assert endpoint is not None
    wait_for(lambda: set(running.node.policy_datapath.slots) <= {endpoint.config.slot})
    assert endpoint.state is State.READY


# Without the store


class Away(SqliteStore):
    """A file that can be taken away."""

    is_away = False

    def list(
        self,
        kind: str,
        namespace: str | None = None,
        *,
        at_least: int | None = None,
        known: Known | None = None,
    ) -> tuple[Sequence[StoredObject], int]:
        if self.is_away:
            raise Unavailable("list: the store is away")
        return super().list(kind, namespace)


@pytest.fixture
def away(bench: Bench, tmp_path: Path) -> Iterator[Away]:
    """The bench's store, as its duty finds it: away."""
    bench.node.service.add(request(labels=(WEB,)), NETNS)
    with closing(Away(tmp_path / "store.db")) as store:
        store.is_away = True
        bench.store.close()
        bench.store = store
        bench.duty = bench.make_duty()
        bench.node.enforcer.is_complete = lambda: bench.duty.is_loaded
        yield store
        bench.duty.stop()


def test_before_the_first_word_of_the_store_nothing_is_built_or_collected(
    bench: Bench, away: Away
) -> None:
    bench.put(network_policy("a"))
    bench.duty.load()
    bench.duty.start()
    wait_for(lambda: len(bench.reports) > 1)
    calls = list(bench.node.policy_datapath.calls)
    with pytest.raises(Unavailable, match="never read"):
        bench.node.service.add(request(container="new", labels=(WEB,)), NETNS)
    bench.node.enforcer.apply("test")
    bench.node.enforcer.collect_waste()
    assert bench.node.policy_datapath.calls == calls
    assert [one.record.key.container_id for one in bench.node.table if _is_here(one)] == ["c1"]
    away.is_away = False
    bench.wait_for("a")
    bench.node.service.add(request(container="new", labels=(WEB,), at_ns=10**9), NETNS)
    wait_for(lambda: bench.reports[-1] == "")


def _is_here(endpoint: Endpoint) -> bool:
    return endpoint.state not in (State.DISCONNECTING, State.DISCONNECTED)


def test_an_endpoint_that_had_to_wait_is_built_when_the_store_is_heard(
    bench: Bench, away: Away
) -> None:
    bench.duty.load()
    bench.duty.start()
    [endpoint] = bench.node.table
    regenerator = bench.node.service.context.regenerator
    regenerator.request(endpoint.record.id, Level.POLICY, "restored")
    with bench.duty.turn:
        regenerator.run_due()
    assert endpoint.state is State.NOT_READY
    wait_for(lambda: len(bench.reports) > 1)
    away.is_away = False
    wait_for(lambda: bool(regenerator.run_due()) or endpoint.state is State.READY)
    wait_for(lambda: endpoint.state is State.READY)


def test_what_the_store_said_last_is_enforced_without_it(
    bench: Bench, away: Away, tmp_path: Path
) -> None:
    with RememberedObjects(tmp_path / "remembered.db", "sqlite:///x") as memory:
        stored = StoredObject(
            key=ObjectKey(NETPOL, "default", "a"), revision=7, document=network_policy("a")
        )
        lists = {kind: ([stored] if kind == NETPOL else [], 7) for kind in POLICY_KINDS}
        memory.save(lists, ())
        bench.duty = bench.make_duty(memory)
        bench.duty.load()
        assert bench.duty.is_loaded
        bench.node.service.add(request(container="new", labels=(WEB,)), NETNS)
        assert bench.names() == {"a"}
        assert bench.node.enforcer.revision == 0  # nobody may take it for new
        assert bench.reports == ["list: the store is away"]
