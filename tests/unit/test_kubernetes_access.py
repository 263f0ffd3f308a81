"""How the API server is found and what is shown to it: kubeconfigs, pods, tokens that change, plugins."""

import asyncio
import base64
import json
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from podwire.model.errors import InvalidConfiguration, Unavailable
from podwire.store.kubernetes.api.access import Access, Plugin, User, access_in_cluster
from podwire.store.kubernetes.api.credentials import (
    Credentials,
    read_exec_credential,
)
from podwire.store.kubernetes.api.kubeconfig import load_kubeconfig
from podwire.store.manifest import dump

V1 = "client.authentication.k8s.io/v1"
EXEC = {"apiVersion": V1, "command": "get-token", "args": ["a"], "env": [{"name": "A", "value": "1"}]}  # fmt: skip


def write_config(
    directory: Path, user: Mapping[str, Any], cluster: Mapping[str, Any] | None = None, **top: Any
) -> Path:
    path = directory / "kubeconfig"
    cluster = {"server": "https://server:6443", **(cluster or {})}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": dict(user)}],
        **top,
    }
    path.write_text(dump([document]))
    return path


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate and its key."""
    directory = tmp_path_factory.mktemp("pair")
    assert shutil.which("openssl")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=x -days 1"
    )
    subprocess.run(
        [*command.split(), "-keyout", str(directory / "key"), "-out", str(directory / "crt")],
        check=True,
        capture_output=True,
    )
    return (directory / "crt").read_text(), (directory / "key").read_text()


def test_a_kubeconfig_with_a_token(tmp_path: Path) -> None:
    access = load_kubeconfig(write_config(tmp_path, {"token": "secret"}))
    assert access.server == "https://server:6443"
    assert access.user.token == "secret"
    assert "secret" not in repr(access)
    assert "user 'u'" in access.who


def test_paths_begin_where_the_kubeconfig_is(tmp_path: Path) -> None:
    cluster = {"certificate-authority": "pki/ca.crt"}
    user = {
        "client-certificate": "/etc/c.crt",
        "client-key": "c.key",
        "tokenFile": "t",
        "token": "x",
    }
    access = load_kubeconfig(write_config(tmp_path, user, cluster))
    assert access.ca.path == str(tmp_path / "pki/ca.crt")
    assert access.user.certificate.path == "/etc/c.crt"
    assert access.user.key.path == str(tmp_path / "c.key")
    assert (access.user.token_file, access.user.token) == (str(tmp_path / "t"), "")


def test_certificates_may_stand_in_the_kubeconfig(tmp_path: Path, pair: tuple[str, str]) -> None:
    certificate, key = (base64.b64encode(half.encode()).decode() for half in pair)
    user = {"client-certificate-data": certificate, "client-key-data": key}
    cluster = {"certificate-authority-data": certificate, "tls-server-name": "kubernetes"}
    access = load_kubeconfig(write_config(tmp_path, user, cluster))
    assert access.server_name == "kubernetes"
    assert pair[1] not in repr(access)
    Credentials(access, None).check()


def test_a_plugin_is_read(tmp_path: Path) -> None:
    plugin = load_kubeconfig(write_config(tmp_path, {"exec": EXEC})).user.plugin
    assert plugin is not None
    assert (plugin.command, plugin.arguments, plugin.environment) == (
        "get-token",
        ("a",),
        {"A": "1"},
    )
    given = {**EXEC, "command": "./get-token"}
    plugin = load_kubeconfig(write_config(tmp_path, {"exec": given})).user.plugin
    assert plugin is not None
    assert plugin.command == str(tmp_path / "get-token")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no context": ({"current-context": ""}, "current-context is missing"),
    "another context": ({"current-context": "there"}, "contexts has no 'there'"),
    "no cluster": ({"clusters": []}, "clusters has no 'c'"),
    "no user": ({"users": None}, "users has no 'u'"),
    "no server": ({"cluster": {"server": ""}}, "is '', no URL"),
    "without TLS": ({"cluster": {"server": "http://server"}}, "could read and change"),
    "through a proxy": ({"cluster": {"proxy-url": "http://p"}}, "proxy-url is not supported"),
    "a password": ({"user": {"username": "a", "password": "b"}}, "username is not supported"),
    "somebody else": ({"user": {"token": "t", "as": "admin"}}, "as is not supported"),
    "an old plugin": (
        {"user": {"auth-provider": {"name": "gcp"}}},
        "auth-provider is not supported",
    ),
    "half a pair": ({"user": {"client-key": "k"}}, "without the other"),
    "no base64": ({"user": {"client-key-data": "?", "client-certificate": "c"}}, "not base64"),
    "a plugin's version": ({"user": {"exec": {**EXEC, "apiVersion": "v0"}}}, "apiVersion is 'v0'"),
    "a question": ({"user": {"exec": {**EXEC, "interactiveMode": "Always"}}}, "nobody is there"),
    "a plugin and a token": ({"user": {"exec": EXEC, "token": "t"}}, "beside other credentials"),
    "no text": ({"user": {"token": 7}}, "is 7, not text"),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_honoured_is_refused(
    tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    user, cluster = given.pop("user", {"token": "t"}), given.pop("cluster", {})
    with pytest.raises(InvalidConfiguration, match="kubeconfig") as caught:
        load_kubeconfig(write_config(tmp_path, user, cluster, **given))
    assert message in caught.value.message
    assert caught.value.hint


def test_an_insecure_server_is_one_that_is_stated(tmp_path: Path) -> None:
    cluster = {"server": "http://server/", "insecure-skip-tls-verify": True}
    access = load_kubeconfig(write_config(tmp_path, {"token": "t"}, cluster))
    assert (access.server, access.is_insecure) == ("http://server", True)


@pytest.mark.parametrize("text", ["", "a: [", "- a"], ids=["empty", "no YAML", "a list"])
def test_a_file_that_is_no_kubeconfig(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(InvalidConfiguration, match="kubeconfig"):
        load_kubeconfig(path)
    with pytest.raises(InvalidConfiguration, match="No such file"):
        load_kubeconfig(tmp_path / "none")


@pytest.mark.parametrize(
    ("environment", "server", "host"),
    [
        ({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, "10.96.0.1:443", "10.96.0.1"),
        (
            {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"},
            "[fd00::1]:6443",
            "fd00::1",
        ),
        ({"KUBERNETES_SERVICE_HOST": "api.example"}, "api.example:443", "api.example"),
    ],
    ids=["IPv4", "IPv6", "a name"],
)
def test_a_pod_finds_its_api_server(
    tmp_path: Path, environment: dict[str, str], server: str, host: str
) -> None:
    for name in ("token", "ca.crt"):
        (tmp_path / name).write_text("x")
    access = access_in_cluster(environment, tmp_path)
    assert (access.server, access.host) == (f"https://{server}", host)
    assert access.user.token_file == str(tmp_path / "token")


def test_outside_of_a_pod_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match="this is no pod"):
        access_in_cluster({}, tmp_path)
    with pytest.raises(InvalidConfiguration, match="token"):
        access_in_cluster({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path)


# ------------------------------------------------------------------ what is shown


def on_loop(work: Callable[[], Any]) -> Any:
    return asyncio.run(work())


def access_with(user: User) -> Access:
    return Access("http://server", "as nobody", is_insecure=True, user=user)


def test_a_token_is_read_again_each_minute_and_when_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("one\n")

    async def look() -> list[Any]:
        often = Credentials(access_with(User(token_file=str(path))), None, read_again_s=0.0)
        seldom = Credentials(access_with(User(token_file=str(path))), None, read_again_s=1e6)
        first = await seldom.show()
        told: list[Any] = [(await often.show()).token, first.token]
        path.write_text("two")
        told += [(await often.show()).token, (await seldom.show()).token]
        told += [seldom.refused(first), (await seldom.show()).token, seldom.refused(first)]
        path.unlink()
        return [*told, seldom.refused(await seldom.show())]

    assert on_loop(look) == ["one", "one", "two", "one", True, "two", True, False]


def credential(**status: Any) -> bytes:
    return json.dumps({"apiVersion": V1, "kind": "ExecCredential", "status": status}).encode()


def test_a_plugin_is_asked_when_what_it_gave_expires() -> None:
    soon = (datetime.now(UTC) + timedelta(seconds=1)).isoformat()
    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    answers = [
        credential(token="one", expirationTimestamp=soon),
        credential(token="two", expirationTimestamp=later),
        credential(token="three"),
    ]
    asked: list[tuple[Sequence[str], Mapping[str, str]]] = []

    def run(arguments: Sequence[str], environment: Mapping[str, str], _timeout_s: float) -> bytes:
        asked.append((arguments, environment))
        return answers.pop(0)

    async def look() -> list[str]:
        plugin = Plugin("get-token", ("a",), {"A": "1"}, V1, wants_cluster=True)
        credentials = Credentials(access_with(User(plugin=plugin)), run)
        several = await asyncio.gather(*(credentials.show() for _ in range(5)))
        told = [*{access.token for access in several}]
        shown = await credentials.show()
        told += [shown.token, (await credentials.show()).token]
        assert credentials.refused(shown)
        return [*told, (await credentials.show()).token]

    assert on_loop(look) == ["one", "two", "two", "three"]
    assert asked[0][0] == ("get-token", "a")
    info = json.loads(asked[0][1]["KUBERNETES_EXEC_INFO"])
    assert info["spec"]["cluster"]["server"] == "http://server"
    assert asked[0][1]["A"] == "1"


def test_a_plugin_that_fails_is_left_alone_for_a_while() -> None:
    asked: list[object] = []

    def run(arguments: Sequence[str], _environment: Mapping[str, str], _timeout_s: float) -> bytes:
        asked.append(arguments)
        raise Unavailable("run get-token: exit status 1")

    async def look() -> None:
        credentials = Credentials(access_with(User(plugin=Plugin("get-token"))), run)
        for _ in range(3):
            with pytest.raises(Unavailable, match="exit status 1"):
                await credentials.show()

    on_loop(look)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (b"no", "no ExecCredential"),
        (b'{"apiVersion": "v0", "status": {"token": "t"}}', "it answered 'v0'"),
        (credential(), "neither a token nor a certificate"),
        (credential(clientKeyData="k"), "without the other"),
    ],
    ids=["no JSON", "another version", "nothing", "half a pair"],
)
def test_useless_answers_of_a_plugin_are_named(output: bytes, message: str) -> None:
    plugin = Plugin("get-token", api_version=V1, install_hint="install get-token")
    with pytest.raises(Unavailable, match=message) as caught:
        read_exec_credential(output, plugin)
    assert caught.value.hint == "install get-token"


def test_a_plugin_needs_somebody_who_runs_it() -> None:
    with pytest.raises(InvalidConfiguration, match="nobody here runs programs"):
        Credentials(access_with(User(plugin=Plugin("p"))), None).check()
