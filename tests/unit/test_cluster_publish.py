"""When a node writes what of itself, and who keeps a name that two machines want."""

import ipaddress
from typing import Any

import pytest
from msgspec.structs import replace

from podwire.control.cluster.facts import decode_node, node_key
from podwire.control.cluster.publish import (
    EndpointsPublisher,
    Holder,
    NodeInUse,
    NodePublisher,
    PublishSchedule,
)
from podwire.control.cluster.published import decode_endpoints, endpoints_key
from podwire.control.documents.damage import find_fault
from podwire.control.identity.collect import publish_holds
from podwire.model.errors import Unavailable
from podwire.model.ids import IdentityId
from tests.fakes.store import MemoryStore
from tests.unit.test_cluster_planner import make

A, B, C = (ipaddress.ip_address(f"10.244.1.{offset}") for offset in (5, 6, 7))
FOREIGN = ipaddress.ip_address("10.244.7.9")
OWN_RANGES = (ipaddress.ip_network("10.244.1.0/24"), ipaddress.ip_network("fd10::/64"))


def stored(store: Any) -> Any:
    """Give what node n1 has published."""
    found = store.get(endpoints_key("n1"))
    assert found is not None
    return found


def pods(**identities: Any) -> Any:
    return {
        {"a": A, "b": B, "c": C, "foreign": FOREIGN}[name]: IdentityId(one)
        for name, one in identities.items()
    }


def test_labels_that_change_all_the_time_are_written_once_a_second_in_the_end() -> None:
    schedule, now_s, gaps = PublishSchedule(), 10.0, []
    schedule.written(pods(a=0), now_s)
    for number in range(1, 100):
        due = schedule.due_in(pods(a=number), now_s, OWN_RANGES)
        assert due is not None
        gaps.append(due)
        now_s += due
        schedule.written(pods(a=number), now_s)
    assert set(gaps[:50]) == {0.25}
    assert set(gaps[60:]) == {1.0}
    assert schedule.due_in(pods(a=1000), now_s + 30, OWN_RANGES) == 0
    schedule.written(pods(a=1000), now_s + 30)
    assert schedule.due_in(pods(a=1001), now_s + 30, OWN_RANGES) == 0.25


@pytest.mark.parametrize(
    ("steps", "wanted", "now_s", "due"),
    [
        pytest.param([], pods(), 10, 0, id="the first time at once, also without pods"),
        pytest.param([("written", pods(), 10)], pods(), 10, None, id="nothing new"),
        pytest.param([("written", pods(), 10)], pods(a=1), 20, 0, id="first change at once"),
        pytest.param([("written", pods(), 10)], pods(a=1), 10.25, 0.75, id="second within 1 s"),
        pytest.param(
            [("written", pods(a=1), 10)], pods(a=2), 10.125, 0.125, id="another identity waits a quarter of a second"
        ),
        pytest.param([("written", pods(a=1), 10)], pods(), 20, 300, id="a release can wait"),
        pytest.param(
            [("written", pods(a=1), 10), ("look", pods(), 20)], pods(), 50, 270, id="5 minutes"
        ),
        pytest.param(
            [("written", pods(a=1), 10), ("look", pods(), 20)], pods(), 400, 0, id="not longer"
        ),
        pytest.param(
            [("written", pods(a=1, foreign=1), 10)],
            pods(a=1),
            10.25,
            0.75,
            id="of an address that another node may get not even a release waits",
        ),
        pytest.param(
            [("written", pods(a=1), 10), ("look", pods(), 20)],
            pods(b=1),
            50,
            0,
            id="a release rides with a change",
        ),
        pytest.param(
            [("written", pods(a=1), 10), ("look", pods(), 20), ("look", pods(a=1), 30)],
            pods(),
            50,
            300,
            id="a pod that came back begins anew",
        ),
        pytest.param(
            [("written", pods(a=1), 10)],
            pods(a=1, b=1),
            10.125,
            0.875,
            id="another pod waits a second",
        ),
        pytest.param([("failed", 10)], pods(), 10, 1, id="first retry after 1 s"),
        pytest.param([("failed", 10), ("failed", 11)], pods(), 11, 2, id="second after 2 s"),
        pytest.param([("failed", 10)] * 20, pods(), 10, 30, id="at most 30 s"),
        pytest.param(
            [("failed", 10), ("written", pods(), 12)], pods(a=1), 14, 0, id="success forgets failures"
        ),
    ],
)  # fmt: skip
def test_when_pods_are_published(steps: Any, wanted: Any, now_s: Any, due: Any) -> None:
    schedule = PublishSchedule()
    for name, *arguments in steps:
        if name == "look":
            seen, looked_s = arguments
            schedule.due_in(seen, looked_s, OWN_RANGES)
        else:
            getattr(schedule, name)(*arguments)
    assert schedule.due_in(wanted, now_s, OWN_RANGES) == due


