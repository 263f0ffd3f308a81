"""Containers of real runtimes under policy: labels without Kubernetes, and only the proxy reaches the database."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import pytest

from tests.lab.rig import Present
from tests.runtime.containerd import Containerd, Sandbox
from tests.runtime.conversation import (
    ANSWER_DEADLINE_S,
    Conversation,
    assert_refused,
    echo_server,
    list_drops,
    reaches,
    wait_drop,
)
from tests.runtime.machine import NODE_ADDRESSES, WORLD_ADDRESSES, Machine, Place
from tests.runtime.podman import Podman
from tests.unit.policies import network_policy, workload
from tests.waiting import wait_for

PORT: Final = 5432
OTHER_PORT: Final = 5433
POLICY: Final = "only-proxy"
DATABASE: Final = {"matchLabels": {"role": "db"}}
PROXY: Final = {"matchLabels": {"role": "proxy"}}
FIRST: Final = 0
"""Index of a container's IPv4 address; tests of what has nothing to do with addresses use it alone."""

KUBERNETES: Final = network_policy(
    POLICY,
    podSelector=DATABASE,
    ingress=[{"from": [{"podSelector": PROXY}], "ports": [{"port": PORT}]}],
)
CILIUM: Final = {
    "apiVersion": "cilium.io/v2",
    "kind": "CiliumNetworkPolicy",
    "metadata": {"name": POLICY, "namespace": "default"},
    "spec": {
        "endpointSelector": DATABASE,
        "ingress": [
            {
                "fromEndpoints": [PROXY],
                "toPorts": [{"ports": [{"port": str(PORT), "protocol": "TCP"}]}],
            }
        ],
    },
}
WORKLOADS: Final = tuple(
    workload(name, namePattern=f"{name}*", labels={"role": name}) for name in ("db", "proxy")
)


@dataclass(frozen=True)
class Container:
    """A running container: where it is, and its addresses, IPv4 first."""

    place: Place
    addresses: tuple[str, ...]


def find(machine: Machine, podman: Podman, name: str) -> Container:
    """Look a container up, by what the agent says."""
    [endpoint] = [shown for shown in machine.node.get("/endpoint")[1] if shown["pod"] == name]
    return Container(podman.pid(name), tuple(endpoint["addresses"]))


def start(machine: Machine, podman: Podman, *names: str, **options: Any) -> Iterator[Container]:
    """Start containers."""
    for name in names:
        podman.start_container(name, **options)
        yield find(machine, podman, name)


@contextlib.contextmanager
def serving(machine: Machine, one: Container, *ports: int) -> Iterator[None]:
    """Serve ports of a container on all of its addresses."""
    with contextlib.ExitStack() as servers:
        for address in one.addresses:
            for port in ports:
                servers.enter_context(echo_server(machine, one.place, address, port))
        yield


def assert_nothing_left(machine: Machine, podman: Podman) -> None:
    """Remove every container, and fail unless the node holds nothing of any."""
    podman.run("rm", "--all", "--force", "--time", "0")
    machine.node.settle()
    assert machine.node.assert_consistent() == Present()
    assert [
        row["endpoints"] for row in machine.change("policy", "list", "-o", "json").document
    ] in (
        [],
        [0],
    )


def reach(machine: Machine, client: Container, server: Container, port: int = PORT) -> list[bool]:
    """Tell for each family whether a container reaches another."""
    return [
        reaches(machine, client.place, address, port, source=own)
        for own, address in zip(client.addresses, server.addresses, strict=True)
    ]


def assert_reach(machine: Machine, client: Container, server: Container) -> None:
    """Fail unless a container reaches another by each family; that may take its time."""
    for own, address in zip(client.addresses, server.addresses, strict=True):
        opened = partial(reaches, machine, client.place, address, PORT, source=own)
        assert opened(within_s=ANSWER_DEADLINE_S), f"{own} > {address}"


def only_inside(network: str, namespace: str) -> dict[str, Any]:
    """Give a policy: a network's containers are reached from the same network only."""
    members = {"matchLabels": {"podwire.io/network": network}}
    return network_policy(
        POLICY,
        namespace,
        podSelector=members,
        ingress=[{"from": [{"podSelector": members}]}],
    )


