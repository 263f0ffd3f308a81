"""Blocks of pools: claims, limits, borrowing, fixed addresses, restarts, losses."""

from ipaddress import ip_address, ip_network

import pytest
from msgspec.structs import replace

from podwire.control.ipam.documents import (
    Block,
    ClaimedAddress,
    address_key,
    block_key,
    decode_block,
    decode_claimed,
    encode_block,
    encode_claimed,
)
from podwire.control.ipam.interface import Wish
from podwire.model.errors import AddressUnavailable, Exhausted, Unavailable
from podwire.model.ids import EndpointId
from podwire.model.store import StoredObject
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


def test_a_pod_gets_an_address_of_each_family_that_has_a_pool(nodes: Nodes) -> None:
    apply(nodes.store, pool_document("four", "10.0.0.0/16"), pool_document("six", "fd00::/64"))
    node = nodes("n1")
    ipv4, ipv6 = add(node, 1)
    assert ip_address(ipv4) in ip_network("10.0.0.0/16")
    assert ip_address(ipv6) in ip_network("fd00::/64")
    assert set(claimed_blocks(nodes.store).values()) == {"n1"}
    assert sorted(block.prefixlen for block in node.ipam.blocks) == [26, 122]


def test_add_and_del_write_nothing_while_a_block_has_free_addresses(nodes: Nodes) -> None:
    apply(nodes.store, pool_document("p", "10.0.0.0/16"))
    node = nodes("n1")
    add(node, 1)
    before = nodes.store.list("ipblocks")[1]
    for owner in range(2, 50):
        add(node, owner)
        node.ipam.release(EndpointId(owner))
    assert nodes.store.list("ipblocks")[1] == before


def test_two_nodes_never_have_the_same_block(nodes: Nodes) -> None:
    apply(nodes.store, pool_document("p", "10.0.0.0/24", blockSize=28))
    pair = [nodes("n1"), nodes("n2")]
    given = [address for owner in range(80) for node in pair for address in add(node, owner + 1)]
    assert len(set(given)) == 160


def test_a_released_block_is_claimed_again_with_a_higher_epoch(nodes: Nodes) -> None:
    apply(nodes.store, pool_document("p", "10.0.0.0/28", blockSize=28))
    first, second = nodes("n1"), nodes("n2")
    add(first, 1)
    first.ipam.release(EndpointId(1))
    [cidr] = first.ipam.blocks
    block = first.ipam.close_block(cidr)
    assert block is not None
    assert first.claims.release_block(block)
    wait_until(first, lambda: not first.ipam.own)
    wait_until(second, lambda: cidr in second.known.blocks and not second.known.count_claimed("p"))
    add(second, 1)
    assert second.ipam.blocks == {cidr: 2}


def test_a_block_with_addresses_in_use_is_not_given_back(nodes: Nodes) -> None:
    apply(nodes.store, pool_document("p", "10.0.0.0/24"))
    node = nodes("n1")
    add(node, 1)
    [cidr] = node.ipam.blocks
    assert node.ipam.close_block(cidr) is None


def test_an_old_view_of_a_block_cannot_release_it(nodes: Nodes) -> None:
    apply(nodes.store, pool_document("p", "10.0.0.0/24"))
    node = nodes("n1")
    add(node, 1)
    [own] = node.known.own.values()
    assert node.claims.release_block(own)
    assert not node.claims.release_block(own)


def test_the_limit_of_blocks_and_what_is_exhausted_are_named(nodes: Nodes) -> None:
    apply(
        nodes.store,
        pool_document("p", "10.0.0.0/24", blockSize=28, maxBlocksPerNode=1, strictAffinity=True),
    )
    node = nodes("n1")
    for owner in range(15):
        add(node, owner + 1)
    with pytest.raises(Exhausted) as caught:
        add(node, 99)
    for word in (
        "pool p",
        "maxBlocksPerNode",
        "1 blocks here, 15 addresses held",
        "strictAffinity",
    ):
        assert word in caught.value.message
    assert node.ipam.list_lacks() == ["IPv4 pools p"]


def test_a_full_pool_is_named(nodes: Nodes) -> None:
    apply(nodes.store, pool_document("p", "10.0.0.0/28", blockSize=28, strictAffinity=True))
    first, second = nodes("n1"), nodes("n2")
    add(first, 1)
    with pytest.raises(Exhausted, match="all 1 blocks are claimed"):
        add(second, 1)


