"""Other nodes: what each one publishes, and what this node's kernel should therefore hold. Values only.

`control.cluster` reads and writes `NodeFacts` as objects of the kind Node and computes a `ClusterPlan` from them;
`datapath.cluster` puts a plan into force, any number of times. Nothing here looks at the outside world.
"""

import enum
from collections.abc import Mapping
from typing import Final

import msgspec

from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.ids import IdentityId

TUNNEL_DEVICE: Final = "pw-tunnel"
"""Name of the node's one tunnel device; its alias is `podwire:<node>:tunnel`."""
DEFAULT_TUNNEL_PORT: Final = 8472
TUNNEL_OVERHEAD_IPV4_BYTES: Final = 50
"""Outer Ethernet payload: IPv4 20, UDP 8, VXLAN 8, inner Ethernet 14."""
TUNNEL_OVERHEAD_IPV6_BYTES: Final = 70


class TunnelMode(enum.StrEnum):
    """How a node speaks VXLAN."""

    FLOW = "flow"
    """One collect-metadata device; the VNI carries the sender's identity."""
    CLASSIC = "classic"
    """VNI 1, the receiver tells identities by address (as flannel-like peers do)."""


class Way(enum.StrEnum):
    """How packets get to another node's pods."""

    TUNNEL = "tunnel"
    NATIVE = "native"
    """By a route of the kernel, unchanged."""


Claimed = IPAddress | IPNetwork
"""What a node can have and no other: an address on the underlay, a range of pods."""


class Granted(msgspec.Struct, frozen=True):
    """What Kubernetes itself says that a node's pods have. It is read where two nodes claim one range."""

    ranges: tuple[IPNetwork, ...] = ()
    """() also where there is no such core Node, or only another one of that name."""
    since: str = ""
    """When the core Node was made, RFC 3339."""


class NodeFacts(msgspec.Struct, frozen=True):
    """What a node publishes. It is written only when one of these changes: it has no heartbeat."""

    name: str
    instance: str
    """Random, chosen once and kept in `state_dir`: tells a restart from another machine under the same name."""
    epoch: int
    """One more each time that the name passes to another instance; says nothing of other names."""
    addresses: tuple[IPAddress, ...]
    """On the underlay, at most one per family; the first is the one peers send tunnel packets to if they have its
    family."""
    pod_cidrs: tuple[IPNetwork, ...] = ()
    tunnel_addresses: tuple[IPAddress, ...] = ()
    """On the tunnel device, one per family, out of the node's own pod ranges: the source of its host processes."""
    tunnel_mac: str = ""
    tunnel_mode: TunnelMode = TunnelMode.FLOW
    tunnel_port: int = DEFAULT_TUNNEL_PORT
    underlay_mtu_bytes: int = 1500
    blocks: Mapping[IPNetwork, int] = msgspec.field(default_factory=dict)
    """Claimed blocks of pools, with the epoch of the claim."""
    holds: tuple[IdentityId, ...] = ()
    """Identities in use that no NodeEndpoints of it names."""
    claims: Mapping[Claimed, int] = msgspec.field(default_factory=dict)
    """Numbers of its addresses and ranges, in the order in which nodes of the cluster have claimed theirs."""
    core_uid: str = ""
    """UID of the core Node that owns the publication: it goes when that Node does. "" without Kubernetes."""
    granted: Granted | None = None
    """Never published: what was read for a contest. None: nothing was."""


class Surroundings(msgspec.Struct, frozen=True):
    """What this host reaches without any other node's help: no other node's pods may have it."""

    own: frozenset[IPAddress] = frozenset()
    """Addresses of all devices of this host."""
    subnets: tuple[IPNetwork, ...] = ()
    """What it reaches on a link of its own, whichever device that is on."""
    gateways: frozenset[IPAddress] = frozenset()
    """Next hops of its routes, our own left out."""
    store: frozenset[IPAddress] = frozenset()
    """Where the store answers."""


class Underlay(msgspec.Struct, frozen=True):
    """What this node's kernel says of the way to other nodes."""

    addresses: tuple[IPAddress, ...]
    """Own ones on the device that carries the node's traffic, at most one per family."""
    connected: tuple[IPNetwork, ...]
    """Subnets on that device: a peer in one of them is reached without a router."""
    ifindex: int
    mtu_bytes: int
    around: Surroundings = Surroundings()


class TunnelPlan(msgspec.Struct, frozen=True):
    """The tunnel device."""

    mode: TunnelMode
    port: int
    mac: str
    """Its own on every node: with equal ones VXLAN drops what hosts send (docs/datapath.md, rule 8)."""
    mtu_bytes: int
    addresses: tuple[IPAddress, ...]
    local: IPAddress
    """Outer source address. The outer family of a node is that of its peers' `outer`."""


class Peer(msgspec.Struct, frozen=True):
    """Another node as the programs know it."""

    number: int
    """Local to this node, from 1, never used for another name while this agent's state lives."""
    name: str
    outer: IPAddress
    mtu_bytes: int
    """Largest packet of a pod that gets there in one piece, headers of the tunnel already taken off."""
    way: Way
    mode: TunnelMode = TunnelMode.FLOW
    mac: str = ""
    addresses: tuple[IPAddress, ...] = ()
    """Every address that a tunnel packet of it may come from."""


class Prefix(msgspec.Struct, frozen=True):
    """One row of the ipcache that is about another node."""

    identity: IdentityId
    node: int
    """Number of the `Peer` where it lives, 0 = nobody's."""
    way: Way | None
    """None: through the stack, wherever its routes lead (a node's own address, unclaimed cluster range)."""
    mtu_bytes: int = 0
    is_node_address: bool = False


class HostRoute(msgspec.Struct, frozen=True):
    """A route of the kernel to another node's pods, for this host's own processes and for the stack's paths."""

    destination: IPNetwork
    way: Way
    via: IPAddress | None
    """Next hop with `Way.NATIVE`. With a classic device, IPv4: the peer's tunnel address, or None: the range's first
    address stands for it. Else None: next hops inside the tunnel are the datapath's own."""
    source: IPAddress | None
    mtu_bytes: int
    peer: int
    """Number of the peer; the classic tunnel device needs it for its neighbour and FDB entries."""


class ClusterPlan(msgspec.Struct, frozen=True):
    """All that the kernel shall hold because of other nodes; what is of ours and not in here goes."""

    tunnel: TunnelPlan | None = None
    peers: tuple[Peer, ...] = ()
    prefixes: Mapping[IPNetwork, Prefix] = msgspec.field(default_factory=dict)
    routes: tuple[HostRoute, ...] = ()
    pod_mtu_bytes: int = 0
    """MTU of new pod devices, 0 = the underlay's."""
    inside: tuple[IPNetwork, ...] = ()
    """What masquerade leaves alone: cluster CIDRs, every node's ranges and addresses."""
