"""Other nodes in the maps: their numbers and outer addresses, and the prefixes that are at them.

Called by `datapath.cluster`, which writes, and by the readers behind `podwire bpf nodes list`. Only computes rows and
reads them; `datapath.maps` writes. Invariant: every outer address of a peer leads to its number, and no address to two
numbers.
"""

import ipaddress
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

import msgspec

from podwire.datapath import abi
from podwire.datapath.maps import (
    NodeMaps,
    Rows,
    from_mapped,
    from_prefix_key,
    from_u32,
    mac_bytes,
    to_mapped,
    to_prefix_key,
    u32,
)
from podwire.model.cluster import Peer, Prefix, TunnelMode, Way
from podwire.model.endpoint import IPAddress, IPNetwork

Hops = Mapping[tuple[int, int], IPAddress]
"""Next hops of natively reached nodes: (number of the peer, IP version) -> address."""


def node_rows(peers: Iterable[Peer], hops: Hops) -> Rows:
    """Give the rows of `pw_nodes`: number -> outer address, size, MAC, next hops."""
    return {
        u32(peer.number): abi.NodeValue(
            to_mapped(peer.outer),
            peer.mtu_bytes,
            abi.NodeFlags.CLASSIC if peer.mode is TunnelMode.CLASSIC else 0,
            # Only a classic peer has a MAC: to others every frame has the same one, which receivers do not look at.
            mac_bytes(peer.mac) if peer.mac else bytes(6),
            _hop_bytes(hops, peer.number, 6) if hops else bytes(16),
            _hop_bytes(hops, peer.number, 4) if hops else bytes(4),
        ).pack()
        for peer in peers
    }


def _hop_bytes(hops: Hops, number: int, version: int) -> bytes:
    hop = hops.get((number, version))
    return hop.packed if hop is not None else bytes(4 if version == 4 else 16)


def node_number_rows(peers: Iterable[Peer]) -> Rows:
    """Give the rows of `pw_node_numbers`: every outer address -> number."""
    return {
        to_mapped(address): u32(peer.number)
        for peer in peers
        # A node may send from any of its addresses, not only from the one that tunnels to it end at.
        for address in (*peer.addresses, peer.outer)
    }


class NodeRow(msgspec.Struct, frozen=True):
    """Another node as the programs know it."""

    number: int
    outer: IPAddress
    mtu: int
    flags: int
    mac: str
    hops: tuple[IPAddress, ...] = ()
    """Towards its pods, natively."""


def list_encrypted(maps: NodeMaps) -> frozenset[str]:
    """Give the outer addresses of the nodes whose rows say that what goes there has to be encrypted."""
    return frozenset(
        str(row.outer) for row in list_nodes(maps) if row.flags & abi.NodeFlags.ENCRYPTED
    )


def list_nodes(maps: NodeMaps) -> Iterator[NodeRow]:
    """Walk the other nodes."""
    for key, row in maps.pw_nodes.items():
        value = abi.NodeValue.unpack(row)
        yield NodeRow(
            from_u32(key),
            from_mapped(value.addr),
            value.mtu,
            value.flags,
            value.mac.hex(":") if any(value.mac) else "",
            tuple(
                ipaddress.ip_address(raw) for raw in (value.hop_ipv4, value.hop_ipv6) if any(raw)
            ),
        )


def list_node_numbers(maps: NodeMaps) -> Iterator[tuple[IPAddress, int]]:
    """Walk the outer addresses of other nodes."""
    for key, row in maps.pw_node_numbers.items():
        yield from_mapped(key), from_u32(row)


def prefix_rows(
    prefixes: Mapping[IPNetwork, Prefix],
    mode: TunnelMode,
    direct: Collection[tuple[int, int]] = (),
) -> Rows:
    """Give the rows of the ipcache that are about other nodes; `mode` is this node's own.

    `direct`: numbers of nodes and IP versions whose pods are reached past the stack. A classic tunnel is a device
    like others: the stack's routes lead into it.
    """
    ways = {
        None: 0,
        Way.NATIVE: int(abi.IpcacheFlags.NATIVE),
        Way.TUNNEL: int(
            # A classic device encapsulates by itself, so to the programs the way is one through the stack.
            abi.IpcacheFlags.TUNNEL if mode is TunnelMode.FLOW else abi.IpcacheFlags.NATIVE
        ),
    }
    node_address = int(abi.IpcacheFlags.NODE_ADDRESS)
    return {
        to_prefix_key(network): abi.IpcacheValue(
            prefix.identity,
            prefix.node,
            ways[prefix.way]
            | (node_address if prefix.is_node_address else 0)
            | (int(abi.IpcacheFlags.DIRECT) if _is_direct(network, prefix, direct) else 0),
            prefix.mtu_bytes,
        ).pack()
        for network, prefix in prefixes.items()
    }


def _is_direct(network: IPNetwork, prefix: Prefix, direct: Collection[tuple[int, int]]) -> bool:
    """Tell whether a prefix is reached past the stack. Addresses of nodes never are: only pods have programs."""
    natively = prefix.way is Way.NATIVE and not prefix.is_node_address
    return natively and (prefix.node, network.version) in direct


def list_direct(rows: Rows) -> set[tuple[int, int]]:
    """Give the nodes and IP versions that rows of the ipcache say are reached past the stack."""
    return {
        (value.node, from_prefix_key(key).version)
        for key, row in rows.items()
        if (value := abi.IpcacheValue.unpack(row)).flags & abi.IpcacheFlags.DIRECT
    }


def is_about_other_node(row: bytes) -> bool:
    """Tell whether a row of the ipcache says something that a node does not say of itself."""
    value = abi.IpcacheValue.unpack(row)
    return bool(value.node) or value.identity == abi.Identity.REMOTE_NODE or not value.flags


ANONYMOUS: Final = (abi.Identity.UNMANAGED, abi.Identity.REMOTE_NODE)


def list_ranges(rows: Rows, identities: Collection[int] = ANONYMOUS) -> list[IPNetwork]:
    """List the networks of rows that name no single pod: ranges and nodes' addresses, or one kind of them."""
    return [
        from_prefix_key(key)
        for key, row in rows.items()
        if abi.IpcacheValue.unpack(row).identity in identities
    ]