def test_a_node_without_a_block_borrows_what_owners_never_give(nodes: Nodes) -> None:
    apply(nodes.store, pool_document("p", "10.0.0.0/26"))
    owner, borrower = nodes("n1"), nodes("n2")
    [first] = add(owner, 1)
    borrowed = [add(borrower, number)[0] for number in range(1, 5)]
    assert len(set(borrowed)) == 4
    with pytest.raises(Exhausted):
        add(borrower, 5)
    given = [first, *(add(owner, number)[0] for number in range(2, 60))]
    assert not set(given) & set(borrowed)
    with pytest.raises(Exhausted):
        add(owner, 99)
    [one, *_] = [decode_claimed(stored) for stored in nodes.store.list("ipaddresses")[0]]
    assert one is not None
    assert one.node == "n2"
    assert one.key.if_name == "eth0"


def test_an_owner_takes_its_own_kept_addresses_by_objects(nodes: Nodes) -> None:
    apply(nodes.store, pool_document("p", "10.0.0.0/26"))
    owner = nodes("n1")
    given = [add(owner, number)[0] for number in range(1, 64)]
    assert len(set(given)) == 63
    assert len(nodes.store.list("ipaddresses")[0]) == 4


def test_a_borrowed_address_is_given_back_when_nobody_has_it(nodes: Nodes) -> None:
    apply(nodes.store, pool_document("p", "10.0.0.0/26"))
    nodes("n1")
    add(nodes.made[0], 1)
    borrower = nodes("n2")
    add(borrower, 1)
    wait_until(borrower, lambda: borrower.known.claimed)
    assert borrower.ipam.list_unheld() == []
    borrower.ipam.release(EndpointId(1))
    [unheld] = borrower.ipam.list_unheld()
    borrower.claims.return_address(unheld)
    assert not nodes.store.list("ipaddresses")[0]


def test_a_claim_that_was_taken_over_is_not_given_back(nodes: Nodes) -> None:
    apply(nodes.store, pool_document("p", "10.0.0.0/24", reserved=["10.0.0.200"]))
    node = nodes("n1")
    assert add(node, 1, "10.0.0.200") == ["10.0.0.200"]
    wait_until(node, lambda: node.known.claimed)
    node.ipam.release(EndpointId(1))
    [unheld] = node.ipam.list_unheld()
    assert add(node, 2, "10.0.0.200") == ["10.0.0.200"]
    node.claims.return_address(unheld)
    assert len(nodes.store.list("ipaddresses")[0]) == 1


def test_reserved_addresses_are_only_given_to_who_asks(nodes: Nodes) -> None:
    apply(nodes.store, pool_document("p", "10.0.0.0/26", reserved=["10.0.0.2-10.0.0.50"]))
    node, other = nodes("n1"), nodes("n2")
    given = {add(node, number)[0] for number in range(1, 9)}
    assert all(int(address.rpartition(".")[2]) > 50 for address in given)
    assert add(node, 20, "10.0.0.7") == ["10.0.0.7"]
    assert add(other, 21, "10.0.0.8") == ["10.0.0.8"]
    with pytest.raises(AddressUnavailable, match="node n1 has it"):
        add(other, 22, "10.0.0.7")


def test_a_fixed_address_in_anothers_block_is_refused_by_his_name(nodes: Nodes) -> None:
    apply(nodes.store, pool_document("p", "10.0.0.0/26"))
    owner, other = nodes("n1"), nodes("n2")
    add(owner, 1)
    with pytest.raises(AddressUnavailable, match="node n1"):
        add(other, 1, "10.0.0.20")
    with pytest.raises(AddressUnavailable, match="no pool"):
        add(other, 1, "192.0.2.1")


@pytest.mark.parametrize(
    "spec", [{"kept": ["192.0.2.1"]}, {"epoch": "x"}, {"node": None}, {"node": 7}], ids=str
)
def test_an_address_of_a_block_that_cannot_be_read_is_nobodys_to_take(
    nodes: Nodes, spec: dict[str, object]
) -> None:
    apply(nodes.store, pool_document("p", "10.0.0.0/26"))
    add(nodes("n1"), 1)
    other = nodes("n2")
    [block] = nodes.store.list("ipblocks")[0]
    damaged = {**block.document, "spec": {**block.document["spec"], **spec}}
    nodes.store.update(replace(block, document=damaged))
    with pytest.raises(AddressUnavailable, match=r"its object is not a block|node n1"):
        add(other, 1, "10.0.0.20")


@pytest.mark.parametrize("address", ["10.0.0.0", "10.0.0.63"])
def test_the_first_and_the_last_address_of_a_block_are_as_good_as_any(
    nodes: Nodes, address: str
) -> None:
    apply(nodes.store, pool_document("p", "10.0.0.0/26"))
    node = nodes("n1")
    add(node, 1)
    assert add(node, 2, address) == [address]


