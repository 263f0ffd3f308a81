"""A tenant who may write pods, services, slices and policies in his own namespace, and tries to reach or to divert what
is others'.

His ServiceAccount has no other rights. His pod calls itself what only the cluster may call it. His services name closed
pods, nodes, the API server and the world as back ends, and addresses of others as their own.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import pytest

from podwire.kernel import netns
from podwire.lab import traffic
from podwire.lab.kubernetes import cluster as clusters
from podwire.lab.kubernetes import pods
from podwire.lab.kubernetes.client import ApiClient, Refused
from podwire.lab.kubernetes.cluster import Cluster
from tests.cluster.agents import Agents, ask
from tests.cluster.market import FIRST, PORT, serve
from tests.waiting import wait_for

ON_SHAPES: Final = ("other",)
"""Where the programs translate."""
TENANT, VICTIM = "mallory", "alice"
MAY_WRITE: Final = {
    "": ["pods", "services", "endpoints"],
    "discovery.k8s.io": ["endpointslices"],
    "networking.k8s.io": ["networkpolicies"],
}
FORGED: Final = {
    "io.kubernetes.pod.namespace": VICTIM,
    "io.cilium.k8s.policy.serviceaccount": "friend",
    "io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name": VICTIM,
    "podwire.io/name": "friend",
    "app": "friend",
}
PLACES: Final = {
    "near": (VICTIM, "node1"),
    "far": (VICTIM, "node2"),
    "friend": (VICTIM, "node1"),
    "mallory": (TENANT, "node1"),
}
ADDRESS_TYPES: Final = {"4": "IPv4", "6": "IPv6"}
EXTERNAL: Final = {"4": "203.0.113.9{}", "6": "2001:db8:113::9{}"}
KUBELET, API = 10250, 6443
RBAC: Final = "rbac.authorization.k8s.io"

Door = tuple[str, int]
"""An address and a port."""


@dataclass(frozen=True)
class Stage:
    """All that is there: `tenant` is his way to the API server."""

    cluster: Cluster
    tenant: ApiClient
    networks: Mapping[str, str]
    addresses: Mapping[str, Mapping[str, str]]
    """By name and family."""
    vips: Mapping[str, str]
    """Of the victim's service, before `near` and `far`."""

    def offer(
        self, name: str, back_ends: Mapping[str, str], port: int = FIRST, **spec: object
    ) -> Mapping[str, Any]:
        """Have the tenant write a service whose slices name these, one in each family."""
        ports = [{"name": "p", "protocol": "TCP", "port": PORT}]
        families = [ADDRESS_TYPES[family] for family in back_ends]
        stack = "RequireDualStack" if len(families) > 1 else "SingleStack"
        document = {
            "metadata": {"name": name},
            "spec": {"ports": ports, "ipFamilies": families, "ipFamilyPolicy": stack} | spec,
        }
        made: Mapping[str, Any] = self.tenant.create(path_of("services"), document)
        for address in back_ends.values():
            self.tenant.create(path_of("endpointslices"), slice_of(name, address, port))
        return made

    def take_back(self) -> None:
        """Delete all services of the tenant; their slices go with them."""
        for kind in ("services", "endpointslices"):
            for item in self.tenant.get(path_of(kind))["items"]:
                self.tenant.delete(f"{path_of(kind)}/{item['metadata']['name']}")

    def who_answers(
        self, networks: Mapping[str, str], doors: Collection[Door], timeout_s: float = 2
    ) -> dict[tuple[str, Door], str]:
        """Give who answers whom at which door."""
        pairs = list(itertools.product(networks, doors))

        def knock(pair: tuple[str, Door]) -> traffic.Attempt:
            name, (address, port) = pair
            return traffic.connect(networks[name], address, port, timeout_s=timeout_s)

        with ThreadPoolExecutor(16) as threads:
            found = zip(pairs, threads.map(knock, pairs), strict=True)
            return {pair: attempt.answer.partition(" ")[0] for pair, attempt in found if attempt.ok}

    def wait_until_open(self, networks: Mapping[str, str], doors: Collection[Door]) -> None:
        wanted = set(itertools.product(networks, doors))
        wait_for(lambda: self.who_answers(networks, doors).keys() == wanted, f"answers at {doors}")

    def enforce(self, *policies: Mapping[str, Any]) -> None:
        mine = [addresses["4"] for addresses in self.addresses.values()]
        Agents(self.cluster).enforce(policies, namespaces=[TENANT, VICTIM], addresses=mine)


