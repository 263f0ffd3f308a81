"""A closed pod that forges an ICMP error reaches nobody, and everybody can see that it tried."""

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podwire.kernel import netns
from podwire.lab import labs
from podwire.lab.show.drops import wait_for_drop
from tests.lab.labrig import Lab
from tests.lab.rig import run
from tests.packet import frames
from tests.waiting import wait_for

pytestmark = pytest.mark.lab

POLICY = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "closed", "namespace": "default"},
    "spec": {
        "podSelector": {"matchLabels": {"app": "closed"}},
        "policyTypes": ["Ingress", "Egress"],
    },
}


@pytest.fixture(scope="module")
def lab(pair_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A pod that nothing lets out, and another one on each node."""
    path: Path = tmp_path_factory.mktemp("closed") / "policy.json"
    path.write_text(json.dumps(POLICY))
    for name, node in (("closed", "node1"), ("near", "node1"), ("far", "node2")):
        labs.run(pair_lab.name, name, node, labels={"app": name})
    assert pair_lab.cli("apply", "-f", str(path)).code == 0
    wait_for(lambda: pair_lab.get("/policy"), "the policy to be in force")
    yield pair_lab
    assert pair_lab.cli("delete", "networkpolicies", "default/closed").code == 0
    for pod in pair_lab.state.pods:
        labs.remove(pair_lab.name, pod.full_name)


def open_socket(lab: Lab, family: int, kind: int, protocol: int) -> socket.socket:
    namespace, _ = labs.locate(lab.state, "closed")
    with netns.open_namespace(netns.named_path(namespace)) as fd, netns.namespace(fd.fileno()):
        return socket.socket(family, kind, protocol)


def talk_to_itself(lab: Lab, address: str) -> bytes:
    """Let the pod send a datagram to its own address by its gateway, and give it."""
    namespace, _ = labs.locate(lab.state, "closed")
    six = ":" in address
    build, kind = (frames.ipv6, frames.ETH_P_IPV6) if six else (frames.ipv4, frames.ETH_P_IP)
    packet = build(address, address, frames.udp(4000, 53))
    [link] = json.loads(run("ip", "-n", namespace, "-j", "link", "show", "eth0"))
    neighbours = json.loads(run("ip", "-n", namespace, "-j", "neigh", "show", "dev", "eth0"))
    gateway = next(
        neighbour["lladdr"]
        for neighbour in neighbours
        if neighbour["dst"] in ("169.254.1.1", "fe80::1")
    )
    with open_socket(lab, socket.AF_PACKET, socket.SOCK_RAW, 0) as packets:
        packets.bind(("eth0", 0))
        packets.send(frames.ethernet(gateway, link["address"], kind, packet))
    return packet


@pytest.mark.parametrize("target", ["near", "far"])
@pytest.mark.parametrize("version", [4, 6])
def test_observe_shows_a_forged_error_that_was_dropped(lab: Lab, version: int, target: str) -> None:
    own, other = (labs.find_addresses(lab.state, name)[version == 6] for name in ("closed", target))
    quoted = talk_to_itself(lab, own)
    if version == 4:
        family, protocol = socket.AF_INET, frames.ICMP
        error = frames.ipv4(own, other, frames.icmp(3, 3, 0, quoted))[20:]
    else:
        family, protocol = socket.AF_INET6, frames.ICMPV6
        error = frames.ipv6(own, other, frames.icmpv6(1, 4, 0, quoted))[40:]
    with open_socket(lab, family, socket.SOCK_RAW, protocol) as sender:

        def send() -> None:
            sender.sendto(error, (other, 0))

        def told() -> dict[str, Any] | None:
            """Take the drop of the error, not of what the pod said to itself or to others before."""
            with contextlib.suppress(TimeoutError):
                flow = wait_for_drop(lab.name, "node1", send, source=own)
                return flow if flow and flow["to"]["ip"] == other else None
            return None

        flow = wait_for(told, "the drop of the forged error")
    assert (flow["verdict"], flow["reason"]) == ("dropped", "policy")
    words = "observe", "--verdict", "dropped", "--from", own, "--to", other
    said = lab.cli(*words)
    assert "dropped (policy)" in said.out
    assert "NetworkPolicy default/closed" in said.out
