"""Requests to the API server: the deadline, the credentials, repetition, and streams.

Used by `store.kubernetes.store` and `watch` on one loop. Must never wait longer than a request's deadline, nor send a
write again that may have been carried out. Invariant: a body of the API server comes back as it is, a refusal as
Refused. Every other failure is Unavailable, whatever its cause: the agent goes on, and asks again.
"""

import asyncio
import contextlib
import errno
import os
import random
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Final

import aiohttp
import msgspec
import yarl

from podwire import __version__
from podwire.model.errors import InvalidConfiguration, PodwireError, Unavailable
from podwire.model.store import RunHelper
from podwire.store.kubernetes.api.access import Access
from podwire.store.kubernetes.api.credentials import Credentials, Shown
from podwire.store.kubernetes.api.refusals import UNAUTHORIZED, Intent, Refused, explain
from podwire.store.kubernetes.api.wire import read_status
from podwire.store.sockets import Sockets, is_of_old_connection

DEADLINE_S: Final = 5.0
"""Of one request, whatever it takes: waiting for an overloaded server and a new token included."""
AGAIN_BASE_S: Final = 0.1
AGAIN_CAP_S: Final = 2.0
HUNG_S: Final = 0.2
"""After a request without an answer others are refused for so long, and while the next one finds out whether the server
answers again: each would wait for its whole deadline. Not longer, because a start that waits for the server must serve
within a second of its return."""
JSON: Final = "application/json"
MERGE_PATCH: Final = "application/merge-patch+json"
STRATEGIC_PATCH: Final = "application/strategic-merge-patch+json"
"""Of built-in kinds: an item of a list replaces the one of its key, and leaves the others."""
_OF_TIME: Final = frozenset({9, 10})
"""X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED (openssl/x509_vfy.h)."""
_UNHEARD_MS: Final = 15_000
_PROBE_S: Final = 10


class Request(msgspec.Struct, frozen=True):
    """One request."""

    intent: Intent
    method: str
    path: str
    """With its query."""
    body: bytes | None = None
    content_type: str = JSON
    accept: str = JSON
    patience: float = 1.0
    """How many times the usual deadline it may take."""

    @property
    def is_read(self) -> bool:
        """Whether it may be sent again whatever became of it."""
        return self.method == "GET"


