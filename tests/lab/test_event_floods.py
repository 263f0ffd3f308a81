"""A pod that makes a node drop packets as fast as it can hides no other pod's drop, and costs the agent little.

Events are told up to a number each second for each endpoint; what is beyond it is counted as lost (events.h).
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from podwire.lab import labs
from tests.lab.labrig import Lab
from tests.lab.rig import run
from tests.waiting import wait_for

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

POSITIONS: Final = ["pod", "far-pod", "far-node", "world"]
MEMORY_MB_MORE: Final = 24
CPU_SHARE_MOST: Final = 0.4
"""Of one CPU, the agent's. One that read every event of a flood would take a whole one."""
FLOODED: Final = 30_000
FLOOD: Final = """
import socket, sys
address = sys.argv[1]
family = socket.AF_INET6 if ":" in address else socket.AF_INET
sender = socket.socket(family, socket.SOCK_DGRAM)
while True:
    for port in range(1024, 60000):
        try:
            sender.sendto(b"flood", (address, port))
        except OSError:
            pass  # the buffer is full
"""
CLOSED: Final = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "closed", "namespace": "default"},
    "spec": {"podSelector": {"matchLabels": {"closed": "yes"}}, "policyTypes": ["Ingress"]},
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Two nodes; on the first two closed pods and two that send, on the second one that sends."""
    made = Lab(nodes=2, routing="overlay")
    try:
        for name in ("victim", "shut"):
            labs.run(made.name, name, "node1", labels={"closed": "yes"})
        for name, node in (("flood", "node1"), ("other", "node1"), ("far", "node2")):
            labs.run(made.name, name, node)
        world = made.state.plan.world_namespace
        ways = zip(labs.find_addresses(made.state, "victim"), made.node().addresses, strict=True)
        for address, node in ways:
            run("ip", "-n", world, "route", "replace", address, "via", node)
        path = tmp_path_factory.mktemp("policy") / "closed.json"
        path.write_text(json.dumps(CLOSED))
        assert made.cli("apply", "-f", str(path)).code == 0
        for sender in ("flood", "far", "world"):
            wait_for(lambda name=sender: is_told(made, name, "victim", 0), f"{sender} to be denied")  # type: ignore[misc]
        yield made
    finally:
        made.close()


def send(lab: Lab, source: str, target: str, version: int) -> None:
    """Send a datagram that is denied."""
    namespace, _ = labs.locate(lab.state, source)
    address = labs.find_addresses(lab.state, target)[version == 6]
    script = (
        "import socket, sys; a = sys.argv[1];"
        " socket.socket(socket.AF_INET6 if ':' in a else socket.AF_INET, socket.SOCK_DGRAM)"
        ".sendto(b'?', (a, 9))"
    )
    subprocess.run(
        ["ip", "netns", "exec", namespace, sys.executable, "-c", script, address], check=True
    )


def is_told(lab: Lab, source: str, target: str, version: int) -> bool:
    """Send a datagram and tell whether its drop is shown."""
    send(lab, source, target, version)
    own = labs.find_addresses(lab.state, source)[version == 6]
    address = labs.find_addresses(lab.state, target)[version == 6]
    flows = lab.cli(
        "observe", "--last", "500", "--verdict", "dropped", "--to", address, "-o", "json"
    )
    return own in flows.out


@contextlib.contextmanager
def flooding(lab: Lab, position: str, version: int) -> Iterator[None]:
    name = {"pod": "flood", "far-pod": "far", "far-node": "node2", "world": "world"}[position]
    namespace, _ = labs.locate(lab.state, name)
    address = labs.find_addresses(lab.state, "victim")[version == 6]
    process = subprocess.Popen(
        ["ip", "netns", "exec", namespace, sys.executable, "-c", FLOOD, address]
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def count_drops(lab: Lab) -> int:
    rows: list[dict[str, Any]] = lab.get("/map/metrics")["rows"]
    return sum(int(row["packets"]) for row in rows if row["reason"] == "policy")


def agent_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def agent_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    [line] = [line for line in lines if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024 / 1e6


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("position", POSITIONS)
def test_a_flood_of_drops_hides_no_drop_of_another_pod(
    lab: Lab, position: str, version: int
) -> None:
    pid = int(lab.get("/status")["pid"])
    memory_mb, cpu_s, dropped = agent_mb(pid), agent_cpu_s(pid), count_drops(lab)
    begun_s = time.monotonic()
    with flooding(lab, position, version):
        wait_for(lambda: count_drops(lab) > dropped + FLOODED, "a flood")
        wait_for(
            lambda: is_told(lab, "other", "shut", version), "the drop of another pod to be shown"
        )
    share = (agent_cpu_s(pid) - cpu_s) / (time.monotonic() - begun_s)
    assert agent_mb(pid) < memory_mb + MEMORY_MB_MORE
    assert share < CPU_SHARE_MOST
