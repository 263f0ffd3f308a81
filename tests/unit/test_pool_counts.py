"""How full pools are: capacity is used + free, whoever has which address of whose block."""

from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwire.control.documents.pool_counts import Count, count_pools
from podwire.control.ipam.documents import Block
from podwire.control.ipam.pools import Pool

POOL = Pool(name="p", cidr=ip_network("10.0.0.0/26"), block_size=28)
"""Four blocks of 16 addresses; one of the first stands for its node."""
SIX = Pool(name="p", cidr=ip_network("fd00::/120"), block_size=124)
"""Sixteen blocks of 16."""
A, B, C, D = (str(POOL.block_at(index)) for index in range(4))
NODES = [ip_address("10.0.0.1"), ip_address("fd00::1")]
"""What stands for nodes themselves."""


def _addresses(block: str, *offsets: int) -> list[str]:
    return [str(ip_network(block)[offset]) for offset in offsets]


# blocks, published, the pool as (claimed, capacity, used, borrowed), nodes likewise
CASES = {
    "nothing": ({}, {}, (0, 63, 0, 0), {}),
    "own-block": ({A: "n"}, {"n": _addresses(A, 2, 3)}, (1, 63, 2, 0), {"n": (1, 15, 2, 0)}),
    "full-block-and-one-borrowed": (
        {A: "n", B: "m"},
        {"n": [*_addresses(A, 0, *range(2, 16)), *_addresses(B, 14)], "m": _addresses(B, 2)},
        (2, 63, 17, 1),
        {"n": (1, 15, 15, 1), "m": (1, 16, 2, 0)},
    ),
    "only-borrowed": (
        {B: "m"},
        {"n": _addresses(B, 14), "m": []},
        (1, 63, 1, 1),
        {"n": (0, 0, 0, 1), "m": (1, 16, 1, 0)},
    ),
    "single-address-of-nobodys-block": (
        {A: "n"},
        {"n": _addresses(C, 5)},
        (1, 63, 1, 1),
        {"n": (1, 15, 0, 1)},
    ),
    "block-given-back-with-a-pod": ({A: ""}, {"n": _addresses(A, 2)}, (0, 63, 1, 1), {"n": (0, 0, 0, 1)}),
    "two-nodes-say-the-same-address": (
        {A: "n"},
        {"n": _addresses(A, 2), "m": _addresses(A, 2)},
        (1, 63, 1, 1),
        {"n": (1, 15, 1, 0), "m": (0, 0, 0, 1)},
    ),
    "not-for-pods": (
        {A: "n"},
        {"n": _addresses(A, 0, 1, 15, 2)},
        (1, 63, 3, 1),
        {"n": (1, 15, 3, 1)},
    ),
    "block-of-another-size": (
        {"10.0.0.32/27": "n"},
        {"n": [*_addresses(C, 4, 15), *_addresses(D, 0, 1)]},
        (1, 63, 4, 0),
        {"n": (1, 32, 4, 0)},
    ),
    "address-of-no-pool": ({A: "n"}, {"n": ["10.9.9.9", "fd00::9"]}, (1, 63, 0, 0), {"n": (1, 15, 0, 0)}),
}  # fmt: skip


def _blocks(blocks: dict[str, str]) -> list[Block]:
    return [Block(ip_network(cidr), "p", node, 1) for cidr, node in blocks.items()]


def _shown(count: Count) -> tuple[int, int, int, int]:
    assert count.used + count.free == count.capacity
    assert 0 <= count.used <= count.capacity
    return count.blocks, count.capacity, count.used, count.borrowed


@pytest.mark.parametrize(
    ("blocks", "published", "whole", "nodes"), CASES.values(), ids=CASES.keys()
)
def test_the_numbers_add_up(
    blocks: dict[str, str],
    published: dict[str, list[str]],
    whole: tuple[int, ...],
    nodes: dict[str, tuple[int, ...]],
) -> None:
    given_ = {node: list(map(ip_address, texts)) for node, texts in published.items()}
    found = count_pools({"p": POOL}, _blocks(blocks), given_, NODES)["p"]
    assert _shown(found.whole) == whole
    assert {node: _shown(one) for node, one in found.nodes.items()} == nodes


def test_a_pool_of_ipv6_has_another_capacity() -> None:
    block = Block(ip_network("fd00::/124"), "p", "n", 1)
    found = count_pools(
        {"p": SIX}, [block], {"n": [ip_address("fd00::2"), ip_address("fd00::f")]}, NODES
    )
    assert _shown(found["p"].whole) == (1, 255, 2, 0)
    assert _shown(found["p"].nodes["n"]) == (1, 15, 2, 0)


@given(
    owners=st.lists(st.sampled_from(["", "n", "m"]), min_size=4, max_size=4),
    pods=st.lists(st.tuples(st.sampled_from(["n", "m", "k"]), st.integers(0, 63))),
)
def test_whoever_has_what_the_numbers_add_up(
    owners: list[str], pods: list[tuple[str, int]]
) -> None:
    blocks = dict(zip((A, B, C, D), owners, strict=True))
    published = {node: {POOL.cidr[offset] for who, offset in pods if who == node} for node in "nmk"}
    found = count_pools({"p": POOL}, _blocks(blocks), published, NODES)["p"]
    _shown(found.whole)
    for node, one in found.nodes.items():
        _shown(one)
        own = {cidr for cidr, owner in blocks.items() if owner == node}
        assert one.capacity == 16 * len(own) - (A in own)
    claimed = sum(one.used for one in found.nodes.values())
    in_nobodys = {
        address
        for addresses in published.values()
        for address in addresses
        if not blocks[str(POOL.block_of(address))] and address not in NODES
    }
    assert found.whole.used == claimed + len(in_nobodys)
