"""What an agent asks and tells the API of its node, with no more rights than the manifest gives it."""

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from msgspec.structs import replace

from podwire.agent.duties.kubernetes.network_condition import NetworkCondition
from podwire.agent.duties.kubernetes.start import Start
from podwire.control.kubernetes.core_node import core_node_key, network_is_available
from podwire.lab.kubernetes.api_server import ApiServer, User
from podwire.lab.kubernetes.client import ApiClient, Refused
from podwire.model.config import AgentConfig
from podwire.model.errors import Conflict, NotFound, PodwireError
from podwire.model.store import ObjectKey
from podwire.model.store.events import EventWrite, Subject
from podwire.model.store.kinds import CILIUM_CLUSTERWIDE_POLICY, NETWORK_POLICY, POD
from podwire.store.kubernetes.api.kubeconfig import load_kubeconfig
from podwire.store.kubernetes.store import KubernetesStore
from tests.contract import api_rig
from tests.waiting import ask_until

RIGHTS: Final = Path(__file__).resolve().parents[2] / "deploy" / "manifest" / "30-rights.yaml"
RBAC: Final = "/apis/rbac.authorization.k8s.io/v1"
AGENT: Final = "system:serviceaccount:podwire-system:podwire-agent"
PATHS: Final = {
    "ClusterRole": f"{RBAC}/clusterroles",
    "ClusterRoleBinding": f"{RBAC}/clusterrolebindings",
    "Role": f"{RBAC}/namespaces/kube-system/roles",
    "RoleBinding": f"{RBAC}/namespaces/kube-system/rolebindings",
}
CONFIG_MAPS: Final = "/api/v1/namespaces/kube-system/configmaps"
NODES: Final = "/api/v1/nodes"
NODE: Final = f"{NODES}/n1"
FORBIDDEN: Final = 403
DEADLINE_S: Final = 120.0


class Facts(dict[str, str]):
    def write_fact(self, name: str, value: str) -> None:
        self[name] = value

    def read_fact(self, name: str) -> str:
        return self.get(name, "")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server with the manifest's rights, and a Node."""
    with api_rig.started(tmp_path_factory.mktemp("rights"), [User(AGENT)]) as made:
        give_rights(made)
        made.client.create("/api/v1/nodes", {"metadata": {"name": "n1"}})
        yield made


def give_rights(server: ApiServer) -> None:
    """Let the agent's user do what the manifest says, and wait until the server has heard of it."""
    for document in yaml.safe_load_all(RIGHTS.read_text(encoding="utf-8")):
        if document["kind"] in PATHS:
            server.client.create(PATHS[document["kind"]], document)
    agent = server.client_of(AGENT)
    for path in (NODES, f"{CONFIG_MAPS}/kubeadm-config"):
        ask_until(partial(may_read, agent, path), f"the right to read {path}")


def may_read(client: ApiClient, path: str) -> bool:
    """Tell whether a client is allowed to read something, be it there or not."""
    try:
        client.get(path)
    except Refused as refused:
        return refused.status != FORBIDDEN
    return True


@pytest.fixture
def store(server: ApiServer, tmp_path: Path) -> Iterator[KubernetesStore]:
    """The agent's way to it."""
    access = load_kubeconfig(server.write_kubeconfig(tmp_path / "kubeconfig", AGENT))
    with closing(KubernetesStore(access, name="n1", deadline_s=DEADLINE_S)) as opened:
        yield opened


def begin(store: KubernetesStore, said: list[str], *happens: Any) -> Start:
    left = list(happens)
    return Start(store, Facts(), lambda reason, hint: said.append(reason), lambda _s: left.pop(0)())


def test_the_ranges_of_all_pods_are_waited_for(server: ApiServer, store: KubernetesStore) -> None:
    text = yaml.safe_dump({"networking": {"podSubnet": "10.244.0.0/16,fd00:244::/48"}})
    data = {"metadata": {"name": "kubeadm-config"}, "data": {"ClusterConfiguration": text}}
    said: list[str] = []
    start = begin(store, said, lambda: server.client.create(CONFIG_MAPS, data))
    expected = (ip_network("10.244.0.0/16"), ip_network("fd00:244::/48"))
    assert start.wait_for_cluster_cidrs(AgentConfig()) == expected
    assert "cluster_cidrs is empty" in said[0]


def test_no_other_config_map_can_be_read(store: KubernetesStore) -> None:
    with pytest.raises(PodwireError, match="forbidden"):
        store.get(ObjectKey("configmaps", "kube-system", "extension-apiserver-authentication"))


def test_ranges_and_address_are_the_core_nodes(server: ApiServer, store: KubernetesStore) -> None:
    def give() -> None:
        server.client.patch(NODE, {"spec": {"podCIDR": "10.244.1.0/24"}})

    said: list[str] = []
    addresses = [{"type": "InternalIP", "address": "192.0.2.1"}]
    server.client.patch(f"{NODE}/status", {"status": {"addresses": addresses}})
    start = begin(store, said, give)
    assert start.wait_for_ranges("n1") == (ip_network("10.244.1.0/24"),)
    assert "has no podCIDR" in said[0]
    address = ip_address("192.0.2.1")
    assert start.wait_for_address("n1", lambda: [("eth0", address)]) == address


