"""The API over a real socket: shapes of the contract, limits that answer, errors with every fault."""

import asyncio
import contextlib
import json
import os
import socket
import stat
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from podwire.agent.api import routes as rest
from podwire.agent.api import server as api_socket
from podwire.agent.api.context import Api, BuildFacts, MapReaders, NodeReaders, PolicyReaders
from podwire.agent.api.server import ApiServer
from podwire.agent.config_reload import LiveConfig
from podwire.agent.health import Health
from podwire.agent.metrics import Metrics
from podwire.agent.unix_socket import open_unix_socket
from podwire.control.cluster.state import ClusterTotals, KnownNode
from podwire.control.flows.ring import FlowRing
from podwire.control.ipam.interface import Wish
from podwire.model.cluster import NodeFacts
from podwire.model.config.sources import settle
from podwire.model.endpoint import EndpointRecord
from podwire.model.errors import Conflict, Fault, InvalidRequest, NotFound, StorageFailure
from podwire.model.ids import EndpointId
from podwire.model.interfaces import PodNamespace
from tests.fakes.leases import MemoryLeases, leases_of
from tests.fakes.node import FakeNode
from tests.unit.test_attach_service import request
from tests.unit.test_flows import make_flow

NETNS = PodNamespace(fd=-1, path="/run/netns/a", cookie=7)
TEXT = 'node_name = "n1"\nnode_cidrs = ["10.77.0.0/24", "fd77::/64"]\n'


def read_rows(name: str, limit: int) -> tuple[list[dict[str, Any]], bool]:
    if name != "config":
        raise NotFound(f"read map {name!r}: there is no such map")
    return [{"ifindex": 1}][:limit], limit < 1


PEER = KnownNode(
    NodeFacts("n2", "i2", 1, (ip_address("192.0.2.2"),)), "192.0.2.2", ("tunnel",), 1450
)


def make_api(node: FakeNode) -> Api:
    def detach(record: EndpointRecord) -> None:
        node.service.delete(request("DEL", record.key.container_id, at_ns=10**18))

    health = Health(node.clock)
    health.report("journal", ok=True)
    return Api(
        config=LiveConfig(settle(host_name="h", text=TEXT, file_name="f")),
        table=node.table,
        ipam=node.ipam,
        journal=node.journal,
        datapath=node.datapath,
        flows=FlowRing(16),
        health=health,
        metrics=Metrics(),
        clock=node.clock,
        turn=threading.RLock(),
        maps=MapReaders(
            describe=lambda: [{"name": "config", "type": "hash", "max_entries": 8, "entries": 1}],
            rows=read_rows,
        ),
        store=node.store,
        policy=PolicyReaders(
            enforcer=node.enforcer,
            objects=node.policies,
            resolver=node.identities,
            table=node.table,
            identity_at={ip_address("192.0.2.1"): 1}.get,
            hits=dict,
            change_labels=refuse_labels,
            set_audit=refuse_audit,
        ),
        facts=BuildFacts("abc", 1),
        nodes=NodeReaders(
            list_nodes=lambda: [PEER],
            totals=lambda: ClusterTotals(routing="auto", nodes=1, reached=1, pods=3, heard=True),
            addresses=("192.0.2.1",),
            pod_mtu=lambda: 1450,
            list_encrypted=lambda: node.encrypted,
        ),
        detach=detach,
        started_boottime_ns=0,
    )


def refuse_labels(_endpoint_id: EndpointId, _changes: list[str]) -> EndpointRecord:
    raise Conflict("change labels: somebody else did")


def refuse_audit(endpoint_id: EndpointId, _audit: bool | None) -> EndpointRecord:
    raise NotFound(f"change endpoint {endpoint_id}: there is none")


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Served:
    path: Path
    api: Api
    node: FakeNode

    async def send(self, raw: bytes) -> Answer:
        reader, writer = await asyncio.open_unix_connection(self.path)
        try:
            writer.write(raw)
            return await read_answer(reader)
        finally:
            writer.close()
            await writer.wait_closed()

    async def ask(self, method: str, path: str, body: bytes = b"") -> Answer:
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        return await self.send(head.encode() + body)

    async def get(self, path: str) -> Answer:
        return await self.ask("GET", "/v1" + path)


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    async with asyncio.timeout(60):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        status, *lines = head.strip().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        length = int(headers.get("content-length", "0"))
        body = await reader.readexactly(length)
    return Answer(int(status.split()[1]), headers, body)


