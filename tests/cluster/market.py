"""Services of every kind in a real cluster, a pod that asks them, and what the oracle says of each question.

Who answers names itself, and who drops says where the packet was going. So each question has one back end that it was
for, and the oracle is asked about that one; a refusal is right where the service has nobody. Nothing is judged by
silence.
"""

import ipaddress
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from podwire.control.policy.oracle import Party, Question, evaluate_flow
from podwire.control.policy.rule import TCP, UDP
from podwire.control.policy.rules_k8s import decode_network_policy
from podwire.kernel import netns
from podwire.lab.kubernetes import pods
from podwire.lab.kubernetes.api_server import SERVICE_ADDRESS
from podwire.lab.kubernetes.cluster import Cluster
from podwire.lab.kubernetes.daemon import Daemon, Place
from podwire.model.identity import RESERVED_LABELS, IdentityFacts, NamedPort, Reserved
from podwire.model.labels import namespace_labels, sort_labels
from podwire.model.policy import Direction
from tests.cluster.agents import Agents, ask
from tests.cluster.asking import Asker, Fate, Outcome, Target
from tests.cluster.flows import can_connect
from tests.waiting import wait_for

NAMESPACE: Final = "market"
PORT: Final = 80
"""Of each service."""
CLOSED: Final = 81
"""No port of any service."""
PROTOCOLS: Final = {"tcp": TCP, "udp": UDP}
FIRST, SECOND = 8080, 8081
NAMES: Final = {"tcp": "web-tcp", "udp": "web-udp"}


@dataclass(frozen=True)
class Stall:
    """A pod that serves both ports, TCP and UDP, and calls one of them `web-tcp` and `web-udp`."""

    name: str
    app: str
    node: str
    named: int = FIRST
    of_node: bool = False
    """It has the network of its node."""


STALLS: Final = (
    Stall("client", "client", "node1"),
    Stall("near", "web", "node1"),
    Stall("far", "web", "node2", named=SECOND),
    Stall("node-here", "node-here", "node1", of_node=True),
    Stall("node-there", "node-there", "node2", of_node=True),
)
API: Final = "api"
"""Who answers behind the service `kubernetes`; it is no pod, and outside of the cluster's network."""
_API_SAYS: Final = "Client sent an HTTP request to an HTTPS server."


@dataclass(frozen=True)
class Offer:
    """A service, and who may answer for it when the client asks."""

    name: str
    selector: Mapping[str, str]
    back_ends: frozenset[str]
    is_named: bool = False
    """The target port is a name, and means other numbers at other pods."""
    more: Mapping[str, Any] = field(default_factory=dict)


def _offer(
    name: str, selector: Mapping[str, str], *back_ends: str, is_named: bool = False, **more: object
) -> Offer:
    return Offer(name, selector, frozenset(back_ends), is_named, more)


EXTERNAL: Final = ("203.0.113.80", "2001:db8:113::80")
OFFERS: Final = (
    _offer("local", {"name": "near"}, "near"),
    _offer("remote", {"name": "far"}, "far"),
    _offer("named", {"app": "web"}, "near", "far", is_named=True),
    _offer("inside", {"app": "web"}, "near", internalTrafficPolicy="Local"),
    _offer("elsewhere", {"name": "far"}, internalTrafficPolicy="Local"),
    _offer("itself", {"app": "client"}, "client"),
    _offer("outside", {"name": "far"}, "far", externalIPs=EXTERNAL),
    _offer("sticky", {"app": "web"}, "near", "far", is_named=True, sessionAffinity="ClientIP"),
    _offer("nobody", {"app": "nobody"}),
    _offer("node-here", {"app": "node-here"}, "node-here"),
    _offer("node-there", {"app": "node-there"}, "node-there"),
)
LATE: Final = _offer("late", {"name": "far"}, "far")
"""Made when others have filled the room."""


