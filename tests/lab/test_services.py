"""Services on a lab of two nodes: pods reach back ends by the service's address, and policies judge who answers."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import pytest

from podwire.lab import labs, traffic
from tests.lab.conftest import MakeLab
from tests.lab.labrig import Lab
from tests.lab.test_policy_cli import shell
from tests.waiting import wait_for

pytestmark = pytest.mark.lab

VIPS: Final = ("10.96.0.10", "fd96::10")
PORT, POD_PORT = 80, 8080
REFUSED_S, ANSWER_S = 3.0, 10.0
EMPTY: Final = 81
BACK_ENDS: Final = ("near", "far")


def service(ports: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Give the Service `web`, with one port of each protocol and number."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "spec": {
            "clusterIPs": list(VIPS),
            "ports": [
                {"name": f"{protocol}-{port}", "protocol": protocol.upper(), "port": port}
                for protocol, port in ports
            ],
        },
    }


def slices(lab: Lab, names: Sequence[str]) -> list[Mapping[str, Any]]:
    """Give the EndpointSlices of these pods, one for each family."""
    addresses = {pod.name: pod.addresses for pod in lab.state.pods}
    return [
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": f"web-{family.lower()}",
                "labels": {"kubernetes.io/service-name": "web"},
            },
            "addressType": family,
            "ports": [
                {"name": f"{protocol}-{PORT}", "protocol": protocol.upper(), "port": POD_PORT}
                for protocol in ("tcp", "udp")
            ],
            "endpoints": [{"addresses": [addresses[name][index]]} for name in names],
        }
        for index, family in enumerate(("IPv4", "IPv6"))
    ]


def apply(lab: Lab, *documents: Mapping[str, Any]) -> None:
    """Apply documents as a person does."""
    text = "\n---\n".join(map(json.dumps, documents))
    done = shell(lab, "apply", "-f", "-", stdin=text)
    assert done.code == 0, done.err


def known(lab: Lab, node: str) -> list[tuple[str, int, str, list[str]]]:
    """Give what a node says of the service: address, port, protocol, back ends."""
    return [
        (port["address"], port["port"], port["protocol"], sorted(port["backEnds"]))
        for shown in lab.get("/service", node)
        if shown["translated"]
        for port in shown["ports"]
    ]


Rows = Mapping[tuple[str, int, str], Sequence[str]]
"""The back ends of each address, port and protocol."""


def rows(lab: Lab, node: str) -> Rows:
    """Give what the programs of a node have."""
    return {
        (row["address"], row["port"], row["protocol"]): sorted(row["back_ends"])
        for row in lab.get("/map/service", node)["rows"]
    }


def are_rows(lab: Lab, node: str, wanted: Rows) -> bool:
    """Tell whether the programs of a node have exactly these."""
    return rows(lab, node) == wanted


def offer(lab: Lab, names: Sequence[str]) -> None:
    """Let these pods answer, and wait until both nodes know."""
    apply(lab, service([("tcp", PORT), ("udp", PORT), ("tcp", EMPTY)]), *slices(lab, names))
    addresses = {pod.name: pod.addresses for pod in lab.state.pods}
    wanted: dict[tuple[str, int, str], Sequence[str]] = {}
    for index, vip in enumerate(VIPS):
        offered = sorted(f"{addresses[name][index]} {POD_PORT}" for name in names)
        wanted[vip, PORT, "tcp"] = wanted[vip, PORT, "udp"] = offered
        wanted[vip, EMPTY, "tcp"] = wanted[vip, 0, "any"] = []
    for node in ("node1", "node2"):
        wait_for(partial(are_rows, lab, node, wanted), f"{wanted} on {node}")


EXTERNAL: Final = ("203.0.113.5", "2001:db8::5")


def test_an_external_address_is_translated_and_its_other_ports_are_not_refused(lab: Lab) -> None:
    document = service([("tcp", PORT)])
    outside = {**document, "spec": {**document["spec"], "externalIPs": list(EXTERNAL)}}
    apply(lab, outside, *slices(lab, ["far"]))

    def are_offered() -> bool:
        """A service may be heard of before its slices, and refuses until then."""
        found = rows(lab, "node1")
        return len(found) == 6 and all(found.get((address, PORT, "tcp")) for address in EXTERNAL)

    wait_for(are_offered, "rows of the external addresses")
    for address in EXTERNAL:
        said = ask(lab, address)
        assert said.ok, said
        assert "default/far " in said.answer
        assert "refused" not in ask(lab, address, 4444, timeout_s=REFUSED_S).answer


def chosen(*, name: str = "web", vip: str = VIPS[0], **spec: object) -> Mapping[str, Any]:
    """Give a Service that chooses its pods by labels."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"clusterIPs": [vip], "selector": {"part": name}, **spec},
    }


