"""Services and slices become what is translated: case by case, and the same whatever came first."""

import ipaddress
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from podwire.control.services.catalogue import Catalogue
from podwire.control.services.choose import Place
from podwire.control.services.facts import ServiceName
from podwire.control.services.room import Room
from podwire.model.interfaces import BackEnd, Frontend, ServiceTable
from podwire.model.store import StoredObject, StoreEvent
from tests.unit.service_objects import endpoint, service, slice_of, stored

TCP, UDP, SCTP = 6, 17, 132
VIP = "10.96.0.10"
VIP_6 = "fd96::10"

Shown = dict[str, list[str]]
STACK = "left to the stack"


def show(table: ServiceTable) -> Shown:
    """Write a table as `address port/protocol` -> back ends; the rows that only refuse are left out."""
    names = {TCP: "tcp", UDP: "udp", SCTP: "sctp"}
    return {
        f"{one.address} {one.port}/{names[one.protocol]}": [
            STACK if back.is_stack else f"{back.address}:{back.port}" for back in back_ends
        ]
        for one, back_ends in table.items()
        if one.port
    }


HERE = Place("n1", "z1")
PODS = (ipaddress.ip_network("10.7.0.0/16"), ipaddress.ip_network("fd07::/56"))


def catalogue_of(*documents: Mapping[str, Any], place: Place = HERE) -> Catalogue:
    catalogue = Catalogue(place, PODS)
    for document in documents:
        catalogue.apply(StoreEvent(stored(document), 1))
    return catalogue


def translated(*documents: Mapping[str, Any], place: Place = HERE) -> Shown:
    catalogue = catalogue_of(*documents, place=place)
    catalogue.take_change()
    return show(catalogue.table())


A, B, C = "10.7.0.1", "10.7.0.2", "10.7.0.3"
NAMED = (
    {"name": "http", "port": 80, "targetPort": "web"},
    {"name": "dns", "port": 53, "protocol": "UDP"},
)

DIAMETER = {"name": "d", "port": 3868, "protocol": "SCTP"}

