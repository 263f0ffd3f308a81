"""A small packet builder: bytes from the inside out, with every length and checksum right unless told otherwise.

Used by the packet tests alone. Addresses and MACs are text, ports and lengths numbers. It is written against the RFCs
and shares nothing with the programs, so that it can judge what they write: `check_frame` finds wrong checksums.
"""

import functools
import ipaddress
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

ETH_P_IP: Final = 0x0800
ETH_P_ARP: Final = 0x0806
ETH_P_IPV6: Final = 0x86DD
ETH_P_VLAN: Final = 0x8100
ETH_HLEN: Final = 14

ICMP: Final = 1
TCP: Final = 6
UDP: Final = 17
ROUTING: Final = 43
FRAGMENT: Final = 44
ESP: Final = 50
AH: Final = 51
ICMPV6: Final = 58
NO_NEXT: Final = 59
DESTINATION: Final = 60
SCTP: Final = 132
HOP_BY_HOP: Final = 0

FIN: Final = 0x01
SYN: Final = 0x02
RST: Final = 0x04
ACK: Final = 0x10

INIT: Final = 1
INIT_ACK: Final = 2
ABORT: Final = 6
COOKIE_ECHO: Final = 10
"""Chunks of SCTP."""

BROADCAST: Final = "ff:ff:ff:ff:ff:ff"
DONT_FRAGMENT: Final = 0x4000
MORE_FRAGMENTS: Final = 0x2000


@dataclass(frozen=True)
class Segment:
    """What an IP header carries: a protocol number and bytes. `checksum_at` is where the checksum goes that covers
    them, -1 = nowhere; `pseudo`: the addresses are part of it.
    """

    protocol: int
    data: bytes
    checksum_at: int = -1
    pseudo: bool = True


def internet_checksum(data: bytes) -> int:
    """Compute the checksum of RFC 1071."""
    if len(data) % 2:
        data += b"\0"
    # The words of a number, added with each carry added in again, are its rest by 0xFFFF, from 1 to 0xFFFF.
    number = int.from_bytes(data, "big")
    total = (number - 1) % 0xFFFF + 1 if number else 0
    return ~total & 0xFFFF


@functools.lru_cache(maxsize=1024)
def mac(text: str) -> bytes:
    """Read a MAC."""
    return bytes.fromhex(text.replace(":", ""))


@functools.lru_cache(maxsize=1024)
def packed_4(text: str) -> bytes:
    """Read an IPv4 address."""
    return ipaddress.IPv4Address(text).packed


@functools.lru_cache(maxsize=1024)
def packed_6(text: str) -> bytes:
    """Read an IPv6 address."""
    return ipaddress.IPv6Address(text).packed


def ethernet(destination: str, source: str, ethertype: int, payload: bytes) -> bytes:
    """Frame a payload."""
    return mac(destination) + mac(source) + struct.pack("!H", ethertype) + payload


def vlan(frame: bytes, tag: int) -> bytes:
    """Put an 802.1Q tag into a frame."""
    return frame[:12] + struct.pack("!HH", ETH_P_VLAN, tag) + frame[12:]


def tcp(
    source: int,
    destination: int,
    flags: int,
    payload: bytes = b"",
    options: bytes = b"",
    acknowledged: int = 2,
    sequence: int = 1,
) -> Segment:
    """Make a TCP segment, the first of its sender, that answers another one; `options` is padded to words."""
    options += b"\0" * (-len(options) % 4)
    words = 5 + len(options) // 4
    header = struct.pack(
        "!HHIIBBHHH", source, destination, sequence, acknowledged, words << 4, flags, 512, 0, 0
    )
    return Segment(TCP, header + options + payload, 16)


def udp(source: int, destination: int, payload: bytes = b"payload!") -> Segment:
    """Make a UDP datagram."""
    header = struct.pack("!HHHH", source, destination, 8 + len(payload), 0)
    return Segment(UDP, header + payload, 6)


def sctp(source: int, destination: int, chunk: int = INIT, body: bytes = bytes(16)) -> Segment:
    """Make an SCTP packet with one chunk."""
    head = struct.pack("!HHI", source, destination, 0)
    data = struct.pack("!BBH", chunk, 0, 4 + len(body)) + body
    return Segment(SCTP, head + struct.pack("<I", crc32c(head + bytes(4) + data)) + data)


