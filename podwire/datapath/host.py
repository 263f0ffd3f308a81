"""The host itself: settings that pods need, obstacles on this host, and the size that packets may have.

Called by `datapath.node` when the agent starts, and by `doctor`. Everything that is changed is remembered with its
earlier value, so that `cleanup` can restore it; what somebody else changed meanwhile stays. Never switches forwarding
on for IPv6 without protecting the host's own default route first: with forwarding, router advertisements count only
where accept_ra is 2.
"""

import contextlib
import errno
from collections.abc import Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Final

import msgspec

from podwire.datapath.masquerade import list_dropping_forward_chains
from podwire.datapath.routes import dump_routes
from podwire.kernel.netlink import NetlinkSocket
from podwire.kernel.nft import Nftables
from podwire.kernel.rtnl.link import Link, list_links, read_link
from podwire.kernel.rtnl.route import (
    AF_INET,
    AF_INET6,
    ROUTE_ANYCAST,
    ROUTE_BROADCAST,
    ROUTE_LOCAL,
    TABLE_LOCAL,
    TABLE_MAIN,
    InterfaceAddress,
    Route,
    list_addresses,
    read_address,
)
from podwire.kernel.spawn import run
from podwire.kernel.sysctl import ensure_sysctl, read_sysctl, sysctl_exists, write_sysctl
from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.errors import KernelFailure, Unavailable

_LEGACY_TABLES: Final = {
    4: "/proc/thread-self/net/ip_tables_names",
    6: "/proc/thread-self/net/ip6_tables_names",
}
_LEGACY_COMMANDS: Final = {4: "iptables-legacy", 6: "ip6tables-legacy"}
_RTPROT_RA: Final = 9
_RTPROT_KERNEL: Final = 2
_TIMEOUT_S: Final = 5.0


class SettingChange(msgspec.Struct, frozen=True):
    """A setting below /proc/sys/net that was changed: its path, the value before and the value written."""

    path: tuple[str, ...]
    before: str
    after: str


class HostWarning(msgspec.Struct, frozen=True):
    """Something on this host that breaks pods' traffic, and what to do about it."""

    message: str
    hint: str


class Underlay(msgspec.Struct, frozen=True):
    """The device that carries the node's traffic and the biggest packet it sends, in bytes."""

    name: str
    index: int
    mtu: int


def prepare_host(netlink: NetlinkSocket, *, ipv4: bool, ipv6: bool) -> list[SettingChange]:
    """Switch forwarding on for the families that pods use; gives what was changed, for `undo_host`.

    The calling thread must be in the same namespace as the socket. A second call changes nothing.
    """
    wanted: list[tuple[tuple[str, ...], str]] = []
    if ipv4:
        wanted.append((("ipv4", "ip_forward"), "1"))
    if ipv6 and read_sysctl("ipv6", "conf", "all", "forwarding") != "1":
        # First accept_ra, then forwarding: once it forwards, a device with accept_ra=1 ignores advertisements and its
        # default route expires (Documentation/networking/ip-sysctl.rst).
        wanted += [
            (("ipv6", "conf", name, "accept_ra"), "2") for name in _list_router_listeners(netlink)
        ]
        wanted.append((("ipv6", "conf", "all", "forwarding"), "1"))
    changes = []
    for path, value in wanted:
        before = ensure_sysctl(value, *path)
        if before is not None:
            changes.append(SettingChange(path, before, value))
    return changes


def undo_host(changes: Iterable[SettingChange]) -> list[SettingChange]:
    """Restore settings that are as they were written, last first; gives those that were restored."""
    undone = []
    for change in reversed(list(changes)):
        with contextlib.suppress(KernelFailure):  # the device may be gone
            # Somebody else who has set it since means it: Docker, for one, needs ip_forward as well.
            if read_sysctl(*change.path) == change.after:
                write_sysctl(change.before, *change.path)
                undone.append(change)
    return undone


class _Changes(msgspec.Struct, frozen=True):
    """What is written down: settings do not outlive a boot."""

    boot_id: str
    changes: tuple[SettingChange, ...] = ()


