"""A start that waits for its core Node: what it says meanwhile, and that it goes on with what comes."""

import json
from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest

from podwire.agent.api.waiting import WaitingApi
from podwire.agent.config_reload import read_settings
from podwire.agent.duties.kubernetes.start import RANGES_FACT, Start, choose_address
from podwire.cli.client import CliError, request
from podwire.control.kubernetes.cluster_ranges import KUBEADM_KEY
from podwire.control.kubernetes.core_node import core_node_key
from podwire.model.config import AgentConfig
from podwire.model.config.sources import parse_arguments
from podwire.model.store import StoredObject
from tests.fakes.store import MemoryStore

RANGE = "10.244.1.0/24"


class Facts(dict[str, str]):
    def write_fact(self, name: str, value: str) -> None:
        self[name] = value

    def read_fact(self, name: str) -> str:
        return self.get(name, "")


def core_node(**spec: Any) -> StoredObject:
    document = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}, "spec": spec}
    return StoredObject(key=core_node_key("n1"), document=document)


class Trial:
    """A start on a store, to which something happens each time that it has looked in vain."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        self.facts = Facts()
        self.said: list[str] = []
        self.happens: list[Any] = []
        self.start = Start(
            store or MemoryStore(),
            self.facts,
            lambda reason, hint: self.said.append(f"{reason}; {hint}"),
            pause=lambda _s: self.happens.pop(0)(),
        )

    def run(self) -> tuple[Any, ...]:
        return self.start.wait_for_ranges("n1")

    def cluster_cidrs(self, **settings: Any) -> tuple[Any, ...]:
        return self.start.wait_for_cluster_cidrs(AgentConfig().replace(settings))


def set_range(store: MemoryStore) -> None:
    stored = store.get(core_node_key("n1"))
    assert stored is not None
    document = core_node(podCIDRs=[RANGE]).document
    store.update(StoredObject(key=stored.key, revision=stored.revision, document=document))


def test_a_start_waits_for_the_api_server_the_node_and_its_range() -> None:
    store = MemoryStore()
    store.away = True
    start = Trial(store)
    start.happens = [
        lambda: setattr(store, "away", False),
        lambda: store.create(core_node()),
        lambda: set_range(store),
    ]
    assert start.run() == (ip_network(RANGE),)
    assert start.happens == []
    assert "find core Node n1: there is none" in start.said[1]
    assert "has no podCIDR" in start.said[2]
    assert "--allocate-node-cidrs" in start.said[2]


def test_without_the_api_server_the_node_keeps_its_ranges() -> None:
    store = MemoryStore()
    store.create(core_node(podCIDRs=[RANGE]))
    start = Trial(store)
    start.run()
    store.away = True
    assert start.run() == (ip_network(RANGE),)
    assert start.said == []


def test_what_the_core_node_says_beats_what_it_said() -> None:
    store = MemoryStore()
    store.create(core_node(podCIDRs=[RANGE]))
    start = Trial(store)
    start.facts.write_fact(RANGES_FACT, json.dumps(["10.244.9.0/24"]))
    assert start.run() == (ip_network(RANGE),)


def kubeadm(text: str | None) -> StoredObject:
    data = {} if text is None else {"ClusterConfiguration": text}
    document = {"apiVersion": "v1", "kind": "ConfigMap", "data": data}
    return StoredObject(key=KUBEADM_KEY, document=document)


def networking(subnets: str) -> str:
    return f"kind: ClusterConfiguration\ndns: {{}}\nnetworking:\n  podSubnet: {subnets}\n"


@pytest.mark.parametrize(
    ("text", "ranges"),
    [
        ("10.244.0.0/16", ["10.244.0.0/16"]),
        ("fd00::/48", ["fd00::/48"]),
        ('"10.244.0.0/16, fd00::/48"', ["10.244.0.0/16", "fd00::/48"]),
    ],
)
def test_the_ranges_of_all_pods_are_what_kubeadm_was_told(text: str, ranges: list[str]) -> None:
    store = MemoryStore()
    store.create(kubeadm(networking(text)))
    trial = Trial(store)
    assert list(map(str, trial.cluster_cidrs())) == ranges
    store.away = True
    assert list(map(str, trial.cluster_cidrs())) == ranges, "a start without the API server"
    assert not trial.said


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cluster_cidrs is empty"),
        ("kind: ClusterConfiguration\nnetworking: {}\n", "cluster_cidrs is empty"),
        (networking("10.244.0.0/8"), "10.244.0.0/8"),
        (networking("169.254.0.0/16"), "never a pod's"),
        (networking("10.0.0.0/24"), "node_cidrs has 10.244.1.0/24"),
        ("networking: {{", "kube-system/kubeadm-config"),
    ],
)
def test_a_start_that_does_not_know_where_pods_are_waits(text: str | None, reason: str) -> None:
    store = MemoryStore()
    store.create(kubeadm(text))

    def repair() -> None:
        found = store.get(KUBEADM_KEY)
        assert found is not None
        document = kubeadm(networking("10.244.0.0/16")).document
        store.update(StoredObject(key=KUBEADM_KEY, revision=found.revision, document=document))

    trial = Trial(store)
    trial.happens = [repair]
    assert trial.cluster_cidrs(node_cidrs=(ip_network(RANGE),)) == (ip_network("10.244.0.0/16"),)
    assert reason in trial.said[0]


def test_ranges_that_nobody_says_are_asked_for_by_the_name_of_the_setting() -> None:
    trial = Trial()
    trial.happens = [lambda: trial.start.store.create(kubeadm(networking("10.244.0.0/16")))]
    trial.cluster_cidrs()
    assert "set cluster_cidrs" in trial.said[0]


CARDS = [
    ("eth0", ip_address("198.51.100.1")),
    ("eth1", ip_address("2001:db8::1")),
    ("eth1", ip_address("192.0.2.1")),
    ("eth1", ip_address("192.0.2.9")),
]


@pytest.mark.parametrize(
    ("pattern", "chosen"),
    [
        ("eth1", "192.0.2.1"),
        ("eth*", "198.51.100.1"),
        ("eth[1-9]", "192.0.2.1"),
        ("ETH1", "None"),
        ("eth", "None"),
    ],
)
def test_the_first_device_of_a_pattern_gives_the_address(pattern: str, chosen: str) -> None:
    assert str(choose_address(pattern, CARDS)) == chosen


def test_a_start_waits_for_its_device() -> None:
    trial, cards = Trial(), CARDS[:1]
    trial.happens = [lambda: cards.append(CARDS[2])]
    assert trial.start.wait_for_device("eth1", lambda: cards) == ip_address("192.0.2.1")
    assert "'eth1'" in trial.said[0]
    assert "eth0" in trial.said[0]


@pytest.mark.parametrize(
    ("internal", "chosen"),
    [
        (["192.0.2.1"], "192.0.2.1"),
        (["203.0.113.1", "2001:db8::1", "192.0.2.1"], "2001:db8::1"),
        (["203.0.113.1"], "None"),
        ([], "None"),
    ],
)
def test_the_address_is_an_internal_ip_that_this_host_has(internal: list[str], chosen: str) -> None:
    store = MemoryStore()
    addresses = [{"type": "InternalIP", "address": text} for text in internal]
    document = {**core_node().document, "status": {"addresses": addresses}}
    store.create(StoredObject(key=core_node_key("n1"), document=document))
    trial = Trial(store)
    assert str(trial.start.wait_for_address("n1", lambda: CARDS)) == chosen
    store.away = bool(internal)
    assert str(trial.start.wait_for_address("n1", lambda: CARDS)) == chosen


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[WaitingApi]:
    flags = ["--node-name", "n1", "--run-dir", str(tmp_path), "--node-cidrs", RANGE]
    api = WaitingApi(read_settings(parse_arguments(flags)).config)
    yield api
    api.close()


def test_the_api_says_what_the_start_waits_for(waiting: WaitingApi, tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    waiting.wait_for("find core Node n1: there is none", "kubelet registers it")
    status = request(str(path), "GET", "/status")
    assert not status["ready"]
    assert status["node"] == "n1"
    assert "there is none (kubelet registers it)" in status["warnings"][0]
    waiting.wait_for("another reason")
    with pytest.raises(CliError, match="starting: another reason"):
        request(str(path), "GET", "/healthz")
    assert path.stat().st_mode & 0o777 == 0o600
    waiting.close()
    assert not path.exists()