def crc32c(data: bytes) -> int:
    """Compute the checksum of SCTP (RFC 9260, appendix A)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _crc_row(crc & 0xFF ^ byte)
    return crc ^ 0xFFFFFFFF


@functools.cache
def _crc_row(crc: int) -> int:
    for _ in range(8):
        crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc


def icmp(kind: int, code: int, rest: int = 0, payload: bytes = b"") -> Segment:
    """Make an ICMP message; `rest` is the second word."""
    return Segment(ICMP, struct.pack("!BBHI", kind, code, 0, rest) + payload, 2, pseudo=False)


def icmpv6(kind: int, code: int, rest: int = 0, payload: bytes = b"") -> Segment:
    """Make an ICMPv6 message; `rest` is the second word."""
    return Segment(ICMPV6, struct.pack("!BBHI", kind, code, 0, rest) + payload, 2)


def echo(version: int, number: int, *, reply: bool = False, payload: bytes = b"ping") -> Segment:
    """Make an echo request or reply with this identifier."""
    if version == 4:
        return icmp(0 if reply else 8, 0, number << 16 | 1, payload)
    return icmpv6(129 if reply else 128, 0, number << 16 | 1, payload)


def neighbour(
    kind: int, target: str, *, option_mac: str = "", option: int = 1, flags: int = 0
) -> Segment:
    """Make a neighbour solicitation (135) or advertisement (136)."""
    body = packed_6(target)
    if option_mac:
        body += struct.pack("!BB", option, 1) + mac(option_mac)
    return icmpv6(kind, 0, flags << 24, body)


def raw(protocol: int, payload: bytes = b"") -> Segment:
    """Make a packet of a protocol that has no ports."""
    return Segment(protocol, payload)


def _sealed(segment: Segment, source: bytes, destination: bytes) -> bytes:
    if segment.checksum_at < 0:
        return segment.data
    covered = segment.data
    if segment.pseudo:
        covered = (
            source + destination + struct.pack("!II", len(covered), segment.protocol) + covered
        )
    found = internet_checksum(covered)
    at = segment.checksum_at
    return segment.data[:at] + struct.pack("!H", found) + segment.data[at + 2 :]


def ipv4(  # noqa: PLR0913 - each is a field of the header
    source: str,
    destination: str,
    segment: Segment,
    *,
    ttl: int = 64,
    fragment: int = DONT_FRAGMENT,
    identification: int = 7,
    options: bytes = b"",
    version: int = 4,
    header_words: int = 0,
    total: int | None = None,
) -> bytes:
    """Make an IPv4 packet. `fragment` is the whole field: flags and offset in units of eight bytes."""
    ends = packed_4(source), packed_4(destination)
    body = _sealed(segment, *ends)
    words = header_words or 5 + len(options) // 4
    length = 20 + len(options) + len(body) if total is None else total
    header = struct.pack(
        "!BBHHHBBH4s4s",
        version << 4 | words,
        0,
        length,
        identification,
        fragment,
        ttl,
        segment.protocol,
        0,
        *ends,
    )
    header += options
    found = internet_checksum(header)
    return header[:10] + struct.pack("!H", found) + header[12:] + body


def ipv6(
    source: str,
    destination: str,
    segment: Segment,
    *,
    hop_limit: int = 64,
    extensions: Sequence[tuple[int, bytes]] = (),
    version: int = 6,
    payload_bytes: int | None = None,
) -> bytes:
    """Make an IPv6 packet. `extensions` are (protocol, header whose first byte is overwritten with the next one)."""
    ends = packed_6(source), packed_6(destination)
    body = _sealed(segment, *ends)
    following = segment.protocol
    for protocol, header in reversed(extensions):
        body = bytes([following]) + header[1:] + body
        following = protocol
    length = len(body) if payload_bytes is None else payload_bytes
    return struct.pack("!IHBB", version << 28, length, following, hop_limit) + b"".join(ends) + body


def extension(words: int = 0, fill: int = 1) -> bytes:
    """Make a hop-by-hop, destination or routing header of 8 * (words + 1) bytes."""
    return bytes([0, words, fill, 4]) + bytes(4 + 8 * words)


def routing(segments_left: int, kind: int = 2) -> bytes:
    """Make a routing header."""
    return bytes([0, 2, kind, segments_left]) + bytes(20)


def fragment_header(offset_bytes: int, *, more: bool, identification: int = 7) -> bytes:
    """Make an IPv6 fragment header."""
    return struct.pack("!BBHI", 0, 0, offset_bytes | more, identification)


def arp(
    operation: int,
    sender_mac: str,
    sender_ip: str,
    target_ip: str,
    *,
    target_mac: str = "00:00:00:00:00:00",
    kind: tuple[int, int, int, int] = (1, ETH_P_IP, 6, 4),
) -> bytes:
    """Make an ARP packet for IPv4 over Ethernet."""
    return (
        struct.pack("!HHBBH", *kind, operation)
        + mac(sender_mac)
        + packed_4(sender_ip)
        + mac(target_mac)
        + packed_4(target_ip)
    )


def packet_of(frame: bytes) -> bytes:
    """Give the packet that a frame carries."""
    return frame[ETH_HLEN:]


def check_frame(frame: bytes) -> list[str]:
    """Name what is wrong in an IP frame without extension headers: lengths, header checksum, ICMP checksum."""
    packet = packet_of(frame)
    ethertype = int.from_bytes(frame[12:14], "big")
    if ethertype == ETH_P_IP:
        return _check_ipv4(packet)
    return _check_ipv6(packet) if ethertype == ETH_P_IPV6 else [f"ethertype {ethertype:#x}"]


def _check_ipv4(packet: bytes) -> list[str]:
    faults = []
    header_bytes = (packet[0] & 15) * 4
    length = int.from_bytes(packet[2:4], "big")
    if length != len(packet):
        faults.append(f"total length {length}, packet has {len(packet)}")
    if internet_checksum(packet[:header_bytes]):
        faults.append("IPv4 header checksum")
    if packet[9] == ICMP and internet_checksum(packet[header_bytes:]):
        faults.append("ICMP checksum")
    return faults


def _check_ipv6(packet: bytes) -> list[str]:
    faults = []
    length = int.from_bytes(packet[4:6], "big")
    if length != len(packet) - 40:
        faults.append(f"payload length {length}, packet has {len(packet) - 40}")
    pseudo = packet[8:40] + struct.pack("!II", len(packet) - 40, packet[6])
    if packet[6] == ICMPV6 and internet_checksum(pseudo + packet[40:]):
        faults.append("ICMPv6 checksum")
    return faults
