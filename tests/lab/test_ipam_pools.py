"""Agents that take their addresses from pools of one store: real pods, restarts, the command line."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podwire.store.sqlite import SqliteStore
from tests.fakes.pool_nodes import apply, claimed_blocks, pool_document
from tests.lab.rig import Rig
from tests.waiting import wait_for

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

PODWIRE = str(Path(sys.executable).parent / "podwire")
BORROWED = 5


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    found = SqliteStore(tmp_path / "store.db")
    apply(
        found,
        pool_document("four", "10.99.0.0/26", blockSize=28),
        pool_document("six", "fd99::/112", blockSize=124),
        pool_document(
            "named", "10.98.0.0/24", blockSize=28, nodeSelector={"matchLabels": {"a": "b"}}
        ),
    )
    yield found
    found.close()


@pytest.fixture
def rig(tmp_path: Path, store: SqliteStore) -> Iterator[Rig]:
    with make_rig(tmp_path) as made:
        made.start()
        yield made


def make_rig(tmp_path: Path) -> Rig:
    """Make a node of the store in this directory."""
    return Rig(cidrs=(), ipam="pool", store=f"sqlite://{tmp_path / 'store.db'}")


def add(rig: Rig, name: str, **cni: Any) -> list[str]:
    """Attach a pod; gives its addresses."""
    config = {"args": {"cni": cni}} if cni else None
    outcome = rig.cni("ADD", name, rig.make_pod_namespace(), config=config)
    assert outcome.ok, outcome
    return outcome.addresses


def cli(rig: Rig, *words: str) -> Any:
    """Ask the agent by the command line."""
    said = subprocess.run(
        [PODWIRE, "ipam", *words, "-o", "json", "--agent", str(rig.directory / "api.sock")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert said.returncode in (0, 1), said.stderr
    return json.loads(said.stdout)


def test_pods_get_addresses_of_blocks_and_keep_them_over_a_restart(
    rig: Rig, store: SqliteStore
) -> None:
    given = [add(rig, f"pod{number}") for number in range(16)]
    flat = [address for pair in given for address in pair]
    assert len(set(flat)) == 32
    assert set(claimed_blocks(store).values()) == {rig.name}
    rig.kill()
    rig.start()
    _, shown = rig.get("/ipam")
    assert sorted(allocation["ip"] for allocation in shown["allocations"]) == sorted(flat)
    after = add(rig, "later")
    assert not set(after) & set(flat)
    rig.settle()
    wait_for(lambda: cli(rig, "check")["faults"] == [], "everybody to agree", 30)


def test_a_named_pool_and_fixed_addresses_are_what_was_asked_for(
    rig: Rig, store: SqliteStore
) -> None:
    [address] = add(rig, "named", pools=["named"])
    assert address.startswith("10.98.0.")
    ipv4, _ = add(rig, "fixed", ips=["10.99.0.40"])
    assert ipv4.startswith("10.99.0.40")
    outcome = rig.cni(
        "ADD", "typo", rig.make_pod_namespace(), config={"args": {"cni": {"pools": ["typo"]}}}
    )
    assert not outcome.ok


def test_what_is_exhausted_is_named(tmp_path: Path, store: SqliteStore) -> None:
    """The limit is there before the agent: what it hears of while it runs, it hears a moment later."""
    apply(
        store,
        pool_document(
            "four", "10.99.0.0/26", blockSize=28, maxBlocksPerNode=1, strictAffinity=True
        ),
    )
    with make_rig(tmp_path) as rig:
        rig.start()
        wait_for(
            lambda: rig.get("/ipam")[1]["pools"] and claimed_blocks(store),
            "a block claimed ahead",
            30,
        )
        outcomes = [
            rig.cni("ADD", f"pod{number}", rig.make_pod_namespace()) for number in range(16)
        ]
    failed = [outcome for outcome in outcomes if not outcome.ok]
    assert len(failed) == 1
    assert "maxBlocksPerNode" in str(failed[0])
    assert "pool four" in str(failed[0])


def test_the_command_line_shows_pools_blocks_and_what_is_borrowed(
    rig: Rig, store: SqliteStore
) -> None:
    add(rig, "one")
    add(rig, "fixed", ips=["10.99.0.40"])

    def used() -> int:
        return sum(
            row["used"]
            for row in cli(rig, "show")
            if row["name"] == "four" and row["of"] == "cluster"
        )

    wait_for(lambda: used() == 2, "both addresses to be shown", 30)
    pools = cli(rig, "show")
    four = next(pool for pool in pools if pool["name"] == "four" and pool["of"] == "cluster")
    assert four["capacity"] == 4 * 16 - 1
    mine = [pool for pool in pools if pool["of"] == rig.name and pool["name"] == "four"]
    assert mine[0]["blocksClaimed"] >= 1
    blocks = cli(rig, "show", "--show-blocks")
    assert {block["pool"] for block in blocks} == {"four", "six"}
    assert cli(rig, "show", "--ip", "10.99.0.40")[0]["owner"] == "default/fixed"
    wait_for(lambda: cli(rig, "check")["ok"], "everybody to agree", 30)


def test_two_agents_never_give_the_same_address(tmp_path: Path, store: SqliteStore) -> None:
    with make_rig(tmp_path) as one, make_rig(tmp_path) as other:
        one.start()
        other.start()
        given = [
            address
            for number in range(8)
            for rig in (one, other)
            for address in add(rig, f"pod{number}")
        ]
        assert len(set(given)) == len(given)
        assert set(claimed_blocks(store).values()) == {one.name, other.name}
