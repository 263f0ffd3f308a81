"""How an etcd is reached: its endpoints, certificates and credentials.

Made by `store.open` from the settings. Reads files and opens no connection. Never keeps or shows a password: it is
read from its file whenever etcd asks for one, so that a new password is used at the next login.
"""

import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

import msgspec

from podwire.model.config import StoreSettings
from podwire.model.errors import InvalidConfiguration

SCHEME: Final = "etcd://"
PORT: Final = 2379
_ENDPOINT: Final = re.compile(
    r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?"
)


class StoreAccess(msgspec.Struct, frozen=True):
    """What the settings `etcd_*` say; empty: not given. All but `user` are paths of files."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password_file: str = ""

    @classmethod
    def of(cls, settings: StoreSettings) -> Self:
        """Take what the agent's settings say."""
        return cls(
            ca=settings.etcd_ca,
            cert=settings.etcd_cert,
            key=settings.etcd_key,
            user=settings.etcd_user,
            password_file=settings.etcd_password_file,
        )

    @property
    def is_encrypted(self) -> bool:
        """Whether endpoints are asked by TLS."""
        return bool(self.ca or self.cert)


def read_environment(environment: Mapping[str, str]) -> StoreAccess:
    """Take what the variables say that an agent knows too: `PODWIRE_ETCD_CA` and the others."""
    names = {name: f"PODWIRE_ETCD_{name.upper()}" for name in StoreAccess.__struct_fields__}
    return StoreAccess(**{field: environment.get(name, "") for field, name in names.items()})


def parse_endpoints(url: str) -> tuple[str, ...]:
    """Read `etcd://HOST[:PORT][,HOST[:PORT]]` into HOST:PORT each; InvalidConfiguration for anything else."""
    endpoints: list[str] = []
    for text in url.removeprefix(SCHEME).removesuffix("/").split(","):
        match = _ENDPOINT.fullmatch(text.strip())
        port = int(match["port"] or PORT) if match else 0
        if match is None or not 0 < port < 65536:
            raise InvalidConfiguration(
                f"open store {url!r}: {text!r} is not HOST:PORT",
                hint=f"write {SCHEME}HOST:PORT[,HOST:PORT], an IPv6 address in brackets",
            )
        endpoints.append(f"{match['host']}:{port}")
    return tuple(dict.fromkeys(endpoints))


def check_access(access: StoreAccess) -> None:
    """Raise InvalidConfiguration for settings that cannot work together, or files that cannot be used."""
    if bool(access.cert) != bool(access.key):
        raise InvalidConfiguration(
            "open store: a client's certificate needs its key",
            hint="set etcd_cert and etcd_key, or neither",
        )
    if bool(access.user) != bool(access.password_file):
        raise InvalidConfiguration(
            "open store: a user of etcd needs a password",
            hint="set etcd_user and etcd_password_file, or neither",
        )
    if access.is_encrypted:
        make_context(access)
    if access.user:
        read_password(access)


def make_context(access: StoreAccess) -> ssl.SSLContext:
    """Load the certificates; InvalidConfiguration names the file that is at fault."""
    what, path = "certificate authorities", access.ca
    try:
        # Without a file, the authorities that the system trusts: a client's certificate alone still asks for TLS.
        context = ssl.create_default_context(cafile=access.ca or None)
        if access.cert:
            what, path = "client certificate and key", f"{access.cert}, {access.key}"
            context.load_cert_chain(access.cert, access.key)
    except OSError as error:  # ssl.SSLError is one
        reason = error.strerror or str(error)
        raise InvalidConfiguration(
            f"read {what} for etcd from {path}: {reason}",
            hint="see etcd_ca, etcd_cert and etcd_key: PEM files that the agent can read",
        ) from error
    return context


def read_password(access: StoreAccess) -> str:
    """Read the password: the first line of its file."""
    try:
        lines = Path(access.password_file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfiguration(
            f"read the password of etcd's user {access.user!r} from {access.password_file}: {error}",
            hint="see etcd_password_file",
        ) from error
    if not lines or not lines[0]:
        raise InvalidConfiguration(
            f"read the password of etcd's user {access.user!r} from {access.password_file}: it is empty",
            hint="put the password into the first line",
        )
    return lines[0]