def path_of(kind: str, namespace: str = TENANT) -> str:
    group = next(group for group, kinds in MAY_WRITE.items() if kind in kinds)
    return (
        f"/apis/{group}/v1/namespaces/{namespace}/{kind}"
        if group
        else (f"/api/v1/namespaces/{namespace}/{kind}")
    )


def slice_of(service: str, address: str, port: int = FIRST) -> dict[str, Any]:
    family = "6" if ":" in address else "4"
    return {
        "metadata": {
            "name": f"{service}-{family}",
            "labels": {"kubernetes.io/service-name": service},
        },
        "addressType": ADDRESS_TYPES[family],
        "ports": [{"name": "p", "protocol": "TCP", "port": port}],
        "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
    }


def policy(app: str, namespace: str, **spec: object) -> Mapping[str, Any]:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": f"of-{app}", "namespace": namespace},
        "spec": {"podSelector": {"matchLabels": {"app": app}}, **spec},
    }


CLOSED: Final = policy(
    "web", VICTIM, ingress=[{"from": [{"podSelector": {"matchLabels": {"app": "friend"}}}]}]
)
KEPT_IN: Final = policy(
    "friend",
    TENANT,
    policyTypes=["Egress"],
    egress=[
        {
            "to": [
                {
                    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": VICTIM}},
                    "podSelector": {"matchLabels": {"app": "friend"}},
                }
            ]
        }
    ],
)


