"""The API server that tests and the rig use: it does what they rely on, also when it is stopped and started again."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwire.lab.kubernetes import programs
from podwire.lab.kubernetes.api_server import ADMIN, ApiServer, Shape, User
from podwire.lab.kubernetes.client import ApiClient, Refused
from podwire.model.errors import NotFound, Unavailable
from tests.contract import api_rig
from tests.waiting import wait_for

_MAPS = "/api/v1/namespaces/default/configmaps"
_ROOT = Path(__file__).resolve().parents[2]


def make_map(name: str, **data: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": "default"},
        "data": data,
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server that tests may kill; each leaves it running."""
    with api_rig.started(tmp_path_factory.mktemp("api"), [User("nobody")]) as made:
        yield made


def test_what_was_written_is_there_after_a_kill(server: ApiServer) -> None:
    client = server.client
    client.create(_MAPS, make_map("kept", key="1"))
    server.kill()
    assert not client.answers()
    server.start()
    assert client.get(f"{_MAPS}/kept")["data"] == {"key": "1"}
    server.stop()
    server.start()
    assert client.patch(f"{_MAPS}/kept", {"data": {"key": "2"}})["data"] == {"key": "2"}


def test_a_user_may_do_what_he_was_given(server: ApiServer) -> None:
    with pytest.raises(Refused) as refused:
        server.client_of("nobody").get(_MAPS)
    assert refused.value.status == 403
    with pytest.raises(Refused) as unknown:
        ApiClient("127.0.0.1", server.port, ca=server.ca, token="other").get(_MAPS)
    assert unknown.value.status == 401
    audit = wait_for(lambda: server.read_audit("nobody"), "the request in the log")
    assert [(event["verb"], event["responseStatus"]["code"]) for event in audit] == [("list", 403)]


def test_a_watch_from_a_forgotten_revision_is_told_so(server: ApiServer) -> None:
    client = server.client
    first = client.create(_MAPS, make_map("old"))["metadata"]["resourceVersion"]
    client.delete(f"{_MAPS}/old")
    server.compact()
    server.kill()
    server.start()
    answer = client.get(f"{_MAPS}?watch=1&resourceVersion={first}&timeoutSeconds=5")
    assert (answer["type"], answer["object"]["code"]) == ("ERROR", 410)


def test_kubectl_reads_what_the_kubeconfig_says(server: ApiServer, tmp_path: Path) -> None:
    try:
        kubectl = programs.find(("kube-apiserver", "kubectl"))["kubectl"]
    except NotFound as missing:
        pytest.skip(missing.message)
    for with_certificate in (False, True):
        path = server.write_kubeconfig(
            tmp_path / "kubeconfig", ADMIN, with_certificate=with_certificate
        )
        done = subprocess.run(
            [kubectl, f"--kubeconfig={path}", "auth", "whoami", "-o", "json"],
            capture_output=True,
            check=True,
        )
        assert json.loads(done.stdout)["status"]["userInfo"]["username"] == ADMIN


@pytest.mark.usefixtures("server")  # skipped where there are no programs
def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    other = ApiServer(tmp_path, shape=Shape(flags=("--no-such-flag",)))
    try:
        with pytest.raises(Unavailable, match="no-such-flag"):
            other.start()
        assert not other.server.runs
    finally:
        other.stop()


def test_programs_are_of_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assets, cache = tmp_path / "assets", tmp_path / "podwire" / "kubernetes" / programs.VERSION
    for directory, names in ((assets, ("kubelet",)), (cache, ("kubelet", "kubectl"))):
        directory.mkdir(parents=True)
        for name in names:
            (directory / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(programs.ASSETS_VARIABLE, str(assets))
    assert programs.find(("kubelet",)) == {"kubelet": str(assets / "kubelet")}
    assert set(map(os.path.dirname, programs.find(("kubelet", "kubectl")).values())) == {str(cache)}
    with pytest.raises(NotFound, match="kube-proxy"):
        programs.find(("kubelet", "kube-proxy"))


def test_the_version_is_what_the_tools_pin() -> None:
    text = (_ROOT / "tests/cluster/tools/go.mod").read_text()
    found = re.search(r"k8s\.io/kubernetes (v[\d.]+)", text)
    assert found is not None
    assert found.group(1) == programs.VERSION
