"""Pairs from the host's side: born whole or not at all, never somebody else's, deleted in
batches.
"""

import errno
import gc
import ipaddress
import os
from collections.abc import Iterator, Sequence

import pytest

from podwire.datapath import device
from podwire.datapath.device import (
    CONDEMNED_GROUP,
    HostSide,
    LeftoverDevice,
    compare_device,
    create_device,
    list_devices,
    plan_device,
    repair_device,
    require_owned,
)
from podwire.datapath.pod_net import compare_pod, configure_pod
from podwire.datapath.reaper import Reaper
from podwire.datapath.routes import SourceAddresses, list_pod_routes, remove_host_routes
from podwire.kernel import probe
from podwire.kernel.netlink import EncodedBatch, NetlinkSocket
from podwire.kernel.probe import Feature
from podwire.kernel.rtnl.link import (
    LinkEnd,
    create_link,
    create_veth,
    delete_group,
    delete_link,
    set_link,
)
from podwire.kernel.sysctl import write_sysctl
from podwire.model.errors import (
    ForeignObject,
    InvalidConfiguration,
    InvalidEnvironment,
    KernelFailure,
    Unavailable,
    Unsupported,
)
from podwire.model.ids import EndpointId, IfIndex, InterfaceName, device_alias
from tests.kernel.conftest import NODE, DeviceRig, Namespace, new_namespace


@pytest.fixture
def deleting(host: Namespace) -> Iterator[NetlinkSocket]:
    """The reaper's own socket."""
    with NetlinkSocket() as opened:
        yield opened


def _links(namespace: Namespace) -> set[str]:
    return {link["ifname"] for link in namespace.ip("link")}


@pytest.mark.parametrize("families", ["4", "6", "46"])
def test_a_new_pair_is_as_planned_and_compares_equal(rig: DeviceRig, families: str) -> None:
    record = rig.make_record(1, namespace=rig.pod, families=families)
    rig.create(record)
    assert rig.compare(record) == []
    shown = rig.host.ip("link", "show", record.device.host_name)[0]
    assert shown["ifalias"] == device_alias(NODE, record.id)
    assert shown["inet6_addr_gen_mode"] == "none"
    assert "UP" in shown["flags"]
    routes = rig.host.ip("-4", "route", "show", "proto", "199")
    assert [(route["dst"], route["prefsrc"]) for route in routes] == (
        [(record.ipv4, "10.9.0.1")] if record.ipv4 else []
    )
    neighbours = rig.host.ip("neigh", "show", "dev", record.device.host_name)
    assert {
        (neighbour["dst"], neighbour["lladdr"], neighbour["state"][0]) for neighbour in neighbours
    } == {(str(address), record.device.pod_mac, "PERMANENT") for address in record.addresses}
    assert rig.host.ip("-6", "addr", "show", "dev", record.device.host_name) == []


def test_without_node_addresses_routes_have_no_source(rig: DeviceRig) -> None:
    bare = HostSide(NODE, rig.side.programs, SourceAddresses())
    record = rig.make_record(1, namespace=rig.pod)
    create_device(rig.netlink, record, rig.pod.pod, bare)
    assert compare_device(rig.netlink, record, bare) == []
    assert "prefsrc" not in rig.host.ip("-4", "route", "show", "proto", "199")[0]


