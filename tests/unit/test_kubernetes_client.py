"""What becomes of requests when a server is overloaded, answers oddly or ends connections."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from aiohttp import web

from podwire.model.errors import Unavailable
from podwire.store.kubernetes.api.access import Access
from podwire.store.kubernetes.api.client import Client, Request
from podwire.store.kubernetes.api.refusals import Intent, Refused
from podwire.store.kubernetes.api.resources import EVERYTHING, find_resource
from podwire.store.kubernetes.listing import list_pages

NODES = find_resource("nodes")
GET = Request(Intent("get", NODES, "a"), "GET", "/a")
PUT = Request(Intent("update", NODES, "a"), "PUT", "/a", b"{}")
LINES = Request(Intent("watch", NODES), "GET", "/a")

SILENT_S = 2.0
"""Longer than any deadline that a test gives beside it."""

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def status(code: int, **headers: str) -> Answer:
    async def answer(_request: web.Request) -> web.StreamResponse:
        return web.json_response({"kind": "Status", "code": code}, status=code, headers=headers)

    return answer


def body(text: str) -> Answer:
    async def answer(_request: web.Request) -> web.StreamResponse:
        return web.Response(text=text)

    return answer


async def silence(_request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(SILENT_S)
    return web.Response()


async def goodbye(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


def ask(
    answers: Sequence[Answer], work: Callable[[Client], Awaitable[Any]], deadline_s: float = 60.0
) -> tuple[Any, list[web.Request]]:
    """Do something with a client whose server gives answers in turn; gives what came out, and the requests."""
    asked: list[web.Request] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(request)
        return await answers[len(asked) - 1](request)

    async def run() -> Any:
        server = web.Application()
        server.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(server, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        access = Access(f"http://127.0.0.1:{port}", "as nobody", is_insecure=True)
        client = Client(access, name="n1", deadline_s=deadline_s)
        try:
            return await work(client)
        finally:
            await runner.cleanup()
            await client.close()

    return asyncio.run(run()), asked


@pytest.mark.parametrize("code", [429, 503])
def test_an_overloaded_server_is_asked_again_when_it_says(code: int) -> None:
    began_s = time.monotonic()
    answers = [status(code, **{"Retry-After": "1"}), status(code), body("done")]
    done, asked = ask(answers, lambda client: client.call(PUT))
    assert done == b"done"
    assert len(asked) == 3
    assert time.monotonic() - began_s >= 1.0
    assert "(n1)" in asked[0].headers["User-Agent"]


def test_it_is_not_waited_for_longer_than_the_deadline() -> None:
    async def work(client: Client) -> Refused:
        with pytest.raises(Refused) as caught:
            await client.call(GET)
        return caught.value

    refused, asked = ask([status(429, **{"Retry-After": "900"})], work)
    assert refused.retry_after_s == 900.0
    assert len(asked) == 1


@pytest.mark.parametrize("code", [307, 400, 404, 409, 500])
def test_other_answers_are_final(code: int) -> None:
    async def work(client: Client) -> None:
        with pytest.raises(Refused):
            await client.call(GET)

    assert len(ask([status(code, Location="/b")], work)[1]) == 1


def test_a_read_is_repeated_after_a_lost_connection_and_a_write_is_not() -> None:
    assert ask([goodbye, body("x")], lambda client: client.call(GET))[0] == b"x"

    async def work(client: Client) -> None:
        await client.call(GET)
        with pytest.raises(Unavailable, match="ended the connection"):
            await client.call(Request(Intent("create", NODES), "POST", "/", b"{}"))

    assert len(ask([body("x"), goodbye], work)[1]) == 2


def test_while_a_server_hangs_one_request_waits_and_others_fail_at_once() -> None:
    for attempts_left in (4, 3, 2, 1, 0):  # one of them is not held up by the machine
        try:
            hang_and_come_back()
            return
        except (Exception, pytest.fail.Exception):
            if not attempts_left:
                raise


def hang_and_come_back() -> None:
    async def work(client: Client) -> list[float]:
        waited_s = []
        for _ in range(3):
            began_s = time.monotonic()
            with pytest.raises(Unavailable, match=r"within 0\.5 s"):
                await client.call(GET)
            waited_s.append(time.monotonic() - began_s)
        await asyncio.sleep(1.0)  # until one is let through
        assert await client.call(GET) == b"back"
        assert await client.call(GET) == b"again"
        return waited_s

    waited_s, asked = ask([silence, body("back"), body("again")], work, deadline_s=0.5)
    assert waited_s[0] >= 0.5 > min(waited_s[1:])
    assert len(asked) == 3


def test_lines_of_a_watch_are_whole_however_they_arrive() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for part in (b'{"a"', b":1}\n{", b'"b":2}\n\n{"c"', b":3}\n", b'{"cut'):
            await response.write(part)
            await asyncio.sleep(0.01)
        return response

    async def work(client: Client) -> list[bytes]:
        async with client.stream(LINES) as lines:
            return [line async for line in lines]

    assert ask([answer], work)[0] == [b'{"a":1}', b'{"b":2}', b'{"c":3}']


PAGES = {
    "one": '{"metadata": {"resourceVersion": "7"}, "items": [1]}',
    "first": '{"metadata": {"resourceVersion": "7", "continue": "x"}, "items": [1, 2]}',
    "last": '{"metadata": {"resourceVersion": "7"}, "items": [3]}',
    "none": '{"metadata": {"resourceVersion": "7"}, "items": null}',
}
EXPIRED = status(410)


@pytest.mark.parametrize(
    ("answers", "count", "queries"),
    [
        ([body(PAGES["one"])], 1, [{"limit": "500"}]),
        ([body(PAGES["none"])], 0, [{"limit": "500"}]),
        (
            [body(PAGES["first"]), body(PAGES["last"])],
            3,
            [{"limit": "500"}, {"limit": "500", "continue": "x"}],
        ),
        (
            [body(PAGES["first"]), EXPIRED, body(PAGES["one"])],
            1,
            [{"limit": "500"}, {"limit": "500", "continue": "x"}, {"limit": "500"}],
        ),
    ],
    ids=["one page", "nothing", "two pages", "forgotten between two pages"],
)
def test_lists_are_whole(
    answers: Sequence[Answer], count: int, queries: list[dict[str, str]]
) -> None:
    (found, revision), asked = ask(
        answers, lambda client: list_pages(client, NODES, EVERYTHING, None)
    )
    assert (len(found), revision) == (count, 7)
    assert [dict(question.query) for question in asked] == queries


@pytest.mark.parametrize(
    ("at_least", "query"),
    [
        (0, {"limit": "500", "resourceVersion": "0"}),
        (5, {"limit": "500", "resourceVersion": "5", "resourceVersionMatch": "NotOlderThan"}),
    ],
)
def test_a_list_may_come_from_the_servers_memory(at_least: int, query: dict[str, str]) -> None:
    _, asked = ask(
        [body(PAGES["one"])], lambda client: list_pages(client, NODES, EVERYTHING, None, at_least)
    )
    assert dict(asked[0].query) == query


def test_a_server_that_is_behind_is_asked_for_what_there_is() -> None:
    async def behind(_request: web.Request) -> web.StreamResponse:
        causes = [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]
        told = {"kind": "Status", "code": 504, "reason": "Timeout", "details": {"causes": causes}}
        return web.json_response(told, status=504)

    _, asked = ask(
        [behind, body(PAGES["one"])], lambda client: list_pages(client, NODES, EVERYTHING, None, 5)
    )
    assert [dict(question.query).get("resourceVersion") for question in asked] == ["5", None]


def test_what_is_no_api_server_is_named() -> None:
    async def work(client: Client) -> None:
        with pytest.raises(Unavailable, match="no Kubernetes API"):
            await list_pages(client, NODES, EVERYTHING)

    ask([body("<html>")], work)
