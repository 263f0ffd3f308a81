"""Policy by the command line, as a person uses it on a lab of two nodes: write it, see it, ask why, undo it."""

import contextlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from podwire.lab import labs, traffic
from tests.lab.labrig import Lab, Said, podwire
from tests.unit.policies import cilium_policy, namespace_object, network_policy, workload
from tests.waiting import wait_for

pytestmark = pytest.mark.lab

PODWIRE = str(Path(sys.executable).parent / "podwire")
PORT = 5432
NAME = "db-only-from-proxy"
POLICY = f"""\
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {{name: {NAME}, namespace: default}}
spec:
  podSelector: {{matchLabels: {{app: db}}}}
  ingress:
  - from: [{{podSelector: {{matchLabels: {{app: proxy}}}}}}]
    ports: [{{port: {PORT}, protocol: TCP}}]
"""
KINDS_OF_TEST = ("networkpolicies", "ciliumnetworkpolicies", "workloads")
BY = f"NetworkPolicy default/{NAME}"
REFUSED_AFTER_S, ANSWER_DEADLINE_S = 0.3, 10.0
OPEN, CLOSED = [True, True], [False, False]


@pytest.fixture(scope="module")
def pods(pair_lab: Lab) -> Iterator[Lab]:
    """Three pods on the first node, and a proxy on the second."""
    for name, node, app in (
        ("db", "node1", "db"),
        ("proxy", "node1", "proxy"),
        ("other", "node1", "other"),
        ("far", "node2", "proxy"),
    ):
        serve = [f"{PORT}/tcp"] if name == "db" else []
        labs.run(pair_lab.name, name, node, labels={"app": app}, serve=serve)
    yield pair_lab
    for pod in pair_lab.state.pods:
        labs.remove(pair_lab.name, pod.full_name)


@pytest.fixture
def lab(pods: Lab) -> Iterator[Lab]:
    """The pods' lab; what a test wrote goes away with it."""
    yield pods
    for kind in KINDS_OF_TEST:
        if names := pods.cli("get", kind, "-o", "name").lines:
            for name in names:
                assert pods.cli("delete", kind, name.partition("/")[2]).code == 0
    wait_for(lambda: pods.cli("policy", "list", "-q").lines == [], "policies to be out of force")


@pytest.fixture
def closed(lab: Lab) -> Lab:
    """The lab with the policy in force."""
    apply(lab)
    return lab


