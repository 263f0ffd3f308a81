"""The node's one tunnel device: found, made, repaired, removed.

Called by `datapath.cluster` under the node's turn, and by the search for leftovers. A device belongs to podwire when
its alias says so. Between creation and alias its name, kind and group identify it. Nothing else is ever changed, and a
device or process of somebody else on the tunnel's UDP port is reported and left alone. Invariant: a device has its
programs before it is up, so no packet from outside passes unjudged, and none leaves without the mark.
"""

import errno
import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from podwire.datapath.device import LIVE_GROUP, list_attached_programs
from podwire.datapath.differences import list_differences
from podwire.kernel.netlink import NetlinkSocket, Request
from podwire.kernel.probe import Feature, explain_failure
from podwire.kernel.rtnl.link import (
    Link,
    LinkEnd,
    delete_link,
    get_link,
    list_links,
    read_link,
    set_link,
)
from podwire.kernel.rtnl.route import (
    InterfaceAddress,
    Neighbour,
    add_address,
    delete_address,
    delete_neighbour,
    list_addresses,
    list_neighbours,
    read_address,
    read_neighbour,
    set_neighbour,
)
from podwire.kernel.rtnl.tc import (
    FROM_POD_HOOK,
    TO_POD_HOOK,
    add_clsact,
    set_bpf_filter,
)
from podwire.kernel.rtnl.vxlan import (
    KIND,
    ForwardingEntry,
    Vxlan,
    change_local,
    create_vxlan,
    delete_forwarding,
    list_forwarding,
    read_forwarding,
    read_vxlan,
    set_forwarding,
)
from podwire.kernel.sysctl import ensure_sysctl, sysctl_exists
from podwire.model.cluster import TUNNEL_DEVICE, TunnelMode, TunnelPlan
from podwire.model.endpoint import IPAddress
from podwire.model.errors import ForeignObject, KernelFailure, Unsupported
from podwire.model.ids import (
    ALIAS_PREFIX,
    FILTER_HANDLE,
    GATEWAY_IPV4,
    GATEWAY_IPV6,
    MARK_FILTER_HANDLE,
)

GATEWAYS: Final[Mapping[int, IPAddress]] = {
    4: ipaddress.IPv4Address(GATEWAY_IPV4),
    6: ipaddress.IPv6Address(GATEWAY_IPV6),
}
"""By family: the one next hop of every route through a flow-based device."""
GATEWAY_MAC: Final = "0e:70:ff:ff:ff:ff"
"""Where frames of this host go; receivers look at the packet only. It belongs to no endpoint and no node."""
CLASSIC_VNI: Final = 1
IPV6_LEAST_MTU_BYTES: Final = 1280
"""RFC 8200, section 5."""
_ALIAS: Final = re.compile(rf"{ALIAS_PREFIX}:(?P<node>[^:]+):tunnel")
_GONE: Final = (errno.ENODEV, errno.ENOENT, errno.ESRCH, errno.EADDRNOTAVAIL)


class TunnelHook(msgspec.Struct, frozen=True):
    """Where one program of a tunnel device goes."""

    hook: int
    name: str
    fd: int
    program_id: int
    handle: int = FILTER_HANDLE

    def attach_to(self, index: int) -> Request:
        """Put the program there, in the place of what has its handle."""
        return set_bpf_filter(index, self.hook, self.fd, self.name, handle=self.handle)


class TunnelPrograms(msgspec.Struct, frozen=True):
    """The programs of a tunnel device: descriptor to attach each by, and number to recognise it by."""

    from_overlay: tuple[int, int]
    to_overlay: tuple[int, int]
    mark_tunnel: tuple[int, int]

    def hooks(self, *, is_flow_based: bool) -> Sequence[TunnelHook]:
        """Give what a device gets, in the order of attaching: a classic one is only to mark what it sends."""
        incoming = TunnelHook(FROM_POD_HOOK, "from_overlay", *self.from_overlay)
        out = TunnelHook(TO_POD_HOOK, "to_overlay", *self.to_overlay)
        # The last one of a place is the first one that runs (cls_bpf_change).
        mark = TunnelHook(TO_POD_HOOK, "mark_tunnel", *self.mark_tunnel, MARK_FILTER_HANDLE)
        return (incoming, out, mark) if is_flow_based else (out, mark)


