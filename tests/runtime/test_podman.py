"""Containers that a real podman makes through its CNI back end, with podwire as their network."""

from functools import partial
from typing import Any, Final

import pytest

from tests.lab.rig import Present
from tests.runtime.machine import NODE_ADDRESSES, WORLD_ADDRESSES, Machine
from tests.runtime.podman import Podman
from tests.runtime.traffic import connect_from, serves
from tests.waiting import wait_for


def list_addresses(podman: Podman, name: str, network: str = "podwire") -> list[str]:
    """Give the addresses that podman reports, IPv4 first."""
    found = podman.inspect(name)["NetworkSettings"]["Networks"][network]
    return [found["IPAddress"], found["GlobalIPv6Address"]]


def assert_nothing_left(machine: Machine) -> None:
    """Fail unless the node holds nothing of any container."""
    machine.node.settle()
    assert machine.node.assert_consistent() == Present()


def test_a_container_reaches_containers_node_and_world(machine: Machine, podman: Podman) -> None:
    for name in ("web", "client"):
        podman.start_container(name)
    web, client = podman.pid("web"), podman.pid("client")
    own = list_addresses(podman, "client")
    for mine, other, node, world in zip(
        own, list_addresses(podman, "web"), NODE_ADDRESSES, WORLD_ADDRESSES, strict=True
    ):
        assert connect_from(machine, client, other, web) == mine
        assert connect_from(machine, client, node, machine.node.name) == mine
        assert connect_from(machine, client, world, machine.world) == node
    podman.run("rm", "--force", "--time", "0", "web", "client")
    assert_nothing_left(machine)


def test_podman_asks_as_we_were_told(machine: Machine, podman: Podman) -> None:
    container = podman.start_container("db_1")
    [endpoint] = machine.node.get("/endpoint")[1]
    assert (endpoint["containerId"], endpoint["namespace"], endpoint["pod"]) == (
        container,
        "default",
        "db_1",
    )
    podman.run("rm", "--force", "--time", "0", "db_1")
    calls = [call for call in machine.list_calls() if call["CNI_COMMAND"] != "VERSION"]
    assert [call["CNI_COMMAND"] for call in calls] == ["ADD", "DEL"]
    assert "K8S_POD_NAME=db_1" in calls[0]["CNI_ARGS"]
    assert all(call["CNI_NETNS"] for call in calls)


def test_stop_and_start_keep_the_container_id_and_give_a_new_life(
    machine: Machine, podman: Podman
) -> None:
    container = podman.start_container("web")
    [before] = machine.node.get("/endpoint")[1]
    for _ in range(3):
        podman.stop_container("web")
        assert_nothing_left(machine)
        podman.run("start", "web")
    [after] = machine.node.get("/endpoint")[1]
    assert (after["containerId"], before["containerId"]) == (container, container)
    assert after["id"] > before["id"]
    assert after["addresses"] == list_addresses(podman, "web")
    connect_from(machine, machine.node.name, after["ipv4"], podman.pid("web"))
    machine.node.assert_consistent()


def test_restart_at_once_finds_the_name_of_its_device_free(
    machine: Machine, podman: Podman
) -> None:
    podman.start_container("web")
    podman.run("restart", "--time", "0", "web")
    machine.node.settle()
    [endpoint] = machine.node.get("/endpoint")[1]
    connect_from(machine, machine.node.name, endpoint["ipv4"], podman.pid("web"))
    machine.node.assert_consistent()


def test_a_fixed_address_and_mac_are_given_and_given_back(machine: Machine, podman: Podman) -> None:
    options = ("--ip", "10.99.0.77", "--mac-address", "0a:58:0a:63:00:4d")
    podman.start_container("fixed", *options)
    [endpoint] = machine.node.get("/endpoint")[1]
    assert endpoint["ipv4"] == "10.99.0.77"
    assert "0a:58:0a:63:00:4d" in podman.run("exec", "fixed", "/bin/ip", "link")
    with pytest.raises(AssertionError, match=r"10\.99\.0\.77"):
        podman.start_container("thief", *options)
    podman.run("rm", "--force", "--time", "0", "fixed")
    assert_nothing_left(machine)
    podman.start_container("heir", *options)
    assert machine.node.get("/endpoint")[1][0]["ipv4"] == "10.99.0.77"


