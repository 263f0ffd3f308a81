"""What an agent asks the API for when it starts, with no more rights than the manifest gives it."""

from collections.abc import Iterator
from contextlib import closing
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from podwire.agent.duties.core_node import Start
from podwire.lab.kubernetes.api_server import ApiServer, User
from podwire.model.config import AgentConfig
from podwire.model.errors import PodwireError
from podwire.model.store import ObjectKey
from podwire.store.kubernetes.api.kubeconfig import load_kubeconfig
from podwire.store.kubernetes.store import KubernetesStore
from tests.contract import api_rig

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
NODE: Final = "/api/v1/nodes/n1"
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
        for document in yaml.safe_load_all(RIGHTS.read_text(encoding="utf-8")):
            if document["kind"] in PATHS:
                made.client.create(PATHS[document["kind"]], document)
        made.client.create("/api/v1/nodes", {"metadata": {"name": "n1"}})
        yield made


@pytest.fixture
def store(server: ApiServer, tmp_path: Path) -> Iterator[KubernetesStore]:
    """The agent's way to it."""
    access = load_kubeconfig(server.write_kubeconfig(tmp_path / "kubeconfig", AGENT))
    with closing(KubernetesStore(access, deadline_s=DEADLINE_S)) as opened:
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
