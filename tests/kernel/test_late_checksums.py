"""A checksum that a pod leaves to the last device of its packet's way is written where nobody has judged anything, also
where programs or the stack have translated the packet meanwhile, put their node's address on it, or a header in front.

Who may open AF_PACKET says where (PACKET_VNET_HDR). Devices of the node sum up nothing here, so the kernel writes what
is left in front of them: a frame that is caught behind them shows what the network gets.
"""

import contextlib
import ctypes
import fcntl
import ipaddress
import itertools
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import pytest

from podwire.datapath.abi import DropReason
from podwire.kernel import netns
from podwire.model.cluster import Way
from podwire.model.interfaces import BackEnd, Frontend
from podwire.model.policy import Direction
from tests.kernel.conftest import Namespace
from tests.kernel.icmp_town import Town, make_town, wait_until
from tests.kernel.test_cluster_traffic import Way2
from tests.packet import frames
from tests.packet.test_offload import Left, leave_checksum

pytestmark = pytest.mark.kernel

JUDGED: Final = 5353
"""The only port that the pod may send to."""
SERVERS: Final = ("near", "far", "world")
DEVICES: Final = ("under", "lower")
"""By which the first node sends to the other node and to the world."""
SIOCETHTOOL, ETHTOOL_STXCSUM = 0x8946, 0x17
PACKET_OUTGOING: Final = 4
TEXT_BYTES: Final = 40
SOURCE_PORTS = itertools.count(20_000)
BEHIND: Final = {4: frames.ETH_HLEN + 20, 6: frames.ETH_HLEN + 40}
"""Where the transport header begins, by version."""


def sum_up_nothing(namespace: Namespace, device: str) -> None:
    """Have the kernel write what is left, in front of a device."""
    value = struct.pack("=II", ETHTOOL_STXCSUM, 0)
    buffer = ctypes.create_string_buffer(value, len(value))
    with netns.namespace(namespace.fd.fileno()), socket.socket() as any_socket:
        fcntl.ioctl(
            any_socket, SIOCETHTOOL, struct.pack("16sP", device.encode(), ctypes.addressof(buffer))
        )


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    with make_town(tmp_path_factory.mktemp("sums"), Way2(Way.TUNNEL)) as made:
        made.configure(
            (Direction.EGRESS, frames.UDP, JUDGED), (Direction.EGRESS, frames.TCP, JUDGED)
        )
        for device in DEVICES:
            sum_up_nothing(made.places["host"], device)
        with made.nodes[0].inside():
            made.nodes[0].datapath.services.write(
                {
                    Frontend(
                        ipaddress.ip_address(asked(name, "programs", version)), JUDGED, protocol
                    ): [
                        BackEnd(ipaddress.ip_address(made.address(name, version)), JUDGED, protocol)
                    ]
                    for name in SERVERS
                    for version in (4, 6)
                    for protocol in (frames.UDP, frames.TCP)
                }
            )
        made.places["host"].run("nft", _render_stack_services(made))
        yield made


def asked(server: str, translator: str, version: int) -> str:
    """Give the address of a server's service, by who translates it."""
    number = SERVERS.index(server) + 1
    net = {"programs": 96, "stack": 97}[translator]
    return f"10.{net}.0.{number}" if version == 4 else f"fd{net}::{number}"


def _render_stack_services(town: Town) -> str:
    rules = []
    for name, version in itertools.product(SERVERS, (4, 6)):
        family = "ip" if version == 4 else "ip6"
        to = town.address(name, version)
        rules.append(f"{family} daddr {asked(name, 'stack', version)} dnat {family} to {to};")
    chain = ["type nat hook prerouting priority -100;", *rules]
    return "\n".join(["table inet pwtsums {", "chain pre {", *chain, "}", "}"])


@dataclass(frozen=True)
class Shape:
    """Where a pod lets be written, from the beginning of the transport header."""

    id: str
    protocol: int
    place: int
    passes: bool = False