@pytest.fixture
def parts(lab: Lab) -> Iterator[Callable[[str, str], str]]:
    """Start pods with the label `part=web` that serve a named port; gives what starts one."""
    started: list[str] = []

    def start(name: str, node: str) -> str:
        number = 9000 + len(started)
        started.append(name)
        arguments = {
            "labels": [{"key": "part", "value": "web"}],
            "ports": [{"name": "http", "port": number, "protocol": "TCP"}],
        }
        extra = {"args": {"cni": arguments}}
        pod = labs.run(lab.name, name, node, serve=[f"{number}/tcp"], extra=extra)
        return f"{pod.addresses[0]} {number}"

    yield start
    for pod in [pod for pod in lab.state.pods if pod.name in started]:
        labs.remove(lab.name, pod.full_name)


def test_pods_that_a_selector_chooses_answer_on_all_nodes(
    lab: Lab, parts: Callable[[str, str], str]
) -> None:
    """Without Kubernetes; by the name that each pod gives its port."""

    def await_back_ends(*wanted: str) -> None:
        for node in ("node1", "node2"):
            wait_for(partial(answers, node, sorted(wanted)), f"{wanted} on {node}")

    def answers(node: str, wanted: Sequence[str]) -> bool:
        return rows(lab, node).get((VIPS[0], PORT, "tcp")) == wanted

    first = parts("first", "node1")
    apply(lab, chosen(ports=[{"port": PORT, "targetPort": "http"}]))
    await_back_ends(first)
    second = parts("second", "node2")
    await_back_ends(first, second)
    assert ask(lab, VIPS[0]).ok
    labs.remove(lab.name, "default/first")
    # On the other node, too: long before the five minutes that a withdrawal may wait.
    await_back_ends(second)
    assert "default/second " in ask(lab, VIPS[0]).answer
    changed = lab.cli("endpoint", "label", "default/second", "part=other", "--node", "node2")
    assert changed.code == 0, changed.err
    await_back_ends()
    assert "refused" in ask(lab, VIPS[0]).answer


def start_pods(lab: Lab) -> None:
    """Start a client and a back end on the first node, and another back end on the second."""
    for name, node in (("client", "node1"), ("near", "node1"), ("far", "node2")):
        serve = [] if name == "client" else [f"{POD_PORT}/tcp", f"{POD_PORT}/udp"]
        labs.run(lab.name, name, node, labels={"app": name}, serve=serve)


@pytest.fixture(scope="module")
def lab(pair_lab: Lab) -> Iterator[Lab]:
    """Two nodes that reach each other natively."""
    start_pods(pair_lab)
    yield pair_lab
    for pod in pair_lab.state.pods:
        labs.remove(pair_lab.name, pod.full_name)


@pytest.fixture(autouse=True)
def nothing_else(request: pytest.FixtureRequest) -> Iterator[None]:
    """Take away what a test on the shared lab has applied."""
    yield
    if "lab" not in request.fixturenames:
        return
    lab: Lab = request.getfixturevalue("lab")
    for kind in ("services", "endpointslices", "networkpolicies"):
        for name in lab.cli("get", kind, "-o", "name").lines:
            assert lab.cli("delete", kind, name.partition("/")[2]).code == 0
    for node in ("node1", "node2"):
        wait_for(partial(are_rows, lab, node, {}), f"no services on {node}")
    wait_for(lambda: lab.cli("policy", "list", "-q").lines == [], "policies to be out of force")


def ask(
    lab: Lab,
    vip: str,
    port: int = PORT,
    *,
    udp: bool = False,
    timeout_s: float = ANSWER_S,
    size_bytes: int = 0,
    asker: str = "client",
) -> traffic.Attempt:
    """Let a pod ask the service."""
    [client] = [pod for pod in lab.state.pods if pod.name == asker]
    tries = 3 if udp else 1  # nothing sends a lost datagram again
    return traffic.connect(
        client.netns,
        vip,
        port,
        "udp" if udp else "tcp",
        timeout_s=tries * timeout_s,
        size_bytes=size_bytes,
        tries=tries,
    )


