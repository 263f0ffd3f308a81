"""Addresses of a node: order, reuse, quarantine, fixed addresses, exhaustion; and never two holders."""

import random
import tracemalloc
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest

from podwire.control.ipam import fifo
from podwire.control.ipam.interface import Wish
from podwire.control.ipam.node import NodeIpam
from podwire.model.endpoint import IPAddress
from podwire.model.errors import AddressUnavailable, Bug, Exhausted, InvalidConfiguration
from podwire.model.ids import EndpointId, IdentityId

WEB, DB = IdentityId(7), IdentityId(8)


def take(ipam: NodeIpam, owner: int, identity: int = 0, *wanted: str) -> list[str]:
    """Allocate for an endpoint and give its addresses as text."""
    found = ipam.take(
        EndpointId(owner),
        Wish(
            identity=IdentityId(identity), wanted=tuple(ip_address(address) for address in wanted)
        ),
    )
    return [str(entry) for entry in found if entry is not None]


def release(ipam: NodeIpam, *owners: int) -> None:
    for owner in owners:
        ipam.release(EndpointId(owner))


RANGES: list[tuple[str, int, str, str, str]] = [
    # range, capacity, the node's own, first for a pod, last for a pod
    ("10.0.0.0/24", 255, "10.0.0.1", "10.0.0.2", "10.0.0.255"),
    ("10.0.0.4/30", 3, "10.0.0.5", "10.0.0.6", "10.0.0.4"),
    ("10.0.0.4/31", 1, "10.0.0.5", "10.0.0.4", "10.0.0.4"),
    ("10.0.0.0/16", 65535, "10.0.0.1", "10.0.0.2", "10.0.0.0"),
    ("fd00::/64", 2**64 - 1, "fd00::1", "fd00::2", "fd00::ffff:ffff:ffff:ffff"),
    ("fd00::/126", 3, "fd00::1", "fd00::2", "fd00::"),
    ("fd00::/127", 1, "fd00::1", "fd00::", "fd00::"),
    ("fd00::/112", 65535, "fd00::1", "fd00::2", "fd00::ffff"),
]


@pytest.mark.parametrize(("cidr", "capacity", "router", "first", "last"), RANGES)
def test_a_range_gives_everything_but_the_nodes_own_address(
    cidr: str, capacity: int, router: str, first: str, last: str
) -> None:
    ipam = NodeIpam([cidr])
    [usage] = ipam.usage()
    assert (usage.capacity, usage.free, str(usage.node_address)) == (capacity, capacity, router)
    assert take(ipam, 1) == [first]
    if first != last:
        assert take(ipam, 2, 0, last) == [last]
    with pytest.raises(AddressUnavailable, match="outside"):
        take(ipam, 3, 0, router)


@pytest.mark.parametrize("cidr", ["10.0.0.0/28", "10.0.0.8/30", "fd00::/124", "fd00::8/127"])
def test_every_other_address_of_a_range_is_given_once(cidr: str) -> None:
    ipam = NodeIpam([cidr])
    [usage] = ipam.usage()
    given = [take(ipam, number)[0] for number in range(1, usage.capacity + 1)]
    assert sorted([*given, str(usage.node_address)]) == sorted(map(str, usage.cidr))
    with pytest.raises(Exhausted):
        take(ipam, usage.capacity + 1)


def test_only_the_first_range_of_a_family_has_the_nodes_own_address() -> None:
    ipam = NodeIpam(["10.0.0.4/30", "fd00::/126", "10.0.1.4/32", "fd00::8/128"])
    shown = [(str(usage.node_address), usage.capacity) for usage in ipam.usage()]
    assert shown == [("10.0.0.5", 3), ("fd00::1", 3), ("None", 1), ("None", 1)]


UNUSABLE = [
    ("10.0.0.1/32", "its one address is the node's own"),
    ("fd00::1/128", "its one address is the node's own"),
]


@pytest.mark.parametrize(("cidr", "words"), UNUSABLE)
def test_a_range_without_room_for_a_pod_is_refused(cidr: str, words: str) -> None:
    with pytest.raises(InvalidConfiguration, match=words):
        NodeIpam([cidr])


def test_overlapping_ranges_are_refused() -> None:
    with pytest.raises(InvalidConfiguration, match="overlap"):
        NodeIpam(["10.0.0.0/24", "fd00::/64", "10.0.0.128/25"])


@pytest.mark.parametrize(
    ("cidrs", "expected"),
    [
        (["10.0.0.0/24"], ["10.0.0.2"]),
        (["fd00::/64"], ["fd00::2"]),
        (["fd00::/64", "10.0.0.0/24"], ["10.0.0.2", "fd00::2"]),
        (["10.0.0.0/30", "10.0.1.0/24"], ["10.0.0.2"]),
    ],
    ids=["IPv4", "IPv6", "dual stack", "two ranges of one family"],
)
def test_an_endpoint_gets_one_address_of_each_family(cidrs: list[str], expected: list[str]) -> None:
    assert take(NodeIpam(cidrs), 1) == expected


