"""Blocks under races and in number: one holder of every address in the whole cluster, and what a claim costs."""

import os
import random
import threading
from collections.abc import Iterator
from ipaddress import IPv4Network, ip_address
from typing import Final, cast

import pytest

from podwire.control.ipam.documents import (
    Block,
    block_key,
    encode_block,
)
from podwire.control.ipam.interface import Wish
from podwire.model.endpoint import IPAddress
from podwire.model.errors import AddressUnavailable, Conflict, Exhausted, Unavailable
from podwire.model.ids import EndpointId, IdentityId
from podwire.model.store import Store, StoredObject
from podwire.model.store.kinds import IP_ADDRESS
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
from tests.fakes.store import MemoryStore

STEPS = int(os.environ.get("PODWIRE_IPAM_STEPS", "10000"))
"""Of each seed; 350,000 make the million of a long run."""
HELD_S: Final = 0.3
"""Who does not wait for the lock is through in that time."""


def make_pair() -> tuple[MemoryStore, PoolNode, PoolNode]:
    """Two nodes and a pool of one block."""
    store = MemoryStore()
    apply(store, pool_document("p", "10.0.0.0/28", blockSize=28))
    return store, PoolNode(store, "n1"), PoolNode(store, "n2")


def test_an_address_whose_block_is_claimed_meanwhile_is_let_go() -> None:
    store, one, other = make_pair()
    pool = one.known.pools["p"]

    def claim_block(_new: StoredObject) -> None:
        store.before_create = lambda _new: None
        other.claims.claim_block(pool)

    store.before_create = claim_block
    with pytest.raises(AddressUnavailable):
        one.claims.claim_address(ip_address("10.0.0.5"), pool, key_of(1))
    assert not store.list("ipaddresses")[0]
    other.hear()
    assert other.ipam.count_free("p") == 14


def test_a_block_is_without_the_address_that_was_claimed_before_it() -> None:
    _, one, other = make_pair()
    pool = one.known.pools["p"]
    one.claims.claim_address(ip_address("10.0.0.5"), pool, key_of(1))
    other.claims.claim_block(pool)
    other.hear()
    assert other.ipam.count_free("p") == 13


def test_an_address_that_comes_back_while_claims_are_listed_anew_lets_none_of_them_go(
    nodes: Nodes,
) -> None:
    """One that is reserved by now has its block look at what is claimed: not at half of a list."""
    apply(nodes.store, pool_document("p", "10.0.0.0/28", blockSize=28))
    other, node = nodes("n2"), nodes("n1")
    wait_until(other, lambda: other.known.pools)
    assert add(other, 1, "10.0.0.5") == ["10.0.0.5"]
    wait_until(node, lambda: node.known.claimed)
    assert add(node, 1) == ["10.0.0.2"]
    apply(
        nodes.store, pool_document("p", "10.0.0.0/28", blockSize=28, reserved=["10.0.0.2-10.0.0.3"])
    )
    wait_until(node, node.ipam.mine.list_outdated)
    release = threading.Thread(target=node.ipam.release, args=(EndpointId(1),))

    def listed() -> Iterator[StoredObject]:
        release.start()
        release.join(HELD_S)
        yield from nodes.store.list(IP_ADDRESS.plural)[0]

    node.known.replace(IP_ADDRESS.plural, cast("list[StoredObject]", listed()))
    release.join()
    own = node.ipam.mine.find(ip_address("10.0.0.5"))
    assert own is not None
    assert own.fifo.is_excluded(ip_address("10.0.0.5"))


def test_nodes_that_claim_at_the_same_time_never_share_a_block_or_an_address(nodes: Nodes) -> None:
    apply(nodes.store, pool_document("p", "10.0.0.0/24", blockSize=28))
    made = [nodes(f"n{number}") for number in range(4)]
    given: list[list[str]] = [[] for _ in made]
    faults: list[BaseException] = []

    def work(index: int) -> None:
        for number in range(1, 46):
            try:
                given[index] += add(made[index], number)
            except Exhausted:
                pass
            except BaseException as error:
                faults.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(made))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    flat = [address for part in given for address in part]
    assert len(flat) == len(set(flat))
    # 16 blocks of 13, of each of which one is kept
    assert len(flat) >= 4 * 45 - 16
    assert set(claimed_blocks(nodes.store).values()) == {"n0", "n1", "n2", "n3"}


def test_many_adds_of_one_node_claim_no_more_than_they_need(nodes: Nodes) -> None:
    apply(nodes.store, pool_document("p", "10.0.0.0/20", blockSize=28))
    node = nodes("n1")
    given: list[str] = []
    threads = [
        threading.Thread(target=lambda number=number: given.extend(add(node, number)))
        for number in range(1, 31)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(given)) == 30
    assert len(claimed_blocks(nodes.store)) == 3


