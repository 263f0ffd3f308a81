"""`podwire identity`, with the agents' answers given by hand."""

import json
from typing import Any

import pytest
from click.testing import CliRunner

from podwire.cli import client
from podwire.cli.client import EXIT_NOT_FOUND, CliError
from podwire.cli.identity import _merge, get_identity, list_identities
from podwire.cli.options import Agent

WEB = {
    "id": 70_000,
    "labels": ["cni:app=web", "k8s:io.kubernetes.pod.namespace=default"],
    "namedPorts": ["http:TCP/80"],
    "source": "cluster",
    "state": "used",
    "endpoints": 2,
    "endpointIds": [3, 4],
}
WORLD = {
    "id": 2,
    "labels": ["reserved:world"],
    "namedPorts": [],
    "source": "reserved",
    "state": "known",
    "endpoints": 0,
    "endpointIds": [],
}


@pytest.fixture(autouse=True)
def agent(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(_path: str, _method: str, resource: str) -> Any:
        if resource == "/identity":
            return [WORLD, WEB]
        for row in (WORLD, WEB):
            if resource == f"/identity/{row['id']}":
                return row
        raise CliError(EXIT_NOT_FOUND, f"find {resource}: there is none")

    monkeypatch.setattr(client, "request", answer)


def run(command: Any, *words: str) -> str:
    result = CliRunner().invoke(command, [*words, "--agent", "/nowhere"], catch_exceptions=False)
    return result.output


def test_a_list_shows_ports_and_holders_when_it_is_wide() -> None:
    text = run(list_identities, "-o", "wide")
    [line] = [one for one in text.splitlines() if one.startswith("70000")]
    assert all(one in line for one in ("http:TCP/80", "cluster", "used", "3", "4"))


@pytest.mark.parametrize(("namespace", "found"), [("default", [70_000]), ("shop", [])])
def test_a_namespace_chooses_its_identities(namespace: str, found: list[int]) -> None:
    rows = json.loads(run(list_identities, "-n", namespace, "-o", "json"))
    assert [row["id"] for row in rows] == found


def test_a_selector_chooses_by_label() -> None:
    assert [
        row["id"] for row in json.loads(run(list_identities, "-l", "app=web", "-o", "json"))
    ] == [70_000]


def test_one_identity_is_told_with_everything() -> None:
    lines = run(get_identity, "70000").splitlines()
    assert lines == [
        "identity 70000, cluster, used",
        "endpoints: 2 (3, 4)",
        "port http:TCP/80",
        "  cni:app=web",
        "  k8s:io.kubernetes.pod.namespace=default",
    ]
    assert run(get_identity, "2").splitlines()[-1].strip() == "reserved:world"


def test_what_nobody_knows_is_not_found() -> None:
    with pytest.raises(CliError) as raised:
        run(get_identity, "77")
    assert raised.value.exit_code == EXIT_NOT_FOUND


def test_endpoints_of_several_nodes_carry_their_nodes_names() -> None:
    merged = _merge([(Agent("a", "n1"), WEB), (Agent("b", "n2"), {**WEB, "endpointIds": [9]})])
    assert merged["endpoints"] == 4
    assert merged["endpointIds"] == ["n1/3", "n1/4", "n2/9"]
