"""What this kernel can do: tried out, never guessed from its version.

Asked by `doctor`, by STATUS and, after a failure only, by callers that explain why something failed. Everything is
tried in a throw-away namespace, so nothing is left and no device of the host is touched. An answer has three values;
the one that means "I could not find out" is never remembered.
"""

import ctypes
import enum
import errno
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from podwire.kernel import netns
from podwire.kernel.fd import Fd
from podwire.kernel.netlink import NetlinkSocket, Request
from podwire.kernel.nft import Nftables
from podwire.kernel.rtnl.link import LinkEnd, create_link, create_veth
from podwire.kernel.rtnl.tc import (
    FROM_POD_HOOK,
    TokenBucket,
    add_clsact,
    set_bpf_filter,
    set_token_bucket,
)
from podwire.model.errors import KernelFailure, PodwireError, Unsupported

_SYS_BPF: Final = {"x86_64": 321, "aarch64": 280}
_BPF_PROG_LOAD: Final = 5
_BPF_LINK_CREATE: Final = 28
_BPF_PROG_TYPE_SCHED_CLS: Final = 3
_BPF_TCX_INGRESS: Final = 46
_LOG_BYTES: Final = 4096
_RETURN_ZERO: Final = struct.pack("=BBhi", 0xB7, 0, 0, 0)
"""r0 = 0 (struct bpf_insn: code, registers, offset, immediate)"""
_EXIT: Final = struct.pack("=BBhi", 0x95, 0, 0, 0)
_TRIVIAL: Final = _RETURN_ZERO + _EXIT
_BTF_PATH: Final = Path("/sys/kernel/btf/vmlinux")
_INDEX: Final = 77

_libc = ctypes.CDLL(None, use_errno=True)


class Answer(enum.Enum):
    """What a probe found out."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "could not tell"


class Feature(enum.Enum):
    """What podwire needs or may use; the value is how people read it."""

    VETH = "veth device pairs"
    CLSACT_BPF = "clsact and cls_bpf filters"
    TOKEN_BUCKET = "tbf queues"
    NFTABLES = "nftables"
    BTF = "kernel type information (BTF)"
    BPF_TIMER = "bpf timers"
    BPF_LOOP = "bpf_loop"
    REDIRECT_PEER = "bpf_redirect_peer"
    NETKIT = "netkit devices"
    TCX = "TCX links"
    VXLAN = "VXLAN devices"


REQUIRED: Final = (
    Feature.VETH,
    Feature.CLSACT_BPF,
    Feature.TOKEN_BUCKET,
    Feature.NFTABLES,
    Feature.BTF,
    Feature.BPF_TIMER,
    Feature.BPF_LOOP,
    Feature.REDIRECT_PEER,
)
"""Without these there is no datapath."""


class Probe:
    """Answers about the running kernel; definite ones are remembered for the life of the process."""

    def __init__(self) -> None:
        self._known: dict[Feature, Answer] = {}

    def ask(self, feature: Feature) -> Answer:
        """Find out whether the kernel has a feature."""
        known = self._known.get(feature)
        if known is not None:
            return known
        try:
            answer = _PROBES[feature]()
        except (OSError, PodwireError):
            return Answer.UNKNOWN
        # A right that is missing, or memory that is short, may be there at the next question.
        if answer is not Answer.UNKNOWN:
            self._known[feature] = answer
        return answer


def load_program(instructions: bytes = _TRIVIAL) -> tuple[Fd | None, int, str]:
    """Load a classifier without libbpf; gives its descriptor, or None with errno and the verifier's log."""
    code = ctypes.create_string_buffer(instructions, len(instructions))
    licence = ctypes.create_string_buffer(b"GPL")
    log = ctypes.create_string_buffer(_LOG_BYTES)
    # union bpf_attr for BPF_PROG_LOAD: type, count, instructions, licence, log level, size, buffer
    request = struct.pack(
        "=IIQQIIQ",
        _BPF_PROG_TYPE_SCHED_CLS,
        len(instructions) // 8,
        ctypes.addressof(code),
        ctypes.addressof(licence),
        1,
        _LOG_BYTES,
        ctypes.addressof(log),
    ).ljust(128, b"\0")
    number, error = _call_bpf(_BPF_PROG_LOAD, request)
    if number < 0:
        return None, error, log.value.decode(errors="replace")
    return Fd(number, "bpf program"), 0, ""


def _call_bpf(command: int, request: bytes) -> tuple[int, int]:
    number = _SYS_BPF.get(os.uname().machine)
    if number is None:
        return -1, errno.ENOSYS
    attributes = ctypes.create_string_buffer(request, len(request))
    result = _libc.syscall(number, command, attributes, len(request))
    return result, ctypes.get_errno()


def _try(*requests: Request) -> Answer:
    """Send requests in a new namespace: success means yes, the error "no such kind" means no."""
    with netns.open_new() as home, NetlinkSocket.open_in(home.fileno()) as netlink:
        return _judge(netlink, requests)


