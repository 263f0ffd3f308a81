"""The world of the tables of policy cases (tests/policy_cases) as pods of a real cluster, on both nodes.

Policies go in by `kubectl apply`. What becomes of a flow is told by the pod that answers or by the agent that drops;
nothing is judged by silence. Pods have the addresses that the cluster gives them, so the oracle is asked with these.
"""

import ipaddress
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import yaml

from podwire.control.policy.oracle import Decision, Party, Question, evaluate_flow
from podwire.control.policy.rules_k8s import decode_network_policy
from podwire.kernel import netns
from podwire.lab.kubernetes import pods
from podwire.lab.kubernetes.cluster import Cluster
from podwire.lab.kubernetes.ranges import RANGES
from podwire.model.policy import Direction
from tests.cluster.agents import Agents
from tests.lab.policy_rig import Place
from tests.lab.prober import Attempt, Fate, Prober
from tests.policy_cases import NAMESPACES, PODS, Case, Flow, Pod
from tests.policy_cases.sides import make_party

SOURCE: Final = "k8s"
_PODS_OF_TABLE: Final = "10.244.1.0/24"
_PROTOCOLS: Final = {6: "TCP", 17: "UDP", 132: "SCTP"}


def is_playable(flow: Flow) -> bool:
    """Tell whether a flow is one of pods, as their kernels answer it."""
    return {flow.source, flow.target} <= PODS.keys() and flow.protocol not in ("icmp", "icmp6")


class Town:
    """The nine pods, and the agents of their nodes."""

    def __init__(self, cluster: Cluster, stack: ExitStack) -> None:
        self.cluster = cluster
        self.addresses: dict[str, str] = {}
        self._agents = Agents(cluster)
        places = {}
        for title, found in _start(cluster).items():
            address = self.addresses[title] = str(found["status"]["podIP"])
            network = pods.network_of(cluster, found)
            fd = stack.enter_context(netns.open_namespace(network))
            places[title] = Place(title, fd, address, "")
        self._prober = stack.enter_context(Prober(places, *self._agents.sockets))

    def play(self, case: Case) -> list[str]:
        """Have a case's policies in force alone, send its flows, and name what is not as the oracle says."""
        documents = [yaml.safe_load(self._with_addresses(text)) for text in case.documents]
        self._agents.enforce(
            documents, namespaces=NAMESPACES, addresses=set(self.addresses.values())
        )
        rules = [decode_network_policy(document) for document in documents]
        flows = [flow for flow in case.flows if is_playable(flow)]
        faults = []
        for attempt in self._prober.play((flow, 4) for flow in flows):
            decided = evaluate_flow(rules, [], self._ask(attempt.flow))
            denial = next(
                (part for part in (decided.egress, decided.ingress) if part and not part.passes),
                None,
            )
            faults += _find_faults(attempt, denial)
        return faults

    def _with_addresses(self, text: str) -> str:
        """Have a document speak of the addresses that pods have here, where it names one pod's or those of all."""
        here = {f"{pod.ipv4}/32": f"{self.addresses[title]}/32" for title, pod in PODS.items()}
        # Which node has which part of the cluster's range differs from run to run.
        here[_PODS_OF_TABLE] = RANGES["4"].pods
        # In one pass, because an address here may be another pod's in the table.
        return re.sub("|".join(map(re.escape, here)), lambda match: here[match[0]], text)

    def _ask(self, flow: Flow) -> Question:
        source, target = (self._make_party(title) for title in (flow.source, flow.target))
        protocol, port = flow.numbers(4)
        return Question(source, target, Direction.EGRESS, protocol, port)

    def _make_party(self, title: str) -> Party:
        facts = make_party(title, 4, SOURCE).facts
        return Party(facts, ipaddress.ip_address(self.addresses[title]), endpoint=True)


def _find_faults(attempt: Attempt, denial: Decision | None) -> list[str]:
    wanted = Fate.PASSED if denial is None else Fate.DENIED
    if attempt.fate is not wanted:
        return [f"wanted {wanted}: {attempt.told}"]
    if denial is None:
        return []
    named = {(policy["namespace"], policy["name"]) for policy in attempt.event["policies"]}
    meant = {(rule.policy.namespace, rule.policy.name) for rule in denial.rules}
    return [] if named <= meant else [f"wanted the drop of one of {meant}: {attempt.told}"]


def _describe(pod: Pod, node: str) -> dict[str, Any]:
    document = pods.describe(
        pod.name, namespace=pod.namespace, node=node, labels=pod.labels, command=pods.IDLE
    )
    (container,) = document["spec"]["containers"]
    container["ports"] = [
        {"name": port.name, "protocol": _PROTOCOLS[port.protocol], "containerPort": port.port}
        for port in pod.ports
    ]
    return document


def _start(cluster: Cluster) -> dict[str, Mapping[str, Any]]:
    made = [
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": name, "labels": dict(labels)},
        }
        for name, labels in NAMESPACES.items()
        if name != "default"
    ]
    cluster.apply(*made)
    nodes = [node.name for node in cluster.nodes]
    for number, pod in enumerate(PODS.values()):
        path = f"/api/v1/namespaces/{pod.namespace}/pods"
        cluster.client.create(path, _describe(pod, nodes[number % len(nodes)]))
    return {
        f"{namespace}/{found['metadata']['name']}": found
        for namespace in NAMESPACES
        for found in cluster.wait_for_pods(3, namespace)
    }


@contextmanager
def open_town(cluster: Cluster) -> Iterator[Town]:
    """Start the pods, and take all away at the end."""
    try:
        with ExitStack() as stack:
            yield Town(cluster, stack)
    finally:
        Agents(cluster).delete_policies(NAMESPACES)
        for namespace in NAMESPACES:
            cluster.kubectl("delete", "pod", "-n", namespace, "--all", "--now")
        for namespace in NAMESPACES.keys() - {"default"}:
            cluster.kubectl("delete", "namespace", namespace)
