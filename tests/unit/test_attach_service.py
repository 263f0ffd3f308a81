"""ADD, DEL, CHECK, GC on the real journal and a datapath in memory: what is refused, what stays after failures."""

import errno
import os
from pathlib import Path

import msgspec
import pytest

from podwire.control.attach.restore import RestoreReport
from podwire.control.attach.steps import RECIPES
from podwire.control.endpoint.states import State
from podwire.journal.recent import RecentFile
from podwire.model.endpoint import AttachmentKey, Bandwidth, HostPort, Phase
from podwire.model.errors import (
    Cancelled,
    CannotServe,
    CheckFailed,
    Exhausted,
    ForeignObject,
    InvalidConfiguration,
    InvalidEnvironment,
    KernelFailure,
    PodwireError,
    StorageFailure,
    Unavailable,
    UnknownContainer,
)
from podwire.model.ids import ContainerId, InterfaceName, NetworkName
from podwire.model.interfaces import PodNamespace
from podwire.model.request import AttachRequest
from tests.fakes.node import FakeNode

NETNS = PodNamespace(fd=-1, path="/run/netns/a", cookie=7)


def request(
    command: str = "ADD",
    container: str = "c1",
    *,
    at_ns: int = 100,
    network: str = "net",
    **more: object,
) -> AttachRequest:
    key = AttachmentKey(NetworkName(network), ContainerId(container), InterfaceName("eth0"))
    base = AttachRequest(
        command=command,
        key=None if command in ("GC", "STATUS") else key,
        network=NetworkName(network),
        cni_version="1.1.0",
        netns_path="/run/netns/a",
        started_boottime_ns=at_ns,
    )
    return msgspec.structs.replace(base, **more)


def test_add_answers_when_everything_is_in_force_and_committed(node: FakeNode) -> None:
    result = node.service.add(request(), NETNS)
    [endpoint] = node.table
    assert endpoint.state is State.READY
    assert [record.phase for record in node.journal.list_records()] == [Phase.LIVE]
    assert node.datapath.compare_endpoint(endpoint.record, endpoint.config, NETNS) == []
    assert {str(ip.address) for ip in result.ips} == {endpoint.record.ipv4, endpoint.record.ipv6}