class TunnelSide(msgspec.Struct, frozen=True):
    """What the tunnel device shall be. `peers`: neighbours and forwarding of a classic one; their index is ignored."""

    plan: TunnelPlan
    node_name: str
    programs: TunnelPrograms
    families: frozenset[int]
    neighbours: tuple[tuple[IPAddress, str], ...] = ()
    forwarding: tuple[tuple[str, IPAddress], ...] = ()

    @property
    def settings(self) -> Vxlan:
        """Give what only VXLAN devices have."""
        if self.plan.mode is TunnelMode.FLOW:
            return Vxlan(self.plan.port, flow_based=True)
        return Vxlan(self.plan.port, flow_based=False, vni=CLASSIC_VNI, local=self.plan.local)

    @property
    def alias(self) -> str:
        """Give our mark."""
        return f"{ALIAS_PREFIX}:{self.node_name}:tunnel"

    def all_neighbours(self) -> tuple[tuple[IPAddress, str], ...]:
        """Give every neighbour that the device shall have."""
        if self.plan.mode is TunnelMode.CLASSIC:
            return self.neighbours
        return tuple((GATEWAYS[version], GATEWAY_MAC) for version in sorted(self.families))


class FoundTunnel(msgspec.Struct, frozen=True):
    """A VXLAN device of this namespace. `node_name`: whose it is, "" = born and never marked, None = not ours."""

    link: Link
    settings: Vxlan
    node_name: str | None


def list_tunnels(netlink: NetlinkSocket) -> list[FoundTunnel]:
    """List every VXLAN device here, ours or not."""
    tunnels = []
    for body in netlink.dump(list_links(kind=KIND)):
        settings = read_vxlan(body)
        if settings is not None:
            link = read_link(body)
            tunnels.append(FoundTunnel(link, settings, _owner(link)))
    return tunnels


def find_tunnel(netlink: NetlinkSocket, node_name: str) -> FoundTunnel | None:
    """Find the node's own device."""
    own = list_own_tunnels(netlink, node_name)
    return next((tunnel for tunnel in own if tunnel.link.name == TUNNEL_DEVICE), None)


def list_own_tunnels(netlink: NetlinkSocket, node_name: str) -> list[FoundTunnel]:
    """List the node's devices: one, and what somebody has given another name."""
    return [tunnel for tunnel in list_tunnels(netlink) if tunnel.node_name in ("", node_name)]


def _owner(link: Link) -> str | None:
    mark = _ALIAS.fullmatch(link.alias)
    if mark is not None:
        return mark["node"]
    # The kernel takes an alias only in a second request: an agent that was killed in between left a device without
    # one.
    unmarked = link.name == TUNNEL_DEVICE and link.group == LIVE_GROUP and not link.alias
    return "" if unmarked else None


def find_foreign(netlink: NetlinkSocket, port: int, node_name: str) -> list[FoundTunnel]:
    """List the devices of others that stand in the way of a tunnel on `port`."""
    return [
        tunnel
        for tunnel in list_tunnels(netlink)
        if tunnel.node_name not in ("", node_name)
        and (tunnel.settings.port == port or tunnel.link.name == TUNNEL_DEVICE)
    ]


def require_free(netlink: NetlinkSocket, port: int, node_name: str) -> None:
    """Raise ForeignObject when somebody else's device has the tunnel's port or name."""
    for tunnel in find_foreign(netlink, port, node_name):
        name = tunnel.link.name
        whose = f"podwire's node {tunnel.node_name!r}" if tunnel.node_name else "somebody else"
        raise ForeignObject(
            f"use UDP port {port} for the tunnel: VXLAN device {name!r} on port"
            f" {tunnel.settings.port} belongs to {whose}",
            hint=f"remove it (ip link del {name}), or choose another `tunnel_port` on every node",
        )
    body = netlink.find(get_link(name=TUNNEL_DEVICE))
    if body is not None and read_link(body).kind != KIND:
        raise ForeignObject(
            f"create tunnel device {TUNNEL_DEVICE!r}: a {read_link(body).kind} device of somebody"
            " else has that name",
            hint=f"rename or remove it: ip link del {TUNNEL_DEVICE}",
        )


