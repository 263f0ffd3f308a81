"""Services as the rig's node knows them, and what pods say to them.

Used by the packet tests of services. `offer` writes the rows of a service, `ask` lets a pod speak to it; `Tuple` is
what a packet says of itself.
"""

import ipaddress
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from podwire.datapath import abi
from podwire.datapath.maps import to_mapped
from tests.packet import frames
from tests.packet.frames import ACK, RST, SYN, Segment, internet_checksum, packet_of, tcp, udp
from tests.packet.overlay import packet
from tests.packet.rig import ZERO, Endpoint, Outcome, Rig

VIP_4: Final = "10.96.0.10"
VIP_6: Final = "fd96::10"
PORT: Final = 80
POD_PORT: Final = 8080
SOURCE: Final = 41000
PROTOCOLS: Final = {"tcp": frames.TCP, "udp": frames.UDP, "sctp": frames.SCTP}
ANSWER: Final = {"tcp": SYN | ACK, "udp": 0, "sctp": SYN | ACK}
"""The flags that a first answer has, as `speak` takes them."""
_CHUNKS: Final = {
    SYN: frames.INIT,
    SYN | ACK: frames.INIT_ACK,
    ACK: frames.COOKIE_ECHO,
    RST: frames.ABORT,
}


def pod_port(name: str) -> int:
    """Give the port of back ends: of SCTP nobody changes any."""
    return PORT if name == "sctp" else POD_PORT


def vip(version: int) -> str:
    """Give the service's address of a family."""
    return VIP_4 if version == 4 else VIP_6


class Tuple(NamedTuple):
    """Who speaks to whom."""

    source: str
    sport: int
    destination: str
    dport: int


def tuple_of(frame: bytes) -> Tuple:
    """Read what a frame of TCP, UDP or SCTP says of itself."""
    raw = packet_of(frame)
    at, size, transport = (12, 4, 20) if raw[0] >> 4 == 4 else (8, 16, 40)
    ends = [str(ipaddress.ip_address(raw[at + i * size :][:size])) for i in (0, 1)]
    sport, dport = struct.unpack_from("!HH", raw, transport)
    return Tuple(ends[0], sport, ends[1], dport)


def is_whole(frame: bytes) -> bool:
    """Tell whether every checksum of a frame of TCP, UDP or SCTP is right."""
    raw = packet_of(frame)
    if raw[0] >> 4 == 4:
        ends, protocol, body = raw[12:20], raw[9], raw[20:]
    else:
        ends, protocol, body = raw[8:40], raw[6], raw[40:]
    if protocol == frames.SCTP:
        right = frames.crc32c(body[:8] + bytes(4) + body[12:])
        return frames.check_frame(frame) == [] and body[8:12] == struct.pack("<I", right)
    pseudo = ends + struct.pack("!II", len(body), protocol)
    return frames.check_frame(frame) == [] and internet_checksum(pseudo + body) == 0


def offer(
    rig: Rig,
    address: str,
    back_ends: Sequence[tuple[str, int]],
    *,
    port: int = PORT,
    protocol: int = frames.TCP,
    service: int = 7,
    first: int = 100,
    **affinity: int,
) -> None:
    """Write the rows of a service and its back ends, numbered from `first` on.

    `affinity`: `affinity_s` and `affinity_place` of the service's row.
    """
    for slot, (where, where_port) in enumerate(back_ends):
        number = first + slot
        mapped = to_mapped(ipaddress.ip_address(where))
        value = abi.BackEndValue(number, 0, mapped, where_port, protocol)
        rig.maps["pw_back_ends"].update(number.to_bytes(4, "little"), value.pack())
        row = abi.ServiceSlotValue(service, number).pack()
        for at in (slot, abi.SLOT_OF_MEMBER | number) if affinity else (slot,):
            rig.maps["pw_service_list"].update(abi.ServiceSlotKey(service, at).pack(), row)
    own = to_mapped(ipaddress.ip_address(address))
    for key_port, key_protocol in ((port, protocol), (0, 0)):
        value_row = abi.ServiceValue(service, len(back_ends), 0, 0, own, key_port, key_protocol)
        value_row = value_row._replace(**affinity)  # type: ignore[arg-type]
        key = abi.ServiceKey(own, key_port, key_protocol)
        rig.maps["pw_services"].update(key.pack(), value_row.pack())
    turn_on(rig)


def turn_on(rig: Rig) -> None:
    """Have new flows looked up among the services."""
    raw = rig.maps["pw_settings"].lookup(ZERO)
    assert raw is not None
    settings = abi.Settings.unpack(raw)
    flags = settings.flags | abi.SettingsFlags.SERVICES
    rig.maps["pw_settings"].update(ZERO, settings._replace(flags=flags).pack())


def remove_back_end(rig: Rig, number: int) -> None:
    """Remove a back end's own row, as the agent does last."""
    rig.maps["pw_back_ends"].delete(number.to_bytes(4, "little"))


def speak(name: str, sport: int, dport: int, flags: int = frames.SYN) -> Segment:
    """Make a datagram, a segment of TCP, or the chunk of SCTP that means the same."""
    if name == "sctp":
        return frames.sctp(sport, dport, _CHUNKS[flags])
    return tcp(sport, dport, flags) if name == "tcp" else udp(sport, dport)


def ask(
    rig: Rig,
    client: Endpoint,
    version: int,
    name: str,
    *,
    sport: int = SOURCE,
    dport: int = PORT,
    flags: int = frames.SYN,
) -> Outcome:
    """Let a pod speak to the service."""
    segment = speak(name, sport, dport, flags)
    return rig.sent(client, packet(client.address(version), vip(version), segment))
