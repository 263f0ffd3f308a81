"""Something else writes into the lab's etcd, over objects that real agents work by: nothing that is in force changes,
what is new goes on arriving, people are told, and all is well again when it is put right."""

import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwire.lab import etcd, labs
from podwire.lab.topology import STORE_PORT
from tests.lab.labrig import Lab
from tests.lab.rig import run
from tests.lab.test_nodes import PORT, apply, holds, ingress_from, settled
from tests.waiting import wait_for

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

OBJECTS = "/podwire/v1/objects/"
_PUT = """
import sys, urllib.request
with urllib.request.urlopen(sys.argv[1], sys.argv[2].encode(), timeout=60) as answer:
    answer.read()
"""


@pytest.fixture
def lab() -> Iterator[Lab]:
    etcd.require_program()
    made = Lab(nodes=3, families="4", routing="overlay", store="etcd")
    try:
        settled(made)
        yield made
    finally:
        made.close()


def damage(lab: Lab, key: str) -> None:
    """Write what is no object where one is."""
    plan = lab.state.plan
    body = {
        "key": base64.b64encode((OBJECTS + key).encode()).decode(),
        "value": base64.b64encode(b'{"half":').decode(),
    }
    url = f"http://{plan.store_addresses[0]}:{STORE_PORT}/v3/kv/put"
    place = ("ip", "netns", "exec", plan.underlay_namespace)
    run(*place, sys.executable, "-c", _PUT, url, json.dumps(body))


def warnings(lab: Lab, node: str) -> str:
    return " ".join(lab.get("/status", node)["warnings"])


def is_well(lab: Lab, node: str) -> bool:
    """Tell whether what a node publishes can be read in the store."""
    found = [lab.api("GET", f"/object/{kind}/{node}") for kind in ("nodes", "nodeendpoints")]
    return all(status == 200 for status, _ in found)


def test_damage_in_the_store_changes_nothing_and_stops_nothing(lab: Lab, tmp_path: Path) -> None:
    for name, node in (("db", "node1"), ("proxy", "node2"), ("other", "node2")):
        labs.run(lab.name, name, node, labels={"app": name}, serve=[f"{PORT}/tcp"])
    apply(lab, tmp_path, ingress_from("proxy"))
    holds(lab, "proxy", "db", True)
    holds(lab, "other", "db", False)
    identity = next(endpoint["identity"] for endpoint in lab.list_endpoints("node2"))
    damaged = [
        ("networkpolicies/default/db-only-from", "networkpolicies default/db-only-from"),
        (f"identities/_/{identity}", f"identities {identity}"),
    ]
    for key, _ in damaged:
        damage(lab, key)
    for _, name in damaged:
        wait_for(lambda name=name: name in warnings(lab, "node1"), f"{name} to be named")  # type: ignore[misc]

    labs.run(lab.name, "late", "node3", labels={"app": "proxy"})
    holds(lab, "late", "db", True)
    holds(lab, "proxy", "db", True)
    holds(lab, "other", "db", False)

    labs.change_agent(lab.name, "node1", "kill")
    labs.change_agent(lab.name, "node1", "start")
    for _, name in damaged:
        wait_for(lambda name=name: name in warnings(lab, "node1"), f"{name} to be named again")  # type: ignore[misc]
    holds(lab, "late", "db", True)
    holds(lab, "proxy", "db", True)
    holds(lab, "other", "db", False)

    apply(lab, tmp_path, ingress_from("other"))
    holds(lab, "other", "db", True)
    holds(lab, "proxy", "db", False)
    assert lab.cli("delete", "identities", str(identity)).code == 0
    wait_for(lambda: "cannot be read" not in warnings(lab, "node1"), "all to be well again")
    holds(lab, "other", "db", True)
    holds(lab, "proxy", "db", False)


def test_a_node_puts_right_what_it_publishes(lab: Lab) -> None:
    for name, node in (("db", "node1"), ("proxy", "node2")):
        labs.run(lab.name, name, node, labels={"app": name}, serve=[f"{PORT}/tcp"])
    holds(lab, "proxy", "db", True)
    published = ("nodes/_/node2", "nodeendpoints/_/node2")
    for key in published:
        damage(lab, key)
    wait_for(lambda: is_well(lab, "node2"), "the running agent to publish itself anew")
    holds(lab, "proxy", "db", True)

    labs.change_agent(lab.name, "node2", "kill")
    for key in published:
        damage(lab, key)
    for key in published:
        kind, _, name = key.split("/")
        wait_for(
            lambda kind=kind, name=name: f"{kind} {name}" in warnings(lab, "node1"),  # type: ignore[misc]
            f"{key} to be named",
        )
    holds(lab, "db", "proxy", True)  # as it was last read
    labs.change_agent(lab.name, "node2", "start")
    wait_for(lambda: is_well(lab, "node2"), "the agent to publish itself after its start")
    wait_for(lambda: "cannot be read" not in warnings(lab, "node1"), "the others to have read it")
    labs.run(lab.name, "late", "node2", labels={"app": "late"}, serve=[f"{PORT}/tcp"])
    holds(lab, "db", "late", True)