class Market:
    """All that is there. `close` takes nothing away: `open_market` does."""

    def __init__(self, cluster: Cluster, stack: ExitStack) -> None:
        self.cluster = cluster
        self.agents = Agents(cluster)
        self.offers = list(OFFERS)
        self.pods = _start(cluster)
        self.addresses = {
            name: {_family(pod_ip["ip"]): str(pod_ip["ip"]) for pod_ip in pod["status"]["podIPs"]}
            for name, pod in self.pods.items()
        }
        self.networks = {name: pods.network_of(cluster, pod) for name, pod in self.pods.items()}
        for stall in STALLS:
            stack.callback(serve(cluster, stall.name, stall.node, self.networks[stall.name]).stop)
        self.services = {offer.name: _create(cluster, offer) for offer in self.offers}
        self._fd = stack.enter_context(netns.open_namespace(self.networks["client"]))
        self.wait_for_back_ends()

    def add(self, offer: Offer) -> None:
        """Have one more service, and wait until it answers: of very many an agent shows only some."""
        self.services[offer.name] = _create(self.cluster, offer)
        self.offers.append(offer)
        for address in self.cluster_ips(offer.name).values():
            wait_for(
                lambda address=address: can_connect(self.networks["client"], address, PORT),  # type: ignore[misc]
                f"an answer of {address}",
            )

    def _addresses_of(self, offer: Offer) -> list[str]:
        """Give all addresses by which a service is asked."""
        return [*self.cluster_ips(offer.name).values(), *offer.more.get("externalIPs", ())]

    def cluster_ips(self, name: str) -> Mapping[str, str]:
        """Give the addresses of a service, by family."""
        return {
            _family(cluster_ip): cluster_ip
            for cluster_ip in self.services[name]["spec"]["clusterIPs"]
        }

    def wait_for_back_ends(self) -> None:
        """Wait until the programs of the client's node have what the table says."""
        path = self.agents.sockets[0]
        wanted = {
            (address, PORT, protocol): {
                f"{self.addresses[name][family]} {_target_port(offer, name)}"
                for name in offer.back_ends
            }
            for offer in self.offers
            for address in self._addresses_of(offer)
            for family in [_family(address)]
            for protocol in PROTOCOLS
        }

        def has() -> bool:
            shown = ask(path, "/map/service")
            assert not shown["truncated"]
            found = {
                (row["address"], row["port"], row["protocol"]): set(row["back_ends"])
                for row in shown["rows"]
            }
            return all(found.get(key) == back_ends for key, back_ends in wanted.items())

        wait_for(has, f"{wanted}")

    def enforce(self, policies: Sequence[Mapping[str, Any]]) -> None:
        """Have exactly these policies in force."""
        mine = {family["4"] for family in self.addresses.values()}
        self.agents.enforce(policies, namespaces=[NAMESPACE], addresses=mine)

    def play(self, policies: Sequence[Mapping[str, Any]]) -> list[str]:
        """Have these policies in force alone, ask every service, and name what is not as the oracle says."""
        self.enforce(policies)
        rules = [decode_network_policy(policy) for policy in policies]
        expected = dict(self._list_questions())
        with Asker(self._fd.fileno(), self.agents.sockets) as asker:
            outcomes = asker.ask(expected)
        faults = []
        for target, outcome in outcomes.items():
            if fault := self._find_fault(rules, target, expected[target], outcome):
                faults.append(f"{self._name_of(target)}: {fault}: {outcome}")
        return faults

    def ask_again(self, name: str, times: int) -> Mapping[str, set[str]]:
        """Ask a service so often by each of its addresses, one question after the other; gives who answers there."""
        answers: dict[str, set[str]] = {}
        for address in self.cluster_ips(name).values():
            for _ in range(times):
                with Asker(self._fd.fileno(), self.agents.sockets) as asker:
                    (outcome,) = asker.ask([Target("tcp", address, PORT)]).values()
                answers.setdefault(address, set()).add(self._who(outcome))
        return answers

    def _list_questions(self) -> Iterator[tuple[Target, frozenset[str]]]:
        for offer in self.offers:
            for address in self._addresses_of(offer):
                for protocol in PROTOCOLS:
                    yield Target(protocol, address, PORT), offer.back_ends
        for address in self.cluster_ips("local").values():
            for protocol in PROTOCOLS:
                yield Target(protocol, address, CLOSED), frozenset()
        yield Target("tcp", SERVICE_ADDRESS, 443), frozenset({API})

    def _find_fault(
        self, rules: Sequence[Any], target: Target, back_ends: frozenset[str], outcome: Outcome
    ) -> str:
        if not back_ends:
            return "" if outcome.fate is Fate.REFUSED else "it should be refused"
        name = self._who(outcome)
        if outcome.fate not in (Fate.ANSWERED, Fate.DENIED):
            return f"one of {sorted(back_ends)} should answer or the oracle deny it"
        if name not in back_ends:
            return f"it is for one of {sorted(back_ends)}"
        family = _family(target.address)
        question = Question(
            self._party("client", family),
            self._party(name, family),
            Direction.EGRESS,
            PROTOCOLS[target.protocol],
            self._port_of(target, name),
        )
        decided = evaluate_flow(rules, [], question)
        if decided.passes:
            return "" if outcome.fate is Fate.ANSWERED else "the oracle allows it"
        if outcome.fate is Fate.ANSWERED:
            return "the oracle denies it"
        denial = next(
            part for part in (decided.egress, decided.ingress) if part and not part.passes
        )
        meant = {(rule.policy.namespace, rule.policy.name) for rule in denial.rules}
        return "" if set(outcome.policies) <= meant else f"one of {meant} denies it"

    def _who(self, outcome: Outcome) -> str:
        if outcome.fate is Fate.DENIED:
            known = {
                address: name for name, ones in self.addresses.items() for address in ones.values()
            }
            known[self.cluster.control.api.shape.address] = API
            return known.get(outcome.goal, outcome.goal)
        return API if _API_SAYS in outcome.answer else outcome.answer.partition(" ")[0]

    def _party(self, name: str, family: str) -> Party:
        if name == API:
            world = IdentityFacts(Reserved.WORLD, RESERVED_LABELS[Reserved.WORLD])
            return Party(world, ipaddress.ip_address(self.cluster.control.api.shape.address))
        stall = next(one for one in STALLS if one.name == name)
        address = ipaddress.ip_address(self.addresses[name][family])
        if stall.of_node:
            here = stall.node == STALLS[0].node
            number = Reserved.HOST if here else Reserved.REMOTE_NODE
            return Party(IdentityFacts(number, RESERVED_LABELS[number]), address)
        labels = (f"k8s:{key}={value}" for key, value in _labels(stall).items())
        facts = IdentityFacts(
            70_000 + STALLS.index(stall),
            sort_labels([*labels, *namespace_labels(NAMESPACE, {})]),
            tuple(
                NamedPort(NAMES[protocol], number, stall.named)
                for protocol, number in PROTOCOLS.items()
            ),
        )
        return Party(facts, address, endpoint=True)

    def _port_of(self, target: Target, name: str) -> int:
        if name == API:
            return self.cluster.control.api.port
        return _target_port(self._offer_of(target), name)

    def _offer_of(self, target: Target) -> Offer:
        return next(offer for offer in self.offers if target.address in self._addresses_of(offer))

    def _name_of(self, target: Target) -> str:
        name = "kubernetes" if target.address == SERVICE_ADDRESS else self._offer_of(target).name
        return f"{name} {target}"


