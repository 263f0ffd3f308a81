"""Pods of a real two-node cluster: the network part of their start, and how fast many come and go, against ptp.

Each network has a cluster of its own, one after the other, because an idle one would still use the processors. A round
is one cluster of each; `--add` adds rounds to the results of an earlier run, so that a run may be short.
"""

import argparse
import datetime
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from bench import results_file
from bench.stats import Interval, median_of, quantile, ratio_of
from podwire.lab.kubernetes import cluster as clusters
from podwire.lab.kubernetes import pods
from podwire.lab.kubernetes.cluster import Cluster, ClusterShape
from podwire.lab.kubernetes.networks import Network
from podwire.lab.kubernetes.networks.agents import ROOT, PlainAgents
from podwire.lab.kubernetes.networks.installed import Podwire
from podwire.lab.kubernetes.networks.reference import Ptp
from podwire.lab.kubernetes.nodes.cgroups import read_cpu_s

NAME: Final = "bench"
RESULT: Final = "cluster"
REPLICAS: Final = 30
CROWD: Final = 60
LOOK_S: Final = 0.1
"""Each look is work for the API server: more often would be measured, too."""
AGENT: Final = "system:serviceaccount:podwire-system:podwire-agent"
NETWORKS: Final[Mapping[str, Callable[[], Network]]] = {
    # Without host ports, which cost a plugin more: the nodes of podwire have none either.
    "ptp": lambda: Ptp(host_ports=False),
    "podwire": Podwire,
    "agents": PlainAgents,
}
_LINE: Final = re.compile(
    r'^time="(\S+)" level=debug msg="(begin cni setup|cni result)\b.*podsandboxid=(\w+)'
)
Samples = dict[str, list[float]]


