"""What a node does about its blocks over time: ahead, back, remembered, orphans, its range from a pool."""

import json
from ipaddress import ip_address, ip_network

import pytest
from msgspec.structs import replace

from podwire.agent.duties.address_source import take_ranges
from podwire.agent.duties.addresses import FACT, RETRY_S, TICK_S
from podwire.control.documents.kinds import decode
from podwire.control.ipam.claiming.orphans import GRACE_S
from podwire.control.ipam.documents import (
    Block,
    block_key,
    decode_block,
    encode_block,
)
from podwire.model.errors import Exhausted, StorageFailure, Unavailable
from podwire.model.ids import EndpointId
from podwire.model.store import ObjectKey, Revisions, Store, StoredObject
from tests.fakes.pool_nodes import (
    Facts,
    PoolNode,
    Ticking,
    add,
    apply,
    claimed_blocks,
    key_of,
    pool_document,
)
from tests.fakes.server_store import ServerStore
from tests.fakes.store import MemoryStore, MemoryWatch


def test_blocks_are_claimed_ahead_and_given_back_when_empty_for_long() -> None:
    store = MemoryStore()
    apply(store, pool_document("p", "10.0.0.0/24", blockSize=28))
    ticking = Ticking(store, "n1")
    ticking.settle()
    assert ticking.ipam.count_free("p") == 14
    for number in range(1, 46):
        add(ticking, number)
        ticking.settle()
    assert len(ticking.ipam.blocks) == 4
    for number in range(1, 46):
        ticking.ipam.release(EndpointId(number))
    for _ in range(8):
        ticking.settle()
        ticking.now_s += 301
    ticking.settle()
    assert 1 <= len(claimed_blocks(store)) == len(ticking.ipam.blocks) <= 3


def live_with_a_pod() -> tuple[MemoryStore, Ticking, str]:
    """Give a store, a node that has a block of its pool, and the address of a pod there."""
    store = MemoryStore()
    apply(store, pool_document("p", "10.0.0.0/24", blockSize=28))
    first = Ticking(store, "n1")
    first.settle()
    [held] = add(first, 1)
    first.settle()
    return store, first, held


def test_a_start_without_the_store_uses_the_blocks_of_before() -> None:
    store, first, held = live_with_a_pod()
    store.away = True
    again = Ticking(store, "n1", first.facts)
    again.ipam.adopt(EndpointId(1), [ip_address(held)])
    given = {add(again, number)[0] for number in range(2, 15)}
    assert len(given) == 13
    assert held not in given
    with pytest.raises(Unavailable):
        add(again, 99)


def test_a_request_that_failed_once_is_told_until_the_next_succeeds() -> None:
    store = MemoryStore()
    apply(store, pool_document("p", "10.0.0.0/24", blockSize=28))
    ticking = Ticking(store, "n1")

    def be_slow(_new: StoredObject) -> None:
        raise Unavailable("create: no answer in 5 s")

    store.before_create = be_slow
    assert ticking.duty._worker.do_round() == RETRY_S
    assert ticking.reports[-1] == "create: no answer in 5 s"
    store.before_create = lambda _new: None
    assert ticking.duty._worker.do_round() == TICK_S
    assert ticking.reports[-1] == ""
    assert claimed_blocks(store)


def test_a_tick_that_asks_nothing_does_not_call_a_store_that_is_away_healthy() -> None:
    store = MemoryStore()
    apply(store, pool_document("p", "10.0.0.0/24", blockSize=28))
    ticking = Ticking(store, "n1")
    ticking.settle()
    ticking.duty.news.on_away(Unavailable("the store is away"))
    assert ticking.duty._worker.do_round() == TICK_S
    assert ticking.reports[-1] == "the store is away"
    ticking.duty.news.on_back()
    assert ticking.reports[-1] == ""


def test_what_cannot_be_done_for_another_reason_is_told_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticking = Ticking(MemoryStore(), "n1")
    errors: list[Exception] = [StorageFailure("the disk is full"), KeyError("a bug")]
    monkeypatch.setattr(ticking.duty, "tick", lambda: (_ for _ in ()).throw(errors[0]))
    assert ticking.duty._worker.do_round() == RETRY_S
    assert ticking.reports[-1] == "the disk is full"
    del errors[0]
    assert ticking.duty._worker.do_round() == RETRY_S
    assert "a bug" in ticking.reports[-1]
    monkeypatch.undo()
    assert ticking.duty._worker.do_round() == TICK_S
    assert ticking.reports[-1] == ""


