"""What a check finds wrong between nodes; and nothing where nothing is."""

from ipaddress import ip_address, ip_network

import pytest

from podwire.control.ipam.audit import ClusterView, find_cluster_faults
from podwire.control.ipam.documents import Block, ClaimedAddress
from podwire.control.ipam.pools import Pool
from tests.fakes.pool_nodes import key_of

POOL = Pool("p", ip_network("10.0.0.0/24"), 28)
BLOCKS = (
    Block(ip_network("10.0.0.0/28"), "p", "n1", 1),
    Block(ip_network("10.0.0.16/28"), "p", "n2", 1),
)


def view(
    blocks: tuple[Block, ...] = BLOCKS,
    claimed: tuple[tuple[str, str], ...] = (),
    held: tuple[str, ...] = ("10.0.0.2",),
    others: tuple[str, ...] = ("10.0.0.18",),
    pools: tuple[Pool, ...] = (POOL,),
) -> ClusterView:
    """What n1 sees: itself and n2."""
    return ClusterView(
        node="n1",
        living={"n1", "n2"},
        pools={pool.name: pool for pool in pools},
        blocks=blocks,
        claimed=[ClaimedAddress(ip_address(one), "p", node, key_of(1)) for one, node in claimed],
        published={"n2": [ip_address(other) for other in others]},
        held=[ip_address(address) for address in held],
    )


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert find_cluster_faults(view()) == []
    assert find_cluster_faults(view(claimed=(("10.0.0.2", "n1"),))) == []
    assert find_cluster_faults(view(claimed=(("10.0.0.12", "n2"),), others=("10.0.0.12",))) == []
    assert find_cluster_faults(view(held=("192.0.2.1",))) == []


GONE = Block(ip_network("10.0.0.32/28"), "p", "n3", 1)
WRONG: list[tuple[str, ClusterView, str, str, bool]] = [
    ("unknown node", view(blocks=(*BLOCKS, GONE)), "10.0.0.32/28", "n3, which is unknown", False),
    ("pool gone", view(pools=()), "10.0.0.0/28", "pool p, which is gone", False),
    (
        "cut anew",
        view(blocks=(*BLOCKS, Block(ip_network("10.0.0.32/27"), "p", "n2", 1))),
        "10.0.0.32/27",
        "not a block of pool p",
        False,
    ),
    (
        "two owners of a block",
        view(blocks=(*BLOCKS, Block(ip_network("10.0.0.8/29"), "p", "n2", 1))),
        "10.0.0.8/29",
        "nodes n1 (10.0.0.0/28) and n2",
        False,
    ),
    ("two pods", view(others=("10.0.0.2",)), "10.0.0.2", "nodes n1 and n2", False),
    ("outside blocks", view(others=("10.0.0.99",)), "10.0.0.99", "no node owns it", False),
    ("in another's block", view(others=("10.0.0.7",)), "10.0.0.7", "node n1 owns it", False),
    (
        "no endpoint",
        view(claimed=(("10.0.0.12", "n1"),)),
        "10.0.0.12",
        "not an endpoint here",
        True,
    ),
    ("claimed by nobody", view(claimed=(("10.0.0.40", "n3"),)), "10.0.0.40", "n3", True),
]


@pytest.mark.parametrize(
    ("seen", "address", "words", "releasable"),
    [case[1:] for case in WRONG],
    ids=[case[0] for case in WRONG],
)
def test_what_is_wrong_is_named(
    seen: ClusterView, address: str, words: str, releasable: bool
) -> None:
    found = [fault for fault in find_cluster_faults(seen) if fault.address == address]
    assert any(words in entry.problem and entry.releasable is releasable for entry in found), found