def _judge(netlink: NetlinkSocket, requests: tuple[Request, ...]) -> Answer:
    for request in requests:
        failure = netlink.attempt([request])[0]
        if failure is not None:
            # An unknown kind is EOPNOTSUPP for links (net/core/rtnetlink.c) and ENOENT for queues
            # (net/sched/sch_api.c), after the kernel has tried to load a module.
            missing = failure.errno in (errno.EOPNOTSUPP, errno.ENOENT, errno.ENODEV)
            return Answer.NO if missing else Answer.UNKNOWN
    return Answer.YES


def _probe_kind(kind: str) -> Answer:
    """Make a device without settings: a known kind that misses them says EINVAL."""
    with netns.open_new() as home, NetlinkSocket.open_in(home.fileno()) as netlink:
        failure = netlink.attempt([create_link(kind, LinkEnd("probe0"))])[0]
    if failure is None or failure.errno == errno.EINVAL:
        return Answer.YES
    return Answer.NO if failure.errno == errno.EOPNOTSUPP else Answer.UNKNOWN


def _probe_clsact() -> Answer:
    program, error, _ = load_program()
    if program is None:
        return Answer.UNKNOWN if error == errno.EPERM else Answer.NO
    with program, netns.open_new() as home, NetlinkSocket.open_in(home.fileno()) as netlink:
        netlink.execute([_pair()])
        attach = set_bpf_filter(_INDEX, FROM_POD_HOOK, program.fileno(), "probe")
        return _judge(netlink, (add_clsact(_INDEX), attach))


def _probe_nftables() -> Answer:
    # The context stays in the namespace that it was opened in, so the table vanishes with it.
    with netns.open_new() as home, netns.namespace(home.fileno()):
        tables = Nftables()
    with tables:
        tables.run("add table inet podwire_probe")
    return Answer.YES


def _probe_helper(number: int) -> Answer:
    """Call a helper with wrong arguments: the verifier names an unknown number before it looks at those."""
    call = struct.pack("=BBhi", 0x85, 0, 0, number)
    program, error, log = load_program(call + _TRIVIAL)
    if program is not None:
        program.close()
        return Answer.YES
    # kernel/bpf/verifier.c:check_helper_call says the one of a number beyond its list, the other of a helper that
    # classifiers do not have.
    if "invalid func" in log or "unknown func" in log:
        return Answer.NO
    return Answer.YES if log and error in (errno.EINVAL, errno.EACCES) else Answer.UNKNOWN


def _probe_tcx() -> Answer:
    program, _, _ = load_program()
    if program is None:
        return Answer.UNKNOWN
    with program, netns.open_new() as home:

        def attach() -> tuple[int, int]:
            # union bpf_attr for BPF_LINK_CREATE: program, device index, attach type
            request = struct.pack("=III", program.fileno(), 1, _BPF_TCX_INGRESS)
            return _call_bpf(_BPF_LINK_CREATE, request.ljust(64, b"\0"))

        number, error = netns.run_in(home.fileno(), attach)
    if number >= 0:
        os.close(number)
        return Answer.YES
    # The attach types are a list in bpf(2): a kernel before 6.6 does not know this one and says EINVAL.
    return Answer.NO if error == errno.EINVAL else Answer.UNKNOWN


def _pair() -> Request:
    return create_veth(LinkEnd("probe0", _INDEX), LinkEnd("probe1"), None)


def _answer(present: bool) -> Answer:
    return Answer.YES if present else Answer.NO


_PROBES: Final[Mapping[Feature, Callable[[], Answer]]] = {
    Feature.VETH: lambda: _try(_pair()),
    Feature.CLSACT_BPF: _probe_clsact,
    Feature.TOKEN_BUCKET: lambda: _try(
        _pair(), set_token_bucket(_INDEX, TokenBucket(1_000_000, 65_536, 65_536))
    ),
    Feature.NFTABLES: _probe_nftables,
    Feature.BTF: lambda: _answer(_BTF_PATH.exists()),
    Feature.BPF_TIMER: lambda: _probe_helper(169),
    Feature.BPF_LOOP: lambda: _probe_helper(181),
    Feature.REDIRECT_PEER: lambda: _probe_helper(155),
    Feature.NETKIT: lambda: _probe_kind("netkit"),
    Feature.TCX: _probe_tcx,
    Feature.VXLAN: lambda: _probe_kind("vxlan"),
}


def explain_failure(failure: KernelFailure, feature: Feature) -> PodwireError:
    """Give the error to raise: Unsupported when the kernel certainly lacks `feature`, else the failure itself."""
    # A probe makes a namespace and devices in it, so it is asked after a failure and never before.
    if Probe().ask(feature) is not Answer.NO:
        return failure
    return Unsupported(
        f"{failure.message}: this kernel has no {feature.value}",
        hint="use a kernel that has it, or load its module",
    )
