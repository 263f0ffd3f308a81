"""The sqlite store's file: whose it is, what is wrong with it, how long it remembers, and what wakes its watches."""

import contextlib
import gc
import os
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from podwire.kernel.inotify import FileWaker
from podwire.model.errors import (
    Conflict,
    InvalidConfiguration,
    KernelFailure,
    NewerData,
    NotFound,
    StorageFailure,
    Unavailable,
)
from podwire.model.store import Compacted, ObjectKey, StoredObject
from podwire.store.open import open_store
from podwire.store.sqlite import SqliteStore
from podwire.store.sqlite_file import STEPS
from podwire.store.sqlite_watch import ThreadWaker
from tests.fakes.store import since


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    with contextlib.closing(SqliteStore(path)) as opened:
        yield opened


def make(name: str, value: object = 0, revision: int = 0) -> StoredObject:
    key = ObjectKey("workloads", "", name)
    return StoredObject(key=key, revision=revision, document={"v": value})


def run_sql(path: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


# ------------------------------------------------------------------ whose file it is


def test_only_its_owner_can_read_it(path: Path) -> None:
    before = os.umask(0)
    try:
        with contextlib.closing(SqliteStore(path)) as store:
            store.create(make("a"))
            modes = {one.name: stat.S_IMODE(one.stat().st_mode) for one in path.parent.iterdir()}
    finally:
        os.umask(before)
    assert set(modes) == {"store.db", "store.db-wal", "store.db-shm", "store.db.rev"}
    assert set(modes.values()) == {0o600}


def test_a_file_that_others_could_read_is_closed_to_them(path: Path) -> None:
    path.touch(0o644)
    path.chmod(0o644)
    SqliteStore(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_write_is_on_disk_when_it_returns(store: SqliteStore) -> None:
    found = {
        connection.execute("PRAGMA synchronous").fetchone()[0]
        for connection in (store._writer, store._reader)
    }
    assert found == {2}, "FULL"
    assert store._writer.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_missing_file_is_made_only_where_that_is_wanted(path: Path) -> None:
    with pytest.raises(StorageFailure, match="there is none"):
        SqliteStore(path, create=False)
    assert list(path.parent.iterdir()) == []
    SqliteStore(path).close()
    SqliteStore(path, create=False).close()


# ------------------------------------------------------------------ what is wrong with it


def spoil_pages(path: Path) -> None:
    with contextlib.closing(SqliteStore(path)) as store:
        for number in range(200):
            store.create(make(f"a{number}", "x" * 500))
    with path.open("r+b") as file:
        file.seek(3 * 4096)
        file.write(b"\xff" * 30_000)


def make_newer(path: Path) -> None:
    SqliteStore(path).close()
    run_sql(path, f"PRAGMA user_version = {len(STEPS) + 1}")


BAD_FILES: dict[str, tuple[Callable[[Path], object], type[Exception], str, str]] = {
    "no database": (
        lambda path: path.write_bytes(b"hello " * 4000),
        StorageFailure,
        "not a database",
        "not a store of podwire",
    ),
    "damaged pages": (spoil_pages, StorageFailure, "malformed", "move it away"),
    "another program's": (
        lambda path: run_sql(path, "CREATE TABLE t (a)", "PRAGMA application_id = 7"),
        StorageFailure,
        "another program's database",
        "nothing was touched",
    ),
    "a newer layout": (
        make_newer,
        NewerData,
        f"its layout is {len(STEPS) + 1}, this podwire knows up to {len(STEPS)}",
        "the newer podwire",
    ),
    "a directory": (lambda path: path.mkdir(), StorageFailure, "directory", "does the directory"),
    "a link to nowhere": (
        lambda path: path.symlink_to("/nonexistent/x"),
        StorageFailure,
        "No such file",
        "does the directory",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_cannot_be_used_is_named_and_stays_as_it_is(path: Path, name: str) -> None:
    spoil, kind, message, hint = BAD_FILES[name]
    spoil(path)
    before = path.read_bytes() if path.is_file() else None
    descriptors = list_descriptors()
    with pytest.raises(kind) as caught:
        SqliteStore(path)
    assert list_descriptors() == descriptors
    assert isinstance(caught.value, StorageFailure | NewerData)
    assert str(path) in caught.value.message
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert (path.read_bytes() if path.is_file() else None) == before


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageFailure, match="No such file or directory"):
        SqliteStore(tmp_path / "missing" / "store.db")


@pytest.mark.parametrize("found", ["x'ff'", "'{'", "7", "1.5"])
def test_an_object_that_cannot_be_read_does_not_hide_the_others(
    store: SqliteStore, found: str
) -> None:
    store.create(make("a"))
    good = store.create(make("b"))
    run_sql(store._file.path, f"UPDATE object SET document = {found} WHERE name = 'a'")
    assert [bool(stored.fault) for stored in store.list("workloads")[0]] == [True, False]
    with pytest.raises(StorageFailure, match="read workloads a: something else has changed"):
        store.get(ObjectKey("workloads", "", "a"))
    assert store.get(good.key) == good
    store.delete(good.key)


@pytest.mark.parametrize("done", ["removed", "replaced"])
def test_a_file_that_goes_away_under_the_store_is_noticed(path: Path, done: str) -> None:
    with contextlib.closing(SqliteStore(path)) as store, store.watch(since(0)) as watch:
        store.create(make("a"))
        path.rename(path.with_name("away"))
        if done == "replaced":
            SqliteStore(path).close()
        for act in (
            lambda: store.create(make("b")),
            lambda: store.get(make("a").key),
            lambda: store.list("workloads"),
            lambda: watch.next(0),
        ):
            with pytest.raises(StorageFailure, match=f"the file was {done}"):
                act()


def test_a_locked_file_is_unavailable_after_the_timeout_and_nothing_is_written(path: Path) -> None:
    with contextlib.closing(SqliteStore(path, busy_timeout_s=0.2)) as store:
        made = store.create(make("a"))
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(Unavailable, match="locked"):
                store.create(make("b"))
            assert store.get(made.key) == made
            other.execute("ROLLBACK")
        assert store.create(make("b")).revision == 2


# A full disk: a small file system of its own, in a mount namespace that dies with the child.
FULL_DISK = """
import sys
from pathlib import Path
from podwire.model.errors import StorageFailure
from podwire.store.sqlite import SqliteStore
from tests.fakes.store import since
from tests.unit.test_store_sqlite import make

path = Path(sys.argv[1]) / "store.db"
store = SqliteStore(path)
watch = store.watch(since(0))
written = [store.create(make("first", "x" * 5000))]
failures = 0
for number in range(400):
    try:
        written.append(store.create(make(f"a{number}", "x" * 5000)))
    except StorageFailure as error:
        assert "full" in error.message or "I/O" in error.message, error.message
        assert str(path) in error.message
        failures += 1
assert failures > 10, "the disk never filled"
found, revision = store.list("workloads")
assert sorted(written, key=lambda one: one.key) == list(found)
assert revision == len(written)
for one in written[: len(written) // 2]:
    try:
        store.delete(one.key)
    except StorageFailure:
        break
store.close()
(path.parent / "filler").unlink()
store = SqliteStore(path)
after = store.create(make("after"))
assert store.get(after.key) == after
with store.watch(since(0)) as watch:
    revisions = [event.revision for event in watch.next(0)]
assert revisions == list(range(1, after.revision + 1))
store.close()
print("held")
"""


@pytest.mark.kernel
def test_a_full_disk_is_named_and_loses_nothing(tmp_path: Path) -> None:
    mount = (
        f"mount -t tmpfs -o size=1m,mode=700 pwt-full {tmp_path}"
        f" && head -c 300000 /dev/zero > {tmp_path}/filler"
        ' && exec "$@"'
    )
    child = subprocess.run(
        [
            *("unshare", "--mount", "sh", "-c", mount, "sh"),
            *(sys.executable, "-c", FULL_DISK, str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (child.returncode, child.stdout) == (0, "held\n"), child.stderr


def test_processes_may_make_one_file_at_the_same_moment(path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from podwire.store.sqlite import SqliteStore\n"
        "from tests.unit.test_store_sqlite import make\n"
        "sys.stdin.readline()\n"
        "SqliteStore(Path(sys.argv[1])).create(make(sys.argv[2]))\n"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", code, str(path), f"a{number}"],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(6)
    ]
    try:
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        errors = [child.communicate(timeout=60)[1] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert [child.returncode for child in children] == [0] * 6, errors
    with contextlib.closing(SqliteStore(path)) as store:
        assert len(store.list("workloads")[0]) == 6


LOOK = """
import sys
from pathlib import Path
from podwire.store.sqlite import SqliteStore
store = SqliteStore(Path(sys.argv[1]))
print(*[one.key.name for one in store.list("workloads")[0]])
store.close()
"""


def test_opening_a_file_again_takes_no_locks_from_who_has_it_open(
    path: Path, store: SqliteStore
) -> None:
    """A process that closes a file loses all its locks on it; the next one to come would remove the log."""

    def look() -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", LOOK, str(path)], capture_output=True, text=True, check=True
        )
        return done.stdout.split()

    store.create(make("a"))
    SqliteStore(path).close()
    assert look() == ["a"]
    store.create(make("b"))
    assert look() == ["a", "b"]
    assert path.with_name("store.db-wal").exists()


# ------------------------------------------------------------------ together


def test_what_is_written_together_is_seen_together_and_in_order(store: SqliteStore) -> None:
    with store.watch(since(0)) as watch:
        with store.together():
            first = store.create(make("a"))
            store.create(make("b"))
            store.delete(first.key)
            assert watch.next(0) == ()
            assert store.list("workloads") == ([], 0)
        assert [event.revision for event in watch.next(5)] == [1, 2, 3]
    assert [stored.key.name for stored in store.list("workloads")[0]] == ["b"]


def test_of_what_raises_together_nothing_stays(store: SqliteStore) -> None:
    def write(*names: str) -> None:
        with store.together():
            for name in names:
                store.create(make(name))

    write("a")
    with pytest.raises(Conflict):
        write("b", "c", "a")
    assert [stored.key.name for stored in store.list("workloads")[0]] == ["a"]
    assert store.create(make("c")).revision == 2
    with pytest.raises(KeyboardInterrupt):
        _interrupt(store)
    assert store.create(make("d")).revision == 3


def _interrupt(store: SqliteStore) -> None:
    with store.together():
        store.create(make("e"))
        raise KeyboardInterrupt


def test_other_writers_wait_for_what_is_written_together(path: Path, store: SqliteStore) -> None:
    with contextlib.closing(SqliteStore(path)) as other, ThreadPoolExecutor(2) as threads:
        with store.together():
            waiting = [
                threads.submit(one.create, make(f"z{n}")) for n, one in enumerate((store, other))
            ]
            for number in range(50):
                store.create(make(f"a{number}"))
            assert not any(future.done() for future in waiting)
        assert {future.result(20).revision for future in waiting} == {51, 52}


# ------------------------------------------------------------------ how long it remembers


def test_a_watch_of_what_is_forgotten_is_compacted(path: Path) -> None:
    with contextlib.closing(SqliteStore(path, changes_kept=10)) as store:
        for number in range(25):
            store.create(make(f"a{number}"))
        with store.watch(since(15)) as watch:
            assert [event.revision for event in watch.next(0)] == list(range(16, 26))
        with store.watch(since(14)) as watch:
            for _ in range(2):
                with pytest.raises(Compacted, match="remembers changes from 16 on"):
                    watch.next(0)


def test_the_log_stays_bounded_and_the_objects_stay(path: Path) -> None:
    with contextlib.closing(SqliteStore(path, changes_kept=50)) as store:
        made = store.create(make("a"))
        for value in range(500):
            made = store.update(make("a", value, made.revision))
        [count] = store._reader.execute("SELECT count(*) FROM change").fetchone()
        assert count == 50
        assert store.list("workloads") == ([made], 501)


def test_a_watch_that_sees_no_change_of_its_kind_is_not_compacted(path: Path) -> None:
    with (
        contextlib.closing(SqliteStore(path, changes_kept=10)) as store,
        store.watch(since(0, "namespaces")) as watch,
    ):
        for number in range(25):
            store.create(make(f"a{number}"))
            assert watch.next(0) == ()
        assert watch.revisions == {"namespaces": 25}


def test_a_store_that_was_put_back_is_compacted(path: Path) -> None:
    with contextlib.closing(SqliteStore(path)) as store:
        store.create(make("a"))
        store.create(make("b"))
    path.unlink()
    with (
        contextlib.closing(SqliteStore(path)) as store,
        store.watch(since(2)) as watch,
        pytest.raises(Compacted, match="another one, or was restored"),
    ):
        watch.next(0)


# ------------------------------------------------------------------ what wakes a watch

WRITER = """
import sys, time
from pathlib import Path
from podwire.store.sqlite import SqliteStore
from tests.unit.test_store_sqlite import make
store = SqliteStore(Path(sys.argv[1]))
for line in sys.stdin:
    store.create(make(line.strip()))
    print(time.monotonic(), flush=True)
store.close()
"""


def test_another_process_wakes_a_watch_in_milliseconds(path: Path) -> None:
    with (
        contextlib.closing(SqliteStore(path, open_waker=FileWaker)) as store,
        store.watch(since(0)) as watch,
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        late_s = []
        for number in range(30):
            child.stdin.write(f"a{number}\n")
            child.stdin.flush()
            [event] = watch.next(20)
            seen_s = time.monotonic()
            assert event.object.key.name == f"a{number}"
            late_s.append(seen_s - float(child.stdout.readline()))
        child.stdin.close()
    assert sorted(late_s)[len(late_s) // 4] < 0.1, late_s


def test_a_lost_wake_up_delays_a_change_by_a_second_at_most(path: Path) -> None:
    """The writer is another opener, and nobody tells the watch."""
    with (
        contextlib.closing(SqliteStore(path)) as store,
        contextlib.closing(SqliteStore(path)) as other,
        store.watch(since(0)) as watch,
        ThreadPoolExecutor(1) as threads,
    ):
        waiting = threads.submit(watch.next, 20.0)
        other.create(make("a"))
        assert len(waiting.result(15)) == 1


def test_a_touched_file_that_was_removed_is_made_again(path: Path) -> None:
    revision_path = path.with_name("store.db.rev")
    with (
        contextlib.closing(SqliteStore(path, open_waker=FileWaker)) as store,
        store.watch(since(0)) as watch,
    ):
        revision_path.unlink()
        store.create(make("a"))
        assert revision_path.exists()
        assert len(watch.next(20)) == 1


def within(seconds: float, act: Callable[[], object]) -> bool:
    begin_s = time.monotonic()
    act()
    return time.monotonic() - begin_s < seconds


@pytest.mark.parametrize("open_waker", [FileWaker, ThreadWaker])
def test_a_waker_ends_one_wait_for_each_wake(
    path: Path, open_waker: Callable[[Path], FileWaker | ThreadWaker]
) -> None:
    path.touch()
    waker = open_waker(path)
    try:
        waker.wake()
        assert within(20, lambda: waker.wait(40))
        assert not within(0.02, lambda: waker.wait(0.05))
        timer = threading.Timer(0.05, waker.wake)
        timer.start()
        assert within(20, lambda: waker.wait(40))
        timer.join()
    finally:
        waker.close()
    waker.close()
    waker.wake()


def test_a_file_waker_ends_its_wait_when_the_file_is_touched(path: Path) -> None:
    path.touch()
    waker = FileWaker(path)
    try:
        for _ in range(3):
            os.utime(path)
        assert within(20, lambda: waker.wait(40))
        assert not within(0.02, lambda: waker.wait(0.05)), "one wait takes all that happened"
        path.unlink()
        path.touch()
        waker.wait(5)
        os.utime(path)
        assert within(20, lambda: waker.wait(40)), "it follows the file that took the place"
    finally:
        waker.close()


def list_descriptors() -> list[str]:
    gc.collect()  # what others dropped would be closed at some moment, and be missing
    return sorted(os.listdir("/proc/self/fd"))


def test_a_file_waker_of_nothing_is_refused_and_leaks_no_descriptor(path: Path) -> None:
    before = list_descriptors()
    with pytest.raises(KernelFailure, match="inotify_add_watch"):
        FileWaker(path)
    assert list_descriptors() == before


def test_a_closed_store_holds_no_descriptor(path: Path) -> None:
    before = list_descriptors()
    store = SqliteStore(path, open_waker=FileWaker)
    for _ in range(3):
        store.watch(since(0)).next(0)
    store.create(make("a"))
    store.close()
    store.close()
    assert list_descriptors() == before


# ------------------------------------------------------------------ by its URL


def test_a_store_is_opened_by_its_url(path: Path) -> None:
    with contextlib.closing(open_store(f"sqlite://{path}")) as store:
        made = store.create(make("a"))
    with contextlib.closing(open_store(f"sqlite://{path}", create=False)) as store:
        assert store.get(made.key) == made
        with pytest.raises(NotFound):
            store.delete(ObjectKey("workloads", "", "b"))


@pytest.mark.parametrize(
    "url",
    ["", "sqlite:", "sqlite://", "sqlite://x.db", "sqlite:///x/", "etcd://", "etcd://h:0", "/x.db"],
)
def test_another_url_is_refused_and_says_what_is_known(url: str) -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        open_store(url)
    known = "etcd://HOST:PORT" if url.startswith("etcd:") else "sqlite:///PATH"
    assert known in caught.value.hint
