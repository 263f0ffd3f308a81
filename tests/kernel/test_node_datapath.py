"""The node's datapath on the running kernel: what survives an agent, what is refused, what is
compared.
"""

import contextlib
import gc
import ipaddress
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from podwire.datapath import abi, conntrack_maps
from podwire.datapath import maps as tables
from podwire.datapath.flow_events import EventReader
from podwire.datapath.inventory import remove_everything
from podwire.datapath.maps import read_metrics
from podwire.datapath.node import KernelDatapath
from podwire.datapath.programs import Pins, ensure_bpffs, list_versions
from podwire.kernel import bpf, netns
from podwire.kernel.netlink import NetlinkSocket
from podwire.kernel.probe import load_program
from podwire.kernel.rtnl.link import LinkEnd, create_link, delete_link, set_link
from podwire.kernel.rtnl.tc import FROM_POD_HOOK, set_bpf_filter
from podwire.kernel.sysctl import read_sysctl, write_sysctl
from podwire.model.endpoint import Bandwidth, EndpointRecord
from podwire.model.errors import Conflict, NewerData, Unavailable
from podwire.model.flow import FlowEvent, Verdict
from podwire.model.ids import EndpointId
from podwire.model.interfaces import EndpointConfig
from tests.first_packets import Sender
from tests.kernel.conftest import NODE_IPV4, NODE_IPV6, new_namespace, pings
from tests.kernel.node_world import KernelWorld, kernel_world
from tests.packet import frames
from tests.plain_pods import OPEN
from tests.waiting import wait_for

