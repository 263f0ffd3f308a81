"""The manifest's admission policies, judged by a real API server: what an agent's token lets it write, and what not."""

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from podwire.lab.kubernetes.api_server import ApiServer
from podwire.lab.kubernetes.client import ApiClient, Refused
from tests.contract import api_rig
from tests.waiting import ask_until

MANIFEST: Final = Path(__file__).resolve().parents[2] / "deploy" / "podwire.yaml"
NAMESPACE: Final = "podwire-system"
AGENT: Final = "podwire-agent"
OWN: Final = "/apis/podwire.io/v1"
KINDS: Final = {
    "nodes": "Node",
    "nodeendpoints": "NodeEndpoints",
    "ipblocks": "IPBlock",
    "ipaddresses": "IPAddress",
    "identities": "Identity",
}
PATHS: Final = {
    "Namespace": "/api/v1/namespaces",
    "ServiceAccount": f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts",
    "ConfigMap": f"/api/v1/namespaces/{NAMESPACE}/configmaps",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "ValidatingAdmissionPolicy": "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": (
        "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"
    ),
}
"""What of the manifest takes part."""


def define(plural: str, kind: str) -> dict[str, Any]:
    """A kind whose objects may say anything: this is about policies, not about schemas."""
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema = {"openAPIV3Schema": {"type": "object", "properties": {"spec": anything}}}
    version = {"name": "v1", "served": True, "storage": True, "schema": schema}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.podwire.io"},
        "spec": {
            "group": "podwire.io",
            "scope": "Cluster",
            "names": {"plural": plural, "singular": kind.lower(), "kind": kind},
            "versions": [version],
        },
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with api_rig.started(tmp_path_factory.mktemp("api")) as made:
        install(made)
        yield made


def install(server: ApiServer) -> None:
    """Apply the manifest, and wait until the policies are in force."""
    admin = server.client
    for plural, kind in KINDS.items():
        admin.create(
            "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", define(plural, kind)
        )
    for document in yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8")):
        if document["kind"] in PATHS:
            admin.apply(f"{PATHS[document['kind']]}/{document['metadata']['name']}", document)
    for name in ("n1", "n2"):
        admin.create("/api/v1/nodes", {"metadata": {"name": name}})
        pod = {
            "metadata": {"name": f"agent-{name}"},
            "spec": {
                "nodeName": name,
                "serviceAccountName": AGENT,
                "containers": [{"name": "agent", "image": "none"}],
            },
        }
        admin.create(f"/api/v1/namespaces/{NAMESPACE}/pods", pod)
    agent = token_of(server, "agent-n1")

    def refuses() -> bool:
        try:
            agent.create(f"{OWN}/nodes?dryRun=All", publication("nodes", "n2"))
        except Refused as error:
            return "only what is of its own node" in str(error)
        return False

    ask_until(refuses, "the policies to be in force")
    for plural in KINDS:
        ask_until(partial(admin.answers, f"{OWN}/{plural}"), f"{plural} to be served")


def token_of(server: ApiServer, pod: str | None) -> ApiClient:
    """Give the way of a pod's token; None: of a token that is bound to no pod."""
    bound = {"boundObjectRef": {"kind": "Pod", "apiVersion": "v1", "name": pod}} if pod else {}
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{AGENT}/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": bound}
    token = server.client.create(path, request)["status"]["token"]
    return ApiClient(server.shape.address, server.port, ca=server.ca, token=token)


@pytest.fixture(scope="module")
def agent(server: ApiServer) -> ApiClient:
    """The agent of node n1."""
    return token_of(server, "agent-n1")


def publication(plural: str, name: str, **spec: object) -> dict[str, Any]:
    return {
        "apiVersion": "podwire.io/v1",
        "kind": KINDS[plural],
        "metadata": {"name": name},
        "spec": spec,
    }


def is_allowed(agent: ApiClient, plural: str, name: str, **spec: object) -> bool:
    try:
        agent.create(f"{OWN}/{plural}?dryRun=All", publication(plural, name, **spec))
    except Refused as error:
        if error.status not in (403, 422):
            raise
        return False
    return True


@pytest.mark.parametrize(
    ("plural", "name", "spec", "allowed"),
    [
        ("nodes", "n1", {}, True),
        ("nodes", "n2", {}, False),
        ("nodeendpoints", "n1", {}, True),
        ("nodeendpoints", "n2", {}, False),
        ("ipblocks", "a", {"node": "n1"}, True),
        ("ipblocks", "a", {"node": "n2"}, False),
        ("ipblocks", "a", {}, False),
        ("ipaddresses", "a", {"node": "n1"}, True),
        ("ipaddresses", "a", {"node": "n2"}, False),
        ("identities", "70000", {}, True),
    ],
)
def test_an_agent_creates_what_is_of_its_own_node(
    agent: ApiClient, plural: str, name: str, spec: Mapping[str, object], allowed: bool
) -> None:
    assert is_allowed(agent, plural, name, **spec) is allowed


def test_a_token_of_no_node_writes_nothing_and_others_are_not_judged(server: ApiServer) -> None:
    assert not is_allowed(token_of(server, None), "nodes", "n1")
    assert is_allowed(server.client, "nodes", "n2")


@pytest.fixture
def _objects(server: ApiServer) -> Iterator[None]:
    """Two nodes have published themselves and claimed a block each."""
    admin, names = server.client, ("n1", "n2")
    for name in names:
        admin.create(f"{OWN}/ipblocks", publication("ipblocks", name, node=name))
        admin.create(f"{OWN}/nodes", publication("nodes", name, epoch=1))
    yield
    for name in names:
        admin.delete(f"{OWN}/ipblocks/{name}")
        admin.delete(f"{OWN}/nodes/{name}")