@contextlib.asynccontextmanager
async def serving(directory: Path, node: FakeNode, **parts: Any) -> AsyncIterator[Served]:
    """Serve the API of a node, some of whose parts are others."""
    path = directory / "api.sock"
    api = replace(make_api(node), **parts)
    async with ApiServer(api).serving(open_unix_socket(path), path):
        yield Served(path, api, node)
    assert not path.exists()


@pytest.fixture
async def served(tmp_path: Path, node: FakeNode) -> AsyncIterator[Served]:
    async with serving(tmp_path, node) as api:
        yield api


async def test_the_socket_is_for_root_alone(served: Served) -> None:
    assert stat.S_IMODE(os.stat(served.path).st_mode) == 0o600
    assert (await served.get("/healthz")).json == {"ready": True, "failing": []}


def test_the_socket_is_closed_to_others_before_it_can_be_connected_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "api.sock"
    modes: list[int] = []
    listen = socket.socket.listen

    def watched(self: socket.socket, backlog: int) -> None:
        modes.append(stat.S_IMODE(os.stat(path).st_mode))
        listen(self, backlog)

    monkeypatch.setattr(socket.socket, "listen", watched)
    open_unix_socket(path).close()
    assert modes == [0o600]


def test_a_stale_socket_is_replaced_and_a_foreign_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    open_unix_socket(path).close()
    open_unix_socket(path).close()
    path.unlink()
    path.write_text("mine")
    with pytest.raises(StorageFailure, match="not a socket has its name"):
        open_unix_socket(path)
    assert path.read_text() == "mine"


async def test_an_endpoint_is_shown_with_every_field_of_the_contract(served: Served) -> None:
    served.node.service.add(request(pod="web", labels=("cni:app=web",)), NETNS)
    [shown] = (await served.get("/endpoint")).json
    assert {
        *("id", "state", "containerId", "ifName", "namespace", "pod", "identity", "labels"),
        *("ipv4", "ipv6", "addresses", "hostInterface", "policyRevision", "policyEnforcement"),
    } <= set(shown)
    assert shown["state"] == "ready"
    assert shown["addresses"] == [shown["ipv4"], shown["ipv6"]]
    assert shown["policyEnforcement"] == {"ingress": "disabled", "egress": "disabled"}
    assert shown["identity"] >= 65536
    assert "cni:app=web" in shown["labels"]


ID_FORMS = [
    "{id}",
    "cni-attachment-id:c1",
    "cni-attachment-id:c1:eth0",
    "container-id:c1",
    "pod-name:default/web",
    "pod-name:default%2Fweb",
    "ipv4:{ipv4}",
    "ipv6:{ipv6}",
]


@pytest.mark.parametrize("form", ID_FORMS)
@pytest.mark.parametrize("rest_of_path", ["", "/log", "/healthz", "/labels"])
async def test_every_form_of_id_finds_the_endpoint(
    served: Served, form: str, rest_of_path: str
) -> None:
    served.node.service.add(request(pod="web"), NETNS)
    served.node.service.add(request(container="c2", pod="other"), NETNS)
    [record, _] = served.node.journal.list_records()
    text = form.format(id=record.id, ipv4=record.ipv4, ipv6=record.ipv6)
    answer = await served.get(f"/endpoint/{text}{rest_of_path}")
    assert answer.status == 200
    if not rest_of_path:
        assert answer.json["containerId"] == "c1"


BAD_IDS = {
    "number of none": ("99", 404),
    "no form": ("web", 400),
    "unknown form": ("uid:1", 400),
    "empty": ("container-id:", 400),
    "no address": ("ipv4:web", 400),
    "address of none": ("ipv6:fd77::99", 404),
    "pod of none": ("pod-name:default/none", 404),
    "several": ("container-id:two", 409),
    "digits of another script": ("%D9%A1", 400),
}