class Client:
    """Asks one API server. `name`: the client as the server's audit log shows it."""

    def __init__(
        self,
        access: Access,
        *,
        run_helper: RunHelper | None = None,
        name: str = "",
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.access = access
        self.deadline_s = deadline_s
        self._credentials = Credentials(access, run_helper)
        self._agent = f"podwire/{__version__}" + (f" ({name})" if name else "")
        self._sockets = Sockets(_UNHEARD_MS, probe_s=_PROBE_S)
        self._hung: Unavailable | None = None
        self._try_at_s = 0.0
        self._answered_at_s = 0.0
        self.clock_ahead_s = 0.0
        """By how much this host's clock was ahead of the server's at the last answer; its answers say full seconds."""

    def check(self) -> None:
        """Raise InvalidConfiguration for what cannot work, before anything is asked."""
        self._credentials.check()

    async def call(self, request: Request) -> bytes:
        """Ask; gives the body. Raises Refused, and what the module's headline says."""
        deadline_s = self.deadline_s * request.patience
        now_s = asyncio.get_running_loop().time()
        self._refuse_while_hung(now_s)
        await self._sockets.leave_old_addresses()
        try:
            async with asyncio.timeout(deadline_s):
                done = await self._ask_until(request, now_s + deadline_s)
        except TimeoutError as error:
            raise self._note_hung(request, now_s, deadline_s) from error
        except BaseException:
            self._hung = None
            raise
        self._answered_at_s, self._hung = asyncio.get_running_loop().time(), None
        return done

    @contextlib.asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[AsyncIterator[bytes]]:
        """Ask for lines that come one by one. The deadline is that of the first byte of the answer."""
        await self._sockets.leave_old_addresses()
        try:
            async with asyncio.timeout(self.deadline_s):
                response = await self._authorized(request)
            try:
                yield _read_lines(response)
            finally:
                response.close()
        except TimeoutError as error:
            raise self._no_answer(request, self.deadline_s) from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._broken(request, error) from error

    async def close(self) -> None:
        """End everything on this loop, and close all connections; also those that are being made."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._credentials.close()
        await self._sockets.close_session()
        await self._sockets.end_all()

    def explain(self, refused: Refused) -> PodwireError:
        """Make our error of a refusal."""
        return explain(refused, self.access.who)

    async def _ask_until(self, request: Request, end_s: float) -> bytes:
        """Ask again while the server only has too much to do, and the deadline allows."""
        delay_s, is_new = AGAIN_BASE_S, True
        while True:
            try:
                response = await self._authorized(request)
                async with response:
                    return await response.read()
            except Refused as refused:
                # A server that sheds load says so (429, 503) before it begins a request, so a write may be sent
                # again, too.
                wait_s = max(refused.retry_after_s, delay_s) * random.uniform(1.0, 1.25)
                left_s = end_s - asyncio.get_running_loop().time()
                if not refused.is_overload or wait_s >= left_s:
                    raise
                await asyncio.sleep(wait_s)
                delay_s = min(delay_s * 2, AGAIN_CAP_S)
            except (aiohttp.ClientError, OSError) as error:
                # A server that was restarted has forgotten the connection: once is enough to find out.
                if not (is_new and request.is_read and is_of_old_connection(error)):
                    raise self._broken(request, error) from error
                is_new = False

    async def _authorized(self, request: Request) -> aiohttp.ClientResponse:
        """Send, and once more with newer credentials when these are refused."""
        shown = await self._show()
        try:
            return await self._send(request, shown)
        except Refused as refused:
            if refused.code != UNAUTHORIZED or not self._credentials.refused(shown):
                raise
        return await self._send(request, await self._show())

    async def _show(self) -> Shown:
        try:
            return await self._credentials.show()
        except InvalidConfiguration as error:  # a file that was in order when the store was opened
            raise Unavailable(error.message, hint=error.hint) from None

    async def _send(self, request: Request, shown: Shown) -> aiohttp.ClientResponse:
        headers = {
            "Accept": request.accept,
            "Accept-Encoding": "identity",  # lists cross a local network at most
            "User-Agent": self._agent,
            **shown.headers,
        }
        if request.body is not None:
            headers["Content-Type"] = request.content_type
        response = await self._sockets.session.request(
            request.method,
            # Encoded already: yarl would decode what need not be encoded, and a `continue` token must come back byte
            # by byte.
            yarl.URL(self.access.server + request.path, encoded=True),
            data=request.body,
            headers=headers,
            ssl=shown.context or True,
            server_hostname=self.access.server_name or None,
            # The API server redirects nothing that is asked here, and a bearer token must not follow a redirect to
            # somebody else.
            allow_redirects=False,
        )
        self._note_clock(response.headers)
        if response.status < 300:
            return response
        async with response:
            status = read_status(await response.read(), response.status)
            raise Refused(request.intent, status, _retry_after_s(response.headers))

    def _note_clock(self, headers: Mapping[str, str]) -> None:
        with contextlib.suppress(TypeError, ValueError):
            told = parsedate_to_datetime(headers.get("Date", ""))
            self.clock_ahead_s = time.time() - told.timestamp()

    def _refuse_while_hung(self, now_s: float) -> None:
        """Let one request at a time find out whether a server that hung answers again."""
        if self._hung is None:
            return
        if now_s < self._try_at_s:
            raise Unavailable(self._hung.message, hint=self._hung.hint)
        self._try_at_s = now_s + self.deadline_s

    def _note_hung(self, request: Request, began_s: float, deadline_s: float) -> Unavailable:
        error = self._no_answer(request, deadline_s)
        # Only when nothing was answered since: one slow request among answered ones does not make the server hung.
        if self._answered_at_s < began_s:
            self._hung = error
            self._try_at_s = asyncio.get_running_loop().time() + HUNG_S
        return error

    def _no_answer(self, request: Request, deadline_s: float) -> Unavailable:
        return Unavailable(
            f"{request.intent}: no answer of {self.access.server} within {deadline_s:g} s",
            hint="is the API server running, and can this node reach it? running pods are not affected",
        )

    def _broken(self, request: Request, error: Exception) -> PodwireError:
        # A server that was set up anew has other certificates. The files may have been replaced with it.
        self._credentials.forget_files()
        message = f"{request.intent}: ask the API server at {self.access.server}: {_tell(error)}"
        hint = (
            "is the API server running, and can this node reach it? running pods are not affected"
        )
        fault = _find_trust_fault(error)
        if fault is not None:
            hint = (
                "renew the server's certificate (kubeadm certs renew apiserver), or set the clock of this host right"
                if fault.verify_code in _OF_TIME
                else "see certificate-authority and server of the kubeconfig: who signed the server's certificate, and"
                " does it name that address?"
            )
        return Unavailable(message, hint=hint)


def _retry_after_s(headers: Mapping[str, str]) -> float:
    text = headers.get("Retry-After", "")
    return float(text) if text.isascii() and text.isdigit() else 0.0


def _tell(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is not trusted: {error.certificate_error}"
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        return f"no TLS connection: {error.os_error!r}"
    if isinstance(error, aiohttp.ClientConnectorError):
        known = error.os_error.errno or 0
        return os.strerror(known) if known in errno.errorcode else str(error.os_error)
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it ended the connection"
    return str(error) or type(error).__name__


def _find_trust_fault(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    """Find what is wrong with the server's certificate, if it is at fault."""
    while error is not None:
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            error = error.certificate_error
        if isinstance(error, ssl.SSLCertVerificationError):
            return error
        error = error.__cause__ or error.__context__
    return None


async def _read_lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Give line after line, to the end of the answer."""
    # An object can be larger than many chunks. Joining once keeps the time linear in its size.
    parts: list[bytes] = []
    async for chunk in response.content.iter_any():
        first, *rest = chunk.split(b"\n")
        parts.append(first)
        for following in rest:
            line = b"".join(parts)
            parts = [following]
            if line.strip():
                yield line