def test_a_full_range_passes_on_to_the_next_of_its_family() -> None:
    ipam = NodeIpam(["10.0.0.0/31", "10.0.1.0/32"])
    assert [take(ipam, 1), take(ipam, 2)] == [["10.0.0.0"], ["10.0.1.0"]]
    with pytest.raises(Exhausted) as caught:
        take(ipam, 3)
    assert "10.0.0.0/31 (1 of 1 held), 10.0.1.0/32 (1 of 1 held)" in caught.value.message
    assert caught.value.hint


def test_dual_stack_gives_both_or_none() -> None:
    ipam = NodeIpam(["10.0.0.0/24", "fd00::/126"])
    take(ipam, 1), take(ipam, 2), take(ipam, 3)
    before = ipam.usage()
    with pytest.raises(Exhausted, match="IPv6"):
        take(ipam, 4)
    assert ipam.usage() == before
    assert EndpointId(4) not in ipam.holders()


def test_addresses_come_back_in_the_order_in_which_they_were_released() -> None:
    ipam = NodeIpam(["10.0.0.0/29"])
    first = [take(ipam, owner)[0] for owner in range(1, 8)]
    release(ipam, 3, 1, 7, 5, 2, 4, 6)
    again = [take(ipam, owner)[0] for owner in range(11, 18)]
    assert again == [first[owner - 1] for owner in (3, 1, 7, 5, 2, 4, 6)]


def test_an_address_never_used_goes_before_one_that_rests() -> None:
    ipam = NodeIpam(["10.0.0.0/29"])
    take(ipam, 1)
    release(ipam, 1)
    assert [take(ipam, owner)[0] for owner in range(2, 9)] == [
        *("10.0.0.3", "10.0.0.4", "10.0.0.5", "10.0.0.6", "10.0.0.7", "10.0.0.0"),
        "10.0.0.2",
    ]


def test_a_rested_address_of_the_same_identity_goes_first() -> None:
    ipam = NodeIpam(["10.0.0.0/24"])
    take(ipam, 1, WEB), take(ipam, 2, DB), take(ipam, 3, WEB)
    release(ipam, 3, 2, 1)
    assert take(ipam, 4, DB) == ["10.0.0.3"]
    assert [take(ipam, 5, WEB), take(ipam, 6, WEB)] == [["10.0.0.4"], ["10.0.0.2"]]
    assert take(ipam, 7, WEB) == ["10.0.0.5"]


def test_a_rested_address_of_the_same_identity_is_found_in_every_range() -> None:
    ipam = NodeIpam(["10.0.0.0/24", "10.0.1.0/24"])
    take(ipam, 1, WEB, "10.0.1.9")
    release(ipam, 1)
    assert take(ipam, 2, WEB) == ["10.0.1.9"]


def test_unknown_identities_have_no_claim() -> None:
    ipam = NodeIpam(["10.0.0.0/24"])
    take(ipam, 1)
    release(ipam, 1)
    assert take(ipam, 2) == ["10.0.0.3"]


def test_a_quarantined_address_comes_back_only_by_release() -> None:
    ipam = NodeIpam(["10.0.0.2/31"])
    take(ipam, 1)
    ipam.quarantine(EndpointId(1))
    assert ipam.usage()[0].quarantined == 1
    with pytest.raises(Exhausted):
        take(ipam, 2)
    with pytest.raises(AddressUnavailable, match="endpoint 1 holds it"):
        take(ipam, 2, 0, "10.0.0.2")
    release(ipam, 1)
    assert take(ipam, 2) == ["10.0.0.2"]
    assert ipam.usage()[0].quarantined == 0


def test_ends_of_unknown_owners_change_nothing() -> None:
    ipam = NodeIpam(["10.0.0.0/24"])
    ipam.quarantine(EndpointId(9))
    release(ipam, 9, 9)
    assert not ipam.holders()


def test_fixed_addresses_of_one_family_are_completed_with_the_other() -> None:
    ipam = NodeIpam(["10.0.0.0/24", "fd00::/64"])
    assert take(ipam, 1, 0, "fd00::77") == ["10.0.0.2", "fd00::77"]
    assert take(ipam, 2, 0, "fd00::78", "10.0.0.78") == ["10.0.0.78", "fd00::78"]


def test_a_fixed_address_is_skipped_by_the_line() -> None:
    ipam = NodeIpam(["10.0.0.0/24"])
    take(ipam, 1, 0, "10.0.0.2")
    assert take(ipam, 2) == ["10.0.0.3"]


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (["10.0.0.5"], "endpoint 1 holds it"),
        (["192.168.0.1"], r"outside .*10\.0\.0\.0/24, fd00::/64"),
        (["10.0.0.9", "fd01::1"], "outside"),
    ],
    ids=["held", "outside", "second of two outside"],
)
def test_a_fixed_address_that_cannot_be_given_takes_nothing(wanted: list[str], words: str) -> None:
    ipam = NodeIpam(["10.0.0.0/24", "fd00::/64"])
    take(ipam, 1, 0, "10.0.0.5")
    before = ipam.usage()
    with pytest.raises(AddressUnavailable, match=words):
        take(ipam, 2, 0, *wanted)
    assert ipam.usage() == before


