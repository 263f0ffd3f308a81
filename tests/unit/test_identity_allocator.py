"""Numbers of keys: made once, the same for everybody, kept; and never two keys of one number."""

import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwire.control.identity import allocator
from podwire.control.identity.allocator import (
    SILENCE_S,
    IdentitiesExhausted,
    IdentityAllocator,
)
from podwire.control.identity.key import IdentityKey, NumberSpace
from podwire.control.identity.known import (
    RESTING_SINCE,
    UNUSED_SINCE,
    IdentityChange,
    KnownIdentities,
    decode,
    make_object,
    object_key,
)
from podwire.model.errors import NotFound, Unavailable
from podwire.model.identity import IdentityFacts, NamedPort
from podwire.model.store import StoredObject
from podwire.store.sqlite import SqliteStore
from tests.fakes.store import MemoryStore

MARK = "2026-01-01T00:00:00Z"
WEB = IdentityKey(("cni:app=web", "k8s:io.kubernetes.pod.namespace=default"))
DB = IdentityKey(("cni:app=db", "k8s:io.kubernetes.pod.namespace=default"))


class Agent:
    """One agent's allocator, with a watch that is read by hand and time that moves by hand."""

    def __init__(self, store: MemoryStore, space: NumberSpace | None = None) -> None:
        self.store = store
        self.now_s = 1_000.0
        self.known = KnownIdentities()
        self.changes: list[IdentityChange] = []
        self.known.listen(self.changes.append)
        self.allocator = IdentityAllocator(
            store, self.known, space or NumberSpace(), clock=lambda: self.now_s
        )

    def relist(self) -> None:
        objects, revision = self.store.list("identities")
        self.known.replace(objects, revision)
        self.allocator.heard()

    def number(self, key: IdentityKey) -> int:
        return self.allocator.allocate(key)

    def let_go(self) -> None:
        """Use nothing any more: neither by endpoints nor by what was given a moment ago."""
        self.now_s += 3_600
        self.allocator.set_held(())
        self.allocator.heard()


def agent(store: MemoryStore, space: NumberSpace | None = None) -> Agent:
    made = Agent(store, space)
    made.relist()
    return made


def annotate(store: MemoryStore, number: int, *names: str) -> None:
    stored = store.get(object_key(number))
    assert stored is not None
    store.patch(stored.key, {"metadata": {"annotations": dict.fromkeys(names, MARK)}})


def meaning(store: MemoryStore, number: int) -> IdentityKey | None:
    stored = store.get(object_key(number))
    known = decode(stored) if stored else None
    return known.key if known else None


def is_clean(store: MemoryStore, number: int) -> bool:
    stored = store.get(object_key(number))
    return stored is not None and not stored.document["metadata"].get("annotations")


def together(works: Iterable[Callable[[], object]]) -> None:
    """Do things at the same moment on threads of their own; raises what one of them raised."""
    jobs = list(works)
    barrier = threading.Barrier(len(jobs))
    failures: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        barrier.wait()
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures


def test_a_new_key_gets_its_first_candidate() -> None:
    store = MemoryStore()
    number = agent(store).number(WEB)
    assert number == next(NumberSpace().candidates(WEB))
    assert 65536 <= number < 1 << 24
    assert meaning(store, number) == WEB


def test_a_known_key_needs_no_call() -> None:
    store = MemoryStore()
    one = agent(store)
    number = one.number(WEB)
    store.calls.clear()
    assert one.number(WEB) == one.allocator.find(WEB) == number
    assert store.calls == []


def test_named_ports_are_part_of_the_key() -> None:
    one = agent(MemoryStore())
    with_port = IdentityKey(WEB.labels, (NamedPort("http", 6, 80),))
    assert one.number(WEB) != one.number(with_port)


def test_two_agents_give_one_key_one_number() -> None:
    store = MemoryStore()
    first, second = agent(store), agent(store)
    assert first.number(WEB) == second.number(WEB)
    assert second.allocator.counts.adopted == 1


