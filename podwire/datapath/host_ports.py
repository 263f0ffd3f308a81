"""Host ports as nftables has them: four maps, one element for each port, and the rules that look into them.

Part of the node's own table, which `datapath.masquerade` keeps; that module decides when a text from here is applied.
Pure. The rules are there only while a port is served, so a node without host ports does nothing more for a packet.
"""

import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from podwire.model.ids import DEVICE_PREFIX, NFT_TABLE
from podwire.model.interfaces import HostPortTable, HostSocket, PodSocket

_TABLE: Final = f"inet {NFT_TABLE}"
_KINDS: Final = {4: "ipv4_addr", 6: "ipv6_addr"}
_EACH, _AT, _SELF = "host_ports{}", "host_ports_at{}", "behind_host_ports{}"
HOOKS: Final = {
    # One behind DNAT of others: what kube-proxy or Docker serve already is not taken from them by a pod.
    "to_this_host": "type nat hook prerouting priority -99",
    "to_itself": "type nat hook output priority -99",
}
Elements = Mapping[str, frozenset[str]]
"""Of each map and set, its elements as nftables reads them."""


def render_sets() -> list[str]:
    """Declare the maps and sets, empty."""
    lines = []
    for version, kind in _KINDS.items():
        to_pod = f"{kind} . inet_service"
        for name, key in ((_EACH, "inet_proto"), (_AT, f"{kind} . inet_proto")):
            lines += [
                f"  map {name.format(version)} {{",
                f"    type {key} . inet_service : {to_pod};",
                "  }",
            ]
        lines += [f"  set {_SELF.format(version)} {{", f"    type {kind} . {kind};", "  }"]
    return lines


TO_POD: Final = (
    "dnat ip to ip daddr . meta l4proto . th dport map @host_ports_at4",
    "meta nfproto ipv4 dnat ip to meta l4proto . th dport map @host_ports4",
    # What comes from ::1 or from a link-local address is not forwarded, so it would get no further when translated.
    "ip6 daddr { ::1, fe80::/10 } return",
    "dnat ip6 to ip6 daddr . meta l4proto . th dport map @host_ports_at6",
    "meta nfproto ipv6 dnat ip6 to meta l4proto . th dport map @host_ports6",
)
"""The rules of a chain to go to. An address of the host's that was asked for by name comes before each."""
RULES: Final = {
    "to_this_host": ("fib daddr type local jump to_pod",),
    "to_itself": ("fib daddr type local jump to_pod",),
    # Translation comes before the kernel looks for martians: without this a neighbour that sends to 127.0.0.1 would
    # reach what is meant for this host alone, and so would a pod whose device lets 127.0.0.1 out.
    "arriving": ('ip daddr 127.0.0.0/8 iif != "lo" drop',),
    "leave": (
        # A pod does not take a packet from its own address.
        "ip saddr . ip daddr @behind_host_ports4 ct status dnat masquerade",
        "ip6 saddr . ip6 daddr @behind_host_ports6 ct status dnat masquerade",
        f'ip saddr 127.0.0.0/8 oifname "{DEVICE_PREFIX}*" ct status dnat masquerade',
    ),
}


def compute_elements(ports: HostPortTable) -> Elements:
    """Compute what the maps and sets hold."""
    found: dict[str, set[str]] = {
        name.format(version): set() for version in _KINDS for name in (_EACH, _AT, _SELF)
    }
    for socket, pod in ports.items():
        version = pod.address.version
        found[_map_of(socket)].add(_write_element(socket, pod))
        found[_SELF.format(version)].add(f"{pod.address} . {pod.address}")
    return {name: frozenset(elements) for name, elements in found.items()}


def render_change(before: HostPortTable, after: HostPortTable) -> str:
    """Write the commands that turn the one into the other, all of one transaction; "" where nothing differs."""
    # Of what differs alone, or each pod that comes would cost as much as all that have ports.
    had = compute_elements(dict(before.items() - after.items()))
    wanted = compute_elements(dict(after.items() - before.items()))
    had, wanted = _leave_out_pods(had, after), _leave_out_pods(wanted, before)
    lines = [
        # A port that passes to another pod is deleted and added: nftables refuses a second element of one key.
        *_render("delete", {name: had[name] - wanted[name] for name in had}),
        *_render("add", {name: wanted[name] - had[name] for name in had}),
    ]
    return "\n".join([*lines, ""]) if lines else ""


def _leave_out_pods(elements: Elements, other: HostPortTable) -> Elements:
    """Leave out the pods that have ports in the other table as well: one element stands for all ports of a pod."""
    shared = {f"{address} . {address}" for address in {pod.address for pod in other.values()}}
    selves = {_SELF.format(version) for version in _KINDS}
    return {
        name: some - shared if name in selves and some else some for name, some in elements.items()
    }


def _render(verb: str, elements: Elements) -> Iterator[str]:
    for name, some in elements.items():
        if some:
            yield f"{verb} element {_TABLE} {name} {{ {', '.join(sorted(some))} }}"


def _map_of(socket: HostSocket) -> str:
    name = _EACH if socket.address.is_unspecified else _AT
    return name.format(socket.address.version)


def _write_element(socket: HostSocket, pod: PodSocket) -> str:
    where = "" if socket.address.is_unspecified else f"{socket.address} . "
    return f"{where}{socket.protocol} . {socket.port} : {pod.address} . {pod.port}"


def take_elements(listing: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], Elements]:
    """Split a listing of the table into what it has without the elements of host ports, and those."""
    names = compute_elements({}).keys()
    rest, found = [], {}
    for item in listing:
        kind, value = next(iter(item.items()))
        if kind in ("map", "set") and value["name"] in names:
            found[value["name"]] = frozenset(map(_read_element, value.get("elem", ())))
            value = {key: member for key, member in value.items() if key != "elem"}
        rest.append({kind: value})
    return rest, found


_PROTOCOLS: Final = {"tcp": 6, "udp": 17, "sctp": 132}
"""nftables lists a protocol by name where this machine has a name for the number."""


def _read_element(element: Any) -> str:
    if isinstance(element, dict):
        return _read_concatenation(element)
    return " : ".join(_read_concatenation(half) for half in element)


def _read_concatenation(half: dict[str, Any]) -> str:
    parts = half["concat"] if "concat" in half else half["elem"]["val"]["concat"]
    return " . ".join(_read_part(part) for part in parts)


def _read_part(part: object) -> str:
    text = str(_PROTOCOLS.get(str(part), part))
    return str(ipaddress.ip_address(text)) if ":" in text else text
