"""The API's door: HTTP on a unix socket that only root can reach, with limits, so that no request hangs.

Opened by `agent.main`; serves `agent.api.routes`'s table and decides nothing. Limits: a request's head and body have a
time limit and a size limit, and there is a maximum number of requests and connections. A caller beyond a limit gets
408, 413 or 429 with Retry-After. The socket is closed to everybody but root before anybody can connect to it, because
bind(2) comes long before listen(2).
"""

import asyncio
import contextlib
import functools
import logging
import os
import socket
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from podwire.agent.api.context import Api
from podwire.agent.api.openapi import PATH_PARTS, PREFIX, Call, Parameter, Route
from podwire.agent.api.routes import ROUTES, error_answer, make_refusal
from podwire.agent.metrics import CONTENT_TYPE, Metrics
from podwire.control.flows.flow import Flow
from podwire.control.flows.flow_filter import FlowFilter
from podwire.model.errors import Fault, InvalidRequest, StorageFailure, UndecodableRequest

BODY_MAX_BYTES = 16 << 20
"""A set of manifests of the largest size that `podwire apply` reads (8 MiB of YAML), as JSON."""
HEAD_TIMEOUT_S = 10.0
BODY_TIMEOUT_S = 10.0
HANDLER_TIMEOUT_S = 30.0
IDLE_TIMEOUT_S = 30.0
IN_FLIGHT_MAX = 64
FOLLOWERS_MAX = 32
CONNECTIONS_MAX = 256
THREADS = 2
RETRY_AFTER_S = 1
FOLLOW_FLUSH_S = 15.0
"""A follower that hears nothing gets an empty line this often, so that a dead one is found."""

_log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


