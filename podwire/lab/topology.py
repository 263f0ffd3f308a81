"""What a lab consists of: names, addresses and routes of its nodes and of its world, computed from a few words.

Used by every other part of the lab. Pure. A lab's network is its own: namespaces joined by a bridge in one more
namespace, so the same addresses serve every lab of a machine and nothing is changed outside of them.
"""

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from podwire.model.endpoint import IPNetwork
from podwire.model.errors import InvalidRequest, NotFound

RUN_ROOT: Final = Path("/run/podwire/lab")
PIN_ROOT: Final = Path("/sys/fs/bpf/podwire/lab")
DEFAULT_LAB: Final = "lab"
NODES_MAX: Final = 50
SOCKET_PATH_MAX_BYTES: Final = 106
"""struct sockaddr_un has room for 108 bytes, a NUL among them (unix(7))."""

CLUSTER_IPV4: Final = ipaddress.ip_network("10.244.0.0/16")
CLUSTER_IPV6: Final = ipaddress.ip_network("fd10:244::/48")
UNDERLAYS: Final = (
    (ipaddress.ip_network("192.0.2.0/24"), ipaddress.ip_network("fd99::/64")),
    (ipaddress.ip_network("198.51.100.0/24"), ipaddress.ip_network("fd9a::/64")),
)
"""The subnets that nodes stand in, one of each family; the second one is used by `--routing auto` alone. Those of IPv4
are kept for documentation (RFC 5737), so no network that this machine really has is covered."""
WORLD: Final = "world"
"""The place outside the cluster."""
_ROUTER_HOST: Final = 1
_FIRST_NODE_HOST: Final = 10
_STORE_HOST: Final = 240
_WORLD_HOST: Final = 250
UPLINK: Final = "uplink"
STORE: Final = "store"
"""The place where etcd runs: on the underlay itself."""
STORE_PORT: Final = 2379
SMALLEST_MTU: Final = 1360
"""IPv6 needs 1,280 bytes inside a tunnel, which takes 70; some more for what a test may put around it."""
LARGEST_MTU: Final = 9000
FAMILIES: Final = ("4", "6", "46")
ROUTINGS: Final = ("overlay", "native", "auto")
STORES: Final = ("sqlite", "etcd")
IPAMS: Final = ("node", "pool")
POOL_BLOCK_SIZES: Final = {4: 26, 6: 122}
"""64 addresses each."""

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,18}[a-z0-9])?")
_POD_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,40}[a-z0-9])?")


