"""Pods reach the API server by the service `kubernetes`, however kube-proxy runs, where a policy names its node.

The address behind that service is a node's or a machine's, no pod's. An egress policy allows it by `ipBlock`, and a pod
whose policy names another address is cut.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import pytest

from podwire.kernel import netns
from podwire.lab.kubernetes import pods
from podwire.lab.kubernetes.api_server import SERVICE_ADDRESS
from podwire.lab.kubernetes.client import ApiClient
from podwire.lab.kubernetes.cluster import Cluster
from podwire.lab.kubernetes.networks.installed import Podwire
from tests.cluster.agents import Agents
from tests.cluster.asking import Asker, Fate, Target
from tests.waiting import wait_for

NAMESPACE: Final = "askers"
PORT: Final = 443
NOBODY: Final = "203.0.113.9"
QUESTIONS: Final = 5
"""So often each is asked: another connection, another flow."""


@pytest.fixture(scope="module")
def askers(shaped: Cluster) -> Iterator[Mapping[str, Mapping[str, Any]]]:
    """Give three pods of each node by their names; the names of two are those of their policies."""
    if not isinstance(shaped.network, Podwire):
        pytest.skip("only podwire enforces policies")
    shaped.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    proxy = shaped.shape.proxy
    try:
        wanted = [
            pods.describe(
                f"{app}-{node.name}",
                namespace=NAMESPACE,
                node=node.name,
                labels={"app": app},
                command=pods.IDLE,
            )
            for node in shaped.nodes
            for app in ("free", "allowed", "cut")
        ]
        shaped.apply(*wanted)
        found = shaped.wait_for_pods(len(wanted), NAMESPACE)
        yield {pod["metadata"]["name"]: pod for pod in found}
    finally:
        shaped.use_proxy(proxy)
        shaped.kubectl("delete", "namespace", NAMESPACE)


def to_address(app: str, address: str) -> Mapping[str, Any]:
    """Write a policy that lets the pods of an app reach the API server's port at one address."""
    egress = {
        "to": [{"ipBlock": {"cidr": f"{address}/32"}}],
        "ports": [{"port": 6443, "protocol": "TCP"}],
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": app, "namespace": NAMESPACE},
        "spec": {
            "podSelector": {"matchLabels": {"app": app}},
            "policyTypes": ["Egress"],
            "egress": [egress],
        },
    }


def ask(shaped: Cluster, network: str) -> bool:
    """Ask the API server by its service, over TLS, from a network."""
    api = shaped.control.api
    client = ApiClient(SERVICE_ADDRESS, PORT, ca=api.ca, token=shaped.client.token, network=network)
    return client.answers("/version")


@pytest.mark.parametrize("proxy", ["iptables", "nftables", ""])
def test_the_api_server_answers_by_its_service_who_may_reach_its_address(
    shaped: Cluster, askers: Mapping[str, Mapping[str, Any]], proxy: str
) -> None:
    network = shaped.network
    assert isinstance(network, Podwire)
    if not proxy and not network.past_services:
        pytest.skip("these agents reach the API server by kube-proxy")
    shaped.use_proxy(proxy)
    if not network.past_services:
        restart_agents(shaped, network)
    address = shaped.control.api.shape.address
    Agents(shaped).enforce(
        [to_address("allowed", address), to_address("cut", NOBODY)],
        namespaces=[NAMESPACE],
        addresses={str(pod["status"]["podIP"]) for pod in askers.values()},
    )
    for name, pod in askers.items():
        path = pods.network_of(shaped, pod)
        if name.startswith("cut"):
            assert_cut(shaped, path, address)
        else:
            assert [ask(shaped, path) for _ in range(QUESTIONS)] == [True] * QUESTIONS, name
    if proxy:
        for node in shaped.nodes:
            host = netns.named_path(node.machine.plan.namespace)
            wait_for(lambda host=host: ask(shaped, host), f"kube-proxy of {node.name}")  # type: ignore[misc]


def assert_cut(shaped: Cluster, network: str, address: str) -> None:
    target = Target("tcp", SERVICE_ADDRESS, PORT)
    with netns.open_namespace(network) as fd:
        for _ in range(QUESTIONS):
            with Asker(fd.fileno(), Agents(shaped).sockets) as asker:
                (outcome,) = asker.ask([target]).values()
            assert outcome.fate is Fate.DENIED, outcome
            assert outcome.policies == [(NAMESPACE, "cut")]
            assert outcome.goal == address


def restart_agents(shaped: Cluster, network: Podwire) -> None:
    """Have agents find the API server anew: a connection that is open outlives kube-proxy's mode."""
    words = ("delete", "pod", "-n", network.namespace, "-l", network.selector)
    shaped.kubectl(*words, "--wait=true")
    shaped.wait_for_pods(len(shaped.nodes), network.namespace, network.selector)