def test_programs_sit_on_the_device_before_it_is_up(
    rig: DeviceRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    original = NetlinkSocket.attempt_batch

    def attempt(self: NetlinkSocket, batch: EncodedBatch) -> Sequence[KernelFailure | None]:
        sent.extend(request.call.split(" to device")[0] for request in batch.requests())
        return original(self, batch)

    monkeypatch.setattr(NetlinkSocket, "attempt_batch", attempt)
    rig.create(rig.make_record(1))
    up = max(position for position, call in enumerate(sent) if call == "change device")
    assert up > sent.index("attach program to_pod")
    assert sent.index("add clsact queue") < sent.index("attach program from_pod")


def test_an_interface_name_that_exists_in_the_pod_is_the_requests_fault(rig: DeviceRig) -> None:
    with NetlinkSocket.open_in(rig.pod.fd.fileno()) as inside:
        inside.execute([create_veth(LinkEnd("eth0"), LinkEnd("other"), None)])
    with pytest.raises(InvalidConfiguration, match="interface name exists"):
        rig.create(rig.make_record(1))
    assert _links(rig.host) == {"lo"}


def test_a_foreign_device_with_our_name_is_left_alone(rig: DeviceRig) -> None:
    record = rig.make_record(1)
    name = record.device.host_name
    rig.netlink.execute([create_veth(LinkEnd(name), LinkEnd("theirs"), None)])
    before = rig.host.ip("link", "show", name)
    with pytest.raises(ForeignObject, match=name):
        rig.create(record)
    assert rig.host.ip("link", "show", name) == before
    assert _links(rig.pod) == {"lo"}
    owned, foreign = list_devices(rig.netlink)
    assert (owned, foreign) == ([], [name])


def test_a_foreign_device_with_our_index_is_left_alone(rig: DeviceRig) -> None:
    record = rig.make_record(1)
    stranger = LinkEnd("stranger", record.device.host_ifindex)
    rig.netlink.execute([create_veth(stranger, LinkEnd("theirs"), None)])
    with pytest.raises(Unavailable, match="index"):
        rig.create(record)
    shown = rig.host.ip("link", "show", "stranger")[0]
    assert "ifalias" not in shown
    assert rig.host.tc("filter", "show", "dev", "stranger", "ingress") == []
    again = plan_device(
        rig.netlink, record.id, record.device.host_name, InterfaceName("eth0"), mtu=1450
    )
    assert again.host_ifindex != record.device.host_ifindex


def test_an_index_taken_in_the_pod_is_worth_another_try(rig: DeviceRig) -> None:
    record = rig.make_record(1)
    with NetlinkSocket.open_in(rig.pod.fd.fileno()) as inside:
        taken = LinkEnd("taken", record.device.pod_ifindex)
        inside.execute([create_veth(taken, LinkEnd("other"), None)])
    with pytest.raises(Unavailable, match="index"):
        rig.create(record)
    assert _links(rig.host) == {"lo"}


def test_our_own_condemned_device_is_told_apart(
    rig: DeviceRig, deleting: NetlinkSocket, other_pod: Namespace
) -> None:
    first = rig.make_record(1, container="same")
    rig.create(first)
    second = rig.make_record(2, container="same")
    with pytest.raises(LeftoverDevice) as alive:
        rig.create(second, other_pod)
    assert (alive.value.owner.endpoint_id, alive.value.condemned) == (first.id, False)
    assert f"of node '{NODE}'" in alive.value.message
    assert alive.value.hint.endswith(f"ip link del {first.device.host_name}")
    reaper = Reaper(rig.netlink, deleting)
    reaper.condemn(first.id, first.device.host_ifindex)
    with pytest.raises(LeftoverDevice) as dying:
        rig.create(second, other_pod)
    assert dying.value.condemned
    assert "ip link" not in dying.value.hint
    assert reaper.reap() == [first.id]
    rig.create(second, other_pod)


def test_a_failure_after_birth_leaves_no_device(rig: DeviceRig) -> None:
    broken = HostSide(
        NODE, rig.side.programs, SourceAddresses(ipv4=None, ipv6=ipaddress.IPv6Address("fd42::42"))
    )
    with pytest.raises(KernelFailure, match="add route"):
        create_device(rig.netlink, rig.make_record(1), rig.pod.pod, broken)
    assert _links(rig.host) == _links(rig.pod) == {"lo"}


def test_a_stale_route_of_ours_is_replaced_and_a_foreign_one_is_not(
    rig: DeviceRig, other_pod: Namespace
) -> None:
    first, second = rig.make_record(1), rig.make_record(2)
    rig.host.run("ip", "route", "add", first.ipv4, "dev", "lo", "proto", "199")
    rig.host.run("ip", "route", "add", second.ipv4, "dev", "lo", "proto", "static")
    rig.create(first)
    assert rig.compare(first) == []
    with pytest.raises(ForeignObject, match=second.ipv4):
        rig.create(second, other_pod)
    assert _links(other_pod) == {"lo"}
    assert rig.host.ip("-4", "route", "show", second.ipv4)[0]["dev"] == "lo"


def test_ipv6_switched_off_for_new_devices_is_switched_on_for_ours(rig: DeviceRig) -> None:
    write_sysctl("1", "ipv6", "conf", "default", "disable_ipv6")
    record = rig.make_record(1)
    rig.create(record)
    assert rig.compare(record) == []


DAMAGES = [
    pytest.param(["ip", "link", "set", "{dev}", "alias", "podwire:other:1"], "alias", id="alias"),
    pytest.param(["ip", "link", "set", "{dev}", "mtu", "1300"], "mtu", id="mtu"),
    pytest.param(["ip", "link", "set", "{dev}", "address", "02:00:00:00:00:09"], "mac", id="mac"),
    pytest.param(["ip", "link", "set", "{dev}", "down"], "state", id="down"),
    pytest.param(["tc", "qdisc", "del", "dev", "{dev}", "clsact"], "from_pod", id="no-clsact"),
    pytest.param(
        ["tc", "filter", "del", "dev", "{dev}", "egress"], "to_pod is not", id="no-program"
    ),
    pytest.param(["ip", "route", "del", "{ipv4}"], "host route to {ipv4}", id="no-route"),
    pytest.param(["ip", "-6", "route", "del", "{ipv6}"], "host route to {ipv6}", id="no-route6"),
    pytest.param(
        ["ip", "route", "replace", "{ipv4}", "dev", "{dev}", "proto", "199"],
        "source",
        id="route-without-source",
    ),
    pytest.param(
        ["ip", "neigh", "del", "{ipv4}", "dev", "{dev}"], "neighbour {ipv4}", id="no-neighbour"
    ),
    pytest.param(
        ["ip", "neigh", "replace", "{ipv6}", "dev", "{dev}", "lladdr", "02:00:00:00:00:01"],
        "neighbour {ipv6}",
        id="neighbour-elsewhere",
    ),
]


@pytest.mark.parametrize(("damage", "named"), DAMAGES)
def test_damage_is_named_and_repaired(rig: DeviceRig, damage: list[str], named: str) -> None:
    record = rig.make_record(1)
    rig.create(record)
    words = {"dev": record.device.host_name, "ipv4": record.ipv4, "ipv6": record.ipv6}
    rig.host.run(*(part.format(**words) for part in damage))
    differences = rig.compare(record)
    assert any(named.format(**words) in text for text in differences), differences
    assert rig.repair(record) == differences
    assert rig.compare(record) == []
    assert rig.repair(record) == []


def test_other_programs_are_named_and_replaced_in_place(rig: DeviceRig) -> None:
    record = rig.make_record(1)
    rig.create(record)
    old = rig.side.programs
    swapped = HostSide(
        NODE,
        type(old)(old.to_pod_fd, old.from_pod_fd, old.to_pod_id, old.from_pod_id),
        rig.side.sources,
    )
    assert len(compare_device(rig.netlink, record, swapped)) == 2
    repair_device(rig.netlink, record, swapped)
    assert compare_device(rig.netlink, record, swapped) == []


def test_a_missing_device_is_named_and_not_invented(rig: DeviceRig) -> None:
    record = rig.make_record(1)
    named = rig.compare(record)
    assert named == [f"host device {record.device.host_name!r} is missing"]
    assert rig.repair(record) == named
    assert require_owned(rig.netlink, record) is None


def test_repair_refuses_a_stranger_at_our_index(rig: DeviceRig) -> None:
    record = rig.make_record(1)
    rig.netlink.execute(
        [create_veth(LinkEnd("stranger", record.device.host_ifindex), LinkEnd("peer"), None)]
    )
    with pytest.raises(ForeignObject, match="stranger"):
        rig.repair(record)


def test_a_pair_killed_between_birth_and_alias_is_still_known_as_ours(rig: DeviceRig) -> None:
    record = rig.make_record(7)
    rig.create(record)
    rig.netlink.execute([set_link(record.device.host_ifindex, alias="")])
    owned, foreign = list_devices(rig.netlink)
    assert foreign == []
    assert [(found.endpoint_id, found.node_name) for found in owned] == [(record.id, "")]
    assert rig.repair(record) != []
    assert list_devices(rig.netlink)[0][0].node_name == NODE


def test_reaping_takes_all_condemned_pairs_and_only_those(
    rig: DeviceRig, deleting: NetlinkSocket
) -> None:
    records = [rig.make_record(number, if_name=f"eth{number}") for number in range(1, 6)]
    for record in records:
        rig.create(record)
    reaper = Reaper(rig.netlink, deleting)
    for record in records[:3]:
        reaper.condemn(record.id, record.device.host_ifindex)
    assert len(reaper) == 3
    assert list(reaper.reap()) == [record.id for record in records[:3]]
    assert list(reaper.reap()) == []
    kept = {record.device.host_name for record in records[3:]}
    assert _links(rig.host) == {"lo", *kept}
    assert {str(route.destination.network_address) for route in list_pod_routes(rig.netlink)} == {
        str(address) for record in records[3:] for address in record.addresses
    }


def test_condemning_what_is_gone_or_foreign_touches_nothing_and_reports_it_gone(
    host: Namespace, netlink: NetlinkSocket, deleting: NetlinkSocket
) -> None:
    netlink.execute([create_veth(LinkEnd("stranger", 5001), LinkEnd("peer"), None)])
    reaper = Reaper(netlink, deleting)
    reaper.condemn(EndpointId(1), IfIndex(5001))
    reaper.condemn(EndpointId(2), IfIndex(6001))
    assert set(reaper.reap()) == {1, 2}
    assert host.ip("link", "show", "stranger")[0]["group"] == "default"


def test_a_device_that_vanishes_with_its_namespace_is_reported_gone(
    rig: DeviceRig, deleting: NetlinkSocket
) -> None:
    record = rig.make_record(1)
    rig.create(record)
    reaper = Reaper(rig.netlink, deleting)
    reaper.condemn(record.id, record.device.host_ifindex)
    rig.netlink.execute([delete_link(record.device.host_ifindex)])
    assert list(reaper.reap()) == [record.id]


def test_a_new_agent_finds_what_an_old_one_condemned(
    rig: DeviceRig, deleting: NetlinkSocket
) -> None:
    record = rig.make_record(1)
    rig.create(record)
    Reaper(rig.netlink, deleting).condemn(record.id, record.device.host_ifindex)
    found = list_devices(rig.netlink)[0][0]
    assert found.condemned
    successor = Reaper(rig.netlink, deleting)
    successor.condemn(found.endpoint_id, found.index)
    assert list(successor.reap()) == [record.id]


def test_an_index_is_never_planned_twice_nor_for_both_ends(netlink: NetlinkSocket) -> None:
    name = InterfaceName("pw0")
    devices = [
        plan_device(netlink, EndpointId(number), name, name, mtu=1500)
        for number in (1, 2, 3, 1000, 2**30, 2**32 - 1)
    ]
    indexes = [
        index for planned in devices for index in (planned.host_ifindex, planned.pod_ifindex)
    ]
    assert len(set(indexes)) == len(indexes)
    assert all(1 << 20 <= index < 1 << 31 for index in indexes)


def test_a_given_mac_is_the_pods(netlink: NetlinkSocket) -> None:
    name = InterfaceName("pw0")
    device = plan_device(netlink, EndpointId(1), name, name, mtu=1500, pod_mac="02:00:00:00:00:05")
    assert (device.pod_mac, device.host_mac) == ("02:00:00:00:00:05", "0e:70:00:00:00:01")


def test_group_delete_is_refused_quietly_when_nothing_is_condemned(netlink: NetlinkSocket) -> None:
    failures = netlink.attempt([delete_group(CONDEMNED_GROUP)])
    assert [failure.errno for failure in failures if failure is not None] == [errno.ENODEV]


def test_a_namespace_that_is_the_hosts_own_is_refused(rig: DeviceRig) -> None:
    with pytest.raises(InvalidEnvironment, match="host's own"):
        rig.create(rig.make_record(1), rig.host)
    assert _links(rig.host) == {"lo"}


def test_an_mtu_that_ipv6_cannot_use_is_the_requests_fault(rig: DeviceRig) -> None:
    with pytest.raises(InvalidConfiguration, match="1280"):
        rig.create(rig.make_record(1, mtu=1279))
    assert _links(rig.host) == {"lo"}
    small = rig.make_record(2, namespace=rig.pod, mtu=1279, families="4")
    rig.create(small)
    configure_pod(small, rig.pod.pod)
    assert rig.compare(small) == compare_pod(small, rig.pod.pod) == []


def test_a_kernel_without_pairs_is_unsupported(
    rig: DeviceRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kind that no kernel knows stands for the one that this kernel lacks."""
    monkeypatch.setattr(device, "create_veth", lambda host, *_: create_link("pwnosuch", host))
    missing = {Feature.VETH: lambda: probe._probe_kind("pwnosuch")}
    monkeypatch.setattr(probe, "_PROBES", missing)
    with pytest.raises(Unsupported, match="Unknown device type"):
        rig.create(rig.make_record(1))


def test_marking_does_not_wait_for_a_delete_that_runs(
    rig: DeviceRig, deleting: NetlinkSocket
) -> None:
    record = rig.make_record(1)
    rig.create(record)
    reaper = Reaper(rig.netlink, deleting)
    with deleting._lock:  # as while a delete waits for the kernel
        reaper.condemn(record.id, record.device.host_ifindex)
    assert list(reaper.reap()) == [record.id]


def test_lives_leave_no_descriptor_and_no_object(rig: DeviceRig, deleting: NetlinkSocket) -> None:
    reaper = Reaper(rig.netlink, deleting)
    gc.collect()  # what others dropped would be closed at some moment
    before = (len(os.listdir("/proc/self/fd")), rig.host.ip("route"), rig.host.ip("-6", "route"))
    for number in range(1, 21):
        with new_namespace() as pod:
            record = rig.make_record(number, container="same")
            rig.create(record, pod)
            configure_pod(record, pod.pod)
            remove_host_routes(rig.netlink, record)
            reaper.condemn(record.id, record.device.host_ifindex)
            assert list(reaper.reap()) == [record.id]
    assert _links(rig.host) == {"lo"}
    after = (len(os.listdir("/proc/self/fd")), rig.host.ip("route"), rig.host.ip("-6", "route"))
    assert after == before
