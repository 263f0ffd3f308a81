"""How the API server is reached: its address, the authority that it is trusted by, and the credentials it is shown.

Made by `store.open` from the settings: in a pod from what kubelet puts there, else from a kubeconfig
(`store.kubernetes.api.kubeconfig`). Reads files and opens no connection. Never keeps or shows a secret beyond its use:
files are read again, so that what was rotated is used.
"""

import contextlib
import ipaddress
import os
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from podwire.model.errors import InvalidConfiguration

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
HOST_VARIABLE: Final = "KUBERNETES_SERVICE_HOST"
PORT_VARIABLE: Final = "KUBERNETES_SERVICE_PORT"
DEFAULT_PORT: Final = "443"


@dataclass(frozen=True)
class Pem:
    """A certificate or a key: the path of a file, or the text itself; empty: there is none."""

    path: str = ""
    text: str = field(default="", repr=False)

    def __bool__(self) -> bool:
        return bool(self.path or self.text)

    @property
    def where(self) -> str:
        """Say where it comes from, for messages."""
        return self.path or "the kubeconfig"

    def read(self, what: str) -> str:
        """Give the text; InvalidConfiguration names the file."""
        if self.text or not self.path:
            return self.text
        return read_file(Path(self.path), what)


@dataclass(frozen=True)
class Plugin:
    """A program that gives credentials (client.authentication.k8s.io)."""

    command: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    api_version: str = ""
    wants_cluster: bool = False
    install_hint: str = ""


@dataclass(frozen=True)
class User:
    """What this client shows. At most one of the ways of a bearer token is given; a certificate may be beside it."""

    token: str = field(default="", repr=False)
    token_file: str = ""
    certificate: Pem = Pem()
    key: Pem = Pem()
    plugin: Plugin | None = None


class Access(msgspec.Struct, frozen=True):
    """One API server, and the credentials that it is shown."""

    server: str
    """`https://HOST[:PORT]`, perhaps with a path, without a final slash."""
    who: str
    """For messages: where the credentials come from."""
    ca: Pem = Pem()
    """Empty: the machine's own authorities."""
    server_name: str = ""
    """The name that the server's certificate must have; "": that of the address."""
    is_insecure: bool = False
    """The certificate is not looked at; only where the kubeconfig says so in as many words."""
    user: User = User()

    @property
    def host(self) -> str:
        """The server's host, for parts that must keep the way to it open."""
        rest = self.server.partition("://")[2].partition("/")[0]
        return rest.partition("]")[0][1:] if rest.startswith("[") else rest.partition(":")[0]


def access_in_cluster(environment: Mapping[str, str], account: Path = SERVICE_ACCOUNT) -> Access:
    """Find the API server as a pod does; InvalidConfiguration outside of one."""
    host = environment.get(HOST_VARIABLE, "")
    if not host:
        raise InvalidConfiguration(
            f"find the Kubernetes API: this is no pod ({HOST_VARIABLE} is not set)",
            hint="set `kubeconfig` to the path of a file, or run the agent by the DaemonSet of deploy/podwire.yaml",
        )
    token, ca = account / "token", account / "ca.crt"
    read_file(token, "the token of the service account")
    read_file(ca, "the certificate authority of the API server")
    port = environment.get(PORT_VARIABLE) or DEFAULT_PORT
    return Access(
        server=f"https://{_in_brackets(host)}:{port}",
        who=f"with the service account's token in {token}",
        ca=Pem(str(ca)),
        user=User(token_file=str(token)),
    )


def make_context(access: Access, certificate: Pem = Pem(), key: Pem = Pem()) -> ssl.SSLContext:
    """Load what TLS needs; InvalidConfiguration names the file that is at fault. The client's certificate is that of a
    plugin, if one is given."""
    what, where = "the authorities of the API server", access.ca.where
    certificate, key = certificate or access.user.certificate, key or access.user.key
    try:
        context = ssl.create_default_context(cadata=access.ca.read(what) or None)
        if access.is_insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if certificate:
            what, where = "the client's certificate and key", f"{certificate.where}, {key.where}"
            with _as_path(certificate, what) as first, _as_path(key, what) as second:
                context.load_cert_chain(first, second)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidConfiguration(
            f"read {what} from {where}: {reason}",
            hint="PEM files, or base64 of PEM in the fields of a kubeconfig that end in -data",
        ) from error
    return context


def read_file(path: Path, what: str) -> str:
    """Read a small file; InvalidConfiguration when it cannot be read or is empty."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidConfiguration(
            f"read {what} from {str(path)!r}: {reason}",
            hint="is the path right, and may this process read it?",
        ) from error
    if not text:
        raise InvalidConfiguration(
            f"read {what} from {str(path)!r}: it is empty", hint="is it still being written?"
        )
    return text


@contextlib.contextmanager
def _as_path(pem: Pem, what: str) -> Iterator[str]:
    """Give a path: OpenSSL reads certificates of clients from files alone, and keys should not be on a disk."""
    if not pem:
        raise ValueError("a certificate needs its key, and a key its certificate")
    if pem.path:
        yield pem.path
        return
    descriptor = os.memfd_create("pem")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(pem.read(what).encode())
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _in_brackets(host: str) -> str:
    try:
        return f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    except ValueError:
        return host
