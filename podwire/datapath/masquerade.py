"""The node's own table of nftables: what pods send out of the cluster carries the node's address, what nodes tunnel is
not tracked twice, and nobody forges the packets of tunnels and of pods.

One nftables table of ours, rebuilt whole in one transaction each time, so that applying it twice changes nothing and no
packet sees half of it. Never translates what stays inside: packets to the cluster's networks, to the exceptions, to
this host (they do not pass this hook) or to groups. `datapath.node` applies, compares and removes it.
"""

import errno
import ipaddress
import json
import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from podwire.datapath import host_ports
from podwire.datapath.maps import MARKS_OF_OTHERS
from podwire.kernel.nft import Nftables
from podwire.model.cluster import TUNNEL_DEVICE
from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.errors import KernelFailure, PodwireError
from podwire.model.ids import DEVICE_PREFIX, NFT_TABLE
from podwire.model.interfaces import HostPortTable

_TABLE: Final = f"inet {NFT_TABLE}"
KERNEL_MODULES: Final = ("nf_tables", "nft_ct", "nft_masq", "nft_fib_inet", "nft_socket")
"""What the table needs of Linux, built in or as modules. Guards are not left out where one is missing."""
_GROUPS: Final[dict[int, IPNetwork]] = {
    4: ipaddress.ip_network("224.0.0.0/4"),
    6: ipaddress.ip_network("ff00::/8"),
}
PORT_LEAST: Final = 1024
PORT_MAX: Final = 65_535
_FAMILIES: Final = ((4, "ip", "ipv4_addr"), (6, "ip6", "ipv6_addr"))


def _run_for_kernel(tables: Nftables, text: str) -> None:
    """Apply the table; the failure of a kernel that lacks an expression names the modules."""
    try:
        tables.run(text)
    except KernelFailure as failure:
        # A kernel that lacks an expression says no more than that something is not there.
        if failure.errno not in (errno.ENOENT, errno.EOPNOTSUPP):
            raise
        failure.hint = (
            f"the table {NFT_TABLE!r} needs of the kernel: {', '.join(KERNEL_MODULES)}; load what is missing with"
            f" 'modprobe -a {' '.join(KERNEL_MODULES)}', or take a kernel that has them"
        )
        raise


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
    """May send to that port; None = a program on the tunnel device judges senders, nothing is refused here."""
    tunnel_mark: int = 0
    """Of what our programs send through the tunnel, as the host's stack sees it: nothing else leaves for that port."""
    pod_networks: Sequence[IPNetwork] = ()
    """Where pods of any node are, beside `pod_cidrs`: no tunnel ends there, so that port is one like others."""
    tunnel_ends: Sequence[IPAddress] = ()
    """Addresses of nodes; those in `pod_networks` are none of a pod's."""
    own_ranges: Sequence[IPNetwork] = ()
    """Whose packets come from devices of this node's pods only, or from where the route to a borrowed address leads."""


_HOOKS: Final = {
    "leave": "type nat hook postrouting priority srcnat",
    "arriving": "type filter hook prerouting priority raw",
    "sent": "type filter hook output priority raw",
    "taken_in": "type filter hook input priority filter",
    "forwarded": "type filter hook forward priority filter",
    "leaving": "type filter hook postrouting priority filter",
    **host_ports.HOOKS,
}
"""One chain for each hook: a tunnel's packet meets two on either node, and a chain costs as much as its rules."""


