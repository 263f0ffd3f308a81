"""When a node's pods are published, as its thread does it: in real time, with a store in memory."""

import ipaddress
import socket
import threading
from typing import Any

import pytest

from podwire.agent.duties.cluster.store_addresses import StoreAddresses
from podwire.model.ids import EndpointId
from tests.unit.test_cluster_duty import Rig, wait_for
from tests.unit.test_cluster_planner import make


class Looks:
    """Counts how often the publisher looks at the pods."""

    def __init__(self, rig: Rig) -> None:
        self.count = 0
        self._list_pods: Any = rig.duty.list_pods
        rig.duty.list_pods = self  # type: ignore[method-assign]

    def __call__(self) -> Any:
        found = self._list_pods()
        self.count += 1
        return found


def test_a_pod_that_comes_in_the_quiet_second_behind_a_write_is_published_when_that_is_over() -> (
    None
):
    with Rig().running() as rig:
        wait_for(lambda: rig.said() is not None, "the first write")
        looks = Looks(rig)
        rig.duty._publisher.wake()
        wait_for(lambda: looks.count, "a look in the quiet second that finds nothing")
        rig.add_pod(1, "10.244.1.9", 300)
        wait_for(lambda: rig.said().identities == {ipaddress.ip_address("10.244.1.9"): 300})


def test_so_is_one_that_comes_when_the_look_found_only_a_pod_that_went() -> None:
    with Rig().running() as rig:
        rig.add_pod(1, "10.244.1.9", 300)
        wait_for(lambda: rig.said() is not None and rig.said().identities, "the first pod")
        looks = Looks(rig)
        rig.table.discard(EndpointId(1))
        rig.duty._publisher.wake()
        wait_for(lambda: looks.count, "a look in the quiet second that finds a release")
        rig.add_pod(2, "10.244.1.10", 300)
        wait_for(lambda: rig.said().identities == {ipaddress.ip_address("10.244.1.10"): 300})


SILENCE_S = 120.0


def test_a_resolver_that_does_not_answer_keeps_no_pod_from_being_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, may_answer, answered = threading.Event(), threading.Event(), threading.Event()

    def ask(*_: Any, **__: Any) -> Any:
        asked.set()
        may_answer.wait(SILENCE_S)
        answered.set()
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("10.244.2.10", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    rig = Rig(store_hosts=("store.example",))
    rig.add_pod(1, "10.244.1.9", 300)
    rig.publish_peer(make(2))
    with rig.running():
        assert asked.wait(SILENCE_S)
        wait_for(lambda: rig.said() is not None, "the publication")
        assert not answered.is_set()
        may_answer.set()
        wait_for(lambda: "10.244.2.10 is an address of the store" in str(rig.health.warnings()))


def test_a_name_that_is_none_keeps_no_other_from_being_looked_up() -> None:
    changed = threading.Event()
    addresses = StoreAddresses(("a..b", "localhost"), changed.set)
    addresses.start()
    assert changed.wait(SILENCE_S)
    assert any(address.is_loopback for address in addresses.known)
    addresses.stop()
