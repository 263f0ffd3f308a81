"""The node's own table of nftables: what pods send out of the cluster carries the node's address, what nodes tunnel is
not tracked twice, and nobody forges the packets of tunnels and of pods.

One nftables table of ours, rebuilt whole in one transaction each time, so that applying it twice
changes nothing and no packet sees half of it. Never translates what stays inside: packets to the
cluster's networks, to the exceptions, to this host (they do not pass this hook) or to groups.
`datapath.node` applies, compares and removes it.
"""

import ipaddress
import json
import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from podwire.datapath.maps import MARKS_OF_OTHERS
from podwire.kernel.nft import Nftables
from podwire.model.cluster import TUNNEL_DEVICE
from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.errors import KernelFailure, PodwireError
from podwire.model.ids import DEVICE_PREFIX, NFT_TABLE

_TABLE: Final = f"inet {NFT_TABLE}"
_GROUPS: Final[dict[int, IPNetwork]] = {
    4: ipaddress.ip_network("224.0.0.0/4"),
    6: ipaddress.ip_network("ff00::/8"),
}
PORT_LEAST: Final = 1024
PORT_MAX: Final = 65_535
_FAMILIES: Final = ((4, "ip", "ipv4_addr"), (6, "ip6", "ipv6_addr"))


@dataclass(frozen=True)
class MasqueradePlan:
    """What the table must do. Networks of both families mixed; order and overlaps do not matter."""

    pod_cidrs: Sequence[IPNetwork]
    """Whose packets are translated: this node's own pod networks, and all in which it has single addresses."""
    inside: Sequence[IPNetwork]
    """Where packets keep the pod's address: the cluster's networks and the exceptions."""
    enabled: bool = True
    tunnel_port: int = 0
    """UDP port that connection tracking leaves alone; 0 = none."""
    tunnel_peers: Sequence[IPNetwork] | None = None
    """Who may send to that port; None = a program on the tunnel device judges senders, nothing is refused here."""
    tunnel_mark: int = 0
    """Of what our programs send through the tunnel, as the host's stack sees it: nothing else leaves for that port."""
    pod_networks: Sequence[IPNetwork] = ()
    """Where pods of any node are, beside `pod_cidrs`: no tunnel ends there, so that port is one like others."""
    tunnel_ends: Sequence[IPAddress] = ()
    """Addresses of nodes; those in `pod_networks` are none of a pod's."""
    own_ranges: Sequence[IPNetwork] = ()
    """Whose packets come from devices of this node's pods only, or from where the route to a borrowed address leads."""


def render_table(plan: MasqueradePlan) -> str:
    """Compute the table as a transaction that replaces whatever was there."""
    lines = [f"add table {_TABLE}", f"delete table {_TABLE}", f"table {_TABLE} {{"]
    rules = []
    for version, keyword, kind in _FAMILIES:
        pods = _collapse(plan.pod_cidrs, version)
        if not plan.enabled or not pods:
            continue
        inside = _collapse([*plan.inside, *plan.pod_cidrs, _GROUPS[version]], version)
        lines += _render_set(f"pods{version}", kind, pods)
        lines += _render_set(f"inside{version}", kind, inside)
        leaving = f"{keyword} saddr @pods{version} {keyword} daddr != @inside{version}"
        if plan.tunnel_port:
            ports = _ports_beside(plan.tunnel_port)
            rules.append(f"{leaving} meta l4proto udp masquerade to :{ports} fully-random")
        rules.append(f"{leaving} masquerade fully-random")
    if rules:
        lines += _render_chain("leave", "type nat hook postrouting priority srcnat", rules)
    lines += _render_sources(plan)
    lines += _render_senders(plan)
    if plan.tunnel_port:
        lines += _render_tunnel(plan)
    return "\n".join([*lines, "}", ""])


def _ports_beside(tunnel_port: int) -> str:
    """Give where the sources of datagrams are taken from: what comes to the tunnel's port is not tracked, so an answer
    to it would find no way back: of ports taken from all, one flow in 64,512 never got an answer.
    """
    above = PORT_MAX - tunnel_port, f"{max(tunnel_port + 1, PORT_LEAST)}-{PORT_MAX}"
    below = tunnel_port - PORT_LEAST, f"{PORT_LEAST}-{tunnel_port - 1}"
    return max(above, below)[1]