DEADLINE_S = 30.0
ATTACHMENTS = 100
"""Of so many, about seven were late before anything was done about it."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[KernelWorld]:
    with kernel_world(tmp_path) as made:
        yield made


def program_ids(world: KernelWorld) -> dict[str, int]:
    return world.program_ids()


def map_ids(world: KernelWorld) -> dict[str, int]:
    maps = world.datapath.maps
    return {name: getattr(maps, name).info.id for name in maps.names()}


# Restart


def test_a_second_agent_reuses_programs_maps_and_seed_without_the_verifier(
    world: KernelWorld,
) -> None:
    before = (program_ids(world), map_ids(world), tables.read_settings(world.datapath.maps))
    world.restart()
    after = (program_ids(world), map_ids(world), tables.read_settings(world.datapath.maps))
    assert after == before
    assert after[2].hash_seed != 0


def test_another_template_gets_new_programs_over_the_same_maps(world: KernelWorld) -> None:
    maps, programs = map_ids(world), program_ids(world)
    world.restart(constants={"pwt_unknown_feature": 1})
    assert map_ids(world) == maps
    assert not set(program_ids(world).values()) & set(programs.values())
    homes = list(Pins(world.plan.bpf_dir, abi.ABI_VERSION).programs.iterdir())
    assert [home.name for home in homes] == [world.datapath.template_id]


def test_a_load_that_was_cut_off_is_done_again(world: KernelWorld) -> None:
    pins = Pins(world.plan.bpf_dir, abi.ABI_VERSION)
    maps, programs = map_ids(world), program_ids(world)
    world.datapath.close()
    next(pins.programs.iterdir()).rename(pins.programs / "filling-1")
    world.restart()
    assert map_ids(world) == maps
    assert not set(program_ids(world).values()) & set(programs.values())
    assert len(list(pins.programs.iterdir())) == 1


def test_a_pod_keeps_its_network_while_the_agent_is_away(world: KernelWorld) -> None:
    record, pod = world.attach(2)
    world.datapath.close()
    assert pings(pod, str(NODE_IPV4))
    assert pings(pod, str(NODE_IPV6))
    world.restart()
    assert world.datapath.compare_endpoint(record, OPEN, pod.pod) == []


def test_collection_goes_on_without_an_agent(world: KernelWorld) -> None:
    path = str(Pins(world.plan.bpf_dir, abi.ABI_VERSION).maps / "pw_ct_timer")
    world.datapath.close()
    timer = bpf.open_any_pinned_map(path)
    assert timer is not None
    with timer:

        def last_tick() -> int:
            [(_, row)] = list(timer.items())
            return abi.Collection.unpack(row[16:]).last_tick_ns

        first = last_tick()
        wait_for(lambda: last_tick() > first, "a tick of the collector")


# What is refused


def test_pins_of_a_newer_layout_are_refused_and_left_alone(world: KernelWorld) -> None:
    world.datapath.close()
    newer = Pins(world.plan.bpf_dir, abi.ABI_VERSION + 1)
    newer.maps.mkdir(parents=True)
    (newer.root / f"readable-by-v{abi.ABI_VERSION + 1}").mkdir()
    write_sysctl("0", "ipv4", "ip_forward")
    with pytest.raises(NewerData) as refusal:
        KernelDatapath(world.plan).prepare()
    assert read_sysctl("ipv4", "ip_forward") == "0"
    assert f"version {abi.ABI_VERSION + 1}" in refusal.value.message
    assert f"version {abi.ABI_VERSION}" in refusal.value.message
    assert list_versions(world.plan.bpf_dir) == [abi.ABI_VERSION, abi.ABI_VERSION + 1]


def test_pins_that_another_agent_has_are_left_alone_until_it_ends(world: KernelWorld) -> None:
    intruder = KernelDatapath(world.plan)
    with pytest.raises(Conflict, match="another agent"):
        intruder.prepare()
    assert not world.datapath.read_inventory().devices  # it works on
    world.datapath.close()
    with intruder:
        pass


def test_missing_objects_are_named_with_what_to_do(world: KernelWorld, tmp_path: Path) -> None:
    world.datapath.close()
    plan = replace(world.plan, object_dir=tmp_path / "absent")
    with pytest.raises(Unavailable, match=r"absent/from_pod\.bpf\.o") as refusal:
        KernelDatapath(plan).prepare()
    assert "scripts/setup" in refusal.value.hint


def test_failed_preparation_gives_every_descriptor_back(world: KernelWorld, tmp_path: Path) -> None:
    world.datapath.close()
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in world.plan.object_dir.glob("*.bpf.o"):
        (broken / path.name).write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    gc.collect()  # what others dropped would be closed at some moment
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(Exception, match="open object"):
        KernelDatapath(replace(world.plan, object_dir=broken)).prepare()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_bpf_file_system_is_mounted_where_none_is(tmp_path: Path) -> None:
    directory = tmp_path / "own"
    ensure_bpffs(directory)
    try:
        ensure_bpffs(directory)
        assert bpf.is_bpffs(str(directory))
    finally:
        subprocess.run(["umount", str(directory)], check=True)


# The node's own rows


def test_ipcache_knows_the_cluster_the_blocks_and_the_node(world: KernelWorld) -> None:
    found = {str(entry.network): entry for entry in tables.list_ipcache(world.datapath.maps)}
    local, native = abi.IpcacheFlags.LOCAL, abi.IpcacheFlags.NATIVE
    node = abi.IpcacheFlags.NODE_ADDRESS
    expected = {
        "10.77.0.0/16": (abi.Identity.UNMANAGED, native),
        "fd77::/64": (abi.Identity.UNMANAGED, native),
        "10.77.0.0/24": (abi.Identity.UNMANAGED, local),
        "fd77::/120": (abi.Identity.UNMANAGED, local),
        f"{NODE_IPV4}/32": (abi.Identity.HOST, node),
        f"{NODE_IPV6}/128": (abi.Identity.HOST, node),
        "10.9.0.255/32": (abi.Identity.HOST, node),
        "fd99::/128": (abi.Identity.HOST, node),  # its subnet's routers
        "0.0.0.0/32": (abi.Identity.HOST, node),
        "::/128": (abi.Identity.HOST, node),
    }
    assert {name: (one.identity, one.flags) for name, one in found.items()} == expected


def test_changed_settings_keep_the_hash_seed(world: KernelWorld) -> None:
    before = tables.read_settings(world.datapath.maps)
    world.datapath.change_plan(replace(world.plan, conntrack_quota=77, tunnel_port=8472))
    after = tables.read_settings(world.datapath.maps)
    assert after == before._replace(conntrack_quota=77, tunnel_port=8472)


def test_conntrack_has_a_hash_in_every_slot_with_room_for_all(world: KernelWorld) -> None:
    sizes = [
        shard.info.max_entries
        for shard in conntrack_maps.open_conntrack_shards(world.datapath.maps)
    ]
    assert len(sizes) == abi.CONNTRACK_SHARDS
    assert sum(sizes) >= world.plan.conntrack_entries


# Endpoints


def test_nothing_passes_between_guard_and_opening(world: KernelWorld) -> None:
    namespace = world.new_namespace()
    pod = world.pods[namespace.cookie]
    record = world.make_record(3, namespace)
    world.datapath.create_guard(record)
    world.datapath.create_device(record, namespace)
    world.datapath.configure_pod(record, namespace)
    assert not pings(pod, str(NODE_IPV4), deadline_s=1)
    assert not pings(world.host, record.ipv4, deadline_s=1)
    world.datapath.open_endpoint(record, OPEN)
    assert pings(pod, str(NODE_IPV4))
    assert pings(world.host, record.ipv4)
    assert pings(world.host, record.ipv6)
    world.datapath.close_endpoint(record)
    assert not pings(pod, str(NODE_IPV4), deadline_s=1)


@contextlib.contextmanager
def busy_with_devices() -> Iterator[None]:
    """Make and delete devices in a namespace of its own all the time: the kernel has one lock for all of them."""
    ended = threading.Event()

    def churn() -> None:
        with new_namespace() as elsewhere, NetlinkSocket.open_in(elsewhere.fd.fileno()) as netlink:
            end = LinkEnd("pwtchurn", 5)
            while not ended.is_set():
                netlink.execute([create_link("bridge", end), set_link(5, up=True), delete_link(5)])

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_no_first_packet_to_an_attached_pod_is_lost(world: KernelWorld) -> None:
    """Neither end waits for a work of the kernel: the host's device has its queue, the pod knows its addresses."""
    _, neighbour = world.attach(2)
    with (
        Sender("the node", netns.named_path(world.host.name)) as node,
        Sender("a neighbour", netns.named_path(neighbour.name)) as pod,
        busy_with_devices(),
    ):
        for number in range(3, 3 + ATTACHMENTS):
            record, _ = world.attach(number)
            for sender in (node, pod):
                sender.send([record.ipv4, record.ipv6])
            assert not [*node.list_lost(), *pod.list_lost()]
            world.detach(record)


