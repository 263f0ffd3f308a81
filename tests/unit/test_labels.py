"""Labels: what is one, canonical form, and namespaces as labels."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwire.model.errors import InvalidRequest
from podwire.model.labels import (
    Label,
    is_label_key,
    is_label_value,
    is_namespace_label,
    join_labels,
    namespace_labels,
    parse_label,
    parse_labels,
    sort_labels,
    split_label,
)

KEYS: list[tuple[str, bool]] = [
    ("app", True),
    ("App_1.x-y", True),
    ("a", True),
    ("example.com/app", True),
    ("a" * 63, True),
    (f"{'a' * 253}/x", True),
    ("", False),
    ("a" * 64, False),
    (f"{'a' * 254}/x", False),
    ("-app", False),
    ("app-", False),
    ("/app", False),
    ("app/", False),
    ("a/b/c", False),
    ("Example.com/app", False),
    ("k8s:app", False),
    ("a b", False),
    ("a=b", False),
    ("a;b", False),
    ("ä", False),
    ("app\n", False),
]
VALUES: list[tuple[str, bool]] = [
    ("", True),
    ("web", True),
    ("Web_1.x-y", True),
    ("1", True),
    ("a" * 63, True),
    ("a" * 64, False),
    ("-a", False),
    ("a-", False),
    ("a b", False),
    ("a/b", False),
    ("a;b", False),
    ("a\n", False),
]


@pytest.mark.parametrize(("text", "valid"), KEYS, ids=[repr(key[:20]) for key, _ in KEYS])
def test_keys_follow_the_grammar_of_kubernetes(text: str, valid: bool) -> None:
    assert is_label_key(text) is valid


@pytest.mark.parametrize(("text", "valid"), VALUES, ids=[repr(value[:20]) for value, _ in VALUES])
def test_values_follow_the_grammar_of_kubernetes(text: str, valid: bool) -> None:
    assert is_label_value(text) is valid


GOOD: list[tuple[str, Label]] = [
    ("k8s:app=web", Label("k8s", "app", "web")),
    ("cni:app=", Label("cni", "app", "")),
    ("reserved:host=", Label("reserved", "host", "")),
    ("cidr:10.0.0.0/8=", Label("cidr", "10.0.0.0/8", "")),
    (
        "k8s:io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name=a",
        Label("k8s", "io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name", "a"),
    ),
    ("cni:a=b=c", Label("cni", "a", "b=c")),
]


@pytest.mark.parametrize(("text", "label"), GOOD, ids=[text for text, _ in GOOD])
def test_a_canonical_label_is_read_and_written_alike(text: str, label: Label) -> None:
    assert parse_label(text) == split_label(text) == label
    assert str(label) == text


BAD = ["", "app=web", "k8s:app", "k8s:=web", "docker:app=web", ":app=web", "k8s:a=b;c", "cni:a=\n"]


@pytest.mark.parametrize("text", BAD, ids=repr)
def test_what_is_no_canonical_label_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="read label"):
        parse_label(text)


def test_a_key_with_two_values_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="another value"):
        parse_labels(["cni:a=1", "cni:a=2"])
    assert parse_labels(["k8s:a=2", "cni:a=1", "cni:a=1"]) == ("cni:a=1", "k8s:a=2")


def test_order_is_that_of_bytes() -> None:
    assert sort_labels(["cni:a=ä", "cni:a=z", "cni:B=1", "cni:a.b=1"]) == (
        "cni:B=1",
        "cni:a.b=1",
        "cni:a=z",
        "cni:a=ä",
    )


def test_a_namespace_is_spelled_as_in_cilium_and_its_name_cannot_be_taken_away() -> None:
    labels = namespace_labels("prod", {"team": "a", "kubernetes.io/metadata.name": "other"})
    assert labels == (
        "k8s:io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name=prod",
        "k8s:io.cilium.k8s.namespace.labels.team=a",
        "k8s:io.kubernetes.pod.namespace=prod",
    )
    assert all(map(is_namespace_label, labels))
    assert not is_namespace_label("cni:io.kubernetes.pod.namespace=prod")


PARTS = st.from_regex(r"[a-z0-9][a-z0-9.\-=]{0,5}", fullmatch=True)
SETS = st.sets(st.builds("cni:{}={}".format, PARTS, PARTS), max_size=4)


@given(SETS, SETS)
def test_different_sets_have_different_texts(one: set[str], other: set[str]) -> None:
    same = join_labels(sort_labels(one)) == join_labels(sort_labels(other))
    assert same == (one == other)
