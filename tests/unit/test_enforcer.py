"""What endpoints are told of policy: audit that ends, failures, damage, and what is left over."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from podwire.agent.health import Health
from podwire.agent.measured import Measured, MeasuredJournal, list_gauges
from podwire.agent.metrics import Metrics
from podwire.control.endpoint.policies import POLICY_KINDS, oldest_revision
from podwire.control.endpoint.queue import Level
from podwire.control.endpoint.states import State
from podwire.control.endpoint.table import Endpoint
from podwire.control.policy.labels_match import make_selector
from podwire.control.policy.rule import (
    TCP,
    LabelSelector,
    PolicyId,
    PolicyRules,
    PortMatch,
    Requirement,
    Rule,
)
from podwire.journal.records import SqliteJournal
from podwire.model.errors import CheckFailed, KernelFailure, PodwireError, StorageFailure
from podwire.model.identity import IdentityFacts
from podwire.model.ids import EndpointId, IfIndex
from podwire.model.interfaces import EndpointConfig
from podwire.model.labels import Operator
from podwire.model.policy import Direction, Verdict
from tests.fakes.node import FakeClock, FakeNode
from tests.unit.test_attach_service import NETNS, request

POLICY = PolicyId("NetworkPolicy", "default", "web")
WEB = "k8s:app=web"
DB = "k8s:app=db"


def allow(node: FakeNode, *ports: int, app: str = "web") -> None:
    """Close pods of an app but for these ports."""
    subject = make_selector(Requirement("any", "app", Operator.IN, (app,)))
    rules = tuple(
        Rule(
            Direction.INGRESS, Verdict.ALLOW, (LabelSelector(),), (PortMatch(TCP, n, n),), f"i[{n}]"
        )
        for n in ports
    )
    written = PolicyRules(POLICY, subject, frozenset({Direction.INGRESS}), rules)
    node.enforcer.engine.set_policy(POLICY, (written,))
    node.enforcer.apply("test")


def add(node: FakeNode, container: str = "c1", label: str = WEB) -> Endpoint:
    node.service.add(request(container=container, labels=(label,)), NETNS)
    [endpoint] = [live for live in node.table if live.record.key.container_id == container]
    return endpoint


def row_of(node: FakeNode, endpoint: Endpoint) -> EndpointConfig:
    row = node.datapath.read_config(endpoint.record)
    assert row is not None
    return row


def state_of(endpoint: Endpoint) -> State:
    return endpoint.state


def build(node: FakeNode) -> None:
    """Do the builds that are due now or would be in a minute."""
    node.clock.now_ns += 61 * 10**9
    while node.restorer.regenerator.run_due():
        pass


def set_base(node: FakeNode, **changes: Any) -> None:
    """Say what the programs are told beside policy."""
    node.restorer.regenerator.base = lambda _endpoint: EndpointConfig(**changes)


class RecordedRows(dict[IfIndex, EndpointConfig | None]):
    """Rows by device, and all that ever were there."""

    def __init__(self) -> None:
        super().__init__()
        self.history: dict[IfIndex, list[EndpointConfig]] = {}

    def __setitem__(self, key: IfIndex, row: EndpointConfig | None) -> None:
        super().__setitem__(key, row)
        if row is not None:
            self.history.setdefault(key, []).append(row)


def _bases(changes: dict[str, bool]) -> tuple[bool, bool]:
    base = EndpointConfig(**changes)
    return base.audit, base.host_allowed


# Flows that were judged under other things than policy


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param({"audit": True}, {"audit": False}, id="audit ends"),
        pytest.param({"host_allowed": True}, {"host_allowed": False}, id="the host is shut out"),
    ],
)
@pytest.mark.parametrize("how", ["living", "restart", "after a failure"])
def test_no_flow_outlives_what_let_it_pass(
    node: FakeNode, before: dict[str, bool], after: dict[str, bool], how: str
) -> None:
    written = RecordedRows()
    node.datapath.rows = written
    set_base(node, **before)
    allow(node, 80)
    add(node, "c2")
    endpoint = add(node)
    former = row_of(node, endpoint)
    if how == "restart":
        real = node._build

        def build_otherwise() -> None:
            real()
            set_base(node, **after)

        node._build = build_otherwise  # type: ignore[method-assign]
        node.restart()
    else:
        set_base(node, **after)
        node.restorer.regenerator.request(endpoint.record.id, Level.POLICY, "test")
        if how == "after a failure":
            failure = KernelFailure(5, "update map", "pw_config")
            node.policy_datapath.fail["update_endpoints"] = failure
            assert node.restorer.regenerator.run_due()
            assert state_of(endpoint) is State.NOT_READY
            assert endpoint.config == row_of(node, endpoint) == former
        build(node)
    for one in node.table if how == "restart" else [endpoint]:
        now = row_of(node, one)
        rows = written.history[one.record.device.host_ifindex]
        bases = {(row.audit, row.host_allowed) for row in rows}
        assert bases == {_bases(before), _bases(after)}
        outdated = [row for row in rows if (row.audit, row.host_allowed) == _bases(before)]
        assert now.policy_revision > max(row.policy_revision for row in outdated)
        assert (now.audit, now.host_allowed) == _bases(after)
        assert one.config == now
        assert state_of(one) is State.READY


def test_a_build_that_changes_nothing_keeps_flows(node: FakeNode) -> None:
    endpoint = add(node)
    before = row_of(node, endpoint)
    node.restorer.regenerator.request(endpoint.record.id, Level.REWRITE, "test")
    build(node)
    assert row_of(node, endpoint) == before


# Failures


def test_the_stores_word_on_a_number_is_not_undone_by_a_record(node: FakeNode) -> None:
    endpoint = add(node)
    number = endpoint.record.identity
    others = IdentityFacts(number, (DB,))
    node.enforcer.engine.identity_added(others)
    node.enforcer.apply("test")
    allow(node, 80, app="db")
    node.restorer.regenerator.request(endpoint.record.id, Level.POLICY, "test")
    build(node)
    assert row_of(node, endpoint).deny_ingress, "the number means db now, whatever the record says"


def test_a_change_of_policy_does_not_hide_that_a_build_failed(node: FakeNode) -> None:
    endpoint = add(node)
    del node.datapath.devices[endpoint.record.id]
    node.restorer.regenerator.request(endpoint.record.id, Level.REWRITE, "test")
    assert node.restorer.regenerator.run_due()
    assert state_of(endpoint) is State.NOT_READY
    allow(node, 80)
    assert row_of(node, endpoint).deny_ingress
    assert state_of(endpoint) is State.NOT_READY
    node.datapath.devices[endpoint.record.id] = endpoint.record
    assert node.restorer.regenerator.run_due(), "what changed is a reason to try again at once"
    assert state_of(endpoint) is State.READY


def test_a_change_of_policy_does_not_hide_that_labels_changed(node: FakeNode) -> None:
    endpoint = add(node)
    other = add(node, "c2", DB)
    identity = other.record.identity
    record = msgspec.structs.replace(endpoint.record, identity=identity, identity_labels=(DB,))
    node.table.replace_record(record)
    node.policy_datapath.fail["update_endpoints"] = KernelFailure(5, "update map", "pw_config")
    node.restorer.regenerator.request(record.id, Level.POLICY, "labels changed")
    assert node.restorer.regenerator.run_due()
    node.restorer.regenerator.queue.forget(record.id)
    allow(node, 80)
    assert state_of(endpoint) is State.NOT_READY
    build(node)
    assert state_of(endpoint) is State.READY
    assert row_of(node, endpoint).identity == identity


def test_a_device_that_cannot_be_repaired_moves_no_policy(node: FakeNode) -> None:
    endpoint = add(node)
    record = msgspec.structs.replace(endpoint.record, identity=70_000, identity_labels=(DB,))
    node.table.replace_record(record)
    node.datapath.fail["repair_device"] = KernelFailure(5, "repair device", "pw0")
    node.restorer.regenerator.request(record.id, Level.REWRITE, "test")
    with pytest.raises(KernelFailure):
        node.restorer.regenerator.regenerate_now(endpoint, Level.REWRITE)
    assert 70_000 not in node.enforcer.engine._peers


def test_a_build_applies_once_while_another_is_behind(node: FakeNode) -> None:
    add(node)
    add(node, "c2", DB)
    allow(node, 80)
    node.policy_datapath.capacity = 1
    allow(node, 80, 443)
    node.policy_datapath.calls.clear()
    [_web, db] = node.table
    node.restorer.regenerator.queue.forget(_web.record.id)
    node.restorer.regenerator.request(db.record.id, Level.POLICY, "test")
    build(node)
    assert [name for name, _slot in node.policy_datapath.calls].count("change_slot") == 1


def test_who_failed_is_forgotten_with_the_last_endpoint(node: FakeNode) -> None:
    add(node)
    node.policy_datapath.capacity = 0
    allow(node, 80)
    [failure] = node.enforcer.failures
    assert len(failure.endpoints) == 1
    assert unwritten(node) == 1
    node.service.delete(request("DEL", at_ns=10**9))
    assert node.enforcer.failures == ()
    assert unwritten(node) == 0
    assert not node.enforcer.engine.is_pending


def test_policies_that_could_not_be_written_are_counted_by_identity(node: FakeNode) -> None:
    add(node)
    add(node, "c2")
    assert unwritten(node, unreadable=2) == 2
    node.policy_datapath.capacity = 0
    allow(node, 80)
    assert unwritten(node, unreadable=2) == 3
    assert all("policy_entries" in endpoint.policy_error for endpoint in node.table)
    node.policy_datapath.capacity = 10
    node.enforcer.apply("test")
    build(node)
    assert unwritten(node) == 0
    assert {endpoint.state for endpoint in node.table} == {State.READY}


def unwritten(node: FakeNode, unreadable: int = 0) -> float:
    """Look up the gauge."""
    nothing = cast(Any, None)
    measured = Measured(
        table=node.table,
        ipam=node.ipam,
        backlog=lambda: 0,
        flows=node.flows,
        events_lost=lambda: 0,
        health=nothing,
        datapath=nothing,
        objects=cast(Any, SimpleNamespace(problems=range(unreadable))),
        enforcer=node.enforcer,
        identities=node.identities.allocator,
        started_unix_s=0.0,
    )
    [gauge] = [one for one in list_gauges(measured) if one.name == "policies_not_in_force"]
    return gauge.read()[()]


# Damage by others


def empty(node: FakeNode, endpoint: Endpoint) -> int:
    """Take all entries out of an endpoint's slot, as a person with a tool can; gives how many there were."""
    slot = node.policy_datapath.slots[row_of(node, endpoint).slot]
    count = len(slot)
    slot.clear()
    return count