def test_a_key_that_was_listed_needs_no_call() -> None:
    store = MemoryStore()
    number = agent(store).number(WEB)
    late = agent(store)
    store.away = True
    assert late.allocator.find(WEB) == number


def _append_number(got: list[int], one: Agent) -> None:
    got.append(one.number(WEB))


def test_racing_agents_give_one_key_one_number() -> None:
    store = MemoryStore()
    agents = [agent(store) for _ in range(8)]
    got: list[int] = []
    together([partial(_append_number, got, one) for one in agents])
    assert len(got) == 8
    assert len(set(got)) == 1
    assert len(store.list("identities")[0]) == 1


def test_racing_keys_of_one_candidate_get_two_numbers() -> None:
    store = MemoryStore()
    space = NumberSpace(70_000, 2)
    one, other = agent(store, space), agent(store, space)
    got: dict[IdentityKey, int] = {}
    rivals = same_candidate(space)

    together(
        [
            lambda: got.__setitem__(rivals[0], one.number(rivals[0])),
            lambda: got.__setitem__(rivals[1], other.number(rivals[1])),
        ]
    )
    assert sorted(got.values()) == [70_000, 70_001]
    assert all(meaning(store, number) == key for key, number in got.items())


def same_candidate(space: NumberSpace) -> list[IdentityKey]:
    """Find two keys whose first candidates are the same."""
    keys = [IdentityKey((f"cni:app={index}",)) for index in range(100)]
    first = next(space.candidates(keys[0]))
    return [key for key in keys if next(space.candidates(key)) == first][:2]


def test_threads_of_one_agent_ask_once_for_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    # A machine that stands still while one asks would have the others give up.
    monkeypatch.setattr(allocator, "OTHER_S", 60.0)
    store = MemoryStore()
    one = agent(store)
    store.calls.clear()
    second = threading.Event()

    def wait_for_another(_new: StoredObject) -> None:
        if store.calls.count("create") > 1:
            second.set()
        second.wait(0.2)

    store.before_create = wait_for_another
    together([lambda: one.number(WEB)] * 8)
    assert store.calls.count("create") == 1


def test_a_list_older_than_an_own_write_does_not_undo_it() -> None:
    store = MemoryStore()
    one = agent(store)
    objects, revision = store.list("identities")
    number = one.number(WEB)
    one.let_go()
    one.known.replace(objects, revision)
    assert [facts.number for facts in one.known.facts()] == [number]


def test_a_number_made_by_an_agent_that_died_is_adopted() -> None:
    store = MemoryStore()
    dying = agent(store)

    class Death(BaseException):
        pass

    def die(change: IdentityChange) -> None:
        if change.added:
            raise Death  # the store has it, nobody was told

    dying.known.listen(die)
    with pytest.raises(Death):
        dying.number(WEB)
    [made] = store.list("identities")[0]
    assert agent(store).number(WEB) == int(made.key.name)


def test_store_away_known_keys_resolve_and_new_ones_fail() -> None:
    store = MemoryStore()
    one = agent(store)
    number = one.number(WEB)
    store.away = True
    assert one.number(WEB) == number
    with pytest.raises(Unavailable):
        one.number(DB)
    store.away = False
    assert one.number(DB) != number


def test_a_marked_number_is_used_only_without_its_mark() -> None:
    store = MemoryStore()
    number = agent(store).number(WEB)
    annotate(store, number, UNUSED_SINCE)
    late = agent(store)
    assert late.allocator.find(WEB) is None
    assert late.number(WEB) == number
    assert is_clean(store, number)


def test_store_away_a_marked_number_is_not_used() -> None:
    store = MemoryStore()
    number = agent(store).number(WEB)
    annotate(store, number, UNUSED_SINCE)
    late = agent(store)
    store.away = True
    with pytest.raises(Unavailable):
        late.number(WEB)


def test_a_mark_that_is_set_while_it_is_taken_away_is_taken_away_again() -> None:
    store = MemoryStore()
    number = agent(store).number(WEB)
    annotate(store, number, UNUSED_SINCE)
    late = agent(store)

    def interfere(_new: StoredObject) -> None:
        store.before_update = lambda _new: None
        annotate(store, number, UNUSED_SINCE, "example.org/other")

    store.before_update = interfere
    assert late.number(WEB) == number
    known = late.known.get(number)
    assert known is not None
    assert not known.is_marked