def test_pods_of_a_node_reach_each_other_in_both_families(world: KernelWorld) -> None:
    first, first_pod = world.attach(4)
    second, second_pod = world.attach(5)
    for family in ("ipv4", "ipv6"):
        assert pings(first_pod, getattr(second, family))
        assert pings(second_pod, getattr(first, family))


def advertise_router(record: EndpointRecord, destination: str) -> None:
    """Send a router advertisement to a pod, as a daemon on the node would, past the node's own stack."""
    words = struct.pack("!BBHII", 64, 0, 1800, 0, 0)
    body = frames.icmpv6(134, 0, int.from_bytes(words[:4], "big"), words[4:])
    packet = frames.ipv6("fe80::77", destination, body, hop_limit=255)
    device = record.device
    frame = frames.ethernet(device.pod_mac, device.host_mac, frames.ETH_P_IPV6, packet)
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sender:
        sender.bind((device.host_name, 0))
        # The kernel says so when a program drops it.
        with contextlib.suppress(OSError):
            sender.send(frame)


def test_no_router_advertisement_reaches_a_pod(world: KernelWorld) -> None:
    record, pod = world.attach(7)
    destinations = ("ff02::1", record.ipv6)
    before = pod.ip("-6", "route")
    for destination in destinations:
        advertise_router(record, destination)
    assert pod.ip("-6", "route") == before
    # The same without the program, so that it is known what the advertisement would have done.
    world.host.run("tc", "filter", "del", "dev", record.device.host_name, "egress")

    def has_learnt() -> bool:
        advertise_router(record, "ff02::1")
        return pod.ip("-6", "route") != before

    wait_for(has_learnt, "a route by the advertisement", pause_s=0.1)


