"""The duty as it runs: what it publishes, what it applies, and what it leaves alone while the store is away."""

import contextlib
import ipaddress
import re
import statistics
import threading
import time
from typing import Any

import msgspec
import pytest

from podwire.agent.duties.cluster.duty import GRANTS_FACT, ClusterDuty, ClusterOptions, OwnRanges
from podwire.agent.duties.cluster.publisher import take_name
from podwire.agent.health import Health
from podwire.agent.metrics import Metrics
from podwire.control.cluster.facts import decode_node, encode_node, node_key
from podwire.control.cluster.publish import NodeInUse
from podwire.control.cluster.published import (
    Publication,
    decode_endpoints,
    encode_endpoints,
    endpoints_key,
)
from podwire.control.cluster.reach import ClusterSettings
from podwire.control.endpoint.states import State
from podwire.control.endpoint.table import Endpoint, EndpointTable
from podwire.model.cluster import ClusterPlan, Way
from podwire.model.errors import KernelFailure, StorageFailure, Unavailable
from podwire.model.ids import IdentityId
from podwire.model.store import StoredObject
from tests.fakes.records import make_record
from tests.fakes.store import MemoryStore
from tests.unit.test_cluster_planner import OVERLAY, OWN, UNDERLAY, make
from tests.unit.test_identity_duty import FakeClock

DEADLINE_S = 120.0


class FakeCluster:
    """A kernel that holds plans, and fails or differs when it is told to."""

    def __init__(self) -> None:
        self.plan: Any = None
        self.applied: list[Any] = []
        self.changed: list[Any] = []
        self.rows: dict[Any, Any] = {}
        self.differences: list[Any] = []
        self.failing = False
        self.underlay = UNDERLAY

    def read_underlay(self) -> Any:
        if self.underlay is None:
            raise Unavailable("no device")
        return self.underlay

    def apply_cluster(self, plan: Any) -> Any:
        if self.failing:
            raise KernelFailure(12, "add route", "x")
        self.plan = plan
        self.rows = dict(plan.prefixes)
        self.applied.append(plan)
        found, self.differences = self.differences, []
        return found

    def change_prefixes(self, put: Any, remove: Any = ()) -> None:
        self.changed.append((put, tuple(remove)))
        self.rows.update(put)
        for one in remove:
            self.rows.pop(one, None)