def shell(lab: Lab, *arguments: str, stdin: str = "") -> Said:
    """Run a command as a person does: as a process, with a standard input."""
    done = subprocess.run(
        [PODWIRE, *arguments, "--lab", lab.name],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Said(done.returncode, done.stdout, done.stderr)


def apply(lab: Lab, *more: str, text: str = POLICY) -> int:
    """Apply from stdin and wait until all nodes enforce it; gives the revision."""
    done = shell(lab, "apply", "-f", "-", "-o", "json", *more, stdin=text)
    assert done.code == 0, done.err
    revision = int(done.document[-1]["revision"])
    assert lab.cli("policy", "wait", str(revision), "--timeout", "30").code == 0
    return revision


def words(said: Said) -> list[list[str]]:
    """Give the words of a table's lines."""
    return [line.split() for line in said.lines]


def assert_failed(said: Said, code: int, *expected: str) -> None:
    """Fail unless a command ended with this code, nothing on stdout and two lines on stderr."""
    assert (said.code, said.out) == (code, ""), said
    first, second = said.err.splitlines()
    assert (first[:7], second[:6]) == ("error: ", "hint: "), said.err
    for part in expected:
        assert part in said.err, said.err


def reach(lab: Lab, source: str, timeout_s: float = REFUSED_AFTER_S) -> list[bool]:
    """Tell for each of the database's addresses whether a pod reaches it."""
    pods = {pod.name: pod for pod in lab.state.pods}
    return [
        traffic.connect(pods[source].netns, address, PORT, timeout_s=timeout_s).ok
        for address in pods["db"].addresses
    ]


def assert_reach(lab: Lab, source: str, expected: Sequence[bool]) -> None:
    """Fail unless a pod reaches the database, or does not; what must pass is given its time."""
    assert reach(lab, source, ANSWER_DEADLINE_S if any(expected) else REFUSED_AFTER_S) == expected


def address_of(lab: Lab, name: str) -> str:
    """Give the IPv4 address of a pod."""
    [pod] = [pod for pod in lab.state.pods if pod.name == name]
    return pod.addresses[0]


# Writing


def test_from_a_file_to_the_store_and_back(lab: Lab, tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(POLICY)
    head = ["KIND", "NAMESPACE", "NAME", "RESULT"]
    row = ["networkpolicies", "default", NAME]
    dry = lab.cli("apply", "-f", str(file), "--dry-run")
    assert (dry.code, words(dry)) == (0, [head, [*row, "created", "(dry", "run)"]])
    assert_failed(lab.cli("get", "netpol", NAME), 4, f"get networkpolicies default/{NAME}")
    difference = lab.cli("diff", "-f", str(file))
    assert difference.code == 1
    assert f"+  name: {NAME}" in difference.lines
    assert words(lab.cli("apply", "-f", str(file))) == [head, [*row, "created"]]
    assert lab.cli("diff", "-f", str(file)) == Said(0, "", "")
    assert words(lab.cli("apply", "-f", str(file)))[1][-1] == "unchanged"
    gone = lab.cli("delete", "-f", str(file))
    assert (gone.code, words(gone)[1][-1]) == (0, "deleted")
    assert_failed(lab.cli("delete", "netpol", NAME), 4, NAME)


def test_what_changes_is_shown_before_it_is_done(closed: Lab) -> None:
    changed = POLICY.replace("app: proxy", "app: gateway")
    difference = shell(closed, "diff", "-f", "-", stdin=changed)
    assert difference.code == 1
    assert [line for line in difference.lines if line[:2] in ("+ ", "- ")] == [
        "-          app: proxy",
        "+          app: gateway",
    ]
    assert_reach(closed, "proxy", OPEN)
    assert words(shell(closed, "apply", "-f", "-", stdin=changed))[1][-1] == "configured"
    wait_for(lambda: reach(closed, "proxy") == CLOSED, "the change to be in force", 30)


def test_get_in_every_form(closed: Lab) -> None:
    table = closed.cli("get", "netpol", "-n", "default")
    assert [line[:2] for line in words(table)] == [["NAMESPACE", "NAME"], ["default", NAME]]
    assert words(closed.cli("get", "netpol", "-o", "wide"))[0][-2:] == ["REVISION", "LABELS"]
    assert closed.cli("get", "netpol", NAME, "-o", "name").lines == [
        f"networkpolicies/default/{NAME}"
    ]
    [listed] = closed.cli("get", "netpol", "-o", "json").document["items"]
    assert listed == closed.cli("get", "netpol", NAME, "-o", "json").document
    assert listed["spec"]["podSelector"] == {"matchLabels": {"app": "db"}}
    text = closed.cli("get", "netpol", "-o", "yaml").out
    assert yaml.safe_load(text)["items"] == [listed]
    assert words(shell(closed, "apply", "-f", "-", stdin=text))[1][-1] == "unchanged"
    described = closed.cli("describe", "netpol", f"default/{NAME}").lines
    assert described[0].split() == ["Name:", NAME]
    assert any("app: proxy" in line for line in described)


REFUSED = {
    "a port that is none": (
        network_policy("a", ingress=[{"ports": [{"port": 70000}]}]),
        "spec.ingress[0].ports[0].port is 70000",
    ),
    "a range that goes back": (
        network_policy("a", ingress=[{"ports": [{"port": 9, "endPort": 8}]}]),
        "spec.ingress[0].ports[0].endPort",
    ),
    "an address that is none": (
        network_policy("a", ingress=[{"from": [{"ipBlock": {"cidr": "10.0.0.0/33"}}]}]),
        "spec.ingress[0].from[0].ipBlock.cidr",
    ),
    "a selector without values": (
        network_policy("a", podSelector={"matchExpressions": [{"key": "a", "operator": "In"}]}),
        "spec.podSelector.matchExpressions[0].values",
    ),
    "a label that breaks the grammar": (
        network_policy("a", podSelector={"matchLabels": {"app": "-"}}),
        "spec.podSelector.matchLabels.app is '-'",
    ),
    "a field that we do not know": (
        network_policy("a", podSelectors={}),
        "spec.podSelectors",
    ),
    "names of the world": (
        {
            **cilium_policy("a"),
            "spec": {
                "endpointSelector": {},
                "egress": [{"toFQDNs": [{"matchName": "example.com"}]}],
            },
        },
        "spec.egress[0].toFQDNs",
    ),
    "rules above layer 4": (
        {
            **cilium_policy("a"),
            "spec": {
                "endpointSelector": {},
                "ingress": [{"toPorts": [{"ports": [{"port": "80"}], "rules": {"http": [{}]}}]}],
            },
        },
        "spec.ingress[0].toPorts[0].rules",
    ),
    "a namespace that does not exist": (
        network_policy("a", "nowhere"),
        "metadata.namespace is 'nowhere', which does not exist",
    ),
    "an object that comes twice": (
        {**yaml.safe_load(POLICY)},
        f"is networkpolicies default/{NAME} again",
    ),
    "a kind that is none of ours": (
        {"apiVersion": "v1", "kind": "Gadget", "metadata": {"name": "a"}},
        "kind is 'Gadget'",
    ),
    "a kind that Kubernetes makes": (
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}},
        "Kubernetes makes these",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_named_and_changes_nothing(
    closed: Lab, tmp_path: Path, case: str
) -> None:
    document, expected = REFUSED[case]
    file = tmp_path / "policies.yaml"
    opened = POLICY.replace("app: proxy", "app: other")
    file.write_text(f"{opened}---\n{json.dumps(document)}\n")
    before = closed.cli("get", "netpol", "-o", "json").document
    for command in (("apply",), ("apply", "--dry-run"), ("diff",)):
        said = closed.cli(*command, "-f", str(file))
        assert_failed(said, 6, f"{file}:", "(document 2, ", expected)
    assert closed.cli("get", "netpol", "-o", "json").document == before
    assert closed.cli("policy", "list", "-q").lines == [f"NetworkPolicy/default/{NAME}"] * 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("a: 1\na: 2\n", "has the key 'a' twice", id="a key twice"),
        pytest.param("a: [\n", "document 1", id="no YAML"),
        pytest.param(
            "a: &a [x,x,x,x,x,x,x,x,x]\n"
            + "".join(
                f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n"
                for a, b in zip("abcdefg", "bcdefgh", strict=True)
            ),
            "document 1",
            id="a bomb",
        ),
        pytest.param("#" * (10 << 20), "more than 8388608 bytes", id="10 MiB"),
        pytest.param("", "holds no object", id="nothing"),
    ],
)
def test_text_that_is_no_object_is_refused(closed: Lab, text: str, expected: str) -> None:
    said = shell(closed, "apply", "-f", "-", stdin=text)
    assert_failed(said, 6, "stdin", expected)
    assert closed.cli("policy", "list", "-q").lines == [f"NetworkPolicy/default/{NAME}"] * 2


