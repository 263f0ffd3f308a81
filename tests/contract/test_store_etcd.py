"""What the store in etcd makes of what others wrote there, and of what is too large or written together."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from podwire.control.documents.apply import apply_documents
from podwire.model.errors import (
    Conflict,
    InvalidRequest,
    NewerData,
    NotFound,
    PodwireError,
    StorageFailure,
    Unavailable,
)
from podwire.model.store import ObjectKey, StoredObject
from podwire.store.etcd.store import EtcdStore
from podwire.store.open import open_store
from tests.contract.etcd_rig import Etcd, started
from tests.contract.stores import DEADLINE_S, key, make, now_at, until

FORMAT_KEY = "/podwire/v1/format"
OBJECT_KEY = "/podwire/v1/objects/networkpolicies/default/{}"

# ------------------------------------------------------------------ what others wrote


def test_a_newer_format_is_refused_and_left_alone(own_etcd: Etcd) -> None:
    own_etcd.put(FORMAT_KEY, b"2")
    revision = own_etcd.put("/x", b"")
    with pytest.raises(NewerData, match=f"{own_etcd.endpoint}: its format is 2, .* knows up to 1"):
        open_store(f"etcd://{own_etcd.endpoint}")
    assert own_etcd.put("/x", b"") == revision + 1


def test_a_format_that_grows_while_it_is_away_is_noticed(
    own_etcd: Etcd, etcd_store: EtcdStore
) -> None:
    etcd_store.create(make("a"))
    own_etcd.put(FORMAT_KEY, b"2")
    own_etcd.kill()
    with pytest.raises(Unavailable):
        etcd_store.get(key("a"))
    own_etcd.start()
    with pytest.raises(NewerData):
        etcd_store.create(make("b"))


@pytest.mark.parametrize("found", [b"", b"x", b"{}"], ids=["empty", "text", "object"])
def test_a_foreign_format_is_refused(own_etcd: Etcd, found: bytes) -> None:
    own_etcd.put(FORMAT_KEY, found)
    with pytest.raises(StorageFailure, match="no number") as caught:
        open_store(f"etcd://{own_etcd.endpoint}")
    assert own_etcd.endpoint in caught.value.message
    assert own_etcd.read(FORMAT_KEY) == found


def test_a_lease_whose_key_somebody_deleted_is_there_again(
    own_etcd: Etcd, etcd_store: EtcdStore
) -> None:
    with closing(etcd_store.leases().acquire("node/a", "me", 2)) as lease:
        own_etcd.wipe()  # whose answer says that the key is gone; it may be there again at once
        until(lambda: etcd_store.leases().holders("node/") == {"node/a": "me"})
        until(lambda: not lease.lost)
    assert etcd_store.leases().holders("node/") == {}


def test_a_lease_that_is_closed_while_it_is_claimed_anew_is_given_up(
    own_etcd: Etcd, etcd_store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, written, goes_on = etcd_store._cluster, threading.Event(), threading.Event()
    transact = cluster.transact

    async def transact_slowly(*requests: Any) -> Any:
        answer = await transact(*requests)
        written.set()
        goes_on.wait(DEADLINE_S)
        return answer

    lease = etcd_store.leases().acquire("node/a", "me", 2)
    monkeypatch.setattr(cluster, "transact", transact_slowly)
    own_etcd.ask("lease/revoke", {"ID": lease._number})
    assert written.wait(DEADLINE_S)
    with ThreadPoolExecutor(1) as threads:
        closing_it = threads.submit(lease.close)
        time.sleep(0.2)
        goes_on.set()
        closing_it.result(DEADLINE_S)
    assert etcd_store.leases().holders("node/") == {}
    assert lease.lost


def test_a_lease_whose_key_somebody_else_took_meanwhile_is_lost(
    own_etcd: Etcd, etcd_store: EtcdStore
) -> None:
    with closing(etcd_store.leases().acquire("node/a", "me", 2)) as lease:
        own_etcd.put("/podwire/v1/leases/node/a", b"you")
        until(lambda: lease.lost)
        assert lease.taken_by == "you"
    assert etcd_store.leases().holders("node/") == {"node/a": "you"}


def test_nothing_is_made_where_nothing_is_wanted(own_etcd: Etcd) -> None:
    with pytest.raises(StorageFailure, match="holds nothing of podwire"):
        open_store(f"etcd://{own_etcd.endpoint}", create=False)
    assert own_etcd.read(FORMAT_KEY) is None


def test_ten_megabytes_are_refused(etcd_store: EtcdStore) -> None:
    with pytest.raises(InvalidRequest, match="at most 1048576"):
        etcd_store.create(make("a", "x" * 10_000_000))
    assert etcd_store.create(make("b", "x" * 1_000_000)).revision


def test_a_full_etcd_says_so_and_can_still_be_read(tmp_path: Path) -> None:
    def fill(store: EtcdStore) -> None:
        for number in range(100):
            store.create(make(f"b{number}", "x" * 1_000_000))

    with (
        started(tmp_path, ["--quota-backend-bytes", "3000000"]) as etcd,
        closing(EtcdStore([etcd.endpoint])) as store,
    ):
        made = store.create(make("a"))
        with pytest.raises(StorageFailure, match="database space exceeded") as caught:
            fill(store)
        assert "etcdctl alarm disarm" in caught.value.hint
        assert store.get(made.key) == made
        assert store.delete(made.key) == made, "room can be made"


@pytest.mark.parametrize(
    ("flag", "value"), [("--max-request-bytes", "1000"), ("--max-txn-ops", "10")]
)
def test_an_etcd_of_smaller_limits_is_named(tmp_path: Path, flag: str, value: str) -> None:
    def write(store: EtcdStore) -> None:
        with store.together():
            for number in range(20):
                store.create(make(f"a{number}", "x" * 100))

    with (
        started(tmp_path, [flag, value]) as etcd,
        closing(EtcdStore([etcd.endpoint])) as store,
        pytest.raises(InvalidRequest, match=etcd.endpoint) as caught,
    ):
        write(store)
    assert flag in caught.value.hint


# ------------------------------------------------------------------ together


def test_what_is_together_has_one_revision_which_its_makers_get(etcd_store: EtcdStore) -> None:
    old = etcd_store.create(make("old"))
    gone = etcd_store.create(make("gone"))
    with etcd_store.together():
        made = etcd_store.create(make("a"))
        changed = etcd_store.update(make("old", 1, revision=old.revision))
        etcd_store.delete(gone.key)
        assert etcd_store.get(made.key) is None, "others see nothing of it yet"
    assert made.revision == changed.revision == now_at(etcd_store)
    assert etcd_store.list("networkpolicies")[0] == [made, changed]


def test_what_is_overtaken_is_not_done_at_all(own_etcd: Etcd, etcd_store: EtcdStore) -> None:
    old = etcd_store.create(make("old"))

    def write() -> None:
        with etcd_store.together():
            etcd_store.create(make("a"))
            etcd_store.update(make("old", 1, revision=old.revision))
            with ThreadPoolExecutor(1) as threads:
                threads.submit(etcd_store.update, make("old", 2, revision=old.revision)).result()

    with pytest.raises(Conflict, match="update networkpolicies default/old"):
        write()
    assert [stored.key.name for stored in etcd_store.list("networkpolicies")[0]] == ["old"]


def test_a_block_that_raises_writes_nothing(etcd_store: EtcdStore) -> None:
    before = now_at(etcd_store)

    def write() -> None:
        with etcd_store.together():
            etcd_store.create(make("a"))
            etcd_store.delete(key("b"))

    with pytest.raises(NotFound):
        write()
    assert now_at(etcd_store) == before
    assert etcd_store.create(make("a")).revision > before, "and is over"


def test_an_object_is_written_once_together(etcd_store: EtcdStore) -> None:
    def write() -> None:
        with etcd_store.together():
            etcd_store.create(make("a"))
            etcd_store.create(make("a"))

    with pytest.raises(PodwireError, match="twice together"):
        write()
    assert etcd_store.get(key("a")) is None


def test_apply_begins_again_when_somebody_is_faster(etcd_store: EtcdStore) -> None:
    """The other writes between what apply reads and what it commits."""
    document = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "a"}}
    other: list[StoredObject] = []
    read = etcd_store.get

    def get(key: ObjectKey) -> StoredObject | None:
        found = read(key)
        if not other:
            made = StoredObject(key=key, document={**document, "spec": {}})
            with ThreadPoolExecutor(1) as threads:
                other.append(threads.submit(etcd_store.create, made).result())
        return found

    etcd_store.get = get  # type: ignore[method-assign]
    [done] = apply_documents(etcd_store, [document])
    assert done.before == other[0]
    assert done.after == read(other[0].key)
    assert done.revision == now_at(etcd_store)
