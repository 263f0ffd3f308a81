"""Requests to etcd's JSON gateway: the endpoint that works, the deadline, the credentials, and what failures mean.

Used by `store.etcd.cluster` on its loop. Knows nothing of keys. Must never wait longer than the deadline, nor repeat
requests with a password that was refused. Invariant: an answer of etcd comes back as it is (Refused when etcd refuses).
Everything else is Unavailable with each endpoint that was tried, or InvalidConfiguration when waiting cannot help.
"""

import asyncio
import contextlib
import io
import ssl
from collections import deque
from collections.abc import AsyncIterator
from typing import Final, TypeVar

import aiohttp
import msgspec

from podwire.model.errors import (
    InvalidConfiguration,
    InvalidRequest,
    PodwireError,
    StorageFailure,
    Unavailable,
)
from podwire.store.etcd import wire
from podwire.store.etcd.access import StoreAccess, make_context, read_password
from podwire.store.etcd.wire import Body
from podwire.store.sockets import Sockets, is_of_old_connection

DEADLINE_S: Final = 5.0
"""Of one request, whatever it takes: failing over and a new login included."""
_ATTEMPT_MIN_S: Final = 1.0
_REFUSED_FOR_S: Final = 10.0
"""How long a refused login is not tried again: checking a password costs etcd 0.1 s of a core."""
_LARGE_BYTES: Final = 1 << 20
"""What is larger is handed over in parts, between which other requests get their turn."""

_T = TypeVar("_T")
_encode = msgspec.json.Encoder().encode

_PASSING: Final = frozenset(
    {wire.CANCELLED, wire.DEADLINE_EXCEEDED, wire.RESOURCE_EXHAUSTED, wire.UNAVAILABLE}
)
"""Codes that mean: not now, not here."""