class ApiServer:
    """Serves one agent's API. Everything but the streams is answered by handlers of `agent.api.routes`."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._in_flight = 0
        self._following = 0
        self._silent: dict[RequestHandler, asyncio.TimerHandle] = {}
        """Connections whose first request has not come, and when that is too late."""
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="api")
        self._stopping = asyncio.Event()

    @contextlib.asynccontextmanager
    async def serving(self, listener: socket.socket, path: Path) -> AsyncIterator[None]:
        """Serve `listener` until the block ends; then finish what is in flight, briefly, and remove the path."""
        runner = web.AppRunner(
            self._application(),
            # Without it aiohttp lets a handler run on after its caller has gone.
            handler_cancellation=True,
            keepalive_timeout=IDLE_TIMEOUT_S,
            access_log=None,
            shutdown_timeout=2.0,
        )
        await runner.setup()
        server = runner.server
        assert server is not None
        loop = asyncio.get_running_loop()
        acceptor = await loop.create_unix_server(
            functools.partial(self._accept, server), sock=listener, start_serving=True
        )
        try:
            yield
        finally:
            self._stopping.set()
            acceptor.close()
            for timer in self._silent.values():
                timer.cancel()
            await runner.cleanup()
            # Not waited for: a handler that waits for a store that is away would hold up the agent's stop.
            self._threads.shutdown(wait=False, cancel_futures=True)
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _accept(self, server: web.Server) -> asyncio.Protocol:
        if len(server.connections) >= CONNECTIONS_MAX:
            self._api.metrics.count("refused_requests", ("api", "connections"))
            return _Refusal()
        connection = server()
        loop = asyncio.get_running_loop()
        self._silent[connection] = loop.call_later(HEAD_TIMEOUT_S, self._close_silent, connection)
        return connection

    def _close_silent(self, connection: RequestHandler) -> None:
        """A connection whose first request's head is not complete in time is told so and closed."""
        del self._silent[connection]
        # The peer may have left while the timer was due already.
        if connection.transport is None:
            return
        self._api.metrics.count("refused_requests", ("api", "head"))
        connection.transport.write(
            _raw_answer(408, "read the request: its head did not come in time")
        )
        connection.force_close()

    def _application(self) -> web.Application:
        application = web.Application(middlewares=[self._limited], client_max_size=BODY_MAX_BYTES)
        for route in ROUTES:
            handler = {"/flows": self._flows, "/metrics": self._metrics}.get(
                route.path, functools.partial(self._serve, route)
            )
            application.router.add_route(route.method, PREFIX + _pattern(route.path), handler)
        return application

    @web.middleware
    async def _limited(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Count, limit and time every request; turn every failure into the error body."""
        if (timer := self._silent.pop(request.protocol, None)) is not None:
            timer.cancel()
        begin_s = monotonic()
        response = await self._answer(request, handler)
        self._api.metrics.observe_api(request.method, response.status, monotonic() - begin_s)
        return response

    async def _answer(self, request: web.Request, handler: Any) -> web.StreamResponse:
        # Followers stay for hours and have a limit of their own.
        if self._in_flight - self._following >= IN_FLIGHT_MAX:
            self._api.metrics.count("refused_requests", ("api", "in-flight"))
            return _refuse(429, f"serve the request: {IN_FLIGHT_MAX} are being served")
        self._in_flight += 1
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = _refuse_http(request, error)
        except TimeoutError:
            response = _refuse(503, f"serve the request: not done in {HANDLER_TIMEOUT_S:.0f} s")
        except Exception as error:  # the door: whatever it is, the caller gets an answer
            response = _json(*error_answer(error))
        finally:
            self._in_flight -= 1
        assert isinstance(response, web.StreamResponse)
        return response

    async def _serve(self, route: Route, request: web.Request) -> web.StreamResponse:
        body = await _read_body(request, route)
        call = Call(dict(request.match_info), _read_query(request, route.query), body)
        if route.blocking:
            async with asyncio.timeout(HANDLER_TIMEOUT_S):
                loop = asyncio.get_running_loop()
                answer = await loop.run_in_executor(self._threads, route.handler, self._api, call)
        else:
            answer = route.handler(self._api, call)
        return web.Response(status=204) if route.answer is None else _json(200, answer)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        _read_query(request, ())
        async with asyncio.timeout(HANDLER_TIMEOUT_S):
            loop = asyncio.get_running_loop()
            text = await loop.run_in_executor(self._threads, self._api.metrics.render)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def _flows(self, request: web.Request) -> web.StreamResponse:
        """Send the last flows as JSON lines and, with `follow`, new ones until the caller goes away."""
        route = next(route for route in ROUTES if route.path == "/flows")
        query = _read_query(request, route.query)
        last, wanted = self._api.read_flow_query(query)
        if query.get("follow") and self._following >= FOLLOWERS_MAX:
            self._api.metrics.count("refused_requests", ("api", "followers"))
            return _refuse(429, f"follow flows: {FOLLOWERS_MAX} follow already")
        response = web.StreamResponse(headers={"Content-Type": "application/jsonl"})
        # The ring is read before anything is awaited: no flow falls between the past and the followed.
        past = self._api.flows.last(last, wanted) if last else []
        if not query.get("follow"):
            await response.prepare(request)
            await response.write(_lines(past))
            return response
        await self._follow(request, response, past, wanted)
        return response

    async def _follow(
        self,
        request: web.Request,
        response: web.StreamResponse,
        past: list[Flow],
        wanted: FlowFilter,
    ) -> None:
        wake = asyncio.Event()
        follower = self._api.flows.follow(wanted, wake.set)
        self._following += 1
        try:
            await response.prepare(request)
            await response.write(_lines(past))
            while not self._stopping.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(FOLLOW_FLUSH_S):
                        await self._woken(wake)
                wake.clear()
                # An empty line when nothing came: only a write tells whether the caller is still there.
                await response.write(_lines(follower.take()) or b"\n")
        except ConnectionResetError:
            pass
        finally:
            self._following -= 1
            self._api.flows.leave(follower)

    async def _woken(self, wake: asyncio.Event) -> None:
        waits = [
            asyncio.ensure_future(wake.wait()),
            asyncio.ensure_future(self._stopping.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


@contextlib.asynccontextmanager
async def serving_metrics(listen: str, metrics: Metrics) -> AsyncIterator[None]:
    """Serve `/metrics` alone on a TCP address, for a scraper that has no access to the API socket."""

    async def answer(_request: web.Request) -> web.Response:
        text = await asyncio.get_running_loop().run_in_executor(None, metrics.render)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    # Anybody who reaches the port may ask, so it takes no body and knows one path.
    application = web.Application(client_max_size=0)
    application.router.add_get("/metrics", answer)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        host, _, port = listen.rpartition(":")
        try:
            await web.TCPSite(runner, host.strip("[]"), int(port)).start()
        except OSError as error:
            raise StorageFailure(
                f"listen on {listen!r} for metrics: {error.strerror or error}",
                hint="see the setting metrics_listen",
            ) from error
        yield
    finally:
        await runner.cleanup()


class _Refusal(asyncio.Protocol):
    """What a connection too many gets."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(_raw_answer(429, f"serve: {CONNECTIONS_MAX} connections are open"))
        transport.close()


def _pattern(path: str) -> str:
    for name, (expression, _) in PATH_PARTS.items():
        path = path.replace("{" + name + "}", "{" + name + ":" + expression + "}")
    return path


async def _read_body(request: web.Request, route: Route) -> Any:
    if route.body is None:
        return None
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            raw = await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
    try:
        return msgspec.json.decode(raw, type=route.body)
    # msgspec raises the last one for a document that is nested too deeply.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        message, _, where = str(error).partition(" - at `$")
        fault = Fault(where.strip("`.") or "body", message)
        raise UndecodableRequest(
            f"read the request's body: {error}",
            hint=f"see {PREFIX}/openapi.json",
            faults=(fault,),
        ) from error


def _read_query(request: web.Request, known: tuple[Parameter, ...]) -> Mapping[str, Any]:
    kinds = {parameter.name: parameter.kind for parameter in known}
    query: dict[str, Any] = {}
    faults: list[Fault] = []
    for name, text in request.query.items():
        if name not in kinds or name in query:
            faults.append(
                Fault(name, "comes twice" if name in query else "is not a parameter here")
            )
            continue
        value = _read_parameter(kinds[name], text)
        if value is None:
            faults.append(Fault(name, f"is {text!r}, not {_MEANT[kinds[name]]}"))
        else:
            query[name] = value
    if faults:
        listed = "; ".join(f"{fault.path} {fault.message}" for fault in faults)
        raise InvalidRequest(f"read the query: {listed}", faults=tuple(faults))
    return query


_MEANT = {"integer": "a whole number from 0 to 999999999", "boolean": "true or false"}


def _read_parameter(kind: str, text: str) -> Any:
    if kind == "integer":
        # By itself isdigit takes digits of other scripts, and "²", which int() refuses.
        return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
    if kind == "boolean":
        return {"1": True, "true": True, "0": False, "false": False}.get(text)
    return text


def _lines(flows: list[Flow]) -> bytes:
    return b"".join(_encode(flow) + b"\n" for flow in flows)


def _json(status: int, document: object) -> web.Response:
    headers = {"Content-Type": "application/json"}
    if status in (429, 503):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    return web.Response(status=status, body=_encode(document) + b"\n", headers=headers)


def _refuse(status: int, message: str) -> web.Response:
    return _json(status, make_refusal(status, message))


def _refuse_http(request: web.Request, error: web.HTTPException) -> web.Response:
    """What aiohttp itself refuses: unknown path or method, body too large or too slow."""
    reason = {
        404: f"{PREFIX} has no path {request.path!r}",
        405: f"{request.method} is not possible on {request.path!r}",
        408: f"the body did not come in {BODY_TIMEOUT_S:.0f} s",
        413: f"the body is larger than {BODY_MAX_BYTES} bytes",
    }.get(error.status, error.reason)
    return _refuse(error.status, f"serve the request: {reason}")


def _raw_answer(status: int, message: str) -> bytes:
    """Write a whole answer for a connection that aiohttp does not speak on."""
    body = _encode(make_refusal(status, message)) + b"\n"
    head = (
        f"HTTP/1.1 {status} Refused\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: {RETRY_AFTER_S}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