@pytest.mark.parametrize(
    "policy", [KUBERNETES, CILIUM], ids=["NetworkPolicy", "CiliumNetworkPolicy"]
)
def test_only_the_proxy_reaches_the_database_on_its_port(
    machine: Machine, podman: Podman, policy: Mapping[str, Any]
) -> None:
    for route in ("10.99.0.0/24", "fd99::/64"):
        machine.world_route(route)
    machine.apply(*WORKLOADS)
    db, proxy, other = start(machine, podman, "db", "proxy", "other")
    with serving(machine, db, PORT, OTHER_PORT), serving(machine, other, PORT):
        assert_reach(machine, other, db)
        machine.apply(policy)
        assert_reach(machine, proxy, db)
        assert_reach(machine, db, other)
        for index, address in enumerate(db.addresses):
            refused = partial(assert_refused, machine, target=address, by=POLICY)
            for client, port in ((other, PORT), (proxy, OTHER_PORT)):
                drop = refused(client.place, client.addresses[index], port=port)
                assert (drop["direction"], drop["to"]["pod"]) == ("ingress", "db")
                assert drop["policies"][0]["rule"] == "default-deny"
            refused(machine.world, WORLD_ADDRESSES[index], port=PORT)
            # A process of the host reaches its own pods whatever policies say (setting `host_access`).
            assert reaches(
                machine, machine.node.name, address, OTHER_PORT, within_s=ANSWER_DEADLINE_S
            )
        machine.change("delete", policy["kind"], POLICY)
        wait_for(lambda: reach(machine, other, db) == [True, True], "the database to be open", 30)
    assert_nothing_left(machine, podman)


def test_the_command_line_says_who_is_selected_and_why_nobody_else_passes(
    machine: Machine, podman: Podman
) -> None:
    machine.apply(*WORKLOADS, KUBERNETES)
    list(start(machine, podman, "db", "proxy", "other"))

    def listed() -> list[tuple[object, ...]]:
        rows = machine.change("policy", "list", "-o", "json").document
        return [(row["name"], row["endpoints"], row["ingress"], row["egress"]) for row in rows]

    wait_for(
        lambda: listed() == [(POLICY, 1, True, False)], "the policy to select the database", 30
    )
    shown = {row["pod"]: row for row in machine.change("endpoint", "list", "-o", "json").document}
    assert [shown[name]["policyEnforcement"]["ingress"] for name in ("db", "proxy", "other")] == [
        "enabled",
        "disabled",
        "disabled",
    ]
    [entry] = machine.change("policy", "entries", "-o", "json").document
    assert (entry["peer"], entry["ports"]) == (shown["proxy"]["identity"], str(PORT))
    answers = {
        name: machine.podwire(
            *("policy", "trace", "--from", f"pod:default/{name}", "--to", "pod:default/db"),
            *("--port", f"{PORT}/tcp", "-o", "json"),
        )
        for name in ("proxy", "other")
    }
    assert [answers[name].code for name in ("proxy", "other")] == [0, 1]
    assert any("role=proxy" in why for why in answers["other"].document["why"])


# Labels


def test_a_label_opens_and_closes_at_once_also_for_an_open_connection(
    machine: Machine, podman: Podman
) -> None:
    machine.apply(*WORKLOADS, KUBERNETES)
    db, other = start(machine, podman, "db", "other")
    ends = (other.addresses[FIRST], db.addresses[FIRST])
    with serving(machine, db, PORT):
        assert_refused(machine, other.place, *ends, PORT, by=POLICY)
        machine.change("endpoint", "label", "other", "role=proxy")
        with Conversation(machine, other.place, ends[1], PORT) as opened:
            assert opened.is_answered()
            machine.change("endpoint", "label", "other", "role-")
            before = len(list_drops(machine, *ends))
            opened.say()
            wait_drop(machine, *ends, before, by=POLICY)
            assert opened.is_silent()
            machine.change("endpoint", "label", "other", "role=proxy")
            assert opened.is_answered()
    assert_nothing_left(machine, podman)