def _render_sources(plan: MasqueradePlan) -> list[str]:
    """Drop what claims to come from a pod of ours, or from an address that no pod has, and came in by another device.

    The program at the pod's device asks the same of single pods; here nothing of it reaches the host either. An address
    that another node has borrowed may come in where no route leads back: its packets to this host pass by the tunnel.
    """
    lines, rules = [], []
    for version, keyword, kind in _FAMILIES:
        own = _collapse(plan.own_ranges, version)
        if not own:
            continue
        lines += _render_set(f"own{version}", kind, own)
        rules.append(
            f"{keyword} saddr @own{version} fib saddr . iif oif missing jump from_elsewhere"
        )
    if rules:
        lines += [
            "  chain from_elsewhere {",
            f'    fib saddr oifname "{TUNNEL_DEVICE}" accept',
            f'    fib saddr oifname "{DEVICE_PREFIX}*" drop',
            "    fib saddr oif missing drop",
            "  }",
        ]
        lines += _render_chain("sources", "type filter hook prerouting priority raw", rules)
    return lines


def _render_senders(plan: MasqueradePlan) -> list[str]:
    """Drop what a process of this host sends from the address of a pod, here or on another node.

    IPv6 asks for no right to do that (IP_FREEBIND), IPv4 refuses it. A transparent socket takes CAP_NET_ADMIN or
    CAP_NET_RAW, and may; what the stack answers in a pod's place comes from no socket.
    """
    pods = _collapse((*plan.pod_cidrs, *plan.pod_networks, *plan.own_ranges), 6)
    if not pods:
        return []
    rule = "ip6 saddr @forgeable6 fib saddr type != local socket transparent 0 drop"
    chain = _render_chain("senders", "type filter hook output priority filter", [rule])
    return [*_render_set("forgeable6", "ipv6_addr", pods), *chain]


def _render_tunnel(plan: MasqueradePlan) -> list[str]:
    """Keep tunnel packets out of connection tracking, and out altogether whose sender is no tunnel.

    What is tracked and goes to the port was translated to it: tunnels' own packets are not tracked. What this host
    sends there without the mark comes from a process. Strangers' packets are refused where no program looks.
    """
    port = f"udp dport {plan.tunnel_port}"
    lines, elsewhere, strangers = [], [], []
    for version, keyword, kind in _FAMILIES:
        pods = _collapse((*plan.pod_cidrs, *plan.pod_networks), version)
        ends = _list_inside(pods, plan.tunnel_ends)
        is_no_end = f"{keyword} daddr @cluster{version}"
        if ends:
            lines += _render_set(f"ends{version}", kind, ends)
            is_no_end += f" {keyword} daddr != @ends{version}"
        if pods:
            lines += _render_set(f"cluster{version}", kind, pods)
            elsewhere.append(f"{is_no_end} accept")
        if plan.tunnel_peers is None:
            continue
        peers = _collapse(plan.tunnel_peers, version)
        if peers:
            lines += _render_set(f"peers{version}", kind, peers)
        is_other = f"{keyword} saddr != @peers{version}" if peers else f"meta nfproto ipv{version}"
        strangers.append(f"{is_other} drop")
    translated, unmarked = "ct state != untracked drop", []
    if plan.tunnel_mark:
        mask = ~MARKS_OF_OTHERS & 0xFFFFFFFF
        unmarked = [f"meta mark & {mask:#x} != {plan.tunnel_mark & mask:#x}"]
    chains = {
        "prerouting priority raw": [*elsewhere, *strangers, "notrack"],
        "output priority raw": [*elsewhere, "notrack"],
        "input priority filter": [translated],
        "forward priority filter": [*elsewhere, translated],
        "output priority filter": [*elsewhere, *(f"{one} drop" for one in unmarked)],
        "postrouting priority filter": [
            *elsewhere,
            *(f"ct state != untracked {one} drop" for one in unmarked),
        ],
    }
    for hook, rules in chains.items():
        name = hook.replace(" priority", "").replace(" ", "_")
        wanted = [f"{port} {rule}" for rule in rules if rules != elsewhere]
        if wanted:
            lines += _render_chain(f"tunnel_{name}", f"type filter hook {hook}", wanted)
    return lines


