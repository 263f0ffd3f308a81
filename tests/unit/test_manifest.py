"""What of people's files is taken as written, and what is refused with its place: the contract of the YAML module."""

import contextlib
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwire.model.errors import InvalidRequest
from podwire.store.manifest import DEPTH_MAX, FILE_MAX_BYTES, dump, load_manifests
from tests.unit.policies import network_policy

TAKEN: dict[str, tuple[str, list[Any]]] = {
    "one document": ("a: 1\n", [{"a": 1}]),
    "several documents": ("a: 1\n---\nb: 2\n--- # c\nc: 3\n", [{"a": 1}, {"b": 2}, {"c": 3}]),
    "empty documents between": (
        "---\n---\na: 1\n---\n# x\n---\n\n---\nb: 2\n",
        [{"a": 1}, {"b": 2}],
    ),
    "a comment and a directive first": ("# c\n%YAML 1.2\n---\na: 1\n", [{"a": 1}]),
    "a document on the line of its mark": ("--- {a: 1}\n", [{"a": 1}]),
    "a mark inside a text": ('a: "x ---"\nb: |\n  ---\n', [{"a": "x ---", "b": "---\n"}]),
    "words of truth in other languages": (
        "a: no\nb: on\nc: Yes\nd: OFF\ne: y\n",
        [{"a": "no", "b": "on", "c": "Yes", "d": "OFF", "e": "y"}],
    ),
    "true and false": ("a: true\nb: false\n", [{"a": True, "b": False}]),
    "old octal and sexagesimal": (
        "a: 010\nb: 1:30\nc: 1_0\n",
        [{"a": "010", "b": "1:30", "c": "1_0"}],
    ),
    "numbers": ("a: 0o10\nb: 0x10\nc: -1\nd: 1.5\n", [{"a": 8, "b": 16, "c": -1, "d": 1.5}]),
    "dates stay text": ("a: 2020-01-01\n", [{"a": "2020-01-01"}]),
    "null in its forms": ("a:\nb: ~\nc: null\n", [{"a": None, "b": None, "c": None}]),
    "quoted numbers stay text": ("a: '8080'\n", [{"a": "8080"}]),
    "tags of plain data": ("a: !!str 12\nb: !!int '3'\n", [{"a": "12", "b": 3}]),
    "an alias": ("a: &x [1]\nb: *x\n", [{"a": [1], "b": [1]}]),
    "an exclamation mark and ampersand in text": ("a: x!y & z\n", [{"a": "x!y & z"}]),
    "a byte order mark": ("\ufeffa: 1\n", [{"a": 1}]),
    "line ends of Windows": ("a: 1\r\n---\r\nb: 2\r\n", [{"a": 1}, {"b": 2}]),
    "JSON": ('{"a": [1, true, null]}', [{"a": [1, True, None]}]),
    "JSON beyond the basic plane": ('{"a": "\\ud83d\\ude00\\/"}', [{"a": "\U0001f600/"}]),
    "JSON lines": ('{"a": 1}\n{"a":\n 2}\n', [{"a": 1}, {"a": 2}]),
    "YAML in JSON's clothes": ("{a: 1, b: [x]}\n", [{"a": 1, "b": ["x"]}]),
    "a List": ("kind: List\nitems:\n- {a: 1}\n- {a: 2}\n", [{"a": 1}, {"a": 2}]),
    "a typed list": ("kind: NetworkPolicyList\nitems: [{a: 1}]\n", [{"a": 1}]),
    "the deepest that is taken": (
        "a: " + "[" * (DEPTH_MAX - 1) + "]" * (DEPTH_MAX - 1) + "\n",
        [json.loads('{"a": ' + "[" * (DEPTH_MAX - 1) + "]" * (DEPTH_MAX - 1) + "}")],
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken_means_what_was_written(name: str) -> None:
    text, expected = TAKEN[name]
    assert [manifest.document for manifest in load_manifests(text.encode(), "f")] == expected


def bomb(levels: int) -> str:
    """Nine times the level below, on each level."""
    lines = ["a0: &a0 [x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines)


REFUSED: dict[str, tuple[str, str]] = {
    # text, where and why
    "a key twice": ("a: 1\nb: 2\na: 3\n", "f: document 1 (line 3): has the key 'a' twice"),
    "a key twice, quoted": ('a: 1\n"a": 2\n', "f: document 1 (line 2): has the key 'a' twice"),
    "a key twice, deep": (
        "x: 1\n---\ns:\n  - p: 1\n    q: 2\n    p: 3\n",
        "f: document 2 (line 6): s[0] has the key 'p' twice",
    ),
    "a key twice in JSON": (
        '{"a": {"b": 1, "b": 1}}',
        "f: document 1 (line 1): has the key 'b' twice",
    ),
    "an alias bomb": (bomb(10), "has aliases that repeat too much"),
    "a text that is repeated": (
        f'a: &a "{"x" * 100_000}"\nb: [{", ".join(["*a"] * 1000)}]\n',
        "f: document 1 (line 2): has aliases that repeat too much",
    ),
    "an alias of itself": ("a: &a [*a]\n", "the alias 'a' inside its own value"),
    "an alias of nothing": ("a: *b\n", "f: document 1 (line 1): unknown anchor"),
    "an anchor of another document": (
        "a: &x 1\n---\nb: *x\n",
        "f: document 2 (line 3): unknown anchor",
    ),
    "a merge key": ("a: &x {k: 1}\nb:\n  <<: *x\n", "b has a merge key (<<)"),
    "too deep": ("a: " + "[" * DEPTH_MAX + "]" * DEPTH_MAX, f"is nested deeper than {DEPTH_MAX}"),
    "much too deep": ("[" * 100_000, f"is nested deeper than {DEPTH_MAX}"),
    "too deep in JSON": (
        '{"a":' * 50_000 + "1" + "}" * 50_000,
        f"is nested deeper than {DEPTH_MAX}",
    ),
    "an unknown tag": ("a: 1\nb: !secret x\n", "f: document 1 (line 2): has the tag '!secret'"),
    "a tag that runs code": (
        'a: !!python/object/apply:os.system ["x"]\n',
        "has the tag '!!python/object/apply:os.system'",
    ),
    "a tag of binary data": ("a: !!binary aGk=\n", "has the tag '!!binary'"),
    "a tag of a set": ("a: !!set {x, y}\n", "has the tag '!!set'"),
    "a key that is a number": ("a:\n  1: x\n", "a has the key 1, which is not text: quote it"),
    "a key that is true": ("true: x\n", "it has the key True, which is not text: quote it"),
    "a key that is null": ("a: {~: x}\n", "a has the key None, which is not text"),
    "a key that is a list": ("? [a]\n: 1\n", "has a key that is not text"),
    "infinity": ("a:\n- .inf\n", "a[0] is inf, not a number"),
    "JSON's NaN": ('{"a": NaN}', "a is nan, not a number"),
    "a number beyond 64 bits": ("a: 99999999999999999999999\n", "invalid type: integer"),
    "a tab": (
        "a:\n\tb: 1\n",
        "f: document 1 (line 2): found character that cannot start any token",
    ),
    "an open bracket": ("a: 1\n---\nb: [1,\n", "f: document 2 (line"),
    "a wrong directive": ("%FOO\n---\na: 1\n", "unknown directive"),
    "a document behind an end mark": ("a: 1\n...\nb: 2\n", "each begins with ---"),
    "a NUL": ("a: 1\nb: x\0\n", "f (line 2): has the control character '\\x00'"),
    "a NUL in disguise": ('a: {b: "\\0"}\n', "a.b has the control character '\\x00'"),
    "an escape sequence of a terminal": ('a: "\\e[31m"\n', "a has the control character '\\x1b'"),
    "half a character": ('{"a": "\\ud800"}', "a has the control character '\\ud800'"),
    "a control character in a key": ('"a\\u0001": 1\n', "it has the control character '\\x01'"),
    "no file at all": ("", "f: holds no object"),
    "comments alone": ("# nothing\n", "f: holds no object"),
    "marks alone": ("---\n---\n", "f: holds no object"),
    "a text": ("hello\n", "f: document 1 (line 1): is text, not an object"),
    "a list": ("a: 1\n---\n- a: 1\n", "f: document 2 (line 2): is a list, not an object"),
    "a number": ("12\n", "is a number, not an object"),
    "items that are no list": (
        "kind: List\nitems: {}\n",
        "has items that are an object, not a list",
    ),
    "an item that is no object": (
        "kind: List\nitems: [{a: 1}, x]\n",
        "items[1] is text, not an object",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_names_its_place_and_reason(name: str) -> None:
    text, expected = REFUSED[name]
    took_s = []
    for _ in range(3):  # one of them is not held up by the machine
        begin_s = time.process_time()
        with pytest.raises(InvalidRequest) as caught:
            load_manifests(text.encode(), "f")
        took_s.append(time.process_time() - begin_s)
    assert min(took_s) < 2, took_s
    assert expected in caught.value.message.replace("]: is", "] is")
    assert caught.value.faults
    assert caught.value.faults[0].path.startswith("f")


RAW: dict[str, tuple[bytes, str]] = {
    "no UTF-8": (b"a: 1\nb: \xff\n", "f (line 2): is no UTF-8"),
    "UTF-16": ("a: 1\n".encode("utf-16"), "is no UTF-8"),
    "too large": (b"a: " + b"x" * FILE_MAX_BYTES, f"f: has more than {FILE_MAX_BYTES} bytes"),
    "too many documents": (b"---\na: 1\n" * 20_001, "f: has more than 20000 documents"),
}


@pytest.mark.parametrize("name", RAW)
def test_bytes_that_are_no_text_of_ours_are_refused(name: str) -> None:
    raw, expected = RAW[name]
    with pytest.raises(InvalidRequest) as caught:
        load_manifests(raw, "f")
    assert expected in caught.value.message


def test_every_wrong_document_of_a_file_is_named() -> None:
    text = "a: [\n---\nb: 1\n---\nc: 1\nc: 2\n---\nx\n---\n{: {\n"
    with pytest.raises(InvalidRequest) as caught:
        load_manifests(text.encode(), "f")
    places = [fault.path for fault in caught.value.faults]
    assert [place.split(" (")[0] for place in places] == [f"f: document {n}" for n in (1, 3, 4, 5)]


FIELDS = """\
# a comment
---
kind: x
spec:
  ingress:
  - from: 1
    ports:
    - port: 2
      protocol: TCP
  "a.b/c": 3
"""


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("spec", 4),
        ("spec.ingress[0]", 6),
        ("spec.ingress[0].ports[0].protocol", 9),
        ("spec['a.b/c']", 10),
        ("spec.ingress[0].nothing.below", 6),
        ("spec.ingress[7]", 5),
        ("nothing", None),
    ],
)
def test_a_field_is_found_by_its_line(path: str, line: int | None) -> None:
    [one] = load_manifests(FIELDS.encode(), "f")
    assert one.place == "f: document 1 (line 1)"
    assert one.find_line(path) == line


def test_a_field_of_an_item_is_found_by_its_line() -> None:
    text = "a: 1\n---\nkind: List\nitems:\n- a: 1\n- spec:\n    b: 2\n"
    found = load_manifests(text.encode(), "f")
    assert found[2].place == "f: document 2 (line 2), items[1]"
    assert found[2].find_line("spec.b") == 7


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False, width=32)
    | st.text(st.characters(exclude_categories=["Cs", "Cc"]))
    | st.sampled_from(
        ["no", "on", "010", "1e3", "~", "null", "<<", "0x1", "2020-01-01", "1:30", "=", "y"]
    ),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1), inner, max_size=4
        )
    ),
    max_leaves=20,
)