def merge_changes(noted: str, made: Iterable[SettingChange], boot_id: str) -> str:
    """Add changes to those noted before in this boot. Of two changes of one setting the earlier one is kept."""
    known = {change.path: change for change in read_changes(noted, boot_id)}
    for change in made:
        known.setdefault(change.path, change)
    return msgspec.json.encode(_Changes(boot_id, tuple(known.values()))).decode()


def read_changes(noted: str, boot_id: str) -> tuple[SettingChange, ...]:
    """Give the changes that were noted in this boot."""
    if not noted:
        return ()
    changes = msgspec.json.decode(noted, type=_Changes)
    # Settings below /proc/sys do not outlive a boot: after one there is nothing to put back.
    return changes.changes if changes.boot_id == boot_id else ()


def find_warnings(
    netlink: NetlinkSocket, tables: Nftables, *, ipv4: bool, ipv6: bool
) -> list[HostWarning]:
    """Name what on this host will break pods' traffic through its stack. Changes nothing."""
    warnings = [
        HostWarning(
            f"chain {chain.name!r} of nftables table {chain.family} {chain.table!r} drops"
            " forwarded packets that no rule of it accepts: pods may not reach the world",
            "accept the pod networks there; with Docker: iptables -I DOCKER-USER -s POD-CIDR"
            " -j ACCEPT; iptables -I DOCKER-USER -d POD-CIDR -j ACCEPT",
        )
        for chain in list_dropping_forward_chains(tables)
    ]
    for version, wanted in ((4, ipv4), (6, ipv6)):
        if wanted and _legacy_forward_drops(version):
            warnings.append(
                HostWarning(
                    f"the policy of {_LEGACY_COMMANDS[version]} chain 'FORWARD' is DROP:"
                    " pods may not reach the world",
                    f"{_LEGACY_COMMANDS[version]} -P FORWARD ACCEPT, or accept the pod networks",
                )
            )
    if ipv4 and read_sysctl("ipv4", "ip_forward") != "1":
        warnings.append(_forwarding_off("net.ipv4.ip_forward"))
    if ipv6:
        warnings += _find_ipv6_warnings(netlink)
    return warnings


def list_host_networks(netlink: NetlinkSocket) -> list[tuple[int, IPNetwork]]:
    """List what this host answers to: (device index, network).

    Not only its addresses: a subnet's broadcast and router anycast address, and whole networks of `ip route add local`,
    lead to its sockets, too. What no pod's packet can be sent to is left out.
    """
    routes = [
        route
        for family in (AF_INET, AF_INET6)
        for kind in (ROUTE_LOCAL, ROUTE_BROADCAST, ROUTE_ANYCAST)
        for route in dump_routes(netlink, family, table=TABLE_LOCAL, kind=kind)
    ]
    return [
        (route.index, route.destination)
        for route in routes
        if not _is_never_sent_to(route.destination)
    ]


def _is_never_sent_to(network: IPNetwork) -> bool:
    """Tell whether the programs drop what a pod sends there, no matter which host has it (bpf/.../frame.h)."""
    return network.is_loopback or (network.version == 6 and network.is_link_local)


def detect_underlay(netlink: NetlinkSocket, node_address: IPAddress | None = None) -> Underlay:
    """Find the device that carries the node's traffic: the one with its address, else that of the default route.

    Its MTU is the smaller of the device's and the default route's own. Raises Unavailable when there is neither.
    """
    links = {link.index: link for link in _list_links(netlink)}
    routes = _list_default_routes(netlink)
    index = _find_address(netlink, node_address) if node_address is not None else None
    if index is None and routes:
        index = routes[0].index
    link = links.get(index) if index is not None else None
    if link is None:
        raise Unavailable(
            "detect the MTU: there is neither a default route nor a device with the node's address",
            hint="set `mtu` and `node_address` in the agent's configuration",
        )
    # A route may have an MTU of its own (`ip route ... mtu`), which the outer packets of a tunnel follow as well.
    limits = [route.mtu for route in routes if route.index == link.index and route.mtu]
    return Underlay(link.name, link.index, min([link.mtu, *limits]))