@pytest.mark.parametrize(("text", "status"), BAD_IDS.values(), ids=BAD_IDS.keys())
async def test_a_bad_id_is_told_apart_from_an_absent_one(
    served: Served, text: str, status: int
) -> None:
    for name in ("eth0", "eth1"):
        record = request(container="two")
        key = record.key
        assert key is not None
        other = type(key)(key.network, key.container_id, type(key.if_name)(name))
        served.node.service.add(request(container="two", key=other), NETNS)
    answer = await served.get(f"/endpoint/{text}")
    assert answer.status == status
    assert set(answer.json["error"]) == {"code", "message", "hint", "faults"}


@pytest.mark.parametrize("slash", ["/", "%2F"])
async def test_a_pod_may_be_called_like_a_part_of_the_api(served: Served, slash: str) -> None:
    served.node.service.add(request(pod="log"), NETNS)
    shown = (await served.get(f"/endpoint/pod-name:default{slash}log")).json
    assert shown["pod"] == "log"
    assert isinstance((await served.get(f"/endpoint/pod-name:default{slash}log/log")).json, list)


async def test_the_newest_pod_owns_the_name(served: Served) -> None:
    served.node.service.add(request(pod="web"), NETNS)
    served.node.service.add(request(container="c2", pod="web"), NETNS)
    assert (await served.get("/endpoint/pod-name:default/web")).json["containerId"] == "c2"


async def test_deleting_an_endpoint_ends_it_and_a_second_time_is_success(served: Served) -> None:
    served.node.service.add(request(), NETNS)
    for _ in range(2):
        assert (await served.ask("DELETE", "/v1/endpoint/container-id:c1")).status == 204
    assert (await served.get("/endpoint")).json[0]["state"] == "disconnecting"
    served.node.service.settle()
    assert (await served.get("/endpoint")).json == []


async def test_endpoint_health_names_what_differs(served: Served) -> None:
    served.node.service.add(request(), NETNS)
    [record] = served.node.journal.list_records()
    served.node.datapath.rows.clear()
    shown = (await served.get(f"/endpoint/{record.id}/healthz")).json
    assert (shown["ok"], shown["state"], shown["differences"]) == (False, "ready", ["row differs"])


async def test_the_log_of_an_endpoint_has_times_states_and_causes(served: Served) -> None:
    served.node.service.add(request(), NETNS)
    entries = (await served.get("/endpoint/container-id:c1/log")).json
    assert [entry["new"] for entry in entries] == [
        *("waiting-for-identity", "waiting-to-regenerate", "regenerating", "ready")
    ]
    assert all(entry["time"].endswith("Z") and entry["cause"] for entry in entries)


async def test_status_has_every_field_of_the_contract(served: Served) -> None:
    served.node.service.add(request(), NETNS)
    status = (await served.get("/status")).json
    assert (status["ready"], status["node"]) == (True, "n1")
    assert set(status["store"]) == {"kind", "ok"}
    assert {"mode", "programs"} <= set(status["datapath"])
    assert status["endpoints"] == {"total": 1, "byState": {"ready": 1}}
    assert [one["used"] for one in status["ipam"]["ranges"]] == [1, 1]
    assert {"version", "warnings"} <= set(status)


async def test_an_agent_that_is_not_ready_answers_503_with_the_reason(served: Served) -> None:
    served.api.health.report("journal", ok=False, message="disk full")
    answer = await served.get("/healthz")
    assert answer.status == 503
    assert "disk full" in answer.json["error"]["message"]
    assert answer.headers["retry-after"] == "1"
    assert (await served.get("/status")).json["ready"] is False


async def test_settings_are_shown_with_their_source(served: Served) -> None:
    settings = (await served.get("/config")).json["settings"]
    assert settings["node_name"] == {"value": "n1", "source": "file f", "reloadable": False}
    assert settings["node_cidrs"]["value"] == ["10.77.0.0/24", "fd77::/64"]


