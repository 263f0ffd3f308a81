"""A policy that cannot be enforced whole closes whom it could select, and nobody else: every level of a document."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import pytest
import yaml

from podwire.control.documents.damage import read_object, stand_in
from podwire.control.policy.oracle import Basis, Question, evaluate
from podwire.control.policy.reading import Unenforceable
from podwire.control.policy.rule import PolicyRules
from podwire.control.policy.rules_k8s import decode_network_policy
from podwire.model.policy import Direction, Verdict
from podwire.model.store import ObjectKey, StoredObject, value_of
from podwire.model.store.kinds import KINDS
from tests.policy_cases import HOME, PODS, BadDocument, bad_documents, ccnp, cnp, np
from tests.policy_cases.bad_documents import change, read
from tests.policy_cases.sides import make_party

A: Final = "podSelector: {matchLabels: {app: a}}"
E: Final = "endpointSelector: {matchLabels: {app: a}}"
ELSEWHERE: Final = "endpointSelector: {matchLabels: {io.kubernetes.pod.namespace: red}}"
ONE: Final = {f"{HOME}/a"}
HOMES: Final = {title for title in PODS if title.startswith(f"{HOME}/")}
EVERYWHERE: Final = {title for title in PODS if title.endswith("/a")}
ALL: Final = set(PODS)
PLURALS: Final = {kind.name: kind.plural for kind in KINDS}

READ: Final = [
    ("a field beside spec", change(np(A), rules=[]), ONE),
    ("a field of spec", np(f"{A}\ntier: 1"), ONE),
    ("a field of a rule", np(f"{A}\ningress: [{{sources: []}}]"), ONE),
    ("a field of a peer", np(f"{A}\ningress: [{{from: [{{podSelector: {{}}, x: 1}}]}}]"), ONE),
    ("a field of a block", np(f"{A}\negress: [{{to: [{{ipBlock: {{cidr: 10.0.0.0/8, x: 1}}}}]}}]"), ONE),
    ("a field of a port", np(f"{A}\ningress: [{{ports: [{{port: 1, x: 1}}]}}]"), ONE),
    ("a newer version", change(np(A), apiVersion="networking.k8s.io/v2"), ONE),
    ("an unknown type", np(f"{A}\npolicyTypes: [Forward]"), ONE),
    ("an unknown protocol", np(f"{A}\ningress: [{{ports: [{{protocol: QUIC}}]}}]"), ONE),
    ("a bad block", np(f"{A}\ningress: [{{from: [{{ipBlock: {{cidr: 10.0.0.0/33}}}}]}}]"), ONE),
    ("ingress alone", np(f"{A}\npolicyTypes: [Ingress]\nx: 1"), ONE),
    ("egress alone", np(f"{A}\npolicyTypes: [Egress]\nx: 1"), ONE),
    ("both", np(f"{A}\npolicyTypes: [Ingress, Egress]\nx: 1"), ONE),
    ("no selector", np("x: 1"), HOMES),
    ("a field of the selector", np("podSelector: {matchNames: [a]}"), HOMES),
    ("an unknown operator", np("podSelector: {matchExpressions: [{key: a, operator: Gt}]}"), HOMES),
    ("a key that is no label", np("podSelector: {matchLabels: {podwire.io/name: a}}"), HOMES),
    ("cilium: layer 7", cnp(f"{E}\ningress: [{{toPorts: [{{rules: {{}}, ports: [{{port: '1'}}]}}]}}]"), ONE),
    ("cilium: names", cnp(f"{E}\negress: [{{toFQDNs: [{{matchName: x}}]}}]"), ONE),
    ("cilium: a field of spec", cnp(f"{E}\ningressAudit: [{{}}]"), ONE),
    ("cilium: no selector", cnp("ingress: [{}]"), HOMES),
    ("cilium: no rule", cnp(E), ONE),
    ("cilium: another namespace", cnp(f"{ELSEWHERE}\ningress: [{{}}]"), HOMES),
    ("clusterwide: names", ccnp(f"{E}\negress: [{{toFQDNs: [{{matchName: x}}]}}]"), EVERYWHERE),
    ("clusterwide: no selector", ccnp("ingress: [{}]"), ALL),
    ("clusterwide: nodes", ccnp("nodeSelector: {}\ningress: [{}]"), set()),
]  # fmt: skip
UNREAD: Final = [
    ("rules that are text", np(f"{A}\ningress: everything"), ONE),
    ("a port that is true", np(f"{A}\ningress: [{{ports: [{{port: true}}]}}]"), ONE),
    ("labels of the policy that are a number", change(np(A), metadata={"name": "p", "labels": 7}), ONE),
    ("a wrong type and a field that is unknown", np(f"{A}\ningress: 7\nx: 1"), ONE),
    ("a selector that is a list", np("podSelector: [a]"), HOMES),
    ("a label that is a number", np("podSelector: {matchLabels: {v: 1}}"), HOMES),
    ("a spec that is a list", change(np(A), spec=[1]), HOMES),
    ("no spec", change(np(A), spec=None), HOMES),
    ("cilium: rules that are text", cnp(f"{E}\ningress: x"), ONE),
    ("cilium: specs that are text", change(cnp(f"{E}\ningress: [{{}}]"), specs="x"), HOMES),
    ("clusterwide: a spec that is text", change(ccnp(E), spec="x"), ALL),
]  # fmt: skip


def store(document: object, fault: str = "") -> StoredObject:
    found: Mapping[str, Any] = read(document) if isinstance(document, str) else document  # type: ignore[assignment]
    plural = PLURALS[found["kind"]]
    namespace = "" if "clusterwide" in plural else HOME
    return StoredObject(key=ObjectKey(plural, namespace, "p"), document=found, fault=fault)


def close(stored: StoredObject) -> Unenforceable:
    readable, fault = read_object(stored)
    standing = stand_in(stored, fault) if fault else readable
    assert standing is not None
    closing = value_of(standing, Unenforceable)
    assert closing is not None, "it would be enforced"
    return closing


def list_closed(rules: Iterable[PolicyRules], direction: Direction) -> set[str]:
    """Name the pods that the world does not reach, or that do not reach it."""
    policies = list(rules)
    found = set()
    for title in PODS:
        question = Question(make_party(title, 4), make_party("client", 4), direction, 6, 80)
        decided = evaluate(policies, (), question)
        if decided.verdict is Verdict.DENY:
            assert {name.path for name in decided.rules} == {"unenforceable"}
            found.add(title)
        host = Question(question.subject, make_party("host", 4), direction, 6, 80)
        is_host_in = evaluate(policies, (), host).basis is Basis.HOST
        assert is_host_in is (direction is Direction.INGRESS), "a node reaches its pods"
    return found


@pytest.mark.parametrize("direction", Direction, ids=lambda one: one.name.lower())
@pytest.mark.parametrize(
    ("document", "closed"), [row[1:] for row in READ], ids=[row[0] for row in READ]
)
def test_what_is_read_and_not_enforced_whole_closes_both_directions(
    document: object, closed: set[str], direction: Direction
) -> None:
    stored = store(document)
    assert not read_object(stored)[1], "it would stand as it was read before"
    assert list_closed(close(stored).rules, direction) == closed


@pytest.mark.parametrize(
    ("document", "closed"), [row[1:] for row in UNREAD], ids=[row[0] for row in UNREAD]
)
def test_what_cannot_be_read_closes_where_it_never_could_be(
    document: object, closed: set[str]
) -> None:
    stored = store(document)
    assert read_object(stored)[1], "an earlier version must stand"
    for direction in Direction:
        assert list_closed(close(stored).rules, direction) == closed


def test_what_the_store_itself_cannot_read_closes_its_namespace_or_everything() -> None:
    for document, closed in ((np(A), HOMES), (cnp(E), HOMES), (ccnp(E), ALL)):
        stored = StoredObject(key=store(document).key, fault="cut")
        assert list_closed(close(stored).rules, Direction.INGRESS) == closed


def list_bad() -> list[BadDocument]:
    return [case for case in bad_documents.CASES if case not in bad_documents.GROUPS]


@pytest.mark.parametrize("case", list_bad(), ids=lambda case: case.id)
def test_every_document_that_apply_refuses_closes_its_pods(case: BadDocument) -> None:
    document = case.document
    plural = "ciliumnetworkpolicies" if case.id.startswith("cilium") else "networkpolicies"
    if isinstance(document, Mapping) and document.get("kind") in PLURALS:
        plural = PLURALS[document["kind"]]
    namespace = "" if "clusterwide" in plural else HOME
    stored = StoredObject(key=ObjectKey(plural, namespace, "p"), document=document)  # type: ignore[arg-type]
    closing = close(stored)
    assert closing.reason
    about_nodes = isinstance(document, Mapping) and "nodeSelector" in (document.get("spec") or {})
    for direction in Direction:
        assert list_closed(closing.rules, direction) >= (set() if about_nodes else ONE)


ALLOW_ALL: Final = np(f"{A}\npolicyTypes: [Ingress, Egress]\ningress: [{{}}]\negress: [{{}}]", name="q")  # fmt: skip


@pytest.mark.parametrize(
    ("document", "passes"),
    [
        pytest.param(np(f"{A}\nx: 1"), {*Direction}, id="a NetworkPolicy can only allow"),
        pytest.param(cnp(f"{E}\ningress: [{{}}]\nlog: {{value: x}}"), {*Direction}, id="no denials"),
        pytest.param(cnp(f"{E}\ningressDeny: [{{}}]\nlog: {{value: x}}"), {Direction.EGRESS}, id="denials"),
        pytest.param(cnp(f"{E}\negressDeny: [{{}}]\nlog: {{value: x}}"), {Direction.INGRESS}, id="other"),
        pytest.param(cnp(f"{E}\ningress: [{{}}]\nx: 1"), set(), id="nobody knows what a field does"),
        pytest.param(cnp("ingress: [{}]"), set(), id="nobody knows whom it selects"),
    ],
)  # fmt: skip
def test_what_may_deny_wins_over_what_others_allow(document: str, passes: set[Direction]) -> None:
    policies = [decode_network_policy(yaml.safe_load(ALLOW_ALL)), *close(store(document)).rules]
    for direction in Direction:
        is_closed = f"{HOME}/a" in list_closed(policies, direction)
        assert is_closed is (direction not in passes)


@pytest.mark.parametrize(
    "key",
    [
        ObjectKey("networkpolicies", "", "/podwire/v1/objects/networkpolicies/x"),
        ObjectKey("ciliumclusterwidenetworkpolicies", "", "/podwire/v1/objects/x/y"),
        ObjectKey("networkpolicies", "", "p"),
        ObjectKey("namespaces", "", "shop"),
    ],
    ids=str,
)
def test_what_is_no_policys_key_closes_nothing(key: ObjectKey) -> None:
    assert stand_in(StoredObject(key=key), "cut") is None


def test_the_reason_is_short_however_long_the_document() -> None:
    closing = close(store(change(np(A), **{"x" * 5000: 1})))
    assert len(closing.message) < 400