class Cluster:
    """Random lives of pods on three nodes, beside a dictionary of who has what."""

    def __init__(self, store: Store, seed: int) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.store = store
        self.nodes = {name: PoolNode(store, name) for name in ("n1", "n2", "n3")}
        self.held: dict[IPAddress, tuple[str, int]] = {}
        self.owners: dict[tuple[str, int], IPAddress] = {}
        self.number = 0
        self.steps = (
            *[self.add] * 48,
            *[self.delete] * 46,
            *[self.give_addresses_back] * 2,
            *[self.give_blocks_back] * 3,
            self.restart,
        )

    def step(self) -> None:
        name = self.rng.choice(list(self.nodes))
        self.rng.choice(self.steps)(name)
        if self.rng.random() < 0.2:
            self.nodes[name].hear()

    def add(self, name: str) -> None:
        self.number += 1
        last = self.rng.randrange(256)
        wanted = (ip_address(f"10.0.0.{last}"),) if self.rng.random() < 0.1 else ()
        identity = IdentityId(self.rng.randrange(4))
        wish = Wish(key=key_of(self.number), wanted=wanted, identity=identity)
        address = self._attempt(self.nodes[name], wish)
        if address is not None:
            assert address not in self.held, (self.seed, address, self.held[address], name)
            self.held[address] = (name, self.number)
            self.owners[name, self.number] = address

    def _attempt(self, node: PoolNode, wish: Wish) -> IPAddress | None:
        for _ in range(4):
            try:
                with node.ipam.reserved(wish) as addresses:
                    addresses.fill(lambda: False, 0)
                    return addresses.take(EndpointId(self.number))[0]
            except Unavailable:
                node.hear()
            except (Exhausted, AddressUnavailable):
                return None
        return None

    def delete(self, _name: str) -> None:
        if self.owners:
            key = self.rng.choice(list(self.owners))
            self.nodes[key[0]].ipam.release(EndpointId(key[1]))
            del self.held[self.owners.pop(key)]

    def give_addresses_back(self, name: str) -> None:
        self.nodes[name].hear()
        for claimed in self.nodes[name].ipam.list_unheld():
            self.nodes[name].claims.return_address(claimed)

    def give_blocks_back(self, name: str) -> None:
        node = self.nodes[name]
        for cidr in list(node.ipam.blocks):
            block = node.ipam.close_block(cidr)
            if block is not None:
                node.claims.release_block(block)

    def restart(self, name: str) -> None:
        self.nodes[name] = fresh = PoolNode(self.store, name)
        for (owner, endpoint), address in self.owners.items():
            if owner == name:
                fresh.ipam.adopt(EndpointId(endpoint), [address])


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_address_is_ever_given_twice_in_the_cluster(store: Store, seed: int) -> None:
    reserved = ["10.0.0.40-10.0.0.44"]
    apply(store, pool_document("p", "10.0.0.0/24", blockSize=28, reserved=reserved))
    cluster = Cluster(store, seed)
    for _ in range(STEPS):
        cluster.step()


@pytest.mark.parametrize("claimed", [10, 10_000])
def test_a_claim_costs_the_same_whatever_is_claimed_already(claimed: int) -> None:
    store = MemoryStore()
    apply(store, pool_document("p", "10.0.0.0/8"))
    other = PoolNode(store, "other")
    for index in range(claimed):
        cidr = IPv4Network(f"10.{index >> 10}.{(index >> 2) & 255}.{(index & 3) * 64}/26")
        document = encode_block(Block(cidr, "p", "other", 1))
        store.create(StoredObject(key=block_key(cidr), document=document))
    node = PoolNode(store, "n1")
    del other
    store.calls.clear()
    for _ in range(20):
        node.claims.claim_block(node.known.pools["p"])
    assert store.calls == ["create"] * 20


def test_a_claim_goes_on_when_others_were_faster_everywhere_it_looked() -> None:
    store = MemoryStore()
    apply(store, pool_document("p", "10.0.0.0/24", blockSize=28))
    blind, other = PoolNode(store, "n1"), PoolNode(store, "n2")
    for _ in range(15):
        other.claims.claim_block(other.known.pools["p"])
    blind.claims.claim_block(blind.known.pools["p"])
    assert sorted(claimed_blocks(store).values()) == ["n1"] + ["n2"] * 15
    with pytest.raises((Exhausted, Conflict)):
        blind.claims.claim_block(blind.known.pools["p"])