def ensure_tunnel(netlink: NetlinkSocket, side: TunnelSide) -> tuple[int, list[str]]:
    """Make the device be what `side` says; gives its index and what differed.

    Raises ForeignObject when a process has the UDP port, KernelFailure, Unsupported.
    """
    differences = _remove_renamed(netlink, side.node_name)
    tunnel = find_tunnel(netlink, side.node_name)
    if tunnel is not None and _must_go(tunnel.settings, side.settings):
        differences.append(
            f"tunnel device {TUNNEL_DEVICE!r} is {_shown(tunnel.settings)},"
            f" wanted {_shown(side.settings)}: made anew"
        )
        # First, because the old device has the name and the UDP port.
        netlink.execute([delete_link(tunnel.link.index)])
        tunnel = None
    elif tunnel is None:
        differences.append(f"tunnel device {TUNNEL_DEVICE!r} is missing")
    if tunnel is None:
        tunnel = _create(netlink, side)
        try:
            _repair(netlink, side, tunnel)
        except BaseException:
            netlink.attempt([delete_link(tunnel.link.index)])
            raise
        return tunnel.link.index, differences
    return tunnel.link.index, _repair(netlink, side, tunnel)


def _remove_renamed(netlink: NetlinkSocket, node_name: str) -> list[str]:
    """Remove what is ours under another name: it has the UDP port, and a device that is up keeps its name in 6.1."""
    own = list_own_tunnels(netlink, node_name)
    return _remove(netlink, [tunnel.link for tunnel in own if tunnel.link.name != TUNNEL_DEVICE])


def remove_tunnel(netlink: NetlinkSocket, node_name: str) -> list[str]:
    """Remove the node's device, and with it its routes and neighbours; names it, or nothing when there is none."""
    return _remove(netlink, [tunnel.link for tunnel in list_own_tunnels(netlink, node_name)])


def _remove(netlink: NetlinkSocket, links: Sequence[Link]) -> list[str]:
    netlink.execute([delete_link(link.index) for link in links], tolerated=_GONE)
    return [f"tunnel device {link.name!r} is there, wanted none" for link in links]


def _must_go(settings: Vxlan, wanted: Vxlan) -> bool:
    """Tell what the kernel does not change on a living device."""
    # drivers/net/vxlan/vxlan_core.c:vxlan_nl2conf refuses a change of port, mode and VNI.
    fixed = (settings.port, settings.flow_based, settings.vni, settings.learning)
    if fixed != (wanted.port, wanted.flow_based, wanted.vni, wanted.learning):
        return True
    # The same function refuses a local address of another family.
    versions = {
        None if address is None else address.version for address in (settings.local, wanted.local)
    }
    return len(versions) > 1


def _shown(settings: Vxlan) -> str:
    mode = "flow-based" if settings.flow_based else f"of VNI {settings.vni}"
    local = f" from {settings.local}" if settings.local is not None else ""
    return f"{mode} on port {settings.port}{local}"


def _create(netlink: NetlinkSocket, side: TunnelSide) -> FoundTunnel:
    plan = side.plan
    end = LinkEnd(TUNNEL_DEVICE, mac=plan.mac, mtu=plan.mtu_bytes, group=LIVE_GROUP)
    failure = netlink.attempt([create_vxlan(end, side.settings)])[0]
    if failure is not None:
        raise _explain(failure, plan.port)
    tunnel = find_tunnel(netlink, side.node_name)
    if tunnel is None:
        raise KernelFailure(errno.ENODEV, "find the new device", TUNNEL_DEVICE)
    return tunnel


