"""What a change of policy costs in the engine alone, and how that grows with identities and policies on the node.

The datapath only counts: kernel time is measured elsewhere. The change is the issue's: one policy whose subject is one
identity with 10 endpoints and whose peers are 100 identities. `grow` adds a rule (in place), `swap` changes a port of
all peers (a new slot), `identity` lets one identity come that the policies of its namespace select.
"""

import argparse
import gc
import time
import tracemalloc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from bench import results_file
from bench.stats import median_of
from podwire.control.policy.engine import PolicyEngine
from podwire.control.policy.labels_match import make_selector
from podwire.control.policy.resolve.rule_numbers import Numbers
from podwire.control.policy.resolve.subject import PolicyValues
from podwire.control.policy.rule import (
    TCP,
    LabelSelector,
    PolicyId,
    PolicyRules,
    PortMatch,
    Requirement,
    Rule,
)
from podwire.model.endpoint import EndpointRecord, IPNetwork
from podwire.model.identity import IdentityFacts
from podwire.model.ids import EndpointId
from podwire.model.interfaces import EndpointConfig
from podwire.model.labels import NAMESPACE_KEY, Operator, namespace_labels
from podwire.model.policy import Direction, PolicyKey, PolicyRows, Verdict
from tests.fakes.records import make_record

NAMESPACE_SIZE: Final = 100
"""Identities in a namespace: what "all of this namespace" selects."""
ENDPOINTS: Final = 250
LOCALS: Final = 25
FIRST: Final = 65536


class Sink:
    """A datapath that counts what it is told."""

    def __init__(self) -> None:
        self.written = 0

    def write_slot(self, slot: int, rows: PolicyRows) -> None:
        self.written += len(rows)

    def change_slot(self, slot: int, put: PolicyRows, remove: Iterable[PolicyKey]) -> None:
        self.written += len(put) + sum(1 for _ in remove)

    def remove_slots(self, slots: Iterable[int]) -> None: ...

    def read_slot(self, slot: int) -> PolicyRows:
        return {}

    def list_slots(self) -> Sequence[int]:
        return []

    def write_cidrs(self, identities: Mapping[IPNetwork, int]) -> None: ...

    def forget_hits(self, keep: Iterable[int]) -> None: ...

    def update_endpoints(self, rows: Iterable[tuple[EndpointRecord, EndpointConfig]]) -> None:
        self.written += sum(1 for _ in rows)


def make_facts(number: int) -> IdentityFacts:
    """Give an identity as clusters have them: a namespace with its labels, and some labels of the pod."""
    index = number - FIRST
    space = f"ns{index // NAMESPACE_SIZE}"
    labels = [
        *namespace_labels(space, {"team": f"team{index // NAMESPACE_SIZE % 7}"}),
        f"k8s:app=app{index % NAMESPACE_SIZE}",
        f"k8s:tier=tier{index % 3}",
        "cni:podwire.io/network=pods",
    ]
    return IdentityFacts(number, tuple(sorted(labels)))


def select(space: str, **labels: str) -> LabelSelector:
    """Give a selector of pods of a namespace, as NetworkPolicy's are."""
    return make_selector(
        Requirement("k8s", NAMESPACE_KEY, Operator.IN, (space,)),
        *(Requirement("k8s", key, Operator.IN, (value,)) for key, value in labels.items()),
    )


def make_policy(
    policy: PolicyId, subject: LabelSelector, peers: LabelSelector, *ports: int
) -> tuple[PolicyRules, ...]:
    """Give a policy with one ingress rule for each port."""
    rules = tuple(
        Rule(
            Direction.INGRESS,
            Verdict.ALLOW,
            (peers,),
            (PortMatch(TCP, port, port),),
            f"ingress[{index}]",
        )
        for index, port in enumerate(ports)
    )
    return (PolicyRules(policy, subject, frozenset({Direction.INGRESS}), rules),)


