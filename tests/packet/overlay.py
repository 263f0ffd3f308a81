"""Other nodes as the rig's node knows them, and packets that come from them or go to them by the tunnel.

Used by the packet tests of the overlay. `connect` writes the rows; `arrive` hands a packet to `from_overlay` with the
key that it came with, `enter` hands one of the stack to `to_overlay`.
"""

import functools
import ipaddress
from dataclasses import dataclass
from typing import Final

from podwire.datapath import abi
from podwire.datapath.abi import Identity, IpcacheFlags, NodeFlags
from podwire.datapath.maps import mac_bytes, to_mapped, to_prefix_key
from podwire.model import policy
from podwire.model.policy import PolicyEntry, PolicyKey, Verdict
from tests.packet import frames
from tests.packet.frames import Segment, ethernet, ipv4, ipv6
from tests.packet.rig import ALLOW, QUOTA, TUNNEL, A, Endpoint, Outcome, Rig

MTU: Final = 1450
TUNNELLED: Final = IpcacheFlags.TUNNEL
HOPS: Final = (ipaddress.ip_address("2001:db8:1::21").packed, bytes((192, 0, 2, 21)))
"""Next hops of both families, IPv6 first."""
OWN_MAC: Final = "0e:71:00:00:00:01"
"""Of the rig's tunnel device."""


@dataclass(frozen=True)
class Remote:
    """Another node: its number, address outside, range, and one pod of it that is known by itself."""

    number: int
    outer: str
    identity: int
    classic: bool = False
    mtu: int = MTU

    @property
    def mac(self) -> str:
        """MAC of its tunnel device."""
        return f"0e:71:00:00:00:{self.number:02x}"

    def pod(self, version: int) -> str:
        """Give the address of the pod that is known."""
        return f"10.7.{self.number}.5" if version == 4 else f"fd07:{self.number}::5"

    def stranger(self, version: int) -> str:
        """Give the address of a pod of which only the range is known."""
        return f"10.7.{self.number}.77" if version == 4 else f"fd07:{self.number}::77"

    def address(self, version: int) -> str:
        """Give its own address, the one on its tunnel device."""
        return f"10.7.{self.number}.1" if version == 4 else f"fd07:{self.number}::1"

    def block(self, version: int) -> str:
        """Give its range."""
        return f"10.7.{self.number}.0/24" if version == 4 else f"fd07:{self.number}::/64"


FAR: Final = Remote(21, "192.0.2.21", 70021)
FAR_6: Final = Remote(22, "2001:db8:1::22", 70022)
OLD: Final = Remote(23, "192.0.2.23", 70023, classic=True)
REMOTES: Final = (FAR, FAR_6, OLD)


@functools.lru_cache(maxsize=1024)
def prefix_row(network: str, *fields: int) -> tuple[bytes, bytes]:
    """Make a row of the ipcache: identity, node, flags, mtu."""
    return to_prefix_key(ipaddress.ip_network(network)), abi.IpcacheValue(*fields).pack()


def write_prefix(rig: Rig, network: str, *fields: int) -> None:
    """Write a row of the ipcache."""
    rig.maps["pw_ipcache"].update(*prefix_row(network, *fields))


def remove_prefix(rig: Rig, network: str) -> None:
    """Remove a row of the ipcache."""
    rig.maps["pw_ipcache"].delete(to_prefix_key(ipaddress.ip_network(network)))


def write_node(
    rig: Rig,
    remote: Remote,
    *,
    outers: tuple[str, ...] = (),
    hops: tuple[bytes, bytes] = HOPS,
    encrypted: bool = False,
) -> None:
    """Write a node's rows; `outers`: every address that it sends from, if not its own alone."""
    number = remote.number.to_bytes(4, "little")
    outer = to_mapped(ipaddress.ip_address(remote.outer))
    flags = NodeFlags.CLASSIC if remote.classic else NodeFlags(0)
    flags |= NodeFlags.ENCRYPTED if encrypted else NodeFlags(0)
    value = abi.NodeValue(outer, remote.mtu, flags, mac_bytes(remote.mac), *hops)
    rig.maps["pw_nodes"].update(number, value.pack())
    for text in outers or (remote.outer,):
        rig.maps["pw_node_numbers"].update(to_mapped(ipaddress.ip_address(text)), number)


