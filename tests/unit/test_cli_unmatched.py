"""Policies that name what nothing has are accepted, and warned of with name and field."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podwire.cli.main import main
from podwire.control.identity.filter import LabelFilter
from podwire.control.policy.unmatched import find_mentions, find_unmatched
from podwire.store.manifest import dump
from podwire.store.sqlite import SqliteStore
from tests.unit.objects_agent import serving_objects
from tests.unit.policies import cidr_group, cilium_policy, network_policy

HASH = "pod-template-hash"


def cilium(**spec: Any) -> dict[str, Any]:
    document = cilium_policy()
    return {**document, "spec": {**document["spec"], **spec}}


def k8s(**spec: Any) -> dict[str, Any]:
    return network_policy("web", "default", **spec)


def group_rule(name: str) -> dict[str, Any]:
    return cilium(egress=[{"toCIDRSet": [{"cidrGroupRef": name}]}])


SUBJECT = k8s(podSelector={"matchLabels": {HASH: "1"}})


@pytest.mark.parametrize(
    ("document", "patterns", "paths"),
    [
        (k8s(), (), []),
        (SUBJECT, (), [f"spec.podSelector.matchLabels.{HASH}"]),
        (
            k8s(podSelector={"matchLabels": {"tier": "1"}}),
            ("tier",),
            ["spec.ingress[0].from[0].podSelector.matchLabels.app"],
        ),
        (
            k8s(podSelector={"matchExpressions": [{"key": HASH, "operator": "Exists"}]}),
            (),
            ["spec.podSelector.matchExpressions[0].key"],
        ),
        (
            k8s(ingress=[{"from": [{"namespaceSelector": {"matchLabels": {HASH: "1"}}}]}]),
            (),
            [],
        ),
        (
            k8s(),
            ("!io.cilium.k8s.namespace.labels.team", "!app"),
            [
                "spec.podSelector.matchLabels.app",
                "spec.ingress[0].from[0].podSelector.matchLabels.app",
            ],
        ),
        (
            k8s(ingress=[{"from": [{"namespaceSelector": {"matchLabels": {"team": "a"}}}]}]),
            ("!io.cilium.k8s.namespace.labels.team",),
            ["spec.ingress[0].from[0].namespaceSelector.matchLabels.team"],
        ),
        (cilium(), (), []),
        (
            cilium(ingress=[{"fromEndpoints": [{"matchLabels": {f"k8s:{HASH}": "1"}}]}]),
            (),
            [f"spec.ingress[0].fromEndpoints[0].matchLabels['k8s:{HASH}']"],
        ),
        (cilium(ingress=[{"fromEndpoints": [{"matchLabels": {"reserved:host": ""}}]}]), (), []),
        (cilium(), ("!cni:app",), []),
        (group_rule("office"), (), []),
        (group_rule("home"), (), ["spec.egress[0].toCIDRSet[0].cidrGroupRef"]),
        (
            cilium(egress=[{"toCIDRSet": [{"cidrGroupSelector": {"matchLabels": {HASH: "1"}}}]}]),
            (),
            [],
        ),
        (cidr_group(), (), []),
    ],
    ids=[
        "nothing",
        "subject",
        "included-by-hand-nothing-else-counts",
        "expression",
        "label-of-a-namespace-counts",
        "excluded-by-hand",
        "label-of-a-namespace-excluded",
        "cilium-nothing",
        "cilium-peer",
        "reserved-labels-have-no-filter",
        "another-source-may-have-it",
        "group-that-is-there",
        "group-that-is-not",
        "labels-of-groups-are-not-filtered",
        "no-policy",
    ],
)
def test_what_nothing_has_is_found_with_its_path(
    document: dict[str, Any], patterns: tuple[str, ...], paths: list[str]
) -> None:
    mentions = find_mentions(document)
    found = find_unmatched(mentions, LabelFilter.parse(patterns), {"office"})
    assert [entry.path for entry in found] == paths


class Agent:
    """The command line with an agent, or with the store itself."""

    def __init__(self, options: tuple[str, ...], capture: pytest.CaptureFixture[str]) -> None:
        self._options = options
        self._capture = capture

    def run(self, *words: str) -> tuple[str, str]:
        with pytest.raises(SystemExit) as leave:
            main([*words, *self._options])
        assert leave.value.code == 0
        out, err = self._capture.readouterr()
        return out, err


ROW = {
    "kind": "CiliumNetworkPolicy",
    "namespace": "default",
    "name": "web",
    "rules": 1,
    "endpoints": 0,
    "ingress": True,
    "egress": True,
    "problem": "",
}
OTHER_ROW = {**ROW, "namespace": "shop", "name": "other"}


@pytest.fixture(params=["agent", "store"])
def agent(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[Agent]:
    path = tmp_path / "store.db"
    with contextlib.closing(SqliteStore(path)) as store:
        if request.param == "store":
            yield Agent(("--store", f"sqlite://{path}"), capsys)
            return
        socket = tmp_path / "api.sock"
        with serving_objects(socket, store, policies=(ROW, OTHER_ROW)):
            yield Agent(("--agent", str(socket)), capsys)


WARNING = (
    "warning: ciliumnetworkpolicies default/web: FILE:{line} (document 1)"
    " spec.egress[0].toCIDRSet[0].cidrGroupRef names 'home': there is no such CiliumCIDRGroup\n"
)


def write(directory: Path, *documents: dict[str, Any]) -> str:
    path = directory / "policy.yaml"
    path.write_text(dump(documents))
    return str(path)


def expected(path: str) -> str:
    lines = Path(path).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "cidrGroupRef" in text)
    return WARNING.replace("FILE", path).format(line=line)


def test_apply_warns_with_file_and_line_until_the_group_is_there(
    agent: Agent, tmp_path: Path
) -> None:
    path = write(tmp_path, group_rule("home"))
    assert agent.run("apply", "-f", path)[1] == expected(path)
    assert agent.run("apply", "-f", path, "--dry-run", "-o", "json")[1] == expected(path)
    assert agent.run("apply", "-f", path, "-q")[1] == ""
    path = write(tmp_path, group_rule("home"), cidr_group("home"))
    assert agent.run("apply", "-f", path)[1] == ""
    assert agent.run("apply", "-f", write(tmp_path, group_rule("home")))[1] == ""


@pytest.mark.parametrize("agent", ["agent"], indirect=True)
def test_the_list_warns_of_what_is_stored_and_chooses_by_namespace_and_label(
    agent: Agent, tmp_path: Path
) -> None:
    policy = group_rule("home")
    policy["metadata"]["labels"] = {"team": "a"}
    agent.run("apply", "-q", "-f", write(tmp_path, policy))
    warning = WARNING.replace("FILE:{line} (document 1) ", "")
    out, err = agent.run("policy", "list", "-o", "name")
    assert out.split() == ["CiliumNetworkPolicy/default/web", "CiliumNetworkPolicy/shop/other"]
    assert err == warning
    for options in (["-n", "default"], ["-l", "team=a"]):
        out, err = agent.run("policy", "list", "-o", "name", *options)
        assert (out.split(), err) == (["CiliumNetworkPolicy/default/web"], warning)
    assert agent.run("policy", "list", "-n", "nowhere", "--no-headers") == ("", "")


def test_validate_warns_by_what_the_files_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, group_rule("home"))
    assert Agent((), capsys).run("policy", "validate", "-f", path) == (
        "ciliumnetworkpolicies default/web is valid\n",
        expected(path),
    )


def test_an_agent_filters_by_its_own_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, cilium())
    socket = tmp_path / "api.sock"
    with (
        contextlib.closing(SqliteStore(tmp_path / "store.db")) as store,
        serving_objects(socket, store, label_patterns=("!app$",)),
    ):
        err = Agent(("--agent", str(socket)), capsys).run("apply", "-f", path)[1]
    assert err.count("selects by 'app', which identity_label_filter keeps out") == 2