def test_the_address_that_stands_for_a_node_is_no_pods(nodes: Nodes) -> None:
    apply(nodes.store, pool_document("p", "10.0.0.0/26", reserved=["10.0.0.1"]))
    node, other = nodes("n1"), nodes("n2")
    add(node, 1)
    [own] = node.ipam.mine.list_node_addresses()
    assert str(own) == "10.0.0.0", "what is reserved is left to pods that ask for it"
    with pytest.raises(AddressUnavailable, match="stands for this node"):
        add(node, 2, str(own))
    assert add(node, 2, "10.0.0.1") == ["10.0.0.1"]
    other.known.node_addresses["n1"] = (own,)
    with pytest.raises(AddressUnavailable, match="stands for node n1"):
        add(other, 1, str(own))


@pytest.mark.parametrize(("cidr", "size"), [("10.0.0.0/29", 32), ("fd00::/125", 128)])
def test_blocks_of_one_address_are_used_up(nodes: Nodes, cidr: str, size: int) -> None:
    apply(nodes.store, pool_document("p", cidr, blockSize=size))
    node = nodes("n1")
    given = [add(node, number)[0] for number in range(1, 8)]
    own = set(map(str, node.ipam.mine.list_node_addresses()))
    assert len(own) == 1
    assert {*given, *own} == set(map(str, ip_network(cidr)))
    with pytest.raises(Exhausted):
        add(node, 8)


def test_a_pod_of_before_keeps_an_address_that_would_stand_for_the_node(nodes: Nodes) -> None:
    apply(nodes.store, pool_document("p", "10.0.0.0/28", blockSize=28))
    node = nodes("n1")
    add(node, 1)
    [own] = node.ipam.mine.list_node_addresses()
    node.ipam.adopt(EndpointId(9), [own])
    [another] = node.ipam.mine.list_node_addresses()
    assert another != own
    assert node.ipam.find_owner(another) is None


def test_what_a_pool_reserves_later_holds_in_blocks_that_exist(nodes: Nodes) -> None:
    apply(nodes.store, pool_document("p", "10.0.0.0/28", blockSize=28))
    node, other = nodes("n1"), nodes("n2")
    [running] = add(node, 1)
    assert running == "10.0.0.2"
    reserved = pool_document("p", "10.0.0.0/28", blockSize=28, reserved=["10.0.0.0/29"])
    apply(nodes.store, reserved)
    wait_until(node, lambda: node.known.pools["p"].reserved)
    wait_until(node, node.ipam.mine.list_outdated)
    for block, kept in node.ipam.mine.list_outdated():
        node.claims.change_kept(block, kept)
    wait_until(node, lambda: not node.ipam.mine.list_outdated())
    given = [add(node, number)[0] for number in range(2, 9)]
    assert set(given) == {f"10.0.0.{number}" for number in range(8, 15)}
    wait_until(
        other, lambda: any(one.keeps(ip_address("10.0.0.5")) for one in other.known.blocks.values())
    )
    assert add(other, 1, "10.0.0.5") == ["10.0.0.5"]
    with pytest.raises(AddressUnavailable, match="node n1"):
        add(other, 2, running)
    node.ipam.release(EndpointId(1))
    [(block, kept)] = node.ipam.mine.list_outdated()
    assert any(cidr.contains(ip_address(running)) for cidr in kept)


def test_what_a_pool_reserves_no_longer_is_given_again(nodes: Nodes) -> None:
    apply(
        nodes.store,
        pool_document(
            "p", "10.0.0.0/28", blockSize=28, strictAffinity=True, reserved=["10.0.0.8/29"]
        ),
    )
    node = nodes("n1")
    add(node, 1)
    assert node.ipam.count_free("p") == 6
    apply(nodes.store, pool_document("p", "10.0.0.0/28", blockSize=28, strictAffinity=True))
    wait_until(node, node.ipam.mine.list_outdated)
    assert node.ipam.count_free("p") == 6, "others may still claim them"
    for block, kept in node.ipam.mine.list_outdated():
        node.claims.change_kept(block, kept)
    wait_until(node, lambda: node.ipam.count_free("p") == 14)


def test_a_fixed_address_of_no_block_is_left_out_by_who_claims_the_block(nodes: Nodes) -> None:
    apply(nodes.store, pool_document("p", "10.0.0.0/28", blockSize=28))
    first, second = nodes("n1"), nodes("n2")
    assert add(first, 1, "10.0.0.5") == ["10.0.0.5"]
    given = {add(second, number)[0] for number in range(1, 13)}
    assert "10.0.0.5" not in given
    with pytest.raises(AddressUnavailable, match="node n1 has it"):
        add(second, 99, "10.0.0.5")


