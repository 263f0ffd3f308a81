"""What people change of a living endpoint is in force when they are answered; what ends is left alone."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwire.control.endpoint.changes import EndpointChanges
from podwire.control.endpoint.states import DisconnectAccepted, State
from podwire.control.endpoint.table import Endpoint
from podwire.model.errors import NotFound, StorageFailure
from podwire.model.ids import EndpointId
from podwire.model.interfaces import EndpointConfig
from tests.fakes.node import FakeNode
from tests.unit.test_attach_service import NETNS, request


class Bench:
    """A node with one pod, whose rows say whether its policies only report."""

    def __init__(self, directory: Path) -> None:
        self.node = FakeNode(directory)
        self.node.service.add(request(), NETNS)
        [self.endpoint] = self.node.table
        self.regenerator = self.node.service.context.regenerator
        self.regenerator.base = _base
        self.turn = threading.RLock()
        self.changes = EndpointChanges(
            self.node.table, self.node.journal, self.regenerator, self.node.identities, self.turn
        )

    @property
    def id(self) -> EndpointId:
        return self.endpoint.record.id


def _base(endpoint: Endpoint) -> EndpointConfig:
    return EndpointConfig(audit=bool(endpoint.record.policy_audit))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    with made.node:
        yield made


@pytest.mark.parametrize("audit", [True, False, None])
def test_audit_is_kept_and_in_force_when_it_is_answered(bench: Bench, audit: bool | None) -> None:
    record = bench.changes.set_audit(bench.id, audit)
    assert record.policy_audit is audit
    assert list(bench.node.journal.list_records()) == [record]
    assert bench.endpoint.record == record
    assert bench.endpoint.config.audit is bool(audit)
    assert bench.endpoint.state is State.READY


def test_an_endpoint_that_has_gone_is_not_found(bench: Bench) -> None:
    number = bench.id
    bench.node.service.delete(request("DEL", at_ns=10**9))
    bench.node.service.settle()
    with pytest.raises(NotFound):
        bench.changes.set_audit(number, True)
    assert list(bench.node.journal.list_records()) == []


def test_an_endpoint_that_ends_gets_no_new_record(bench: Bench) -> None:
    bench.endpoint.report(DisconnectAccepted("DEL"))
    before = list(bench.node.journal.list_records())
    with pytest.raises(NotFound):
        bench.changes.set_audit(bench.id, True)
    assert list(bench.node.journal.list_records()) == before
    assert bench.endpoint.record.policy_audit is None


def test_a_full_disk_changes_nothing(bench: Bench) -> None:
    bench.node.journal.fail_write(1)
    with pytest.raises(StorageFailure):
        bench.changes.set_audit(bench.id, True)
    assert bench.endpoint.record.policy_audit is None
    assert not bench.endpoint.config.audit


def test_a_change_of_another_one_meanwhile_is_kept(bench: Bench) -> None:
    """The record that is changed is the one of now, not the one that the caller has seen."""
    bench.changes.set_audit(bench.id, True)
    bench.changes.change_labels(bench.id, ["app=new"])
    record = bench.changes.set_audit(bench.id, False)
    assert "cni:app=new" in record.labels


def test_labels_are_built_before_they_are_answered(bench: Bench) -> None:
    bench.changes.change_labels(bench.id, ["app=new"])
    assert not len(bench.regenerator.queue)
    assert bench.endpoint.state is State.READY