async def test_a_reloadable_setting_is_changed_and_its_effect_runs(served: Served) -> None:
    applied: list[bool] = []
    served.api.config.apply_with("masquerade", lambda new: applied.append(new.datapath.masquerade))
    answer = await served.ask("PATCH", "/v1/config", b'{"masquerade": false}')
    assert answer.json["settings"]["masquerade"]["value"] is False
    assert applied == [False]


async def test_a_refused_change_names_every_fault_and_changes_nothing(served: Served) -> None:
    before = (await served.get("/config")).json
    body = b'{"masquerade": false, "mtu": 1400, "bogus": 1, "policy_enforcement": "maybe"}'
    answer = await served.ask("PATCH", "/v1/config", body)
    assert answer.status == 400
    faults = {fault["path"]: fault["message"] for fault in answer.json["error"]["faults"]}
    assert set(faults) == {"mtu", "bogus", "policy_enforcement"}
    assert "needs a restart" in faults["mtu"]
    assert "always" in faults["policy_enforcement"]
    assert (await served.get("/config")).json == before


async def test_ipam_shows_ranges_and_who_has_what(served: Served) -> None:
    served.node.service.add(request(pod="web"), NETNS)
    shown = (await served.get("/ipam")).json
    assert shown["mode"] == "node"
    assert [allocation["owner"] for allocation in shown["allocations"]] == ["default/web"] * 2
    assert [one["capacity"] - one["free"] for one in shown["ranges"]] == [1, 1]


async def test_ipam_check_finds_an_address_that_nobody_has_and_release_lets_it_go(
    served: Served,
) -> None:
    served.node.service.add(request(), NETNS)
    assert (await served.get("/ipam/check")).json["ok"] is True
    leaked, _ = served.node.ipam.take(EndpointId(99), Wish())
    check = (await served.get("/ipam/check")).json
    assert check["ok"] is False
    assert {fault["ip"] for fault in check["faults"] if fault["releasable"]} >= {str(leaked)}
    assert (await served.ask("DELETE", f"/v1/ipam/{leaked}")).status == 204
    assert (await served.ask("DELETE", f"/v1/ipam/{leaked}")).status == 404
    assert (await served.get("/ipam/check")).json["ok"] is True


async def test_an_address_of_a_living_endpoint_is_not_released(served: Served) -> None:
    served.node.service.add(request(), NETNS)
    [record] = served.node.journal.list_records()
    answer = await served.ask("DELETE", f"/v1/ipam/{record.ipv4}")
    assert (answer.status, answer.json["error"]["code"]) == (409, "conflict")
    assert (await served.ask("DELETE", "/v1/ipam/web")).status == 400


async def test_maps_are_listed_and_read(served: Served) -> None:
    assert (await served.get("/map")).json[0]["name"] == "config"
    assert (await served.get("/map/config")).json["rows"] == [{"ifindex": 1}]
    assert (await served.get("/map/config?limit=0")).json["truncated"] is True
    assert (await served.get("/map/nothing")).status == 404


async def test_identities_node_and_metrics(served: Served) -> None:
    identities = (await served.get("/identity")).json
    assert (identities[0]["id"], identities[0]["labels"]) == (1, ["reserved:host"])
    assert (await served.get("/identity/2")).json["labels"] == ["reserved:world"]
    assert (await served.get("/identity/77")).status == 404
    own, peer = (await served.get("/node")).json
    assert own["podCidrs"] == ["10.77.0.0/24", "fd77::/64"]
    assert (own["mtu"], own["ways"], own["addresses"]) == (1450, ["local"], ["192.0.2.1"])
    assert (peer["name"], peer["outer"], peer["alive"]) == ("n2", "192.0.2.2", False)
    assert peer["encrypted"] is False
    assert (await served.get("/status")).json["cluster"]["encrypted"] == 0
    served.node.encrypted = frozenset({"192.0.2.2"})
    assert (await served.get("/node")).json[1]["encrypted"] is True
    assert (await served.get("/status")).json["cluster"]["encrypted"] == 1
    leases_of(served.node.store).acquire("node/n2", "x", 10)
    assert (await served.get("/node")).json[1]["alive"] is True
    leases = served.node.store.leases()
    assert isinstance(leases, MemoryLeases)
    leases.away = True
    assert (await served.get("/node")).json[1]["alive"] is None
    assert b"podwire_api_request_seconds" in (await served.get("/metrics")).body