def make_node(identities: int, policies: int) -> PolicyEngine:
    """Give an engine as it is on a node that has run for a while."""
    records = {EndpointId(n): make_record(n) for n in range(1, ENDPOINTS + 1)}
    configs = dict.fromkeys(records, EndpointConfig())

    def rows(
        endpoints: Sequence[EndpointId], values: PolicyValues
    ) -> list[tuple[EndpointRecord, EndpointConfig]]:
        return [(records[endpoint], values.fill(configs[endpoint])) for endpoint in endpoints]

    engine = PolicyEngine(
        datapath=Sink(), rows=rows, numbers=Numbers(), remember=lambda _numbers: None, cidrs={}
    )
    for number in range(FIRST, FIRST + identities):
        engine.identity_added(make_facts(number))
    spaces = max(1, identities // NAMESPACE_SIZE)
    for index in range(policies):
        space = f"ns{index % spaces}"
        subject = select(space, app=f"app{index // spaces % NAMESPACE_SIZE}")
        peers = select(space, tier=f"tier{index % 3}")
        policy = PolicyId("NetworkPolicy", space, f"p{index}")
        engine.set_policy(policy, make_policy(policy, subject, peers, 80))
    engine.apply()
    local = min(LOCALS, identities)
    for endpoint in records:
        number = FIRST + (endpoint % local) * identities // local
        engine.attach(endpoint, number)
        engine.realized(endpoint)
    return engine


def measure_changes(engine: PolicyEngine, identities: int, rounds: int) -> dict[str, list[float]]:
    """Give the milliseconds of each kind of change."""
    policy = PolicyId("NetworkPolicy", "ns0", "measured")
    subject = select("ns0", app="app0")
    peers = select("ns0")
    samples: dict[str, list[float]] = {"first": [], "grow": [], "swap": [], "identity": []}

    def timed(name: str, change: Callable[[], None]) -> None:
        change()
        begin = time.perf_counter_ns()
        outcome = engine.apply()
        samples[name].append((time.perf_counter_ns() - begin) / 1e6)
        assert not outcome.failed
        engine.collect()

    def put(*ports: int) -> Callable[[], None]:
        return lambda: engine.set_policy(policy, make_policy(policy, subject, peers, *ports))

    for _ in range(rounds):
        timed("first", put(8080))
        timed("grow", put(8080, 9090))
        timed("swap", put(8081, 9090))
        newcomer = make_facts(FIRST + NAMESPACE_SIZE - 1)
        engine.identity_removed(newcomer.number)
        engine.apply()
        timed("identity", lambda facts=newcomer: engine.identity_added(facts))  # type: ignore[misc]
        engine.remove_policy(policy)
        engine.apply()
        engine.collect()
    return samples


def measure_memory(identities: int, policies: int) -> float:
    """Give the megabytes that an engine of this size holds."""
    gc.collect()
    tracemalloc.start()
    engine = make_node(identities, policies)
    gc.collect()
    held, _peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert engine.generation
    return held / 1e6


def main() -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    sizes = [(100, 100), (1000, 1000), (5000, 2000), (10000, 10000)]
    summary: dict[str, object] = {}
    raw: dict[str, list[float]] = {}
    print(f"{'identities':>10} {'policies':>8}  change     median (95 % interval) ms, worst")
    for identities, policies in sizes:
        begin = time.perf_counter()
        engine = make_node(identities, policies)
        built_s = time.perf_counter() - begin
        gc.collect()
        gc.freeze()
        for name, series in measure_changes(engine, identities, arguments.rounds).items():
            found = median_of(series)
            print(f"{identities:10} {policies:8}  {name:10} {found!s:28} {max(series):.3f}")
            key = f"{name} {identities}/{policies}"
            summary[key] = {**results_file.interval(found), "worst": round(max(series), 3)}
            raw[key] = series
        memory = measure_memory(identities, policies)
        print(f"{identities:10} {policies:8}  built in {built_s:.2f} s, {memory:.1f} MB")
        summary[f"node {identities}/{policies}"] = {"built_s": built_s, "megabytes": memory}
    if not arguments.no_write:
        results_file.write("policy", summary, raw)


if __name__ == "__main__":
    main()
