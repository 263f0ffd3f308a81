"""Who has a port of the host: refused to a second pod, passed on between sandboxes of one pod, free after every end."""

import ipaddress
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from podwire.control.endpoint.host_ports import EACH_ADDRESS, ReservedPort, in_force
from podwire.model.endpoint import PROTOCOLS, EndpointRecord, HostPort, Phase
from podwire.model.errors import InvalidConfiguration, KernelFailure, StorageFailure
from podwire.model.interfaces import HostSocket, PodNamespace, PodSocket
from tests.fakes.node import FakeNode
from tests.unit.test_attach_service import request

NETNS = PodNamespace(fd=-1, path="/run/netns/a", cookie=7)
WEB = HostPort("TCP", 8080, 80)


def add(node: FakeNode, container: str, *ports: HostPort, uid: str = "") -> EndpointRecord:
    """Attach a pod that asks for ports of the host."""
    namespace = PodNamespace(fd=-1, path=f"/run/netns/{container}", cookie=hash(container))
    wanted = request(
        container=container, pod=container, pod_uid=uid, host_ports=ports, at_ns=node.clock.now_ns
    )
    node.service.add(wanted, namespace)
    endpoint = node.table.get_by_key(wanted.key)  # type: ignore[arg-type]
    assert endpoint is not None
    return endpoint.record


def delete(node: FakeNode, container: str) -> None:
    """Detach it."""
    node.service.delete(request("DEL", container, at_ns=node.clock.boottime_ns()))


def served(node: FakeNode) -> dict[str, str]:
    """Give what the datapath serves: host address, protocol and port -> pod address and port."""
    return {
        f"{front.address} {front.protocol} {front.port}": f"{pod.address} {pod.port}"
        for front, pod in node.datapath.host_ports.items()
    }


def test_a_port_is_served_in_both_families_until_del(node: FakeNode) -> None:
    record = add(node, "web", WEB)
    assert served(node) == {
        "0.0.0.0 6 8080": f"{record.ipv4} 80",
        ":: 6 8080": f"{record.ipv6} 80",
    }
    assert node.datapath.loopback_out == {record.id}
    delete(node, "web")
    assert served(node) == {}
    node.service.settle()
    node.assert_empty()


# (address that is asked for, host addresses that are served, whether 127.0.0.1 has to get out)
ADDRESSES = [
    ("0.0.0.0", ["0.0.0.0"], True),
    ("::", ["::"], False),
    ("192.0.2.1", ["192.0.2.1"], False),
    ("2001:db8::1", ["2001:db8::1"], False),
    ("127.0.0.1", ["127.0.0.1"], True),
]


@pytest.mark.parametrize(("host_ip", "fronts", "loopback"), ADDRESSES)
def test_an_address_of_the_host_chooses_the_family(
    node: FakeNode, host_ip: str, fronts: Sequence[str], loopback: bool
) -> None:
    add(node, "web", HostPort("UDP", 53, 53, host_ip))
    assert [str(front.address) for front in node.datapath.host_ports] == fronts
    assert bool(node.datapath.loopback_out) is loopback


# (what the first pod has, what the second asks for, whether both can be served)
PAIRS = [
    (WEB, WEB, False),
    (WEB, HostPort("TCP", 8080, 81), False),
    (WEB, HostPort("UDP", 8080, 80), True),
    (WEB, HostPort("TCP", 8081, 80), True),
    (WEB, HostPort("TCP", 8080, 80, "192.0.2.1"), False),
    (HostPort("TCP", 80, 80, "192.0.2.1"), HostPort("TCP", 80, 80, "192.0.2.1"), False),
    (HostPort("TCP", 80, 80, "192.0.2.1"), HostPort("TCP", 80, 80, "192.0.2.2"), True),
    (HostPort("TCP", 80, 80, "192.0.2.1"), HostPort("TCP", 80, 80, "0.0.0.0"), False),
    (HostPort("TCP", 80, 80, "192.0.2.1"), HostPort("TCP", 80, 80, "::"), True),
    (HostPort("TCP", 80, 80, "0.0.0.0"), HostPort("TCP", 80, 80, "::"), True),
]


@pytest.mark.parametrize(("first", "second", "fits"), PAIRS)
def test_two_pods_share_no_port_of_one_address(
    node: FakeNode, first: HostPort, second: HostPort, fits: bool
) -> None:
    add(node, "first", first)
    before = served(node)
    if fits:
        add(node, "second", second)
        assert served(node).items() > before.items()
        return
    with pytest.raises(InvalidConfiguration, match=r"port .* leads to pod default/first") as caught:
        add(node, "second", second)
    assert caught.value.hint
    assert caught.value.faults[0].path == "runtimeConfig.portMappings"
    assert (served(node), len(node.journal.list_records())) == (before, 1)
    delete(node, "first")
    add(node, "second", second)


def test_an_address_of_a_family_that_the_pod_has_not_is_named(tmp_path: Path) -> None:
    with FakeNode(tmp_path, cidrs=("10.77.0.0/24",)) as node:
        with pytest.raises(InvalidConfiguration, match="no IPv6 address for host address 2001:db8"):
            add(node, "web", HostPort("TCP", 80, 80, "2001:db8::1"))
        node.assert_empty()
        add(node, "web", WEB)
        assert list(served(node)) == ["0.0.0.0 6 8080"]