SHAPES: Final = (
    Shape("udp", frames.UDP, 6, True),
    Shape("text", frames.UDP, 8 + 30, True),
    Shape("tcp", frames.TCP, 16, True),
    Shape("tcp-text", frames.TCP, 20 + 30, True),
    Shape("source", frames.UDP, -6),
    Shape("destination", frames.UDP, -2),
    Shape("from", frames.UDP, 0),
    Shape("to", frames.UDP, 2),
    Shape("tcp-from", frames.TCP, 0),
    Shape("tcp-to", frames.TCP, 2),
    Shape("tcp-flags", frames.TCP, 12),
)


def send(town: Town, shapes: Mapping[int, Shape], target: str, version: int) -> None:
    """Send a packet of each shape, from the source port that is its key."""
    source, device = town.address("pod", version), town.nodes[0].records[9].device
    kind = frames.ETH_P_IP if version == 4 else frames.ETH_P_IPV6
    build = frames.ipv4 if version == 4 else frames.ipv6
    with open_packets(town.pod, "eth0") as packets:
        for port, shape in shapes.items():
            begin = frames.udp if shape.protocol == frames.UDP else open_tcp
            packet = build(source, target, begin(port, JUDGED, text_of(port)))
            frame = frames.ethernet(device.host_mac, device.pod_mac, kind, packet)
            left = Left(shape.id, packet, BEHIND[version] + shape.place, shape.passes)
            leave_checksum(packets, frame, left)


def open_tcp(source: int, destination: int, text: bytes) -> frames.Segment:
    return frames.tcp(source, destination, 2, text)


def text_of(port: int) -> bytes:
    """Give a text by which a packet is known whatever its header says."""
    return port.to_bytes(8, "big") + bytes(TEXT_BYTES - 8)


def open_packets(namespace: Namespace, device: str) -> socket.socket:
    with netns.namespace(namespace.fd.fileno()):
        packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    packets.bind((device, 0))
    packets.setblocking(False)
    return packets


def take_received(packets: socket.socket) -> Iterator[bytes]:
    """Take what has come in by now."""
    with contextlib.suppress(BlockingIOError):
        while True:
            frame, (_, _, kind, *_) = packets.recvfrom(2000)
            if kind != PACKET_OUTGOING:
                yield frame


def known_port(frame: bytes, ports: Iterable[int]) -> int | None:
    """Give the port that a packet was sent from."""
    return next((port for port in ports if port.to_bytes(8, "big") in frame), None)


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("translator", ["nobody", "programs", "stack"])
def test_what_is_written_last_changes_nothing_that_was_judged(
    town: Town, translator: str, server: str, version: int
) -> None:
    address = town.address(server, version)
    target = address if translator == "nobody" else asked(server, translator, version)
    shapes = dict(zip(SOURCE_PORTS, SHAPES, strict=False))
    passing = {port for port, shape in shapes.items() if shape.passes}
    came: dict[int, bytes] = {}
    refused = town.drops(DropReason.HEADER)
    with open_packets(town.places[server], "upper" if server == "world" else "eth0") as taken:

        def take() -> set[int]:
            for frame in take_received(taken):
                if (port := known_port(frame, shapes)) is not None:
                    came[port] = frame
            return set(came)

        send(town, shapes, target, version)
        assert wait_until(lambda: passing <= take()), passing - take()
        wanted = refused + len(shapes) - len(passing)
        assert wait_until(lambda: town.drops(DropReason.HEADER) >= wanted)
        assert take() == passing
    packed, at = ipaddress.ip_address(address).packed, BEHIND[version]
    for port, frame in came.items():
        assert frame[at - len(packed) : at] == packed, shapes[port]
        assert frame[at + 2 : at + 4] == JUDGED.to_bytes(2, "big"), shapes[port]
        is_text = text_of(port) in frame
        # Within a node no device is passed that would write.
        assert is_text == (server == "near" or "text" not in shapes[port].id), shapes[port]