def list_device_addresses() -> list[tuple[str, IPAddress]]:
    """List the addresses of this host that others can use, with their devices, in the kernel's order of devices."""
    with NetlinkSocket() as netlink:
        names = {link.index: link.name for link in _list_links(netlink)}
        present = list_usable_addresses(netlink)
    return [
        (names[address.index], address.address)
        for address in sorted(present, key=attrgetter("index"))
        if address.index in names
    ]


def list_usable_addresses(netlink: NetlinkSocket) -> list[InterfaceAddress]:
    """List the addresses of this host that others can use."""
    present = [read_address(body) for body in netlink.dump(list_addresses())]
    return [
        address
        for address in present
        if not (address.address.is_loopback or address.address.is_link_local)
    ]


def _list_router_listeners(netlink: NetlinkSocket) -> list[str]:
    """List devices whose routes come, or may come, from router advertisements that forwarding would silence."""
    names = []
    for link in _list_links(netlink):
        path = ("ipv6", "conf", link.name, "accept_ra")
        with contextlib.suppress(KernelFailure):
            if link.name != "lo" and read_sysctl(*path) == "1":
                names.append(link.name)
    return names


def _find_ipv6_warnings(netlink: NetlinkSocket) -> list[HostWarning]:
    if not sysctl_exists("ipv6", "conf", "all", "forwarding"):
        return [HostWarning("this kernel has no IPv6, but pods want it", "use IPv4 networks only")]
    warnings = []
    if read_sysctl("ipv6", "conf", "all", "forwarding") != "1":
        warnings.append(_forwarding_off("net.ipv6.conf.all.forwarding"))
    links = {link.index: link.name for link in _list_links(netlink)}
    for route in _list_default_routes(netlink):
        name = links.get(route.index, "")
        learnt = route.destination.version == 6 and route.protocol in (_RTPROT_RA, _RTPROT_KERNEL)
        if learnt and name and read_sysctl("ipv6", "conf", name, "accept_ra") != "2":
            warnings.append(
                HostWarning(
                    f"the IPv6 default route of {name!r} comes from a router advertisement and"
                    " will expire, because the host forwards",
                    f"sysctl -w net.ipv6.conf.{name}.accept_ra=2",
                )
            )
    return warnings


def _forwarding_off(setting: str) -> HostWarning:
    return HostWarning(f"{setting} is off: pods reach only this node", f"sysctl -w {setting}=1")


def _legacy_forward_drops(version: int) -> bool:
    """Look at the old iptables tables, which nftables does not show; only where they are in use."""
    try:
        # Listing the chains by the command would load the kernel's old tables where they are not in use yet.
        if "filter" not in Path(_LEGACY_TABLES[version]).read_text(encoding="ascii").split():
            return False
        listed = run([_LEGACY_COMMANDS[version], "-S", "FORWARD"], timeout_s=_TIMEOUT_S)
    except OSError:
        return False
    except KernelFailure as failure:
        if failure.errno == errno.ENOENT:
            return False
        raise
    return b"-P FORWARD DROP" in listed.stdout


def _list_links(netlink: NetlinkSocket) -> Sequence[Link]:
    return [read_link(body) for body in netlink.dump(list_links())]


def _list_default_routes(netlink: NetlinkSocket) -> list[Route]:
    """List the default routes of the main table, IPv4 first, the preferred one of a family first."""
    routes = []
    for family in (AF_INET, AF_INET6):
        of_family = [
            route
            for route in dump_routes(netlink, family, table=TABLE_MAIN, defaults_only=True)
            if route.index
        ]
        routes += sorted(of_family, key=lambda route: route.metric)
    return routes


def _find_address(netlink: NetlinkSocket, address: IPAddress) -> int | None:
    for body in netlink.dump(list_addresses()):
        present = read_address(body)
        if present.address == address:
            return present.index
    return None