def test_a_container_of_two_networks_has_an_interface_in_each(
    machine: Machine, podman: Podman
) -> None:
    machine.write_conflist(name="second", file_name="06-second.conflist")
    podman.start_container("web", networks=["podwire", "second"])
    podman.start_container("client")
    for network in ("podwire", "second"):
        for address in list_addresses(podman, "web", network):
            connect_from(machine, podman.pid("client"), address, podman.pid("web"))
    podman.run("network", "disconnect", "second", "web")
    machine.node.settle()
    machine.node.assert_consistent()
    connect_from(machine, podman.pid("client"), list_addresses(podman, "web")[0], podman.pid("web"))
    podman.run("rm", "--force", "--time", "0", "--all")
    assert_nothing_left(machine)


PORT_MAPPINGS: Final = {"portMappings": True}
SERVED_BY: Final[dict[str, tuple[list[dict[str, object]], dict[str, Any]]]] = {
    "us": ([], {"capabilities": PORT_MAPPINGS}),
    "a chained portmap": ([{"type": "portmap", "capabilities": PORT_MAPPINGS}], {}),
    "both": ([{"type": "portmap", "capabilities": PORT_MAPPINGS}], {"capabilities": PORT_MAPPINGS}),
}


@pytest.mark.parametrize("by", SERVED_BY)
def test_published_ports_lead_to_the_container(machine: Machine, podman: Podman, by: str) -> None:
    chained, settings = SERVED_BY[by]
    machine.write_conflist(*chained, **settings)
    podman.start_container("web", "--publish", "18080:80/tcp")
    podman.run("exec", "--detach", "web", "/bin/httpd", "-f", "-p", "80", "-h", "/www")
    published = partial(serves, machine, NODE_ADDRESSES[0], 18080, machine.world)
    wait_for(published, "the published port to be served", 30)
    podman.run("rm", "--force", "--time", "0", "web")
    assert not published()
    assert_nothing_left(machine)


def test_ports_of_an_earlier_networks_portmap_end_with_their_container(
    machine: Machine, podman: Podman
) -> None:
    """A network that chained portmap is renewed while a container runs: its DEL hears of portmap no more."""
    chained = {"type": "portmap", "capabilities": PORT_MAPPINGS}
    machine.write_conflist(chained)
    before = machine.run("nft", "list", "ruleset")
    podman.start_container("old", "--publish", "18080:80/tcp")
    assert "CNI-DN-" in machine.run("nft", "list", "ruleset")
    machine.write_conflist(capabilities=PORT_MAPPINGS)
    podman.run("rm", "--force", "--time", "0", "old")
    after = machine.run("nft", "list", "ruleset")
    assert "CNI-DN-" not in after
    assert "CNI-DN-" not in before
    podman.start_container("new", "--publish", "18080:80/tcp")
    podman.run("exec", "--detach", "new", "/bin/httpd", "-f", "-p", "80", "-h", "/www")
    published = partial(serves, machine, NODE_ADDRESSES[0], 18080, machine.world)
    wait_for(published, "the published port to be served", 60)
    podman.run("rm", "--force", "--time", "0", "new")
    assert_nothing_left(machine)


def test_containers_outlive_the_agent_and_can_be_removed_without_it(
    machine: Machine, podman: Podman
) -> None:
    podman.start_container("web")
    podman.start_container("other")
    machine.node.kill()
    connect_from(machine, podman.pid("other"), list_addresses(podman, "web")[0], podman.pid("web"))
    podman.run("rm", "--force", "--time", "0", "web")
    machine.node.start()
    machine.node.settle()
    assert [endpoint["pod"] for endpoint in machine.node.get("/endpoint")[1]] == ["other"]
    machine.node.assert_consistent()