class _Table:
    """The table while it is put together: sets and chains to go to, and the rules of each hook in their order."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.rules: dict[str, list[str]] = {name: [] for name in _HOOKS}

    def match(self, name: str, kind: str, networks: Sequence[str]) -> str:
        """Give what matches any of the networks."""
        # One network is compared with: looking it up in a set takes longer.
        if len(networks) == 1:
            return networks[0]
        self.parts += [
            f"  set {name} {{",
            f"    type {kind}; flags interval;",
            f"    elements = {{ {', '.join(networks)} }}",
            "  }",
        ]
        return f"@{name}"

    def add_chain(self, name: str, rules: Sequence[str], hook: str = "") -> None:
        """Add a chain, of a hook or to go to."""
        lines = [f"{hook}; policy accept;"] if hook else []
        lines += rules
        self.parts += [f"  chain {name} {{", *(f"    {line}" for line in lines), "  }"]

    def render(self) -> str:
        """Give the transaction that replaces whatever was there."""
        for name, rules in self.rules.items():
            if rules:
                self.add_chain(name, rules, _HOOKS[name])
        # `delete` fails where there is no table, so the transaction adds it first.
        head = [f"add table {_TABLE}", f"delete table {_TABLE}", f"table {_TABLE} {{"]
        return "\n".join([*head, *self.parts, "}", ""])


def render_table(plan: MasqueradePlan, *, serves_host_ports: bool = False) -> str:
    """Compute the table as a transaction that replaces whatever was there; no host port is in it yet."""
    table = _Table()
    if serves_host_ports:
        _serve_host_ports(table)
    if plan.enabled:
        _translate_leaving(plan, table)
    _refuse_sources(plan, table)
    _refuse_senders(plan, table)
    if plan.tunnel_port:
        _guard_tunnel(plan, table)
    return table.render()


def _serve_host_ports(table: _Table) -> None:
    table.parts += host_ports.render_sets()
    table.add_chain("to_pod", host_ports.TO_POD)
    for name, rules in host_ports.RULES.items():
        table.rules[name] += rules


def _translate_leaving(plan: MasqueradePlan, table: _Table) -> None:
    for version, keyword, kind in _FAMILIES:
        pods = _collapse(plan.pod_cidrs, version)
        if not pods:
            continue
        inside = _collapse([*plan.inside, *plan.pod_cidrs, _GROUPS[version]], version)
        own = table.match(f"pods{version}", kind, pods)
        away = table.match(f"inside{version}", kind, inside)
        leaving = f"{keyword} saddr {own} {keyword} daddr != {away}"
        if plan.tunnel_port:
            ports = _ports_beside(plan.tunnel_port)
            masquerade = f"masquerade to :{ports} fully-random"
            table.rules["leave"].append(f"{leaving} meta l4proto udp {masquerade}")
        # Without fully-random, CPUs that translate at the same moment begin their search at the same port, and one of
        # the packets is lost (NF_NAT_RANGE_PROTO_RANDOM_FULLY).
        table.rules["leave"].append(f"{leaving} masquerade fully-random")


def _ports_beside(tunnel_port: int) -> str:
    """Give where the sources of datagrams are taken from: the larger range of ports beside the tunnel's."""
    # What comes to the tunnel's port is not tracked, so an answer to it would find no way back: of ports taken from
    # all, one flow in 64,512 never got an answer.
    above = PORT_MAX - tunnel_port, f"{max(tunnel_port + 1, PORT_LEAST)}-{PORT_MAX}"
    below = tunnel_port - PORT_LEAST, f"{PORT_LEAST}-{tunnel_port - 1}"
    return max(above, below)[1]


def _refuse_sources(plan: MasqueradePlan, table: _Table) -> None:
    """Drop what claims to come from a pod of ours, or from an address that no pod has, and came in by another device.

    The program at the pod's device asks the same of single pods; here nothing of it reaches the host either. An address
    that another node has borrowed may come in where no route leads back: its packets to this host pass by the tunnel.
    """
    rules = []
    for version, keyword, kind in _FAMILIES:
        ranges = _collapse(plan.own_ranges, version)
        if ranges:
            own = table.match(f"own{version}", kind, ranges)
            # Dropped by range alone, packets from the host to its own tunnel address and from borrowed addresses at
            # other nodes would go, too.
            missing = "fib saddr . iif oif missing"
            rules.append(f"{keyword} saddr {own} {missing} jump from_elsewhere")
    if rules:
        judged = [
            # Where the route back leads into the tunnel another node has borrowed the address; where it leads to a
            # pod's device, the sender is forged.
            f'fib saddr oifname "{TUNNEL_DEVICE}" accept',
            f'fib saddr oifname "{DEVICE_PREFIX}*" drop',
            "fib saddr oif missing drop",
        ]
        table.add_chain("from_elsewhere", judged)
        table.rules["arriving"] += rules