def test_a_label_given_by_hand_ends_with_the_containers_life(
    machine: Machine, podman: Podman
) -> None:
    machine.apply(*WORKLOADS, KUBERNETES)
    db, _ = start(machine, podman, "db", "other")
    machine.change("endpoint", "label", "other", "role=proxy")
    with serving(machine, db, PORT):
        assert_reach(machine, find(machine, podman, "other"), db)
        podman.run("restart", "--time", "0", "other")
        machine.node.settle()
        assert reach(machine, find(machine, podman, "other"), db) == [False, False]


def test_a_label_that_a_workload_gives_is_changed_by_the_workload_only(
    machine: Machine, podman: Podman
) -> None:
    machine.apply(*WORKLOADS, KUBERNETES)
    db, proxy = start(machine, podman, "db", "proxy-1")
    with serving(machine, db, PORT):
        assert machine.podwire("endpoint", "label", "proxy-1", "role-").code == 6
        assert_reach(machine, proxy, db)
        machine.apply(workload("proxy", namePattern="proxy*", labels={"role": "retired"}))
        wait_for(lambda: reach(machine, proxy, db) == [False, False], "the proxy to retire", 30)
        machine.apply(*WORKLOADS)
        wait_for(lambda: reach(machine, proxy, db) == [True, True], "the proxy to be back", 30)


def test_workloads_made_after_the_containers_label_them(machine: Machine, podman: Podman) -> None:
    db, proxy, other = start(machine, podman, "db", "proxy", "other")
    machine.apply(KUBERNETES)
    with serving(machine, db, PORT):
        assert_reach(machine, other, db)
        machine.apply(*WORKLOADS)
        wait_for(lambda: reach(machine, other, db) == [False, False], "the other to be cut off", 30)
        assert_reach(machine, proxy, db)


def test_networks_are_told_apart_by_their_names(machine: Machine, podman: Podman) -> None:
    machine.write_conflist(name="back", file_name="06-back.conflist")
    machine.apply(only_inside("back", "default"))
    db, proxy = start(machine, podman, "db", "proxy", networks=["back"])
    [other] = start(machine, podman, "other")
    with serving(machine, db, PORT), serving(machine, other, PORT):
        assert_reach(machine, proxy, db)
        for own, address in zip(other.addresses, db.addresses, strict=True):
            assert_refused(machine, other.place, own, address, PORT, by=POLICY)
        assert_reach(machine, db, other)
    assert_nothing_left(machine, podman)


def test_a_published_port_leads_nobody_past_the_policy(machine: Machine, podman: Podman) -> None:
    published = 15432
    machine.write_conflist({"type": "portmap", "capabilities": {"portMappings": True}})
    machine.apply(*WORKLOADS)
    podman.start_container("db", "--publish", f"{published}:{PORT}/tcp")
    db = find(machine, podman, "db")
    [other] = start(machine, podman, "other")
    node, world, address = NODE_ADDRESSES[FIRST], WORLD_ADDRESSES[FIRST], db.addresses[FIRST]
    with serving(machine, db, PORT):
        assert reaches(machine, machine.world, node, published, within_s=ANSWER_DEADLINE_S)
        assert reaches(machine, other.place, node, published, within_s=ANSWER_DEADLINE_S)
        machine.apply(KUBERNETES)
        assert not reaches(machine, machine.world, node, published)
        wait_drop(machine, world, address, by=POLICY)
        assert not reaches(machine, other.place, node, published)
        wait_drop(machine, other.addresses[FIRST], address, by=POLICY)
    assert_nothing_left(machine, podman)


# Lives


def test_policy_survives_the_agents_death_and_restart(machine: Machine, podman: Podman) -> None:
    machine.apply(*WORKLOADS, KUBERNETES)
    db, proxy, other = start(machine, podman, "db", "proxy", "other")
    ends = (other.addresses[FIRST], db.addresses[FIRST])
    with (
        serving(machine, db, PORT),
        Conversation(machine, proxy.place, ends[1], PORT) as opened,
    ):
        assert opened.is_answered()
        machine.node.kill()
        assert opened.is_answered()
        assert_reach(machine, proxy, db)
        assert reach(machine, other, db) == [False, False]
        machine.node.start()
        assert opened.is_answered()
        assert_reach(machine, proxy, db)
        assert_refused(machine, other.place, *ends, PORT, by=POLICY)
    assert_nothing_left(machine, podman)


