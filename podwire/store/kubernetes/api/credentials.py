"""The bearer token and the certificate that requests show, kept fresh.

Used by `store.kubernetes.api.client` on its loop. A token's file is read again each minute, and at once when the
server refuses the token: kubelet replaces it in place. A plugin is asked again when what it gave has expired.
Invariant: a token that was refused is shown again only if there is no other.
"""

import asyncio
import ssl
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from podwire.model.errors import InvalidConfiguration, PodwireError, Unavailable
from podwire.model.store import RunHelper
from podwire.store.kubernetes.api.access import Access, Pem, Plugin, make_context, read_file

READ_AGAIN_S: Final = 60.0
PLUGIN_S: Final = 60.0
"""How long a plugin may take: some ask a cloud."""
EXPIRES_EARLY_S: Final = 30.0
REFUSED_FOR_S: Final = 10.0
"""How long a plugin that gave nothing useful is not asked again."""
_EXEC_INFO: Final = "KUBERNETES_EXEC_INFO"


class ExecStatus(msgspec.Struct, frozen=True, rename="camel"):
    """What a plugin gives."""

    token: str = ""
    expiration_timestamp: datetime | None = None
    client_certificate_data: str = ""
    client_key_data: str = ""


class ExecCredential(msgspec.Struct, frozen=True, rename="camel"):
    """client.authentication.k8s.io ExecCredential."""

    api_version: str = ""
    status: ExecStatus | None = None