def _refuse_senders(plan: MasqueradePlan, table: _Table) -> None:
    """Drop what a process of this host sends from the address of a pod, here or on another node; and to a pod from any
    address that is not this host's: rules may name it, or a service has it.

    IPv6 asks for no right to do that (IP_FREEBIND), IPv4 refuses it. A transparent socket takes CAP_NET_ADMIN or
    CAP_NET_RAW, and may; what the stack answers in a pod's place comes from no socket.
    """
    pods = _collapse((*plan.pod_cidrs, *plan.pod_networks, *plan.own_ranges), 6)
    if pods:
        of_pods = table.match("forgeable6", "ipv6_addr", pods)
        no_own = "fib saddr type != local socket transparent 0 drop"
        table.rules["sent"] += [f"ip6 {end} {of_pods} {no_own}" for end in ("saddr", "daddr")]


def _guard_tunnel(plan: MasqueradePlan, table: _Table) -> None:
    """Keep tunnel packets out of connection tracking, and out altogether whose sender is no tunnel.

    What is tracked and goes to the port was translated to it: tunnels' own packets are not tracked, and the hooks
    behind the first ask them for no more than that. What this host sends there without the mark comes from a process.
    Strangers' packets are refused where no program looks.
    """
    elsewhere, strangers = _find_elsewhere(plan, table), _find_strangers(plan, table)
    unmarked = ""
    if plan.tunnel_mark:
        # kube-proxy and kubelet set bits of their own in the mark of any packet.
        mask = ~MARKS_OF_OTHERS & 0xFFFFFFFF
        unmarked = f"meta mark & {mask:#x} != {plan.tunnel_mark & mask:#x}"
    to_port, tracked = f"udp dport {plan.tunnel_port}", "ct state != untracked"
    sent = [f"{unmarked} drop"] if unmarked else []
    table.add_chain("tunnel_arriving", [*elsewhere, *strangers, "notrack"])
    table.add_chain("tunnel_sent", [*elsewhere, *sent, "notrack"])
    table.add_chain("translated", [*elsewhere, "drop"])
    table.rules["arriving"].append(f"{to_port} goto tunnel_arriving")
    table.rules["sent"].append(f"{to_port} goto tunnel_sent")
    # Tunnel packets are exempt from tracking, so what is tracked here was translated to the port: through a NodePort,
    # for example, with a VNI of the sender's choice.
    table.rules["taken_in"].append(f"{tracked} {to_port} drop")
    table.rules["forwarded"].append(f"{to_port} {tracked} goto translated")
    if unmarked:
        table.rules["leaving"].append(f"{tracked} {to_port} {unmarked} goto translated")


def _find_elsewhere(plan: MasqueradePlan, table: _Table) -> list[str]:
    """Give rules that accept what goes to the port of a pod."""
    rules = []
    for version, keyword, kind in _FAMILIES:
        networks = _collapse((*plan.pod_cidrs, *plan.pod_networks), version)
        if not networks:
            continue
        pods = table.match(f"cluster{version}", kind, networks)
        ends = _list_inside(networks, plan.tunnel_ends)
        beside = ""
        if ends:
            beside = f"{keyword} daddr != {table.match(f'ends{version}', kind, ends)} "
        rules.append(f"{keyword} daddr {pods} {beside}accept")
    return rules


def _find_strangers(plan: MasqueradePlan, table: _Table) -> list[str]:
    """Give rules that drop what comes to the port from no node."""
    if plan.tunnel_peers is None:
        return []
    rules = []
    for version, keyword, kind in _FAMILIES:
        peers = _collapse(plan.tunnel_peers, version)
        if peers:
            rules.append(f"{keyword} saddr != {table.match(f'peers{version}', kind, peers)} drop")
        else:
            rules.append(f"meta nfproto ipv{version} drop")
    return rules


