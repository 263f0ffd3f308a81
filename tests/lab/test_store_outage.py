"""etcd is gone for a while, agents are killed meanwhile, pods come and go: nothing running notices, nothing is leaked.

The outage lasts 8 s, a minute with `--full`; which node does what is decided by the printed seed.
"""

import contextlib
import random
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from podwire.lab import labs, traffic
from podwire.model.errors import PodwireError
from tests.lab.labrig import Lab
from tests.lab.test_nodes import settled, steady_flow
from tests.waiting import wait_for

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

OUTAGE_S, OUTAGE_FULL_S = 8.0, 60.0
AGREES_AGAIN_S = 120.0
NODES = ("node1", "node2", "node3")


@pytest.fixture
def lab() -> Iterator[Lab]:
    made = Lab(nodes=3, routing="overlay", store="etcd")
    try:
        settled(made)
        yield made
    finally:
        made.close()


def live(lab: Lab, chosen: random.Random, ends_s: float) -> tuple[int, list[str]]:
    """Let pods come and go, and kill an agent now and then; gives how many came, and what failed."""
    alive: list[str] = []
    failed: list[str] = []
    number = 0
    while time.monotonic() < ends_s:
        what = chosen.choices(("add", "remove", "kill"), (5, 4, 1))[0]
        try:
            if what == "add" and len(alive) < 12:
                number += 1
                labs.run(lab.name, f"p{number}", chosen.choice(NODES), labels={"app": "known"})
                alive.append(f"p{number}")
            elif what == "remove" and alive:
                labs.remove(lab.name, alive.pop(chosen.randrange(len(alive))))
            elif what == "kill":
                node = chosen.choice(NODES)
                labs.change_agent(lab.name, node, "kill")
                labs.change_agent(lab.name, node, "start")
        except PodwireError as error:
            failed.append(f"{what}: {error.message}")
    return number, failed


def remembers(lab: Lab, node: str) -> bool:
    """Tell whether an agent has on disk the identity that its pods have: it writes once a second."""
    path = lab.node(node).directory / "state" / "remembered.db"
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as kept:
            [(count,)] = kept.execute("SELECT count(*) FROM object WHERE kind = 'identities'")
    except sqlite3.OperationalError:  # not made yet, or being written
        return False
    return bool(count)


def holders(lab: Lab) -> Counter[str]:
    """Count who has which address, over all nodes."""
    return Counter(
        address
        for node in NODES
        for endpoint in lab.list_endpoints(node)
        for address in endpoint["addresses"]
    )


def agrees(lab: Lab) -> bool:
    """Tell whether all nodes see each other, nothing is held twice or by nobody, and pods reach each other."""
    for node in NODES:
        if lab.cli("ipam", "check", "--node", node).code:
            return False
        if any(not row["alive"] for row in lab.get("/node", node)):
            return False
    there = {address for pod in lab.state.pods for address in pod.addresses}
    counts = holders(lab)
    return set(counts) == there and set(counts.values()) <= {1}


def test_an_outage_of_the_store_is_felt_by_nobody_who_runs(lab: Lab, full: bool, seed: int) -> None:
    chosen = random.Random(seed)
    labs.run(lab.name, "web", "node1", labels={"app": "known"})
    labs.run(lab.name, "client", "node2", labels={"app": "known"})
    # A pod of every node has had these labels: their identity is known there.
    labs.run(lab.name, "third", "node3", labels={"app": "known"})
    wait_for(lambda: all(remembers(lab, node) for node in NODES), "agents to keep what they heard")
    with steady_flow(lab, "client", "web") as seen:
        labs.change_store(lab.name, "kill")
        came, failed = live(lab, chosen, time.monotonic() + (OUTAGE_FULL_S if full else OUTAGE_S))
        labs.change_store(lab.name, "start")
        wait_for(lambda: agrees(lab), "all nodes to agree again", AGREES_AGAIN_S)
    print(f"seed {seed}: {came} pods came meanwhile, {len(seen)} echoes")
    assert came
    assert not failed
    assert all(seen), f"{seen.count(False)} of {len(seen)} echoes lost"
    place, _ = labs.locate(lab.state, "third")
    address = labs.find_addresses(lab.state, "web")[0]
    assert traffic.ping(place, address, timeout_s=10).ok