class LabShape(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for."""

    nodes: int = 2
    families: str = "46"
    """Of pods: 4, 6 or 46."""
    underlay: str = ""
    """Of the nodes' own addresses; "" = those of the pods."""
    routing: str = "overlay"
    store: str = "sqlite"
    ipam: str = "node"
    """Whether a node's addresses are its own ranges, or blocks of pools that all nodes share."""
    mtu: int = 1500
    """Of the underlay, in bytes."""
    conntrack_entries: int = 65_536
    """Of each node; 0 = what an agent takes where nothing is set."""

    @property
    def underlay_families(self) -> str:
        """Families of the nodes' own addresses."""
        return self.underlay or self.families


@dataclass(frozen=True)
class NodePlan:
    """One node: a network namespace with a real agent."""

    lab: str
    name: str
    underlay: tuple[str, ...]
    """Its addresses on the underlay, with prefix length."""
    pod_cidrs: tuple[str, ...]
    """Empty when it claims blocks of pools."""
    subnet: int = 0
    """Which of UNDERLAYS it is in."""

    @property
    def namespace(self) -> str:
        """Name of its network namespace."""
        return f"pw.{self.lab}.{self.name}"

    @property
    def directory(self) -> Path:
        """Where its agent's files are: configuration, sockets, state, log."""
        return RUN_ROOT / self.lab / self.name

    @property
    def pins(self) -> Path:
        """Where its agent pins programs and maps."""
        return PIN_ROOT / self.lab / self.name

    @property
    def addresses(self) -> tuple[str, ...]:
        """Its addresses on the underlay."""
        return tuple(str(ipaddress.ip_interface(text).ip) for text in self.underlay)


@dataclass(frozen=True)
class LabPlan:
    """A whole lab."""

    name: str
    shape: LabShape
    nodes: tuple[NodePlan, ...]
    world_underlay: tuple[str, ...]
    cluster_cidrs: tuple[str, ...]

    @property
    def directory(self) -> Path:
        """Where the lab's state is."""
        return RUN_ROOT / self.name

    @property
    def underlay_namespace(self) -> str:
        """Name of the namespace that holds the bridge."""
        return f"pw.{self.name}.underlay"

    @property
    def world_namespace(self) -> str:
        """Name of the namespace outside the cluster."""
        return f"pw.{self.name}.world"

    @property
    def subnets(self) -> int:
        """How many of UNDERLAYS are in use."""
        return 1 + max(node.subnet for node in self.nodes)

    @property
    def routers(self) -> Sequence[tuple[str, ...]]:
        """Addresses of the router in each subnet, with prefix length; none with a single one."""
        if self.subnets == 1:
            return ()
        families = self.shape.underlay_families
        return [_hosts(families, _ROUTER_HOST, subnet) for subnet in range(self.subnets)]

    @property
    def store_underlay(self) -> tuple[str, ...]:
        """Addresses of the store, with prefix length."""
        return _hosts(self.shape.underlay_families, _STORE_HOST, 0)

    @property
    def store_addresses(self) -> tuple[str, ...]:
        """Addresses of the store."""
        return tuple(str(ipaddress.ip_interface(text).ip) for text in self.store_underlay)

    @property
    def store_url(self) -> str:
        """The store as agents and the CLI name it."""
        if self.shape.store == "sqlite":
            return f"sqlite://{self.directory}/store.db"
        address = self.store_addresses[0]
        host = f"[{address}]" if ":" in address else address
        return f"etcd://{host}:{STORE_PORT}"

    @property
    def pools(self) -> Sequence[Mapping[str, object]]:
        """Objects of the pools that addresses are from, one for each family."""
        if self.shape.ipam != "pool":
            return ()
        networks = [ipaddress.ip_network(text) for text in self.cluster_cidrs]
        return [
            {
                "apiVersion": "podwire.io/v1",
                "kind": "IPPool",
                "metadata": {"name": f"ipv{network.version}"},
                "spec": {"cidr": str(network), "blockSize": POOL_BLOCK_SIZES[network.version]},
            }
            for network in networks
        ]

    @property
    def world_addresses(self) -> tuple[str, ...]:
        """Addresses of the world."""
        return tuple(str(ipaddress.ip_interface(text).ip) for text in self.world_underlay)

    def node(self, name: str) -> NodePlan:
        """Find a node; NotFound names those that exist."""
        for node in self.nodes:
            if node.name == name:
                return node
        known = ", ".join(node.name for node in self.nodes)
        raise NotFound(
            f"find node {name!r}: lab {self.name!r} has {known}", hint="podwire lab status"
        )


def plan_lab(name: str, shape: LabShape) -> LabPlan:
    """Compute a lab. Raises InvalidRequest, which names what the shape may be."""
    check_lab_name(name)
    _check_shape(shape)
    plans = tuple(_plan_node(name, number, shape) for number in range(1, shape.nodes + 1))
    for plan in plans:
        # Refused here: bind(2) would refuse it only when the lab is half made.
        if len(str(plan.directory / "cni.sock").encode()) > SOCKET_PATH_MAX_BYTES:
            raise InvalidRequest(
                f"name lab {name!r}: its socket paths would be too long",
                hint="choose a shorter name",
            )
    return LabPlan(
        name=name,
        shape=shape,
        nodes=plans,
        world_underlay=_hosts(shape.underlay_families, _WORLD_HOST, 0),
        cluster_cidrs=tuple(
            str(cidr)
            for cidr in (CLUSTER_IPV4, CLUSTER_IPV6)
            if str(cidr.version) in shape.families
        ),
    )


def _check_shape(shape: LabShape) -> None:
    for what, value, known in (
        ("families", shape.families, FAMILIES),
        ("underlay families", shape.underlay_families, FAMILIES),
        ("routing", shape.routing, ROUTINGS),
        ("store", shape.store, STORES),
        ("ipam", shape.ipam, IPAMS),
    ):
        if value not in known:
            raise InvalidRequest(f"use {what} {value!r}", hint=f"choose one of {', '.join(known)}")
    if not 1 <= shape.nodes <= NODES_MAX:
        raise InvalidRequest(f"make {shape.nodes} nodes", hint=f"choose 1 to {NODES_MAX}")
    if not SMALLEST_MTU <= shape.mtu <= LARGEST_MTU:
        raise InvalidRequest(
            f"use MTU {shape.mtu}", hint=f"choose {SMALLEST_MTU} to {LARGEST_MTU} bytes"
        )
    if shape.routing == "native" and not set(shape.families) <= set(shape.underlay_families):
        raise InvalidRequest(
            f"route families {shape.families} natively over an underlay of"
            f" {shape.underlay_families}: no next hop has the family",
            hint="use --routing overlay, or give the underlay both families",
        )


def check_lab_name(name: str) -> str:
    """Give `name` if it may name a lab, else raise InvalidRequest; a name becomes part of paths."""
    if not is_lab_name(name):
        raise InvalidRequest(
            f"name lab {name!r}: at most 20 of a-z, 0-9 and, inside, '-'",
            hint="choose another name",
        )
    return name


def is_lab_name(name: str) -> bool:
    """Tell whether `name` may name a lab."""
    return _NAME.fullmatch(name) is not None and name not in ("underlay", WORLD)


def check_pod_name(name: str) -> str:
    """Give `name` if it may name a pod or its namespace, else raise InvalidRequest."""
    if not _POD_NAME.fullmatch(name):
        raise InvalidRequest(
            f"name pod {name!r}: at most 42 of a-z, 0-9 and, inside, '-'",
            hint="choose another name",
        )
    return name


def pod_namespace(lab: str, namespace: str, pod: str) -> str:
    """Name the network namespace of a pod."""
    return f"pw.{lab}.{namespace}.{pod}"


def plan_routes(plan: LabPlan, node: NodePlan) -> Sequence[str]:
    """Give the arguments of `ip` that let `node` reach other subnets, and the world by default.

    Pods of other nodes are the agents' affair.
    """
    if node.subnet == 0:
        gateways = plan.world_addresses
        return [*plan_world_routes(plan), *(_default_by(gateway) for gateway in gateways)]
    return [_default_by(_address(router)) for router in plan.routers[node.subnet]]


def _default_by(gateway: str) -> str:
    return f"route add default via {gateway} dev {UPLINK}"


def plan_world_routes(plan: LabPlan) -> list[str]:
    """Give the arguments of `ip` by which the world, which is in the first subnet, reaches the others."""
    return [
        f"route add {network} via {_address(router)} dev {UPLINK}"
        for subnet in range(1, plan.subnets)
        for network, router in zip(
            _networks(plan.shape.underlay_families, subnet), plan.routers[0], strict=True
        )
    ]


def _plan_node(lab: str, number: int, shape: LabShape) -> NodePlan:
    cidrs = []
    if "4" in shape.families and shape.ipam == "node":
        cidrs.append(str(ipaddress.ip_network((int(CLUSTER_IPV4[0]) + (number << 8), 24))))
    if "6" in shape.families and shape.ipam == "node":
        cidrs.append(str(ipaddress.ip_network((int(CLUSTER_IPV6[0]) + (number << 64), 64))))
    subnet = (number - 1) % len(UNDERLAYS) if shape.routing == "auto" else 0
    underlay = _hosts(shape.underlay_families, _FIRST_NODE_HOST + number - 1, subnet)
    return NodePlan(lab, f"node{number}", underlay, tuple(cidrs), subnet)


def _networks(families: str, subnet: int) -> list[IPNetwork]:
    return [network for network in UNDERLAYS[subnet] if str(network.version) in families]


def _hosts(families: str, host: int, subnet: int) -> tuple[str, ...]:
    return tuple(f"{network[host]}/{network.prefixlen}" for network in _networks(families, subnet))


def _address(text: str) -> str:
    return str(ipaddress.ip_interface(text).ip)