def test_a_marked_number_that_is_deleted_at_the_last_moment_is_made_again() -> None:
    store = MemoryStore()
    number = agent(store).number(WEB)
    annotate(store, number, UNUSED_SINCE)
    late = agent(store)

    def delete(_new: StoredObject) -> None:
        store.before_update = lambda _new: None
        store.delete(object_key(number))

    store.before_update = delete
    assert late.number(WEB) == number
    assert is_clean(store, number)


def test_a_resting_number_serves_its_own_key_and_no_other() -> None:
    store = MemoryStore()
    space = NumberSpace(70_000, 2)
    own, rival = same_candidate(space)
    number = agent(store, space).number(own)
    annotate(store, number, UNUSED_SINCE, RESTING_SINCE)
    late = agent(store, space)
    assert late.known.facts() == []
    assert late.number(rival) != number
    assert late.number(own) == number
    assert is_clean(store, number)
    assert [fact.number for fact in late.known.facts()] == [70_000, 70_001]


def test_exhaustion_has_an_error_of_its_own_and_is_counted() -> None:
    space = NumberSpace(70_000, 4)
    one = agent(MemoryStore(), space)
    keys = [IdentityKey((f"cni:app={index}",)) for index in range(5)]
    numbers = {one.number(key) for key in keys[:4]}
    assert numbers == {70_000, 70_001, 70_002, 70_003}
    with pytest.raises(IdentitiesExhausted, match="cni:app=4"):
        one.number(keys[4])
    assert one.allocator.counts.exhausted == 1
    assert one.allocator.counts.collisions >= 4


def test_a_silent_watch_leaves_only_numbers_in_use() -> None:
    store = MemoryStore()
    one = agent(store)
    web, db = one.number(WEB), one.number(DB)
    one.let_go()
    one.allocator.set_held([web])
    one.now_s += SILENCE_S + 1
    store.away = True
    assert one.allocator.find(WEB) == web
    assert one.allocator.find(DB) is None
    store.away = False
    assert one.number(DB) == db


def test_a_restarted_agent_keeps_its_numbers_without_the_store() -> None:
    store = MemoryStore()
    number = agent(store).number(WEB)
    store.away = True
    restarted = Agent(store)
    restarted.allocator.adopt(number, WEB)
    assert restarted.number(WEB) == number
    assert [fact.number for fact in restarted.known.facts()] == [number]


def test_a_number_in_use_that_is_missing_is_made_again_under_the_same_number() -> None:
    store = MemoryStore()
    restarted = Agent(store)
    restarted.allocator.adopt(123_456, WEB)  # not a candidate of the key: only this number will do
    restarted.relist()
    restarted.allocator.reassert()
    assert meaning(store, 123_456) == WEB
    assert restarted.allocator.counts.remade == 1
    assert agent(store).number(WEB) == 123_456


def test_a_number_in_use_loses_its_mark() -> None:
    store = MemoryStore()
    one = agent(store)
    number = one.number(WEB)
    annotate(store, number, UNUSED_SINCE)
    one.relist()
    one.allocator.reassert()
    assert is_clean(store, number)


def test_a_number_that_means_another_key_by_now_is_reported() -> None:
    store = MemoryStore()
    one = agent(store)
    number = one.number(WEB)
    store.delete(object_key(number))
    store.create(make_object(number, DB))
    one.relist()
    assert one.changes[-1].reassigned == (number,)
    assert one.changes[-1].added == (DB.facts(number),)
    assert one.number(WEB) != number


def test_a_deleted_number_is_forgotten_unless_it_is_in_use() -> None:
    store = MemoryStore()
    one = agent(store)
    web, db = one.number(WEB), one.number(DB)
    one.let_go()
    one.allocator.set_held([web])
    for number in (web, db):
        store.delete(object_key(number))
    for event in store.events:
        one.known.apply(event)
    assert [facts.number for facts in one.known.facts()] == [web]
    assert one.changes[-1].removed == (db,)


