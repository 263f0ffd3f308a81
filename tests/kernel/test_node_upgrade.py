"""Another map layout takes a running node over, and gives it back, while traffic flows."""

import contextlib
import ipaddress
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from podwire.datapath import abi, conntrack_maps, upgrade
from podwire.datapath import maps as tables
from podwire.datapath.node import KernelDatapath
from podwire.datapath.node_maps import list_nodes
from podwire.datapath.policy_maps import read_cidrs
from podwire.datapath.programs import Pins, list_versions, remove_directory
from podwire.datapath.row_conversion import Conversion, Piece, plan_conversion
from podwire.datapath.service_maps import read_services
from podwire.kernel import bpf, netns
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
from podwire.model.endpoint import EndpointRecord, IPNetwork
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
from tests.kernel.conftest import NODE_IPV4, pings
from tests.kernel.node_world import KernelWorld, kernel_world
from tests.kernel.other_build import (
    LAST_BUILD,
    Build,
    forbid_way_back,
    make_build,
    make_build_without_maps,
    make_earlier,
    make_last_layout,
)
from tests.kernel.test_cluster_traffic import Way2, connect, natively, two_nodes
from tests.kernel.traffic import (
    PORT,
    Datagrams,
    Questions,
    Stream,
    continuous_traffic,
    open_socket,
)
from tests.packet.test_collection import Collector
from tests.plain_pods import OPEN
from tests.waiting import wait_for

THIS = abi.ABI_VERSION
NEXT = THIS + 1
SOME_TRAFFIC_S = 0.3
UPLINK = "pwtup"
SERVED = 7100
"""Port of a service, and of its back end."""
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
def closed_build(next_build: Build, tmp_path_factory: pytest.TempPathFactory) -> Build:
    return forbid_way_back(tmp_path_factory.mktemp("closed"), next_build)


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


@pytest.fixture(scope="module")
def last_build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    build = make_earlier(tmp_path_factory.mktemp("earlier"), LAST_BUILD, THIS)
    if build is None:
        pytest.skip("the repository's history is not here")
    return build


def let_flow(flows: Sequence[Datagrams | Stream | Questions]) -> None:
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


def test_the_last_build_takes_over_and_gives_back_under_traffic(
    world: KernelWorld, last_build: Build
) -> None:
    """It has the same layout, so its programs go on with the same rows; also where a service translates."""
    _, first_pod = world.attach(2)
    second, second_pod = world.attach(3)
    vips = serve(world, second)
    ways = [(first_pod, second_pod, str(address)) for address in second.addresses]
    with (
        questions_of_closed_pods(world) as asked,
        continuous_traffic([*ways, (world.host, second_pod, second.ipv6)]) as direct,
        continuous_traffic(ways, vips, port=SERVED) as translated,
    ):
        flows = [*direct, *translated]
        let_flow([*asked, *flows])
        for _ in range(2):
            # Questions come and go.
            known = {key for key in conntrack_keys(world) if key[2] == socket.IPPROTO_TCP}
            ours = set(world.program_ids().values())
            world.datapath.close()
            older = last_build.prepare_node(world.plan.bpf_dir)
            assert not ours & set(older["programs"])
            let_flow([*asked, *flows])
            world.restart()
            assert conntrack_keys(world) >= known
            let_flow([*asked, *flows])
        unanswered = [questions.finish() for questions in asked]
        results = [flow.finish() for flow in flows]
    assert unanswered == [0, 0]
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
        return [(row.instance, row.source_port) for row in found]

    assert is_known(list_here())
    world.datapath.close()
    upgraded = next_build.prepare_node(world.plan.bpf_dir)
    assert is_known((row[0], row[3]) for row in upgraded["flows"])
    world.restart()
    assert is_known(list_here())


@contextlib.contextmanager
def questions_of_closed_pods(world: KernelWorld) -> Iterator[list[Questions]]:
    """Let two pods whose doors are closed ask a third one, each over a family: only a question lets its answer in."""
    third, server = world.attach(22)
    asked = []
    try:
        for number, address in ((20, third.ipv4), (21, third.ipv6)):
            record, pod = world.attach(number)
            config = EndpointConfig(policy_revision=2, deny_ingress=True, host_allowed=False)
            world.datapath.policy.update_endpoints([(record, config)])
            assert address is not None
            asked.append(Questions(pod, server, address, PORT))
        yield asked
    finally:
        for questions in asked:
            questions.finish()