def test_add_does_not_ask_the_kernel_for_what_it_has_just_written(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(type(node.datapath), "read_config")
    node.service.add(request(), NETNS)


def test_add_without_a_namespace_names_the_path(node: FakeNode) -> None:
    with pytest.raises(InvalidEnvironment, match="/run/netns/a"):
        node.service.add(request(), None)
    node.assert_empty()


def test_a_second_add_is_refused_and_changes_nothing(node: FakeNode) -> None:
    node.service.add(request(), NETNS)
    before = node.journal.list_records()
    with pytest.raises(InvalidConfiguration, match="attached already"):
        node.service.add(request(at_ns=200), NETNS)
    assert node.journal.list_records() == before


def test_the_same_interface_in_another_network_is_refused(node: FakeNode) -> None:
    node.service.add(request(), NETNS)
    with pytest.raises(InvalidConfiguration, match="network 'net'"):
        node.service.add(request(network="other"), NETNS)


def test_add_right_after_del_gets_its_device_name_back(node: FakeNode) -> None:
    node.service.add(request(), NETNS)
    node.service.delete(request("DEL", at_ns=150))
    node.service.add(request(at_ns=200), NETNS)
    assert len(node.journal.list_records()) == 1


ERRORS: list[PodwireError] = [
    KernelFailure(12, "make", "something"),
    ForeignObject("a foreign device has the name"),
]
METHODS = ["create_guard", "create_device", "configure_pod", "open_endpoint"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.kind)
def test_a_failing_step_leaves_nothing(node: FakeNode, method: str, error: PodwireError) -> None:
    node.datapath.fail[method] = error
    with pytest.raises(type(error)):
        node.service.add(request(), NETNS)
    node.service.settle()
    node.assert_empty()


@pytest.mark.parametrize("undo", ["close_endpoint", "remove_routes", "condemn_device"])
def test_a_failing_undo_is_retried_until_nothing_is_left(node: FakeNode, undo: str) -> None:
    node.service.add(request(), NETNS)
    node.datapath.fail[undo] = KernelFailure(16, "undo", "something")
    node.service.delete(request("DEL", at_ns=150))
    node.service.settle()
    node.service.settle()
    node.assert_empty()


@pytest.mark.parametrize("steps_done", range(len(RECIPES["veth"]) + 1))
def test_a_cancelled_add_is_undone_at_the_next_step(node: FakeNode, steps_done: int) -> None:
    asked = iter([False] * steps_done + [True] * 100)
    every_step = msgspec.structs.replace(
        request(), bandwidth=Bandwidth(8, 8, 8, 8), host_ports=(HostPort("TCP", 8080, 80),)
    )
    if steps_done == len(RECIPES["veth"]):
        node.service.add(every_step, NETNS, lambda: next(asked))
        return
    with pytest.raises(Cancelled):
        node.service.add(every_step, NETNS, lambda: next(asked))
    node.service.settle()
    node.assert_empty()


@pytest.mark.parametrize("write", [1, 2], ids=["intent", "commit"])
def test_a_full_disk_refuses_the_add_and_leaves_nothing(node: FakeNode, write: int) -> None:
    node.journal.fail_write(write)
    with pytest.raises(StorageFailure):
        node.service.add(request(), NETNS)
    node.service.settle()
    node.assert_empty()


def test_a_full_disk_is_known_to_status_until_it_has_room(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(RecentFile, "append", refuse)
        full.setattr(RecentFile, "try_out", refuse)
        with pytest.raises(StorageFailure):
            node.service.add(request(), NETNS)
        for _ in range(2):
            with pytest.raises(CannotServe, match="No space left"):
                node.service.status()
    node.service.status()
    node.service.settle()
    node.assert_empty()


def test_a_del_that_cannot_be_written_is_done_on_the_spot(node: FakeNode) -> None:
    node.service.add(request(), NETNS)
    node.journal.fail_write(1)
    node.service.delete(request("DEL", at_ns=150))
    node.assert_empty()


def test_a_del_that_can_be_neither_written_nor_done_says_so(node: FakeNode) -> None:
    node.service.add(request(), NETNS)
    node.journal.fail_write(1)
    node.datapath.reap_blocked = True
    with pytest.raises(StorageFailure):
        node.service.delete(request("DEL", at_ns=150))


def test_a_repeated_del_says_so_too_until_its_end_is_written(node: FakeNode) -> None:
    """Otherwise a launcher's record is removed, a crash follows, and the next agent takes the endpoint for alive."""
    node.service.add(request(), NETNS)
    node.datapath.reap_blocked = True
    for at_ns in (150, 160):
        node.journal.fail_write(1)
        with pytest.raises(StorageFailure):
            node.service.delete(request("DEL", at_ns=at_ns))
    [record] = node.journal.list_records()
    assert record.phase is Phase.LIVE
    node.service.delete(request("DEL", at_ns=170))
    [record] = node.journal.list_records()
    assert record.phase is Phase.DELETING
    node.datapath.reap_blocked = False
    node.service.settle()
    node.assert_empty()


def test_an_add_behind_an_end_that_takes_time_is_to_be_tried_again(node: FakeNode) -> None:
    node.service.add(request(), NETNS)
    node.datapath.reap_blocked = True
    node.service.delete(request("DEL", at_ns=150))
    with pytest.raises(Unavailable, match="has not ended yet"):
        node.service.add(request(at_ns=200), NETNS)
    node.datapath.reap_blocked = False
    node.service.add(request(at_ns=250), NETNS)
    assert len(node.journal.list_records()) == 1


def test_del_of_what_is_not_there_succeeds_and_may_be_repeated(node: FakeNode) -> None:
    node.service.delete(request("DEL"))
    node.service.add(request(at_ns=200), NETNS)
    for at_ns in (300, 400):
        node.service.delete(request("DEL", at_ns=at_ns))
    node.service.settle()
    node.assert_empty()


def test_a_del_older_than_the_attachment_changes_nothing(node: FakeNode) -> None:
    node.service.add(request(at_ns=200), NETNS)
    node.service.delete(request("DEL", at_ns=100))
    [endpoint] = node.table
    assert endpoint.state is State.READY


def test_addresses_rest_until_the_device_is_gone(node: FakeNode) -> None:
    node.service.add(request(), NETNS)
    [endpoint] = node.table
    node.datapath.reap_blocked = True
    node.service.delete(request("DEL", at_ns=150))
    node.service.settle()
    assert endpoint.state is State.DISCONNECTING
    assert [record.phase for record in node.journal.list_records()] == [Phase.DELETING]
    node.service.add(request(container="c2", at_ns=200), NETNS)
    others = {record.ipv4 for record in node.journal.list_records()}
    assert len(others) == 2
    node.datapath.reap_blocked = False
    node.service.settle()
    assert len(node.journal.list_records()) == 1


def test_the_last_address_is_waited_for_behind_a_dying_device(tmp_path: Path) -> None:
    with FakeNode(tmp_path, cidrs=("10.77.0.2/31",)) as node:
        node.service.add(request(), NETNS)
        with pytest.raises(Exhausted):
            node.service.add(request(container="c2"), NETNS)
        with pytest.raises(CannotServe):
            node.service.status()
        node.service.delete(request("DEL", at_ns=150))
        node.service.status()
        node.service.add(request(container="c2"), NETNS)


def test_check_passes_right_after_add_and_names_what_differs(node: FakeNode) -> None:
    result = node.service.add(request(), NETNS)
    check = request("CHECK", prev_result=result)
    node.service.check(check, NETNS)
    [endpoint] = node.table
    node.datapath.remove_routes(endpoint.record)
    with pytest.raises(CheckFailed, match="route") as caught:
        node.service.check(check, PodNamespace(fd=-1, path="/x", cookie=8))
    assert any("namespace" in fault.message for fault in caught.value.faults)


def test_check_of_an_unknown_container_says_so(node: FakeNode) -> None:
    with pytest.raises(UnknownContainer):
        node.service.check(request("CHECK"), NETNS)


def test_gc_ends_what_the_list_does_not_name_in_its_own_network_only(node: FakeNode) -> None:
    node.service.add(request(container="keep"), NETNS)
    node.service.add(request(container="lost"), NETNS)
    node.service.add(request(container="elsewhere", network="other"), NETNS)
    node.service.add(request(container="young", at_ns=900), NETNS)
    valid = ((ContainerId("keep"), InterfaceName("eth0")),)
    node.service.collect(request("GC", at_ns=500, valid_attachments=valid))
    node.service.settle()
    left = {record.key.container_id for record in node.journal.list_records()}
    assert left == {"keep", "elsewhere", "young"}


def test_gc_without_a_list_does_nothing_and_with_an_empty_one_ends_all(node: FakeNode) -> None:
    node.service.add(request(), NETNS)
    node.service.collect(request("GC", at_ns=500, valid_attachments=None))
    assert len(node.table) == 1
    node.service.collect(request("GC", at_ns=500, valid_attachments=()))
    node.service.settle()
    node.assert_empty()


# -- restart ----------------------------------------------------------------------------------------


def test_a_restart_keeps_every_living_pod_and_its_address(node: FakeNode) -> None:
    for number in range(5):
        node.service.add(request(container=f"c{number}"), NETNS)
    before = node.journal.list_records()
    report = node.restart()
    assert report.adopted == 5
    assert node.journal.list_records() == before
    assert {endpoint.state for endpoint in node.table} == {State.READY}
    node.service.add(request(container="new"), NETNS)
    addresses = [record.ipv4 for record in node.journal.list_records()]
    assert len(set(addresses)) == 6


@pytest.mark.parametrize("phase", [Phase.ADDING, Phase.DELETING], ids=lambda phase: phase.value)
def test_a_restart_ends_what_is_half_done(node: FakeNode, phase: Phase) -> None:
    node.service.add(request(), NETNS)
    [record] = node.journal.list_records()
    node.journal.write(msgspec.structs.replace(record, phase=phase))
    assert node.restart().ended == 1
    node.service.settle()
    node.assert_empty()


def test_a_pod_whose_device_vanished_is_let_go(node: FakeNode) -> None:
    node.service.add(request(), NETNS)
    node.datapath.devices.clear()
    assert node.restart().gone == 1
    node.service.settle()
    node.assert_empty()


def test_after_a_reboot_everything_is_free(node: FakeNode) -> None:
    node.service.add(request(), NETNS)
    node.reboot()
    report: RestoreReport = node.restart()
    assert report.rebooted == 1
    node.assert_empty()


def test_what_has_no_record_is_removed(node: FakeNode) -> None:
    node.service.add(request(), NETNS)
    node.journal.remove([record.id for record in node.journal.list_records()])
    report = node.restart()
    assert report.removed
    node.assert_empty()


def test_restore_may_run_twice(node: FakeNode) -> None:
    node.service.add(request(), NETNS)
    node.restart()
    again = node.restart()
    assert (again.adopted, again.ended, again.gone, list(again.removed)) == (1, 0, 0, [])


def test_numbers_that_the_kernel_knows_are_not_given_again_when_the_journal_is_lost(
    node: FakeNode,
) -> None:
    node.service.add(request(), NETNS)
    [endpoint] = node.table
    node.lose_journal()
    node.restart()
    node.service.add(request(container="c2"), NETNS)
    [successor] = node.table
    assert successor.record.id > endpoint.record.id


def test_an_add_is_told_of_once_when_it_is_complete(node: FakeNode) -> None:
    seen: list[set[Phase]] = []
    node.table.changed = lambda: seen.append({live.record.phase for live in node.table})
    node.service.add(request(), NETNS)
    assert seen == []  # its caller waits for the answer, and announces it behind that
    node.service.announce()
    assert seen == [{Phase.LIVE}]


def test_an_add_that_fails_is_told_of_when_it_ends(node: FakeNode) -> None:
    told: list[int] = []
    node.table.changed = lambda: told.append(len(node.table))
    node.datapath.fail["create_device"] = KernelFailure(16, "create", "pw0")
    with pytest.raises(PodwireError):
        node.service.add(request(), NETNS)
    assert told
