"""What a node wants of its kernel apart from its pods: settings, ipcache, masquerade, unreachable blocks.

`agent.node` makes a `NodePlan` from the configuration, `datapath.node` applies it. Pure but for `list_own_addresses`,
which looks at the node's devices. Invariant: an address inside the cluster is never "world", and the node's own blocks
are marked as such, so that an address nobody has is refused instead of being sent away (docs/datapath.md, rule 10).
"""

import ipaddress
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from podwire.datapath import abi
from podwire.datapath.host import list_usable_addresses
from podwire.datapath.maps import IpcacheEntry, Knobs
from podwire.datapath.masquerade import MasqueradePlan
from podwire.datapath.programs import Capacities
from podwire.datapath.routes import SourceAddresses
from podwire.kernel.netlink import NetlinkSocket
from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.installation.shipped import OBJECT_DIRECTORY

MOST_CONNECTIONS: Final = 1_048_576
LEAST_CONNECTIONS: Final = 65_536


def entries_for(memory_bytes: int) -> int:
    """Compute how many connections a machine's memory is good for: 1,048,576 from 8 GB on."""
    # Compared with 7.5 GiB, because a machine of 8 GB never shows all of it.
    share = MOST_CONNECTIONS * memory_bytes // (15 << 29)
    return min(max(share, LEAST_CONNECTIONS), MOST_CONNECTIONS)


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class NodePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One node as its datapath needs to know it. Addresses and networks of both families mixed."""

    node_name: str
    bpf_dir: Path
    object_dir: Path = OBJECT_DIRECTORY
    mtu: int = 0
    """Bytes, of pod devices; 0 = that of the device which carries the node's traffic."""
    node_address: IPAddress | None = None
    """Address that this host uses towards its pods; None = detected."""
    cluster_cidrs: tuple[IPNetwork, ...] = ()
    node_cidrs: tuple[IPNetwork, ...] = ()
    """Ranges of this node's own pods."""
    families: frozenset[int] = frozenset()
    """IP versions that its pods are going to have, beside those of the ranges."""
    pod_sources: tuple[IPNetwork, ...] = ()
    """Where else addresses of its pods may be from: out of other nodes' blocks, or out of none."""
    masquerade: bool = True
    masquerade_except: tuple[IPNetwork, ...] = ()
    tunnel_port: int = 0
    conntrack_entries: int = 0
    """0 = as many as the machine's memory is good for."""
    conntrack_quota: int = 0
    """Of one endpoint, for each side of opening; 0 = a sixteenth of all."""
    policy_entries: int = 131_072
    """Rows of all policy slots together; about 160 bytes of kernel memory each, taken as they come."""
    constants: dict[str, int] = msgspec.field(default_factory=dict)
    """Feature set of the programs: values of their `const volatile` variables."""

    @property
    def capacities(self) -> Capacities:
        """Sizes of the maps that the settings choose."""
        return Capacities(self.conntrack_entries or entries_for(_memory_bytes()))

    @property
    def own_conntrack_quota(self) -> int:
        """Connections of one endpoint, of each side of opening."""
        return self.conntrack_quota or self.capacities.conntrack_entries // 16

    @property
    def flow_limits(self) -> Knobs:
        """What one endpoint may have of the memory of flows, as the node's knobs name it."""
        return {
            "conntrack_quota": self.own_conntrack_quota,
            "new_flow_rate": self.capacities.new_flow_rate,
        }

    @property
    def inside(self) -> tuple[IPNetwork, ...]:
        """What belongs to the cluster: its networks, or only the node's own where none are set."""
        return self.cluster_cidrs or self.node_cidrs

    def has_family(self, version: int) -> bool:
        """Tell whether pods of this node have addresses of a family."""
        return version in self.families or any(
            network.version == version for network in self.node_cidrs
        )


def compute_masquerade(plan: NodePlan) -> MasqueradePlan:
    """Compute what leaves under the node's address, and what stays untracked."""
    return MasqueradePlan(
        pod_cidrs=(*plan.node_cidrs, *plan.pod_sources),
        inside=(*plan.inside, *plan.masquerade_except),
        enabled=plan.masquerade,
        tunnel_port=plan.tunnel_port,
        pod_networks=plan.inside,
        own_ranges=plan.node_cidrs,
    )


UNSPECIFIED: Final[tuple[IPNetwork, ...]] = (
    ipaddress.ip_network("0.0.0.0"),
    ipaddress.ip_network("::"),
)
"""A packet to one of these addresses is meant for this host."""


def compute_ipcache(plan: NodePlan, host_networks: Iterable[IPNetwork]) -> list[IpcacheEntry]:
    """Compute a node's own rows of the ipcache; `datapath.cluster` adds the others.

    The longest prefix wins: a node's address inside a pod range stays a node's address.
    """
    entries = {
        # An unknown address of the cluster is not the world: rules about the world would let it through.
        network: IpcacheEntry(network, abi.Identity.UNMANAGED, flags=abi.IpcacheFlags.NATIVE)
        for network in plan.inside
    }
    for network in plan.node_cidrs:
        entries[network] = IpcacheEntry(
            network, abi.Identity.UNMANAGED, flags=abi.IpcacheFlags.LOCAL
        )
    # Last, so that the host's address stays the host's where it is also the whole of a range (a /32).
    for network in (*UNSPECIFIED, *host_networks):
        entries[network] = IpcacheEntry(
            network, abi.Identity.HOST, flags=abi.IpcacheFlags.NODE_ADDRESS
        )
    return list(entries.values())


def list_own_addresses(netlink: NetlinkSocket) -> list[tuple[int, IPAddress]]:
    """List the addresses of this host that others can use: (device index, address)."""
    return [(address.index, address.address) for address in list_usable_addresses(netlink)]


def choose_sources(
    plan: NodePlan, underlay_index: int | None, addresses: Sequence[tuple[int, IPAddress]]
) -> SourceAddresses:
    """Choose the address per family that host processes use towards pods.

    The configured one for its family; else the first on the device that carries the node's traffic; else the
    kernel chooses.
    """
    chosen: dict[int, IPAddress] = {}
    if plan.node_address is not None:
        chosen[plan.node_address.version] = plan.node_address
    for index, address in addresses:
        if index == underlay_index:
            chosen.setdefault(address.version, address)
    ipv4, ipv6 = chosen.get(4), chosen.get(6)
    return SourceAddresses(
        ipv4=ipv4 if isinstance(ipv4, ipaddress.IPv4Address) else None,
        ipv6=ipv6 if isinstance(ipv6, ipaddress.IPv6Address) else None,
    )
