"""Services that choose pods by labels: who answers, and the same whatever came first."""

import ipaddress
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from podwire.control.services.catalogue import Catalogue
from podwire.control.services.choose import Place
from podwire.control.services.records import pack_service
from podwire.control.services.selected import SelectedPods
from podwire.model.endpoint import IPAddress
from podwire.model.identity import IdentityFacts, NamedPort
from podwire.model.labels import namespace_labels
from podwire.model.store import StoreEvent
from tests.unit.service_objects import endpoint, service, slice_of, stored
from tests.unit.test_service_catalogue import VIP, Shown, show

WEB, WEB_2, OTHER, FAR_NAMESPACE, UNKNOWN = 70001, 70002, 70003, 70004, 70005
NEAR, FAR, FAR_2 = "10.7.0.1", "10.7.1.1", "10.7.1.2"
SELECTOR = {"app": "web"}


def facts(
    number: int, *labels: str, namespace: str = "default", ports: Sequence[NamedPort] = ()
) -> IdentityFacts:
    """Give an identity."""
    return IdentityFacts(number, (*labels, *namespace_labels(namespace, {})), tuple(ports))


IDENTITIES: Mapping[int, IdentityFacts] = {
    one.number: one
    for one in (
        facts(WEB, "cni:app=web", "k8s:tier=front", ports=[NamedPort("http", 6, 8080)]),
        facts(WEB_2, "k8s:app=web", ports=[NamedPort("http", 6, 9090), NamedPort("http", 17, 53)]),
        facts(OTHER, "cni:app=db", "reserved:app=web"),
        facts(FAR_NAMESPACE, "cni:app=web", namespace="shop"),
    )
}


class World:
    """A catalogue, and what its pods are fed from."""

    def __init__(self, known: Mapping[int, IdentityFacts] = IDENTITIES) -> None:
        self.known = dict(known)
        self.selected = SelectedPods("n1", self.known.get)
        self.catalogue = Catalogue(Place("n1"), (), self.selected)
        self.own: dict[IPAddress, int] = {}
        self.others: dict[IPAddress, int] = {}

    def apply(self, *documents: Mapping[str, object], deleted: bool = False) -> "World":
        for document in documents:
            self.catalogue.apply(StoreEvent(stored(document), 1, deleted=deleted))
        return self

    def put(self, address: str, identity: int | None, *, own: bool = False) -> "World":
        """Say whose pod has an address; None: nobody's."""
        at, pods = ipaddress.ip_address(address), self.own if own else self.others
        if identity is None:
            pods.pop(at, None)
        else:
            pods[at] = identity
        if own:
            self.catalogue.change_pods(lambda chosen: chosen.replace_own(self.own))
        else:
            self.catalogue.change_pods(lambda chosen: chosen.change_others({at: identity}))
        return self

    def learn(self, one: IdentityFacts) -> None:
        self.known[one.number] = one
        self.catalogue.change_pods(lambda chosen: chosen.learn([one.number]))

    def feed(self, source: "World") -> None:
        """Take all pods of another world."""
        self.catalogue.change_pods(lambda chosen: chosen.replace_own(source.own))
        self.catalogue.change_pods(lambda chosen: chosen.replace_others(source.others))

    def shown(self) -> Shown:
        self.catalogue.take_change()
        return show(self.catalogue.table())


def web(target: int | str | None = None, **spec: Any) -> Mapping[str, object]:
    """Give the Service that chooses `app=web`."""
    port = {"port": 80} if target is None else {"port": 80, "targetPort": target}
    return service(ports=[port], selector=SELECTOR, **spec)


def filled(*documents: Mapping[str, object]) -> World:
    """Give a world with pods of each kind."""
    world = World().apply(*documents)
    world.put(NEAR, WEB, own=True)
    for address, identity in (
        (FAR, WEB_2),
        (FAR_2, OTHER),
        ("10.7.1.3", FAR_NAMESPACE),
        ("10.7.1.4", UNKNOWN),
        ("fd07::1", WEB),
    ):
        world.put(address, identity)
    return world