class FakeNews:
    """What the kernel tells, by hand."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._woken = self._changed = False

    def wait(self, timeout_s: Any) -> Any:
        with self._condition:
            self._condition.wait_for(lambda: self._woken or self._changed, timeout_s)
            changed, self._changed, self._woken = self._changed, False, False
            return changed

    def wake(self) -> None:
        with self._condition:
            self._woken = True
            self._condition.notify_all()

    def change(self) -> None:
        with self._condition:
            self._changed = True
            self._condition.notify_all()

    def close(self) -> None:
        pass


class Facts(dict[str, Any]):
    def write_fact(self, name: Any, value: Any) -> None:
        self[name] = value

    def read_fact(self, name: Any) -> Any:
        return self.get(name, "")


class FullDisk(Facts):
    """Nothing of what pools grant is kept until there is room."""

    has_room = False

    def write_fact(self, name: Any, value: Any) -> None:
        if name == GRANTS_FACT and not self.has_room:
            raise StorageFailure("write fact: the disk is full")
        super().write_fact(name, value)


class Rig:
    def __init__(
        self,
        store: Any = None,
        settings: Any = OVERLAY,
        name: Any = "n1",
        facts: Any = None,
        store_hosts: tuple[str, ...] = (),
        *,
        has_core_nodes: bool = False,
    ) -> None:
        self.store = store or MemoryStore()
        self.kernel, self.news, self.facts = FakeCluster(), FakeNews(), Facts(facts or {})
        self.table = EndpointTable()
        self.health = Health(FakeClock())
        self.metrics = Metrics()
        self.duty = ClusterDuty(
            options=ClusterOptions(
                name, settings, store_hosts=store_hosts, has_core_nodes=has_core_nodes
            ),
            store=self.store,
            datapath=self.kernel,
            table=self.table,
            turn=threading.RLock(),
            journal=self.facts,
            health=self.health,
            metrics=self.metrics,
            own_ranges=lambda: OwnRanges(OWN.pod_cidrs, {}, OWN.tunnel_addresses),
            open_news=lambda: self.news,
            name=take_name(self.store, self.facts, name, None),
        )
        self.table.changed = self.duty.pods_changed

    @contextlib.contextmanager
    def running(self) -> Any:
        self.duty.prepare()
        self.duty.apply()
        self.duty.start()
        try:
            yield self
        finally:
            self.duty.stop()

    def add_pod(self, number: Any, address: Any, identity: Any) -> None:
        record = make_record(number, ipv4=address, identity=IdentityId(identity))
        self.table.insert(Endpoint(record, State.READY, FakeClock(), cause="test"))

    def publish_peer(self, facts: Any) -> None:
        key = node_key(facts.name)
        document = encode_node(facts)
        stored = self.store.get(key)
        if stored is None:
            self.store.create(StoredObject(key=key, document=document))
        else:
            self.store.update(StoredObject(key=key, revision=stored.revision, document=document))

    def publish_pods(self, name: Any, sequence: Any, pods: Any) -> None:
        identities = {ipaddress.ip_address(one): IdentityId(i) for one, i in pods.items()}
        document = encode_endpoints(Publication(name, 1, sequence, identities), ())
        key = endpoints_key(name)
        stored = self.store.get(key)
        if stored is None:
            self.store.create(StoredObject(key=key, document=document))
        else:
            self.store.update(StoredObject(key=key, revision=stored.revision, document=document))

    def peers(self) -> Any:
        return [] if self.kernel.plan is None else [peer.name for peer in self.kernel.plan.peers]

    def said(self) -> Any:
        stored = self.store.get(endpoints_key("n1"))
        return None if stored is None else decode_endpoints(stored)


def wait_for(condition: Any, what: Any = "condition") -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true"
        time.sleep(0.005)


def test_a_node_publishes_itself_and_its_pods() -> None:
    with Rig().running() as rig:
        wait_for(lambda: rig.said() is not None, "publication")
        facts = decode_node(rig.store.get(node_key("n1")))
        assert (facts.addresses, facts.pod_cidrs) == (UNDERLAY.addresses, OWN.pod_cidrs)
        assert (facts.epoch, facts.underlay_mtu_bytes) == (1, 1500)
        rig.add_pod(1, "10.244.1.9", 300)
        wait_for(lambda: rig.said().identities == {ipaddress.ip_address("10.244.1.9"): 300})
        assert rig.duty.named_identities() == {300}


def test_others_come_change_and_go() -> None:
    with Rig().running() as rig:
        assert rig.peers() == []
        assert rig.kernel.plan.tunnel is not None
        rig.publish_peer(make(2))
        wait_for(lambda: rig.peers() == ["n2"])
        rig.publish_pods("n2", 1, {"10.244.2.5": 300})
        pod = ipaddress.ip_network("10.244.2.5")
        wait_for(lambda: pod in rig.kernel.rows)
        plans = []
        for number in range(2, 8):
            count = len(rig.kernel.applied)
            rig.publish_pods("n2", number, {f"10.244.2.{number + 4}": 301})
            pods = ipaddress.ip_network(f"10.244.2.{number + 4}")
            wait_for(lambda pods=pods: pods in rig.kernel.rows)
            wait_for(lambda: pod not in rig.kernel.rows)
            plans.append(len(rig.kernel.applied) - count)
        # The look a second after the first plan may come between.
        assert plans.count(0) >= 4, "news of pods need no whole plan"
        rig.publish_peer(make(2, addresses=make(7).addresses))
        wait_for(lambda: rig.kernel.plan.peers[0].outer == make(7).addresses[0])
        rig.store.delete(node_key("n2"))
        wait_for(lambda: rig.peers() == [])
        assert rig.kernel.plan.routes == ()


def test_what_vanished_while_the_agent_was_away_goes() -> None:
    rig = Rig()
    rig.publish_peer(make(2))
    rig.publish_peer(make(3))
    with rig.running():
        assert rig.peers() == ["n2", "n3"]
    rig.store.delete(node_key("n2"))
    again = Rig(rig.store, facts=rig.facts)
    with again.running():
        wait_for(lambda: again.peers() == ["n3"])
        assert again.kernel.plan.peers[0].number == rig.kernel.plan.peers[1].number


def test_nothing_is_taken_away_before_the_store_was_heard() -> None:
    store = MemoryStore()
    store.away = True
    with Rig(store).running() as rig:
        rig.news.change()
        rig.duty.apply()
        assert rig.kernel.applied == []
        store.away = False
        wait_for(lambda: rig.kernel.applied)


def test_a_store_that_goes_away_leaves_the_plan_and_repairs_go_on() -> None:
    with Rig().running() as rig:
        rig.publish_peer(make(2))
        wait_for(lambda: rig.peers() == ["n2"])
        rig.store.away = True

        def is_repaired() -> bool:
            """A plan that has changed is applied as well, and what differed then counts for no repair: ask again."""
            if not rig.kernel.differences:
                rig.kernel.differences = ["route to 10.244.2.0/24 was missing"]
                rig.news.change()
            return bool(re.search(rb"podwire_cluster_repairs_total [1-9]", rig.metrics.render()))

        wait_for(is_repaired)
        assert rig.peers() == ["n2"]


def test_what_could_not_be_applied_is_tried_again_and_shown() -> None:
    rig = Rig()
    rig.kernel.failing = True
    with rig.running():
        assert any("cluster: add route" in warning for warning in rig.health.warnings())
        rig.kernel.failing = False
        wait_for(lambda: rig.kernel.applied)
        wait_for(lambda: not any("cluster:" in warning for warning in rig.health.warnings()))


def test_contradictions_are_shown_with_both_names() -> None:
    with Rig().running() as rig:
        rig.publish_peer(make(2))
        rig.publish_peer(make(3, pod_cidrs=make(2).pod_cidrs))
        wait_for(
            lambda: any("n2" in warning and "n3" in warning for warning in rig.health.warnings())
        )
        rig.store.delete(node_key("n3"))
        wait_for(lambda: not any("n3" in warning for warning in rig.health.warnings()))


def test_a_node_whose_agent_lives_no_more_is_named_and_keeps_its_ways() -> None:
    with Rig().running() as rig:
        lease = rig.store.leases().acquire("node/n2", "n2", 15)
        # Two threads hear of the lease and of the node.
        wait_for(lambda: "n2" in (rig.duty._lives._living or ()), "the lease to be heard of")
        rig.publish_peer(make(2))
        wait_for(lambda: rig.peers() == ["n2"])
        assert not any("no agent is alive" in warning for warning in rig.health.warnings())
        rig.store.leases().vanish("node/n2")
        wait_for(
            lambda: any(
                "no agent is alive on node n2" in warning for warning in rig.health.warnings()
            )
        )
        wait_for(lambda: b"podwire_cluster_nodes_dead 1.0" in rig.metrics.render())
        assert rig.peers() == ["n2"]
        lease.close()
        rig.store.leases().acquire("node/n2", "n2", 15)
        wait_for(
            lambda: not any("no agent is alive" in warning for warning in rig.health.warnings())
        )
        rig.store.leases().vanish("node/n2")
        wait_for(
            lambda: any(
                "no agent is alive on node n2" in warning for warning in rig.health.warnings()
            )
        )
        rig.store.delete(node_key("n2"))
        wait_for(lambda: not any("n2" in warning for warning in rig.health.warnings()))


def test_while_the_store_is_away_nobody_is_said_to_be_dead() -> None:
    with Rig().running() as rig:
        rig.publish_peer(make(2))
        wait_for(
            lambda: any(
                "no agent is alive on node n2" in warning for warning in rig.health.warnings()
            )
        )
        rig.store.leases().away = True
        with rig.store.leases().changed:
            rig.store.leases().changed.notify_all()
        wait_for(
            lambda: not any("no agent is alive" in warning for warning in rig.health.warnings())
        )


def test_an_unreadable_node_is_named_and_left_out() -> None:
    with Rig().running() as rig:
        document = encode_node(make(2))
        document["spec"]["addresses"] = ["nonsense"]
        rig.store.create(StoredObject(key=node_key("n2"), document=document))
        wait_for(
            lambda: any(
                "n2" in warning and "nonsense" in warning for warning in rig.health.warnings()
            )
        )
        rig.publish_peer(make(3))
        wait_for(lambda: rig.peers() == ["n3"])


def test_the_underlay_is_followed() -> None:
    with Rig().running() as rig:
        wait_for(lambda: rig.store.get(node_key("n1")) is not None)
        rig.kernel.underlay = msgspec.structs.replace(UNDERLAY, mtu_bytes=1400)
        rig.news.change()
        wait_for(lambda: decode_node(rig.store.get(node_key("n1"))).underlay_mtu_bytes == 1400)
        wait_for(lambda: rig.kernel.plan.pod_mtu_bytes == 1350)
        rig.kernel.underlay = None
        rig.news.change()
        wait_for(lambda: decode_node(rig.store.get(node_key("n1"))).addresses == ())


def test_changes_one_after_another_are_each_acted_on_at_once() -> None:
    with Rig().running() as rig:
        wait_for(lambda: rig.store.get(node_key("n1")) is not None)
        took_s = []
        for mtu in range(1400, 1410):
            begin_s = time.monotonic()
            rig.kernel.underlay = msgspec.structs.replace(UNDERLAY, mtu_bytes=mtu)
            rig.news.change()
            wait_for(lambda mtu=mtu: published_mtu(rig) == mtu)
            took_s.append(time.monotonic() - begin_s)
        assert statistics.median(took_s) < 2, took_s


def published_mtu(rig: Any) -> Any:
    return decode_node(rig.store.get(node_key("n1"))).underlay_mtu_bytes


def test_a_kernel_that_goes_on_failing_is_not_asked_all_the_time() -> None:
    rig = Rig()
    tries: list[float] = []
    apply = rig.kernel.apply_cluster

    def count(plan: Any) -> Any:
        tries.append(time.monotonic())
        return apply(plan)

    rig.kernel.apply_cluster = count  # type: ignore[method-assign]
    rig.kernel.failing = True
    with rig.running():
        wait_for(lambda: len(tries) >= 3)  # at the start, and after 1 and 2 s, or for a look
        rest = len(tries)
        threading.Event().wait(0.9)
        assert len(tries) - rest < 5


def test_news_do_not_hasten_what_fails_and_a_new_peer_does_not_wait_for_it() -> None:
    # One of them is not held up by the machine.
    assert any(publish_while_the_kernel_fails() < 6 for _ in range(3))


def publish_while_the_kernel_fails() -> float:
    """Tell how long it takes until three new peers are tried, one after the other."""
    rig = Rig()
    tries: list[int] = []
    apply = rig.kernel.apply_cluster

    def count(plan: Any) -> Any:
        tries.append(len(plan.peers))
        return apply(plan)

    rig.kernel.apply_cluster = count  # type: ignore[method-assign]
    rig.kernel.failing = True
    with rig.running():
        wait_for(lambda: len(tries) >= 4)  # at the start, after 1, 2 and 4 s; the next one after 8
        begin_s = time.monotonic()
        for number in range(1, 4):
            rig.publish_peer(make(2, epoch=number))
            wait_for(
                lambda number=number: [other.epoch for other in rig.duty.list_others()] == [number]
            )
            wait_for(lambda: 1 in tries)
            rig.news.change()
        took_s = time.monotonic() - begin_s
        assert tries.count(1) <= 1 + time.monotonic() - begin_s
        rig.kernel.failing = False
        rig.publish_peer(make(3))
        wait_for(lambda: rig.peers() == ["n2", "n3"])
    return took_s


def test_what_somebody_deletes_is_published_again() -> None:
    with Rig().running() as rig:
        wait_for(lambda: rig.said() is not None)
        rig.store.delete(node_key("n1"))
        rig.store.delete(endpoints_key("n1"))
        wait_for(lambda: rig.store.get(node_key("n1")) is not None and rig.said() is not None)


def test_a_second_machine_of_that_name_does_not_start() -> None:
    with Rig().running() as rig, pytest.raises(NodeInUse):
        Rig(rig.store)


def test_a_burst_of_pods_is_one_write_a_second() -> None:
    with Rig().running() as rig:
        wait_for(lambda: rig.said() is not None)
        begin = time.monotonic()
        for number in range(1, 101):
            rig.add_pod(number, f"10.244.1.{number + 10}", 300 + number)
        wait_for(lambda: len(rig.said().identities) == 100)
        took_s = time.monotonic() - begin
        assert took_s < 20
        assert rig.said().sequence <= 3 + took_s


def test_native_routing_needs_no_tunnel() -> None:
    rig = Rig(settings=ClusterSettings("native", OVERLAY.cluster_cidrs))
    rig.publish_peer(make(2))
    with rig.running():
        assert isinstance(rig.kernel.plan, ClusterPlan)
        assert rig.kernel.plan.tunnel is None
        assert {route.way for route in rig.kernel.plan.routes} == {Way.NATIVE}


def test_a_full_disk_does_not_keep_the_others_away() -> None:
    rig = Rig()
    disk = rig.duty.journal = FullDisk(rig.facts)
    with rig.running():
        rig.publish_peer(make(2))
        wait_for(lambda: rig.peers() == ["n2"], "the plan")
        assert any("the disk is full" in warning for warning in rig.health.warnings())
        disk.has_room = True
        wait_for(lambda: GRANTS_FACT in disk, "the fact")
        wait_for(
            lambda: not any("disk" in warning for warning in rig.health.warnings()), "the warning"
        )
