"""Services in a real cluster whose agents translate them, beside kube-proxy in each of its modes and without it.

Every question that a pod asks a service is put to the oracle, too, with and without policies that name the pods behind
it. `--full` adds nodes that reach each other through the tunnel.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import pytest

from podwire.lab import traffic
from podwire.lab.kubernetes import pods
from podwire.lab.kubernetes.cluster import Cluster
from podwire.lab.kubernetes.networks.installed import Podwire
from podwire.lab.kubernetes.ranges import RANGES, of
from tests.cluster import probing
from tests.cluster.agents import ask
from tests.cluster.flows import Requests, can_connect
from tests.cluster.market import FIRST, LATE, NAMESPACE, PORT, SECOND, Market, open_market
from tests.cluster.tenant import Tenant, tenancy
from tests.waiting import wait_for

ON_SHAPES: Final = ("other",)
"""Where the programs translate."""
Policy = Mapping[str, Any]


def policy(app: str, **spec: object) -> Policy:
    """Write a policy for the pods of an app."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": f"of-{app}", "namespace": NAMESPACE},
        "spec": {
            "podSelector": {"matchLabels": {"app": app}},
            "policyTypes": [key.capitalize() for key in spec],
            **spec,
        },
    }


def to_app(app: str) -> list[Mapping[str, Any]]:
    return [{"podSelector": {"matchLabels": {"app": app}}}]


def ports(*numbers: int | str) -> list[Mapping[str, Any]]:
    return [
        {"port": number, "protocol": protocol} for number in numbers for protocol in ("TCP", "UDP")
    ]


def blocks(*cidrs: str) -> list[Mapping[str, Any]]:
    return [{"ipBlock": {"cidr": cidr}} for cidr in cidrs]


NODES: Final = [str(one.underlay) for one in of("46")]
SERVICES: Final = [RANGES[family].services for family in "46"]
CASES: Final[Mapping[str, tuple[Policy, ...]]] = {
    "no policy": (),
    "to the pods behind": (policy("client", egress=[{"to": to_app("web")}]),),
    "to the pods behind, at the service's port": (
        policy("client", egress=[{"to": to_app("web"), "ports": ports(PORT)}]),
    ),
    "to the pods behind, at one of their ports": (
        policy("client", egress=[{"to": to_app("web"), "ports": ports(SECOND)}]),
    ),
    "to the pods behind, at a port's name": (
        policy(
            "client",
            egress=[{"to": to_app("web"), "ports": [{"port": "web-tcp", "protocol": "TCP"}]}],
        ),
    ),
    "to other pods": (policy("client", egress=[{"to": to_app("somebody-else")}]),),
    "to the addresses of services": (policy("client", egress=[{"to": blocks(*SERVICES)}]),),
    "to nodes and the API server by address": (
        policy("client", egress=[{"to": blocks(*NODES), "ports": ports(FIRST, 6443)}]),
    ),
    "from the client": (policy("web", ingress=[{"from": to_app("client")}]),),
    "from the client, at one of their ports": (
        policy("web", ingress=[{"from": to_app("client"), "ports": ports(FIRST)}]),
    ),
    "from others": (policy("web", ingress=[{"from": to_app("somebody-else")}]),),
    "closed but for each other": (
        policy("client", egress=[{"to": to_app("web")}], ingress=[]),
        policy("web", ingress=[{"from": to_app("client")}], egress=[]),
    ),
}
WAYS: Final = {"native": "native", "overlay": "tunnel"}
"""What an agent calls a way."""
SHORT: Final = ("no policy", "to the pods behind", "to other pods", "from others")
"""What is asked where the whole table is asked elsewhere."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Choose how kube-proxy runs and how nodes reach each other."""
    if "ground" in metafunc.fixturenames:
        ways = ("native", "overlay") if metafunc.config.getoption("--full") else ("native",)
        grounds = [(way, proxy) for way in ways for proxy in ("iptables", "nftables", "")]
        metafunc.parametrize(
            "ground",
            grounds,
            indirect=True,
            scope="module",
            ids=[f"{way} {proxy or 'no kube-proxy'}" for way, proxy in grounds],
        )


@pytest.fixture(scope="module")
def market(shaped: Cluster) -> Iterator[Market]:
    """Give the services, and afterwards the cluster as it was."""
    with open_market(shaped) as made:
        yield made
    arrange(shaped, "native", shaped.shape.proxy)


@pytest.fixture(scope="module")
def ground(request: pytest.FixtureRequest, shaped: Cluster, market: Market) -> tuple[str, str]:
    """Have kube-proxy in a mode, and nodes reach each other in a way."""
    way, proxy = request.param
    arrange(shaped, way, proxy)
    market.wait_for_back_ends()
    return way, proxy


def arrange(shaped: Cluster, way: str, proxy: str) -> None:
    network = shaped.network
    assert isinstance(network, Podwire)
    routing = "overlay" if way == "overlay" else "auto"
    if network.settings.get("routing", "auto") != routing:
        network.change_settings(shaped, routing=routing)
    if shaped.nodes[0].services.proxy_mode != proxy:
        shaped.use_proxy(proxy)
    wait_for(lambda: ways_of(shaped) == {WAYS[way]}, f"{WAYS[way]} between the nodes")