def test_the_end_of_a_back_end_is_written_at_once() -> None:
    schedule = PublishSchedule(is_awaited=lambda identity: identity == 1)
    schedule.written(pods(a=1, b=2), 10)
    assert schedule.due_in(pods(a=1), 20, OWN_RANGES) == 300
    assert schedule.due_in(pods(b=2), 20, OWN_RANGES) == 0
    assert schedule.due_in(pods(b=2), 10.25, OWN_RANGES) == 0.75


def published(store: Any, name: Any = "n1") -> Any:
    return decode_node(store.get(node_key(name)))


def writes(store: Any) -> Any:
    return [call for call in store.calls if call in ("create", "update")]


def test_a_node_is_written_only_when_it_would_say_something_else() -> None:
    store = MemoryStore()
    publisher = NodePublisher(store, "n1", "mine")
    publisher.claim("192.0.2.1")
    assert publisher.publish(make(1)).epoch == 1
    for _ in range(3):
        publisher.publish(make(1))
    assert writes(store) == ["create"]
    publisher.publish(make(1, underlay_mtu_bytes=1400))
    assert writes(store) == ["create", "update"]
    assert published(store).underlay_mtu_bytes == 1400
    assert published(store).instance == "mine"


def test_what_is_held_is_left_alone() -> None:
    store = MemoryStore()
    publish_holds(store, "n1", [70000])
    publisher = NodePublisher(store, "n1", "mine")
    publisher.claim("")
    publisher.publish(make(1))
    assert published(store).holds == (70000,)
    publish_holds(store, "n1", [70001])
    publisher.publish(make(1))
    assert published(store).holds == (70001,)
    assert published(store).instance == "mine"


def test_a_living_node_keeps_its_name_and_both_addresses_are_named() -> None:
    store = MemoryStore()
    first, second = NodePublisher(store, "n1", "first"), NodePublisher(store, "n1", "second")
    first.claim("192.0.2.1")
    first.publish(make(1))
    with pytest.raises(NodeInUse) as refused:
        second.claim("192.0.2.2")
    assert "192.0.2.1" in refused.value.message
    assert "192.0.2.2" in refused.value.message
    with pytest.raises(NodeInUse):
        second.publish(make(1))
    assert published(store).instance == "first"


def test_a_name_that_nobody_holds_is_taken_over_with_a_new_epoch() -> None:
    store = MemoryStore()
    first, second = NodePublisher(store, "n1", "first"), NodePublisher(store, "n1", "second")
    first.claim("192.0.2.1")
    first.publish(make(1))
    first.close()
    second.claim("192.0.2.2")
    assert second.publish(make(1)).epoch == 2
    assert second.publish(make(1)).epoch == 2
    with pytest.raises(NodeInUse):
        first.publish(make(1))


def test_a_restart_keeps_the_epoch() -> None:
    store = MemoryStore()
    for _ in range(2):
        publisher = NodePublisher(store, "n1", "mine")
        publisher.claim("192.0.2.1")
        assert publisher.publish(make(1)).epoch == 1
        publisher.close()
    assert writes(store) == ["create"]


