"""SCTP services in a real cluster: the address alone is translated, and what that is not enough for an Event names.

Raw packets, because few kernels have SCTP. Without kube-proxy: in iptables mode one such service can cost it all of its
rules on a kernel that lacks the match, and what is asked here is what the programs do.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pytest

from podwire.lab.kubernetes import pods
from podwire.lab.kubernetes.cluster import Cluster
from podwire.lab.kubernetes.networks.installed import Podwire
from tests.cluster.agents import Agents, ask
from tests.cluster.tenant import NOT_TRANSLATED
from tests.lab.sctp_voice import Heard, Voice
from tests.packet.frames import ABORT, COOKIE_ECHO, INIT, INIT_ACK
from tests.waiting import wait_for

ON_SHAPES: Final = ("other",)
NAMESPACE: Final = "signals"
PORT, ELSEWHERE, SOURCE = 3868, 13_868, 40_000
PATIENCE_S: Final = 3.0
PLACES: Final = {"client": "node1", "near": "node1", "far": "node2"}
TARGETS: Final = {"near": ("near", PORT), "far": ("far", PORT), "moved": ("far", ELSEWHERE)}
"""Which pod is behind a service, and at which port."""


@dataclass(frozen=True)
class Signals:
    """Three pods and their services."""

    cluster: Cluster
    networks: Mapping[str, str]
    addresses: Mapping[str, Sequence[str]]
    """Of pods; IPv4 first."""
    services: Mapping[str, Sequence[str]]

    def row_of(self, name: str) -> list[str]:
        """Give the back ends that the programs of the client's node have for a service's first address; none while that
        cannot be told."""
        shown = ask(Agents(self.cluster).sockets[0], "/map/service")
        if shown["truncated"]:
            return []  # others have more rows than are shown, and it may be among those that are not
        key = (self.services[name][0], PORT, "sctp")
        found = [
            one for one in shown["rows"] if (one["address"], one["port"], one["protocol"]) == key
        ]
        return [str(back_end) for row in found for back_end in row["back_ends"]]

    def voice(self, name: str, family: int) -> Voice:
        """Let a pod speak."""
        return Voice(self.networks[name], self.addresses[name][family], PATIENCE_S)


@pytest.fixture(scope="module")
def signals(shaped: Cluster) -> Iterator[Signals]:
    shaped.use_proxy("")
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    shaped.apply(
        namespace,
        *(
            pods.describe(
                name, namespace=NAMESPACE, node=node, labels={"app": name}, command=pods.IDLE
            )
            for name, node in PLACES.items()
        ),
    )
    try:
        found = {
            pod["metadata"]["name"]: pod for pod in shaped.wait_for_pods(len(PLACES), NAMESPACE)
        }
        made = Signals(
            shaped,
            {name: pods.network_of(shaped, pod) for name, pod in found.items()},
            {
                name: [str(pod_ip["ip"]) for pod_ip in pod["status"]["podIPs"]]
                for name, pod in found.items()
            },
            {name: create(shaped, name) for name in TARGETS},
        )
        for name, wanted in {
            "near": f"{made.addresses['near'][0]} {PORT}",
            "far": f"{made.addresses['far'][0]} {PORT}",
            "moved": "stack",
        }.items():
            wait_for(lambda name=name, wanted=wanted: made.row_of(name) == [wanted], name)  # type: ignore[misc]
        yield made
    finally:
        shaped.kubectl("delete", "namespace", NAMESPACE)
        shaped.use_proxy(shaped.shape.proxy)


def create(shaped: Cluster, name: str) -> Sequence[str]:
    """Make a service; gives its addresses."""
    app, target = TARGETS[name]
    spec = {
        "selector": {"app": app},
        "ipFamilyPolicy": "PreferDualStack",
        "ports": [{"port": PORT, "targetPort": target, "protocol": "SCTP"}],
    }
    path = f"/api/v1/namespaces/{NAMESPACE}/services"
    made = shaped.client.create(path, {"metadata": {"name": name}, "spec": spec})
    return list(made["spec"]["clusterIPs"])


def associate(signals: Signals, name: str, family: int) -> None:
    """Let the client begin an association with the pod behind a service."""
    address = signals.services[name][family]
    with signals.voice("client", family) as client, signals.voice(name, family) as server:
        for asks, answers in ((INIT, INIT_ACK), (COOKIE_ECHO, ABORT)):
            came = client.tell(server, address, SOURCE, PORT, asks)
            assert came == Heard(signals.addresses["client"][family], SOURCE, PORT)
            heard = server.tell(client, came.source, PORT, came.sport, answers)
            assert heard == Heard(address, PORT, SOURCE)


@pytest.mark.parametrize("family", [0, 1], ids=["ipv4", "ipv6"])
@pytest.mark.parametrize("name", ["near", "far"])
def test_a_pod_behind_a_service_answers_by_its_address(
    signals: Signals, name: str, family: int
) -> None:
    associate(signals, name, family)


def test_a_port_that_is_another_one_behind_is_left_to_the_stack_and_named(
    signals: Signals,
) -> None:
    path = f"/api/v1/namespaces/{NAMESPACE}/events"

    def find() -> list[Mapping[str, Any]]:
        events = signals.cluster.client.get(path)["items"]
        return [event for event in events if event.get("reason") == NOT_TRANSLATED]

    told = wait_for(find, f"an Event {NOT_TRANSLATED}")
    assert {event["involvedObject"]["name"] for event in told} == {"moved"}
    assert f"port {PORT}/sctp is left to the stack" in told[0]["message"]


def test_an_egress_policy_names_the_pods_behind_the_service(signals: Signals) -> None:
    cluster, network = signals.cluster, signals.cluster.network
    assert isinstance(network, Podwire)
    Agents(cluster).enforce(
        [to_app("far")], namespaces=[NAMESPACE], addresses=[signals.addresses["client"][0]]
    )
    associate(signals, "far", 0)
    meant = signals.addresses["near"][0]
    words = ("observe", "--verdict", "dropped", "--to", meant, "-o", "jsonl")
    with signals.voice("client", 0) as client:

        def is_told() -> list[Mapping[str, Any]]:
            client.say(signals.services["near"][0], SOURCE, PORT, INIT)
            said = network.run(cluster, PLACES["client"], *words)
            drops = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
            return [drop for drop in drops if drop["protocol"] == "sctp"]

        drops = wait_for(is_told, "a drop of what was for the pod behind")
    assert {drop["reason"] for drop in drops} == {"policy"}


def to_app(app: str) -> Mapping[str, Any]:
    """Write a policy that lets the client reach the pods of one app."""
    egress = {
        "to": [{"podSelector": {"matchLabels": {"app": app}}}],
        "ports": [{"port": PORT, "protocol": "SCTP"}],
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "client", "namespace": NAMESPACE},
        "spec": {
            "podSelector": {"matchLabels": {"app": "client"}},
            "policyTypes": ["Egress"],
            "egress": [egress],
        },
    }
