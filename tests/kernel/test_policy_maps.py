"""Slots, CIDRs and hits in real maps: what is written is there, what does not fit changes nothing."""

import ipaddress
import random
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest
from msgspec.structs import replace

from podwire.datapath import abi, policy_maps
from podwire.datapath import maps as tables
from podwire.datapath.policy_maps import PolicyTable, pack_key, read_cidrs, read_entries, read_hits
from podwire.datapath.rows import describe_maps, read_rows
from podwire.kernel import bpf
from podwire.model.endpoint import IPNetwork
from podwire.model.errors import Bug, KernelFailure, PolicyOverflow
from podwire.model.interfaces import EndpointConfig, PolicyDatapath
from podwire.model.policy import (
    ANY_IDENTITY,
    CIDR_IDENTITY_FIRST,
    CIDR_WORLD_BIT,
    Direction,
    PolicyEntry,
    PolicyKey,
    PolicyRows,
    Verdict,
)
from tests.kernel.node_world import KernelWorld, kernel_world
from tests.plain_pods import OPEN

pytestmark = pytest.mark.kernel

CAPACITY = 20
NET = CIDR_IDENTITY_FIRST


@pytest.fixture(scope="module")
def shared_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelWorld]:
    with kernel_world(tmp_path_factory.mktemp("policy")) as made:
        yield made


@pytest.fixture
def world(shared_world: KernelWorld) -> Iterator[KernelWorld]:
    shared_world.restart(policy_entries=CAPACITY)
    yield shared_world
    datapath = shared_world.datapath
    datapath.policy.remove_slots(datapath.policy.list_slots())
    datapath.policy.write_cidrs({})
    datapath.policy.forget_hits(())
    datapath.reap_devices()


def entry(rule: int, verdict: Verdict = Verdict.ALLOW) -> PolicyEntry:
    return PolicyEntry(verdict, 100, rule)


def rows_of(count: int, first: int = 1000) -> PolicyRows:
    return {
        PolicyKey(first + number, Direction(number % 2), 6, number, 16): entry(number)
        for number in range(count)
    }


MIXED: PolicyRows = {
    PolicyKey(ANY_IDENTITY, Direction.EGRESS): entry(1),
    PolicyKey(2, Direction.EGRESS): entry(2, Verdict.DENY),
    PolicyKey(2, Direction.INGRESS, 6): entry(3),
    PolicyKey(2, Direction.INGRESS, 6, 0x8000, 1): entry(4),
    PolicyKey(2, Direction.INGRESS, 6, 80, 16): PolicyEntry(Verdict.DENY, 2**32 - 1, 2**32 - 1),
    PolicyKey(NET | CIDR_WORLD_BIT, Direction.INGRESS, 1, 8 << 8, 8): entry(6),
}


def dump(world: KernelWorld) -> dict[bytes, bytes]:
    maps = world.datapath.maps
    return {**dict(maps.pw_policy.items()), **dict(maps.pw_cidrs.items())}


def everything(world: KernelWorld) -> dict[int, PolicyRows]:
    """Read all slots past the writer's own memory."""
    found: dict[int, PolicyRows] = {}
    for row in read_entries(world.datapath.maps):
        found.setdefault(row.slot, {})[row.key] = row.entry
    return found


def test_a_slot_is_read_as_it_was_written(world: KernelWorld) -> None:
    datapath: PolicyDatapath = world.datapath.policy
    datapath.write_slot(7, MIXED)
    datapath.write_slot(2**32 - 1, rows_of(3))
    assert datapath.read_slot(7) == MIXED
    assert datapath.list_slots() == [7, 2**32 - 1]
    assert datapath.read_slot(8) == {}
    assert everything(world) == {7: MIXED, 2**32 - 1: rows_of(3)}
    assert world.datapath.policy.fill == (len(MIXED) + 3, CAPACITY)


def test_a_slot_that_somebody_emptied_can_be_written_again(world: KernelWorld) -> None:
    datapath = world.datapath
    datapath.policy.write_slot(7, MIXED)
    datapath.policy.write_slot(8, rows_of(CAPACITY - len(MIXED)))
    assert datapath.maps.pw_policy.delete_batch([pack_key(7, key) for key in MIXED]) == len(MIXED)
    assert datapath.policy.read_slot(7) == {}
    datapath.policy.change_slot(7, MIXED, ())
    assert everything(world)[7] == MIXED
    assert datapath.policy.fill == (CAPACITY, CAPACITY)