class Masquerade:
    """The table of this node; remembers what the kernel shows after its own apply, to notice strangers' changes."""

    def __init__(self, tables: Nftables, ports: HostPortTable | None = None) -> None:
        """`ports`: what an earlier agent served, which is to be in force with the first plan already."""
        self._tables = tables
        self._ports: HostPortTable = dict(ports or {})
        self._lock = threading.RLock()
        """A comparison on another thread must not see a table between its writing and its reading back."""
        self._applied: str | None = None
        self._shown = ""
        """What the kernel showed after the last apply: a stranger may have written in between."""
        self._plan: MasqueradePlan | None = None
        self._text = ""

    def ensure(self, plan: MasqueradePlan) -> list[str]:
        """Apply the plan unless the table does what it says already; name what differed."""
        with self._lock:
            if plan != self._plan:
                if self._render(plan) != self._text:
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
        with self._lock:
            text = self._render(plan)
            # The ports are in the same transaction, so that a connection to one never finds it unserved.
            _run_for_kernel(self._tables, text + host_ports.render_change({}, self._ports))
            shown = _fingerprint(host_ports.take_elements(self._list())[0])
            # The same text gives the same listing: another one means that a stranger has written between apply and
            # listing, and what is shown now must not become the standard.
            if text != self._text or shown == self._shown:
                self._applied = shown
            self._plan, self._text, self._shown = plan, text, shown

    def _render(self, plan: MasqueradePlan) -> str:
        return render_table(plan, serves_host_ports=bool(self._ports))

    @property
    def host_ports(self) -> HostPortTable:
        """The ports of the host that lead to pods."""
        return self._ports

    def write_host_ports(self, ports: HostPortTable) -> None:
        """Lead exactly these ports of the host to pods: one element of a map for each that comes or goes.

        Raises KernelFailure; what was served before is then served still.
        """
        with self._lock:
            before, self._ports = self._ports, dict(ports)
            try:
                self._change_host_ports(before)
            except BaseException:
                self._ports = before
                raise

    def _change_host_ports(self, before: HostPortTable) -> None:
        change = host_ports.render_change(before, self._ports)
        if self._plan is None or not change:
            return
        # The rules come with the first port and go with the last one: whoever serves none pays for none.
        if bool(before) != bool(self._ports):
            self.apply(self._plan)
            return
        try:
            self._tables.run(change)
        except KernelFailure:
            # Somebody has changed the table, which is about to be repaired.
            self.apply(self._plan)

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
            ports = host_ports.compute_elements(self._ports)
        if applied is None:
            return [f"nftables table {NFT_TABLE!r} exists, wanted none"] if present else []
        if not present:
            return [f"nftables table {NFT_TABLE!r} is missing"]
        rest, elements = host_ports.take_elements(present)
        if _fingerprint(rest) != applied or any(elements[name] != ports[name] for name in elements):
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
    """List chains at the forward hook whose policy is drop (Docker, ufw, firewalld), as far as nftables shows them."""
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
    ranges = [ipaddress.ip_network(network) for network in networks]
    if not ranges:
        return []
    starts = [int(network.network_address) for network in ranges]
    alike = sorted({int(address) for address in addresses if address.version == ranges[0].version})
    found = []
    for number in alike:
        at = bisect_right(starts, number) - 1
        if at >= 0 and number <= int(ranges[at].broadcast_address):
            found.append(str(ranges[at][number - starts[at]]))
    return found


def _fingerprint(objects: list[dict[str, Any]]) -> str:
    """Reduce a listing to what matters: handles change with every rebuild, counters with every packet."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: strip(item) for key, item in value.items() if key != "handle"}
        if isinstance(value, list):
            return [strip(item) for item in value]
        return value

    return json.dumps(strip(objects), sort_keys=True)
