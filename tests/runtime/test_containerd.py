"""Pods that a real containerd makes through the CRI, with podwire as their network."""

from functools import partial

import pytest

from tests.lab.rig import Present
from tests.runtime.containerd import Containerd, load_messages
from tests.runtime.machine import NODE_ADDRESSES, WORLD_ADDRESSES, Machine, Place
from tests.runtime.traffic import connect_from, measure_bits_per_s, measure_until, serves
from tests.waiting import wait_for

SLEEP = ("/bin/sleep", "9999")
HTTPD = ("/bin/httpd", "-f", "-p", "80", "-h", "/www")


def assert_nothing_left(machine: Machine) -> None:
    """Fail unless the node holds nothing of any pod."""
    machine.node.settle()
    assert machine.node.assert_consistent() == Present()


def test_a_pod_reaches_pods_node_and_world_in_both_families(
    machine: Machine, containerd: Containerd
) -> None:
    web, client = containerd.run_pod("web"), containerd.run_pod("client")
    containerd.run_container(web, "main", *HTTPD)
    main = containerd.run_container(client, "main", *SLEEP)
    assert [":" in text for text in web.addresses] == [False, True]
    for address in web.addresses:
        url = f"http://[{address}]/" if ":" in address else f"http://{address}/"
        wait_for(partial(serves, machine, address), f"{url} to be served", 30)
        assert containerd.execute(main, "/bin/wget", "-qO-", url) == "served\n"
    for own, other, node, world in zip(
        client.addresses, web.addresses, NODE_ADDRESSES, WORLD_ADDRESSES, strict=True
    ):
        assert connect_from(machine, client.pid, other, web.pid) == own
        assert connect_from(machine, client.pid, node, machine.node.name) == own
        assert connect_from(machine, client.pid, world, machine.world) == node


def test_the_agent_shows_whose_pod_it_is(machine: Machine, containerd: Containerd) -> None:
    sandbox = containerd.run_pod("web-0", namespace="shop")
    [endpoint] = machine.node.get("/endpoint")[1]
    assert endpoint["containerId"] == sandbox.id
    assert (endpoint["namespace"], endpoint["pod"]) == ("shop", "web-0")
    assert (endpoint["ipv4"], endpoint["ipv6"]) == sandbox.addresses
    assert {
        "cni:podwire.io/name=web-0",
        "cni:podwire.io/network=podwire",
        "k8s:io.kubernetes.pod.namespace=shop",
    } <= set(endpoint["labels"])
    assert machine.node.get("/endpoint/pod-name:shop/web-0")[1]["id"] == endpoint["id"]


def test_labels_of_the_network_become_labels_of_its_pods(machine: Machine) -> None:
    machine.write_conflist(args={"cni": {"labels": [{"key": "team", "value": "blue"}]}})
    with Containerd(machine) as containerd:
        containerd.wait_network_ready()
        containerd.run_pod("web")
        [endpoint] = machine.node.get("/endpoint")[1]
        assert "cni:team=blue" in endpoint["labels"]


def test_every_stop_and_the_removal_succeed_and_leave_nothing(
    machine: Machine, containerd: Containerd
) -> None:
    sandbox = containerd.run_pod("web")
    containerd.stop_pod(sandbox)
    containerd.stop_pod(sandbox)
    assert_nothing_left(machine)
    containerd.remove_pod(sandbox)
    calls = machine.list_calls()
    assert [call["CNI_COMMAND"] for call in calls] == ["ADD", "DEL", "DEL", "DEL"]
    assert [bool(call["CNI_NETNS"]) for call in calls] == [True, True, False, False]
    assert_nothing_left(machine)


def test_a_pod_of_two_networks_has_an_interface_in_each(machine: Machine) -> None:
    machine.write_conflist(name="second", file_name="06-second.conflist")
    with Containerd(machine, networks=2) as containerd:
        containerd.wait_network_ready()
        sandbox, other = containerd.run_pod("web"), containerd.run_pod("other")
        endpoints = {
            shown["ifName"]: shown
            for shown in machine.node.get("/endpoint")[1]
            if shown["containerId"] == sandbox.id
        }
        assert set(endpoints) == {"eth0", "eth1"}
        for endpoint in endpoints.values():
            for address in endpoint["addresses"]:
                connect_from(machine, other.pid, address, sandbox.pid)
                connect_from(machine, machine.node.name, address, sandbox.pid)
        for pod in (sandbox, other):
            containerd.stop_pod(pod)
            containerd.remove_pod(pod)
        assert_nothing_left(machine)


def test_portmap_and_tuning_work_behind_us(machine: Machine) -> None:
    machine.write_conflist(
        {"type": "portmap", "capabilities": {"portMappings": True}},
        {"type": "tuning", "sysctl": {"net.core.somaxconn": "321"}},
    )
    with Containerd(machine) as containerd:
        containerd.wait_network_ready()
        sandbox = containerd.run_pod("web", ports=[(18080, 80)])
        main = containerd.run_container(sandbox, "main", *HTTPD)
        assert containerd.execute(main, "/bin/cat", "/proc/sys/net/core/somaxconn") == "321\n"
        host_port = partial(serves, machine, NODE_ADDRESSES[0], 18080, machine.world)
        wait_for(host_port, "the host port to be served", 30)
        containerd.stop_pod(sandbox)
        containerd.remove_pod(sandbox)
        assert_nothing_left(machine)
        assert not host_port()


