"""Records of services say what was written, and many services take little memory."""

import gc
import ipaddress
import random
import tracemalloc
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from podwire.control.documents.damage import read_object
from podwire.control.services.catalogue import Catalogue
from podwire.control.services.choose import Place
from podwire.control.services.facts import ServiceName, decode_service, decode_slice
from podwire.control.services.records import (
    Claimed,
    pack_claims,
    pack_service,
    pack_slice,
    read_slice_service,
    unpack_claims,
    unpack_service,
    unpack_slice,
)
from podwire.model.interfaces import BackEnd, Frontend
from podwire.model.store import StoreEvent
from podwire.model.store.packed import PackedDocument
from tests.unit.service_objects import endpoint, service, slice_of, stored

SERVICES, BACK_ENDS = 500, 10
BYTES_MAX = 2000
"""Of one service of ten back ends, in the catalogue: 200 for a back end, of the 400 that all of the agent may take."""


@pytest.mark.parametrize(
    "document",
    [
        service(),
        service(addresses=("10.96.0.10", "fd96::10"), ports=[{"port": 53, "protocol": "UDP"}]),
        service(externalIPs=["192.0.2.1", "2001:db8::1", "nonsense"], selector={"app": "web"}),
        service(sessionAffinity="ClientIP", internalTrafficPolicy="Local"),
        service(sessionAffinity="other", ports=[{"name": "a", "port": 1, "protocol": "SCTP"}]),
        service(ports=[{"name": "a", "port": 1, "targetPort": "web"}], addresses=()),
        service(trafficDistribution="PreferSameNode"),
        # What somebody wrote past every check.
        service(ports=[{"name": "a", "port": 1, "targetPort": 1 << 64}]),
    ],
)
def test_a_service_is_read_as_it_was_written(document: Mapping[str, Any]) -> None:
    facts = decode_service(msgspec.structs.replace(stored(document), uid="5c9f"))
    assert facts is not None
    record = pack_service(facts)
    assert unpack_service(facts.name, record) == facts
    assert pack_service(unpack_service(facts.name, record)) == record


@pytest.mark.parametrize(
    ("family", "endpoints"),
    [
        ("IPv4", []),
        ("IPv4", [endpoint("10.7.0.1", node="n1"), endpoint("10.7.0.2", ready=False)]),
        ("IPv6", [endpoint("fd07::1", serving=True, terminating=True, zones=["z2", "z1"])]),
        ("IPv4", [endpoint(f"10.7.0.{index}", nodes=[f"n{index % 3}"]) for index in range(1, 99)]),
    ],
)
def test_a_slice_is_read_as_it_was_written(family: str, endpoints: Any) -> None:
    ports = [{"name": "web", "port": 80}, {"port": 53, "protocol": "UDP"}]
    facts = decode_slice(stored(slice_of("web", endpoints, ports, family=family)))
    assert facts is not None
    record = pack_slice(facts)
    found = unpack_slice("default", record)
    assert (found.service, found.ports) == (facts.service, facts.ports)
    assert set(zip(found.addresses, found.endpoints, strict=True)) == set(
        zip(facts.addresses, facts.endpoints, strict=True)
    )
    assert len(found.addresses) == len(facts.addresses)
    assert read_slice_service("default", record) == ServiceName("default", "web")


def test_claims_are_read_as_they_were_written() -> None:
    chance = random.Random(3)
    four = [BackEnd(address(f"10.7.0.{index}"), 8000 + index, 6) for index in range(1, 9)]
    six = [BackEnd(address(f"fd07::{index}"), 53, 17) for index in range(1, 9)]
    for _ in range(30):
        shared = tuple(chance.sample(four, chance.randint(0, 8)))
        claims = {
            Frontend(address("10.96.0.1"), 80, 6): shared,
            Frontend(address("192.0.2.1"), 80, 6): shared,
            Frontend(address("fd96::1"), 53, 17): tuple(chance.sample(six, chance.randint(0, 8))),
            Frontend(address("fd96::1")): (),
        }
        claimed = Claimed(claims, "2026", (address("192.0.2.1"),), chance.choice((0, 60)))
        record = pack_claims(claimed)
        assert unpack_claims(record) == claimed
        assert pack_claims(replace(claimed, claims=dict(claims))) == record
    assert pack_claims(unpack_claims(b"")) == b""


def address(text: str) -> Any:
    return ipaddress.ip_address(text)


def test_many_services_take_little_memory() -> None:
    catalogue = Catalogue(Place("n1"))
    take(catalogue, 0)
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(1, SERVICES + 1):
            take(catalogue, number)
        gc.collect()
        used_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert catalogue.count().back_ends == (SERVICES + 1) * BACK_ENDS
    assert used_bytes / SERVICES < BYTES_MAX


def take(catalogue: Catalogue, number: int) -> None:
    """Have the catalogue take a service whose back ends are on as many nodes."""
    name = f"service-{number}"
    ends = [
        endpoint(f"10.7.{number % 250}.{index}", node=f"node-{(number + index) % 200}", ready=True)
        for index in range(1, BACK_ENDS + 1)
    ]
    vip = f"10.96.{number // 250}.{number % 250 + 1}"
    for document in (service(name, [vip]), slice_of(name, ends)):
        catalogue.apply(StoreEvent(stored(document), 1))
    catalogue.take_change()


@pytest.mark.parametrize("document", [service(), slice_of(endpoints=[endpoint("10.7.0.1")])])
def test_what_waits_to_be_taken_in_is_kept_encoded(document: Mapping[str, Any]) -> None:
    one, fault = read_object(stored(document))
    assert not fault
    assert isinstance(one.document, PackedDocument)
    assert dict(one.document) == document
    decode = decode_service if document["kind"] == "Service" else decode_slice
    assert decode(one) == decode(stored(document))
