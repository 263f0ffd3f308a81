"""The demo's part about services: one address for pods of two nodes, judged by who answers, while back ends go.

Called by `lab.show.demo`, without Kubernetes: a Service that chooses pods by their labels.
"""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from podwire.lab import traffic
from podwire.lab.show.background import Background, going_on, wait_until
from podwire.lab.show.policy import Add, run_podwire
from podwire.lab.state import Pod

ADDRESSES: Final = ("10.96.0.10", "fd96::10")
_PORT: Final = 80
_SERVICE: Final = """\
apiVersion: v1
kind: Service
metadata: {name: shop, namespace: default}
spec:
  clusterIPs: [10.96.0.10, "fd96::10"]
  selector: {part: shop}
  ports: [{port: 80, protocol: TCP}]
"""
_ONLY_TO: Final = """\
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: client-only-to, namespace: default}
spec:
  podSelector: {matchLabels: {app: client}}
  policyTypes: [Egress]
  egress:
  - to: [{podSelector: {matchLabels: {part: PART}}}]
"""
_ASKED: Final = 24
"""For each address. That one of two back ends answers none of twice as many does not happen."""
_EVERY_S: Final = 0.01
_DEADLINE_S: Final = 60.0


@dataclass
class _Asker(Background):
    """Asks the service all the time, each time by a connection of its own; counts who answered and what was lost."""

    pod: Pod
    answers: Counter[str] = field(default_factory=Counter)
    lost: int = 0

    def run(self) -> None:
        while not self.stop.wait(_EVERY_S):
            said = traffic.connect(self.pod.netns, ADDRESSES[0], _PORT)
            if said.ok:
                self.answers[_who(said)] += 1
            else:
                self.lost += 1


def show_service(lab: str, pods: dict[str, Pod], add: Add) -> None:
    """Apply a Service, ask it, let a policy name the pods behind it, and take a back end away while it is asked."""
    run_podwire(lab, "apply", "-f", "-", stdin=_SERVICE)
    for node in {pod.node for pod in pods.values()}:
        _wait_for(lambda node=node: _count_back_ends(lab, node) == 2 * len(ADDRESSES))  # type: ignore[misc]
    _show_answers("a service leads to pods of both nodes", pods["client"], add)
    run_podwire(lab, "apply", "-f", "-", stdin=_ONLY_TO.replace("PART", "elsewhere"))
    _show_cut(pods["client"], add)
    run_podwire(lab, "apply", "-f", "-", stdin=_ONLY_TO.replace("PART", "shop"))
    _show_answers("a policy that names the pods behind it allows it", pods["client"], add)
    _show_trace(lab, add)
    run_podwire(lab, "delete", "networkpolicy", "client-only-to")
    _show_back_end_going(lab, pods, add)
    run_podwire(lab, "delete", "service", "shop")


def _who(said: traffic.Attempt) -> str:
    return said.answer.split()[0]


def _count_back_ends(lab: str, node: str) -> int:
    """Count who a node says answers at all addresses of the service."""
    said = run_podwire(
        lab, "service", "get", "default/shop", "--node", node, "-o", "json", may_fail=True
    )
    return sum(len(port["backEnds"]) for port in json.loads(said)["ports"]) if said else 0


def _show_answers(what: str, client: Pod, add: Add) -> None:
    said = [
        traffic.connect(client.netns, address, _PORT)
        for address in ADDRESSES
        for _ in range(_ASKED)
    ]
    counted = Counter(_who(answer) if answer.ok else "nobody" for answer in said)
    add(what, set(counted) == {"default/web", "default/remote"}, _list(counted))


def _show_cut(client: Pod, add: Add) -> None:
    said = [traffic.connect(client.netns, address, _PORT) for address in ADDRESSES]
    answers = sum(answer.ok for answer in said)
    add("a policy that names other pods cuts it", not answers, f"{answers} of {len(said)} answered")


def _list(counted: Counter[str]) -> str:
    return ", ".join(
        f"{name.partition('/')[2] or name} {counted[name]}" for name in sorted(counted)
    )


def _show_trace(lab: str, add: Add) -> None:
    said = run_podwire(
        lab,
        *("policy", "trace", "--from", "pod:default/client", "--to", "service:default/shop"),
        *("--port", "80/tcp", "--node", "node1", "-o", "json"),
    )
    verdict = str(json.loads(said)["verdict"])
    add("the trace asks about each of them", verdict == "allowed", verdict)


def _show_back_end_going(lab: str, pods: dict[str, Pod], add: Add) -> None:
    asker = _Asker(pods["client"])
    with going_on(asker):
        _wait_for(lambda: len(asker.answers) == 2)
        remote = pods["remote"]
        run_podwire(lab, "endpoint", "label", remote.full_name, "part-", "--node", remote.node)
        _wait_for(lambda: _count_back_ends(lab, pods["client"].node) == len(ADDRESSES))
        before = asker.answers["default/web"]
        _wait_for(lambda: asker.answers["default/web"] >= before + _ASKED)
    asked = asker.answers.total() + asker.lost
    add("a back end goes, and no question is lost", not asker.lost, f"{asker.lost} of {asked} lost")


def _wait_for(holds: Callable[[], bool]) -> None:
    wait_until(holds, _DEADLINE_S, _EVERY_S)