def remove_node(rig: Rig, remote: Remote) -> None:
    """Remove what a node's number leads to."""
    rig.maps["pw_nodes"].delete(remote.number.to_bytes(4, "little"))


def write_ways(rig: Rig, remote: Remote, flags: IpcacheFlags = TUNNELLED) -> None:
    """Write how a node's pods are reached."""
    rig.maps["pw_ipcache"].update_batch(ways(remote, flags))


@functools.lru_cache(maxsize=1024)
def ways(remote: Remote, flags: IpcacheFlags = TUNNELLED) -> list[tuple[bytes, bytes]]:
    """Make the rows of the ipcache that say how a node's pods are reached."""
    rows = []
    for version in (4, 6):
        fields = remote.number, flags, remote.mtu
        node_address = remote.number, flags | IpcacheFlags.NODE_ADDRESS, remote.mtu
        rows += [
            prefix_row(remote.block(version), Identity.UNMANAGED, *fields),
            prefix_row(remote.pod(version), remote.identity, *fields),
            prefix_row(remote.address(version), Identity.REMOTE_NODE, *node_address),
        ]
    return rows


def connect(rig: Rig, *, quota: int = QUOTA) -> None:
    """Give the node its tunnel and tell it of the others."""
    for remote in REMOTES:
        write_node(rig, remote)
    rig.maps["pw_ipcache"].update_batch([row for remote in REMOTES for row in ways(remote)])
    rig.write_settings(quota=quota, tunnel_ifindex=TUNNEL)


def packet(source: str, destination: str, segment: Segment, ttl: int = 64) -> bytes:
    """Make a packet of whichever family the addresses have."""
    if ":" in source:
        return ipv6(source, destination, segment, hop_limit=ttl)
    return ipv4(source, destination, segment, ttl=ttl)


def frame_of(inner: bytes, *, source: str = FAR.mac, destination: str = OWN_MAC) -> bytes:
    """Frame a packet as another node does."""
    ethertype = frames.ETH_P_IPV6 if inner[0] >> 4 == 6 else frames.ETH_P_IP
    return ethernet(destination, source, ethertype, inner)


def choose_tunnel(rig: Rig, *, vni: int, outer: str) -> None:
    """Say with which outer header frames come from now on."""
    end = tunnel_end(vni, outer)
    rig.tunnel_key[: len(end)] = end


@functools.lru_cache(maxsize=1024)
def tunnel_end(vni: int, outer: str) -> bytes:
    """Make the row of an outer header."""
    return abi.TunnelEnd(vni, to_mapped(ipaddress.ip_address(outer))).pack()


def arrive_frame(rig: Rig, frame: bytes, *, vni: int, outer: str, mark: int = 0) -> Outcome:
    """Let a frame come out of the tunnel."""
    choose_tunnel(rig, vni=vni, outer=outer)
    return rig.run("from_overlay", TUNNEL, frame, ingress_ifindex=TUNNEL, mark=mark)


def arrive(
    rig: Rig, inner: bytes, *, vni: int = FAR.identity, outer: str = FAR.outer, mark: int = 0
) -> Outcome:
    """Let a packet come out of the tunnel."""
    return arrive_frame(rig, frame_of(inner), vni=vni, outer=outer, mark=mark)


def enter(rig: Rig, inner: bytes, *, ingress_ifindex: int = 0, mark: int = 0) -> Outcome:
    """Let the stack send a packet into the tunnel."""
    frame = frame_of(inner, source=OWN_MAC, destination="0e:70:ff:ff:ff:ff")
    return rig.run("to_overlay", TUNNEL, frame, ingress_ifindex=ingress_ifindex, mark=mark)


def to(target: Endpoint, segment: Segment, version: int = 4, *, remote: Remote = FAR) -> bytes:
    """Make a packet from the known pod of a node."""
    return packet(remote.pod(version), target.address(version), segment)


def allow(rig: Rig, identity: int) -> None:
    """Let only this identity in."""
    rig.change(A, slot=1, flags=ALLOW | abi.ConfigFlags.DENY_INGRESS)
    key = PolicyKey(identity, policy.Direction.INGRESS, frames.UDP, 53, 16)
    rig.rule(1, key, PolicyEntry(Verdict.ALLOW, 1, 41))