def test_slots_are_known_to_the_next_agent(world: KernelWorld) -> None:
    world.datapath.policy.write_slot(7, MIXED)
    world.datapath.policy.write_slot(8, rows_of(3))
    world.restart()
    assert world.datapath.policy.list_slots() == [7, 8]
    assert world.datapath.policy.read_slot(7) == MIXED
    assert world.datapath.policy.fill == (len(MIXED) + 3, CAPACITY)
    world.datapath.policy.remove_slots([7])
    assert everything(world) == {8: rows_of(3)}


def test_a_slot_that_was_half_written_is_made_exact(world: KernelWorld) -> None:
    world.datapath.policy.write_slot(7, rows_of(5))
    wanted = {**rows_of(2), PolicyKey(1, Direction.EGRESS): entry(9)}
    world.datapath.policy.write_slot(7, wanted)
    assert everything(world) == {7: wanted}
    assert world.datapath.policy.fill[0] == 3


def test_a_change_puts_replaces_and_removes(world: KernelWorld) -> None:
    before = rows_of(4)
    world.datapath.policy.write_slot(7, before)
    keys = list(before)
    put = {keys[0]: entry(77, Verdict.DENY), PolicyKey(5, Direction.EGRESS): entry(78)}
    world.datapath.policy.change_slot(7, put, [keys[2], keys[3], PolicyKey(6, Direction.EGRESS)])
    assert world.datapath.policy.read_slot(7) == {keys[1]: before[keys[1]], **put}
    assert world.datapath.policy.fill[0] == 3


def test_a_slot_without_entries_is_none(world: KernelWorld) -> None:
    world.datapath.policy.write_slot(7, {})
    assert world.datapath.policy.list_slots() == []
    rows = rows_of(2)
    world.datapath.policy.write_slot(7, rows)
    world.datapath.policy.change_slot(7, {}, rows)
    assert world.datapath.policy.list_slots() == []
    assert world.datapath.policy.fill[0] == 0


def test_what_is_both_put_and_removed_is_refused(world: KernelWorld) -> None:
    rows = rows_of(1)
    with pytest.raises(Bug):
        world.datapath.policy.change_slot(7, rows, rows)
    assert not dump(world)


@pytest.mark.parametrize(
    "key",
    [
        PolicyKey(1, Direction.EGRESS, 6, 81, 15),
        PolicyKey(1, Direction.EGRESS, 6, 80, 17),
        PolicyKey(1, Direction.EGRESS, 0, 80, 16),
        PolicyKey(1, Direction.EGRESS, 0, 0, 1),
    ],
    ids=["bits-beyond-the-prefix", "prefix-too-long", "port-of-every-protocol", "bits-of-it"],
)
def test_a_key_that_the_trie_would_take_for_another_is_refused(
    world: KernelWorld, key: PolicyKey
) -> None:
    with pytest.raises(Bug):
        world.datapath.policy.write_slot(7, {key: entry(1)})
    assert not dump(world)


# Overflow


def test_overflow_leaves_everything_as_it_was(world: KernelWorld) -> None:
    rows = rows_of(15)
    world.datapath.policy.write_slot(7, rows)
    before = dump(world)
    with pytest.raises(PolicyOverflow) as refusal:
        world.datapath.policy.write_slot(8, rows_of(6))
    assert "15 of 20" in refusal.value.message
    with pytest.raises(PolicyOverflow):
        world.datapath.policy.change_slot(7, rows_of(6, first=5000), rows)
    assert dump(world) == before
    assert world.datapath.policy.list_slots() == [7]
    assert world.datapath.policy.fill == (15, CAPACITY)


def test_the_last_row_fits_and_what_is_there_may_be_replaced(world: KernelWorld) -> None:
    world.datapath.policy.write_slot(7, rows_of(CAPACITY))
    replaced = {key: entry(500) for key in rows_of(CAPACITY)}
    world.datapath.policy.change_slot(7, replaced, [])
    assert everything(world) == {7: replaced}
    with pytest.raises(PolicyOverflow):
        world.datapath.policy.change_slot(7, {PolicyKey(1, Direction.EGRESS): entry(1)}, [])


