"""What a lab consists of: names, addresses and routes of its nodes and of its world, computed from a few words.

Used by every other part of the lab. Pure. A lab's network is its own: namespaces joined by a bridge in one more
namespace, so the same addresses serve every lab of a machine and nothing is changed outside of them.
"""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from podwire.model.errors import InvalidRequest, NotFound

RUN_ROOT: Final = Path("/run/podwire/lab")
PIN_ROOT: Final = Path("/sys/fs/bpf/podwire/lab")
DEFAULT_LAB: Final = "lab"
NODES_MAX: Final = 50
SOCKET_PATH_MAX_BYTES: Final = 106

CLUSTER_IPV4: Final = ipaddress.ip_network("10.244.0.0/16")
CLUSTER_IPV6: Final = ipaddress.ip_network("fd10:244::/48")
UNDERLAY_IPV4: Final = ipaddress.ip_network("192.0.2.0/24")
UNDERLAY_IPV6: Final = ipaddress.ip_network("fd99::/64")
WORLD: Final = "world"
"""The place outside the cluster."""
_FIRST_NODE_HOST: Final = 10
_WORLD_HOST: Final = 250
UPLINK: Final = "uplink"

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,18}[a-z0-9])?")
_POD_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,40}[a-z0-9])?")


@dataclass(frozen=True)
class NodePlan:
    """One node: a network namespace with a real agent."""

    lab: str
    name: str
    underlay: tuple[str, ...]
    """Its addresses on the underlay, with prefix length."""
    pod_cidrs: tuple[str, ...]

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
    families: str
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


def plan_lab(name: str, nodes: int, families: str) -> LabPlan:
    """Compute a lab with `nodes` nodes, `families` one of 4, 6, 46."""
    check_lab_name(name)
    if families not in ("4", "6", "46"):
        raise InvalidRequest(f"use families {families!r}", hint="choose 4, 6 or 46")
    if not 1 <= nodes <= NODES_MAX:
        raise InvalidRequest(f"make {nodes} nodes", hint=f"choose 1 to {NODES_MAX}")
    plans = tuple(_plan_node(name, number, families) for number in range(1, nodes + 1))
    for plan in plans:
        if len(str(plan.directory / "cni.sock").encode()) > SOCKET_PATH_MAX_BYTES:
            raise InvalidRequest(
                f"name lab {name!r}: its socket paths would be too long",
                hint="choose a shorter name",
            )
    return LabPlan(
        name=name,
        families=families,
        nodes=plans,
        world_underlay=_hosts(families, _WORLD_HOST),
        cluster_cidrs=tuple(
            str(cidr) for cidr in (CLUSTER_IPV4, CLUSTER_IPV6) if str(cidr.version) in families
        ),
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
    """Give the arguments of `ip` that let `node` reach the pods of all others, and the world by default."""
    commands = []
    for other in plan.nodes:
        if other is node:
            continue
        for cidr, via in zip(other.pod_cidrs, other.addresses, strict=True):
            commands.append(f"route add {cidr} via {via} dev {UPLINK}")
    commands.extend(f"route add default via {via} dev {UPLINK}" for via in plan.world_addresses)
    return commands


def _plan_node(lab: str, number: int, families: str) -> NodePlan:
    cidrs = []
    if "4" in families:
        cidrs.append(str(ipaddress.ip_network((int(CLUSTER_IPV4[0]) + (number << 8), 24))))
    if "6" in families:
        cidrs.append(str(ipaddress.ip_network((int(CLUSTER_IPV6[0]) + (number << 64), 64))))
    underlay = _hosts(families, _FIRST_NODE_HOST + number - 1)
    return NodePlan(lab, f"node{number}", underlay, tuple(cidrs))


def _hosts(families: str, host: int) -> tuple[str, ...]:
    return tuple(
        f"{network[host]}/{network.prefixlen}"
        for network in (UNDERLAY_IPV4, UNDERLAY_IPV6)
        if str(network.version) in families
    )