def adopt(ipam: NodeIpam, owner: int, *addresses: str, quarantined: bool = False) -> None:
    """Adopt text addresses for an endpoint."""
    parsed = [ip_address(address) for address in addresses]
    ipam.adopt(EndpointId(owner), parsed, quarantined=quarantined)


def test_adopted_addresses_are_held_and_the_line_goes_on_behind_the_newest() -> None:
    ipam = NodeIpam(["10.0.0.0/29", "fd00::/64"])
    adopt(ipam, 1, "10.0.0.2", "fd00::2")
    adopt(ipam, 4, "10.0.0.5", "fd00::5", quarantined=True)
    assert ipam.find_owner(IPv4Address("10.0.0.5")) == 4
    assert [usage.quarantined for usage in ipam.usage()] == [1, 1]
    assert [take(ipam, owner) for owner in (5, 6, 7)] == [
        ["10.0.0.6", "fd00::6"],
        ["10.0.0.7", "fd00::7"],
        ["10.0.0.0", "fd00::8"],
    ]
    assert [take(ipam, owner)[0] for owner in (8, 9)] == ["10.0.0.3", "10.0.0.4"]
    with pytest.raises(Exhausted):
        take(ipam, 10)


def test_adopting_an_address_twice_is_refused_and_changes_nothing() -> None:
    ipam = NodeIpam(["10.0.0.0/24", "fd00::/64"])
    adopt(ipam, 1, "10.0.0.2", "fd00::2")
    before = (ipam.usage(), ipam.holders())
    with pytest.raises(Bug, match=r"adopt fd00::2 for endpoint 2: endpoint 1 holds it"):
        adopt(ipam, 2, "10.0.0.3", "fd00::2")
    with pytest.raises(Bug, match="has some already"):
        adopt(ipam, 1, "10.0.0.4")
    assert (ipam.usage(), ipam.holders()) == before


def test_addresses_of_a_range_that_the_node_lost_are_held_by_name() -> None:
    ipam = NodeIpam(["10.0.0.0/24"])
    adopt(ipam, 1, "10.9.0.2", "fd00::2")
    assert ipam.usage()[0].held == 0
    with pytest.raises(Bug):
        adopt(ipam, 3, "10.9.0.2")
    release(ipam, 1)
    assert ipam.find_owner(IPv4Address("10.9.0.2")) is None


def test_allocating_twice_for_one_endpoint_is_a_bug() -> None:
    ipam = NodeIpam(["10.0.0.0/24"])
    take(ipam, 1)
    with pytest.raises(Bug):
        take(ipam, 1)


@pytest.mark.parametrize("way", ["at a start", "while it runs"])
def test_a_pods_address_never_stands_for_the_node_when_ranges_change(way: str) -> None:
    """The second address of the new range is a pod's."""
    ipam = NodeIpam(["10.1.0.128/25" if way == "at a start" else "10.1.0.0/24"])
    adopt(ipam, 1, "10.1.0.129")
    ipam.change_ranges([ip_network("10.1.0.128/25")])
    [usage] = ipam.usage()
    assert (usage.node_address, usage.held) == (ip_address("10.1.0.128"), 1)
    given = {take(ipam, number)[0] for number in range(2, usage.capacity + 1)}
    assert not given & {"10.1.0.128", "10.1.0.129"}
    with pytest.raises(Exhausted):
        take(ipam, 1000)


def test_memory_does_not_grow_with_the_range_nor_with_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fifo, "RESTED_MAX", 100)
    ipam = NodeIpam(["fd00::/64"])

    def churn(first: int) -> None:
        for owner in range(first, first + 1000):
            take(ipam, owner)
            release(ipam, owner)

    churn(0)
    tracemalloc.start()
    try:
        churn(1000)
        grown_bytes, _peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown_bytes < 100_000
    assert take(ipam, 1)[0] < "fd00::ffff"


def test_a_million_allocations_never_give_one_address_twice(seed: int, full: bool) -> None:
    """A tenth of a million where nobody asks for all."""
    choose = random.Random(seed)
    ipam = NodeIpam(["10.0.0.0/22", "fd00::/64"])
    living: dict[int, tuple[IPAddress, IPAddress]] = {}
    owners: list[int] = []
    holders: dict[IPAddress, int] = {}
    for owner in range(500_000 if full else 50_000):
        ipv4, ipv6 = ipam.take(EndpointId(owner), Wish(identity=IdentityId(owner % 7)))
        assert isinstance(ipv4, IPv4Address)
        assert isinstance(ipv6, IPv6Address)
        assert holders.setdefault(ipv4, owner) == owner
        assert holders.setdefault(ipv6, owner) == owner
        living[owner] = (ipv4, ipv6)
        owners.append(owner)
        if len(owners) > 900:
            index = choose.randrange(len(owners))
            owners[index], owners[-1] = owners[-1], owners[index]
            gone = owners.pop()
            ipam.release(EndpointId(gone))
            for address in living.pop(gone):
                del holders[address]
    assert sum(usage.held for usage in ipam.usage()) == 2 * len(living)
