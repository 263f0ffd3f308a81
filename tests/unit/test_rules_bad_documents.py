"""Bad documents are refused whole, with every fault and its place; nothing but InvalidRequest ever comes out."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from podwire.control.policy.rules_cilium import (
    decode_cidr_group,
    decode_cilium_policy,
)
from podwire.control.policy.rules_k8s import decode_network_policy
from podwire.model.documents.reader import FAULTS_KEPT
from podwire.model.errors import InvalidRequest
from podwire.model.store.kinds import CIDR_GROUP, CILIUM_CLUSTERWIDE_POLICY, CILIUM_POLICY
from tests.policy_cases import BadDocument, cilium_policy, cnp, network_policy, np
from tests.policy_cases.bad_documents import CASES

Decoder = Callable[[Any], object]
CILIUM_KINDS: Mapping[str, Decoder] = {
    CILIUM_POLICY.name: decode_cilium_policy,
    CILIUM_CLUSTERWIDE_POLICY.name: decode_cilium_policy,
    CIDR_GROUP.name: decode_cidr_group,
}
DECODERS: tuple[Decoder, ...] = (decode_network_policy, decode_cilium_policy, decode_cidr_group)


def refuse(document: Any) -> InvalidRequest:
    """Give the error that a document is refused with."""
    decoder: Decoder = CILIUM_KINDS.get(document.get("kind"), decode_network_policy)
    with pytest.raises(InvalidRequest) as caught:
        decoder(document)
    return caught.value


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_bad_document_is_refused_at_its_place(case: BadDocument) -> None:
    error = refuse(case.document)
    found = {fault.path: fault.message for fault in error.faults}
    assert case.path in found
    assert case.message in found[case.path]
    assert error.hint


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_bad_document_has_the_one_fault_that_it_is_about(case: BadDocument) -> None:
    error = refuse(case.document)
    assert [fault.path for fault in error.faults] == [case.path]
    assert case.path in error.message


def test_the_table_is_as_large_as_promised_and_has_each_case_once() -> None:
    assert len(CASES) >= 80
    assert not [name for name, count in Counter(case.id for case in CASES).items() if count > 1]


def test_all_faults_are_told_at_once() -> None:
    error = refuse(
        yaml.safe_load(
            np(
                "podSelector: {matchLabels: {v: 1}}\npolicyTypes: [Both]\n"
                "ingress: [{from: [{}], ports: [{port: 0}]}, {ports: [{protocol: X}]}]\nmore: 1"
            )
        )
    )
    assert [fault.path for fault in error.faults] == [
        "spec.more",
        "spec.podSelector.matchLabels.v",
        "spec.policyTypes[0]",
        "spec.ingress[0].from[0]",
        "spec.ingress[0].ports[0].port",
        "spec.ingress[1].ports[0].protocol",
    ]
    assert "NetworkPolicy blue/p" in error.message
    assert "and 3 more" in error.message


def test_a_document_of_faults_is_told_in_part() -> None:
    ports = ", ".join("{port: 0}" for _ in range(1000))
    error = refuse(yaml.safe_load(np(f"podSelector: {{}}\ningress: [{{ports: [{ports}]}}]")))
    assert len(error.faults) == FAULTS_KEPT
    assert "and 997 more" in error.message


def test_what_breaks_a_terminal_is_written_out() -> None:
    document = yaml.safe_load(cnp("endpointSelector: {}\ningress: [{}]"))
    document["spec"]["\x1b[31m\n"] = "x"
    error = refuse(document)
    assert error.faults[0].path == "spec['\\x1b[31m\\n']"
    assert error.message.isprintable()


# Random documents: junk of any shape, and good documents with one value replaced by junk.

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        ["10.0.0.0/8", "::/0", "80", "TCP", "all", "In", "io.kubernetes.pod.namespace"]
    )
)
WORDS = """
apiVersion kind metadata name namespace labels spec specs podSelector matchLabels matchExpressions key operator
values policyTypes ingress egress from to ports port endPort protocol ipBlock cidr except endpointSelector
fromEndpoints toCIDRSet cidrGroupRef fromEntities toPorts icmps fields type family enableDefaultDeny ingressDeny
externalCIDRs
"""
KEYS = st.sampled_from(WORDS.split()) | st.text(max_size=4)
JUNK = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=25,
)
GOOD: list[Any] = [
    yaml.safe_load(text)
    for case in (*network_policy.CASES[::9], *cilium_policy.CASES[::7])
    for text in case.documents
]


def decodes(document: Any) -> None:
    """Decode in every way; only InvalidRequest with faults may come out."""
    for decoder in DECODERS:
        refused: InvalidRequest | None = None
        try:
            decoder(document)
        except InvalidRequest as error:
            refused = error
        assert refused is None or (refused.faults and refused.message.isprintable())


@given(JUNK)
def test_junk_gives_rules_or_faults_and_nothing_else(document: Any) -> None:
    decodes(document)


@given(st.data())
def test_a_good_document_with_one_junk_value_gives_rules_or_faults(data: st.DataObject) -> None:
    def damage(value: Any) -> Any:
        if data.draw(st.integers(0, 5)) == 0 or not value:
            return data.draw(JUNK)
        if isinstance(value, Mapping):
            key = data.draw(st.sampled_from(sorted(value)))
            return {**value, key: damage(value[key])}
        if isinstance(value, list):
            index = data.draw(st.integers(0, len(value) - 1))
            return [*value[:index], damage(value[index]), *value[index + 1 :]]
        return data.draw(JUNK)

    document = data.draw(st.sampled_from(GOOD))
    decodes({**document, "spec": damage(document.get("spec") or document.get("specs"))})