REFUSED = {
    "unknown path": ("GET", "/v1/nothing", b"", 404, "not-found"),
    "without prefix": ("GET", "/status", b"", 404, "not-found"),
    "method": ("PUT", "/v1/status", b"", 405, "method"),
    "unknown parameter": ("GET", "/v1/status?x=1", b"", 400, "invalid"),
    "wrong parameter": ("GET", "/v1/map/config?limit=many", b"", 400, "invalid"),
    "parameter twice": ("GET", "/v1/map/config?limit=1&limit=2", b"", 400, "invalid"),
    "wrong filter": ("GET", "/v1/flows?verdict=maybe", b"", 400, "decode"),
    "no JSON": ("PATCH", "/v1/config", b"{", 400, "decode"),
    "not an object": ("PATCH", "/v1/config", b"[]", 400, "decode"),
    "no UTF-8": ("PATCH", "/v1/config", b'{"log_level": "\xff"}', 400, "decode"),
    "no body": ("PATCH", "/v1/config", b"", 400, "decode"),
    "deep": ("PATCH", "/v1/config", b"[" * 100_000, 400, "decode"),
    "too large": ("PATCH", "/v1/config", b" " * (17 << 20), 413, "too-large"),
}


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"), REFUSED.values(), ids=REFUSED.keys()
)
async def test_a_bad_request_is_answered_in_the_form_of_the_contract(
    served: Served, method: str, path: str, body: bytes, status: int, code: str
) -> None:
    answer = await served.ask(method, path, body)
    assert (answer.status, answer.json["error"]["code"]) == (status, code)
    assert answer.headers["content-type"] == "application/json"
    assert (await served.get("/healthz")).status == 200


async def test_a_head_that_does_not_come_is_answered_and_closed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_socket, "HEAD_TIMEOUT_S", 0.05)
    for raw in (b"", b"GET /v1/status HTTP/1.1\r\nHost:"):
        answer = await served.send(raw)
        assert (answer.status, answer.json["error"]["code"]) == (408, "timeout")


async def test_a_body_that_does_not_come_is_answered(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_socket, "BODY_TIMEOUT_S", 0.05)
    head = b"PATCH /v1/config HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
    assert (await served.send(head)).status == 408


async def test_a_handler_that_waits_too_long_is_answered(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_socket, "HANDLER_TIMEOUT_S", 0.05)
    served.api.turn.acquire()
    try:
        answer = await served.get("/ipam/check")
    finally:
        served.api.turn.release()
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")


async def test_requests_over_the_limit_are_told_to_come_back(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_socket, "IN_FLIGHT_MAX", 2)
    served.api.turn.acquire()
    try:
        waiting = [asyncio.create_task(served.get("/ipam/check")) for _ in range(2)]
        async with asyncio.timeout(60):
            while (answer := await served.get("/healthz")).status == 200:
                pass
    finally:
        served.api.turn.release()
    assert (answer.status, answer.headers["retry-after"]) == (429, "1")
    assert [one.status for one in await asyncio.gather(*waiting)] == [200, 200]
    assert (await served.get("/healthz")).status == 200