def _target_port(offer: Offer, name: str) -> int:
    stall = next(one for one in STALLS if one.name == name)
    return stall.named if offer.is_named else FIRST


def _family(address: str) -> str:
    return "6" if ":" in address else "4"


def _labels(stall: Stall) -> dict[str, str]:
    return {"app": stall.app, "name": stall.name}


def _start(cluster: Cluster) -> Mapping[str, Mapping[str, Any]]:
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    for stall in STALLS:
        document = pods.describe(
            stall.name,
            namespace=NAMESPACE,
            node=stall.node,
            labels=_labels(stall),
            command=pods.IDLE,
        )
        document["spec"]["hostNetwork"] = stall.of_node
        (container,) = document["spec"]["containers"]
        if not stall.of_node:  # there a port would be the node's
            container["ports"] = [
                {"name": name, "protocol": protocol.upper(), "containerPort": stall.named}
                for protocol, name in NAMES.items()
            ]
        cluster.client.create(f"/api/v1/namespaces/{NAMESPACE}/pods", document)
    found = cluster.wait_for_pods(len(STALLS), NAMESPACE)
    return {pod["metadata"]["name"]: pod for pod in found}


def serve(cluster: Cluster, name: str, node: str, network: str) -> Daemon:
    """Start a server that names itself, in a pod's network."""
    ports = [f"{port}/{protocol}" for port in (FIRST, SECOND) for protocol in PROTOCOLS]
    server = Daemon(
        f"server of {name}",
        [sys.executable, "-P", "-m", "podwire.lab.serve", name, node, *ports],
        cluster.directory / f"server-{name}.log",
        place=Place(network=network),
    )
    server.log.unlink(missing_ok=True)
    server.start(lambda: server.read_tail().endswith("ready"))
    return server


def _create(cluster: Cluster, offer: Offer) -> Mapping[str, Any]:
    document = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": offer.name},
        "spec": {
            "selector": dict(offer.selector),
            "ipFamilyPolicy": "PreferDualStack",
            "ports": [
                {
                    "name": protocol,
                    "protocol": protocol.upper(),
                    "port": PORT,
                    "targetPort": NAMES[protocol] if offer.is_named else FIRST,
                }
                for protocol in PROTOCOLS
            ],
            **offer.more,
        },
    }
    path = f"/api/v1/namespaces/{NAMESPACE}/services"
    made: Mapping[str, Any] = cluster.client.create(path, document)
    return made


@contextmanager
def open_market(cluster: Cluster) -> Iterator[Market]:
    """Start all of it, and take it away at the end."""
    try:
        with ExitStack() as stack:
            yield Market(cluster, stack)
    finally:
        cluster.kubectl("delete", "pod", "-n", NAMESPACE, "--all", "--now")
        cluster.kubectl("delete", "namespace", NAMESPACE)