def main() -> None:
    """Measure the networks in turns, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", default="ptp,podwire", help="separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--crowds", type=int, default=1, help="0 to 60 pods and back, in a round")
    parser.add_argument("--add", action="store_true", help="to the results that are there")
    arguments = parser.parse_args()
    samples: Samples = results_file.read_samples(RESULT) if arguments.add else {}
    names = arguments.networks.split(",")
    for number in range(arguments.rounds):
        for name in names if number % 2 == 0 else names[::-1]:
            shape = ClusterShape(
                runtime_log="debug", hidden=() if name == "agents" else (str(ROOT),)
            )
            with clusters.raised(NAME, shape, NETWORKS[name]()) as cluster:
                measure(cluster, name, arguments.crowds, samples)
    results_file.write(RESULT, summarise(samples), samples)


def measure(cluster: Cluster, name: str, crowds: int, samples: Samples) -> None:
    """Measure one cluster into `samples`."""
    # The first pods of a node read programs that later ones find in memory.
    _come(cluster, "first", 4)
    _go(cluster, "first")
    known, asked = set(read_network_times(cluster)), len(list_agents_requests(cluster))
    _come(cluster, "web", REPLICAS)
    times = read_network_times(cluster)
    samples.setdefault(f"{name} network ms", []).extend(
        round(times[program], 3) for program in times if program not in known
    )
    requests = list_agents_requests(cluster)[asked:]
    samples.setdefault(f"{name} requests", []).append(len(requests))
    samples.setdefault(f"{name} requests refused", []).append(count_refused(cluster))
    for what in sorted({_describe(request) for request in requests}):
        print(f"  {sum(_describe(asked) == what for asked in requests):4} {what}")
    _go(cluster, "web")
    cluster.kubectl("cordon", "node2")
    for _ in range(crowds):
        used_s = read_cpu_s(cluster.nodes[0].machine.plan.cgroup)
        samples.setdefault(f"{name} up s", []).append(_come(cluster, "crowd", CROWD))
        used_s = read_cpu_s(cluster.nodes[0].machine.plan.cgroup) - used_s
        samples.setdefault(f"{name} up, node's CPU s", []).append(round(used_s, 2))
        samples.setdefault(f"{name} down s", []).append(_go(cluster, "crowd"))


def _come(cluster: Cluster, name: str, count: int) -> float:
    """Create so many pods; gives after how many seconds all were Ready."""
    begin = time.monotonic()
    cluster.apply(pods.describe_deployment(name, count))
    path = f"/apis/apps/v1/namespaces/default/deployments/{name}"
    _wait(
        cluster,
        lambda: cluster.client.get(path).get("status", {}).get("readyReplicas") == count,
        f"{count} Ready pods",
    )
    return round(time.monotonic() - begin, 2)


def _go(cluster: Cluster, name: str) -> float:
    """Delete them; gives after how many seconds none was left."""
    begin = time.monotonic()
    cluster.kubectl("delete", "deployment", name)
    path = "/api/v1/namespaces/default/pods?limit=1"
    _wait(cluster, lambda: not cluster.client.get(path)["items"], "the last pod to go")
    return round(time.monotonic() - begin, 2)


def _wait(cluster: Cluster, look: Callable[[], bool], what: str) -> None:
    def look_slowly() -> bool:
        found = look()
        if not found:
            time.sleep(LOOK_S)
        return found

    cluster.wait_for(look_slowly, what)


def read_network_times(cluster: Cluster) -> Mapping[str, float]:
    """Read from the logs of containerd how many ms the network of each sandbox took, by its id."""
    begun: dict[str, datetime.datetime] = {}
    taken_ms: dict[str, float] = {}
    for node in cluster.nodes:
        for line in node.services.containerd.log.read_text(errors="replace").splitlines():
            if found := _LINE.match(line):
                at, what, sandbox = found.groups()
                # Python reads microseconds, containerd writes nanoseconds.
                moment = datetime.datetime.fromisoformat(re.sub(r"(\.\d{6})\d*Z", r"\1+00:00", at))
                if what == "begin cni setup":
                    begun[sandbox] = moment
                else:
                    taken_ms[sandbox] = (moment - begun[sandbox]).total_seconds() * 1e3
    return taken_ms


def list_agents_requests(cluster: Cluster) -> Sequence[Mapping[str, Any]]:
    """List what agents asked the API server for; a watch counts when it begins."""
    events = cluster.control.api.read_audit(AGENT)
    return [
        event
        for event in events
        if event["stage"] == ("ResponseStarted" if event["verb"] == "watch" else "ResponseComplete")
    ]


def count_refused(cluster: Cluster) -> int:
    """Count the agents' requests that they had no right to."""
    events = cluster.control.api.read_audit(AGENT)
    return sum(event.get("responseStatus", {}).get("code") == 403 for event in events)


def _describe(request: Mapping[str, Any]) -> str:
    return f"{request['verb']} {request['objectRef'].get('resource')}"


def summarise(samples: Mapping[str, Sequence[float]]) -> dict[str, object]:
    """Compute and print the table."""
    summary: dict[str, object] = {}
    print(f"\n{'':34}{'n':>4}{'p50':>9}{'p90':>9}")
    for name, series in samples.items():
        p50, p90 = quantile(series, 0.5), quantile(series, 0.9)
        print(f"{name:34}{len(series):4}{p50:9.2f}{p90:9.2f}")
        summary[name] = {**results_file.interval(median_of(series)), "p90": round(p90, 3)}
    for what, figure, part in (
        ("network p50", 0.5, "network ms"),
        ("network p90", 0.9, "network ms"),
        ("up", 0.5, "up s"),
        ("up, CPU", 0.5, "up, node's CPU s"),
        ("down", 0.5, "down s"),
    ):
        ours, theirs = samples.get(f"podwire {part}", ()), samples.get(f"ptp {part}", ())
        if ours and len(ours) == len(theirs):
            ratio = ratio_of(ours, theirs, lambda series, at=figure: quantile(series, at))  # type: ignore[misc]
            print(f"{what}: podwire / ptp {ratio}")
            summary[what] = {"ratio": ratio.value, "interval": [ratio.low, ratio.high]}
    if asked := samples.get("podwire requests"):
        each = [count / REPLICAS for count in asked]
        summary["requests per pod"] = results_file.interval(
            Interval(max(each), min(each), max(each))
        )
    return summary


if __name__ == "__main__":
    main()
