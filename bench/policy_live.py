"""From the store's commit to the programs' rows: a change of policy on a real node, agent, store and maps included.

A node with 250 pods of 25 identities, 5,000 identities in all and 2,000 policies. Each change selects the 10 pods of
one identity, and its peers are 100 identities. The clock starts when the store has committed the policy, and stops
when all 10 rows in the kernel's map carry a new policy revision. Also: memory of the agent, and time from its start
to its first answer, at this size.
"""

import argparse
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from bench import results_file
from bench.agent import agent_pid, resident_mb, restart_ms
from bench.contestants import one_node_with_store, open_node_map, pod_namespace
from podwire.control.documents.apply import apply_documents
from podwire.control.identity.key import IdentityKey
from podwire.control.identity.known import make_object
from podwire.datapath import abi
from podwire.kernel import bpf, netns
from podwire.lab.pod import call_launcher, network_config
from podwire.lab.topology import NodePlan
from podwire.model.labels import namespace_labels
from podwire.model.store import Store

PODS_OF_EACH = 10
PEERS = 100
DEADLINE_S = 10.0
SETTLE_S = 120.0


def make_identities(store: Store, count: int) -> None:
    """Write identities as other nodes would; the first 100 are the peers of the change."""
    with store.together():
        for index in range(count):
            team = "peer" if index < PEERS else f"team{index % 50}"
            labels = sorted(
                (f"cni:app=other{index}", f"cni:team={team}", *namespace_labels("default", {}))
            )
            store.create(make_object(100_000 + index, IdentityKey(tuple(labels))))


def make_policies(count: int) -> list[dict[str, object]]:
    """Give policies of which a hundred select pods of this node."""
    return [
        policy(
            f"p{index}",
            f"g{index % 25}" if index < 100 else f"other{index}",
            f"team{index % 50}",
            [80],
        )
        for index in range(count)
    ]


def policy(name: str, subject: str, team: str, ports: Sequence[int]) -> dict[str, object]:
    """Give a NetworkPolicy: pods of `subject` take these ports from pods of `team`."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "podSelector": {"matchLabels": {"app": subject}},
            "ingress": [
                {
                    "from": [{"podSelector": {"matchLabels": {"team": team}}}],
                    "ports": [{"port": port, "protocol": "TCP"} for port in ports],
                }
            ],
        },
    }


class Rows:
    """The endpoints' rows in the kernel."""

    def __init__(self, node: NodePlan) -> None:
        self._map = open_node_map(node, "pw_config")

    def revisions(self, identity: int) -> dict[bytes, int]:
        """Give the policy revision of each row with this identity."""
        rows = ((key, abi.ConfigValue.unpack(raw)) for key, raw in self._map.items(bpf.Update.LOCK))
        return {key: row.policy_revision for key, row in rows if row.identity == identity}

    def wait(self, before: dict[bytes, int]) -> None:
        """Spin until every one of these rows has another revision."""
        deadline = time.monotonic() + DEADLINE_S
        for key, revision in before.items():
            while True:
                raw = self._map.lookup(key, bpf.Update.LOCK)
                if raw is not None and abi.ConfigValue.unpack(raw).policy_revision != revision:
                    break
                if time.monotonic() > deadline:
                    raise RuntimeError("the change did not reach the kernel")

    def identities(self) -> dict[int, int]:
        """Give how many rows each identity has."""
        found: dict[int, int] = {}
        for _, raw in self._map.items(bpf.Update.LOCK):
            identity = abi.ConfigValue.unpack(raw).identity
            found[identity] = found.get(identity, 0) + 1
        return found


def changes(rounds: int) -> Iterator[tuple[str, list[int]]]:
    """Give kinds of change and the ports after each: a rule more (in place), and other ports (another slot)."""
    for index in range(rounds):
        port = 1000 + 2 * index
        yield "other ports", [port]
        yield "a port more", [port, port + 1]


def attach_pods(node: NodePlan, count: int, stack: ExitStack) -> None:
    """Attach pods by the launcher, ten of each identity."""
    for index in range(count):
        name = stack.enter_context(pod_namespace())
        call_launcher(
            "ADD",
            config=network_config(node, {"app": f"g{index % (count // PODS_OF_EACH)}"}),
            container_id=uuid.uuid4().hex,
            netns_path=netns.named_path(name),
            pod=("default", f"pod{index}"),
        )


def subject_identity(store: Store) -> int:
    """Find the identity of the pods that the change selects."""
    found, _ = store.list("identities")
    for stored in found:
        if "cni:app=g0" in stored.document["spec"]["labels"]:
            return int(stored.key.name)
    raise RuntimeError("no identity of app=g0")


def settle(node: NodePlan, store: Store, rows: Rows, identity: int) -> None:
    """Wait until the agent has taken in what was written in bulk: the next change is seen at once."""
    for _ in range(3):
        before = rows.revisions(identity)
        apply_documents(
            store, [policy("settle", "g0", "peer", [int(time.monotonic()) % 60000 + 1])]
        )
        deadline = time.monotonic() + SETTLE_S
        while rows.revisions(identity) == before and time.monotonic() < deadline:
            time.sleep(0.05)


def measure(store: Store, rows: Rows, identity: int, rounds: int) -> dict[str, list[float]]:
    """Give milliseconds from the commit to the last row, by kind of change."""
    samples: dict[str, list[float]] = {}
    for kind, ports in changes(rounds):
        before = rows.revisions(identity)
        if len(before) != PODS_OF_EACH:
            raise RuntimeError(f"{len(before)} rows have identity {identity}")
        apply_documents(store, [policy("measured", "g0", "peer", ports)])
        begin_ns = time.perf_counter_ns()
        rows.wait(before)
        samples.setdefault(kind, []).append((time.perf_counter_ns() - begin_ns) / 1e6)
        # The agent deletes the slot before this one a moment later; a change now would meet that.
        time.sleep(0.15)
    return samples


def main() -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, default=250)
    parser.add_argument("--identities", type=int, default=5000)
    parser.add_argument("--policies", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=100)
    arguments = parser.parse_args()
    raw: dict[str, list[float]] = {}
    with ExitStack() as stack:
        node, store = stack.enter_context(one_node_with_store())
        attach_pods(node, arguments.pods, stack)
        make_identities(store, arguments.identities)
        apply_documents(store, make_policies(arguments.policies))
        rows, identity = Rows(node), subject_identity(store)
        settle(node, store, rows, identity)
        raw |= measure(store, rows, identity, arguments.rounds)
        raw["agent, MB"] = [resident_mb(agent_pid())]
        raw["start to answer, ms"] = [restart_ms(node) for _ in range(5)]
        raw["agent after a restart, MB"] = [resident_mb(agent_pid())]
    sizes = {name: getattr(arguments, name) for name in ("pods", "identities", "policies")}
    results_file.report("policy_live", sizes, raw)


if __name__ == "__main__":
    main()