@pytest.mark.usefixtures("_objects")
def test_an_agent_changes_and_deletes_only_what_is_of_its_own_node(agent: ApiClient) -> None:
    agent.patch(f"{OWN}/nodes/n1", {"spec": {"epoch": 2}})
    with pytest.raises(Refused, match="own node"):
        agent.patch(f"{OWN}/nodes/n2", {"spec": {"epoch": 2}})
    with pytest.raises(Refused, match="own node"):
        agent.delete(f"{OWN}/ipblocks/n2")
    with pytest.raises(Refused, match="own node"):
        agent.replace(f"{OWN}/ipblocks/n2", held_by(agent, "n2", ""))
    agent.replace(f"{OWN}/ipblocks/n1", held_by(agent, "n1", ""))
    agent.replace(f"{OWN}/ipblocks/n1", held_by(agent, "n1", "n1"))
    agent.delete(f"{OWN}/ipblocks/n1?dryRun=All")


def held_by(agent: ApiClient, name: str, node: str) -> dict[str, Any]:
    """Give a block as it would be in another node's hands; "" = in nobody's."""
    block: dict[str, Any] = agent.get(f"{OWN}/ipblocks/{name}")
    return block | {"spec": {"node": node}}


def test_an_agent_says_of_its_own_core_node_that_it_has_a_network(agent: ApiClient) -> None:
    condition = {"type": "NetworkUnavailable", "status": "False"}
    patch = {"status": {"conditions": [condition]}}
    agent.patch("/api/v1/nodes/n1/status", patch)
    with pytest.raises(Refused):
        agent.patch("/api/v1/nodes/n2/status", patch)


RANGES: Final = {
    "ours": (PATHS["ConfigMap"], "podwire", {"cluster-cidrs": "10.244.0.0/16, fd10::/48"}),
    "kubeadm": (
        "/api/v1/namespaces/kube-system/configmaps",
        "kubeadm-config",
        {
            "ClusterConfiguration": "networking:\n  dnsDomain: cluster.local\n"
            "  podSubnet: 10.244.0.0/16,fd10::/48\n  serviceSubnet: 10.96.0.0/12\n"
        },
    ),
}


@pytest.fixture(params=RANGES)
def _ranges(server: ApiServer, request: pytest.FixtureRequest) -> Iterator[None]:
    """Say the cluster's ranges in one of the two places, for as long as a test runs."""
    path, name, data = RANGES[request.param]
    agent, admin = token_of(server, "agent-n1"), server.client
    before = admin.get(f"{path}/{name}")["data"] if request.param == "ours" else None
    document = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}
    admin.apply(f"{path}/{name}", document)

    def judges(wanted: bool) -> bool:
        return is_allowed(agent, "nodes", "n1", podCIDRs=["192.0.2.0/24"]) is not wanted

    ask_until(lambda: judges(True), "the ranges to be known")
    yield
    if before is None:
        admin.delete(f"{path}/{name}")
    else:
        admin.apply(f"{path}/{name}", document | {"data": before})
    ask_until(lambda: judges(False), "the ranges to be forgotten")


@pytest.mark.usefixtures("_ranges")
def test_what_an_agent_publishes_lies_in_the_clusters_ranges(agent: ApiClient) -> None:
    for plural, spec, allowed in (
        ("nodes", {"podCIDRs": ["10.244.3.0/24", "fd10:0:0:3::/64"]}, True),
        ("nodes", {"podCIDRs": ["10.244.3.0/24", "10.96.0.0/24"]}, False),
        ("nodes", {"podCIDRs": ["10.0.0.0/8"]}, False),
        ("nodes", {"podCIDRs": ["0.0.0.0/0"]}, False),
        ("nodes", {"podCIDRs": ["fd11::/64"]}, False),
        ("nodes", {"podCIDRs": ["nonsense"]}, False),
        ("nodeendpoints", {"bases": ["10.244.3.0/24"], "endpoints": "2:70000"}, True),
        ("nodeendpoints", {"bases": ["192.0.2.0/24"], "endpoints": "2:70000"}, False),
        ("nodeendpoints", {"others": ["10.244.9.9=70000", "fd10::9=70000"]}, True),
        ("nodeendpoints", {"others": ["10.244.9.9=70000", "192.0.2.1=70000"]}, False),
    ):
        assert is_allowed(agent, plural, "n1", **spec) is allowed, (plural, spec)


def told_by(host: str) -> dict[str, Any]:
    return {
        "metadata": {"name": f"trial-{host}", "namespace": "default"},
        "involvedObject": {"kind": "Node", "name": "n2"},
        "reason": "Trial",
        "message": "m",
        "type": "Warning",
        "source": {"component": "podwire-agent", "host": host},
    }


EVENTS: Final = "/api/v1/namespaces/default/events"


@pytest.mark.parametrize(("host", "allowed"), [("n1", True), ("n2", False), ("", False)])
def test_an_agent_tells_events_in_the_name_of_its_own_node(
    agent: ApiClient, host: str, allowed: bool
) -> None:
    refused = contextlib.nullcontext() if allowed else pytest.raises(Refused, match="own node")
    with refused:
        agent.create(f"{EVENTS}?dryRun=All", told_by(host))


def test_an_agent_changes_no_event_of_another_node(server: ApiServer, agent: ApiClient) -> None:
    server.client.create(EVENTS, told_by("n2"))
    agent.create(EVENTS, told_by("n1"))
    agent.patch(f"{EVENTS}/trial-n1", {"count": 2})
    with pytest.raises(Refused, match="only Events of its own node"):
        agent.patch(f"{EVENTS}/trial-n2", {"source": {"host": "n1"}})
