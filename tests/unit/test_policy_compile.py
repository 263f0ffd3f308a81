"""Entries of one family: ranges become few prefixes, and the longest prefix of a packet names the rule that wins."""

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwire.control.policy.resolve.compile import (
    Term,
    find_entry,
    length,
    pack,
    pack_key,
    resolve_port,
    resolve_rows,
    split_range,
    unpack,
)
from podwire.control.policy.rule import ICMP, TCP, UDP, PortMatch
from podwire.model.identity import NamedPort
from podwire.model.policy import Direction, PolicyEntry, PolicyKey, Verdict

PORTS: Final = st.integers(0, 65535)
MOST_PREFIXES: Final = 30


@given(PORTS, PORTS)
def test_a_range_is_made_of_few_prefixes_that_cover_it_and_nothing_else(one: int, two: int) -> None:
    first, last = min(one, two), max(one, two)
    expected = first
    prefixes = list(split_range(first, last))
    for port, bits in prefixes:
        assert port == expected
        assert port % (1 << (16 - bits)) == 0
        expected = port + (1 << (16 - bits))
    assert expected == last + 1
    assert len(prefixes) <= MOST_PREFIXES


HTTP: Final = NamedPort("http", TCP, 8080)
HTTP_UDP: Final = NamedPort("http", UDP, 8081)


@pytest.mark.parametrize(
    ("match", "prefixes"),
    [
        pytest.param(PortMatch(), [pack(0)], id="everything"),
        pytest.param(PortMatch(TCP), [pack(TCP)], id="a protocol"),
        pytest.param(PortMatch(TCP, 80, 80), [pack(TCP, 80, 16)], id="a port"),
        pytest.param(PortMatch(TCP, 0, 1023), [pack(TCP, 0, 6)], id="a range that is one prefix"),
        pytest.param(
            PortMatch(TCP, 8080, 8099),
            [pack(TCP, 8080, 12), pack(TCP, 8096, 14)],
            id="a range of two",
        ),
        pytest.param(PortMatch(TCP, 0, 65535), [pack(TCP)], id="every port there is"),
        pytest.param(PortMatch(ICMP, 8, 8, icmp=True), [pack(ICMP, 8 << 8, 8)], id="ICMP type"),
        pytest.param(PortMatch(ICMP, 0, 0, icmp=True), [pack(ICMP, 0, 8)], id="ICMP type 0"),
        pytest.param(PortMatch(TCP, name="http"), [pack(TCP, 8080, 16)], id="a name"),
        pytest.param(
            PortMatch(name="http"),
            [pack(TCP, 8080, 16), pack(UDP, 8081, 16)],
            id="a name of any protocol",
        ),
        pytest.param(PortMatch(TCP, name="dns"), [], id="a name that nobody has"),
    ],
)
def test_what_is_asked_for_becomes_prefixes(match: PortMatch, prefixes: list[int]) -> None:
    assert resolve_port(match, (HTTP, HTTP_UDP)) == prefixes


@pytest.mark.parametrize(
    ("prefix", "bits"),
    [(pack(0), 0), (pack(TCP), 1), (pack(TCP, 80, 16), 17), (pack(ICMP, 0, 8), 9)],
)
def test_a_prefix_and_its_key_are_the_same(prefix: int, bits: int) -> None:
    assert length(prefix) == bits
    key = unpack(7, Direction.INGRESS, prefix)
    assert key.identity == 7
    assert pack_key(key) == prefix


def make_term(rule: int, verdict: Verdict, precedence: int, *matches: PortMatch) -> Term:
    prefixes = tuple(prefix for match in matches for prefix in resolve_port(match, ()))
    return Term(rule, PolicyEntry(verdict, precedence, rule), prefixes)


ALLOW, DENY = Verdict.ALLOW, Verdict.DENY
WEB: Final = PortMatch(TCP, 80, 80)
LOW: Final = PortMatch(TCP, 0, 127)


@pytest.mark.parametrize(
    ("terms", "rows"),
    [
        pytest.param(
            [make_term(1, ALLOW, 5, WEB), make_term(2, DENY, 5, LOW)],
            {pack(TCP, 0, 9): 2},
            id="a broad denial takes the place of a narrower permission",
        ),
        pytest.param(
            [make_term(1, ALLOW, 5, LOW), make_term(2, DENY, 5, WEB)],
            {pack(TCP, 0, 9): 1, pack(TCP, 80, 16): 2},
            id="a narrow denial stands inside a broader permission",
        ),
        pytest.param(
            [make_term(1, DENY, 5, LOW), make_term(2, ALLOW, 6, WEB)],
            {pack(TCP, 0, 9): 1, pack(TCP, 80, 16): 2},
            id="precedence wins over a denial",
        ),
        pytest.param(
            [make_term(1, ALLOW, 6, PortMatch()), make_term(2, DENY, 5, WEB)],
            {pack(0): 1},
            id="what a stronger rule covers has no entry",
        ),
        pytest.param(
            [make_term(1, ALLOW, 5, WEB), make_term(2, ALLOW, 5, WEB)],
            {pack(TCP, 80, 16): 1},
            id="of two that say the same the older one is named",
        ),
        pytest.param(
            [make_term(1, ALLOW, 5, WEB), make_term(2, ALLOW, 5, PortMatch(TCP))],
            {pack(TCP): 2},
            id="what says the same as a broader entry is left out",
        ),
    ],
)
def test_each_entry_holds_the_best_rule_that_covers_it(
    terms: list[Term], rows: dict[int, int]
) -> None:
    assert {prefix: entry.rule for prefix, entry in resolve_rows(terms).items()} == rows


MATCHES: Final = st.one_of(
    st.just(PortMatch()),
    st.sampled_from([PortMatch(TCP), PortMatch(UDP)]),
    st.tuples(st.sampled_from([TCP, UDP]), PORTS, PORTS).map(
        lambda one: PortMatch(one[0], min(one[1:]), max(*one[1:], 1))
    ),
)
TERMS: Final = st.lists(
    st.tuples(
        st.sampled_from([ALLOW, DENY]), st.integers(4, 6), st.lists(MATCHES, min_size=1, max_size=3)
    ),
    max_size=6,
)


@given(TERMS, st.sampled_from([TCP, UDP, ICMP]), PORTS)
def test_the_longest_prefix_of_a_packet_names_a_rule_that_wins(
    drawn: list[tuple[Verdict, int, list[PortMatch]]], protocol: int, port: int
) -> None:
    terms = [make_term(rule, *one[:2], *one[2]) for rule, one in enumerate(drawn, 1)]
    covering = [
        (precedence, verdict)
        for verdict, precedence, matches in drawn
        if any(covers(match, protocol, port) for match in matches)
    ]
    found = find_entry(resolve_rows(terms), pack(protocol, port, 16))
    assert (found and (found.precedence, found.verdict)) == max(covering, default=None)


def covers(match: PortMatch, protocol: int, port: int) -> bool:
    if match.protocol not in (0, protocol):
        return False
    return not match.last or match.first <= port <= match.last


def test_keys_are_what_the_datapath_means_by_them() -> None:
    assert unpack(9, Direction.EGRESS, pack(TCP, 80, 16)) == PolicyKey(
        9, Direction.EGRESS, TCP, 80, 16
    )
