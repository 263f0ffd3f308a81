"""Blocks over every store: nodes that race for few blocks, and for one address, never share anything."""

import threading
from collections import Counter
from collections.abc import Iterator
from ipaddress import ip_address, ip_network

import pytest

from podwire.model.errors import AddressUnavailable, Exhausted
from podwire.model.store import Store
from podwire.model.store.kinds import IP_ADDRESS, IP_BLOCK, IP_POOL
from tests.fakes.pool_nodes import (
    Nodes,
    PoolNode,
    add,
    apply,
    claimed_blocks,
    key_of,
    pool_document,
    wait_until,
)

NODES = 4
PODS = 45
"""Of each node; 16 blocks have 208 addresses for pods, 16 of which need an object."""


@pytest.fixture
def nodes(store: Store) -> Iterator[Nodes]:
    remove_all(store)
    made = Nodes(store)
    yield made
    made.close()
    remove_all(store)


def remove_all(store: Store) -> None:
    """Remove pools and what was claimed of them: tests share an API server."""
    for kind in (IP_ADDRESS, IP_BLOCK, IP_POOL):
        for stored in store.list(kind.plural)[0]:
            store.delete(stored.key)


def race(nodes: list[PoolNode], rounds: int) -> list[str]:
    """Have all nodes add pods at the same time; gives every address that was given."""
    given: list[str] = []
    faults: list[Exception] = []

    def work(node: PoolNode) -> None:
        for number in range(1, rounds + 1):
            try:
                given.extend(add(node, number))
            except Exhausted:
                continue
            except Exception as error:  # a thread's fault must not get lost
                faults.append(error)

    threads = [threading.Thread(target=work, args=(node,)) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    return given


def test_racing_nodes_share_no_address(nodes: Nodes) -> None:
    apply(nodes.store, pool_document("p", "10.0.0.0/24", blockSize=28))
    given = race([nodes(f"n{number}") for number in range(NODES)], PODS)
    assert len(given) == len(set(given)) == NODES * PODS
    assert set(claimed_blocks(nodes.store).values()) == {f"n{number}" for number in range(NODES)}


def test_racing_nodes_use_up_a_pool_and_no_more(nodes: Nodes) -> None:
    apply(nodes.store, pool_document("p", "10.0.0.0/26", blockSize=28))
    made = [nodes(f"n{number}") for number in range(NODES)]
    given = race(made, 70)
    own = [str(address) for node in made for address in node.ipam.mine.list_node_addresses()]
    assert sorted([*given, *own]) == sorted(map(str, ip_network("10.0.0.0/26")))


def test_one_of_many_gets_a_fixed_address(nodes: Nodes) -> None:
    apply(nodes.store, pool_document("p", "10.0.0.0/24", reserved=["10.0.0.9"]))
    made = [nodes(f"n{number}") for number in range(NODES)]
    outcomes: Counter[str] = Counter()

    def work(node: PoolNode) -> None:
        try:
            add(node, 1, "10.0.0.9")
            outcomes["given"] += 1
        except AddressUnavailable:
            outcomes["refused"] += 1

    threads = [threading.Thread(target=work, args=(node,)) for node in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == {"given": 1, "refused": NODES - 1}


def test_a_released_block_is_heard_of_and_claimed_with_the_next_epoch(nodes: Nodes) -> None:
    apply(nodes.store, pool_document("p", "10.0.0.0/28", blockSize=28))
    first, second = nodes("n1"), nodes("n2")
    block = first.claims.claim_block(first.known.pools["p"])
    wait_until(first, lambda: first.ipam.blocks)
    own = first.ipam.close_block(block.cidr)
    assert own is not None
    assert first.claims.release_block(own)
    wait_until(second, lambda: block.cidr in second.known.blocks)
    wait_until(second, lambda: not second.known.count_claimed("p"))
    assert second.claims.claim_block(second.known.pools["p"]).epoch == 2
    with pytest.raises(AddressUnavailable):
        first.claims.claim_address(ip_address("10.0.0.5"), first.known.pools["p"], key_of(1))
