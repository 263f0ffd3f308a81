"""A start that waits for its core Node: what it says meanwhile, and that it goes on with what comes."""

import json
from collections.abc import Iterator
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest

from podwire.agent.api.waiting import WaitingApi
from podwire.agent.config_reload import read_settings
from podwire.agent.duties.core_node import RANGES_FACT, wait_for_ranges
from podwire.cli.client import CliError, request
from podwire.control.kubernetes.core_node import core_node_key
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


class Start:
    """A start on a store, to which something happens each time that it has looked in vain."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.facts = Facts()
        self.said: list[str] = []
        self.happens: list[Any] = []

    def run(self) -> tuple[Any, ...]:
        return wait_for_ranges(
            self.store,
            "n1",
            self.facts,
            lambda reason, hint: self.said.append(f"{reason}; {hint}"),
            pause=lambda _s: self.happens.pop(0)(),
        )


def set_range(store: MemoryStore) -> None:
    stored = store.get(core_node_key("n1"))
    assert stored is not None
    document = core_node(podCIDRs=[RANGE]).document
    store.update(StoredObject(key=stored.key, revision=stored.revision, document=document))


def test_a_start_waits_for_the_api_server_the_node_and_its_range() -> None:
    store = MemoryStore()
    store.away = True
    start = Start(store)
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
    start = Start(store)
    start.run()
    store.away = True
    assert start.run() == (ip_network(RANGE),)
    assert start.said == []


def test_what_the_core_node_says_beats_what_it_said() -> None:
    store = MemoryStore()
    store.create(core_node(podCIDRs=[RANGE]))
    start = Start(store)
    start.facts.write_fact(RANGES_FACT, json.dumps(["10.244.9.0/24"]))
    assert start.run() == (ip_network(RANGE),)


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