@pytest.mark.parametrize("udp", [False, True], ids=["tcp", "udp"])
@pytest.mark.parametrize("vip", VIPS, ids=["v4", "v6"])
@pytest.mark.parametrize("name", BACK_ENDS)
def test_a_back_end_of_either_node_answers(lab: Lab, name: str, vip: str, udp: bool) -> None:
    offer(lab, [name])
    assert_answers(lab, name, vip, udp=udp)


def test_a_back_end_behind_the_tunnel_answers(make_lab: MakeLab) -> None:
    lab = make_lab(2, routing="overlay")
    start_pods(lab)
    offer(lab, ["far"])
    for vip in VIPS:
        for udp in (False, True):
            assert_answers(lab, "far", vip, udp=udp)


def assert_answers(lab: Lab, name: str, vip: str, *, udp: bool, asker: str = "client") -> None:
    """Ask a few times, with more than one packet has room for, and fail unless this back end answers each time."""
    for size in (0, 20_000 if udp else 300_000, 0):
        said = ask(lab, vip, udp=udp, size_bytes=size, asker=asker)
        assert said.ok, (size, said)
        assert f"default/{name} " in said.answer


@pytest.mark.parametrize("udp", [False, True], ids=["tcp", "udp"])
@pytest.mark.parametrize("vip", VIPS, ids=["v4", "v6"])
def test_a_pod_reaches_itself_through_its_service(lab: Lab, vip: str, udp: bool) -> None:
    offer(lab, ["near"])
    assert_answers(lab, "near", vip, udp=udp, asker="near")


def test_a_pod_keeps_its_back_end_while_there_is_affinity(lab: Lab) -> None:
    offer(lab, BACK_ENDS)
    with_affinity = service([("tcp", PORT), ("udp", PORT), ("tcp", EMPTY)])
    with_affinity["spec"]["sessionAffinity"] = "ClientIP"
    apply(lab, with_affinity)

    def has_affinity(wanted: bool) -> bool:
        there = lab.get("/map/service", "node1")["rows"]
        kept = [bool(row["affinity_s"]) for row in there if row["back_ends"]]
        return bool(kept) and set(kept) == {wanted}

    wait_for(lambda: has_affinity(True), "affinity")
    for vip in VIPS:
        for udp in (False, True):
            said = [ask(lab, vip, udp=udp) for _ in range(12)]
            assert all(answer.ok for answer in said)
            assert len({answer.answer.split()[0] for answer in said}) == 1
    apply(lab, service([("tcp", PORT), ("udp", PORT), ("tcp", EMPTY)]))
    wait_for(lambda: has_affinity(False), "no affinity")
    wait_for(lambda: len({ask(lab, VIPS[0]).answer.split()[0] for _ in range(8)}) == 2, "both")


@pytest.mark.parametrize("vip", VIPS, ids=["v4", "v6"])
def test_both_back_ends_get_their_part(lab: Lab, vip: str) -> None:
    offer(lab, BACK_ENDS)
    heard: set[str] = set()

    def both() -> bool:
        said = ask(lab, vip)
        assert said.ok, said
        heard.add(said.answer.split()[0])
        return heard == {f"default/{name}" for name in BACK_ENDS}

    wait_for(both, "answers of both")


@pytest.mark.parametrize("vip", VIPS, ids=["v4", "v6"])
def test_what_nobody_serves_is_refused_at_once(lab: Lab, vip: str) -> None:
    offer(lab, BACK_ENDS)
    for port in (EMPTY, 4444):  # without back ends, and no port of the service
        for udp in (False, True):
            said = ask(lab, vip, port, udp=udp, timeout_s=ANSWER_S)
            assert not said.ok
            assert "refused" in said.answer, (port, udp, said)


def restrict(lab: Lab, named: str) -> None:
    """Let the client reach one pod, at the port of the pods, and wait until that is in force."""
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
                    "ports": [{"port": POD_PORT}],
                }
            ],
        },
    }
    done = shell(lab, "apply", "-f", "-", "-o", "json", stdin=json.dumps(policy))
    revision = str(done.document[-1]["revision"])
    assert lab.cli("policy", "wait", revision, "--timeout", "60").code == 0