def test_an_emptied_slot_is_found_by_check_and_written_again(node: FakeNode) -> None:
    allow(node, 80, 443)
    endpoint = add(node)
    before = row_of(node, endpoint)
    count = empty(node, endpoint)
    with pytest.raises(CheckFailed, match=f"{count} of {count} entries are missing"):
        node.service.check(request("CHECK"), NETNS)
    build(node)
    assert len(node.policy_datapath.slots[before.slot]) == count
    assert row_of(node, endpoint).policy_revision > before.policy_revision
    node.service.check(request("CHECK"), NETNS)
    assert state_of(endpoint) is State.READY


def test_a_slot_is_compared_with_the_policies_of_the_identity_that_the_row_names(
    node: FakeNode,
) -> None:
    allow(node, 80)
    endpoint = add(node)
    other = add(node, "c2", DB)
    record = msgspec.structs.replace(endpoint.record, identity=other.record.identity)
    node.table.replace_record(record)
    assert node.enforcer.compare(endpoint) == []
    slot = row_of(node, endpoint).slot
    count = empty(node, endpoint)
    assert node.enforcer.compare(endpoint) != []
    build(node)
    assert len(node.policy_datapath.slots[slot]) == count


def test_damage_to_a_slot_that_nobody_has_any_more_is_forgotten(node: FakeNode) -> None:
    allow(node, 80)
    endpoint = add(node)
    empty(node, endpoint)
    assert node.enforcer.compare(endpoint) != []
    node.service.delete(request("DEL", at_ns=10**9))
    node.enforcer.collect_waste()
    add(node, "c2", DB)
    assert not node.policy_datapath.slots