def test_a_block_gives_nothing_before_its_claim_was_heard() -> None:
    store = MemoryStore()
    apply(store, pool_document("p", "10.0.0.0/28", blockSize=28))
    node = PoolNode(store, "n1")
    wish = Wish(key=key_of(1), namespace="default")
    with node.ipam.reserved(wish) as addresses:
        with pytest.raises(Unavailable, match="not confirmed"):
            addresses.fill(lambda: False, 0.05)
        assert claimed_blocks(store)
        assert not node.ipam.blocks
        node.hear()
        addresses.fill(lambda: False, 0)
        assert node.ipam.blocks


def test_an_add_waits_for_the_last_block_that_its_node_has_claimed_ahead() -> None:
    store = MemoryStore()
    apply(store, pool_document("p", "10.0.0.0/28", blockSize=28, strictAffinity=True))
    node = PoolNode(store, "n1")
    node.claims.claim_block(node.known.usable()["p"])
    wish = Wish(key=key_of(1), namespace="default")
    with node.ipam.reserved(wish) as addresses:
        with pytest.raises(Unavailable, match="not confirmed"):
            addresses.fill(lambda: False, 0.05)
        node.hear()
        addresses.fill(lambda: False, 0)
    other = PoolNode(store, "n2")  # which has none, and none is coming
    with other.ipam.reserved(wish) as addresses, pytest.raises(Exhausted):
        addresses.fill(lambda: False, 0.05)


def test_rested_addresses_go_to_the_same_identity_first_and_else_rest_longest(nodes: Nodes) -> None:
    apply(nodes.store, pool_document("p", "10.0.0.0/24", blockSize=28, strictAffinity=True))
    node = nodes("n1")
    given = {number: add(node, number, identity=number)[0] for number in range(1, 16)}
    for number in (3, 4, 5):
        node.ipam.release(EndpointId(number))
    assert add(node, 20, identity=5) == [given[5]]
    assert add(node, 21, identity=77) == [given[3]]


def test_a_restart_has_every_address_back_before_anything_is_given(nodes: Nodes) -> None:
    apply(nodes.store, pool_document("p", "10.0.0.0/24", blockSize=28))
    before = nodes("n1")
    held = {number: add(before, number)[0] for number in range(1, 10)}
    after = PoolNode(nodes.store, "n1")
    for number, address in held.items():
        after.ipam.adopt(EndpointId(number), [ip_address(address)])
    after.start()
    nodes.made.append(after)
    fresh = {add(after, number)[0] for number in range(20, 60)}
    assert not fresh & set(held.values())
    assert len(claimed_blocks(nodes.store)) >= 4


def test_a_claim_whose_node_died_before_it_heard_of_it_is_used_after_the_restart(
    nodes: Nodes,
) -> None:
    apply(nodes.store, pool_document("p", "10.0.0.0/24", blockSize=28))
    dead = PoolNode(nodes.store, "n1")
    block = dead.claims.claim_block(dead.known.pools["p"])
    node = nodes("n1")
    assert block.cidr in node.ipam.blocks
    [address] = add(node, 1)
    assert ip_address(address) in block.cidr
    assert len(claimed_blocks(nodes.store)) == 1


def test_a_lost_block_keeps_its_endpoints_and_gives_nothing_more(nodes: Nodes) -> None:
    apply(nodes.store, pool_document("p", "10.0.0.0/24", blockSize=28))
    node = nodes("n1")
    [address] = add(node, 1)
    [own] = node.known.own.values()
    taken = Block(own.cidr, "p", "n2", own.epoch + 1)
    assert own.stored is not None
    nodes.store.update(
        StoredObject(
            key=own.stored.key,
            revision=own.revision,
            uid=own.stored.uid,
            document=encode_block(taken),
        )
    )
    wait_until(node, node.ipam.mine.list_lost)
    assert node.ipam.find_owner(ip_address(address)) == 1
    [other] = add(node, 2)
    assert ip_address(other) not in own.cidr
    assert own.cidr not in node.ipam.blocks


def test_documents_are_read_back_as_written() -> None:
    for cidr in ("10.0.0.0/26", "fd00::/122", "fd00::1:0/122"):
        network = ip_network(cidr)
        stored = StoredObject(
            key=block_key(network), document=encode_block(Block(network, "p", "n", 3))
        )
        assert decode_block(stored) == Block(network, "p", "n", 3, (), stored)
        address = network.network_address + 7
        claimed = ClaimedAddress(address, "p", "n", key_of(1))
        stored = StoredObject(key=address_key(address), document=encode_claimed(claimed))
        assert decode_claimed(stored) == ClaimedAddress(address, "p", "n", key_of(1), stored)