class Masquerade:
    """The table of this node; remembers what the kernel shows after its own apply, to notice
    strangers' changes.
    """

    def __init__(self, tables: Nftables) -> None:
        self._tables = tables
        self._lock = threading.RLock()
        """Whoever compares on another thread must not see a table between its writing and its reading back."""
        self._applied: str | None = None
        self._shown = ""
        """What the kernel showed after the last apply: a stranger may have written in between."""
        self._plan: MasqueradePlan | None = None
        self._text = ""

    def ensure(self, plan: MasqueradePlan) -> list[str]:
        """Apply the plan unless the table does what it says already; name what differed."""
        with self._lock:
            if plan != self._plan:
                if render_table(plan) != self._text:
                    self.apply(plan)
                    return [f"nftables table {NFT_TABLE!r} was of another plan"]
                self._plan = plan
            differences = self.compare()
            if differences:
                self.apply(plan)
            return differences

    def repair(self) -> list[str]:
        """Write the table anew if it is not as the last plan wants it; name what differed."""
        with self._lock:
            differences = [] if self._plan is None else self.compare()
            if self._plan is not None and differences:
                self.apply(self._plan)
            return differences

    def apply(self, plan: MasqueradePlan) -> None:
        """Make the table do what the plan says.

        Raises KernelFailure; the old table then stays in force.
        """
        text = render_table(plan)
        with self._lock:
            self._tables.run(text)
            shown = _fingerprint(self._list())
            if text != self._text or shown == self._shown:
                self._applied = shown
            self._plan, self._text, self._shown = plan, text, shown

    def remove(self) -> None:
        """Remove the table; an absent one is success."""
        with self._lock:
            self._tables.run(f"add table {_TABLE}\ndelete table {_TABLE}\n")
            self._applied = self._plan = None
            self._text = ""

    def compare(self) -> list[str]:
        """Name what differs from the last `apply`; nothing was applied = nothing is wanted."""
        with self._lock:
            present, applied = self._list(), self._applied
        if applied is None:
            return [f"nftables table {NFT_TABLE!r} exists, wanted none"] if present else []
        if not present:
            return [f"nftables table {NFT_TABLE!r} is missing"]
        if _fingerprint(present) != applied:
            return [f"nftables table {NFT_TABLE!r} is not as podwire made it"]
        return []

    def _list(self) -> list[dict[str, Any]]:
        try:
            return self._tables.list_json(f"list table {_TABLE}")
        except KernelFailure:
            return []


@dataclass(frozen=True)
class DroppingChain:
    """A chain of somebody else that drops forwarded packets unless a rule accepts them."""

    family: str
    table: str
    name: str


def list_dropping_forward_chains(tables: Nftables) -> list[DroppingChain]:
    """List chains at the forward hook whose policy is drop (Docker, ufw, firewalld), as far as
    nftables shows them.
    """
    try:
        objects = tables.list_json("list chains")
    except PodwireError:
        return []
    chains = [item["chain"] for item in objects if "chain" in item]
    return [
        DroppingChain(chain["family"], chain["table"], chain["name"])
        for chain in chains
        if chain.get("hook") == "forward"
        and chain.get("policy") == "drop"
        and chain["table"] != NFT_TABLE
    ]


def _collapse(networks: Iterable[IPNetwork], version: int) -> list[str]:
    """Give a family's networks without overlaps (nftables refuses those), in order."""
    if version == 4:
        four = [network for network in networks if isinstance(network, ipaddress.IPv4Network)]
        return [str(network) for network in ipaddress.collapse_addresses(four)]
    six = [network for network in networks if isinstance(network, ipaddress.IPv6Network)]
    return [str(network) for network in ipaddress.collapse_addresses(six)]


def _list_inside(networks: Sequence[str], addresses: Iterable[IPAddress]) -> list[str]:
    """List the addresses that are in one of the networks, which are in order and do not overlap."""
    ranges = [ipaddress.ip_network(one) for one in networks]
    if not ranges:
        return []
    starts = [int(one.network_address) for one in ranges]
    alike = sorted({int(one) for one in addresses if one.version == ranges[0].version})
    found = []
    for number in alike:
        at = bisect_right(starts, number) - 1
        if at >= 0 and number <= int(ranges[at].broadcast_address):
            found.append(str(ranges[at][number - starts[at]]))
    return found


def _render_set(name: str, kind: str, elements: Sequence[str]) -> list[str]:
    return [
        f"  set {name} {{",
        f"    type {kind}; flags interval;",
        f"    elements = {{ {', '.join(elements)} }}",
        "  }",
    ]


def _render_chain(name: str, hook: str, rules: Sequence[str]) -> list[str]:
    return [
        f"  chain {name} {{",
        f"    {hook}; policy accept;",
        *(f"    {rule}" for rule in rules),
        "  }",
    ]


def _fingerprint(objects: list[dict[str, Any]]) -> str:
    """Reduce a listing to what matters: handles change with every rebuild, counters with every
    packet.
    """

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: strip(item) for key, item in value.items() if key != "handle"}
        if isinstance(value, list):
            return [strip(item) for item in value]
        return value

    return json.dumps(strip(objects), sort_keys=True)
