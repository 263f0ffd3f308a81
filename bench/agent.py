"""The agent with 250 pods: resident memory, CPU when nothing happens, and time from its start to its first answer."""

import argparse
import os
import signal
import time
import uuid
from contextlib import ExitStack
from pathlib import Path

from bench import results_file
from bench.contestants import LAB, one_node, pod_namespace, podwire_on, scratch
from bench.stats import median_of
from podwire.cli.client import request
from podwire.lab import node as nodes
from podwire.lab.state import changed_state, is_running
from podwire.lab.topology import NodePlan

POLL_S = 0.002
DEADLINE_S = 30.0
SETTLE_S = 10.0
"""What a start leaves to be done behind its first answer (directories, lists of the store) is not idling."""


def main() -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, default=250)
    parser.add_argument("--restarts", type=int, default=9)
    parser.add_argument("--idle-s", type=float, default=30.0)
    arguments = parser.parse_args()
    samples: dict[str, list[float]] = {}
    with ExitStack() as stack:
        directory = stack.enter_context(scratch())
        state = stack.enter_context(one_node())
        ours, node = podwire_on(state, directory), state.plan.nodes[0]
        samples["MB without pods"] = [resident_mb(agent_pid())]
        for _ in range(arguments.pods):
            ours.call("ADD", uuid.uuid4().hex, stack.enter_context(pod_namespace()))
        samples["MB after as many ADDs"] = [resident_mb(agent_pid())]
        for _ in range(arguments.restarts):
            samples.setdefault("start to answer, ms", []).append(restart_ms(node))
            if _endpoints(node) != arguments.pods:
                raise RuntimeError(f"{_endpoints(node)} endpoints after a restart")
            samples.setdefault("MB after a restart", []).append(resident_mb(agent_pid()))
        time.sleep(SETTLE_S)
        samples["idle CPU, %"] = [cpu_percent(agent_pid(), arguments.idle_s)]
        samples["MB after idling"] = [resident_mb(agent_pid())]
    summary = {}
    print(f"\nwith {arguments.pods} pods, median (95 % interval)")
    for name, series in samples.items():
        found = median_of(series)
        print(f"  {name:24} {found}")
        summary[name] = results_file.interval(found)
    results_file.write("agent", {"pods": arguments.pods, **summary}, samples)


def agent_pid() -> int:
    """Give the process of the only agent."""
    with changed_state(LAB) as state:
        return next(iter(state.agents.values())).pid


def restart_ms(node: NodePlan) -> float:
    """Kill the agent and start it again; gives the time from its execution to its first answer."""
    with changed_state(LAB) as state:
        process = state.agents[node.name]
        os.kill(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + DEADLINE_S
        while is_running(process) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        begin = time.perf_counter()
        nodes.start_agent(state, node, wait=False)
        while not nodes.answers(node):
            if time.monotonic() > deadline:
                raise RuntimeError("the agent does not answer")
            time.sleep(POLL_S)
        return round((time.perf_counter() - begin) * 1e3, 1)


def _endpoints(node: NodePlan) -> int:
    status = request(str(node.directory / "api.sock"), "GET", "/status")
    return int(status["endpoints"]["byState"].get("ready", 0))


def resident_mb(pid: int) -> float:
    """Give the resident memory of a process, in MB."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return round(int(line.split()[1]) * 1024 / 1e6, 1)
    raise RuntimeError(f"process {pid} has no resident memory")


def cpu_percent(pid: int, seconds: float) -> float:
    """Watch a process for so long; gives how much of a CPU it used."""
    begin, begin_cpu_s = time.monotonic(), cpu_s(pid)
    time.sleep(seconds)
    return round(100 * (cpu_s(pid) - begin_cpu_s) / (time.monotonic() - begin), 3)


def cpu_s(pid: int) -> float:
    """Give the CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