def _repair(netlink: NetlinkSocket, side: TunnelSide, tunnel: FoundTunnel) -> list[str]:
    """Put right what differs. What a device needs before it is up comes before that."""
    differences: list[str] = []
    index = tunnel.link.index
    # Programs before link-up: what comes in by a device without them passes unjudged, and what leaves has no mark.
    differences += _repair_programs(netlink, index, side)
    if tunnel.link.mtu < IPV6_LEAST_MTU_BYTES <= side.plan.mtu_bytes:
        # The kernel takes IPv6 off a device whose MTU is too small for it, settings and all, and gives it back.
        netlink.execute([set_link(index, mtu=side.plan.mtu_bytes)])
    differences += _repair_settings(side)
    differences += _repair_link(netlink, side, tunnel)
    differences += _repair_addresses(netlink, index, side.plan.addresses)
    differences += _repair_neighbours(netlink, index, side.all_neighbours())
    if side.plan.mode is TunnelMode.CLASSIC:
        differences += _repair_forwarding(netlink, index, side.forwarding)
    return differences


def _repair_programs(netlink: NetlinkSocket, index: int, side: TunnelSide) -> list[str]:
    differences, requests = [], []
    hooks = side.programs.hooks(is_flow_based=side.plan.mode is TunnelMode.FLOW)
    for wanted in hooks:
        number = wanted.program_id
        present = list_attached_programs(netlink, index, wanted.hook, wanted.handle)
        if present != [number]:
            state = f"number {present[0]}, wanted {number}" if present else "not attached"
            differences.append(f"program {wanted.name} of {TUNNEL_DEVICE!r} is {state}")
            requests.append(wanted.attach_to(index))
    if requests:
        failure = netlink.attempt([add_clsact(index)])[0]
        if failure is not None and failure.errno != errno.EEXIST:
            raise explain_failure(failure, Feature.CLSACT_BPF)
        netlink.execute(requests)
    return differences


def _repair_settings(side: TunnelSide) -> list[str]:
    """Packets for this host come in by the tunnel whatever route leads back, and classic ones are forwarded to pods."""
    wanted: list[tuple[tuple[str, ...], str]] = [
        # Loose: a strict filter drops what comes in by the tunnel while the route back leads past it.
        (("ipv4", "conf", TUNNEL_DEVICE, "rp_filter"), "2"),
        (("ipv4", "conf", TUNNEL_DEVICE, "forwarding"), "1"),
    ]
    if 6 in side.families and side.plan.mtu_bytes >= IPV6_LEAST_MTU_BYTES:
        off = ("ipv6", "conf", TUNNEL_DEVICE, "disable_ipv6")
        if not sysctl_exists(*off):
            raise Unsupported(
                f"give tunnel device {TUNNEL_DEVICE!r} IPv6: this host has none",
                hint="give pods IPv4 only, or boot without ipv6.disable",
            )
        wanted += [(off, "0"), (("ipv6", "conf", TUNNEL_DEVICE, "forwarding"), "1")]
    changed = [
        (path, value, before)
        for path, value in wanted
        if (before := ensure_sysctl(value, *path)) is not None
    ]
    return [
        f"setting {path[-1]} of {TUNNEL_DEVICE!r} for {path[0]} was {before}, wanted {value}"
        for path, value, before in changed
    ]


def _repair_link(netlink: NetlinkSocket, side: TunnelSide, tunnel: FoundTunnel) -> list[str]:
    link, plan = tunnel.link, side.plan
    wanted: dict[str, tuple[object, object]] = {
        "alias": (link.alias, side.alias),
        "mtu": (link.mtu, plan.mtu_bytes),
        "mac": (link.mac, plan.mac),
        "state": ("up" if link.up else "down", "up"),
    }
    differences = list_differences(f"tunnel device {TUNNEL_DEVICE!r}", wanted)
    requests: list[Request] = []
    if tunnel.settings.local != side.settings.local and side.settings.local is not None:
        differences.append(
            f"tunnel device {TUNNEL_DEVICE!r}: outer address is {tunnel.settings.local},"
            f" wanted {side.settings.local}"
        )
        requests.append(change_local(link.index, side.settings.local))
    if not differences:
        return []
    name = link.name
    if 6 in side.families or sysctl_exists("ipv6", "conf", name, "addr_gen_mode"):
        requests.append(set_link(link.index, name=name, no_link_local=True))
    requests.append(
        set_link(link.index, name=name, mac=plan.mac, mtu=plan.mtu_bytes, alias=side.alias)
    )
    netlink.execute(requests)
    # By itself and last: the kernel opens the UDP socket here (vxlan_open), and a failure is about the port.
    failure = netlink.attempt([set_link(link.index, name=name, up=True)])[0]
    if failure is not None:
        raise _explain(failure, plan.port)
    return differences


