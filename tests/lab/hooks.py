"""Ask the programs that a node's agent has loaded, over its own maps, what they do with one packet (BPF_PROG_TEST_RUN).

Used by the random policy tests: a real packet costs a hundred times more than a test run of the same program. Programs
and maps are found by their pins; packets name the node's real devices, inside the node's namespace. What a test run
leaves undone is the redirect: its return value tells the verdict.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from podwire.datapath import abi
from podwire.datapath.maps import split_metrics_index
from podwire.kernel import bpf
from podwire.kernel.bpf_program import Packet, Program, open_pinned_program
from podwire.kernel.netns import namespace
from tests.lab.policy_rig import Attached, Scene
from tests.lab.rig import run
from tests.packet import frames

TC_ACT_OK: Final = 0
TC_ACT_SHOT: Final = 2
TC_ACT_REDIRECT: Final = 7
_PROGRAMS: Final = ("from_pod", "to_pod")
_MAPS: Final = ("pw_metrics", "pw_config")


@dataclass(frozen=True)
class Wire:
    """One packet between two addresses: `source_port` of ICMP is the echo's number, `port` its type << 8."""

    source: str
    target: str
    protocol: int
    source_port: int
    port: int

    @property
    def family(self) -> int:
        """4 or 6."""
        return 6 if ":" in self.source else 4

    @property
    def answer(self) -> "Wire":
        """Give the packet that answers it: not of ICMP, whose answer has another type."""
        return Wire(self.target, self.source, self.protocol, self.port, self.source_port)

    def packet(self, *, is_answer: bool = False) -> bytes:
        """Write it."""
        segment = self._segment(is_answer=is_answer)
        write = frames.ipv4 if self.family == 4 else frames.ipv6
        return write(self.source, self.target, segment)

    def _segment(self, *, is_answer: bool) -> frames.Segment:
        match self.protocol:
            case frames.TCP:
                flags = frames.SYN | frames.ACK if is_answer else frames.SYN
                return frames.tcp(self.source_port, self.port, flags)
            case frames.UDP:
                return frames.udp(self.source_port, self.port)
            case frames.SCTP:
                return frames.sctp(self.source_port, self.port)
            case frames.ICMP:
                return frames.icmp(self.port >> 8, self.port & 0xFF, self.source_port << 16 | 1)
        return frames.icmpv6(self.port >> 8, self.port & 0xFF, self.source_port << 16 | 1)


class Hooks:
    """The programs of one node. Use it inside `open_hooks`: the thread is in the node's namespace meanwhile."""

    def __init__(
        self, programs: dict[str, Program], maps: dict[str, bpf.Map], outside_index: int
    ) -> None:
        self._programs = programs
        self._metrics, self._config = maps["pw_metrics"], maps["pw_config"]
        self._outside_index = outside_index
        """A device of the node that is no pod's: what comes from outside has come in through it."""

    def send(self, pod: Attached, packet: bytes) -> bool:
        """Let a pod send a packet; gives whether it passes."""
        frame = _frame(pod.pod_mac, pod.host_mac, packet)
        result = self._programs["from_pod"].run(
            Packet(frame, ifindex=pod.if_index, ingress_ifindex=pod.if_index)
        )
        return _passes(result.retval)

    def receive(self, pod: Attached, packet: bytes, *, from_host: bool) -> bool:
        """Let the host's stack hand a packet to a pod; gives whether it passes."""
        frame = _frame(pod.host_mac, pod.pod_mac, packet)
        index = 0 if from_host else self._outside_index
        result = self._programs["to_pod"].run(
            Packet(frame, ifindex=pod.if_index, ingress_ifindex=index)
        )
        return _passes(result.retval)

    def count_drops(self) -> dict[abi.DropReason, int]:
        """Give how many packets were dropped so far, by reason."""
        found: dict[abi.DropReason, int] = {}
        for raw, values in self._metrics.items():
            _, number, _ = split_metrics_index(int.from_bytes(raw, "little"))
            if number and any(values):
                reason = abi.DropReason(number)
                cpus = self._metrics.split_cpus(values)
                packets = sum(abi.Counter.unpack(value).packets for value in cpus)
                found[reason] = found.get(reason, 0) + packets
        return found

    def read_revision(self, pod: Attached) -> int:
        """Give the policy revision that a pod's row carries."""
        raw = self._config.lookup(pod.if_index.to_bytes(4, "little"), bpf.Update.LOCK)
        assert raw is not None
        return abi.ConfigValue.unpack(raw).policy_revision


def _frame(source: str, target: str, packet: bytes) -> bytes:
    ethertype = frames.ETH_P_IPV6 if packet[0] >> 4 == 6 else frames.ETH_P_IP
    return frames.ethernet(target, source, ethertype, packet)


def _passes(returned: int) -> bool:
    assert returned in (TC_ACT_OK, TC_ACT_SHOT, TC_ACT_REDIRECT), returned
    return returned != TC_ACT_SHOT


@contextmanager
def open_hooks(scene: Scene) -> Iterator[Hooks]:
    """Open the programs of a node; until the end this thread is in the node's namespace."""
    node = scene.node
    with ExitStack() as stack:
        programs = {}
        for name in _PROGRAMS:
            [path] = node.bpf.glob(f"v*/programs/*/{name}")
            program = open_pinned_program(str(path))
            assert program is not None
            programs[name] = stack.enter_context(program)
        maps = {}
        for name in _MAPS:
            [path] = node.bpf.glob(f"v*/maps/{name}")
            found = bpf.open_any_pinned_map(str(path))
            assert found is not None
            maps[name] = stack.enter_context(found)
        index = int(run("ip", "netns", "exec", node.name, "cat", "/sys/class/net/client/ifindex"))
        stack.enter_context(namespace(scene.places["host"].fd.fileno()))
        yield Hooks(programs, maps, index)