@pytest.fixture(scope="module")
def stage(shaped: Cluster) -> Iterator[Stage]:
    names = (TENANT, VICTIM)
    shaped.apply(
        *({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in names)
    )
    try:
        with ExitStack() as stack:
            yield set_up(shaped, stack)
    finally:
        shaped.kubectl("delete", "namespace", *names)


def set_up(shaped: Cluster, stack: ExitStack) -> Stage:
    tenant = let_write(shaped)
    for name, (namespace, node) in PLACES.items():
        labels = {"near": {"app": "web"}, "far": {"app": "web"}, "mallory": FORGED}
        document = pods.describe(
            name,
            namespace=namespace,
            node=node,
            labels=labels.get(name, {"app": name}),
            command=pods.IDLE,
        )
        writer = tenant if namespace == TENANT else shaped.client
        writer.create(path_of("pods", namespace), document)
    found = [*shaped.wait_for_pods(3, VICTIM), *shaped.wait_for_pods(1, TENANT)]
    running = {pod["metadata"]["name"]: pod for pod in found}
    networks = {name: pods.network_of(shaped, pod) for name, pod in running.items()}
    networks |= {"world": netns.named_path(shaped.world)}
    for name, network in networks.items():
        stack.callback(serve(shaped, name, "tenancy", network).stop)
    service = {
        "metadata": {"name": "web"},
        "spec": {
            "selector": {"app": "web"},
            "ipFamilyPolicy": "PreferDualStack",
            "ports": [{"port": PORT, "targetPort": FIRST}],
        },
    }
    made = shaped.client.create(path_of("services", VICTIM), service)
    addresses = {name: by_family(pod["status"]["podIPs"]) for name, pod in running.items()}
    vips = {family_of(cluster_ip): str(cluster_ip) for cluster_ip in made["spec"]["clusterIPs"]}
    return Stage(shaped, tenant, networks, addresses, vips)


def by_family(listed: Sequence[Mapping[str, str]]) -> Mapping[str, str]:
    return {family_of(item["ip"]): item["ip"] for item in listed}


def family_of(address: str) -> str:
    return "6" if ":" in address else "4"


def let_write(shaped: Cluster) -> ApiClient:
    """Give the tenant his account; returns his way to the API server."""
    rules = [
        {"apiGroups": [group], "resources": kinds, "verbs": ["*"]}
        for group, kinds in MAY_WRITE.items()
    ]
    path = f"/apis/{RBAC}/v1/namespaces/{TENANT}"
    account = {"kind": "ServiceAccount", "name": "tenant", "namespace": TENANT}
    role = {"apiGroup": RBAC, "kind": "Role", "name": "tenant"}
    metadata = {"metadata": {"name": "tenant"}}
    client, accounts = shaped.client, f"/api/v1/namespaces/{TENANT}/serviceaccounts"
    client.create(accounts, metadata)
    client.create(f"{path}/roles", {**metadata, "rules": rules})
    client.create(f"{path}/rolebindings", {**metadata, "roleRef": role, "subjects": [account]})
    token = client.create(f"{accounts}/tenant/token", {"spec": {}})["status"]["token"]
    return ApiClient(
        client.address,
        client.port,
        ca=shaped.control.api.ca,
        token=token,
        network=client.network,
    )


@pytest.fixture
def clean(stage: Stage) -> Iterator[Stage]:
    stage.enforce()
    yield stage
    stage.take_back()


def external(number: int) -> list[str]:
    return [address.format(number) for address in EXTERNAL.values()]


def doors_of(stage: Stage, service: Mapping[str, Any]) -> list[Door]:
    """List where a service is asked: by its own address, outside, and at both nodes."""
    spec = service["spec"]
    (port,) = spec["ports"]
    doors = [(address, PORT) for address in (*spec["clusterIPs"], *spec.get("externalIPs", ()))]
    nodes = [address for node in stage.cluster.nodes for address in node.machine.plan.addresses]
    return [*doors, *((address, port["nodePort"]) for address in nodes if "nodePort" in port)]


def test_no_service_leads_a_tenant_into_a_closed_pod(clean: Stage) -> None:
    """By its address, from outside, by node ports that make him a node; and whatever his pod calls itself."""
    made = {
        name: clean.offer(
            name, clean.addresses[name], type="NodePort", externalIPs=external(number)
        )
        for number, name in enumerate(("near", "far"))
    }
    doors = [door for service in made.values() for door in doors_of(clean, service)]
    mallory = {name: clean.networks[name] for name in ("mallory", "world")}
    inside = {"mallory": clean.networks["mallory"]}
    clean.wait_until_open(inside, doors)
    clean.enforce(CLOSED)
    assert clean.who_answers(mallory, doors) == {}
    direct = [(address, FIRST) for name in made for address in clean.addresses[name].values()]
    assert clean.who_answers(mallory, direct) == {}
    own = [(address, PORT) for one in made.values() for address in one["spec"]["clusterIPs"]]
    friend = {"friend": clean.networks["friend"]}
    clean.wait_until_open(friend, [*direct, *own])


def test_no_service_leads_a_pod_where_its_policy_does_not(clean: Stage) -> None:
    """To closed pods, the kubelet of either node, the API server, and the world."""
    api = clean.cluster.control.api
    goals: dict[str, tuple[Mapping[str, str], int]] = {
        "friend": (clean.addresses["friend"], FIRST),
        "far": (clean.addresses["far"], FIRST),
        "api": ({"4": api.shape.address}, api.port),
        "world": (clusters.WORLD_ADDRESSES, FIRST),
    }
    for node in clean.cluster.nodes:
        addresses = {family_of(address): address for address in node.machine.plan.addresses}
        goals[node.name] = addresses, KUBELET
    made = {name: clean.offer(name, *goal) for name, goal in goals.items()}
    doors = {name: doors_of(clean, service) for name, service in made.items()}
    mallory = {"mallory": clean.networks["mallory"]}
    for some in doors.values():
        clean.wait_until_open(mallory, some)
    clean.enforce(KEPT_IN)
    friend = doors.pop("friend")
    clean.wait_until_open(mallory, friend)
    assert clean.who_answers(mallory, list(itertools.chain(*doors.values()))) == {}


def test_a_tenant_gets_nothing_that_goes_to_an_address_of_others(clean: Stage) -> None:
    """What pods send to a service's port or to a pod; of what goes to nodes kube-proxy decides (docs/security.md)."""
    others = {"near": clean.addresses["near"], "far": clean.addresses["far"], "web": clean.vips}
    for listened, number in ((PORT, 0), (FIRST, 1)):
        ports = [{"name": "p", "protocol": "TCP", "port": listened}]
        wanted = [address for other in others.values() for address in other.values()]
        spec: dict[str, Any] = {"externalIPs": [*wanted, *external(number)], "ports": ports}
        clean.offer(f"others-{listened}", clean.addresses["mallory"], **spec)
        friend = {"friend": clean.networks["friend"]}
        own = [(address, listened) for address in external(number)]
        clean.wait_until_open(friend, own)
        assert set(clean.who_answers(friend, own).values()) == {"mallory"}
    friends = {f"friend {number}": clean.networks["friend"] for number in range(5)}
    for name in ("near", "far"):
        doors = [(address, FIRST) for address in clean.addresses[name].values()]
        answers = clean.who_answers(friends, doors)
        assert len(answers) == len(friends) * len(doors)
        assert set(answers.values()) == {name}
    answers = clean.who_answers(friends, [(vip, PORT) for vip in clean.vips.values()])
    assert len(answers) == len(friends) * len(clean.vips)
    assert set(answers.values()) <= {"near", "far"}


def test_a_tenant_may_write_no_more_than_is_said_here(stage: Stage) -> None:
    patches: dict[str, Mapping[str, Any]] = {
        f"{path_of('pods')}/mallory/status": {"status": {"podIP": stage.addresses["near"]["4"]}},
        f"{path_of('services', VICTIM)}/web": {"spec": {"externalIPs": external(0)}},
        f"{path_of('services')}/any/status": {"status": {"loadBalancer": {}}},
        f"{path_of('endpointslices', VICTIM)}/any": {"endpoints": []},
        "/api/v1/nodes/node1": {"metadata": {"labels": {"a": "b"}}},
        "/apis/podwire.io/v1/nodes/node1": {"spec": {}},
    }
    refusals = [refusal(stage.tenant.patch, path, document) for path, document in patches.items()]
    assert refusals == [403] * len(patches)
    nowhere = ("127.0.0.1", "::1", "169.254.1.1", "fe80::1", "0.0.0.0", "224.0.0.1")
    path = path_of("endpointslices")
    found = [refusal(stage.tenant.create, path, slice_of("bad", address)) for address in nowhere]
    assert found == [422] * len(nowhere)


def refusal(write: Any, path: str, document: Mapping[str, Any]) -> int:
    """Give the status with which a write is refused; 0: it is not."""
    try:
        write(path, document)
    except Refused as error:
        return error.status
    return 0


def test_a_pod_is_what_the_cluster_calls_it(stage: Stage) -> None:
    (row,) = (
        row
        for path in Agents(stage.cluster).sockets
        for row in ask(path, "/endpoint")
        if row["pod"] == "mallory"
    )
    labels = set(row["labels"])
    assert "k8s:app=friend" in labels
    assert "k8s:io.kubernetes.pod.namespace=mallory" in labels
    assert "k8s:io.cilium.k8s.policy.serviceaccount=default" in labels
    assert not [
        label for label in labels if VICTIM in label or label == "k8s:podwire.io/name=friend"
    ]
