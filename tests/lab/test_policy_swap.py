"""Policies change while packets flow: nothing allowed is lost, nothing denied passes, and what is withdrawn stops.

The node's own counters are the judge beside the sockets: as many packets were dropped by policy as denied ones were
sent, not one more.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from random import Random
from typing import Any, Final

import pytest

from podwire.datapath.abi import DropReason
from tests.lab.hooks import open_hooks
from tests.lab.policy_rig import Scene, open_scene
from tests.lab.talk import Datagrams, Load, Talk, run_talks, run_until_all_flow
from tests.policy_cases import PODS

pytestmark = pytest.mark.lab

CHANGES_PER_S: Final = 50
CHANGES_PER_RELABELLING: Final = 20
RESTART_LOAD_S: Final = 1.5
LOAD_S, LOAD_FULL_S = 10, 60
CUT_S: Final = 1.0
"""So long after a change its flows stop, ordinarily: the machine may stand still for longer."""
CUT_DEADLINE_S: Final = 15.0
WATCHED_S: Final = 1.2
"""For how long nothing arrives any more in a flow that is cut."""

Document = dict[str, Any]


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with open_scene() as made:
        yield made


# Changes under load

CLIENTS: Final = ["198.51.100.0/24", "2001:db8:51::/48"]
SERVER: Final = ["203.0.113.20/32", "2001:db8:113::20/128"]
POD_B: Final = [PODS["blue/b"].ipv4 + "/32", PODS["blue/b"].ipv6 + "/128"]


def load_kinds() -> list[Datagrams]:
    """Give what is sent: to and from pod a, through its ingress and its egress, old flows and new ones."""
    allowed = [
        ("blue/b", "blue/a", 5000, 1000, False),
        ("blue/b", "blue/a", 5000, 100, True),
        ("client", "blue/a", 5002, 100, False),
        ("blue/a", "server", 5001, 100, False),
        ("blue/a", "server", 5001, 50, True),
    ]
    denied = [
        ("blue/c", "blue/a", 5000, 100, False),
        ("blue/c", "blue/a", 5000, 50, True),
        ("blue/b", "blue/a", 6000, 100, False),
        ("client", "blue/a", 6002, 100, False),
        ("blue/a", "server", 6001, 100, False),
        ("blue/a", "server", 6001, 50, True),
    ]
    return [
        Datagrams(
            f"{source}>{target}:{port} IPv{family}{' fresh' if fresh else ''}",
            source,
            target,
            port,
            family,
            rate,
            is_allowed,
            fresh,
        )
        for is_allowed, flows in ((True, allowed), (False, denied))
        for source, target, port, rate, fresh in flows
        for family in (4, 6)
        if family == 4 or rate < 1000
    ]


def make_policy(kind: str, name: str, spec: Document) -> Document:
    version = "networking.k8s.io/v1" if kind == "NetworkPolicy" else "cilium.io/v2"
    metadata = {"name": name, "namespace": "blue"}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def k8s(name: str, ingress: list[Document], egress: list[Document] | None = None) -> Document:
    spec: Document = {"podSelector": {"matchLabels": {"app": "a"}}, "ingress": ingress}
    spec["policyTypes"] = ["Ingress"]
    if egress is not None:
        spec["policyTypes"], spec["egress"] = ["Ingress", "Egress"], egress
    return make_policy("NetworkPolicy", name, spec)


def blocks(cidrs: list[str]) -> list[Document]:
    return [{"ipBlock": {"cidr": cidr}} for cidr in cidrs]


def ports(protocol: str, first: int, last: int = 0) -> Document:
    return {"protocol": protocol, "port": first, **({"endPort": last} if last else {})}


CLOSED: Final = k8s("closed", [], [])
SHAPES: Final = (
    k8s(
        "shape",
        [
            {
                "from": [{"podSelector": {"matchLabels": {"app": "b"}}}],
                "ports": [ports("UDP", 5000), ports("TCP", 5003)],
            },
            {"from": blocks(CLIENTS), "ports": [ports("UDP", 5002)]},
        ],
        [{"to": blocks(SERVER), "ports": [ports("UDP", 5001)]}],
    ),
    k8s(
        "shape",
        [
            {
                "from": blocks([*POD_B, *CLIENTS]),
                "ports": [ports("UDP", 4990, 5011), ports("TCP", 1, 65535)],
            }
        ],
        [{"to": blocks(["203.0.113.0/24", "2001:db8::/32"]), "ports": [ports("UDP", 5000, 5999)]}],
    ),
    k8s(
        "shape",
        [
            {
                "from": [
                    {
                        "namespaceSelector": {"matchLabels": {"team": "blue"}},
                        "podSelector": {"matchLabels": {"tier": "back"}},
                    }
                ],
                "ports": [ports("UDP", 1, 5999), ports("TCP", 5000, 5008)],
            },
            {
                "from": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": ["10.244.0.0/16"]}}],
                "ports": [ports("UDP", 5002)],
            },
            {
                "from": [{"ipBlock": {"cidr": "::/0", "except": ["fd10:244::/32"]}}],
                "ports": [ports("UDP", 5002, 5003)],
            },
        ],
        [{"ports": [ports("UDP", 5001, 5002)]}],
    ),
)
"""Rules that allow the same flows of the load in very different entries."""
OPEN_SHAPE: Final = k8s("shape", [{"ports": [ports("UDP", 5000, 5002), ports("TCP", 5003)]}], [{}])
"""Allows more than it should: only beside DENIALS."""
DENIALS: Final = make_policy(
    "CiliumNetworkPolicy",
    "denials",
    {
        "endpointSelector": {"matchLabels": {"app": "a"}},
        "ingressDeny": [
            {"fromEndpoints": [{"matchLabels": {"app": "c"}}]},
            {"toPorts": [{"ports": [{"port": "6000", "endPort": 6002, "protocol": "UDP"}]}]},
        ],
        "egressDeny": [{"toPorts": [{"ports": [{"port": "6001", "protocol": "UDP"}]}]}],
    },
)
EXTRAS: Final = tuple(
    k8s(
        f"extra{number}",
        [
            {
                "from": [{"podSelector": {"matchLabels": {"tier": "front"}}}, *blocks([cidr])],
                "ports": [ports("TCP", 7000 + number, 7100 + number), ports("SCTP", number + 1)],
            }
        ],
    )
    for number, cidr in enumerate(("10.0.0.0/8", "192.168.0.0/16", "203.0.113.0/24", "fd00::/8"))
)


class Changer:
    """Changes one policy object at a time: an addition, a removal, or both at once; now and then who somebody is."""

    def __init__(self, scene: Scene, random: Random) -> None:
        self._scene, self._random = scene, random
        self._policies = {
            shape["metadata"]["name"]: shape for shape in (CLOSED, DENIALS, SHAPES[0])
        }
        self.count = 0
        scene.enforce(list(self._policies.values()))

    def run(self, duration_s: float) -> None:
        """Change something by the clock for a while."""
        begin_s = time.monotonic()
        for number in itertools.count(1):
            if number % CHANGES_PER_RELABELLING == 0:
                tier = self._random.choice(("tier=front", "tier=back", "tier-"))
                self._scene.relabel("default/c", tier, wait=False)
            else:
                self._change()
                self._scene.write(list(self._policies.values()))
            self.count += 1
            due_s = begin_s + number / CHANGES_PER_S
            if due_s > begin_s + duration_s:
                return
            time.sleep(max(0.0, due_s - time.monotonic()))

    def _change(self) -> None:
        kind = self._random.randrange(4)
        if kind == 0:
            self._toggle(self._random.choice(EXTRAS))
        elif kind == 1 and self._policies["shape"] is not OPEN_SHAPE:
            self._toggle(DENIALS)
        else:
            others = [shape for shape in SHAPES if shape is not self._policies["shape"]]
            if "denials" in self._policies:
                others.append(OPEN_SHAPE)
            self._policies["shape"] = self._random.choice(others)

    def _toggle(self, policy: Document) -> None:
        name = policy["metadata"]["name"]
        if self._policies.pop(name, None) is None:
            self._policies[name] = policy


@pytest.mark.timeout(180)
def test_changes_under_load_lose_nothing_allowed_and_pass_nothing_denied(
    scene: Scene, full: bool, seed: int
) -> None:
    changer = Changer(scene, Random(seed))
    run_under_load(scene, changer, lambda: changer.run(LOAD_FULL_S if full else LOAD_S))


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_restart_of_the_agent_under_load_changes_nothing(
    scene: Scene, end: str, seed: int
) -> None:
    changer = Changer(scene, Random(seed))

    def restart() -> None:
        changer.run(RESTART_LOAD_S)
        {"stop": scene.node.stop, "kill": scene.node.kill}[end]()
        scene.node.start()
        changer.run(RESTART_LOAD_S)

    run_under_load(scene, changer, restart)


def run_under_load(scene: Scene, changer: Changer, act: Callable[[], None]) -> None:
    """Do something while the load runs, and see that all of it met the verdicts that never changed."""
    kinds = load_kinds()
    with open_hooks(scene) as hooks, closing(Load(scene.places, kinds)) as load:
        for family in (4, 6):
            load.stream("blue/b", "blue/a", 5003, family)
        dropped_before = hooks.count_drops()
        revision = hooks.read_revision(scene.pods["blue/a"])
        with load.running():
            act()
        dropped = hooks.count_drops()
        in_force = hooks.read_revision(scene.pods["blue/a"]) - revision
    told = f"{changer.count} changes, {in_force} revisions, {load.echoed_bytes} bytes of TCP"
    print(f"{told}\n{load.describe()}")
    allowed = [load.tallies[kind.name] for kind in kinds if kind.is_allowed]
    denied = [load.tallies[kind.name] for kind in kinds if not kind.is_allowed]
    assert not any(tally.unanswered for tally in allowed), load.describe()
    assert not any(tally.arrived for tally in denied), load.describe()
    assert dropped[DropReason.POLICY] - dropped_before.get(DropReason.POLICY, 0) == sum(
        tally.sent for tally in denied
    ), "an allowed packet was dropped, or a denied one was not"
    assert load.echoed_bytes > 1_000_000
    assert in_force > changer.count / 10, told


# What is withdrawn stops

TO_A: Final = k8s("open", [{"from": [{"podSelector": {"matchLabels": {"app": "b"}}}]}])
FROM_B: Final = make_policy(
    "CiliumNetworkPolicy",
    "open",
    {
        "endpointSelector": {"matchLabels": {"app": "b"}},
        "egress": [{"toEndpoints": [{"matchLabels": {"app": "a"}}]}],
    },
)
CLOSED_A: Final = k8s("closed", [])
CLOSED_B: Final = make_policy(
    "CiliumNetworkPolicy",
    "closed",
    {"endpointSelector": {"matchLabels": {"app": "b"}}, "egress": [{}]},
)
cuts_s: Final[list[float]] = []
"""How long after each change of this run the last message came."""
SIDES: Final = {"ingress": (CLOSED_A, TO_A), "egress": (CLOSED_B, FROM_B)}
SENDERS: Final = {"both": ("client", "server"), "client": ("client",), "server": ("server",)}


@contextmanager
def opened(talks: Sequence[Talk]) -> Iterator[Sequence[Talk]]:
    """Close flows at the end."""
    with ExitStack() as stack:
        for talk in talks:
            stack.enter_context(talk)
        yield talks


def assert_stop(talks: Sequence[Talk], change: Callable[[], object]) -> None:
    """Make a change and see that soon nothing arrives any more; how soon is for the last test."""
    run_until_all_flow(talks)
    changed_s = time.monotonic()
    change()
    while True:
        watched_s = time.monotonic()
        run_talks(talks, WATCHED_S)
        late = {talk.name: talk.last_arrival_s() - changed_s for talk in talks}
        if all(late_s < watched_s - changed_s for late_s in late.values()):
            break
        assert watched_s - changed_s < CUT_DEADLINE_S, f"after the change came {late}"
    cuts_s.append(max(late.values()))


def talk_in_every_way(scene: Scene, client: str, server: str, protocol: str) -> list[Talk]:
    """Open a flow of each family in which both sides send, only the client, or only the server."""
    talks = []
    for family in (4, 6):
        for port, senders in enumerate(SENDERS, 5100):
            places = scene.places[client], scene.places[server]
            talk = Talk(*places, protocol, port, family=family)
            talk.may_send = {side: side in SENDERS[senders] for side in ("client", "server")}
            talk.name += f", {senders} sending"
            talks.append(talk)
    return talks


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_open_flows_whose_policy_is_withdrawn_stop_and_go_on_when_it_is_back(
    scene: Scene, protocol: str, side: str
) -> None:
    closed, allowing = SIDES[side]
    scene.enforce([closed, allowing])
    with opened(talk_in_every_way(scene, "blue/b", "blue/a", protocol)) as talks:
        assert_stop(talks, lambda: scene.write([closed]))
        scene.write([closed, allowing])
        run_until_all_flow(talks)


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_open_flows_stop_when_their_peer_becomes_somebody_else(scene: Scene, protocol: str) -> None:
    scene.enforce([CLOSED_A, TO_A])
    with opened(talk_in_every_way(scene, "blue/b", "blue/a", protocol)) as talks:
        try:
            assert_stop(talks, lambda: scene.relabel("blue/b", "app=stranger"))
        finally:
            scene.relabel("blue/b", "app=b")
        run_until_all_flow(talks)


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_open_flows_stop_when_a_policy_begins_to_select_their_server(
    scene: Scene, protocol: str
) -> None:
    scene.enforce([])
    closed = make_policy("NetworkPolicy", "closed", {"podSelector": {}})
    with opened(talk_in_every_way(scene, "red/a", "blue/a", protocol)) as talks:
        assert_stop(talks, lambda: scene.write([closed]))


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_flows_that_audit_let_pass_stop_when_it_ends(scene: Scene, protocol: str) -> None:
    def set_audit(is_on: bool) -> None:
        path = f"/endpoint/{scene.pods['blue/a'].endpoint}"
        scene.api.must("PATCH", path, {"policyAudit": is_on})

    scene.enforce([CLOSED_A])
    set_audit(True)
    try:
        with opened(talk_in_every_way(scene, "blue/b", "blue/a", protocol)) as talks:
            assert_stop(talks, lambda: set_audit(False))
    finally:
        set_audit(False)


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_flows_from_outside_stop_with_their_policy(scene: Scene, protocol: str) -> None:
    scene.enforce([CLOSED_A, k8s("open", [{"from": blocks(CLIENTS)}])])
    with opened(talk_in_every_way(scene, "client", "blue/a", protocol)) as talks:
        assert_stop(talks, lambda: scene.write([CLOSED_A]))


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_masqueraded_flows_stop_with_their_policy(scene: Scene, protocol: str) -> None:
    scene.enforce([CLOSED, k8s("open", [], [{"to": blocks(SERVER)}])])
    with opened(talk_in_every_way(scene, "blue/a", "server", protocol)) as talks:
        assert_stop(talks, lambda: scene.write([CLOSED]))


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_open_flows_live_on_when_another_rule_takes_over(scene: Scene, protocol: str) -> None:
    scene.enforce([CLOSED_A, TO_A])
    other = k8s("other", [{"from": blocks(POD_B)}])
    with opened(talk_in_every_way(scene, "blue/b", "blue/a", protocol)) as talks:
        for policies in ([CLOSED_A, TO_A, other], [CLOSED_A, other], [CLOSED_A, TO_A]):
            scene.enforce(policies)
            run_until_all_flow(talks)


def test_flows_stop_within_a_second_of_the_change() -> None:
    """Looks at what the tests above measured."""
    print(f"seconds until each cut: {[round(cut_s, 3) for cut_s in sorted(cuts_s)]}")
    if not cuts_s:
        pytest.skip("no test that cuts flows ran before this one")
    assert statistics.median(cuts_s) < CUT_S, cuts_s
