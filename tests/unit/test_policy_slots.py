"""Slots: which way a change of entries pushes verdicts, and what that means for how it is written."""

import itertools
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwire.control.policy.oracle import RuleName
from podwire.control.policy.realize.slots import Push, compare
from podwire.control.policy.resolve.compile import Block, find_entry, length, pack
from podwire.control.policy.resolve.rule_numbers import (
    FORMER_NAMES,
    SPAN,
    Counter,
    Counters,
    Numbers,
    RuleNumbers,
)
from podwire.control.policy.rule import DEFAULT_DENY_PATH, TCP, PolicyId
from podwire.model.errors import StorageFailure
from podwire.model.policy import PolicyEntry, Verdict

ALLOW: Final = PolicyEntry(Verdict.ALLOW, 5, 1)
OTHER_ALLOW: Final = PolicyEntry(Verdict.ALLOW, 5, 2)
STRONG_ALLOW: Final = PolicyEntry(Verdict.ALLOW, 6, 1)
DENY: Final = PolicyEntry(Verdict.DENY, 5, 3)
STRONG_DENY: Final = PolicyEntry(Verdict.DENY, 6, 3)
EVERYTHING: Final = pack(0)
EVERY_TCP: Final = pack(TCP)
WEB: Final = pack(TCP, 80, 16)
Rows = dict[int, PolicyEntry]


@pytest.mark.parametrize(
    ("before", "after", "push"),
    [
        pytest.param({}, {WEB: ALLOW}, Push.OPEN, id="a permission comes"),
        pytest.param({WEB: ALLOW}, {}, Push.CLOSED, id="a permission goes"),
        pytest.param({}, {WEB: DENY}, Push.CLOSED, id="a denial comes"),
        pytest.param({WEB: DENY}, {}, Push.OPEN, id="a denial goes"),
        pytest.param({WEB: ALLOW}, {WEB: DENY}, Push.CLOSED, id="a permission turns"),
        pytest.param({WEB: ALLOW}, {WEB: STRONG_ALLOW}, Push.OPEN, id="it grows stronger"),
        pytest.param({WEB: DENY}, {WEB: STRONG_DENY}, Push.CLOSED, id="a denial grows stronger"),
        pytest.param({WEB: ALLOW}, {WEB: OTHER_ALLOW}, Push.NOWHERE, id="another rule says it"),
        pytest.param(
            {EVERY_TCP: ALLOW}, {EVERY_TCP: ALLOW, WEB: DENY}, Push.CLOSED, id="an exception comes"
        ),
        pytest.param(
            {EVERY_TCP: ALLOW, WEB: DENY}, {EVERY_TCP: ALLOW}, Push.OPEN, id="an exception goes"
        ),
        pytest.param(
            {WEB: ALLOW}, {EVERY_TCP: DENY, WEB: STRONG_ALLOW}, Push.BOTH, id="both ways at once"
        ),
        pytest.param({WEB: ALLOW}, {pack(TCP, 81, 16): ALLOW}, Push.BOTH, id="another port"),
        pytest.param(
            {WEB: ALLOW}, {EVERYTHING: OTHER_ALLOW}, Push.OPEN, id="a broader one takes its place"
        ),
    ],
)
def test_a_change_pushes_verdicts_where_its_entries_push_them(
    before: Rows, after: Rows, push: Push
) -> None:
    assert compare(Block((), before), Block((), after)).push is push


ROWS: Final = st.dictionaries(
    st.sampled_from([EVERYTHING, EVERY_TCP, pack(TCP, 80, 12), pack(TCP, 80, 15), WEB]),
    st.sampled_from([ALLOW, OTHER_ALLOW, STRONG_ALLOW, DENY, STRONG_DENY]),
)


@given(ROWS, ROWS)
def test_each_packet_meets_its_old_entry_until_it_meets_its_new_one(
    before: Rows, after: Rows
) -> None:
    step = compare(Block((), before), Block((), after))
    packets = [WEB, pack(TCP, 81, 16), pack(TCP, 84, 16), pack(TCP, 443, 16), pack(17, 80, 16)]
    held = dict(before)
    states = [dict(held)]
    for prefix, entry in step.put:
        held[prefix] = entry
        states.append(dict(held))
    for prefix in step.remove:
        del held[prefix]
        states.append(dict(held))
    assert held == after
    for packet in packets:
        met = [find_entry(state, packet) for state in states]
        changes = sum(one != other for one, other in itertools.pairwise(met))
        assert changes <= 1
    assert [length(prefix) for prefix in step.remove] == sorted(map(length, step.remove))


def test_numbers_are_reserved_before_they_are_used() -> None:
    reserved: list[Numbers] = []
    counters = Counters(Numbers(slot=7), reserved.append)
    assert not reserved
    assert counters.slot.take() == 7
    assert reserved[-1].slot > 7
    taken = [counters.slot.take() for _ in range(3 * SPAN)]
    assert taken == list(range(8, 8 + 3 * SPAN))
    assert reserved[-1].slot > taken[-1]
    assert len(reserved) <= 4


def test_a_number_that_cannot_be_reserved_is_not_used() -> None:
    def refuse(_limit: int) -> None:
        raise StorageFailure("the disk is full")

    counter = Counter(5, refuse)
    with pytest.raises(StorageFailure):
        counter.take()
    assert counter.limit == 5


def test_a_rule_keeps_its_number_as_long_as_its_policy_and_its_name_a_while_longer() -> None:
    numbers = RuleNumbers(Counter(1, lambda _limit: None))
    policy = PolicyId("NetworkPolicy", "default", "web")
    number = numbers.number(policy, "ingress[0]")
    assert numbers.number(policy, "ingress[0]") == number
    assert numbers.name(numbers.number(policy)) == RuleName(policy, DEFAULT_DENY_PATH)
    numbers.release(policy)
    assert numbers.name(number) == RuleName(policy, "ingress[0]")
    assert numbers.number(policy, "ingress[0]") != number
    for other in range(FORMER_NAMES):
        passing = PolicyId("NetworkPolicy", "default", str(other))
        numbers.number(passing)
        numbers.release(passing)
    assert numbers.name(number) is None
    assert numbers.name(0) is None