@pytest.mark.parametrize("named", [*BACK_ENDS, "client"])
@pytest.mark.parametrize("vip", VIPS, ids=["v4", "v6"])
def test_an_egress_policy_names_the_pods_behind_the_service(lab: Lab, vip: str, named: str) -> None:
    offer(lab, ["far"])
    restrict(lab, named)
    if named == "far":
        assert ask(lab, vip).ok
    else:
        assert not ask(lab, vip, timeout_s=REFUSED_S).ok


def test_a_flow_names_service_and_back_end(lab: Lab) -> None:
    offer(lab, ["far"])

    def told() -> bool:
        assert ask(lab, VIPS[0]).ok  # again: of very many events in a second some are not told
        flows = lab.cli(
            "observe", "--last", "200", "--pod", "default/client", "-o", "json"
        ).document
        named = {"namespace": "default", "name": "web", "port": PORT}
        return any(
            flow.get("originalTo", {}).get("ip") == VIPS[0]
            and flow["to"].get("port") == POD_PORT
            and flow["to"].get("service") == named
            for flow in flows
        )

    wait_for(told, "a flow that names both")
    lines = lab.cli("observe", "--last", "200", "--pod", "default/client").lines
    assert any(f"(service default/web:{PORT}, to {VIPS[0]}:{PORT})" in line for line in lines)


def test_a_trace_to_a_service_judges_each_back_end(lab: Lab) -> None:
    offer(lab, BACK_ENDS)

    def trace(port: str = f"{PORT}/tcp") -> Any:
        ends = ("--from", "pod:default/client", "--to", "service:default/web")
        return lab.cli("policy", "trace", *ends, "--port", port, "-o", "json")

    assert (trace().code, trace().document["verdict"]) == (0, "allowed")
    assert len(trace().document["backEnds"]) == len(BACK_ENDS)
    restrict(lab, "near")
    said = trace()
    assert (said.code, said.document["verdict"]) == (1, "partly")
    verdicts = {back_end["pod"]: back_end["verdict"] for back_end in said.document["backEnds"]}
    assert verdicts == {"default/near": "allowed", "": "denied"}  # the far one is not of this node
    restrict(lab, "client")
    assert (trace().code, trace().document["verdict"]) == (1, "denied")
    for port, words in ((f"{EMPTY}/tcp", "no back end"), ("4444/tcp", "no port 4444/tcp")):
        said = trace(port)
        assert (said.code, said.document["verdict"]) == (1, "denied")
        assert words in said.document["why"][0]
    nobody = ("--from", "pod:default/client", "--to", "service:default/nobody", "--port", "80/tcp")
    assert lab.cli("policy", "trace", *nobody).code == 4


def test_the_command_line_shows_services(lab: Lab) -> None:
    offer(lab, BACK_ENDS)
    assert len(known(lab, "node1")) == 6
    listed = lab.cli("service", "list", "--node", "node1").lines
    assert listed[1].split()[:4] == ["default", "web", ",".join(VIPS), "80/tcp,80/udp,81/tcp"]
    shown = lab.cli("service", "get", "web", "--node", "node1").lines
    assert shown[0] == "service default/web, translated by the programs"
    assert f"{VIPS[1]} 80/udp" in shown
    assert lab.cli("service", "get", "none", "--node", "node1").code == 4
    assert f"{VIPS[0]}" in lab.cli("bpf", "service", "list", "--node", "node1").out
    wanted = {
        'podwire_services{by="podwire"}': "1.0",
        "podwire_service_frontends": "8.0",  # with a row that refuses for each address
        "podwire_service_back_ends": "8.0",
    }

    def are_counted() -> bool:
        """The figures are noted behind the rows."""
        figures = re.findall(r"^(podwire_service\S+) ([0-9.]+)$", lab.metrics("node1"), re.M)
        return wanted.items() <= dict(figures).items()

    wait_for(are_counted, f"{wanted}")


def test_services_are_in_force_while_the_agent_is_away_and_after_it_comes_back(lab: Lab) -> None:
    offer(lab, ["far"])
    assert lab.cli("lab", "node", "stop", "node1").code == 0
    try:
        assert ask(lab, VIPS[0]).ok
    finally:
        assert lab.cli("lab", "node", "start", "node1").code == 0
    assert ask(lab, VIPS[0]).ok
    offer(lab, ["near"])
    assert "default/near " in ask(lab, VIPS[0]).answer