def ways_of(shaped: Cluster) -> set[str]:
    """Give how each node reaches the others."""
    return {
        way
        for node in shaped.nodes
        for one in ask(str(node.machine.path("/run/podwire/api.sock")), "/node")
        for way in one["ways"]
        if way != "local"
    }


def test_every_answer_is_what_the_oracle_says(
    market: Market, ground: tuple[str, str], full: bool
) -> None:
    whole = full or ground[1] == market.cluster.shape.proxy
    names = CASES if whole else SHORT
    faults = {name: found for name in names if (found := market.play(CASES[name]))}
    assert not faults, faults


def test_a_pod_keeps_its_back_end_where_affinity_is_asked_for(
    market: Market, ground: tuple[str, str]
) -> None:
    assert ground
    market.enforce(())
    for answers in market.ask_again("sticky", 20).values():
        assert len(answers) == 1
        assert answers < {"near", "far"}


def test_hosts_are_served_by_kube_proxy_alone(market: Market, ground: tuple[str, str]) -> None:
    market.enforce(())
    host = market.cluster.nodes[0].machine.plan.namespace
    for address in market.cluster_ips("remote").values():
        if ground[1]:
            wait_for(
                lambda address=address: traffic.connect(host, address, PORT, timeout_s=2).ok,  # type: ignore[misc]
                f"kube-proxy to serve {address}",
            )
        else:
            assert not traffic.connect(host, address, PORT, timeout_s=1).ok


ROLLING: Final = "rolling"
REPLICAS: Final = 4
DRAIN_S: Final = 10
"""So long a pod answers after it is told to end: what is on its way to it arrives."""


@pytest.fixture
def rolling(market: Market) -> Iterator[str]:
    """Give the address of a service whose pods end in order."""
    deployment = pods.describe_deployment(ROLLING, REPLICAS, namespace=NAMESPACE)
    template = deployment["spec"]["template"]["spec"]
    template["terminationGracePeriodSeconds"] = DRAIN_S + 1
    (container,) = template["containers"]
    container["lifecycle"] = {"preStop": {"sleep": {"seconds": DRAIN_S}}}
    container["readinessProbe"] = {"httpGet": {"port": 80}, "periodSeconds": 1}
    cluster = market.cluster
    cluster.apply(deployment)
    spec = {"selector": {"app": ROLLING}, "ports": [{"port": PORT}]}
    made = cluster.client.create(
        f"/api/v1/namespaces/{NAMESPACE}/services", {"metadata": {"name": ROLLING}, "spec": spec}
    )
    cluster.wait_for_pods(REPLICAS, NAMESPACE, f"app={ROLLING}")
    yield made["spec"]["clusterIP"]
    cluster.kubectl("delete", "-n", NAMESPACE, f"deployment/{ROLLING}", f"service/{ROLLING}")


def test_a_rollout_loses_no_request_that_kube_proxy_does_not_lose(
    market: Market, rolling: str, full: bool
) -> None:
    """The pod's requests are translated by the programs, those of its node by kube-proxy."""
    arrange(market.cluster, "native", market.cluster.shape.proxy)
    market.enforce(())
    networks = (market.networks["client"], market.networks["node-here"])
    ours, theirs = (Requests(one, rolling, PORT, per_s=500 if full else 50) for one in networks)
    for network in networks:
        wait_for(lambda network=network: can_connect(network, rolling, PORT), "an answer")  # type: ignore[misc]
    with probing.running(ours.run, theirs.run):
        for _ in range(3 if full else 1):
            market.cluster.kubectl("rollout", "restart", "-n", NAMESPACE, f"deployment/{ROLLING}")
            words = ("rollout", "status", "-n", NAMESPACE, f"deployment/{ROLLING}")
            market.cluster.kubectl(*words, "--timeout=120s")
            market.cluster.wait_for_pods(REPLICAS, NAMESPACE, f"app={ROLLING}")
    print(f"podwire {ours.sent}, lost {ours.lost}; kube-proxy {theirs.sent}, lost {theirs.lost}")
    assert ours.sent > 100
    assert theirs.sent > 100
    assert len(ours.lost) <= len(theirs.lost), ours.lost


@pytest.fixture
def tenant(market: Market, full: bool) -> Iterator[Tenant]:
    """Give a tenant who has more services than there is room for."""
    if not full:
        pytest.skip("66,000 ports take a minute: with --full")
    arrange(market.cluster, "native", "")
    market.enforce(())
    with tenancy(market.cluster) as made:
        yield made


def test_a_tenant_with_too_many_ports_takes_nothing_from_others(
    market: Market, tenant: Tenant
) -> None:
    """The youngest of his own services are left to the stack, and an Event at each says so."""
    left = tenant.wait_until_told()
    assert left == tenant.names[-len(left) :]
    assert 0 < len(left) < len(tenant.names) / 2
    assert market.play(()) == []
    market.add(LATE)
    assert market.play(()) == []
    tenant.leave()
    market.wait_for_back_ends()
    assert market.play(()) == []