CASES: dict[str, tuple[list[Mapping[str, Any]], Shown]] = {
    "one-back-end": ([service(), slice_of(endpoints=[endpoint(A)])], {f"{VIP} 80/tcp": [f"{A}:8080"]}),
    "several-slices-and-one-address-twice": (
        [
            service(),
            slice_of(endpoints=[endpoint(A), endpoint(B)]),
            slice_of(endpoints=[endpoint(B), endpoint(C)], number=2),
        ],
        {f"{VIP} 80/tcp": [f"{A}:8080", f"{B}:8080", f"{C}:8080"]},
    ),
    "ports-by-name-that-differ-between-slices": (
        [
            service(ports=NAMED),
            slice_of(
                endpoints=[endpoint(A)],
                ports=[{"name": "http", "port": 8080}, {"name": "dns", "port": 5353, "protocol": "UDP"}],
            ),
            slice_of(endpoints=[endpoint(B)], ports=[{"name": "http", "port": 9090}], number=2),
        ],
        {f"{VIP} 80/tcp": [f"{A}:8080", f"{B}:9090"], f"{VIP} 53/udp": [f"{A}:5353"]},
    ),
    "a-name-of-the-other-protocol-is-another-port": (
        [service(ports=NAMED), slice_of(endpoints=[endpoint(A)], ports=[{"name": "dns", "port": 53}])],
        {f"{VIP} 80/tcp": [], f"{VIP} 53/udp": []},
    ),
    "both-families": (
        [
            service(addresses=[VIP, VIP_6]),
            slice_of(endpoints=[endpoint(A)]),
            slice_of(endpoints=[endpoint("fd07::1")], number=2, family="IPv6"),
        ],
        {f"{VIP} 80/tcp": [f"{A}:8080"], f"{VIP_6} 80/tcp": ["fd07::1:8080"]},
    ),
    "not-ready-ones-are-left-out": (
        [service(), slice_of(endpoints=[endpoint(A, ready=False), endpoint(B, ready=True)])],
        {f"{VIP} 80/tcp": [f"{B}:8080"]},
    ),
    "without-ready-ones-those-that-drain": (
        [
            service(),
            slice_of(
                endpoints=[
                    endpoint(A, ready=False, serving=True, terminating=True),
                    endpoint(B, ready=False, serving=False, terminating=True),
                    endpoint(C, ready=False),
                ]
            ),
        ],
        {f"{VIP} 80/tcp": [f"{A}:8080"]},
    ),
    "no-slices": ([service()], {f"{VIP} 80/tcp": []}),
    "a-slice-without-its-service": ([slice_of(endpoints=[endpoint(A)])], {}),
    "local-only": (
        [
            service(internalTrafficPolicy="Local"),
            slice_of(endpoints=[endpoint(A, node="n1"), endpoint(B, node="n2"), endpoint(C)]),
        ],
        {f"{VIP} 80/tcp": [f"{A}:8080"]},
    ),
    "local-only-and-none-here": (
        [service(internalTrafficPolicy="Local"), slice_of(endpoints=[endpoint(B, node="n2")])],
        {f"{VIP} 80/tcp": []},
    ),
    "headless": ([service(addresses=["None"]), slice_of(endpoints=[endpoint(A)])], {}),
    "a-slice-of-a-headless-service": (
        [service(), slice_of(endpoints=[endpoint(A)], labels={"service.kubernetes.io/headless": ""})],
        {f"{VIP} 80/tcp": []},
    ),
    "another-proxy's": (
        [service(labels={"service.kubernetes.io/service-proxy-name": "x"}), slice_of(endpoints=[endpoint(A)])],
        {},
    ),
    "external-name": ([service(addresses=[], type="ExternalName", externalName="x.example")], {}),
    "affinity-is-left-to-the-stack": (
        [service(sessionAffinity="Cookie"), slice_of(endpoints=[endpoint(A)])],
        {},
    ),
    "sctp-with-the-same-port-at-every-back-end": (
        [
            service(addresses=[VIP, VIP_6], externalIPs=["203.0.113.5"], ports=[DIAMETER]),
            slice_of(endpoints=[endpoint(A), endpoint(B, ready=False)], ports=[DIAMETER]),
            slice_of(endpoints=[endpoint("fd07::1")], ports=[DIAMETER], number=2, family="IPv6"),
        ],
        {
            f"{VIP} 3868/sctp": [f"{A}:3868"],
            f"{VIP_6} 3868/sctp": ["fd07::1:3868"],
            "203.0.113.5 3868/sctp": [f"{A}:3868"],
        },
    ),
    "sctp-with-another-port-at-one-back-end-is-left-to-the-stack": (
        [
            service(addresses=[VIP, VIP_6], externalIPs=["203.0.113.5"], ports=[DIAMETER, {"name": "t", "port": 80}]),
            slice_of(endpoints=[endpoint(A)], ports=[DIAMETER, {"name": "t", "port": 1}]),
            slice_of(endpoints=[endpoint(B, ready=False)], ports=[{**DIAMETER, "port": 3869}], number=2),
        ],
        {
            f"{VIP} 3868/sctp": [STACK], f"{VIP_6} 3868/sctp": [STACK], "203.0.113.5 3868/sctp": [STACK],
            f"{VIP} 80/tcp": [f"{A}:1"], f"{VIP_6} 80/tcp": [], "203.0.113.5 80/tcp": [f"{A}:1"],
        },
    ),
    "sctp-without-back-ends-is-refused": (
        [service(ports=[DIAMETER]), slice_of(ports=[{**DIAMETER, "port": 3869}])],
        {f"{VIP} 3868/sctp": []},
    ),
    # Nobody but an API server has a range for them: docs/security.md.
    "a-cluster-address-in-the-world": (
        [service(addresses=["198.51.100.7"]), slice_of(endpoints=[endpoint(A)])],
        {"198.51.100.7 80/tcp": [f"{A}:8080"]},
    ),
    "no-ports": ([service(ports=[])], {}),
    "addresses-that-mean-another-host-on-each": (
        [
            service(),
            slice_of(
                endpoints=[
                    endpoint(one)
                    for one in ("127.0.0.1", "0.0.0.0", "0.1.2.3", "169.254.1.1", "224.0.0.1", "fd07::1", "x", A)
                ]
            ),
        ],
        {f"{VIP} 80/tcp": [f"{A}:8080"]},
    ),
    "external-addresses-have-the-same-back-ends": (
        [service(externalIPs=["203.0.113.5", "2001:db8::5"]), slice_of(endpoints=[endpoint(A)])],
        {f"{VIP} 80/tcp": [f"{A}:8080"], "203.0.113.5 80/tcp": [f"{A}:8080"], "2001:db8::5 80/tcp": []},
    ),
    "load-balancers-that-translate-nothing-themselves": (
        [
            service(ingress=[
                {"ip": "203.0.113.6"}, {"ip": "203.0.113.7", "ipMode": "VIP"},
                {"ip": "203.0.113.8", "ipMode": "Proxy"}, {"hostname": "lb.example"}, {"ip": "127.0.0.1"},
            ]),
            slice_of(endpoints=[endpoint(A)]),
        ],
        {f"{one} 80/tcp": [f"{A}:8080"] for one in (VIP, "203.0.113.6", "203.0.113.7")},
    ),
    "local-policies-end-at-external-addresses": (
        [
            service(
                externalIPs=["203.0.113.5"], internalTrafficPolicy="Local", externalTrafficPolicy="Local"
            ),
            slice_of(endpoints=[endpoint(A, node="n1"), endpoint(B, node="n2")]),
        ],
        {f"{VIP} 80/tcp": [f"{A}:8080"], "203.0.113.5 80/tcp": [f"{A}:8080", f"{B}:8080"]},
    ),
    "source-ranges-that-name-all-pods": (
        [
            service(ingress=[{"ip": "203.0.113.6"}], loadBalancerSourceRanges=["192.0.2.0/24", " 10.0.0.0/8"]),
            slice_of(endpoints=[endpoint(A)]),
        ],
        {f"{VIP} 80/tcp": [f"{A}:8080"], "203.0.113.6 80/tcp": [f"{A}:8080"]},
    ),
    "source-ranges-of-the-other-family": (
        [
            service(ingress=[{"ip": "203.0.113.6"}], loadBalancerSourceRanges=["2001:db8::/32"]),
            slice_of(endpoints=[endpoint(A)]),
        ],
        {f"{VIP} 80/tcp": [f"{A}:8080"], "203.0.113.6 80/tcp": [f"{A}:8080"]},
    ),
    "source-ranges-that-do-not-leave-the-address-to-the-stack": (
        [
            service(
                ingress=[{"ip": "203.0.113.6"}], externalIPs=["203.0.113.5"],
                loadBalancerSourceRanges=["10.7.1.0/24"],
            ),
            slice_of(endpoints=[endpoint(A)]),
        ],
        {f"{VIP} 80/tcp": [f"{A}:8080"], "203.0.113.5 80/tcp": [f"{A}:8080"]},
    ),
    "hints-for-this-zone": (
        [service(), slice_of(endpoints=[endpoint(A, zones=["z1"]), endpoint(B, zones=["z2", "z1"]),
                                        endpoint(C, zones=["z2"])])],
        {f"{VIP} 80/tcp": [f"{A}:8080", f"{B}:8080"]},
    ),
    "hints-that-one-back-end-lacks": (
        [service(), slice_of(endpoints=[endpoint(A, zones=["z1"]), endpoint(B)])],
        {f"{VIP} 80/tcp": [f"{A}:8080", f"{B}:8080"]},
    ),
    "hints-that-one-lacks-that-is-not-ready": (
        [service(), slice_of(endpoints=[endpoint(A, zones=["z1"]), endpoint(B, zones=["z2"]),
                                        endpoint(C, ready=False)])],
        {f"{VIP} 80/tcp": [f"{A}:8080"]},
    ),
    "hints-for-other-zones-only": (
        [service(), slice_of(endpoints=[endpoint(A, zones=["z2"]), endpoint(B, zones=["z3"])])],
        {f"{VIP} 80/tcp": [f"{A}:8080", f"{B}:8080"]},
    ),
    "hints-for-this-node-come-before-those-for-its-zone": (
        [service(), slice_of(endpoints=[endpoint(A, nodes=["n1"], zones=["z1"]),
                                        endpoint(B, nodes=["n2"], zones=["z1"])])],
        {f"{VIP} 80/tcp": [f"{A}:8080"]},
    ),
    "without-one-for-this-node-its-zone-counts": (
        [service(), slice_of(endpoints=[endpoint(A, nodes=["n2"], zones=["z1"]),
                                        endpoint(B, nodes=["n3"], zones=["z2"])])],
        {f"{VIP} 80/tcp": [f"{A}:8080"]},
    ),
    "hints-say-nothing-of-those-that-drain": (
        [service(), slice_of(endpoints=[endpoint(A, zones=["z2"], ready=False, terminating=True)])],
        {f"{VIP} 80/tcp": [f"{A}:8080"]},
    ),
    "local-only-goes-before-hints": (
        [
            service(internalTrafficPolicy="Local"),
            slice_of(endpoints=[endpoint(A, node="n1", zones=["z2"]), endpoint(B, node="n2", zones=["z1"])]),
        ],
        {f"{VIP} 80/tcp": [f"{A}:8080"]},
    ),
    "nodes-and-the-world-may-answer": (
        [service(), slice_of(endpoints=[endpoint("192.0.2.1"), endpoint("198.51.100.7")])],
        {f"{VIP} 80/tcp": ["192.0.2.1:8080", "198.51.100.7:8080"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backwards", [False, True])
def test_what_is_translated(name: str, backwards: bool) -> None:
    documents, wanted = CASES[name]
    assert translated(*(reversed(documents) if backwards else documents)) == wanted


def test_a_thousand_ports() -> None:
    ports = [{"name": f"p{index}", "port": index} for index in range(1, 1001)]
    targets = [{"name": f"p{index}", "port": index + 1} for index in range(1, 1001)]
    shown = translated(service(ports=ports), slice_of(endpoints=[endpoint(A)], ports=targets))
    assert shown == {f"{VIP} {index}/tcp": [f"{A}:{index + 1}"] for index in range(1, 1001)}


def test_every_address_refuses_its_other_ports() -> None:
    catalogue = catalogue_of(service(addresses=[VIP, VIP_6]))
    put = catalogue.take_change().put
    refusing = {one.address for one in put if (one.port, one.protocol) == (0, 0)}
    assert refusing == {ipaddress.ip_address(VIP), ipaddress.ip_address(VIP_6)}


def test_the_other_ports_of_an_external_address_are_not_refused() -> None:
    catalogue = catalogue_of(service(externalIPs=["203.0.113.5"], ingress=[{"ip": "203.0.113.6"}]))
    refusing = [row.address for row in catalogue.take_change().put if not row.port]
    assert refusing == [ipaddress.ip_address(VIP)]


def test_hints_count_as_soon_as_the_zone_is_known() -> None:
    ends = [endpoint(A, zones=["z1"]), endpoint(B, zones=["z2"])]
    catalogue = catalogue_of(service(), slice_of(endpoints=ends), place=Place("n1"))
    assert show(catalogue.take_change().put) == {f"{VIP} 80/tcp": [f"{A}:8080", f"{B}:8080"]}
    catalogue.move(Place("n1", "z2"))
    assert show(catalogue.take_change().put) == {f"{VIP} 80/tcp": [f"{B}:8080"]}
    catalogue.move(Place("n1", "z2"))
    assert not catalogue.take_change().put


@pytest.mark.parametrize("order", [1, -1])
def test_an_external_address_takes_no_cluster_address_from_its_service(order: int) -> None:
    thief = stored(service("thief", ["10.96.0.11"], externalIPs=[VIP]), "2026-01-01T00:00:00Z")
    owner = stored(service("owner"), "2026-02-01T00:00:00Z")
    catalogue = catalogue_of(slice_of("thief", [endpoint(A)]), slice_of("owner", [endpoint(B)]))
    for one in (thief, owner)[::order]:
        catalogue.apply(StoreEvent(one, 1))
        catalogue.take_change()
    assert show(catalogue.table())[f"{VIP} 80/tcp"] == [f"{B}:8080"]
    catalogue.apply(StoreEvent(owner, 2, deleted=True))
    assert show(catalogue.take_change().put) == {f"{VIP} 80/tcp": [f"{A}:8080"]}


LEFT: dict[str, tuple[Mapping[str, Any], str]] = {
    "proxy": (service(ingress=[{"ip": "203.0.113.8", "ipMode": "Proxy"}]), r"203.0.113.8 .*ipMode Proxy"),
    "sources": (
        service(ingress=[{"ip": "203.0.113.8"}], loadBalancerSourceRanges=["192.0.2.0/24"]),
        "203.0.113.8 .* loadBalancerSourceRanges does not name all pods",
    ),
    "no-range": (
        service(ingress=[{"ip": "203.0.113.8"}], loadBalancerSourceRanges=["all"]),
        "has what is no range",
    ),
    "no-address": (service(externalIPs=["127.0.0.1"]), "127.0.0.1 is no address that packets"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_the_stack_is_named(name: str) -> None:
    document, words = LEFT[name]
    catalogue = catalogue_of(document)
    catalogue.take_change()
    [view] = catalogue.views()
    assert view.is_translated
    assert re.search(words, view.problem)


def test_sctp_is_named_while_a_back_end_has_another_port() -> None:
    """Whoever it is for; an Event tells where a back end is, and the figures tell everywhere."""
    other = slice_of(
        endpoints=[endpoint(B, node="n1")], ports=[{**DIAMETER, "port": 3869}], number=2
    )
    catalogue = catalogue_of(
        service(ports=[DIAMETER]), slice_of(endpoints=[endpoint(A)], ports=[DIAMETER])
    )
    name = ServiceName("default", "web")
    for is_gone, left in ((False, {"sctp": 1}), (True, {}), (False, {"sctp": 1})):
        catalogue.apply(StoreEvent(stored(other), 1, deleted=is_gone))
        catalogue.take_change()
        view = catalogue.view(name)
        assert view is not None
        assert view.is_translated == is_gone
        assert (
            bool(
                re.search(
                    "port 3868/sctp is left to the stack: .* another targetPort", view.problem
                )
            )
            != is_gone
        )
        counts = catalogue.count()
        assert (counts.left, counts.translated) == (left, int(is_gone))
        told = [
            one.reason
            for lacking in catalogue.list_lacking([name])
            for one in catalogue.left(lacking.name)
        ]
        assert told == list(left)


@pytest.mark.parametrize("order", [1, -1])
def test_of_two_services_with_one_address_the_older_has_it(order: int) -> None:
    old = stored(service("zoo"), "2026-01-01T00:00:00Z")
    new = stored(service("ape"), "2026-02-01T00:00:00Z")
    catalogue = Catalogue(Place("n1"))
    for one in (
        *(old, new)[::order],
        stored(slice_of("zoo", [endpoint(A)])),
        stored(slice_of("ape", [endpoint(B)])),
    ):
        catalogue.apply(StoreEvent(one, 1))
    catalogue.take_change()
    assert show(catalogue.table()) == {f"{VIP} 80/tcp": [f"{A}:8080"]}
    problems = {str(view.name): view.problem for view in catalogue.views()}
    assert problems == {
        "default/ape": "an address or port is that of default/zoo",
        "default/zoo": "",
    }
    catalogue.apply(StoreEvent(old, 2, deleted=True))
    change = catalogue.take_change()
    assert show(change.put) == {f"{VIP} 80/tcp": [f"{B}:8080"]}
    assert not change.gone


def test_a_service_that_is_made_anew_is_younger_and_may_be_shown_meanwhile() -> None:
    catalogue = catalogue_of(slice_of("zoo", [endpoint(A)]), slice_of("ape", [endpoint(B)]))
    old = stored(service("zoo"), "2026-01-01T00:00:00Z")
    for one in (old, stored(service("ape"), "2026-02-01T00:00:00Z")):
        catalogue.apply(StoreEvent(one, 1))
    catalogue.take_change()
    catalogue.apply(StoreEvent(old, 2, deleted=True))
    assert [str(view.name) for view in catalogue.views()] == ["default/ape"]
    catalogue.apply(StoreEvent(stored(service("zoo"), "2026-03-01T00:00:00Z"), 3))
    change = catalogue.take_change()
    assert show(change.put) == {f"{VIP} 80/tcp": [f"{B}:8080"]}
    assert show(catalogue.table()) == show(change.put)


def test_a_service_made_anew_with_another_address_leaves_nothing() -> None:
    catalogue = catalogue_of(service(), slice_of(endpoints=[endpoint(A)]))
    catalogue.take_change()
    catalogue.apply(StoreEvent(stored(service()), 2, deleted=True))
    catalogue.apply(StoreEvent(stored(service(addresses=["10.96.0.11"])), 3))
    change = catalogue.take_change()
    assert {str(row.address) for row in change.gone} == {VIP}
    assert show(change.put) == {"10.96.0.11 80/tcp": [f"{A}:8080"]}


def test_one_slice_touches_its_own_service_alone() -> None:
    catalogue = catalogue_of(
        *(service(f"s{index}", [f"10.96.1.{index}"]) for index in range(100)),
        *(slice_of(f"s{index}", [endpoint(A)]) for index in range(100)),
    )
    catalogue.take_change()
    catalogue.apply(StoreEvent(stored(slice_of("s7", [endpoint(B)])), 9))
    change = catalogue.take_change()
    assert show(change.put) == {"10.96.1.7 80/tcp": [f"{B}:8080"]}
    assert len(change.put) == 1


def test_what_is_said_again_changes_nothing() -> None:
    documents = [service(), slice_of(endpoints=[endpoint(A)])]
    catalogue = catalogue_of(*documents)
    catalogue.take_change()
    for document in documents:
        catalogue.apply(StoreEvent(stored(document), 2))
    catalogue.replace("services", [stored(documents[0])])
    catalogue.replace("endpointslices", [stored(documents[1])])
    change = catalogue.take_change()
    assert (change.put, change.gone) == ({}, [])


def test_any_order_of_changes_comes_to_the_same() -> None:
    """What changes add up to is what a fresh look at the last versions gives."""
    chance = random.Random(7)
    for _ in range(60):
        catalogue, last = Catalogue(Place("n1")), dict[Any, StoredObject]()
        table: dict[Frontend, Sequence[BackEnd]] = {}
        for step in range(30):
            one = stored(_any_document(chance), f"2026-01-0{chance.randint(1, 3)}")
            deleted = chance.random() < 0.25
            catalogue.apply(StoreEvent(one, step, deleted=deleted))
            last.pop(one.key, None)
            if not deleted:
                last[one.key] = one
            if chance.random() < 0.4:
                _carry_out(catalogue, table)
        _carry_out(catalogue, table)
        fresh = Catalogue(Place("n1"))
        for kind in ("services", "endpointslices"):
            fresh.replace(kind, [one for one in last.values() if one.key.kind == kind])
        fresh.take_change()
        assert table == dict(fresh.table()) == dict(catalogue.table())


def _carry_out(catalogue: Catalogue, table: dict[Frontend, Sequence[BackEnd]]) -> None:
    change = catalogue.take_change()
    table.update(change.put)
    for frontend in change.gone:
        table.pop(frontend, None)


def _any_document(chance: random.Random) -> Mapping[str, Any]:
    name = chance.choice("abc")
    if chance.random() < 0.5:
        addresses: Iterable[str] = chance.sample(
            ["10.96.0.1", "10.96.0.2", "fd96::1"], chance.randint(0, 2)
        )
        ports = [
            {"name": f"p{one}", "port": one}
            for one in chance.sample([80, 81, 82], chance.randint(0, 3))
        ]
        ports += [DIAMETER] * chance.randint(0, 1)
        return service(name, list(addresses), ports)
    chosen = chance.sample(range(1, 6), chance.randint(0, 3))
    ends = [endpoint(f"10.7.0.{last}", ready=chance.random() < 0.7) for last in chosen]
    ports = [{"name": f"p{one}", "port": one + 8000} for one in (80, 81)]
    ports.append({**DIAMETER, "port": chance.choice((3868, 3868, 3869))})
    return slice_of(name, ends, ports, number=chance.randint(1, 2))


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, 10_800),
        ({"sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 7}}}, 7),
        ({"sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 86_401}}}, 10_800),
        ({"sessionAffinityConfig": {"clientIP": {"timeoutSeconds": True}}}, 10_800),
    ],
)
def test_affinity_is_told_with_the_ports_that_have_it(
    config: Mapping[str, Any], wanted: int
) -> None:
    catalogue = catalogue_of(slice_of(endpoints=[endpoint(A)]))
    for spec, affinity_s in (({}, 0), ({"sessionAffinity": "ClientIP", **config}, wanted), ({}, 0)):
        catalogue.apply(StoreEvent(stored(service(**spec)), 2))
        change = catalogue.take_change()
        asked = Frontend(ipaddress.ip_address(VIP), 80, TCP)
        assert asked in change.put
        assert dict(change.affinity) == ({asked: affinity_s} if affinity_s else {})
        assert catalogue.affinity(catalogue.table()) == change.affinity


def test_affinity_takes_twice_the_room() -> None:
    catalogue = crowd(100, 20, ("a", 1, 6))
    assert names(catalogue) == ["default/a"]
    put(catalogue, "b", 2, 1, 8, sessionAffinity="ClientIP")
    assert names(catalogue) == ["default/a"]
    put(catalogue, "b", 2, 1, 7, sessionAffinity="ClientIP")
    assert names(catalogue) == ["default/a", "default/b"]


# Rooms are small here: so many frontends, so many back ends in lists.


def crowd(frontends: int, slots: int, *sizes: tuple[str, int, int]) -> Catalogue:
    """Give services (name, ports, back ends), each a day younger than the one before."""
    catalogue = Catalogue(Place("n1"), room=Room(frontends, slots))
    for number, (name, ports, ends) in enumerate(sizes, 1):
        put(catalogue, name, number, ports, ends)
    return catalogue


def put(catalogue: Catalogue, name: str, number: int, ports: int, ends: int, **spec: Any) -> None:
    """Make or change one of them: a row for each port and one for the address."""
    named = [{"name": f"p{index}", "port": index} for index in range(1, ports + 1)]
    addresses = [endpoint(f"10.7.{number}.{index}", node="n1") for index in range(1, ends + 1)]
    made = service(name, [f"10.96.1.{number}"], named, **spec)
    for document in (made, slice_of(name, addresses, named)):
        catalogue.apply(StoreEvent(stored(document, f"2026-01-{number:02}T00:00:00Z"), 1))


def names(catalogue: Catalogue) -> list[str]:
    catalogue.take_change()
    return [str(view.name) for view in catalogue.views() if view.is_translated]


def test_who_does_not_fit_keeps_no_older_one_out_and_no_smaller_one() -> None:
    catalogue = crowd(20, 100, ("old", 4, 2), ("greedy", 18, 1), ("small", 3, 1))
    assert names(catalogue) == ["default/old", "default/small"]
    problems = {str(view.name): view.problem for view in catalogue.views()}
    assert problems["default/greedy"] == "there is no room for it beside the other services"
    assert catalogue.room.refused == {ServiceName("default", "greedy")}


def test_who_loses_its_room_to_an_older_one_is_told_of() -> None:
    catalogue = crowd(20, 100, ("old", 4, 2), ("late", 14, 1))
    assert names(catalogue) == ["default/late", "default/old"]
    put(catalogue, "old", 1, 6, 2)
    touched = catalogue.take_change().touched
    lacking = catalogue.list_lacking(touched)
    told = {str(refused.name): catalogue.left(refused.name)[0].reason for refused in lacking}
    assert told == {"default/late": "no-room"}


@pytest.mark.parametrize("backwards", [False, True])
def test_the_older_have_room_whoever_was_heard_first(backwards: bool) -> None:
    sizes = [("a", 5, 1), ("b", 5, 1), ("c", 5, 1)]
    catalogue = Catalogue(Place("n1"), room=Room(12, 100))
    numbered = list(enumerate(sizes, 1))
    for number, (name, ports, ends) in reversed(numbered) if backwards else numbered:
        put(catalogue, name, number, ports, ends)
        catalogue.take_change()
    assert names(catalogue) == ["default/a", "default/b"]


def test_back_ends_count_as_often_as_they_stand_in_lists() -> None:
    catalogue = crowd(100, 20, ("a", 2, 6), ("b", 2, 5), ("c", 2, 4))
    assert names(catalogue) == ["default/a", "default/c"]


def test_room_that_is_given_back_goes_to_who_waits() -> None:
    catalogue = crowd(20, 100, ("old", 9, 2), ("young", 10, 1))
    assert names(catalogue) == ["default/old"]
    catalogue.apply(StoreEvent(stored(service("old"), "2026-01-01T00:00:00Z"), 2, deleted=True))
    change = catalogue.take_change()
    assert {str(row.address) for row in change.put} == {"10.96.1.2"}
    assert {str(row.address) for row in change.gone} == {"10.96.1.1"}
    assert names(catalogue) == ["default/young"]


def test_who_grows_beyond_the_room_goes_and_nobody_else() -> None:
    catalogue = crowd(20, 100, ("old", 5, 2), ("young", 5, 2))
    assert names(catalogue) == ["default/old", "default/young"]
    put(catalogue, "young", 2, 16, 1)
    change = catalogue.take_change()
    assert not change.put
    assert {str(row.address) for row in change.gone} == {"10.96.1.2"}
    assert names(catalogue) == ["default/old"]


def of(namespace: str, document: dict[str, Any]) -> dict[str, Any]:
    """Put a document into another namespace."""
    return {**document, "metadata": {**document["metadata"], "namespace": namespace}}


@pytest.mark.parametrize("ports", [1, 18])
def test_an_old_service_that_grows_takes_no_room_of_other_namespaces(ports: int) -> None:
    catalogue = crowd(20, 100, ("young", 4, 1))
    ends = [endpoint(f"10.8.0.{number}") for number in range(1, 98 if ports == 1 else 3)]
    named = [{"name": f"p{number}", "port": number} for number in range(1, ports + 1)]
    for name, address in (("old", "10.96.2.1"), ("grown", "10.96.2.2")):
        some = named if name == "grown" else named[:1]
        for document in (service(name, [address], some), slice_of(name, ends, some)):
            event = StoreEvent(stored(of("tenant", document), "2025-01-01T00:00:00Z"), 1)
            catalogue.apply(event)
    assert "default/young" in names(catalogue)
    assert {one.namespace for one in catalogue.room.refused} == {"tenant"}