# The rest


def test_a_revision_that_changes_no_policy_is_reached_without_work(node: FakeNode) -> None:
    endpoint = add(node)
    node.policy_datapath.calls.clear()
    node.enforcer.mark_revisions(dict.fromkeys(POLICY_KINDS, 77))
    assert oldest_revision(endpoint.realized_revisions) == node.enforcer.revision == 77
    node.enforcer.mark_revisions(dict.fromkeys(POLICY_KINDS, 76))
    assert node.enforcer.revision == 77
    assert not node.policy_datapath.calls


def test_revisions_of_one_kind_say_nothing_of_another(node: FakeNode) -> None:
    endpoint = add(node)
    first, *others = POLICY_KINDS
    node.enforcer.mark_revisions({first: 9000})
    assert node.enforcer.revision == 0, "the other kinds were not heard"
    node.enforcer.mark_revisions(dict.fromkeys(others, 12))
    assert node.enforcer.revision == oldest_revision(endpoint.realized_revisions) == 12
    assert endpoint.realized_revisions[first] == 9000


def test_who_is_behind_does_not_reach_a_revision(node: FakeNode) -> None:
    endpoint = add(node)
    node.policy_datapath.capacity = 0
    allow(node, 80)
    node.enforcer.mark_revisions(dict.fromkeys(POLICY_KINDS, 77))
    assert oldest_revision(endpoint.realized_revisions) < 77


def test_waste_is_collected_in_quiet_time_and_costs_nothing_else(node: FakeNode) -> None:
    allow(node, 80)
    add(node)
    node.service.delete(request("DEL", at_ns=10**9))
    node.enforcer.collect_waste()
    assert not node.policy_datapath.slots
    node.policy_datapath.calls.clear()
    node.enforcer.collect_waste()
    assert not node.policy_datapath.calls


def test_a_fact_that_cannot_be_written_is_a_matter_of_health(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_self: SqliteJournal, _name: str, _value: str) -> None:
        raise StorageFailure("the disk is full")

    health = Health(FakeClock())
    journal = MeasuredJournal(tmp_path / "journal.db", metrics=Metrics(), health=health)
    try:
        assert health.ready
        journal.write_fact("numbers", "{}")
        monkeypatch.setattr(SqliteJournal, "write_fact", refuse)
        with pytest.raises(PodwireError):
            journal.write_fact("numbers", "{}")
        assert not health.ready
    finally:
        journal.close()


def test_an_unknown_endpoint_may_be_forgotten(node: FakeNode) -> None:
    node.enforcer.detach(EndpointId(99))