def test_old_news_changes_nothing() -> None:
    store = MemoryStore()
    one = agent(store)
    number = one.number(WEB)
    one.let_go()
    store.delete(object_key(number))
    assert one.allocator._claim(number, WEB)
    for event in store.events[:2]:
        one.known.apply(event)
    known = one.known.get(number)
    assert known is not None
    assert known.revision == store.events[-1].revision


def test_another_store_under_the_same_name_is_believed() -> None:
    old = MemoryStore()
    one = agent(old)
    web, db = one.number(WEB), one.number(DB)
    one.let_go()
    one.allocator.set_held([web])
    one.relist()
    one.allocator.store = one.store = MemoryStore()
    fresh = IdentityKey(("cni:app=fresh",))
    number = agent(one.store).number(fresh)
    one.relist()
    one.allocator.reassert()
    assert {facts.number for facts in one.known.facts()} == {web, number}
    assert meaning(one.store, web) == WEB
    assert meaning(one.store, db) is None


def test_a_fixed_number_serves_its_key() -> None:
    store = MemoryStore()
    one = agent(store)
    assert one.allocator._claim(300, WEB)
    assert not one.allocator._claim(300, DB)
    assert one.number(WEB) == 300
    assert agent(store).number(WEB) == 300


def test_the_lower_of_two_numbers_serves_new_pods() -> None:
    store = MemoryStore()
    for number in (90_000, 80_000):
        store.create(make_object(number, WEB))
    assert agent(store).number(WEB) == 80_000


def test_what_nobody_understands_keeps_its_number() -> None:
    store = MemoryStore()
    first = next(NumberSpace().candidates(WEB))
    store.create(StoredObject(key=object_key(first), document={"spec": {"labels": 7}}))
    number = agent(store).number(WEB)
    assert number != first


def test_jitter_is_waited_only_for_new_keys() -> None:
    store = MemoryStore()
    one = agent(store)
    waits: list[float] = []
    one.allocator.jitter_s, one.allocator.sleep = 0.2, waits.append
    one.number(WEB)
    one.number(WEB)
    [wait_s] = waits
    assert 0 <= wait_s <= 0.2


def test_processes_racing_on_one_file_give_one_key_one_number(tmp_path: Path) -> None:
    """Allocators with a store of their own each, many keys in a small space, all at once."""
    space = NumberSpace(70_000, 48)
    stores = [SqliteStore(tmp_path / "store.db") for _ in range(4)]
    keys = [IdentityKey((f"cni:app={index}",)) for index in range(24)]
    got: list[tuple[IdentityKey, int]] = []

    def allocate_all(store: SqliteStore, order: list[IdentityKey]) -> None:
        allocator = IdentityAllocator(store, KnownIdentities(), space)
        got.extend((key, allocator.allocate(key)) for key in order)

    try:
        orders = [keys, keys[::-1], keys[12:] + keys[:12], keys[::2] + keys[1::2]]
        together([partial(allocate_all, *pair) for pair in zip(stores, orders, strict=True)])
    finally:
        for store in stores:
            store.close()
    numbers = dict(got)
    assert len(got) == 4 * len(keys)
    assert set(got) == set(numbers.items())
    assert len(set(numbers.values())) == len(keys)


KEYS = [IdentityKey((f"cni:app={index}",)) for index in range(6)]
STEPS = st.one_of(
    st.tuples(st.just("allocate"), st.integers(0, 2), st.integers(0, 5)),
    st.tuples(st.sampled_from(["relist", "let go", "reassert"]), st.integers(0, 2), st.just(0)),
    st.tuples(st.sampled_from(["mark", "rest", "delete"]), st.just(0), st.integers(0, 7)),
)