@pytest.mark.parametrize("state", ["open", "lost", "closing"])
def test_what_is_shown_of_a_block_adds_up(state: str) -> None:
    store = MemoryStore()
    apply(store, pool_document("p", "10.0.0.0/24", blockSize=28))
    ticking = Ticking(store, "n1")
    ticking.settle()
    add(ticking, 1)
    [own] = ticking.ipam.own.values()
    own.lost, own.closing = state == "lost", state == "closing"
    [shown] = ticking.ipam.usage()
    assert (shown.held, shown.capacity) == (1, shown.held + shown.free)
    assert shown.free == (13 if state == "open" else 0)


def _remember(facts: Facts, blocks: dict[str, int]) -> None:
    """Write down blocks as an earlier life would have, by their epochs."""
    pool = pool_document("p", "10.0.0.0/24", blockSize=28)
    documents = [
        encode_block(Block(ip_network(cidr), "p", "n1", epoch)) for cidr, epoch in blocks.items()
    ]
    kept = {"pools": [pool], "problems": {}, "labels": {}, "namespaces": {}}
    facts.write_fact(FACT, json.dumps({**kept, "blocks": documents, "claimed": []}))


@pytest.mark.parametrize(
    ("blocks", "opened"),
    [
        (["10.0.0.0/28", "10.0.0.16/28"], ["10.0.0.0/28", "10.0.0.16/28"]),
        (["10.0.0.0/28", "10.0.0.0/27"], ["10.0.0.0/27"]),
        (["10.0.0.0/27", "10.0.0.16/28"], ["10.0.0.0/27"]),
        (["10.0.0.0/29", "10.0.0.8/29", "10.0.0.0/28"], ["10.0.0.0/28"]),
        (["10.0.0.0/28", "10.0.0.0/26", "10.0.0.0/27"], ["10.0.0.0/26"]),
        (["10.0.0.0/28", "fd00::/124"], ["10.0.0.0/28", "fd00::/124"]),
        (["10.0.0.0/26", "10.0.0.64/28", "10.0.0.16/28"], ["10.0.0.0/26", "10.0.0.64/28"]),
    ],
    ids=[
        "apart",
        "smaller-first",
        "larger-first",
        "two-in-one",
        "nested",
        "families",
        "one-of-two",
    ],
)
def test_remembered_blocks_that_overlap_are_one_until_the_store_is_heard(
    blocks: list[str], opened: list[str]
) -> None:
    store, facts = MemoryStore(), Facts()
    _remember(facts, dict.fromkeys(blocks, 1))
    store.away = True
    ticking = Ticking(store, "n1", facts)
    assert sorted(map(str, ticking.ipam.own)) == sorted(opened)
    assert ticking.ipam.list_lacks() == []
    assert len(ticking.ipam.usage()) == len(opened)
    told = " ".join(ticking.reports)
    for block in set(blocks) - set(opened):
        assert f"block {block} of pool p is left out" in told
    store.away = False
    apply(store, pool_document("p", "10.0.0.0/24", blockSize=28))
    ticking.hear_and_work()
    assert ticking.reports[-1] == ""


def test_an_unreadable_pool_and_block_are_what_this_node_remembers_of_them() -> None:
    store, first, held = live_with_a_pod()
    [pool], [block] = store.list("ippools")[0], store.list("ipblocks")[0]
    store.update(replace(pool, document={"spec": [7]}))
    store.update(replace(block, document={"spec": {"cidr": "x"}}))
    again = Ticking(store, "n1", first.facts)
    assert set(again.known.usable()) == {"p"}
    assert again.ipam.blocks == first.ipam.blocks
    again.ipam.adopt(EndpointId(1), [ip_address(held)])
    assert add(again, 2) != [held]
    assert set(again.duty.follower.unreadable.faults) == {pool.key, block.key}


def test_a_block_is_forgotten_on_disk_before_it_is_given_back() -> None:
    store = MemoryStore()
    apply(store, pool_document("p", "10.0.0.0/24", blockSize=28))
    ticking = Ticking(store, "n1")
    ticking.settle()
    ticking.settle()
    [cidr] = ticking.ipam.blocks
    assert str(cidr) in ticking.facts.read_fact("ipam-blocks")
    store.delete(store.list("ippools")[0][0].key)
    ticking.settle()
    ticking.now_s += 11
    kept: list[str] = []
    store.before_update = lambda _new: kept.append(ticking.facts.read_fact("ipam-blocks"))
    while ticking.duty.follower.step(0):
        pass
    ticking.settle()
    assert not claimed_blocks(store)
    assert kept
    assert f'"cidr": "{cidr}"' not in kept[0]