def test_no_question_loses_its_answer_where_another_layout_takes_over_and_gives_back(
    world: KernelWorld, next_build: Build
) -> None:
    with questions_of_closed_pods(world) as asked:
        let_flow(asked)
        for _ in range(2):
            world.datapath.close()
            next_build.prepare_node(world.plan.bpf_dir)
            let_flow(asked)
            world.restart()
            let_flow(asked)
        unanswered = [questions.finish() for questions in asked]
    assert unanswered == [0, 0]


def test_no_question_loses_its_answer_where_conntrack_is_resized(world: KernelWorld) -> None:
    with questions_of_closed_pods(world) as asked:
        for entries in (16_384, 200_000, 4096):
            world.restart(conntrack_entries=entries)
            let_flow(asked)
        unanswered = [questions.finish() for questions in asked]
    assert unanswered == [0, 0]


def test_the_oldest_new_flows_are_pushed_out_first_where_all_were_moved(world: KernelWorld) -> None:
    """Into a smaller map, and by what begins afterwards."""
    waiting = 600
    world.restart(conntrack_entries=160_000)
    began_ns = time.monotonic_ns()
    with conntrack_maps.open_new_flows(world.datapath.maps) as flows:
        room = flows.info.max_entries
        write_new_flows(flows, range(room), began_ns)
    world.restart(conntrack_entries=4096)
    with conntrack_maps.open_new_flows(world.datapath.maps) as flows:
        assert flows.info.max_entries < room
        later = flows.info.max_entries // 4
        write_new_flows(flows, range(room, room + later), began_ns)
        left = {abi.ConntrackKey.unpack(key).instance for key, _ in flows.items()}
    assert left >= set(range(room - waiting, room + later))


