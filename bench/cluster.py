"""Pods of a real two-node cluster: the network part of their start, and how fast many come and go, against ptp."""

import argparse
import datetime
import re
import time
from collections.abc import Callable, Mapping, Sequence

from bench import results_file
from bench.stats import quantile
from podwire.lab.kubernetes import cluster as clusters
from podwire.lab.kubernetes import pods
from podwire.lab.kubernetes.cluster import Cluster, ClusterShape
from podwire.lab.kubernetes.networks import Network
from podwire.lab.kubernetes.networks.agents import ROOT, PlainAgents
from podwire.lab.kubernetes.networks.installed import Podwire
from podwire.lab.kubernetes.networks.reference import Ptp

NAME = "bench"
REPLICAS = 30
CROWD = 60
AGENT = "system:serviceaccount:podwire-system:podwire-agent"
NETWORKS: Mapping[str, Callable[[], Network]] = {
    "ptp": Ptp,
    "podwire": Podwire,
    "agents": PlainAgents,
}
_LINE = re.compile(
    r'^time="(\S+)" level=debug msg="(begin cni setup|cni result)\b.*podsandboxid=(\w+)'
)


def main() -> None:
    """Measure each network in a cluster of its own, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", default="ptp,podwire", help="separated by commas")
    parser.add_argument("--crowds", type=int, default=3, help="how often 0 to 60 pods and back")
    arguments = parser.parse_args()
    samples: dict[str, list[float]] = {}
    for name in arguments.networks.split(","):
        shape = ClusterShape(runtime_log="debug", hidden=() if name == "agents" else (str(ROOT),))
        with clusters.raised(NAME, shape, NETWORKS[name]()) as cluster:
            measure(cluster, name, arguments.crowds, samples)
    results_file.write("cluster", summarise(samples), samples)


def measure(cluster: Cluster, name: str, crowds: int, samples: dict[str, list[float]]) -> None:
    """Measure one cluster into `samples`."""
    # The first pods of a node read programs that later ones find in memory.
    cluster.apply(pods.describe_deployment("first", 4))
    cluster.wait_for_pods(4)
    cluster.kubectl("delete", "deployment", "first")
    cluster.wait_for_pods(0)
    known = set(read_network_times(cluster))
    asked = len(list_agents_requests(cluster))
    cluster.apply(pods.describe_deployment("web", REPLICAS))
    cluster.wait_for_pods(REPLICAS)
    times = read_network_times(cluster)
    samples[f"{name} network ms"] = [times[one] for one in times if one not in known]
    samples[f"{name} requests"] = [len(list_agents_requests(cluster)) - asked]
    cluster.kubectl("delete", "deployment", "web")
    cluster.wait_for_pods(0)
    cluster.kubectl("cordon", "node2")
    for _ in range(crowds):
        begin = time.monotonic()
        cluster.apply(pods.describe_deployment("crowd", CROWD))
        cluster.wait_for_pods(CROWD)
        samples.setdefault(f"{name} up s", []).append(time.monotonic() - begin)
        begin = time.monotonic()
        cluster.kubectl("delete", "deployment", "crowd")
        cluster.wait_for_pods(0)
        samples.setdefault(f"{name} down s", []).append(time.monotonic() - begin)


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


def list_agents_requests(cluster: Cluster) -> Sequence[Mapping[str, object]]:
    """List what agents asked the API server for; a watch counts when it begins."""
    events = cluster.control.api.read_audit(AGENT)
    return [event for event in events if event["stage"] == "ResponseComplete"]


def summarise(samples: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Compute and print the table."""
    summary: dict[str, dict[str, float]] = {}
    print(f"\n{'':34}{'n':>4}{'p50':>9}{'p90':>9}")
    for name, series in samples.items():
        p50, p90 = quantile(series, 0.5), quantile(series, 0.9)
        print(f"{name:34}{len(series):4}{p50:9.2f}{p90:9.2f}")
        summary[name] = {"p50": round(p50, 3), "p90": round(p90, 3)}
    for what in ("network ms", "up s", "down s"):
        if {f"podwire {what}", f"ptp {what}"} <= set(summary):
            ours, theirs = summary[f"podwire {what}"], summary[f"ptp {what}"]
            ratios = {one: round(ours[one] / theirs[one], 3) for one in ours}
            print(f"{what}: podwire / ptp, p50 {ratios['p50']}, p90 {ratios['p90']}")
            summary[f"ratio {what}"] = ratios
    return summary


if __name__ == "__main__":
    main()
