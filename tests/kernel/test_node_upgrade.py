"""Another map layout takes a running node over, and gives it back, while traffic flows."""

import ipaddress
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from podwire.datapath import abi, conntrack_maps
from podwire.datapath import maps as tables
from podwire.datapath.node import KernelDatapath
from podwire.datapath.node_maps import list_nodes
from podwire.datapath.policy_maps import read_cidrs
from podwire.datapath.programs import Pins, list_versions, remove_directory
from podwire.datapath.service_maps import read_services
from podwire.datapath.upgrade import Conversion, Piece, plan_conversion
from podwire.kernel import netns
from podwire.kernel.bpf import Member
from podwire.model.cluster import (
    TUNNEL_DEVICE,
    ClusterPlan,
    HostRoute,
    Peer,
    Prefix,
    TunnelMode,
    TunnelPlan,
    Way,
)
from podwire.model.endpoint import IPNetwork
from podwire.model.errors import NewerData
from podwire.model.ids import IdentityId
from podwire.model.interfaces import BackEnd, EndpointConfig, Frontend
from podwire.model.policy import (
    ANY_IDENTITY,
    CIDR_IDENTITY_FIRST,
    Direction,
    PolicyEntry,
    PolicyKey,
    PolicyRows,
    Verdict,
)
from tests.kernel.conftest import NODE_IPV4
from tests.kernel.node_world import KernelWorld, kernel_world
from tests.kernel.other_build import (
    Build,
    make_build,
    make_build_without_maps,
    make_last_layout,
)
from tests.kernel.test_cluster_traffic import Way2, connect, natively, two_nodes
from tests.kernel.traffic import PORT, Datagrams, Stream, continuous_traffic
from tests.plain_pods import OPEN

THIS = abi.ABI_VERSION
NEXT = THIS + 1
SOME_TRAFFIC_S = 0.3
UPLINK = "pwtup"
POLICY_MAPS = ("pw_policy", "pw_cidrs", "pw_hits")
ROWS: PolicyRows = {
    PolicyKey(2, Direction.EGRESS, 6, 80, 16): PolicyEntry(Verdict.DENY, 5, 1),
    PolicyKey(ANY_IDENTITY, Direction.EGRESS): PolicyEntry(Verdict.ALLOW, 4, 2),
}
CIDRS: dict[IPNetwork, int] = {ipaddress.ip_network("10.0.0.0/8"): CIDR_IDENTITY_FIRST}


@pytest.fixture(scope="module")
def next_build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    return make_build(tmp_path_factory.mktemp("next"), NEXT, oldest_reader=THIS)


@pytest.fixture(scope="module")
def closed_build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    return make_build(tmp_path_factory.mktemp("closed"), NEXT, oldest_reader=NEXT)