@pytest.mark.parametrize(
    ("address", "asked", "refused"),
    [
        ("0.0.0.0", HostPort("UDP", 8472, 1), True),
        ("0.0.0.0", HostPort("UDP", 8472, 1, "192.0.2.1"), True),
        ("0.0.0.0", HostPort("TCP", 8472, 1), False),
        ("127.0.0.1", HostPort("UDP", 8472, 1), True),
        ("127.0.0.1", HostPort("UDP", 8472, 1, "192.0.2.1"), False),
    ],
)
def test_a_port_that_the_node_needs_is_refused_and_says_why(
    node: FakeNode, address: str, asked: HostPort, refused: bool
) -> None:
    needed = HostSocket(ipaddress.ip_address(address), PROTOCOLS["UDP"], 8472)
    node.reserved_ports.append(ReservedPort(needed, "where tunnels end"))
    if not refused:
        add(node, "web", asked)
        return
    with pytest.raises(InvalidConfiguration, match=r"UDP port 8472.* is where tunnels end"):
        add(node, "web", asked)
    node.assert_empty()


def test_the_newer_sandbox_of_a_pod_takes_over_and_the_older_frees_nothing(node: FakeNode) -> None:
    other = HostPort("UDP", 53, 53)
    old = add(node, "old", WEB, other, uid="u1")
    new = add(node, "new", WEB, uid="u1")
    assert served(node)["0.0.0.0 6 8080"] == f"{new.ipv4} 80"
    assert served(node)["0.0.0.0 17 53"] == f"{old.ipv4} 53"
    delete(node, "old")
    assert served(node) == {"0.0.0.0 6 8080": f"{new.ipv4} 80", ":: 6 8080": f"{new.ipv6} 80"}
    with pytest.raises(InvalidConfiguration):
        add(node, "stranger", WEB, uid="u2")


def test_the_older_sandbox_gets_its_port_back_when_the_newer_ends_first(node: FakeNode) -> None:
    old = add(node, "old", WEB, uid="u1")
    add(node, "new", WEB, uid="u1")
    delete(node, "new")
    assert served(node)["0.0.0.0 6 8080"] == f"{old.ipv4} 80"


def test_a_failed_add_gives_its_ports_back(node: FakeNode) -> None:
    old = add(node, "old", WEB, uid="u1")
    before = served(node)
    for fail in ("write_host_ports", "let_loopback_out"):
        node.datapath.fail[fail] = KernelFailure(12, "change", "host ports")
        with pytest.raises(KernelFailure):
            add(node, "new", WEB, uid="u1")
        assert served(node) == before
    node.journal.fail_write(2)  # the commit, when everything is in force already
    with pytest.raises(StorageFailure):
        add(node, "new", WEB, uid="u1")
    node.service.settle()
    assert served(node) == before
    assert [record.id for record in node.journal.list_records()] == [old.id]


def test_an_end_that_fails_is_tried_again(node: FakeNode) -> None:
    add(node, "web", WEB)
    node.datapath.fail["write_host_ports"] = KernelFailure(12, "change", "host ports")
    delete(node, "web")
    assert served(node)
    node.service.settle()
    assert served(node) == {}
    node.service.settle()
    node.assert_empty()


def test_gc_frees_the_ports_of_what_is_gone(node: FakeNode) -> None:
    add(node, "web", WEB)
    node.service.collect(request("GC", at_ns=node.clock.boottime_ns(), valid_attachments=()))
    assert served(node) == {}


def test_a_restart_serves_what_lives_and_nothing_of_what_was_cut_off(node: FakeNode) -> None:
    old = add(node, "old", WEB, uid="u1")
    new = add(node, "new", WEB, uid="u1")
    node.journal.write(msgspec.structs.replace(new, phase=Phase.ADDING))
    node.restart()
    assert served(node)["0.0.0.0 6 8080"] == f"{old.ipv4} 80"
    assert [record.id for record in node.journal.list_records()] == [old.id]


@pytest.mark.parametrize("phase", [Phase.ADDING, Phase.DELETING])
def test_a_restart_has_flows_forgotten_by_what_was_cut_off(node: FakeNode, phase: Phase) -> None:
    """Nothing of it is served any more, so nothing but the record tells to whom its ports led."""
    record = add(node, "web", HostPort("UDP", 53, 54))
    node.journal.write(msgspec.structs.replace(record, phase=phase))
    node.datapath.host_ports = {}
    node.restart()
    node.service.settle()
    assert set(node.datapath.ended_host_ports) == {
        (HostSocket(EACH_ADDRESS[address.version], 17, 53), PodSocket(address, 54))
        for address in record.addresses
    }


def test_a_record_of_an_older_build_has_none_and_an_older_build_reads_ours(node: FakeNode) -> None:
    class OldRecord(msgspec.Struct):
        id: int
        ipv4: str

    record = add(node, "web", WEB)
    written = msgspec.json.encode(record)
    assert msgspec.json.decode(written, type=EndpointRecord) == record
    assert msgspec.json.decode(written, type=OldRecord).ipv4 == record.ipv4
    fields = msgspec.json.decode(written)
    del fields["host_ports"]
    assert msgspec.convert(fields, EndpointRecord).host_ports == ()


def test_what_is_in_force_is_the_newer_of_two(node: FakeNode) -> None:
    old, new = (add(node, name, WEB, uid="u1") for name in ("old", "new"))
    wanted = {
        HostSocket(EACH_ADDRESS[address.version], 6, 8080): PodSocket(address, 80)
        for address in new.addresses
    }
    assert in_force([new, old]) == wanted