@given(st.lists(STEPS, max_size=40))
def test_no_number_ever_means_two_keys(steps: list[tuple[str, int, int]]) -> None:
    """Whatever agents do in any order, with lists as old as it comes; only what rests long enough may be deleted, and
    then no agent uses it."""
    store, space = MemoryStore(), NumberSpace(70_000, 8)
    agents = [agent(store, space) for _ in range(3)]
    for what, who, which in steps:
        one, number = agents[who], 70_000 + which
        if what == "allocate":
            allocate(one, KEYS[which])
        elif what == "relist":
            one.relist()
        elif what == "let go":
            one.let_go()
        elif what == "reassert":
            one.allocator.reassert()
        else:
            collect(store, agents, what, number)
        check_meanings(store, agents)


def allocate(one: Agent, key: IdentityKey) -> None:
    try:
        number = one.number(key)
    except IdentitiesExhausted:
        return
    known = one.known.get(number)
    assert known is not None
    assert known.key == key


def collect(store: MemoryStore, agents: list[Agent], what: str, number: int) -> None:
    """Do what the collector may: nothing to a number that an agent uses, and each stage after the one before."""
    if any(number in agent.known.in_use for agent in agents):
        return
    try:
        if what == "mark":
            annotate(store, number, UNUSED_SINCE)
        elif what == "rest":
            annotate(store, number, UNUSED_SINCE, RESTING_SINCE)
        else:
            store.delete(object_key(number))
            for one in agents:
                one.relist()  # it rested for a day: everybody has heard of it, or is silent for too long
    except (NotFound, AssertionError):
        return


def check_meanings(store: MemoryStore, agents: list[Agent]) -> None:
    meanings: dict[int, IdentityKey] = {}
    for agent in agents:
        for number in agent.known.in_use:
            known = agent.known.get(number)
            assert known is not None
            assert meanings.setdefault(number, known.key) == known.key
    for stored in store.list("identities")[0]:
        known = decode(stored)
        assert known is not None
        assert meanings.setdefault(known.number, known.key) == known.key


FEED_STEPS = st.one_of(
    st.tuples(st.sampled_from(["make", "mark", "delete", "claim"]), st.integers(0, 3)),
    st.tuples(st.sampled_from(["relist", "hear", "let go"]), st.integers(0, 3)),
)


@given(st.lists(FEED_STEPS, max_size=40))
def test_after_the_last_news_an_agent_knows_what_the_store_has(
    steps: list[tuple[str, int]],
) -> None:
    """Own writes, lists and changes that come late, in any order: what is known in the end is what is so."""
    store, heard = MemoryStore(), 0
    one = agent(store)
    told: dict[int, IdentityKey] = {}
    one.known.listen(partial(_follow, told))
    for what, which in steps:
        number, key = 70_000 + which, KEYS[which]
        if what == "relist":
            one.relist()
            heard = len(store.events)
        elif what == "hear":
            news = store.events[heard : heard + which + 1]
            heard += len(news)
            for event in news:
                one.known.apply(event)
        elif what == "let go":
            one.let_go()
        elif what == "claim":
            one.allocator._claim(number, key)
        else:
            _change(store, what, number, key)
        assert told == {facts.number: _key_of(facts) for facts in one.known.facts()}
    for event in store.events[heard:]:
        one.known.apply(event)
    there = {int(stored.key.name): decode(stored) for stored in store.list("identities")[0]}
    assert {number: one.known.get(number) for number in there} == there
    assert {facts.number for facts in one.known.facts()} == set(there)


def _change(store: MemoryStore, what: str, number: int, key: IdentityKey) -> None:
    """Do what another agent may do, if it can be done now."""
    exists = store.get(object_key(number)) is not None
    if what == "make" and not exists:
        store.create(make_object(number, key))
    elif what == "mark" and exists:
        annotate(store, number, UNUSED_SINCE)
    elif what == "delete" and exists:
        store.delete(object_key(number))


def _follow(told: dict[int, IdentityKey], change: IdentityChange) -> None:
    for facts in change.added:
        told[facts.number] = _key_of(facts)
    for number in change.removed:
        del told[number]


def _key_of(facts: IdentityFacts) -> IdentityKey:
    return IdentityKey(facts.labels, facts.named_ports)