@pytest.fixture(scope="module")
def older_build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """A build of this layout from before there was policy."""
    return make_build_without_maps(tmp_path_factory.mktemp("older"), THIS, POLICY_MAPS)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[KernelWorld]:
    with kernel_world(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def last_layout(tmp_path_factory: pytest.TempPathFactory) -> Build:
    build = make_last_layout(tmp_path_factory.mktemp("last"))
    if build is None:
        pytest.skip("the repository's history is not here")
    return build


def let_flow(flows: list[Datagrams | Stream]) -> None:
    """Return when every flow has carried something more."""
    before = [flow.sent for flow in flows]
    deadline = time.monotonic() + 60
    while any(flow.sent < old + 200 for flow, old in zip(flows, before, strict=True)):
        assert time.monotonic() < deadline, "traffic has stopped"
        time.sleep(0.01)  # the traffic's threads need the interpreter


def test_the_last_layout_is_taken_over_and_gets_everything_back_under_traffic(
    world: KernelWorld, last_layout: Build
) -> None:
    _, first_pod = world.attach(2)
    second, second_pod = world.attach(3)
    ways = [(first_pod, second_pod, second.ipv4), (world.host, second_pod, second.ipv6)]
    with continuous_traffic(ways) as flows:
        let_flow(flows)
        for _ in range(2):
            known = conntrack_keys(world)
            world.datapath.close()
            older = last_layout.prepare_node(world.plan.bpf_dir)
            assert list_versions(world.plan.bpf_dir) == [last_layout.version]
            assert len(older["flows"]) >= len(ways) * 2
            let_flow(flows)
            world.restart()
            assert list_versions(world.plan.bpf_dir) == [THIS]
            assert conntrack_keys(world) >= known
            let_flow(flows)
        results = [flow.finish() for flow in flows]
    assert results == [[] if isinstance(flow, Datagrams) else "" for flow in flows]


@pytest.mark.parametrize("outer", [4, 6])
def test_the_last_layout_takes_a_tunnel_over_and_gives_it_back_under_traffic(
    tmp_path: Path, last_layout: Build, outer: int
) -> None:
    """Its programs do not mark what they tunnel, and its table is written a moment after they are attached.

    Nothing prepares the node for it: an agent that was killed has not done that.
    """
    way = Way2(Way.TUNNEL, outer=outer)
    with two_nodes(tmp_path) as nodes:
        connect(nodes, way)
        pods = [node.attach(9) for node in nodes]
        first = nodes[0]
        ways = [*natively(pods), (first.namespace, pods[1], "10.77.2.9")]
        with continuous_traffic(ways) as flows:
            let_flow(flows)
            for _ in range(2):
                with first.inside():
                    first.datapath.close()
                    with last_layout.taking_over(first.datapath.plan.bpf_dir, 1, 2):
                        assert list_versions(first.datapath.plan.bpf_dir) == [THIS - 1, THIS]
                        let_flow(flows)
                    let_flow(flows)
                    first.datapath = KernelDatapath(first.datapath.plan)
                    first.datapath.prepare()
                connect(nodes, way)
                let_flow(flows)
            results = [flow.finish() for flow in flows]
    assert results == [[] if isinstance(flow, Datagrams) else "" for flow in flows]


def test_a_longer_layout_takes_over_and_gives_back_under_traffic(
    world: KernelWorld, next_build: Build
) -> None:
    first, first_pod = world.attach(2)
    second, second_pod = world.attach(3)
    ways = [
        (first_pod, second_pod, second.ipv4),
        (second_pod, first_pod, first.ipv6),
        (first_pod, world.host, str(NODE_IPV4)),
        (world.host, second_pod, second.ipv6),
    ]
    with continuous_traffic(ways) as flows:
        let_flow(flows)
        before = world.datapath.maps, tables.read_settings(world.datapath.maps)
        known = {
            (flow.instance, flow.source_port) for flow in conntrack_maps.list_conntrack(before[0])
        }
        world.datapath.close()
        upgraded = next_build.prepare_node(world.plan.bpf_dir)
        let_flow(flows)
        assert list_versions(world.plan.bpf_dir) == [NEXT]
        assert upgraded["version"] == NEXT
        assert upgraded["seed"] == before[1].hash_seed
        assert {(row[0], row[3]) for row in upgraded["flows"]} >= known
        world.restart()
        let_flow(flows)
        assert list_versions(world.plan.bpf_dir) == [THIS]
        assert not set(upgraded["programs"]) & set(world.program_ids().values())
        assert {
            (flow.instance, flow.source_port)
            for flow in conntrack_maps.list_conntrack(world.datapath.maps)
        } >= known
        results = [flow.finish() for flow in flows]
    assert results == [[] if isinstance(flow, Datagrams) else "" for flow in flows]
    for record, pod in ((first, first_pod), (second, second_pod)):
        assert world.datapath.compare_endpoint(record, OPEN, pod.pod) == []


def test_questions_that_wait_for_their_answers_are_carried_over_and_back(
    world: KernelWorld, next_build: Build
) -> None:
    record, pod = world.attach(2)
    with netns.namespace(pod.fd.fileno()):
        asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with asking:
        asking.connect(("198.51.100.1", 53))
        asking.send(b"?")
        asked = asking.getsockname()[1]

    def is_known(flows: Iterable[tuple[int, int]]) -> bool:
        return (record.id, asked) in set(flows)

    def list_here() -> list[tuple[int, int]]:
        found = conntrack_maps.list_conntrack(world.datapath.maps)
        return [(one.instance, one.source_port) for one in found]

    assert is_known(list_here())
    world.datapath.close()
    upgraded = next_build.prepare_node(world.plan.bpf_dir)
    assert is_known((row[0], row[3]) for row in upgraded["flows"])
    world.restart()
    assert is_known(list_here())


@pytest.mark.parametrize("version", [4, 6])
def test_open_flows_to_services_and_new_ones_survive_another_layout_and_the_way_back(
    world: KernelWorld, next_build: Build, version: int
) -> None:
    _, client = world.attach(2)
    record, server = world.attach(3)
    address = record.ipv4 if version == 4 else record.ipv6
    vip = "10.96.0.10" if version == 4 else "fd96::10"
    world.datapath.services.write(
        {
            Frontend(ipaddress.ip_address(vip), port, protocol): [
                BackEnd(ipaddress.ip_address(address), port, protocol)
            ]
            for protocol in (socket.IPPROTO_TCP, socket.IPPROTO_UDP)
            for port in (PORT, PORT + 1)
        }
    )
    way = (client, server, address)
    with continuous_traffic([way], {address: vip}) as old:
        let_flow(old)
        world.datapath.close()
        next_build.prepare_node(world.plan.bpf_dir)
        assert list_versions(world.plan.bpf_dir) == [NEXT]
        let_flow(old)
        with continuous_traffic([way], {address: vip}, port=PORT + 1) as new:
            let_flow([*old, *new])
            world.restart()
            let_flow([*old, *new])
            results = [flow.finish() for flow in (*old, *new)]
    assert results == [[], "", [], ""]
    assert len(list(read_services(world.datapath.maps))) == 4


def tunnel_programs(world: KernelWorld) -> list[int]:
    """Give the numbers of the programs on the tunnel device."""
    return [
        one["options"]["prog"]["id"]
        for hook in ("ingress", "egress")
        for one in world.host.tc("filter", "show", "dev", TUNNEL_DEVICE, hook)
        if "prog" in one.get("options", {})
    ]


def test_another_layout_takes_other_nodes_and_the_tunnel_over(
    world: KernelWorld, next_build: Build
) -> None:
    remote = ipaddress.ip_network("10.77.2.0/24")
    outer = ipaddress.ip_address("10.9.0.2")
    tunnel = TunnelPlan(TunnelMode.FLOW, 8472, "0e:77:00:00:00:01", 1400, (), NODE_IPV4)
    plan = ClusterPlan(
        tunnel=tunnel,
        peers=(Peer(7, "n7", outer, 1400, Way.TUNNEL, addresses=(outer,)),),
        prefixes={remote: Prefix(IdentityId(abi.Identity.UNMANAGED), 7, Way.TUNNEL, 1400)},
        routes=(HostRoute(remote, Way.TUNNEL, None, None, 1400, 7),),
        inside=(remote,),
    )
    world.datapath.apply_cluster(plan)
    before = tunnel_programs(world)
    world.datapath.close()
    upgraded = next_build.prepare_node(world.plan.bpf_dir)
    assert set(tunnel_programs(world)) <= set(upgraded["programs"])
    assert len(tunnel_programs(world)) == len(before) == 3
    world.restart()
    assert set(tunnel_programs(world)) <= set(world.program_ids().values())
    assert [(one.number, one.outer) for one in list_nodes(world.datapath.maps)] == [(7, outer)]
    settings = tables.read_settings(world.datapath.maps)
    assert (settings.tunnel_port, bool(settings.tunnel_ifindex)) == (8472, True)
    assert world.datapath.apply_cluster(plan) == []


def netdev_programs(world: KernelWorld) -> list[int]:
    """Give the numbers of the programs at the node's own device."""
    shown = world.host.tc("filter", "show", "dev", UPLINK, "ingress")
    return [one["options"]["prog"]["id"] for one in shown if "prog" in one.get("options", {})]


def test_another_layout_takes_the_program_at_the_nodes_device_over(
    world: KernelWorld, next_build: Build
) -> None:
    world.host.run("ip", "link", "add", UPLINK, "type", "veth", "peer", "name", "pwtfar")
    world.host.run("ip", "address", "add", "10.50.0.1/24", "dev", UPLINK)
    for end in (UPLINK, "pwtfar"):
        world.host.run("ip", "link", "set", end, "up")
    world.restart(node_address=ipaddress.ip_address("10.50.0.1"))
    remote = ipaddress.ip_network("10.77.2.0/24")
    outer = ipaddress.ip_address("10.50.0.2")
    plan = ClusterPlan(
        peers=(Peer(7, "n7", outer, 1400, Way.NATIVE, addresses=(outer,)),),
        prefixes={remote: Prefix(IdentityId(abi.Identity.UNMANAGED), 7, Way.NATIVE, 1400)},
        routes=(HostRoute(remote, Way.NATIVE, outer, None, 1400, 7),),
        inside=(remote,),
    )
    world.datapath.apply_cluster(plan)
    device = tables.read_settings(world.datapath.maps).native_ifindex
    [before] = netdev_programs(world)
    world.datapath.close()
    upgraded = next_build.prepare_node(world.plan.bpf_dir)
    assert before not in upgraded["programs"]
    assert set(netdev_programs(world)) <= set(upgraded["programs"])
    assert len(netdev_programs(world)) == 1
    world.restart()
    assert set(netdev_programs(world)) <= set(world.program_ids().values())
    assert tables.read_settings(world.datapath.maps).native_ifindex == device != 0
    assert world.datapath.apply_cluster(plan) == []


def test_counters_of_open_flows_go_on_in_the_other_layout(
    world: KernelWorld, next_build: Build
) -> None:
    first, first_pod = world.attach(4)
    second, second_pod = world.attach(5)
    with continuous_traffic([(first_pod, second_pod, second.ipv4)]) as flows:
        let_flow(flows)
        before = {
            (flow.instance, flow.source_port): flow.value.packets[0]
            for flow in conntrack_maps.list_conntrack(world.datapath.maps, first.id)
        }
        world.datapath.close()
        upgraded = next_build.prepare_node(world.plan.bpf_dir)
    after = {(row[0], row[3]): row[4][0] for row in upgraded["flows"]}
    assert before
    assert all(after[key] >= count for key, count in before.items())


def test_an_upgrade_that_died_before_the_swap_is_done_again(
    world: KernelWorld, next_build: Build
) -> None:
    first, first_pod = world.attach(6)
    second, second_pod = world.attach(7)
    with continuous_traffic([(first_pod, second_pod, second.ipv4)]) as flows:
        let_flow(flows)
        world.datapath.close()
        next_build.prepare_node(world.plan.bpf_dir, die_before_swap=True)
        assert list_versions(world.plan.bpf_dir) == [THIS, NEXT]
        let_flow(flows)
        upgraded = next_build.prepare_node(world.plan.bpf_dir)
        assert list_versions(world.plan.bpf_dir) == [NEXT]
        let_flow(flows)
        results = [flow.finish() for flow in flows]
    assert results == [[], ""]
    assert {row[0] for row in upgraded["flows"]} >= {first.id, second.id}


def test_an_upgrade_that_died_may_also_be_given_up(world: KernelWorld, next_build: Build) -> None:
    first, first_pod = world.attach(8)
    world.datapath.close()
    next_build.prepare_node(world.plan.bpf_dir, die_before_swap=True)
    world.restart()
    assert list_versions(world.plan.bpf_dir) == [THIS]
    assert world.datapath.compare_endpoint(first, OPEN, first_pod.pod) == []


def test_a_layout_that_forbids_the_way_back_is_refused_with_both_versions(
    world: KernelWorld, closed_build: Build
) -> None:
    _, pod = world.attach(9)
    world.datapath.close()
    closed_build.prepare_node(world.plan.bpf_dir)
    with pytest.raises(NewerData) as refusal:
        KernelDatapath(world.plan).prepare()
    assert f"version {NEXT}" in refusal.value.message
    assert f"version {THIS}" in refusal.value.message
    assert list_versions(world.plan.bpf_dir) == [NEXT]
    assert "1 received" in pod.run("ping", "-c", "1", "-W", "10", str(NODE_IPV4))


def test_rows_taken_over_make_room_for_nothing_twice(world: KernelWorld, next_build: Build) -> None:
    record, _ = world.attach(10)
    world.datapath.close()
    first = next_build.prepare_node(world.plan.bpf_dir)
    second = next_build.prepare_node(world.plan.bpf_dir)
    assert first["usage"].keys() == second["usage"].keys() == {str(record.id)}
    assert Pins(world.plan.bpf_dir, NEXT).maps.is_dir()


def test_slots_and_cidrs_go_to_the_other_layout_and_come_back(
    world: KernelWorld, next_build: Build
) -> None:
    world.datapath.policy.write_slot(7, ROWS)
    world.datapath.policy.write_cidrs(CIDRS)
    world.datapath.close()
    next_build.prepare_node(world.plan.bpf_dir)
    assert list_versions(world.plan.bpf_dir) == [NEXT]
    world.restart()
    assert list_versions(world.plan.bpf_dir) == [THIS]
    assert world.datapath.policy.list_slots() == [7]
    assert world.datapath.policy.read_slot(7) == ROWS
    assert dict(read_cidrs(world.datapath.maps)) == CIDRS


def test_a_build_without_policy_takes_over_and_gives_back_under_traffic(
    world: KernelWorld, older_build: Build
) -> None:
    first, first_pod = world.attach(13)
    second, second_pod = world.attach(14)
    world.datapath.policy.write_slot(7, ROWS)
    config = EndpointConfig(policy_revision=2, slot=7)
    world.datapath.policy.update_endpoints([(first, config)])
    with continuous_traffic([(first_pod, second_pod, second.ipv4)]) as flows:
        let_flow(flows)
        world.datapath.close()
        older_build.prepare_node(world.plan.bpf_dir)
        let_flow(flows)
        world.restart()
        for record in (first, second):
            world.datapath.repair_device(record)
        let_flow(flows)
        results = [flow.finish() for flow in flows]
    assert results == [[], ""]
    assert world.datapath.policy.read_slot(7) == ROWS
    assert world.datapath.compare_endpoint(first, config, first_pod.pod) == []
    assert world.datapath.policy.list_slots() == [7]


def test_the_maps_of_policy_are_made_where_an_older_build_had_none(
    world: KernelWorld, older_build: Build
) -> None:
    world.datapath.close()
    remove_directory(world.plan.bpf_dir)
    older_build.prepare_node(world.plan.bpf_dir)
    pins = Pins(world.plan.bpf_dir, THIS).maps
    assert not any((pins / name).exists() for name in POLICY_MAPS)
    world.restart()
    assert all((pins / name).exists() for name in POLICY_MAPS)
    world.datapath.policy.write_slot(7, ROWS)
    assert world.datapath.policy.read_slot(7) == ROWS


@pytest.mark.parametrize("entries", [65_536, 4096], ids=["grown", "as-small-as-its-flows-allow"])
def test_conntrack_is_resized_under_traffic_with_its_flows(
    world: KernelWorld, entries: int
) -> None:
    world.restart(conntrack_entries=16_384)
    first, first_pod = world.attach(11)
    second, second_pod = world.attach(12)
    with continuous_traffic([(first_pod, second_pod, second.ipv4)]) as flows:
        let_flow(flows)
        before = conntrack_keys(world)
        world.restart(conntrack_entries=entries)
        sizes = [
            shard.info.max_entries
            for shard in conntrack_maps.open_conntrack_shards(world.datapath.maps)
        ]
        let_flow(flows)
        after = conntrack_keys(world)
        results = [flow.finish() for flow in flows]
    assert set(sizes) == {world.plan.capacities.shard_entries}
    assert sum(sizes) >= entries
    assert after >= before
    assert results == [[], ""]
    counted = Counter(
        flow.instance
        for flow in conntrack_maps.list_conntrack(world.datapath.maps)
        if flow.value.charged
    )
    usage = {key: sum(row.connections) for key, row in tables.list_usage(world.datapath.maps)}
    assert {first.id: counted[first.id], second.id: counted[second.id]} == usage


def conntrack_keys(world: KernelWorld) -> set[tuple[int, str, int, int]]:
    return {
        (flow.instance, flow.direction.name, flow.protocol, flow.source_port)
        for flow in conntrack_maps.list_conntrack(world.datapath.maps)
    }


@pytest.mark.parametrize(
    ("old", "new", "row", "wanted"),
    [
        pytest.param(
            [("a", 0, 4), ("b", 4, 4)],
            [("a", 0, 4), ("c", 4, 4), ("b", 8, 4)],
            b"AAAABBBB",
            b"AAAA\0\0\0\0BBBB",
            id="field-added-in-the-middle",
        ),
        pytest.param(
            [("a", 0, 4), ("c", 4, 4), ("b", 8, 4)],
            [("a", 0, 4), ("b", 4, 4)],
            b"AAAACCCCBBBB",
            b"AAAABBBB",
            id="field-dropped",
        ),
        pytest.param(
            [("a", 0, 2), ("b", 2, 2)],
            [("b", 0, 4), ("a", 4, 4)],
            b"\1\2\3\4",
            b"\3\4\0\0\1\2\0\0",
            id="numbers-grown-and-moved",
        ),
        pytest.param(
            [("a", 0, 4), ("pad", 4, 4)],
            [("a", 0, 4), ("pad", 4, 4), ("z", 8, 4)],
            b"AAAAPPPP",
            b"AAAA" + bytes(8),
            id="padding-is-not-carried",
        ),
        pytest.param([], [], b"ABCD", b"ABCD", id="plain-number"),
        pytest.param([("a", 0, 4)], [("a", 0, 4)], b"AAAA", b"AAAA", id="same-layout"),
    ],
)
def test_rows_are_converted_by_the_names_of_their_fields(
    old: list[tuple[str, int, int]],
    new: list[tuple[str, int, int]],
    row: bytes,
    wanted: bytes,
) -> None:
    plan = plan_conversion(
        [Member(*one) for one in old], len(row), [Member(*one) for one in new], len(wanted)
    )
    assert plan.apply(row) == wanted


def test_neighbouring_fields_are_carried_in_one_piece() -> None:
    old = [Member("a", 0, 4), Member("b", 4, 4), Member("c", 8, 4)]
    new = [Member("a", 0, 4), Member("b", 4, 4), Member("x", 8, 4), Member("c", 12, 4)]
    assert plan_conversion(old, 12, new, 16) == Conversion(
        16, (Piece(0, 0, 8), Piece(8, 12, 4)), False
    )