class Refused(Exception):
    """etcd's answer is no. `code` is gRPC's."""

    def __init__(self, code: int, reason: str, endpoint: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.endpoint = endpoint

    @property
    def is_full(self) -> bool:
        """Whether its disk, or what it may use of it, is full."""
        return "database space exceeded" in self.reason

    @property
    def is_passing(self) -> bool:
        """Whether it may be otherwise at another endpoint, or soon."""
        return self.code in _PASSING and not self.is_full


class Gateway:
    """Asks one of several endpoints, the same one as long as it works."""

    def __init__(self, endpoints: tuple[str, ...], access: StoreAccess, deadline_s: float) -> None:
        self.endpoints = endpoints
        self.failures = 0
        """Grows when an endpoint fails: what was known of the store before may be wrong."""
        self._access = access
        self._deadline_s = deadline_s
        self._current = 0
        self._sockets = Sockets()
        self._context: ssl.SSLContext | None = None
        self._token = ""
        self._login = asyncio.Lock()
        self._refused: tuple[float, PodwireError] | None = None

    @property
    def where(self) -> str:
        """Name all endpoints, for messages."""
        return ",".join(self.endpoints)

    async def call(self, path: str, body: Body, answer: type[_T]) -> tuple[_T, bool]:
        """Ask; gives the answer, and whether an attempt before may have been carried out unheard."""
        await self._sockets.leave_old_addresses()
        raw = _encode(body)
        now_s = asyncio.get_running_loop().time
        end_s = now_s() + self._deadline_s
        waiting = deque(self._in_order())
        tried: dict[str, Exception] = {}
        is_doubtful = False
        while waiting and (left_s := end_s - now_s()) > 0:
            endpoint = waiting.popleft()
            try:
                # The time that is left is shared among the endpoints that are left, so that one that hangs does not
                # use up the deadline of all.
                async with asyncio.timeout(max(left_s / (len(waiting) + 1), _ATTEMPT_MIN_S)):
                    done = await self._ask(endpoint, path, raw)
                    return msgspec.json.decode(done, type=answer, strict=False), is_doubtful
            except (TimeoutError, aiohttp.ClientError, OSError, msgspec.MsgspecError) as error:
                failure: Exception = error
            except Refused as error:
                if not error.is_passing:
                    raise
                failure = error
            self._fail(endpoint)
            # Without a connection nothing was sent. After any other failure etcd may have carried the request out.
            is_doubtful |= not isinstance(failure, aiohttp.ClientConnectorError)
            # A kept connection ends without a word when etcd restarts. The endpoint gets one more chance, with a new
            # one.
            if endpoint not in tried and is_of_old_connection(failure):
                waiting.appendleft(endpoint)
            tried[endpoint] = failure
        raise self._give_up(path, tried)

    @contextlib.asynccontextmanager
    async def stream(self, path: str, body: Body) -> AsyncIterator[AsyncIterator[bytes]]:
        """Ask for a stream of messages, each the JSON of one; one endpoint is tried."""
        await self._sockets.leave_old_addresses()
        endpoint = self._in_order()[0]
        try:
            async with asyncio.timeout(self._deadline_s):
                response = await self._post(endpoint, path, _encode(body))
            try:
                yield _read_lines(response)
            finally:
                response.close()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            self._fail(endpoint)
            raise self._give_up(path, {endpoint: error}) from error
        except Refused as error:
            if not error.is_passing:
                raise
            self._fail(endpoint)
            raise self._give_up(path, {endpoint: error}) from error

    async def close(self) -> None:
        """Close all connections."""
        await self._sockets.close_session()

    def forget_login(self) -> None:
        """Log in anew before the next request."""
        self._token = ""

    def refuse(self, error: Refused) -> PodwireError:
        """Make our error of an answer that nobody expects."""
        place = f"ask etcd at {error.endpoint}"
        user = self._access.user
        if error.code in (wire.PERMISSION_DENIED, wire.UNAUTHENTICATED) or "user name" in (
            error.reason
        ):
            who = f"as user {user!r}" if user else "without a user"
            return InvalidConfiguration(
                f"{place} {who}: {error.reason}",
                hint="see etcd_user and etcd_password_file; the user needs a role that may read and"
                " write the keys under /podwire/",
            )
        if error.is_full:
            return StorageFailure(
                f"write store {place.removeprefix('ask ')}: {error.reason}",
                hint="compact and defragment etcd, then etcdctl alarm disarm; nothing was written",
            )
        if error.code == wire.INVALID_ARGUMENT:
            return InvalidRequest(
                f"{place}: {error.reason}",
                hint="podwire needs etcd's own limits or more: --max-request-bytes, --max-txn-ops",
            )
        return Unavailable(f"{place}: {error.reason}", hint="see the log of etcd")

    async def _ask(self, endpoint: str, path: str, raw: bytes) -> bytes:
        response = await self._post(endpoint, path, raw)
        async with response:
            return await response.read()

    async def _post(self, endpoint: str, path: str, raw: bytes) -> aiohttp.ClientResponse:
        """Send, and log in where that is asked for."""
        token = self._token or await self._renew(endpoint, "")
        try:
            return await self._send(endpoint, path, raw, token)
        except Refused as error:
            # Tokens end after five minutes by default, when etcd restarts, and when users or roles change.
            is_old = error.code == wire.UNAUTHENTICATED or "auth store is old" in error.reason
            if not (self._access.user and is_old):
                raise
        return await self._send(endpoint, path, raw, await self._renew(endpoint, token))

    async def _send(
        self, endpoint: str, path: str, raw: bytes, token: str
    ) -> aiohttp.ClientResponse:
        scheme = "https" if self._access.is_encrypted else "http"
        response = await self._sockets.session.post(
            f"{scheme}://{endpoint}/v3/{path}",
            data=raw if len(raw) < _LARGE_BYTES else io.BytesIO(raw),
            headers={"Authorization": token} if token else {},
            ssl=self._open_context(),
        )
        if response.status == 200:
            return response
        async with response:
            raise _read_failure(await response.read(), response.status, endpoint)

    async def _renew(self, endpoint: str, old: str) -> str:
        """Log in, unless another request has done so since `old` was given; "" without a user."""
        user = self._access.user
        if not user:
            return ""
        async with self._login:
            # Many requests meet the end of a token at once. The first one logs in for all.
            if self._token != old:
                return self._token
            now_s = asyncio.get_running_loop().time()
            if self._refused and now_s < self._refused[0]:
                raise self._refused[1]
            body = _encode({"name": user, "password": read_password(self._access)})
            try:
                response = await self._send(endpoint, "auth/authenticate", body, "")
                async with response:
                    answer = msgspec.json.decode(await response.read(), type=wire.TokenAnswer)
            except Refused as error:
                if error.code == wire.FAILED_PRECONDITION:
                    return ""  # it asks for no credentials
                if error.is_passing:
                    raise
                refusal = self._refuse_login(error)
                self._refused = (now_s + _REFUSED_FOR_S, refusal)
                raise refusal from None
            self._token = answer.token
            return answer.token

    def _refuse_login(self, error: Refused) -> PodwireError:
        return InvalidConfiguration(
            f"log in to etcd at {error.endpoint} as user {self._access.user!r}: {error.reason}",
            hint=f"see etcd_user, and the password in {self._access.password_file}",
        )

    def _open_context(self) -> ssl.SSLContext | bool:
        if self._access.is_encrypted and self._context is None:
            self._context = make_context(self._access)
        return self._context or True

    def _in_order(self) -> tuple[str, ...]:
        return self.endpoints[self._current :] + self.endpoints[: self._current]

    def _fail(self, endpoint: str) -> None:
        """Go on with the next endpoint. Certificates may have been replaced: read them again."""
        self.failures += 1
        self._context = None
        if self.endpoints[self._current] == endpoint:
            self._current = (self._current + 1) % len(self.endpoints)

    def _give_up(self, path: str, tried: dict[str, Exception]) -> PodwireError:
        told = "; ".join(f"{endpoint}: {_tell(error)}" for endpoint, error in tried.items())
        message = f"ask etcd ({path}): {told or f'{self.where}: no answer in time'}"
        if tried and all(_is_lasting(error) for error in tried.values()):
            return InvalidConfiguration(
                message,
                hint="see etcd_ca, etcd_cert and etcd_key, and the addresses in `store`:"
                " does the certificate name them?",
            )
        return Unavailable(message, hint="is etcd running, and can this machine reach it?")


def _read_failure(raw: bytes, status: int, endpoint: str) -> Refused:
    try:
        failure = msgspec.json.decode(raw, type=wire.Failure)
    except msgspec.MsgspecError:
        text = raw[:200].decode(errors="replace").strip()
        return Refused(wire.UNAVAILABLE, f"no etcd of 3.4 or newer: HTTP {status} {text}", endpoint)
    return Refused(failure.code, failure.message or failure.error, endpoint)


def _tell(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is not trusted: {error.certificate_error}"
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        return f"no TLS connection: {error.os_error!r} (does this port speak TLS? if not, leave etcd_ca out)"
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error.strerror or repr(error.os_error)
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it ended the connection (does this port want TLS? then set etcd_ca)"
    return str(error) or type(error).__name__


def _is_lasting(error: BaseException | None) -> bool:
    """Tell whether the ends do not trust each other or do not speak the same: waiting does not help."""
    while error is not None:
        if isinstance(error, ssl.SSLError | aiohttp.ClientSSLError):
            return True
        error = error.__cause__ or error.__context__
    return False


async def _read_lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Give message after message; ConnectionResetError at the end, as a stream of ours has none."""
    rest = b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.strip():
                yield line
    raise ConnectionResetError("etcd ended the stream")