def _repair_addresses(
    netlink: NetlinkSocket, index: int, addresses: Iterable[IPAddress]
) -> list[str]:
    wanted = {InterfaceAddress(index, address, address.max_prefixlen) for address in addresses}
    present = {read_address(body) for body in netlink.dump(list_addresses(index))}
    return _apply(
        netlink,
        f"address {{}} of {TUNNEL_DEVICE!r}",
        {str(address.address): add_address(address) for address in wanted - present},
        {str(address.address): delete_address(address) for address in present - wanted},
    )


def _repair_neighbours(
    netlink: NetlinkSocket, index: int, neighbours: Iterable[tuple[IPAddress, str]]
) -> list[str]:
    wanted = {address: Neighbour(index, address, mac) for address, mac in neighbours}
    # Entries that the kernel has learnt come and go by themselves.
    permanent = [
        neighbour
        for body in netlink.dump(list_neighbours(index))
        if (neighbour := read_neighbour(body)).permanent
    ]
    present = {neighbour.address: neighbour for neighbour in permanent}
    return _apply(
        netlink,
        f"neighbour {{}} of {TUNNEL_DEVICE!r}",
        {
            str(key): set_neighbour(neighbour)
            for key, neighbour in wanted.items()
            if present.get(key) != neighbour
        },
        {
            str(key): delete_neighbour(neighbour)
            for key, neighbour in present.items()
            if key not in wanted
        },
    )


def _repair_forwarding(
    netlink: NetlinkSocket, index: int, forwarding: Iterable[tuple[str, IPAddress]]
) -> list[str]:
    wanted = {mac: ForwardingEntry(index, mac, outer) for mac, outer in forwarding}
    entries = [read_forwarding(body) for body in netlink.dump(list_forwarding(index))]
    present = {entry.mac: entry for entry in entries if entry is not None}
    return _apply(
        netlink,
        f"forwarding entry {{}} of {TUNNEL_DEVICE!r}",
        {key: set_forwarding(entry) for key, entry in wanted.items() if present.get(key) != entry},
        {key: delete_forwarding(entry) for key, entry in present.items() if key not in wanted},
    )


def _apply(
    netlink: NetlinkSocket, what: str, put: Mapping[str, Request], remove: Mapping[str, Request]
) -> list[str]:
    """Send what is missing, then what is too much; name both."""
    netlink.execute(list(put.values()))
    netlink.execute(list(remove.values()), tolerated=_GONE)
    return name_differences(what, put, remove)


_NAMED_AT_MOST: Final = 8


def name_differences(what: str, put: Iterable[str], remove: Iterable[str]) -> list[str]:
    """Say in sentences what was missing or wrong, and what was too much; of many, the first few and their number.

    `what` has one place for the name.
    """
    return [
        sentence
        for names, fault in ((put, "was missing or wrong"), (remove, "was too much"))
        for sentence in _shorten(list(names), lambda name: f"{what.format(name)} {fault}")  # noqa: B023
    ]


def _shorten(names: Sequence[str], say: Callable[[str], str]) -> list[str]:
    sentences = [say(name) for name in names[:_NAMED_AT_MOST]]
    rest = len(names) - _NAMED_AT_MOST
    return sentences if rest <= 0 else [*sentences, f"and {rest} more: {say('...')}"]


def _explain(failure: KernelFailure, port: int) -> Exception:
    # EADDRINUSE comes from the UDP socket. A device that was moved to another namespace keeps its socket in this one.
    if failure.errno in (errno.EADDRINUSE, errno.EEXIST):
        return ForeignObject(
            f"use UDP port {port} for the tunnel: a process or a device that left this namespace has it",
            hint=f"find it (ss -ulpn sport = :{port}) and stop it, or choose another `tunnel_port`"
            " on every node",
        )
    if failure.errno == errno.EOPNOTSUPP:
        return Unsupported(
            f"create tunnel device {TUNNEL_DEVICE!r}: this kernel has no VXLAN",
            hint="load the module vxlan, or use native routing",
        )
    return failure
