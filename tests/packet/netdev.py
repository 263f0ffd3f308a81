"""Another node that is reached natively, past the stack, as the rig's node knows it, and packets that come from it.

Used by the packet tests of `from_netdev`. `connect` writes the rows; `arrive` hands a packet to the program at the
device towards that node. A packet that the program leaves alone goes on as it came.
"""

from typing import Final

from podwire.datapath.abi import DropReason, Hook, Identity, IpcacheFlags
from tests.packet import frames
from tests.packet.frames import Segment, ethernet
from tests.packet.overlay import FAR, Remote, packet, write_node, write_prefix
from tests.packet.rig import OUTSIDE, Endpoint, Outcome, Rig

UNDERLAY: Final = OUTSIDE
"""Index of the device through which the node is reached."""
UNDERLAY_MAC: Final = "0e:70:00:00:00:ff"
FAR_MAC: Final = "0e:72:00:00:00:01"
MTU: Final = 1500
DIRECT: Final = IpcacheFlags.NATIVE | IpcacheFlags.DIRECT
TC_ACT_UNSPEC, TC_ACT_OK, TC_ACT_REDIRECT = -1, 0, 7


def connect(rig: Rig, *, flags: IpcacheFlags = DIRECT, native_ifindex: int = UNDERLAY) -> None:
    """Tell the node of the other one."""
    write_node(rig, FAR)
    for version in (4, 6):
        fields = FAR.number, flags, MTU
        write_prefix(rig, FAR.block(version), Identity.UNMANAGED, *fields)
        write_prefix(rig, FAR.pod(version), FAR.identity, *fields)
        own = FAR.number, IpcacheFlags.NATIVE | IpcacheFlags.NODE_ADDRESS, MTU
        write_prefix(rig, FAR.address(version), Identity.REMOTE_NODE, *own)
    rig.write_settings(native_ifindex=native_ifindex)
    rig.forget_stack_ports()


def frame_of(inner: bytes, *, destination: str = UNDERLAY_MAC) -> bytes:
    """Frame a packet as the other node does."""
    ethertype = frames.ETH_P_IPV6 if inner[0] >> 4 == 6 else frames.ETH_P_IP
    return ethernet(destination, FAR_MAC, ethertype, inner)


def arrive_frame(rig: Rig, frame: bytes, *, ifindex: int = UNDERLAY, **fields: int) -> Outcome:
    """Let a frame come in."""
    return rig.run("from_netdev", ifindex, frame, ingress_ifindex=ifindex, **fields)


def arrive(rig: Rig, inner: bytes, **fields: int) -> Outcome:
    """Let a packet come in."""
    return arrive_frame(rig, frame_of(inner), **fields)


def to(
    target: Endpoint, segment: Segment, version: int = 4, *, remote: Remote = FAR, ttl: int = 64
) -> bytes:
    """Make a packet from the known pod of the node."""
    return packet(remote.pod(version), target.address(version), segment, ttl)


def out(source: Endpoint, segment: Segment, version: int = 4, *, ttl: int = 64) -> bytes:
    """Make a packet to the known pod of the node."""
    return packet(source.address(version), FAR.pod(version), segment, ttl)


def is_left_alone(rig: Rig, outcome: Outcome, frame: bytes) -> bool:
    """Tell whether a frame went on as it came, and nobody counted it."""
    counted = [key for key in rig.metrics() if key[0] == Hook.FROM_NETDEV]
    return (outcome.retval, outcome.reason, outcome.data, counted) == (
        TC_ACT_UNSPEC,
        DropReason.NONE,
        frame,
        [],
    )