def test_a_spoofed_packet_is_dropped_counted_and_told(world: KernelWorld) -> None:
    record, pod = world.attach(6)
    with EventReader(world.datapath.maps) as events:
        pod.ip("address", "add", "10.77.0.99/32", "dev", "eth0")
        pod.run("ping", "-c", "1", "-W", "1", "-I", "10.77.0.99", str(NODE_IPV4), check=False)
        found: list[FlowEvent] = []

        def seen() -> bool:
            found.extend(event for event in events.read() if event.source == "10.77.0.99")
            return bool(found)

        wait_for(seen, "the event of a dropped packet")
    event = found[0]
    assert (event.verdict, event.reason) == (Verdict.DROPPED, "source-address")
    assert (event.endpoint, event.hook, event.direction) == (record.id, "from_pod", "egress")
    assert (event.protocol, event.destination) == ("icmp", str(NODE_IPV4))
    dropped = {
        row.reason: row.packets
        for row in read_metrics(world.datapath.maps)
        if row.hook == abi.Hook.FROM_POD
    }
    assert dropped[abi.DropReason.SOURCE_ADDRESS] >= 1


def test_a_flow_is_remembered_for_both_ends(world: KernelWorld) -> None:
    first, first_pod = world.attach(7)
    second, _ = world.attach(8)
    assert pings(first_pod, second.ipv4)
    flows = list(conntrack_maps.list_conntrack(world.datapath.maps))
    assert {(flow.instance, flow.direction) for flow in flows} >= {
        (first.id, abi.Direction.EGRESS),
        (second.id, abi.Direction.INGRESS),
    }
    assert list(conntrack_maps.list_conntrack(world.datapath.maps, EndpointId(999))) == []


def test_a_container_started_again_at_once_does_not_wait_for_the_reaper(
    world: KernelWorld,
) -> None:
    old, _ = world.attach(9)
    world.detach(old)
    namespace = world.new_namespace()
    record = msgspec.structs.replace(
        world.make_record(10, namespace),
        device=msgspec.structs.replace(
            world.make_record(10, namespace).device, host_name=old.device.host_name
        ),
    )
    world.datapath.create_guard(record)
    world.datapath.create_device(record, namespace)
    assert list(world.datapath.reap_devices()) == [old.id]
    assert list(world.datapath.reap_devices()) == []


def _delete_config(world: KernelWorld, record: EndpointRecord) -> None:
    world.datapath.maps.pw_config.delete(record.device.host_ifindex.to_bytes(4, "little"))


def _delete_usage(world: KernelWorld, record: EndpointRecord) -> None:
    world.datapath.maps.pw_usage.delete(record.id.to_bytes(4, "little"))


def _delete_address(world: KernelWorld, record: EndpointRecord) -> None:
    key = tables.to_mapped(ipaddress.ip_address(record.ipv6))
    world.datapath.maps.pw_endpoints.delete(key)


def _give_address_away(world: KernelWorld, record: EndpointRecord) -> None:
    other = msgspec.structs.replace(record, id=EndpointId(4000), ipv6="")
    row = tables.endpoint_row(other).pack()
    world.datapath.maps.pw_endpoints.update(
        tables.to_mapped(ipaddress.ip_address(record.ipv4)), row
    )


def _deny(world: KernelWorld, record: EndpointRecord) -> None:
    world.datapath.open_endpoint(record, msgspec.structs.replace(OPEN, deny_egress=True))


def _swap_program(_world: KernelWorld, record: EndpointRecord) -> None:
    program, _, _ = load_program()
    assert program is not None
    with program, NetlinkSocket() as netlink:
        index = record.device.host_ifindex
        netlink.execute([set_bpf_filter(index, FROM_POD_HOOK, program.fileno(), "other")])