def test_host_ports_are_served_by_us_until_the_pod_ends(machine: Machine) -> None:
    machine.write_conflist(capabilities={"portMappings": True})
    grpc, _, _ = load_messages()
    with Containerd(machine) as containerd:
        containerd.wait_network_ready()
        sandbox = containerd.run_pod("web", ports=[(18080, 80)])
        containerd.run_container(sandbox, "main", *HTTPD)
        host_port = partial(serves, machine, NODE_ADDRESSES[0], 18080, machine.world)
        wait_for(host_port, "the host port to be served", 30)
        with pytest.raises(grpc.RpcError) as caught:
            containerd.run_pod("second", ports=[(18080, 80)])
        assert "TCP port 18080 leads to pod" in caught.value.details()
        containerd.stop_pod(sandbox)
        containerd.remove_pod(sandbox)
        assert not host_port()
        assert_nothing_left(machine)


TO_POD_BITS_PER_S, FROM_POD_BITS_PER_S = 40_000_000, 20_000_000
LIMITS = {
    "kubernetes.io/ingress-bandwidth": "40M",
    "kubernetes.io/egress-bandwidth": "20M",
}


def is_at(limit_bits_per_s: int, rate_bits_per_s: float) -> bool:
    """Tell whether a rate is the limit, roughly."""
    return 0.75 < rate_bits_per_s / limit_bits_per_s < 1.25


def test_bandwidth_limits_hold_against_pod_node_and_world(
    machine: Machine, containerd: Containerd
) -> None:
    limited = containerd.run_pod("limited", annotations=LIMITS)
    other = containerd.run_pod("other")
    address = limited.addresses[0]
    node = machine.node.name
    # What is behind a masquerade cannot be reached from outside, so the world gets a route to pods.
    machine.world_route("10.99.0.0/24")
    places: dict[str, tuple[Place, str]] = {
        "other pod": (other.pid, other.addresses[0]),
        "node": (node, NODE_ADDRESSES[0]),
        "world": (machine.world, WORLD_ADDRESSES[0]),
    }
    measured = {}
    for name, (place, own) in places.items():
        for what, limit, ends in (
            (f"{name} to pod", TO_POD_BITS_PER_S, (place, address, limited.pid)),
            (f"pod to {name}", FROM_POD_BITS_PER_S, (limited.pid, own, place)),
        ):
            rate = measure_until(
                partial(is_at, limit),
                partial(measure_bits_per_s, machine, *ends),
            )
            measured[what] = rate / limit
    print({name: round(ratio, 2) for name, ratio in measured.items()})
    # A reader that the machine keeps waiting finds what has piled up: some per cent, never a multiple.
    assert all(0.75 < ratio < 1.25 for ratio in measured.values()), measured


def test_a_pod_that_is_not_limited_is_not_slowed_down(
    machine: Machine, containerd: Containerd
) -> None:
    containerd.run_pod("limited", annotations=LIMITS)
    free, other = containerd.run_pod("free"), containerd.run_pod("other")
    rate = measure_until(
        lambda rate: rate > 5 * TO_POD_BITS_PER_S,
        partial(measure_bits_per_s, machine, other.pid, free.addresses[0], free.pid),
    )
    assert rate > 5 * TO_POD_BITS_PER_S


def test_pods_can_be_stopped_while_the_agent_is_away(
    machine: Machine, containerd: Containerd
) -> None:
    sandbox, other = containerd.run_pod("web"), containerd.run_pod("other")
    machine.node.kill()
    connect_from(machine, other.pid, sandbox.addresses[0], sandbox.pid)
    containerd.stop_pod(sandbox)
    containerd.remove_pod(sandbox)
    assert machine.node.spooled()
    machine.node.start()
    machine.node.settle()
    [endpoint] = machine.node.get("/endpoint")[1]
    assert endpoint["containerId"] == other.id
    machine.node.assert_consistent()
    connect_from(machine, machine.node.name, other.addresses[0], other.pid)


def test_a_pod_that_cannot_be_made_leaves_nothing(machine: Machine) -> None:
    machine.write_conflist(agent_wait_s=1)
    grpc, _, _ = load_messages()
    with Containerd(machine) as containerd:
        containerd.wait_network_ready()
        machine.node.stop()
        with pytest.raises(grpc.RpcError):
            containerd.run_pod("web")
        machine.node.start()
        assert_nothing_left(machine)
        sandbox = containerd.run_pod("web")
        connect_from(machine, machine.node.name, sandbox.addresses[0], sandbox.pid)


def test_a_burst_of_pods_at_once_gets_addresses_of_its_own(
    machine: Machine, containerd: Containerd
) -> None:
    sandboxes = containerd.run_pods([f"p{number}" for number in range(8)])
    addresses = [address for sandbox in sandboxes for address in sandbox.addresses]
    assert len(set(addresses)) == 16
    for sandbox in sandboxes:
        connect_from(machine, sandboxes[0].pid, sandbox.addresses[0], sandbox.pid)
    for sandbox in sandboxes:
        containerd.stop_pod(sandbox)
        containerd.remove_pod(sandbox)
    assert_nothing_left(machine)
