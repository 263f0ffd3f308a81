"""SCTP services on a lab of two nodes, by raw packets, because few kernels have SCTP: every way there and home.

Each packet is one that a kernel would send and accept: its checksum is right on the way there and back.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import pytest

from podwire.kernel import netns
from podwire.lab import labs
from tests.lab.conftest import MakeLab
from tests.lab.labrig import Lab
from tests.lab.sctp_voice import Heard, Voice
from tests.lab.test_policy_cli import shell
from tests.lab.test_services import VIPS, apply, are_rows, nothing_else, rows, start_pods
from tests.packet.frames import ABORT, COOKIE_ECHO, INIT, INIT_ACK, sctp
from tests.waiting import wait_for

pytestmark = pytest.mark.lab

PORT, SOURCE, EMPTY = 3868, 40_000, 3869
DEADLINE_S: Final = 60.0
both_families = pytest.mark.parametrize("family", [4, 6])
__all__ = ["nothing_else"]  # a fixture, used by every test


@pytest.fixture(scope="module")
def lab(pair_lab: Lab) -> Iterator[Lab]:
    """Two nodes that reach each other natively."""
    start_pods(pair_lab)
    yield pair_lab
    for pod in pair_lab.state.pods:
        labs.remove(pair_lab.name, pod.full_name)


def offer(lab: Lab, name: str, target: int = PORT) -> None:
    """Let somebody answer for the service, and wait until the client's node knows."""
    where = labs.locate(lab.state, name)[1]
    port = {"name": "d", "protocol": "SCTP", "port": PORT}
    empty = {"name": "e", "protocol": "SCTP", "port": EMPTY}
    web = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "spec": {"clusterIPs": list(VIPS), "ports": [port, empty]},
    }
    apply(lab, web, *(_slice(address, {**port, "port": target}) for address in where))
    wanted: dict[tuple[str, int, str], list[str]] = {}
    for vip, address in zip(VIPS, where, strict=True):
        wanted[vip, PORT, "sctp"] = ["stack" if target != PORT else f"{address} {PORT}"]
        wanted[vip, EMPTY, "sctp"] = wanted[vip, 0, "any"] = []
    wait_for(partial(are_rows, lab, "node1", wanted), f"{wanted}, not {rows(lab, 'node1')}")


def _slice(address: str, port: Mapping[str, Any]) -> Mapping[str, Any]:
    family = "IPv6" if ":" in address else "IPv4"
    labels = {"kubernetes.io/service-name": "web"}
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": f"web-{family.lower()}", "labels": labels},
        "addressType": family,
        "ports": [port],
        "endpoints": [{"addresses": [address]}],
    }


def voice_of(lab: Lab, name: str, family: int, stack: ExitStack) -> Voice:
    """Let a pod or a host speak SCTP from its address of a family."""
    namespace, addresses = labs.locate(lab.state, name)
    path = netns.named_path(namespace)
    return stack.enter_context(Voice(path, addresses[family == 6], DEADLINE_S))


def associate(lab: Lab, name: str, family: int) -> None:
    """Let the client begin an association with the service, and fail unless this one answers it."""
    vip = VIPS[family == 6]
    with ExitStack() as stack:
        client, server = (voice_of(lab, pod, family, stack) for pod in ("client", name))
        for asks, answers in ((INIT, INIT_ACK), (COOKIE_ECHO, ABORT)):
            client.say(vip, SOURCE, PORT, asks)
            came = server.hear(asks)
            if (
                name != "world"
            ):  # outside of the cluster pods have an address and port of their node's
                own = labs.locate(lab.state, "client")[1][family == 6]
                assert came == Heard(vip if name == "client" else own, SOURCE, PORT)
            server.say(came.source, PORT, came.sport, answers)
            assert client.hear(answers) == Heard(vip, PORT, SOURCE)


@both_families
@pytest.mark.parametrize("name", ["near", "far", "client", "node1", "node2", "world"])
def test_a_back_end_answers_and_its_answer_comes_from_the_service(
    lab: Lab, name: str, family: int
) -> None:
    offer(lab, name)
    associate(lab, name, family)


def test_a_back_end_behind_the_tunnel_answers(make_lab: MakeLab) -> None:
    lab = make_lab(2, routing="overlay")
    start_pods(lab)
    offer(lab, "far")
    for family in (4, 6):
        associate(lab, "far", family)


@both_families
@pytest.mark.parametrize("port", [EMPTY, 4444], ids=["no-back-end", "no-port"])
def test_what_nobody_serves_is_refused_at_once(lab: Lab, family: int, port: int) -> None:
    offer(lab, "near")
    with ExitStack() as stack:
        client = voice_of(lab, "client", family, stack)
        client.socket.connect((VIPS[family == 6], 0))
        client.socket.send(sctp(SOURCE, port).data)
        with pytest.raises(ConnectionRefusedError):
            client.socket.recv(2048)


@both_families
@pytest.mark.parametrize("named", ["far", "near"])
def test_an_egress_policy_names_the_pods_behind_the_service(
    lab: Lab, family: int, named: str
) -> None:
    offer(lab, "far")
    policy = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "client"},
        "spec": {
            "podSelector": {"matchLabels": {"app": "client"}},
            "policyTypes": ["Egress"],
            "egress": [
                {
                    "to": [{"podSelector": {"matchLabels": {"app": named}}}],
                    "ports": [{"port": PORT, "protocol": "SCTP"}],
                }
            ],
        },
    }
    done = shell(lab, "apply", "-f", "-", "-o", "json", stdin=json.dumps(policy))
    revision = str(done.document[-1]["revision"])
    assert lab.cli("policy", "wait", revision, "--timeout", "60").code == 0
    ends = ("--from", "pod:default/client", "--to", "service:default/web")
    said = lab.cli("policy", "trace", *ends, "--port", f"{PORT}/sctp", "-o", "json")
    assert said.document["verdict"] == ("allowed" if named == "far" else "denied")
    if named == "far":
        associate(lab, "far", family)
        return
    with ExitStack() as stack:
        client = voice_of(lab, "client", family, stack)

        def is_told() -> bool:
            client.say(VIPS[family == 6], SOURCE, PORT, INIT)
            told = lab.cli("observe", "--last", "50", "--verdict", "dropped", "-o", "json").document
            far = labs.locate(lab.state, "far")[1][family == 6]
            return any(
                (event["to"]["ip"], event["protocol"], event["reason"]) == (far, "sctp", "policy")
                for event in told
            )

        wait_for(is_told, "a drop by policy of what was for the back end")


def test_another_port_at_the_back_end_is_left_to_the_stack_and_named(lab: Lab) -> None:
    offer(lab, "far", 13_868)
    why = f"port {PORT}/sctp is left to the stack: a back end has another targetPort"
    shown = lab.cli("service", "get", "web", "--node", "node1").lines
    assert why in shown[1]
    assert f"{VIPS[0]} {PORT}/sctp, left to the stack" in shown
    ends = ("--from", "pod:default/client", "--to", "service:default/web")
    said = lab.cli("policy", "trace", *ends, "--port", f"{PORT}/sctp", "-o", "json").document
    assert why in said["why"][0]
    said = lab.cli("policy", "trace", *ends, "--port", "80/tcp", "-o", "json").document
    assert (said["verdict"], "refused at once" in said["why"][0]) == ("denied", True)
    assert 'podwire_services_left{reason="sctp"} 1.0' in lab.metrics("node1")
    offer(lab, "far")
    assert lab.cli("service", "get", "web", "--node", "node1").lines[1] == f"{VIPS[0]} {PORT}/sctp"
    associate(lab, "far", 4)