def without_merge_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_merge_keys(one) for key, one in value.items() if key != "<<"}
    return [without_merge_keys(one) for one in value] if isinstance(value, list) else value


@given(
    documents=st.lists(
        st.dictionaries(st.sampled_from("abc"), PLAIN, min_size=1), min_size=1, max_size=3
    )
)
def test_what_is_written_is_read_again_as_it_was(documents: list[dict[str, Any]]) -> None:
    documents = [without_merge_keys(document) for document in documents]
    text = dump(documents)
    assert [manifest.document for manifest in load_manifests(text.encode(), "f")] == documents


@given(text=st.text(st.sampled_from("ab:-?&*!|>{}[]#%'\"\\ \n\t,~<0"), max_size=60))
def test_no_text_breaks_the_loader(text: str) -> None:
    with contextlib.suppress(InvalidRequest):
        assert all(
            isinstance(manifest.document, dict) for manifest in load_manifests(text.encode(), "f")
        )


def test_two_thousand_policies_are_read_in_linear_time() -> None:
    text = dump([network_policy(f"p{number}") for number in range(2000)])
    took_s = []
    for _ in range(5):  # one of them is not held up by the machine
        begin_s = time.process_time()
        assert len(load_manifests(text.encode(), "f")) == 2000
        took_s.append(time.process_time() - begin_s)
    assert min(took_s) < 3, took_s  # of the processor; quadratic would be minutes
