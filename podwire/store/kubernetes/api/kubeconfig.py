"""A kubeconfig: the file that tells kubectl, and here the agent, where the API server is and the credentials to show.

Used by `store.open`. Pure but for reading the file. Invariant: a field that changes who asks, or whom the server is
trusted by, is either honoured or refused by name; none is passed over in silence.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from podwire.model.errors import InvalidConfiguration, InvalidRequest
from podwire.store.kubernetes.api.access import Access, Pem, Plugin, User, read_file
from podwire.store.manifest import load_manifests

EXEC_VERSIONS: Final = (
    "client.authentication.k8s.io/v1",
    "client.authentication.k8s.io/v1beta1",
)
_NOT_OF_USER: Final = {
    "username": "the API server has no passwords any more",
    "password": "the API server has no passwords any more",
    "auth-provider": "use `exec`, or `tokenFile`",
    "as": "give the user its own credentials",
    "as-uid": "give the user its own credentials",
    "as-groups": "give the user its own credentials",
    "as-user-extra": "give the user its own credentials",
}
_NOT_OF_CLUSTER: Final = {"proxy-url": "the agent asks the API server directly"}


def load_kubeconfig(path: Path, environment: Mapping[str, str] | None = None) -> Access:
    """Read the current context of a kubeconfig. InvalidConfiguration names the field that is wrong.

    `environment` is this process's: plugins for credentials get it beside their own variables.
    """
    text = read_file(path, "the kubeconfig")
    try:
        [manifest] = load_manifests(text.encode(), str(path))
    except InvalidRequest as error:
        raise InvalidConfiguration(error.message, hint=error.hint) from None
    except ValueError:
        raise _wrong(path, "", "has more than one document", "write one") from None
    return _Reader(path, manifest.document, environment or {}).read()


class _Reader:
    """Reads one document; `path` is for messages, and for relative paths in it."""

    def __init__(
        self, path: Path, document: Mapping[str, Any], environment: Mapping[str, str]
    ) -> None:
        self._path = path
        self._document = document
        self._environment = environment

    def read(self) -> Access:
        name = self._text(self._document, "current-context")
        if not name:
            raise _wrong(
                self._path, "current-context", "is missing", "kubectl config use-context NAME"
            )
        context = self._find("contexts", "context", name)
        cluster_name = self._text(context, "cluster")
        user_name = self._text(context, "user")
        cluster = self._find("clusters", "cluster", cluster_name)
        user = self._find("users", "user", user_name) if user_name else {}
        self._refuse_fields(cluster, _NOT_OF_CLUSTER, f"clusters[{cluster_name}]")
        self._refuse_fields(user, _NOT_OF_USER, f"users[{user_name}]")
        server = self._read_server(cluster, f"clusters[{cluster_name}]")
        return Access(
            server=server,
            who=f"as user {user_name!r} of {self._path}",
            ca=self._pem(cluster, "certificate-authority"),
            server_name=self._text(cluster, "tls-server-name"),
            is_insecure=_is_true(cluster.get("insecure-skip-tls-verify")),
            user=self._read_user(user, f"users[{user_name}]"),
        )

    def _read_server(self, cluster: Mapping[str, Any], place: str) -> str:
        server = self._text(cluster, "server").rstrip("/")
        parts = urlsplit(server)
        if parts.scheme not in ("https", "http") or not parts.hostname:
            raise _wrong(
                self._path, f"{place}.server", f"is {server!r}, no URL", "write https://HOST:PORT"
            )
        if parts.scheme == "http" and not _is_true(cluster.get("insecure-skip-tls-verify")):
            raise _wrong(
                self._path,
                f"{place}.server",
                f"is {server!r}: everyone on the way could read and change what is said",
                "write https://, or say `insecure-skip-tls-verify: true` if that is meant",
            )
        return server

    def _read_user(self, user: Mapping[str, Any], place: str) -> User:
        """Read the credentials; what kubectl prefers is preferred: a token file to a token."""
        certificate = self._pem(user, "client-certificate")
        key = self._pem(user, "client-key")
        if bool(certificate) != bool(key):
            raise _wrong(
                self._path, place, "has a certificate or a key without the other", "give both"
            )
        token_file = self._text(user, "tokenFile")
        token = "" if token_file else self._text(user, "token")
        plugin = self._read_plugin(user.get("exec"), f"{place}.exec")
        if plugin is not None and (token or token_file or certificate):
            raise _wrong(self._path, place, "has exec beside other credentials", "keep one")
        return User(token, self._resolve(token_file), certificate, key, plugin)

    def _read_plugin(self, value: Any, place: str) -> Plugin | None:
        if value is None:
            return None
        spec = value if isinstance(value, Mapping) else {}
        version = self._text(spec, "apiVersion")
        if version not in EXEC_VERSIONS:
            raise _wrong(
                self._path,
                f"{place}.apiVersion",
                f"is {version!r}",
                f"one of {', '.join(EXEC_VERSIONS)} is understood",
            )
        if self._text(spec, "interactiveMode") == "Always":
            raise _wrong(
                self._path,
                f"{place}.interactiveMode",
                "is 'Always': nobody is there to answer",
                "use credentials that a program can get alone",
            )
        command = self._text(spec, "command")
        if not command:
            raise _wrong(self._path, f"{place}.command", "is missing", "name a program")
        return Plugin(
            # As kubectl does: a bare name is looked for in PATH, any other path begins where the kubeconfig is.
            command=self._resolve(command) if "/" in command else command,
            arguments=tuple(str(argument) for argument in _list(spec.get("args"))),
            environment={
                **self._environment,
                **{
                    str(variable.get("name")): str(variable.get("value", ""))
                    for variable in _list(spec.get("env"))
                    if isinstance(variable, Mapping)
                },
            },
            api_version=version,
            wants_cluster=_is_true(spec.get("provideClusterInfo")),
            install_hint=self._text(spec, "installHint"),
        )

    def _find(self, plural: str, singular: str, name: str) -> Mapping[str, Any]:
        """Give what a list of named things has under a name."""
        for named in _list(self._document.get(plural)):
            if isinstance(named, Mapping) and named.get("name") == name:
                found = named.get(singular)
                return found if isinstance(found, Mapping) else {}
        raise _wrong(self._path, plural, f"has no {name!r}", "kubectl config view shows the file")

    def _refuse_fields(
        self, found: Mapping[str, Any], refused: Mapping[str, str], place: str
    ) -> None:
        for name, hint in refused.items():
            if found.get(name):
                raise _wrong(self._path, f"{place}.{name}", "is not supported", hint)

    def _pem(self, members: Mapping[str, Any], name: str) -> Pem:
        """Read a file's path or, which comes first, the text itself in base64."""
        encoded = self._text(members, f"{name}-data")
        if not encoded:
            return Pem(self._resolve(self._text(members, name)))
        try:
            return Pem(text=base64.b64decode(encoded, validate=True).decode())
        except (binascii.Error, UnicodeDecodeError, ValueError):
            raise _wrong(
                self._path, f"{name}-data", "is not base64 of PEM", "kubectl writes it so"
            ) from None

    def _resolve(self, text: str) -> str:
        """Give a path; relative ones begin where the kubeconfig is."""
        return str(self._path.absolute().parent / text) if text else ""

    def _text(self, members: Mapping[str, Any], name: str) -> str:
        """Give a member that is text; "" where it is absent or null."""
        value = members.get(name)
        if value is not None and not isinstance(value, str):
            raise _wrong(self._path, name, f"is {value!r}, not text", "quote it")
        return value or ""


def _wrong(path: Path, field: str, message: str, hint: str) -> InvalidConfiguration:
    place = f"{path}: {field}" if field else str(path)
    return InvalidConfiguration(f"read kubeconfig {place} {message}", hint=hint)


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _is_true(value: Any) -> bool:
    return value is True
