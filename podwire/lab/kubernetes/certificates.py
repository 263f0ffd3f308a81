"""The certificates of a cluster: one authority, and what it signs for servers and for clients.

Made by the program `openssl`: what is shipped to users needs no library for it. A client's groups are the
organizations of its subject, its user is the common name, as Kubernetes reads them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from podwire.kernel import spawn
from podwire.model.errors import Unavailable

_CURVE: Final = "prime256v1"
_DAYS: Final = 30
_DEADLINE_S: Final = 60.0
_CONFIG: Final = """
[req]
distinguished_name = subject
prompt = no
x509_extensions = extensions
[subject]
{subject}
[extensions]
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid:always
basicConstraints = critical, CA:{is_authority}
keyUsage = critical, {usage}
{more}
"""


class Pair(msgspec.Struct, frozen=True):
    """A certificate and its key, as files."""

    certificate: Path
    key: Path


class Authority:
    """An authority with its files in one directory; what was signed is there again after a restart."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._own = self._pair("ca")
        if not self._own.certificate.exists():
            self._make("ca", "CN = cluster", "keyCertSign, cRLSign", is_authority=True)

    @property
    def certificate(self) -> Path:
        """What others trust."""
        return self._own.certificate

    @property
    def key(self) -> Path:
        """What signs; the controller manager wants it."""
        return self._own.key

    def issue_server(self, name: str, hosts: Sequence[str]) -> Pair:
        """Give a server's certificate for addresses and names."""
        kinds = [f"{'IP' if _is_address(host) else 'DNS'}:{host}" for host in hosts]
        more = f"extendedKeyUsage = serverAuth, clientAuth\nsubjectAltName = {', '.join(kinds)}"
        return self._issue(name, f"CN = {name}", more)

    def issue_client(self, name: str, user: str, groups: Sequence[str] = ()) -> Pair:
        """Give a client's certificate."""
        lines = [f"{number}.O = {group}" for number, group in enumerate(groups)]
        return self._issue(
            name, "\n".join([*lines, f"CN = {user}"]), "extendedKeyUsage = clientAuth"
        )

    def make_signing_key(self, name: str) -> Path:
        """Give a key without a certificate, such as that of service account tokens."""
        path = self.directory / f"{name}.key"
        if not path.exists():
            # In the form of SEC 1: of PKCS #8 Kubernetes does not take the public half of an elliptic key.
            _openssl("ecparam", "-name", _CURVE, "-genkey", "-noout", "-out", str(path))
        return path

    def _issue(self, name: str, subject: str, more: str) -> Pair:
        pair = self._pair(name)
        if not pair.certificate.exists():
            self._make(name, subject, "digitalSignature", more=more)
        return pair

    def _make(
        self, name: str, subject: str, usage: str, *, more: str = "", is_authority: bool = False
    ) -> None:
        config = self.directory / f"{name}.cnf"
        config.write_text(
            _CONFIG.format(
                subject=subject, usage=usage, more=more, is_authority=str(is_authority).lower()
            )
        )
        pair = self._pair(name)
        key = self.make_signing_key(name)
        signer = (
            ()
            if is_authority
            else ("-CA", str(self._own.certificate), "-CAkey", str(self._own.key))
        )
        _openssl(
            *("req", "-x509", "-new", "-config", str(config), "-key", str(key)),
            *("-days", str(_DAYS), "-out", str(pair.certificate), *signer),
        )

    def _pair(self, name: str) -> Pair:
        return Pair(self.directory / f"{name}.crt", self.directory / f"{name}.key")


def _openssl(*arguments: str) -> None:
    done = spawn.run(["openssl", *arguments], timeout_s=_DEADLINE_S)
    if done.status:
        raise Unavailable(f"openssl {' '.join(arguments)}: {done.stderr.decode().strip()}")


def _is_address(host: str) -> bool:
    return ":" in host or host.replace(".", "").isdigit()
