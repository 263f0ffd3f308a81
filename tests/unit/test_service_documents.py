"""Services and slices that people apply: what is accepted is carried out, and everything else is refused by name."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from podwire.control.documents.kinds import decode
from podwire.model.errors import InvalidRequest
from tests.unit.service_objects import endpoint, service, slice_of

Change = Callable[[dict[str, Any]], object]


def test_what_is_carried_out_is_accepted() -> None:
    decode(
        service(
            addresses=["10.96.0.10", "fd96::10"],
            ports=[
                {"name": "a", "port": 80, "targetPort": "web"},
                {"name": "b", "port": 53, "protocol": "UDP"},
                {"name": "c", "port": 53, "protocol": "SCTP", "targetPort": 53},
                {"name": "d", "port": 54, "protocol": "SCTP"},
            ],
            type="ClusterIP",
            clusterIP="10.96.0.10",
            sessionAffinity="None",
            internalTrafficPolicy="Local",
            externalIPs=["203.0.113.5", "2001:db8::5"],
            externalTrafficPolicy="Local",
            selector={"app": "web", "example.com/tier": ""},
            trafficDistribution="PreferSameNode",
            publishNotReadyAddresses=True,
        )
    )  # fmt: skip
    ends = [endpoint("10.7.0.1", node="n1", ready=True, serving=True, terminating=False)]
    decode(slice_of(endpoints=ends))


SERVICES: dict[str, tuple[Change, str]] = {
    "selector": (lambda spec: spec.update(selector={"app": 1}), "spec.selector.app is 1, not text"),
    "selector-key": (lambda spec: spec.update(selector={"cni:app": "a"}), "not a label key"),
    "selector-name": (
        lambda spec: spec.update(selector={"podwire.io/name": "a"}),
        "is no label of pods' identities",
    ),
    "target": (
        lambda spec: spec.update(ports=[{"port": 80, "targetPort": "8080"}]),
        "not a port's",
    ),
    "target-0": (
        lambda spec: spec.update(ports=[{"port": 80, "targetPort": 0}]),
        "not from 1 to 65535",
    ),
    "zones": (
        lambda spec: spec.update(selector={"app": "a"}, trafficDistribution="PreferClose"),
        "asks for zones",
    ),
    "distribution-of-slices": (
        lambda spec: spec.update(trafficDistribution="PreferSameNode"),
        "write hints into the EndpointSlices",
    ),
    "headless": (lambda spec: spec.update(clusterIPs=["None"]), "not an address"),
    "external": (lambda spec: spec.update(externalIPs=["192.0.2.999"]), "not an address"),
    "external-loopback": (lambda spec: spec.update(externalIPs=["127.0.0.1"]), "no packet can be"),
    "balancer": (lambda spec: spec.update(loadBalancerIP="192.0.2.9"), "write externalIPs"),
    "affinity": (lambda spec: spec.update(sessionAffinity="Cookie"), "not one of"),
    "affinity-too-long": (
        lambda spec: spec.update(
            sessionAffinity="ClientIP",
            sessionAffinityConfig={"clientIP": {"timeoutSeconds": 86401}},
        ),
        "not from 1 to 86400",
    ),
    "affinity-without": (
        lambda spec: spec.update(sessionAffinityConfig={"clientIP": {"timeoutSeconds": 5}}),
        "sessionAffinity is not ClientIP",
    ),
    "type": (lambda spec: spec.update(type="NodePort"), "not one of ClusterIP"),
    "unknown": (lambda spec: spec.update(colour="red"), "spec.colour is an unknown field"),
    "no-address": (lambda spec: spec.pop("clusterIPs"), "podwire chooses no addresses"),
    "no-such-address": (lambda spec: spec.update(clusterIPs=["10.96.0.300"]), "not an address"),
    "loopback": (lambda spec: spec.update(clusterIPs=["127.0.0.1"]), "no packet can be sent to"),
    "this-network": (lambda spec: spec.update(clusterIPs=["0.1.2.3"]), "no packet can be sent to"),
    "zone": (lambda spec: spec.update(clusterIPs=["fd96::1%eth0"]), "no packet can be sent to"),
    "two-of-one-family": (
        lambda spec: spec.update(clusterIPs=["10.96.0.1", "10.96.0.2"]),
        "two addresses of one family",
    ),
    "other-first": (lambda spec: spec.update(clusterIP="10.96.0.9"), "not the first of clusterIPs"),
    "no-ports": (lambda spec: spec.update(ports=[]), "has 0 ports"),
    "too-many-ports": (
        lambda spec: spec.update(ports=[{"name": f"p{i}", "port": i} for i in range(1, 1002)]),
        "has 1001 ports",
    ),
    "port-twice": (
        lambda spec: spec.update(ports=[{"name": "a", "port": 80}, {"name": "b", "port": 80}]),
        "is there twice",
    ),
    "port-without-name": (
        lambda spec: spec.update(ports=[{"port": 80}, {"name": "b", "port": 81}]),
        "with several ports each has one",
    ),
    "port-0": (lambda spec: spec.update(ports=[{"port": 0}]), "not from 1 to 65535"),
    "no-port": (lambda spec: spec.update(ports=[{"name": "a"}]), "port is missing"),
    "protocol": (
        lambda spec: spec.update(ports=[{"port": 1, "protocol": "DCCP"}]),
        "not one of TCP",
    ),
    "sctp-with-another-port": (
        lambda spec: spec.update(ports=[{"port": 1, "protocol": "SCTP", "targetPort": 2}]),
        "targetPort is 2, not the port",
    ),
    "sctp-with-a-name": (
        lambda spec: spec.update(ports=[{"port": 1, "protocol": "SCTP", "targetPort": "s"}]),
        "no ports of SCTP",
    ),
}


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_that_is_not_carried_out_is_refused(name: str) -> None:
    change, words = SERVICES[name]
    document = copy.deepcopy(service())
    change(document["spec"])
    with pytest.raises(InvalidRequest, match=words):
        decode(document)


SLICES: dict[str, tuple[Change, str]] = {
    "no-service": (lambda one: one["metadata"].pop("labels"), "it names the service"),
    "fqdn": (lambda one: one.update(addressType="FQDN"), "not one of IPv4, IPv6"),
    "other-family": (
        lambda one: one.update(endpoints=[endpoint("fd07::1")]),
        "not of the slice's addressType",
    ),
    "loopback": (lambda one: one.update(endpoints=[endpoint("127.0.0.1")]), "no packet can be"),
    "no-addresses": (lambda one: one.update(endpoints=[{"addresses": []}]), "addresses is missing"),
    "condition": (
        lambda one: one.update(endpoints=[endpoint("10.7.0.1", ready="yes")]),
        "not true or false",
    ),
    "unknown": (lambda one: one.update(endpoints=[{"address": "10.7.0.1"}]), "is an unknown field"),
    "no-port": (lambda one: one.update(ports=[{"name": "a"}]), "port is missing"),
    "too-many": (
        lambda one: one.update(endpoints=[endpoint("10.7.0.1")] * 1001),
        "more than 1000",
    ),
}


@pytest.mark.parametrize("name", SLICES)
def test_a_slice_that_is_not_carried_out_is_refused(name: str) -> None:
    change, words = SLICES[name]
    document = copy.deepcopy(slice_of())
    change(document)
    with pytest.raises(InvalidRequest, match=words):
        decode(document)