def test_what_is_written_while_the_agent_is_away_holds_when_it_is_back(
    machine: Machine, podman: Podman
) -> None:
    machine.apply(*WORKLOADS)
    db, proxy, other = start(machine, podman, "db", "proxy", "other")
    machine.node.kill()
    store = f"sqlite://{machine.directory}/state/store.db"
    file = machine.write_objects(KUBERNETES)
    machine.change("apply", "-f", file, "--store", store)
    with serving(machine, db, PORT):
        assert_reach(machine, other, db)
        machine.node.start()
        assert_reach(machine, proxy, db)
        assert_refused(
            machine, other.place, other.addresses[FIRST], db.addresses[FIRST], PORT, by=POLICY
        )


def test_policy_survives_stop_and_start_of_a_container(machine: Machine, podman: Podman) -> None:
    machine.apply(*WORKLOADS, KUBERNETES)
    list(start(machine, podman, "db", "proxy", "other"))
    for name in ("db", "proxy", "other"):
        podman.run("restart", "--time", "0", name)
        machine.node.settle()
        db, proxy, other = (find(machine, podman, one) for one in ("db", "proxy", "other"))
        with serving(machine, db, PORT):
            assert_reach(machine, proxy, db)
            assert_refused(
                machine, other.place, other.addresses[FIRST], db.addresses[FIRST], PORT, by=POLICY
            )
    assert_nothing_left(machine, podman)


# containerd


SHOP: Final = network_policy(
    POLICY,
    "shop",
    podSelector=DATABASE,
    ingress=[{"from": [{"podSelector": PROXY}], "ports": [{"port": PORT}]}],
)


def run_pod_with(machine: Machine, containerd: Containerd, name: str) -> Container:
    """Run a pod while the network gives the label role=NAME."""
    labels = [{"key": "role", "value": name}]
    machine.write_conflist(args={"cni": {"labels": labels}})
    wait_for(
        lambda: f'\\"value\\":\\"{name}\\"' in containerd.network_configuration(),
        "the runtime to read its configuration",
        60,
    )
    sandbox: Sandbox = containerd.run_pod(name)
    return Container(sandbox.pid, sandbox.addresses)


def test_labels_of_containerds_network_configuration_are_what_policy_selects(
    machine: Machine, containerd: Containerd
) -> None:
    db, proxy, other = (
        run_pod_with(machine, containerd, name) for name in ("db", "proxy", "other")
    )
    with serving(machine, db, PORT):
        assert_reach(machine, other, db)
        machine.apply(SHOP)
        assert_reach(machine, proxy, db)
        for own, address in zip(other.addresses, db.addresses, strict=True):
            assert_refused(machine, other.place, own, address, PORT, by=POLICY)
        machine.change("delete", "netpol", f"shop/{POLICY}")
        wait_for(lambda: reach(machine, other, db) == [True, True], "the database to be open", 30)
    containerd.remove_all()
    machine.node.settle()
    assert machine.node.assert_consistent() == Present()


def test_each_interface_of_a_pod_has_the_policy_of_its_own_network(machine: Machine) -> None:
    machine.write_conflist(name="back", file_name="06-back.conflist")
    with Containerd(machine, networks=2) as containerd:
        containerd.wait_network_ready()
        pods = {name: containerd.run_pod(name).pid for name in ("db", "proxy")}
        machine.apply(only_inside("back", "shop"))
        at = {
            (endpoint["pod"], endpoint["network"]): Container(
                pods[endpoint["pod"]], tuple(endpoint["addresses"])
            )
            for endpoint in machine.node.get("/endpoint")[1]
        }
        front, back_end = at["db", "podwire"], at["db", "back"]
        with serving(machine, front, PORT), serving(machine, back_end, PORT):
            assert_reach(machine, at["proxy", "back"], back_end)
            assert_reach(machine, at["proxy", "podwire"], front)
            assert_reach(machine, at["proxy", "back"], front)
            for own, address in zip(
                at["proxy", "podwire"].addresses, back_end.addresses, strict=True
            ):
                assert_refused(machine, pods["proxy"], own, address, PORT, by=POLICY)