def test_an_earlier_life_with_another_address_is_waited_for() -> None:
    store = MemoryStore()
    NodePublisher(store, "n1", "mine").claim("192.0.2.1")
    with pytest.raises(Unavailable):
        NodePublisher(store, "n1", "mine").claim("192.0.2.7")


def test_a_node_that_was_deleted_is_written_again_in_its_epoch() -> None:
    store = MemoryStore()
    publisher = NodePublisher(store, "n1", "mine")
    publisher.claim("")
    publisher.publish(make(1))
    store.delete(node_key("n1"))
    publisher.publish(make(1))
    assert published(store).epoch == 1


def test_somebody_faster_costs_only_another_try() -> None:
    store = MemoryStore()
    publisher = NodePublisher(store, "n1", "mine")
    publisher.claim("")
    publisher.publish(make(1))
    meddled: list[Any] = []

    def meddle(new: Any) -> None:
        if not meddled:
            meddled.append(new)
            publish_holds(store, "n1", [70001])

    store.before_update = meddle
    publisher.publish(make(1, underlay_mtu_bytes=1400))
    assert (published(store).holds, published(store).underlay_mtu_bytes) == ((70001,), 1400)


@pytest.mark.parametrize("text", ["", "x", "[]", '{"instance": 5}'])
def test_a_holder_of_another_kind_is_somebody_unknown(text: Any) -> None:
    assert Holder.parse(text) == Holder()


def test_pods_are_published_in_a_new_epoch_by_every_life() -> None:
    store = MemoryStore()
    seen = []
    for _ in range(2):
        publisher = EndpointsPublisher(store, "n1")
        for identities in (pods(a=300), pods(b=301)):
            publisher.write(identities, make(1).pod_cidrs)
            seen.append(decode_endpoints(stored(store)))
    assert [entry.order for entry in seen] == sorted(entry.order for entry in seen)
    assert len({entry.order for entry in seen}) == 4
    assert [entry.epoch for entry in seen] == [1, 1, 2, 2]
    assert seen[-1].identities == pods(b=301)


def test_pods_that_somebody_deleted_are_published_again() -> None:
    store = MemoryStore()
    publisher = EndpointsPublisher(store, "n1")
    publisher.write(pods(a=300), ())
    store.delete(endpoints_key("n1"))
    publisher.write(pods(a=300), ())
    assert decode_endpoints(stored(store)).order == (1, 2)


@pytest.mark.parametrize("spec", [None, "x", {}, {"epoch": "7"}, {"epoch": True}])
def test_a_life_after_damage_comes_after_all_lives_before(spec: Any) -> None:
    store = MemoryStore()
    for _ in range(3):
        EndpointsPublisher(store, "n1").write(pods(a=300), ())
    before = decode_endpoints(stored(store))
    store.update(replace(stored(store), document={"spec": spec}))
    EndpointsPublisher(store, "n1").write(pods(a=301), ())
    assert decode_endpoints(stored(store)).order > before.order


@pytest.mark.parametrize(
    "document",
    [
        {"spec": "x"},
        {"metadata": []},
        {"metadata": {"annotations": "x", "labels": {"a": "b", "c": 1}}, "spec": {}},
        {"metadata": {"labels": []}},
    ],
    ids=["spec", "metadata", "annotations", "labels"],
)
def test_a_node_is_written_over_whatever_else_is_there(document: Any) -> None:
    store = MemoryStore()
    publisher = NodePublisher(store, "n1", "one")
    publisher.claim("192.0.2.1")
    publisher.publish(make(1))
    found = store.get(node_key("n1"))
    assert found is not None
    store.update(replace(found, document=document))
    publisher.publish(make(1))
    found = store.get(node_key("n1"))
    assert found is not None
    assert find_fault(found) == ""
    assert decode_node(found).addresses == make(1).addresses


def test_what_a_node_holds_waits_until_its_damaged_object_is_written_anew() -> None:
    store = MemoryStore()
    publish_holds(store, "n1", [300])
    found = store.get(node_key("n1"))
    assert found is not None
    store.update(replace(found, document={"spec": "x"}))
    with pytest.raises(Unavailable, match="written anew"):
        publish_holds(store, "n1", [301])