CASES: Mapping[str, tuple[Sequence[Mapping[str, object]], Shown]] = {
    "of-its-labels-and-namespace": ([web()], {f"{VIP} 80/tcp": [f"{NEAR}:80", f"{FAR}:80"]}),
    "by-number": ([web(8000)], {f"{VIP} 80/tcp": [f"{NEAR}:8000", f"{FAR}:8000"]}),
    "by-name-as-each-pod-has-it": (
        [web("http")],
        {f"{VIP} 80/tcp": [f"{NEAR}:8080", f"{FAR}:9090"]},
    ),
    "by-a-name-that-one-has-of-this-protocol": (
        [
            service(
                ports=[{"port": 53, "protocol": "UDP", "targetPort": "http"}], selector=SELECTOR
            )
        ],
        {f"{VIP} 53/udp": [f"{FAR}:53"]},
    ),
    "by-two-labels": (
        [service(selector={**SELECTOR, "tier": "front"})],
        {f"{VIP} 80/tcp": [f"{NEAR}:80"]},
    ),
    "of-both-families": (
        [web(clusterIPs=[VIP, "fd96::10"])],
        {f"{VIP} 80/tcp": [f"{NEAR}:80", f"{FAR}:80"], "fd96::10 80/tcp": ["fd07::1:80"]},
    ),
    "local-only": ([web(internalTrafficPolicy="Local")], {f"{VIP} 80/tcp": [f"{NEAR}:80"]}),
    "the-same-node-first": ([web(trafficDistribution="PreferSameNode")], {f"{VIP} 80/tcp": [f"{NEAR}:80"]}),
    "beside-slices-by-hand": (
        [web(8080), slice_of(endpoints=[endpoint("192.0.2.7")])],
        {f"{VIP} 80/tcp": [f"{NEAR}:8080", f"{FAR}:8080", "192.0.2.7:8080"]},
    ),
    "nobody": ([service(selector={"app": "nobody"})], {f"{VIP} 80/tcp": []}),
    "no-selector": ([service(), slice_of(endpoints=[endpoint(FAR)])], {f"{VIP} 80/tcp": [f"{FAR}:8080"]}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_who_answers(name: str) -> None:
    documents, wanted = CASES[name]
    assert filled(*documents).shown() == wanted


def test_what_changes_is_followed() -> None:
    world = filled(web())
    near, far, later = f"{NEAR}:80", f"{FAR}:80", "10.7.1.4:80"

    def answers() -> list[str]:
        return world.shown()[f"{VIP} 80/tcp"]

    assert answers() == [near, far]
    world.learn(facts(UNKNOWN, "cni:app=web"))
    assert answers() == [near, far, later]
    world.put(FAR, OTHER)  # relabelled
    assert answers() == [near, later]
    world.put(NEAR, None, own=True)
    assert answers() == [later]
    world.learn(facts(UNKNOWN, "cni:app=else"))
    assert answers() == []
    world.put(FAR, WEB)
    assert answers() == [far]
    world.apply(service(selector={"app": "db"}))
    assert answers() == ["10.7.1.2:80"]
    world.apply(service(), deleted=True)
    assert world.shown() == {}


def test_a_pod_of_this_node_is_not_that_of_another() -> None:
    world = filled(web(trafficDistribution="PreferSameNode"))
    world.put(NEAR, OTHER)
    assert world.shown() == {f"{VIP} 80/tcp": [f"{NEAR}:80"]}


def test_the_last_pod_of_an_identity_is_awaited_when_it_is_gone() -> None:
    world = filled(web())
    world.put(NEAR, None, own=True)
    assert world.selected.selects(WEB)
    assert not world.selected.selects(OTHER)
    assert not world.selected.selects(UNKNOWN)


def test_nothing_is_known_of_pods_that_nobody_asks_for() -> None:
    world = filled(web())
    world.apply(service(), deleted=True)
    assert not world.selected.is_asked
    world.selected.forget_pods()
    world.apply(web())
    assert world.shown() == {f"{VIP} 80/tcp": []}
    world.feed(world)
    assert world.shown() == {f"{VIP} 80/tcp": [f"{NEAR}:80", f"{FAR}:80"]}


def test_any_order_comes_to_the_same() -> None:
    chance = random.Random(14)
    for _ in range(60):
        world = World({})
        for _ in range(30):
            _do_anything(world, chance)
            if chance.random() < 0.3:
                world.shown()
        fresh = World(world.known)
        for one in filter(None, map(world.catalogue._service, world.catalogue._known)):
            fresh.catalogue._note(one.name).service = pack_service(one)
            fresh.selected.put_service(one)
        fresh.feed(world)
        assert world.shown() == fresh.shown()


def _do_anything(world: World, chance: random.Random) -> None:
    what = chance.randrange(4)
    name, vip = chance.choice([("a", "10.96.0.1"), ("b", "10.96.0.2")])
    if what == 0:
        chosen = {"app": chance.choice(["web", "db"])}
        spec: dict[str, Any] = {"selector": chosen} if chance.random() < 0.8 else {}
        world.apply(service(name, [vip], **spec), deleted=chance.random() < 0.2)
    elif what == 1:
        number = chance.choice([WEB, OTHER])
        world.learn(facts(number, f"cni:app={chance.choice(['web', 'db'])}"))
    else:
        own = chance.random() < 0.5
        address = f"10.7.{0 if own else 1}.{chance.randrange(4)}"
        identity = chance.choice([WEB, OTHER, None])
        world.put(address, identity, own=own)