def write_new_flows(flows: bpf.Map, numbers: Iterable[int], began_ns: int) -> None:
    """Write a flow for each number, one after the other: a nanosecond younger than the one of the number before."""
    key = abi.ConntrackKey.unpack(bytes(flows.info.key_size))
    value = abi.ConntrackValue.unpack(bytes(flows.info.value_size))
    for number in numbers:
        row = value._replace(last_seen_ns=began_ns + number, lifetime_s=30)
        flows.update(key._replace(instance=number).pack(), row.pack())


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("is_killed", [False, True])
def test_the_last_layout_knows_what_waits_for_its_answer(
    world: KernelWorld,
    last_layout: Build,
    version: int,
    is_killed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was asked before the agent ended, and what was asked between the two agents."""
    client, pod = world.attach(2)
    server, server_pod = world.attach(3)
    config = EndpointConfig(policy_revision=2, deny_ingress=True, host_allowed=False)
    world.datapath.policy.update_endpoints([(client, config)])
    address = str(server.ipv4 if version == 4 else server.ipv6)
    with ExitStack() as stack:
        serving = stack.enter_context(open_socket(server_pod, address, socket.SOCK_DGRAM))
        serving.bind((address, PORT))
        serving.settimeout(60)

        def ask() -> tuple[socket.socket, tuple[str, int]]:
            asking = stack.enter_context(open_socket(pod, address, socket.SOCK_DGRAM))
            asking.connect((address, PORT))
            asking.send(b"?")
            asking.settimeout(60)
            return asking, serving.recvfrom(64)[1]

        before = ask()
        if is_killed:
            # The kernel closes the descriptors, and nothing else is done.
            monkeypatch.setattr(upgrade, "hand_flows_over", lambda _loaded: None)
        settings = stack.enter_context(open_settings(world))
        world.datapath.close()
        wait_for(lambda: is_unattended(settings), "the agent to be missed")
        if is_killed:  # the flag is set before what waits is handed over, in one tick
            ticks = read_ticks(world)
            wait_for(lambda: read_ticks(world) > ticks, "the collector to end its tick")
        between = ask()
        last_layout.prepare_node(world.plan.bpf_dir)
        for asking, peer in (before, between):
            serving.sendto(b"!", peer)
            assert asking.recv(64) == b"!"
        # The control: a stranger that was not asked does not come in, though it speaks first.
        asking = stack.enter_context(open_socket(pod, address, socket.SOCK_DGRAM))
        asking.sendto(b"?", (address, PORT))
        peer = serving.recvfrom(64)[1]
        stranger = stack.enter_context(open_socket(server_pod, address, socket.SOCK_DGRAM))
        stranger.sendto(b"!", peer)
        serving.sendto(b"!", peer)
        asking.settimeout(60)
        assert asking.recvfrom(64)[1][:2] == (address, PORT)


def read_ticks(world: KernelWorld) -> int:
    """Give how often the collector has run."""
    timer = bpf.open_any_pinned_map(str(Pins(world.plan.bpf_dir, THIS).maps / "pw_ct_timer"))
    assert timer is not None
    try:
        return Collector(timer).state().ticks
    finally:
        timer.close()


def open_settings(world: KernelWorld) -> bpf.Map:
    pins = Pins(world.plan.bpf_dir, THIS)
    settings = bpf.open_any_pinned_map(str(pins.maps / "pw_settings"))
    assert settings is not None
    return settings


def is_unattended(settings: bpf.Map) -> bool:
    raw = settings.lookup(bytes(4))
    assert raw is not None
    return bool(abi.Settings.unpack(raw).flags & abi.SettingsFlags.UNATTENDED)


def serve(world: KernelWorld, record: EndpointRecord) -> dict[str, str]:
    """Put a service before a pod, in both families and at two ports; gives its address by the pod's."""
    vips = {record.ipv4: "10.96.0.10", record.ipv6: "fd96::10"}
    world.datapath.services.write(
        {
            Frontend(ipaddress.ip_address(vip), port, protocol): [
                BackEnd(ipaddress.ip_address(address), port, protocol)
            ]
            for address, vip in vips.items()
            for protocol in (socket.IPPROTO_TCP, socket.IPPROTO_UDP)
            for port in (SERVED, SERVED + 1)
        }
    )
    return {str(address): vip for address, vip in vips.items()}


@pytest.mark.parametrize("version", [4, 6])
def test_open_flows_to_services_and_new_ones_survive_another_layout_and_the_way_back(
    world: KernelWorld, next_build: Build, version: int
) -> None:
    _, client = world.attach(2)
    record, server = world.attach(3)
    address = str(record.ipv4 if version == 4 else record.ipv6)
    vips = serve(world, record)
    way = (client, server, address)
    with continuous_traffic([way], vips, port=SERVED) as old:
        let_flow(old)
        world.datapath.close()
        next_build.prepare_node(world.plan.bpf_dir)
        assert list_versions(world.plan.bpf_dir) == [NEXT]
        let_flow(old)
        with continuous_traffic([way], vips, port=SERVED + 1) as new:
            let_flow([*old, *new])
            world.restart()
            let_flow([*old, *new])
            results = [flow.finish() for flow in (*old, *new)]
    assert results == [[], "", [], ""]
    assert len(list(read_services(world.datapath.maps))) == 8


def tunnel_programs(world: KernelWorld) -> list[int]:
    """Give the numbers of the programs on the tunnel device."""
    return [
        filter_["options"]["prog"]["id"]
        for hook in ("ingress", "egress")
        for filter_ in world.host.tc("filter", "show", "dev", TUNNEL_DEVICE, hook)
        if "prog" in filter_.get("options", {})
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
    assert [(node.number, node.outer) for node in list_nodes(world.datapath.maps)] == [(7, outer)]
    settings = tables.read_settings(world.datapath.maps)
    assert (settings.tunnel_port, bool(settings.tunnel_ifindex)) == (8472, True)
    assert world.datapath.apply_cluster(plan) == []


def netdev_programs(world: KernelWorld) -> list[int]:
    """Give the numbers of the programs at the node's own device."""
    shown = world.host.tc("filter", "show", "dev", UPLINK, "ingress")
    return [
        filter_["options"]["prog"]["id"]
        for filter_ in shown
        if "prog" in filter_.get("options", {})
    ]


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
    assert pings(pod, NODE_IPV4)


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

    def is_counted_right() -> bool:
        counted = Counter(
            flow.instance
            for flow in conntrack_maps.list_conntrack(world.datapath.maps)
            if flow.value.charged
        )
        usage = {key: sum(row.connections) for key, row in tables.list_usage(world.datapath.maps)}
        return {first.id: counted[first.id], second.id: counted[second.id]} == usage

    # The collector may remove what is over between the two looks.
    wait_for(is_counted_right, "as many charges as flows")


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
        [Member(*member) for member in old],
        len(row),
        [Member(*member) for member in new],
        len(wanted),
    )
    assert plan.apply(row) == wanted


def test_neighbouring_fields_are_carried_in_one_piece() -> None:
    old = [Member("a", 0, 4), Member("b", 4, 4), Member("c", 8, 4)]
    new = [Member("a", 0, 4), Member("b", 4, 4), Member("x", 8, 4), Member("c", 12, 4)]
    assert plan_conversion(old, 12, new, 16) == Conversion(
        16, (Piece(0, 0, 8), Piece(8, 12, 4)), False
    )