def test_validate_needs_no_agent(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(POLICY)
    bad.write_text(POLICY + "---\n" + json.dumps(network_policy("b", policyTypes=["In"])))
    away = ("--agent", "/nonexistent/api.sock")
    said = podwire("policy", "validate", "-f", str(good), *away)
    assert (said.code, said.lines) == (0, [f"networkpolicies default/{NAME} is valid"])
    document = podwire("policy", "validate", "-f", str(good), "-o", "json", *away).document
    assert document == {"valid": [f"networkpolicies default/{NAME}"]}
    said = podwire("policy", "validate", "-f", str(good), "-f", str(bad), *away)
    assert_failed(said, 6, f"{bad}:", "(document 2, ", "spec.policyTypes[0]")
    assert_failed(podwire("apply", "-f", str(good), *away), 3, "/nonexistent/api.sock")


def test_a_policy_may_come_with_its_namespace_and_keeps_it(lab: Lab) -> None:
    text = json.dumps(namespace_object("blue")) + "\n" + json.dumps(network_policy("a", "blue"))
    assert shell(lab, "apply", "-f", "-", stdin=text).code == 0
    assert_failed(lab.cli("delete", "namespace", "blue"), 5, "blue")
    gone = shell(lab, "delete", "-f", "-", stdin=text)
    assert gone.code == 0
    assert [line[2:] for line in words(gone)[1:]] == [["a", "deleted"], ["blue", "deleted"]]


def test_the_store_is_written_without_an_agent(tmp_path: Path) -> None:
    store = ("--store", f"sqlite://{tmp_path}/store.db")
    file = tmp_path / "policy.yaml"
    file.write_text(POLICY)
    assert podwire("get", "netpol", *store).code == 3
    assert podwire("diff", "-f", str(file), *store).code == 3
    assert words(podwire("apply", "-f", str(file), *store))[1][-1] == "created"
    assert podwire("diff", "-f", str(file), *store).code == 0
    assert podwire("get", "netpol", "-q", *store).lines == [f"networkpolicies/default/{NAME}"]
    assert podwire("delete", "netpol", NAME, *store).code == 0
    assert podwire("get", "netpol", NAME, *store).code == 4
    assert podwire("get", "netpol", "--store", "redis://x").code == 2


def test_what_is_written_to_the_labs_store_reaches_its_agents(lab: Lab, tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(POLICY)
    store = lab.state.plan.directory / "store.db"
    assert podwire("apply", "-f", str(file), "--store", f"sqlite://{store}").code == 0
    wait_for(
        lambda: lab.cli("policy", "list", "-q").lines == [f"NetworkPolicy/default/{NAME}"] * 2,
        "both agents to hear of it",
    )


# Seeing


HEADER = "NODE KIND NAMESPACE NAME RULES ENDPOINTS INGRESS EGRESS STATE PROBLEM"


def test_a_policy_is_listed_by_both_nodes_with_whom_it_selects(closed: Lab) -> None:
    said = closed.cli("policy", "list")
    assert words(said) == [
        HEADER.split(),
        ["node1", "NetworkPolicy", "default", NAME, "1", "1", "yes", "no", "enforced", "-"],
        ["node2", "NetworkPolicy", "default", NAME, "1", "0", "yes", "no", "enforced", "-"],
    ]
    rows = closed.cli("policy", "list", "-o", "json").document
    assert [(row["node"], row["endpoints"], row["problem"]) for row in rows] == [
        ("node1", 1, ""),
        ("node2", 0, ""),
    ]
    assert len(closed.cli("policy", "list", "--node", "node2", "--no-headers").lines) == 1


def identity_of(lab: Lab, pod: str) -> int:
    """Give the number of a pod's labels."""
    return int(lab.cli("endpoint", "get", pod, "-o", "json").document["identity"])


def proxy_identity(lab: Lab) -> int:
    """Give the number of the proxies' labels."""
    return identity_of(lab, "proxy")


def test_selectors_tell_whom_they_select_now(closed: Lab) -> None:
    # One key may get two numbers after a race in which the watch was slow (docs/identity.md).
    numbers = sorted({identity_of(closed, pod) for pod in ("proxy", "far")})
    rows = closed.cli("policy", "selectors", "--node", "node1", "-o", "json").document
    [row] = [row for row in rows if "app=proxy" in row["selector"]]
    assert (row["users"], row["identities"]) == (1, numbers)
    assert any(line[-1] == str(numbers[-1]) for line in words(closed.cli("policy", "selectors")))


@pytest.mark.parametrize("endpoint", ["db", "default/db", "pod-name:default/db", "ipv4:ADDRESS"])
def test_entries_of_an_endpoint_are_found_by_any_of_its_names(closed: Lab, endpoint: str) -> None:
    endpoint = endpoint.replace("ADDRESS", address_of(closed, "db"))
    said = closed.cli("policy", "entries", "--endpoint", endpoint, "--no-headers")
    [[node, _slot, *row]] = words(said)
    assert node == "node1"
    assert row[:5] == ["ingress", str(proxy_identity(closed)), "tcp", str(PORT), "allow"]
    assert row[5:8] == [*BY.split(), "ingress[0]"]


def test_entries_count_what_they_decided(closed: Lab) -> None:
    def hits() -> int:
        [row] = closed.cli("policy", "entries", "--endpoint", "db", "-o", "json").document
        assert "cni:app=proxy" in row["labels"]
        return int(row["hits"])

    before = hits()
    assert_reach(closed, "proxy", OPEN)
    wait_for(lambda: hits() >= before + 2, "a decision for each address")


TRACES: dict[str, tuple[str, str, str, int]] = {
    "the proxy": ("pod:default/proxy", "pod:default/db", f"{PORT}/tcp", 0),
    "the proxy at another port": ("pod:default/proxy", "pod:default/db", "80/tcp", 1),
    "the proxy by another protocol": ("pod:default/proxy", "pod:default/db", f"{PORT}/udp", 1),
    "a ping of the proxy": ("pod:default/proxy", "pod:default/db", "icmp", 1),
    "another pod": ("pod:default/other", "pod:default/db", f"{PORT}/tcp", 1),
    "another pod by its address": ("ip:OTHER", "pod:default/db", f"{PORT}/tcp", 1),
    "a pod of another node": ("pod:default/far", "pod:default/db", f"{PORT}/tcp", 0),
    "a pod of another node at another port": ("pod:default/far", "pod:default/db", "80/tcp", 1),
    "a ping of a pod of another node": ("pod:default/far", "pod:default/db", "icmpv6", 1),
    "a pod of another node as the target": ("pod:default/other", "pod:default/far", "80/tcp", 0),
    "labels": ("labels:app=proxy", "labels:app=db", f"{PORT}/tcp", 0),
    "labels of another namespace": (
        "labels:app=proxy,io.kubernetes.pod.namespace=blue",
        "pod:default/db",
        f"{PORT}/tcp",
        1,
    ),
    "the world": ("world", "pod:default/db", f"{PORT}/tcp", 1),
    "an address of the world": ("ip:203.0.113.9", "pod:default/db", f"{PORT}/tcp", 1),
    "the host": ("host", "pod:default/db", "80/tcp", 0),
    "the database to the world": ("pod:default/db", "world", "443/tcp", 0),
    "the database to itself": ("pod:default/db", "pod:default/db", "1/tcp", 0),
}


@pytest.mark.parametrize("case", TRACES)
def test_a_trace_ends_with_its_verdict(closed: Lab, case: str) -> None:
    source, target, port, code = TRACES[case]
    source = source.replace("OTHER", address_of(closed, "other"))
    ask = ("policy", "trace", "--from", source, "--to", target, "--port", port)
    said = closed.cli(*ask)
    verdict = "denied" if code else "allowed"
    assert (said.code, said.lines[0].split()[0], said.err) == (code, verdict, "")
    assert any("because: ingress: NetworkPolicy default/" in line for line in said.lines) == bool(
        code
    )
    assert closed.cli(*ask, "-o", "json").document["verdict"] == verdict
    assert closed.cli(*ask, "-q").code == code


@pytest.mark.parametrize("version", [4, 6])
def test_a_trace_of_addresses_is_about_their_family(lab: Lab, version: int) -> None:
    """Only IPv6 addresses are let in: the same two pods are answered by family."""
    selector = "from: [{podSelector: {matchLabels: {app: proxy}}}]"
    assert selector in POLICY
    apply(lab, text=POLICY.replace(selector, 'from: [{ipBlock: {cidr: "::/0"}}]'))
    db, other = (lab.state.find_pod(name).addresses[version == 6] for name in ("db", "other"))
    said = lab.cli(
        *("policy", "trace", "--from", f"ip:{other}", "--to", f"ip:{db}"),
        *("--port", f"{PORT}/tcp", "-o", "json"),
    )
    assert said.document["verdict"] == ("allowed" if version == 6 else "denied")
    timeout_s = ANSWER_DEADLINE_S if version == 6 else REFUSED_AFTER_S
    assert traffic.connect(lab.state.find_pod("other").netns, db, PORT, timeout_s=timeout_s).ok is (
        version == 6
    )


def test_a_trace_between_two_nodes_tells_both_sides(closed: Lab) -> None:
    said = closed.cli(
        *("policy", "trace", "--from", "pod:default/far", "--to", "pod:default/db"),
        *("--port", "80/tcp"),
    )
    assert said.lines[1:4] == [
        "  egress  allowed  no policy restricts this direction",
        f"  ingress denied   NetworkPolicy default/{NAME} default-deny",
        f"  because: ingress: NetworkPolicy default/{NAME} closes ingress for what no rule allows",
    ]
    nobody = ("policy", "trace", "--from", "pod:default/far", "--to", "pod:default/nobody")
    assert_failed(closed.cli(*nobody, "--port", "80/tcp"), 4, "find pod:default/nobody")


def test_a_trace_tells_what_packets_find(closed: Lab) -> None:
    for pod in ("proxy", "other"):
        traced = closed.cli(
            *("policy", "trace", "--from", f"pod:default/{pod}", "--to", "pod:default/db"),
            *("--port", f"{PORT}/tcp"),
        )
        assert_reach(closed, pod, (CLOSED if traced.code else OPEN))
    assert re.fullmatch(r"denied  \(policy revision \d+\)", traced.lines[0])
    assert traced.lines[1:] == [
        "  egress  allowed  no policy restricts this direction",
        f"  ingress denied   NetworkPolicy default/{NAME} default-deny",
        f"  because: ingress: NetworkPolicy default/{NAME} closes ingress for what no rule allows",
        f"  because: ingress: NetworkPolicy default/{NAME} ingress[0]: the peer's labels do not match"
        " app=proxy, k8s:io.kubernetes.pod.namespace=default (not app=proxy)",
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        ("policy trace --from pod:default/db --port 80/tcp", 2, "--to"),
        ("policy trace --from pod:default/db --to world", 2, "--port"),
        ("policy wait soon", 2, "REVISION"),
        ("policy wait 1 --kind pods", 2, "networkpolicies"),
        ("policy validate", 2, "--file"),
        ("get gadgets", 2, "there is no such kind"),
        ("policy entries --endpoint nobody", 4, "nobody"),
        ("policy trace --from pod:default/nobody --to world --port 80/tcp", 4, "default/nobody"),
        ("policy trace --from pod:default/no --to pod:default/db --port 1/tcp", 4, "ip:ADDRESS"),
        ("identity get 77777", 4, "77777"),
        ("endpoint label nobody a=b", 4, "nobody"),
        ("policy trace --from nobody --to world --port 80/tcp", 6, "from is 'nobody'"),
        ("policy trace --from ip:10.1 --to world --port 80/tcp", 6, "from has '10.1'"),
        ("policy trace --from labels:app --to world --port 80/tcp", 6, "from has 'app'"),
        ("policy trace --from host --to world --port 0/tcp", 6, "port is '0/tcp'"),
        ("policy trace --from host --to world --port 80/ip", 6, "port is '80/ip'"),
    ],
)
def test_exit_codes_tell_usage_absence_and_refusal(
    closed: Lab, arguments: str, code: int, expected: str
) -> None:
    assert_failed(closed.cli(*arguments.split()), code, expected)


def test_wait_fails_with_those_who_are_behind(closed: Lab) -> None:
    said = closed.cli("policy", "wait", str(1 << 40), "--timeout", "0.1")
    assert_failed(said, 1, "default/db", "node1")


def test_wait_can_be_for_policies_of_one_kind(closed: Lab) -> None:
    revision = apply(closed)
    said = closed.cli("policy", "wait", str(revision), "--kind", "netpol", "--timeout", "60")
    assert said.code == 0, said
    said = closed.cli("policy", "wait", str(1 << 40), "--kind", "cnp", "--timeout", "0.1")
    assert_failed(said, 1, "default/db", "node1")


def test_endpoint_get_tells_what_is_enforced_in_each_direction(lab: Lab) -> None:
    def wait_seen(ingress: str, egress: str, revision: int) -> None:
        """Others may write to the store too: its revision goes on."""

        def is_seen() -> bool:
            document = lab.cli("endpoint", "get", "db", "-o", "json").document
            enforced = {"ingress": ingress, "egress": egress}
            is_there = document["policyEnforcement"] == enforced
            return bool(is_there and document["policyRevision"] >= revision)

        wait_for(is_seen, f"ingress {ingress}, egress {egress} at revision {revision}")

    wait_seen("disabled", "disabled", 0)
    revision = apply(lab)
    wait_seen("enabled", "disabled", revision)
    egress = json.dumps(
        network_policy(
            NAME, podSelector={"matchLabels": {"app": "db"}}, policyTypes=["Egress"], ingress=[]
        )
    )
    revision = apply(lab, text=egress)
    wait_seen("disabled", "enabled", revision)
    [told] = [row for row in words(lab.cli("endpoint", "get", "db")) if row[0] == "policyRevision:"]
    assert int(told[1]) >= revision
    assert ["in", "disabled,", "out", "enabled"] in [
        line[-5:-1] for line in words(lab.cli("endpoint", "list"))
    ]


# Identities and labels


def test_pods_of_two_nodes_with_the_same_labels_have_one_identity(lab: Lab) -> None:
    number = proxy_identity(lab)
    rows = lab.cli("identity", "list", "-l", "app=proxy", "-o", "json").document
    assert [(row["node"], row["id"], row["endpoints"]) for row in rows] == [
        ("node1", number, 1),
        ("node2", number, 1),
    ]
    document = lab.cli("identity", "get", str(number), "-o", "json").document
    assert document["endpoints"] == 2
    assert sorted(path.partition("/")[0] for path in document["endpointIds"]) == ["node1", "node2"]
    text = lab.cli("identity", "get", str(number)).lines
    assert text[0] == f"identity {number}, cluster, used"
    assert "  cni:app=proxy" in text
    table = lab.cli("identity", "list", "--node", "node1", "-l", "app=proxy")
    assert words(table)[0] == ["ID", "LABELS", "ENDPOINTS"]
    assert words(table)[1][0] == str(number)
    assert lab.cli("identity", "get", "2").lines[-1].strip() == "reserved:world"


def test_a_label_opens_and_closes(closed: Lab) -> None:
    assert_reach(closed, "other", CLOSED)
    said = closed.cli("endpoint", "label", "other", "app=proxy", "team=blue")
    assert {"cni:app=proxy", "cni:team=blue"} <= set(said.lines)
    assert_reach(closed, "other", OPEN)
    said = closed.cli("endpoint", "label", "default/other", "app=other", "team-")
    assert "cni:app=other" in said.lines
    assert not any("team" in line for line in said.lines)
    assert closed.cli("endpoint", "label", "other").lines == said.lines
    assert_reach(closed, "other", CLOSED)


@pytest.mark.parametrize(
    "change",
    ["bad", "a b=c", "a=-", "podwire.io/name=x", "k8s:io.kubernetes.pod.namespace=x", "=x"],
)
def test_a_label_that_may_not_be_is_refused_with_all_others(lab: Lab, change: str) -> None:
    before = lab.cli("endpoint", "label", "other").lines
    assert_failed(
        lab.cli("endpoint", "label", "other", "good=1", change), 6, f"labels[1] {change!r}"
    )
    assert lab.cli("endpoint", "label", "other").lines == before


def test_a_workload_labels_pods_of_both_nodes(closed: Lab) -> None:
    assert_reach(closed, "other", CLOSED)
    text = json.dumps(workload("w", namePattern="oth*", labels={"app": "proxy"}))
    assert shell(closed, "apply", "-f", "-", stdin=text).code == 0
    wait_for(lambda: reach(closed, "other") == OPEN, "the Workload's label")
    assert closed.cli("delete", "workload", "w").code == 0
    wait_for(lambda: reach(closed, "other") == CLOSED, "the label to be gone", 30)


# Events


@contextlib.contextmanager
def monitoring(lab: Lab, *arguments: str) -> Iterator[list[str]]:
    """Run `podwire monitor` in another process; gives the list that its lines are put into."""
    lines: list[str] = []
    with subprocess.Popen(
        [PODWIRE, "monitor", *arguments, "--lab", lab.name], stdout=subprocess.PIPE, text=True
    ) as monitor:
        assert monitor.stdout is not None
        output = map(str.rstrip, monitor.stdout)
        reader = threading.Thread(target=lines.extend, args=(output,))
        reader.start()
        try:
            yield lines
        finally:
            monitor.terminate()
            reader.join()


def provoke(lab: Lab, lines: Sequence[str], source: str) -> str:
    """Connect from both pods until a line tells of `source` speaking to db, and give it.

    db's answers have lines too: one that is repeated for a connection from before the policy.
    """

    def found() -> str:
        for pod in ("proxy", "other"):
            reach(lab, pod)
        told = (line for line in lines if "-> default/db" in line.partition(source)[2])
        return next(told, "")

    return str(wait_for(found, f"a line of the monitor with {source!r}"))


def test_monitor_names_the_policy_of_a_drop(closed: Lab) -> None:
    with monitoring(closed, "--type", "drop") as lines:
        line = provoke(closed, lines, f"default/other {address_of(closed, 'other')}:")
    assert "dropped (policy)" in line
    assert f"-> default/db {address_of(closed, 'db')}:{PORT}  tcp ingress" in line
    assert line.endswith(f"by {BY} default-deny")
    assert not any("forwarded" in line for line in lines)
    [flow] = closed.cli(
        *("observe", "--verdict", "dropped", "--from", "default/other", "--to", "default/db"),
        *("--last", "1", "-o", "json"),
    ).document
    assert flow["policies"] == [
        {"kind": "NetworkPolicy", "namespace": "default", "name": NAME, "rule": "default-deny"}
    ]


def test_monitor_names_the_rule_of_what_passes(closed: Lab) -> None:
    with monitoring(closed, "--type", "policy") as lines:
        line = provoke(closed, lines, f"default/proxy {address_of(closed, 'proxy')}:")
    assert "forwarded" in line
    assert line.endswith(f"by {BY} ingress[0]")
    assert not any("dropped" in line for line in lines)


def test_monitor_of_one_endpoint_shows_no_other(closed: Lab) -> None:
    with monitoring(closed, "--endpoint", "default/proxy") as lines:
        provoke(closed, lines, "default/proxy")
    assert lines
    assert all("default/proxy" in line for line in lines)


# Two nodes


def test_what_is_written_by_one_node_holds_on_the_other(lab: Lab) -> None:
    apply(lab, "--node", "node2")
    assert_reach(lab, "proxy", OPEN)
    assert_reach(lab, "other", CLOSED)
    assert lab.cli("get", "netpol", "-q", "--node", "node1").lines == [
        f"networkpolicies/default/{NAME}"
    ]
    assert lab.cli("delete", "netpol", NAME, "--node", "node1").code == 0
    wait_for(lambda: reach(lab, "other") == OPEN, "the database to be open")
    wait_for(lambda: lab.cli("policy", "list", "-q").lines == [], "both nodes to have it gone")


def test_a_node_whose_agent_is_away_still_enforces_and_takes_up_what_it_missed(
    closed: Lab,
) -> None:
    assert closed.cli("lab", "node", "kill", "node1").code == 0
    try:
        assert_reach(closed, "proxy", OPEN)
        assert_reach(closed, "other", CLOSED)
        said = closed.cli("policy", "list")
        assert said.code == 3
        assert [line[0] for line in words(said)[1:]] == ["node2"]
        assert closed.cli("policy", "wait", "1").code == 3
        assert shell(closed, "delete", "-f", "-", stdin=POLICY).code == 0  # by node2's agent
        assert_reach(closed, "other", CLOSED)
    finally:
        assert closed.cli("lab", "node", "start", "node1").code == 0
    wait_for(lambda: reach(closed, "other") == OPEN, "what it missed to be in force")