async def test_connections_over_the_limit_are_told_to_come_back(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_socket, "CONNECTIONS_MAX", 1)
    reader, writer = await asyncio.open_unix_connection(served.path)
    writer.write(b"GET /v1/healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await read_answer(reader)).status == 200
    assert (await served.get("/healthz")).status == 429
    writer.close()
    await writer.wait_closed()
    async with asyncio.timeout(60):
        while (await served.get("/healthz")).status != 200:
            pass


async def read_line(reader: asyncio.StreamReader) -> bytes:
    """One line of a chunked answer: each chunk is a line here."""
    async with asyncio.timeout(60):
        size = int(await reader.readline(), 16)
        line = await reader.readexactly(size)
        await reader.readline()
    return line


async def read_flow(reader: asyncio.StreamReader) -> Any:
    """The next flow; where none came for a while the line is empty."""
    while not (line := await read_line(reader)).strip():
        pass
    return json.loads(line)


@contextlib.asynccontextmanager
async def following(served: Served, query: str) -> AsyncIterator[asyncio.StreamReader]:
    reader, writer = await asyncio.open_unix_connection(served.path)
    try:
        writer.write(f"GET /v1/flows?follow=1{query} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        async with asyncio.timeout(60):
            await reader.readuntil(b"\r\n\r\n")
        yield reader
    finally:
        writer.close()
        await writer.wait_closed()


async def test_past_flows_are_json_lines_and_filtered(served: Served) -> None:
    for size in range(3):
        served.api.flows.append(make_flow(length_bytes=size))
    reader, writer = await asyncio.open_unix_connection(served.path)
    writer.write(b"GET /v1/flows?last=2&to=db HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    async with asyncio.timeout(60):
        raw = await reader.read()
    writer.close()
    lines = [json.loads(line) for line in raw.splitlines() if line.startswith(b"{")]
    assert [line["bytes"] for line in lines] == [1, 2]


async def test_a_follower_gets_past_and_new_flows_and_is_forgotten_when_it_goes(
    served: Served,
) -> None:
    served.api.flows.append(make_flow(length_bytes=1))
    async with following(served, "&last=1") as reader:
        assert (await read_flow(reader))["bytes"] == 1
        assert len(served.api.flows._followers) == 1
        served.api.flows.append(make_flow(length_bytes=2))
        assert (await read_flow(reader))["bytes"] == 2
    async with asyncio.timeout(60):
        while served.api.flows._followers:
            served.api.flows.append(make_flow())
            await asyncio.sleep(0)


async def test_followers_over_the_limit_are_told_to_come_back(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_socket, "FOLLOWERS_MAX", 1)
    async with following(served, ""):
        assert (await served.get("/flows?follow=1")).status == 429
        assert (await served.get("/healthz")).status == 200


async def test_a_stopping_agent_ends_its_followers(tmp_path: Path, node: FakeNode) -> None:
    path = tmp_path / "api.sock"
    api = make_api(node)
    async with ApiServer(api).serving(open_unix_socket(path), path):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"GET /v1/flows?follow=1 HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
    async with asyncio.timeout(60):
        await reader.read()
    writer.close()
    assert not api.flows._followers


async def test_the_description_covers_every_operation_and_its_types(served: Served) -> None:
    document = (await served.get("/openapi.json")).json
    assert document["openapi"] == "3.1.0"
    described = {
        (method.upper(), path) for path, item in document["paths"].items() for method in item
    }
    assert described == {(route.method, "/v1" + route.path) for route in rest.ROUTES}
    text = json.dumps(document)
    for reference in set(text.split('"#/components/schemas/')[1:]):
        assert reference.partition('"')[0] in document["components"]["schemas"]
    shown = document["components"]["schemas"]["EndpointView"]["properties"]
    assert "hostInterface" in shown
    identifiers = [
        operation["operationId"]
        for item in document["paths"].values()
        for operation in item.values()
    ]
    assert len(set(identifiers)) == len(identifiers)


def test_an_error_without_a_class_of_ours_is_a_bug_without_its_details_lost() -> None:
    status, body = rest.error_answer(RuntimeError("boom"))
    assert (status, body.error.code) == (500, "bug")
    assert "boom" in body.error.message


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequest("x", faults=(Fault("a", "b"),)), 400),
        (NotFound("x"), 404),
        (Conflict("x"), 409),
        (StorageFailure("x"), 507),
    ],
)
def test_every_error_has_its_status(error: Exception, status: int) -> None:
    found, body = rest.error_answer(error)
    assert found == status
    assert [fault.path for fault in body.error.faults] == (["a"] if status == 400 else [])