class Shown(msgspec.Struct, frozen=True):
    """What a request shows."""

    token: str
    context: ssl.SSLContext | None
    """None: the server is asked without TLS."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Give the header."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}


class Credentials:
    """What one client shows. `run_helper` runs a plugin; without it a plugin is refused."""

    def __init__(
        self, access: Access, run_helper: RunHelper | None, read_again_s: float = READ_AGAIN_S
    ) -> None:
        self._access = access
        self._run_helper = run_helper
        self._read_again_s = read_again_s
        self._token = access.user.token
        self._read_at_s: float | None = None
        self._context: ssl.SSLContext | None = None
        self._given = ExecStatus()
        self._asking: asyncio.Future[ExecStatus] | None = None
        self._failed: tuple[float, PodwireError] | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="credentials")

    def check(self) -> None:
        """Raise InvalidConfiguration for what cannot be used, before anything is asked."""
        if self._access.user.plugin is not None and self._run_helper is None:
            raise InvalidConfiguration(
                f"run the plugin {self._access.user.plugin.command!r} for credentials: nobody here runs programs",
                hint="use a token or a certificate",
            )
        if self._access.server.startswith("https:"):
            make_context(self._access)
        if self._access.user.token_file:
            self._read_token()

    async def show(self) -> Shown:
        """Give what the next request shows. Unavailable when a plugin fails, InvalidConfiguration of a file."""
        if self._access.user.plugin is not None:
            await self._ask_plugin()
        elif self._access.user.token_file:
            now_s = asyncio.get_running_loop().time()
            if self._read_at_s is None or now_s >= self._read_at_s + self._read_again_s:
                self._read_token()
                self._read_at_s = now_s
        if self._context is None and self._access.server.startswith("https:"):
            given = self._given
            self._context = make_context(
                self._access,
                Pem(text=given.client_certificate_data),
                Pem(text=given.client_key_data),
            )
        return Shown(self._token, self._context)

    def refused(self, shown: Shown) -> bool:
        """Hear that the server refused the credentials; tells whether asking again may do."""
        # Another request was refused before this one, and newer credentials are here since.
        if shown.token != self._token or shown.context is not self._context:
            return True
        user, before = self._access.user, self._token
        if user.plugin is not None:
            self._given, self._token, self._context = ExecStatus(), "", None
            return True
        if user.certificate:
            self._context = None  # the files may have been replaced
        if user.token_file:
            self._read_at_s = None
            try:
                self._read_token()
            except InvalidConfiguration:
                return False
        return self._token != before or bool(user.certificate.path)

    def forget_files(self) -> None:
        """Read certificates again before the next connection: the server's may have changed."""
        self._context = None

    def close(self) -> None:
        """End the thread of plugins; one that runs is left to its deadline."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _read_token(self) -> None:
        self._token = read_file(Path(self._access.user.token_file), "the token")

    async def _ask_plugin(self) -> None:
        """Ask the plugin if what it gave has expired; one question at a time, whoever waits for it."""
        now_s = asyncio.get_running_loop().time()
        if self._failed is not None and now_s < self._failed[0]:
            raise self._failed[1]
        if not _is_expired(self._given, datetime.now(UTC)):
            return
        if self._asking is None:
            self._asking = asyncio.get_running_loop().run_in_executor(self._threads, self._run)
            self._asking.add_done_callback(self._take)
        # Unlike `await`, this does not cancel the question when one of those who wait for it leaves.
        await asyncio.wait({self._asking})
        if self._failed is not None:
            raise self._failed[1]

    def _take(self, asked: "asyncio.Future[ExecStatus]") -> None:
        self._asking = None
        if asked.cancelled():
            return
        error = asked.exception()
        if error is None:
            self._failed = None
            self._given, self._context = asked.result(), None
            self._token = self._given.token
        else:
            failure = error if isinstance(error, PodwireError) else Unavailable(repr(error))
            self._failed = (asked.get_loop().time() + REFUSED_FOR_S, failure)

    def _run(self) -> ExecStatus:
        plugin = self._access.user.plugin
        assert plugin is not None
        assert self._run_helper is not None
        info = _encode(_exec_info(self._access, plugin)).decode()
        environment = {**plugin.environment, _EXEC_INFO: info}
        output = self._run_helper((plugin.command, *plugin.arguments), environment, PLUGIN_S)
        return read_exec_credential(output, plugin)


def read_exec_credential(output: bytes, plugin: Plugin) -> ExecStatus:
    """Read what a plugin wrote; Unavailable when it is of no use."""
    try:
        found = msgspec.json.decode(output, type=ExecCredential)
    except msgspec.MsgspecError as error:
        raise _useless(plugin, f"its output is no ExecCredential: {error}") from None
    status = found.status or ExecStatus()
    if found.api_version != plugin.api_version:
        raise _useless(plugin, f"it answered {found.api_version!r}, not {plugin.api_version!r}")
    if bool(status.client_certificate_data) != bool(status.client_key_data):
        raise _useless(plugin, "it gave a certificate or a key without the other")
    if not (status.token or status.client_certificate_data):
        raise _useless(plugin, "it gave neither a token nor a certificate")
    return status


def _useless(plugin: Plugin, message: str) -> Unavailable:
    return Unavailable(
        f"get credentials from {plugin.command!r}: {message}",
        hint=plugin.install_hint or "run it by hand with its arguments from the kubeconfig",
    )


def _is_expired(given: ExecStatus, now: datetime) -> bool:
    if not (given.token or given.client_certificate_data):
        return True
    ends = given.expiration_timestamp
    if ends is None:
        return False
    if ends.tzinfo is None:
        ends = ends.replace(tzinfo=UTC)
    return (ends - now).total_seconds() < EXPIRES_EARLY_S


def _exec_info(access: Access, plugin: Plugin) -> dict[str, Any]:
    spec: dict[str, Any] = {"interactive": False}
    if plugin.wants_cluster:
        cluster: dict[str, Any] = {"server": access.server}
        if access.ca:
            cluster["certificate-authority-data"] = msgspec.to_builtins(
                access.ca.read("the authorities of the API server").encode()
            )
        if access.server_name:
            cluster["tls-server-name"] = access.server_name
        if access.is_insecure:
            cluster["insecure-skip-tls-verify"] = True
        spec["cluster"] = cluster
    return {"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": spec}


_encode: Final = msgspec.json.Encoder().encode