def test_orphans_are_given_back_after_two_looks_that_agree() -> None:
    store = MemoryStore()
    apply(store, pool_document("p", "10.0.0.0/24", blockSize=28))
    gone = PoolNode(store, "gone")
    pool = gone.known.pools["p"]
    block = gone.claims.claim_block(pool)
    gone.claims.claim_address(ip_address("10.0.0.200"), pool, key_of(1))
    living = PoolNode(store, "living")
    living.claims.claim_block(pool)
    lease = store.leases().acquire("node/living", "x", 60)
    collector = Ticking(store, "n1")
    assert collector.duty.collect() == 0
    collector.now_s += GRACE_S - 1
    assert collector.duty.collect() == 0
    collector.now_s += 1
    assert collector.duty.collect() == 2
    assert set(claimed_blocks(store).values()) == {"living"}
    assert not store.list("ipaddresses")[0]
    found = store.get(block_key(block.cidr))
    assert found is not None
    assert (decode_block(found) or block).epoch == block.epoch
    lease.close()


def test_an_orphan_that_changed_between_both_looks_is_left() -> None:
    store = MemoryStore()
    apply(store, pool_document("p", "10.0.0.0/24", blockSize=28))
    gone = PoolNode(store, "gone")
    block = gone.claims.claim_block(gone.known.pools["p"])
    collector = Ticking(store, "n1")
    collector.duty.collect()
    assert block.stored is not None
    store.update(
        StoredObject(
            key=block.stored.key,
            uid=block.stored.uid,
            revision=block.revision,
            document=encode_block(block),
        )
    )
    collector.now_s += GRACE_S
    assert collector.duty.collect() == 0
    collector.now_s += GRACE_S
    assert collector.duty.collect() == 1


def test_only_one_node_collects(store: Store) -> None:
    one, other = Ticking(store, "n1"), Ticking(store, "n2")
    assert one.duty._has_duty()
    assert not other.duty._has_duty()
    one.duty.stop()
    other.duty.stop()


def test_pools_that_overlap_behind_applys_back_are_not_used() -> None:
    store = MemoryStore()
    apply(store, pool_document("a", "10.0.0.0/24"))
    store.create(decode(pool_document("b", "10.0.0.128/25")))
    node = PoolNode(store, "n1")
    with pytest.raises(Exhausted, match=r"pools a \(10.0.0.0/24\) and b \(10.0.0.128/25\) overlap"):
        add(node, 1)


def test_a_node_keeps_the_range_that_a_pool_gave_it() -> None:
    store = MemoryStore()
    apply(
        store,
        pool_document("n4", "10.0.0.0/16", use="nodes", blockSize=24),
        pool_document("n6", "fd00::/48", use="nodes"),
    )
    facts = Facts()
    first = take_ranges("n1", store, facts)
    assert [cidr.prefixlen for cidr in first] == [24, 122]
    assert list(take_ranges("n1", store, Facts())) == list(first)
    assert not set(take_ranges("n2", store, Facts())) & set(first)
    store.away = True
    assert list(take_ranges("n1", store, facts)) == list(first)
    with pytest.raises(Unavailable):
        take_ranges("n3", store, Facts())


@pytest.mark.parametrize("kind", ["ippools", "ipblocks"])
def test_a_node_keeps_its_range_while_what_gave_it_cannot_be_read(kind: str) -> None:
    store = MemoryStore()
    apply(store, pool_document("n4", "10.0.0.0/16", use="nodes", blockSize=24))
    facts = Facts()
    first = list(take_ranges("n1", store, facts))
    for stored in store.list(kind)[0]:
        store.update(replace(stored, document={"metadata": {"name": stored.key.name}, "spec": "x"}))
    assert list(take_ranges("n1", store, facts)) == first
    assert len(store.list("ipblocks")[0]) == 1
    store.away = True
    assert list(take_ranges("n1", store, facts)) == first


def test_a_node_whose_own_object_is_damaged_takes_its_range_all_the_same() -> None:
    store = MemoryStore()
    apply(store, pool_document("n4", "10.0.0.0/16", use="nodes", blockSize=24))
    store.create(StoredObject(key=ObjectKey("nodes", "", "n1"), document={"spec": "x"}))
    assert len(take_ranges("n1", store, Facts())) == 1


class Unordered(ServerStore):
    """A server whose watch tells of blocks long before it tells of addresses."""

    def watch(self, after: Revisions) -> MemoryWatch:
        return super().watch({kind: at for kind, at in after.items() if kind != "ipaddresses"})


def test_no_block_is_used_before_it_is_known_who_has_addresses_of_it() -> None:
    store = Unordered()
    apply(store, pool_document("p", "10.0.0.0/28", blockSize=28))
    ours, theirs = PoolNode(store, "n1"), PoolNode(store, "n2")
    [pool] = theirs.ipam.ordinary_pools()
    taken = theirs.claims.claim_address(ip_address("10.0.0.5"), pool, key_of("theirs"))
    ours.claims.claim_block(pool)
    ours.hear()
    assert ours.ipam.blocks
    given = {add(ours, number)[0] for number in range(1, ours.ipam.count_free("p") + 1)}
    assert given
    assert str(taken.address) not in given