def find_events(server: ApiServer, namespace: str, reason: str) -> list[dict[str, Any]]:
    found = server.client.get(f"/api/v1/namespaces/{namespace}/events")["items"]
    return [item for item in found if item.get("reason") == reason]


@pytest.mark.parametrize(
    ("key", "namespace", "kind"),
    [
        (core_node_key("n1"), "default", "Node"),
        (
            ObjectKey(CILIUM_CLUSTERWIDE_POLICY.plural, "", "p"),
            "default",
            CILIUM_CLUSTERWIDE_POLICY.name,
        ),
        (ObjectKey(NETWORK_POLICY.plural, "kube-public", "p"), "kube-public", "NetworkPolicy"),
        (ObjectKey(POD.plural, "kube-public", "web-0"), "kube-public", "Pod"),
    ],
)
def test_an_event_stands_at_its_object_and_is_counted(
    server: ApiServer, store: KubernetesStore, key: ObjectKey, namespace: str, kind: str
) -> None:
    reason = f"Trial{kind}"
    made = EventWrite(
        f"{key.name}.{kind.lower()}", Subject(key, "u1"), reason, "what; what to do",
        "2026-01-01T00:00:00Z", "2026-01-01T00:00:00Z", 1, is_new=True,
    )  # fmt: skip
    store.write_event(made)
    with pytest.raises(Conflict):
        store.write_event(made)
    store.write_event(replace(made, is_new=False, count=7, message="again"))
    (event,) = find_events(server, namespace, reason)
    about = event["involvedObject"]
    assert (about["kind"], about["name"], about["uid"]) == (kind, key.name, "u1")
    assert (event["count"], event["message"], event["type"]) == (7, "again", "Warning")
    with pytest.raises(NotFound):
        store.write_event(replace(made, name="gone", is_new=False))


OTHER: Final = {"type": "MemoryPressure", "status": "False", "reason": "KubeletHasSufficientMemory"}


def say_unavailable(server: ApiServer, status: str) -> None:
    conditions = [{"type": "NetworkUnavailable", "status": status}, OTHER]
    server.client.patch(f"{NODE}/status", {"status": {"conditions": conditions}})


def read_conditions(server: ApiServer) -> dict[str, str]:
    found = server.client.get(NODE)["status"].get("conditions", ())
    return {item["type"]: item["status"] for item in found}


def count_writes(server: ApiServer) -> int:
    """Count the agent's writes to core Nodes; Events of an earlier test may be logged only now."""
    return sum(
        event["verb"] == "patch" and event["objectRef"]["resource"] == "nodes"
        for event in server.read_audit(AGENT)
    )


@pytest.fixture
def condition(store: KubernetesStore) -> Iterator[NetworkCondition]:
    made = NetworkCondition(store, "n1", store.put_condition)
    made.start()
    yield made
    made.stop()


@pytest.mark.parametrize("status", ["True", "Unknown"])
@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after the network"])
def test_the_network_is_called_available_once_it_is_there(
    server: ApiServer, condition: NetworkCondition, status: str, *, is_late: bool
) -> None:
    server.client.patch(f"{NODE}/status", {"status": {"conditions": None}})
    before = count_writes(server)
    if is_late:
        condition.network_is_there()
        say_unavailable(server, status)
    else:
        say_unavailable(server, status)
        condition.network_is_there()
    expected = {"NetworkUnavailable": "False", "MemoryPressure": "False"}
    ask_until(lambda: read_conditions(server) == expected, "the condition", DEADLINE_S)
    ask_until(lambda: not condition.is_running, "the end of the duty", DEADLINE_S)
    # The server may write its log behind its answer.
    ask_until(lambda: count_writes(server) > before, "the write in the log", DEADLINE_S)
    assert count_writes(server) - before == 1


def test_a_condition_that_is_not_there_is_not_made(
    server: ApiServer, store: KubernetesStore
) -> None:
    server.client.patch(f"{NODE}/status", {"status": {"conditions": [OTHER]}})
    before = count_writes(server)
    condition = NetworkCondition(store, "n1", store.put_condition)
    condition.start()
    condition.network_is_there()
    ask_until(lambda: condition.follower.is_whole, "the first look", DEADLINE_S)
    condition.stop()
    assert count_writes(server) == before
    assert read_conditions(server) == {"MemoryPressure": "False"}


def test_a_node_that_has_changed_meanwhile_is_not_written(
    server: ApiServer, store: KubernetesStore
) -> None:
    say_unavailable(server, "True")
    stored = store.get(core_node_key("n1"))
    assert stored is not None
    server.client.patch(NODE, {"metadata": {"labels": {"a": "b"}}})
    with pytest.raises(Conflict):
        store.put_condition(stored, network_is_available("2026-01-01T00:00:00Z"))
    assert read_conditions(server)["NetworkUnavailable"] == "True"
