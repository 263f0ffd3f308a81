"""The selector cache: whom selectors select, as identities and prefixes come and go; and that few are asked."""

import ipaddress
from random import Random
from typing import Final

from hypothesis import given, settings
from hypothesis import strategies as st

from podwire.control.policy.labels_match import LabelSet, make_selector, matches
from podwire.control.policy.resolve.cidrs import CidrTable
from podwire.control.policy.resolve.selectors import LabelIndex, Selection
from podwire.control.policy.rule import (
    CidrGroup,
    CidrGroupSelector,
    CidrSelector,
    LabelSelector,
    Requirement,
)
from podwire.model.endpoint import IPNetwork
from podwire.model.identity import IdentityFacts
from podwire.model.labels import Operator
from podwire.model.policy import CIDR_IDENTITY_FIRST, CIDR_WORLD_BIT
from tests.fakes.policy_world import (
    ADDRESSES,
    GROUPS,
    NETWORKS,
    make_exceptions,
    make_facts,
    make_group,
    make_label_selector,
)

SEEDS: Final = st.integers(min_value=0, max_value=(1 << 32) - 1)
SETTINGS: Final = settings(max_examples=60, deadline=None)
USER: Final = object()


@SETTINGS
@given(SEEDS)
def test_selections_are_what_comparing_every_identity_gives(seed: int) -> None:
    random = Random(seed)
    index = LabelIndex()
    known: dict[int, IdentityFacts] = {}
    used: dict[LabelSelector, Selection] = {}
    for _ in range(60):
        number = random.randrange(100, 115)
        match random.randrange(4):
            case 0 | 1 if number not in known:
                known[number] = make_facts(random, number)
                came = index.add_identity(known[number])
                assert all(number in one.members for one in came)
            case 0 | 1:
                del known[number]
                assert all(number not in one.members for one in index.remove_identity(number))
            case 2:
                selector = make_label_selector(random)
                used[selector] = index.use(selector, USER)
            case _ if used:
                selector = random.choice(list(used))
                index.release(used.pop(selector), USER)
        for selector, selection in used.items():
            assert selection.members == {
                facts.number
                for facts in known.values()
                if matches(selector, LabelSet(facts.labels))
            }


def app_is(value: str, *others: Requirement) -> LabelSelector:
    return make_selector(
        Requirement("k8s", "app", Operator.IN, (value,)),
        Requirement("k8s", "ns", Operator.IN, ("prod",)),
        *others,
    )


def test_a_new_identity_asks_only_selectors_that_could_match_it() -> None:
    index = LabelIndex()
    for number in range(1000):
        index.use(app_is(f"a{number}"), USER)
    index.use(make_selector(Requirement("k8s", "app", Operator.NOT_IN, ("x",))), USER)
    facts = IdentityFacts(100, ("k8s:app=a5", "k8s:ns=prod"))
    assert len(index.add_identity(facts)) == 2
    asked = index._candidates([])
    assert len(asked) == 1


def test_a_selection_without_users_is_forgotten() -> None:
    index = LabelIndex()
    one, two = object(), object()
    selection = index.use(app_is("a"), one)
    assert index.use(app_is("a"), two) is selection
    index.release(selection, one)
    assert list(index) == [selection]
    index.release(selection, two)
    assert list(index) == []
    assert index.add_identity(IdentityFacts(100, ("k8s:app=a", "k8s:ns=prod"))) == []


def test_a_name_of_a_port_selects_who_has_it() -> None:
    index = LabelIndex()
    random = Random(1)
    facts = [make_facts(random, number) for number in range(100, 120)]
    for one in facts[:10]:
        index.add_identity(one)
    selection = index.use("http", USER)
    for one in facts[10:]:
        index.add_identity(one)
    index.remove_identity(100)
    assert selection.members == {
        fact.number for fact in facts[1:] if any(port.name == "http" for port in fact.named_ports)
    }


def use(table: CidrTable, selector: CidrSelector | CidrGroupSelector) -> Selection:
    table.ensure(table.needs(selector, table.groups))
    return table.use(selector, USER)


def find(table: CidrTable, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> int | None:
    """Give the number of the longest prefix, as the datapath's map does."""
    mapping = table.mapping(table.unmapped(table_networks(table)))
    around = [network for network in mapping if address in network]
    return mapping[max(around, key=lambda one: one.prefixlen)] if around else None


def table_networks(table: CidrTable) -> list[IPNetwork]:
    return [network for network in NETWORKS if network in table]


@SETTINGS
@given(SEEDS)
def test_an_address_is_selected_when_it_is_inside_and_outside_of_the_exceptions(seed: int) -> None:
    random = Random(seed)
    table = CidrTable({})
    used: list[tuple[CidrSelector | CidrGroupSelector, Selection]] = []
    for _ in range(12):
        if random.random() < 0.2:
            group = make_group(random, random.choice(GROUPS))
            groups = {**table.groups, group.name: group}
            table.ensure(table.needs_of_groups(groups))
            table.set_groups(groups)
        cidr = random.choice(NETWORKS)
        everybody = random.random() < 0.5
        selector: CidrSelector | CidrGroupSelector = CidrSelector(
            cidr, make_exceptions(random, cidr), everybody
        )
        if random.random() < 0.3:
            selector = CidrGroupSelector(name=random.choice(GROUPS))
        used.append((selector, use(table, selector)))
        if random.random() < 0.4:
            gone, selection = used.pop(random.randrange(len(used)))
            if all(one is not selection for _, one in used):
                table.release(selection, USER)
            assert gone is not None
        if random.random() < 0.3:
            table.forget(table.unused())
        for selector, selection in used:
            for address in ADDRESSES:
                number = find(table, address)
                is_inside = is_selected(selector, table.groups, address)
                world = number is not None and number | CIDR_WORLD_BIT in selection.members
                assert world is is_inside
                everybody = isinstance(selector, CidrSelector) and selector.everybody
                assert (number in selection.members) is (is_inside and everybody)


def is_selected(
    selector: CidrSelector | CidrGroupSelector,
    groups: dict[str, CidrGroup],
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> bool:
    cidrs: tuple[IPNetwork, ...] = ()
    if isinstance(selector, CidrSelector):
        cidrs = (selector.cidr,)
    elif selector.name in groups:
        cidrs = groups[selector.name].cidrs
    inside = any(address in cidr for cidr in cidrs)
    return inside and not any(address in exception for exception in selector.exceptions)


def test_numbers_of_prefixes_stay_and_are_not_given_again() -> None:
    table = CidrTable({NETWORKS[0]: CIDR_IDENTITY_FIRST + 5})
    table.ensure(NETWORKS[:3])
    assert [prefix.number for prefix in table.unmapped(NETWORKS[:3])] == [
        CIDR_IDENTITY_FIRST + 6,
        CIDR_IDENTITY_FIRST + 7,
    ]
    table.forget(table.unmapped(NETWORKS[:3]))
    table.ensure(NETWORKS[3:4])
    assert table.unmapped(NETWORKS[3:4])[0].number == CIDR_IDENTITY_FIRST + 8
    assert table.mapping() == {NETWORKS[0]: CIDR_IDENTITY_FIRST + 5}


def test_after_the_last_number_the_free_ones_are_given() -> None:
    table = CidrTable({NETWORKS[0]: CIDR_WORLD_BIT - 2, NETWORKS[1]: CIDR_IDENTITY_FIRST})
    table.ensure(NETWORKS[2:4])
    numbers = [prefix.number for prefix in table.unmapped(NETWORKS[2:4])]
    assert numbers == [CIDR_WORLD_BIT - 1, CIDR_IDENTITY_FIRST + 1]
