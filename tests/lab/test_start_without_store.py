"""An agent that starts while its store is away: what was in force stays in force, and it serves what it can."""

import contextlib
import json
import socket
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from podwire.kernel import netns
from tests.lab.policy_rig import Place
from tests.lab.rig import Outcome, Rig
from tests.unit.policies import network_policy
from tests.waiting import wait_for

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

PORT = 5432
BACK_S = 60.0
FOLLOWS_S = 40.0
"""The store is tried again after at most 8 s, and each try waits for the lock up to 10 s."""
PASSES_S, REFUSED_S = 10.0, 0.3
"""How long an answer is waited for where one must come, and where none may."""
TRY_LATER = 11


@dataclass
class World:
    """A node with three pods: a database that only the proxy may reach."""

    rig: Rig
    pods: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Name -> namespace, IPv4 address."""
    listeners: list[socket.socket] = field(default_factory=list)
    _lock: sqlite3.Connection | None = None

    @property
    def store(self) -> Path:
        return self.rig.directory / "state" / "store.db"

    def add(self, name: str, app: str) -> Outcome:
        namespace = self.rig.make_pod_namespace()
        labels = [{"key": "app", "value": app}]
        config = {"args": {"cni": {"labels": labels}}}
        outcome = self.rig.cni("ADD", name, namespace, config=config)
        if outcome.ok:
            self.pods[name] = (namespace, outcome.addresses[0])
        return outcome

    def must_add(self, name: str, app: str) -> None:
        """Add a pod; "try again later" is obeyed, as a runtime does: a store may take its time."""
        until_s = time.monotonic() + FOLLOWS_S
        while not (outcome := self.add(name, app)).ok:
            assert outcome.document["code"] == TRY_LATER, outcome.document
            assert time.monotonic() < until_s, outcome.document

    def serve(self, name: str) -> None:
        """Listen in a pod: the kernel alone answers."""
        namespace, address = self.pods[name]
        place = _place(namespace, address)
        with place.fd:
            listener = place.open_socket(4, socket.SOCK_STREAM)
        listener.bind((address, PORT))
        listener.listen()
        self.listeners.append(listener)

    def reaches(self, source: str, target: str = "db", *, within_s: float = PASSES_S) -> bool:
        place = _place(*self.pods[source])
        with place.fd, place.open_socket(4, socket.SOCK_STREAM) as client:
            client.settimeout(within_s)
            return client.connect_ex((self.pods[target][1], PORT)) == 0

    def is_open_for(self, open_for: str, closed_for: str) -> bool:
        """Tell whether one pod reaches the database and another does not."""
        return self.reaches(open_for) and not self.reaches(closed_for, within_s=REFUSED_S)

    def lock_store(self) -> None:
        """Keep everybody out of the file, readers too."""
        self._lock = sqlite3.connect(self.store, isolation_level=None)
        self._lock.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._lock.execute("BEGIN EXCLUSIVE")

    def free_store(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def apply(self, document: dict[str, Any]) -> None:
        status, found = self.rig.ask("POST", "/apply", json.dumps([document]).encode())
        assert status < 300, found

    def check(self, name: str) -> dict[str, Any]:
        [found] = [shown for shown in self.rig.get("/status")[1]["checks"] if shown["name"] == name]
        assert isinstance(found, dict)
        return found

    def wait_back(self) -> None:
        wait_for(lambda: self.check("store")["ok"], "the agent to have its store again", BACK_S)

    def close(self) -> None:
        self.free_store()
        for listener in self.listeners:
            listener.close()


def _place(namespace: str, address: str) -> Place:
    fd = netns.open_namespace(netns.named_path(namespace))
    return Place(namespace, fd, address, "")


def only_from(*apps: str) -> dict[str, Any]:
    peers = [{"podSelector": {"matchLabels": {"app": app}}} for app in apps]
    rule = {"from": peers, "ports": [{"port": PORT, "protocol": "TCP"}]}
    return network_policy(
        "db", podSelector={"matchLabels": {"app": "db"}}, ingress=[rule], policyTypes=["Ingress"]
    )


@pytest.fixture
def world() -> Iterator[World]:
    with Rig(identity_wait_s=1) as rig, contextlib.closing(World(rig)) as made:
        rig.start()
        for name in ("db", "proxy", "other"):
            made.must_add(name, name)
        made.serve("db")
        made.apply(only_from("proxy"))
        wait_for(lambda: made.is_open_for("proxy", "other"), "the policy to be in force", FOLLOWS_S)
        yield made


def remembers(world: World, kinds: Sequence[str]) -> bool:
    path = world.rig.directory / "state" / "remembered.db"
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as shell:
            found = {kind for [kind] in shell.execute("SELECT DISTINCT kind FROM object")}
    except sqlite3.OperationalError:  # not made yet
        return False
    return set(kinds) <= found


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_what_was_in_force_stays_in_force_and_known_pods_come_and_go(
    world: World, end: str
) -> None:
    rig = world.rig
    wait_for(
        lambda: remembers(world, ["networkpolicies", "identities"]),
        "a copy of the store",
        FOLLOWS_S,
    )
    rig.stop() if end == "stop" else rig.kill()
    world.lock_store()
    rig.start()
    check = world.check("store")
    assert not check["ok"]
    assert "locked" in check["message"]
    assert world.is_open_for("proxy", "other")
    rig.settle()
    assert world.add("proxy-2", "proxy").ok
    assert world.reaches("proxy-2")
    assert world.add("other-2", "other").ok
    assert not world.reaches("other-2", within_s=REFUSED_S)
    refused = world.add("new", "new")
    assert refused.document["code"] == TRY_LATER
    namespace, _ = world.pods["other-2"]
    assert rig.cni("DEL", "other-2", namespace).ok
    assert world.is_open_for("proxy", "other")

    world.free_store()
    world.wait_back()
    world.must_add("new", "new")
    world.apply(only_from("new", "other"))
    wait_for(
        lambda: world.is_open_for("other", "proxy"), "the new policy to be in force", FOLLOWS_S
    )
    assert world.reaches("new")
    rig.settle()
    rig.assert_consistent()


def test_where_the_store_was_never_heard_nothing_is_built_and_rows_stay(world: World) -> None:
    rig = world.rig
    rig.stop()
    for path in (rig.directory / "state").glob("remembered.db*"):
        path.unlink()
    world.lock_store()
    rig.start()
    assert world.is_open_for("proxy", "other")
    refused = world.add("proxy-2", "proxy")
    assert refused.document["code"] == TRY_LATER
    namespace, _ = world.pods["other"]
    assert rig.cni("DEL", "other", namespace).ok
    assert world.reaches("proxy")

    world.free_store()
    world.wait_back()
    rig.settle()
    world.must_add("proxy-2", "proxy")
    world.must_add("other", "other")
    assert world.is_open_for("proxy", "other")
    rig.assert_consistent()


def test_a_damaged_store_is_refused_although_its_copy_is_there(world: World) -> None:
    rig = world.rig
    rig.stop()
    for suffix in ("-wal", "-shm"):
        Path(f"{world.store}{suffix}").unlink(missing_ok=True)
    world.store.write_bytes(b"x" * 8192)
    rig.start(wait=False)
    assert rig.agent is not None
    assert rig.agent.wait(60) != 0
    assert "store.db" in rig.log_tail(3)
    assert world.is_open_for("proxy", "other")