def test_room_is_given_back_by_what_goes(world: KernelWorld) -> None:
    for slot in range(1, 30):
        world.datapath.policy.write_slot(slot, rows_of(CAPACITY // 2))
        world.datapath.policy.remove_slots([slot - 1])
    assert everything(world) == {29: rows_of(CAPACITY // 2)}


def test_the_capacity_follows_the_settings_without_a_restart(world: KernelWorld) -> None:
    world.datapath.policy.write_slot(7, rows_of(15))
    world.datapath.change_plan(replace(world.plan, policy_entries=10))
    with pytest.raises(PolicyOverflow):
        world.datapath.policy.change_slot(7, {PolicyKey(1, Direction.EGRESS): entry(1)}, [])
    world.datapath.policy.change_slot(7, {}, list(rows_of(15))[:3])
    world.datapath.change_plan(replace(world.plan, policy_entries=13))
    world.datapath.policy.change_slot(7, {PolicyKey(1, Direction.EGRESS): entry(1)}, [])
    assert world.datapath.policy.fill == (13, 13)


@pytest.fixture
def small_table() -> Iterator[PolicyTable]:
    """A table over maps that are smaller than what may be written."""
    with ExitStack() as stack:

        def create(name: str, key: int, value: int, rows: int) -> bpf.Map:
            made = bpf.create_map(
                bpf.MapType.LPM_TRIE,
                name,
                key_size=key,
                value_size=value,
                max_entries=rows,
                flags=bpf.CreateFlags.NO_PREALLOC,
            )
            return stack.enter_context(made)

        class Maps:
            pw_policy = create(
                "pw_policy", abi.POLICY_KEY_BYTES, abi.POLICY_VALUE_BYTES, CAPACITY + 1
            )
            pw_cidrs = create("pw_cidrs", abi.PREFIX_KEY_BYTES, 4, 6)

        yield PolicyTable(Maps(), 1000)  # type: ignore[arg-type]


def test_a_full_map_still_takes_replacements(small_table: PolicyTable) -> None:
    assert small_table.capacity == CAPACITY
    small_table.write_slot(7, rows_of(CAPACITY))
    replaced = {key: entry(500) for key in rows_of(CAPACITY)}
    small_table.change_slot(7, replaced, [])
    assert small_table.read_slot(7) == replaced


def test_a_write_that_the_kernel_refuses_is_put_right_by_doing_it_again(
    small_table: PolicyTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(10)
    real = bpf.Map.update_batch

    def stop_half_way(
        self: bpf.Map, batch: list[tuple[bytes, bytes]], flags: bpf.Update = bpf.Update.ANY
    ) -> None:
        real(self, batch[: len(batch) // 2], flags)
        raise KernelFailure(12, "write rows of", self.name)

    with monkeypatch.context() as patch:
        patch.setattr(bpf.Map, "update_batch", stop_half_way)
        with pytest.raises(KernelFailure):
            small_table.write_slot(7, rows)
    assert small_table.used >= len(small_table.read_slot(7)) == 5
    small_table.write_slot(7, rows)
    assert (small_table.used, small_table.read_slot(7)) == (10, rows)
    small_table.remove_slots([7])
    assert (small_table.used, small_table.read_slot(7)) == (0, {})


def test_a_row_that_is_gone_is_not_taken_for_a_shorter_one(small_table: PolicyTable) -> None:
    wide, narrow = PolicyKey(1, Direction.EGRESS), PolicyKey(1, Direction.EGRESS, 6, 80, 16)
    small_table.write_slot(7, {wide: entry(1), narrow: entry(2)})
    small_table._entries.delete(pack_key(7, narrow))  # behind the table's back
    assert small_table.read_slot(7) == {wide: entry(1)}


def test_random_changes_leave_exactly_what_was_asked_for(
    small_table: PolicyTable, request: pytest.FixtureRequest
) -> None:
    seed = request.config.getoption("--seed")
    chance = random.Random(seed)
    wanted: dict[int, PolicyRows] = {}
    pool = list(rows_of(12))
    for _ in range(500):
        slot = chance.randint(1, 4)
        put = {key: entry(chance.randint(1, 99)) for key in chance.sample(pool, 3)}
        remove = [key for key in chance.sample(pool, 4) if key not in put]
        present = wanted.get(slot, {})
        peak = sum(map(len, wanted.values())) + len(put.keys() - present.keys())
        if peak > CAPACITY:
            with pytest.raises(PolicyOverflow):
                small_table.change_slot(slot, put, remove)
            slot = chance.choice(list(wanted))
            small_table.remove_slots([slot])
            del wanted[slot]
        else:
            small_table.change_slot(slot, put, remove)
            rows = {key: one for key, one in present.items() if key not in remove}
            wanted[slot] = {**rows, **put}
        found = {number: small_table.read_slot(number) for number in small_table.list_slots()}
        assert found == wanted, f"seed {seed}"
        assert small_table.used == sum(map(len, wanted.values())), f"seed {seed}"


# The fence


def test_both_fences_return(small_table: PolicyTable) -> None:
    policy_maps.wait_by_update()
    policy_maps.wait_for_programs()


def test_without_a_barrier_the_update_of_a_map_of_maps_is_the_fence(
    small_table: PolicyTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = []
    monkeypatch.setattr(bpf, "membarrier_global", lambda: False)
    monkeypatch.setattr(policy_maps, "wait_by_update", lambda: waited.append(True))
    small_table.write_slot(7, rows_of(3))
    small_table.remove_slots([7])
    small_table.remove_slots([])  # a caller that only wants to wait
    assert waited == [True, True]
    assert small_table.list_slots() == []


# CIDRs


def networks(*texts: str) -> dict[IPNetwork, int]:
    return {ipaddress.ip_network(text): NET + number for number, text in enumerate(texts)}


def test_the_map_of_cidrs_holds_exactly_what_was_given(world: KernelWorld) -> None:
    for wanted in (
        networks("0.0.0.0/0", "10.0.0.0/8", "2001:db8::/32"),
        networks("10.0.0.0/8", "0.0.0.0/0"),
        networks("10.0.0.0/8", "0.0.0.0/0"),
        {},
    ):
        world.datapath.policy.write_cidrs(wanted)
        assert dict(read_cidrs(world.datapath.maps)) == wanted
    world.datapath.policy.write_cidrs(networks("10.0.0.0/8"))
    world.restart()
    world.datapath.policy.write_cidrs(networks("10.1.0.0/16"))
    assert dict(read_cidrs(world.datapath.maps)) == networks("10.1.0.0/16")


def find_cidr(world: KernelWorld, address: str) -> int:
    key = tables.to_prefix_key(ipaddress.ip_network(address))
    raw = world.datapath.maps.pw_cidrs.lookup(key)
    return int.from_bytes(raw or bytes(4), "little")


@pytest.mark.parametrize("wide", ["::/0", "::/80", "::/96"])
def test_no_ipv6_prefix_covers_ipv4(world: KernelWorld, wide: str) -> None:
    world.datapath.policy.write_cidrs(networks("2001:db8::/32", wide))
    assert find_cidr(world, "198.51.100.7") == 0
    assert dict(read_cidrs(world.datapath.maps)) == networks("2001:db8::/32", wide)
    world.datapath.policy.write_cidrs(networks(wide, "0.0.0.0/0"))
    assert find_cidr(world, "198.51.100.7") == NET + 1


@pytest.mark.parametrize("mapped", ["::ffff:0:0/96", "::ffff:a00:0/104", "::ffff:a00:1/128"])
def test_an_ipv6_prefix_of_mapped_addresses_matches_nothing(
    world: KernelWorld, mapped: str
) -> None:
    """No packet on a wire carries such an address; in the map it would be an IPv4 one."""
    world.datapath.policy.write_cidrs(networks("2001:db8::/32", mapped))
    assert find_cidr(world, "10.0.0.1") == 0


def test_too_many_cidrs_change_nothing(small_table: PolicyTable) -> None:
    first = networks("10.0.0.0/8", "10.1.0.0/16", "10.2.0.0/16")
    small_table.write_cidrs(first)
    with pytest.raises(PolicyOverflow):
        small_table.write_cidrs(networks(*(f"192.0.2.{number}/32" for number in range(3))))
    small_table.write_cidrs({**first, **networks("10.3.0.0/16", "10.4.0.0/16")})
    with pytest.raises(PolicyOverflow):
        small_table.write_cidrs({**first, **networks("10.5.0.0/16")})


# Rows of endpoints, and what people see

FULL = EndpointConfig(
    identity=70000,
    slot=9,
    policy_revision=12,
    deny_egress=True,
    deny_ingress=True,
    default_rule_egress=31,
    default_rule_ingress=32,
    cidr_egress=True,
    cidr_ingress=True,
    audit=True,
    trace=True,
)


def test_rows_of_live_endpoints_are_turned_over_whole(world: KernelWorld) -> None:
    first, _ = world.attach(30)
    second, second_pod = world.attach(31)
    world.datapath.policy.update_endpoints([(first, FULL), (second, FULL)])
    assert world.datapath.compare_endpoint(second, FULL, second_pod.pod) == []
    row = tables.read_config(world.datapath.maps, first.device.host_ifindex)
    assert row is not None
    assert (row.identity, row.slot, row.policy_revision) == (70000, 9, 12)
    assert (row.default_rule_egress, row.default_rule_ingress) == (31, 32)
    assert row.flags == abi.ConfigFlags(0x1FF) & ~abi.ConfigFlags.SHAPED
    world.detach(first)
    with pytest.raises(KernelFailure):
        world.datapath.policy.update_endpoints([(first, FULL)])  # what is gone is not made anew
    assert tables.read_config(world.datapath.maps, first.device.host_ifindex) is None
    world.detach(second)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"slot": 8}, "slot is 9, should be 8"),
        ({"policy_revision": 13}, "policy_revision is 12, should be 13"),
        ({"default_rule_egress": 33}, "default_rule_egress is 31, should be 33"),
        ({"default_rule_ingress": 33}, "default_rule_ingress is 32, should be 33"),
        ({"cidr_egress": False}, "cidr-egress"),
        ({"cidr_ingress": False}, "cidr-ingress"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_row_whose_policy_differs_is_named(
    world: KernelWorld, changes: dict[str, object], named: str
) -> None:
    record, _ = world.attach(32)
    try:
        world.datapath.policy.update_endpoints([(record, FULL)])
        wanted = msgspec.structs.replace(FULL, **changes)
        [difference] = tables.compare_rows(world.datapath.maps, record, wanted)
        assert named in difference
    finally:
        world.detach(record)


def test_people_see_entries_cidrs_and_flags_by_name(world: KernelWorld) -> None:
    record, _ = world.attach(33)
    world.datapath.policy.write_slot(9, MIXED)
    world.datapath.policy.write_cidrs(networks("::/0"))
    world.datapath.policy.update_endpoints([(record, FULL)])
    maps = world.datapath.maps
    rows, truncated = read_rows(maps, "policy", 100)
    assert not truncated
    assert {
        "slot": 9,
        "identity": 2,
        "direction": "ingress",
        "protocol": "tcp",
        "port": "32768/1",
        "verdict": "allow",
        "precedence": 100,
        "rule": 4,
    } in rows
    assert [row["protocol"] for row in rows if row["rule"] == 1] == ["any"]
    assert read_rows(maps, "cidrs", 100)[0] == [{"prefix": "::/0", "identity": NET}]
    shown = [row for row in read_rows(maps, "endpoint", 100)[0] if row["slot"] == 9]
    assert {row["address"] for row in shown} == {record.ipv4, record.ipv6}
    assert shown[0]["flags"][:3] == ["open", "deny-egress", "deny-ingress"]
    assert (shown[0]["default_rule_egress"], shown[0]["policy_revision"]) == (31, 12)
    fill = {
        row["name"]: (row["entries"], row["max_entries"]) for row in world.datapath.describe_maps()
    }
    assert fill["policy"] == (len(MIXED), CAPACITY)
    counted = {row["name"]: row["entries"] for row in describe_maps(maps)}
    assert counted["policy"] == len(MIXED)
    world.datapath.policy.update_endpoints([(record, OPEN)])
    world.detach(record)


def test_hits_are_summed_shown_and_forgotten(world: KernelWorld) -> None:
    maps = world.datapath.maps
    counters = [abi.Counter(2, 100).pack()] * bpf.possible_cpus()
    for rule in (5, 6):
        maps.pw_hits.update(rule.to_bytes(4, "little"), b"".join(counters))
    cpus = bpf.possible_cpus()
    assert read_hits(world.datapath.maps) == {5: (2 * cpus, 100 * cpus), 6: (2 * cpus, 100 * cpus)}
    assert read_rows(maps, "hits", 1) == (
        [{"rule": 5, "packets": 2 * cpus, "bytes": 100 * cpus}],
        True,
    )
    world.datapath.policy.forget_hits([6, 7])
    assert set(read_hits(world.datapath.maps)) == {6}


def test_writing_one_slot_reads_no_other(world: KernelWorld) -> None:
    """Work in proportion to what changes: the map is walked once, when the node is prepared."""
    world.datapath.policy.write_slot(7, rows_of(10))

    def refuse(walked: bpf.Map, *_: object) -> None:
        raise AssertionError(f"{walked.name} is walked")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpf.Map, "items", refuse)
        patch.setattr(bpf.Map, "keys", refuse)
        world.datapath.policy.write_slot(8, rows_of(3))
        world.datapath.policy.change_slot(8, rows_of(3, first=2000), rows_of(3))
        world.datapath.policy.remove_slots([7])
        assert world.datapath.policy.read_slot(8) == rows_of(3, first=2000)