def _remove_routes(world: KernelWorld, record: EndpointRecord) -> None:
    world.datapath.remove_routes(record)


def _limit(world: KernelWorld, record: EndpointRecord) -> None:
    world.datapath.shape(record.device, Bandwidth(to_pod_bits_per_s=10**6), None)


def _delete_device(_world: KernelWorld, record: EndpointRecord) -> None:
    with NetlinkSocket() as netlink:
        netlink.execute([delete_link(record.device.host_ifindex)])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(_delete_config, "row of device 'pw", id="config-row"),
        pytest.param(_delete_usage, "quota row of endpoint 11 is missing", id="usage-row"),
        pytest.param(_delete_address, "row of address fd77::b is missing", id="address-row"),
        pytest.param(_give_address_away, "instance is 4000, should be 11", id="address-of-another"),
        pytest.param(_deny, "flags is", id="flags"),
        pytest.param(_swap_program, "program from_pod of", id="program"),
        pytest.param(_remove_routes, "host route to 10.77.0.11/32 is missing", id="routes"),
        pytest.param(_limit, "a rate limit to the pod is in force", id="rate-limit"),
        pytest.param(_delete_device, "is missing", id="device"),
    ],
)
def test_every_difference_is_named(
    world: KernelWorld, damage: Callable[[KernelWorld, EndpointRecord], None], said: str
) -> None:
    record, pod = world.attach(11)
    assert world.datapath.compare_endpoint(record, OPEN, pod.pod) == []
    damage(world, record)
    found = world.datapath.compare_endpoint(record, OPEN, None)
    assert any(said in difference for difference in found), found


@pytest.mark.parametrize(
    ("config", "bandwidth", "flags"),
    [
        pytest.param(
            EndpointConfig(),
            Bandwidth(),
            abi.ConfigFlags.OPEN | abi.ConfigFlags.HOST_ALLOWED,
            id="plain",
        ),
        pytest.param(
            EndpointConfig(deny_egress=True, deny_ingress=True, host_allowed=False),
            Bandwidth(),
            abi.ConfigFlags.OPEN | abi.ConfigFlags.DENY_EGRESS | abi.ConfigFlags.DENY_INGRESS,
            id="denied",
        ),
        pytest.param(
            EndpointConfig(audit=True, trace=True),
            Bandwidth(to_pod_bits_per_s=1000),
            abi.ConfigFlags.OPEN
            | abi.ConfigFlags.HOST_ALLOWED
            | abi.ConfigFlags.AUDIT
            | abi.ConfigFlags.TRACE
            | abi.ConfigFlags.SHAPED,
            id="traced-and-shaped",
        ),
        pytest.param(
            EndpointConfig(),
            Bandwidth(from_pod_bits_per_s=1000),
            abi.ConfigFlags.OPEN | abi.ConfigFlags.HOST_ALLOWED,
            id="shaped-from-the-pod-only",
        ),
    ],
)
def test_configuration_becomes_flags(
    world: KernelWorld, config: EndpointConfig, bandwidth: Bandwidth, flags: abi.ConfigFlags
) -> None:
    record = msgspec.structs.replace(
        world.make_record(12, world.new_namespace()), bandwidth=bandwidth
    )
    assert tables.config_row(record, config).flags == flags
    assert tables.config_row(record, None).flags == 0


def test_everything_of_ours_can_be_removed_without_an_agent(world: KernelWorld) -> None:
    world.attach(13)
    world.attach(14)
    world.datapath.close()
    assert remove_everything(world.plan.bpf_dir)
    names = {link["ifname"] for link in world.host.ip("link", "show")}
    assert names == {"lo"}
    assert world.host.ip("route", "show", "proto", "199") == []
    assert world.host.ip("-6", "route", "show", "proto", "199") == []
    assert "podwire" not in world.host.run("nft", "list", "tables")
    assert not world.plan.bpf_dir.exists()
    assert remove_everything(world.plan.bpf_dir) == []
