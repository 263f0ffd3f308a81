"""The API server that tests and the rig use: it does what they rely on, also when it is stopped and started again."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from podwire.lab.kubernetes import programs
from podwire.lab.kubernetes.api_server import ADMIN, ApiServer, User
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


def test_what_was_written_is_there_after_a_kill(own_api_server: ApiServer) -> None:
    client = own_api_server.client
    client.create(_MAPS, make_map("kept", key="1"))
    own_api_server.kill()
    assert not client.answers()
    own_api_server.start()
    assert client.get(f"{_MAPS}/kept")["data"] == {"key": "1"}
    own_api_server.stop()
    own_api_server.start()
    assert client.patch(f"{_MAPS}/kept", {"data": {"key": "2"}})["data"] == {"key": "2"}


def test_a_user_may_do_what_he_was_given(tmp_path: Path) -> None:
    nobody = User("nobody")
    with api_rig.started(tmp_path, [nobody]) as server:
        with pytest.raises(Refused) as refused:
            server.client_of("nobody").get(_MAPS)
        assert refused.value.status == 403
        with pytest.raises(Refused) as unknown:
            ApiClient("127.0.0.1", server.port, ca=server.ca, token="other").get(_MAPS)
        assert unknown.value.status == 401
        audit = wait_for(lambda: server.read_audit("nobody"), "the request in the log")
        assert [(event["verb"], event["responseStatus"]["code"]) for event in audit] == [
            ("list", 403)
        ]


def test_a_watch_from_a_forgotten_revision_is_told_so(own_api_server: ApiServer) -> None:
    client = own_api_server.client
    first = client.create(_MAPS, make_map("old"))["metadata"]["resourceVersion"]
    client.delete(f"{_MAPS}/old")
    own_api_server.compact()
    own_api_server.kill()
    own_api_server.start()
    answer = client.get(f"{_MAPS}?watch=1&resourceVersion={first}&timeoutSeconds=5")
    assert (answer["type"], answer["object"]["code"]) == ("ERROR", 410)


def test_kubectl_reads_what_the_kubeconfig_says(api_server: ApiServer, tmp_path: Path) -> None:
    try:
        kubectl = programs.find(("kube-apiserver", "kubectl"))["kubectl"]
    except NotFound as missing:
        pytest.skip(missing.message)
    for with_certificate in (False, True):
        path = api_server.write_kubeconfig(
            tmp_path / "kubeconfig", ADMIN, with_certificate=with_certificate
        )
        done = subprocess.run(
            [kubectl, f"--kubeconfig={path}", "auth", "whoami", "-o", "json"],
            capture_output=True,
            check=True,
        )
        assert json.loads(done.stdout)["status"]["userInfo"]["username"] == ADMIN


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with api_rig.started(tmp_path) as server:
        server.kill()
        server.server.command.append("--no-such-flag")
        with pytest.raises(Unavailable, match="no-such-flag"):
            server.start()
        assert not server.server.runs


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
