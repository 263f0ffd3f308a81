"""Queues and filters: clsact, cls_bpf by program descriptor, token buckets.

A pod's programs sit in cls_bpf filters with fixed priority and handle, so that attaching again replaces in place and no
packet sees a gap. Pure. Attributes and structures: include/uapi/linux/{rtnetlink,pkt_sched,pkt_cls}.h.
"""

import struct
from dataclasses import dataclass
from typing import Final

from podwire.kernel.netlink import (
    NLM_F_CREATE,
    NLM_F_EXCL,
    NLM_F_REPLACE,
    Request,
    attribute,
    attribute_text,
    attribute_u32,
    malformed,
    nested,
    parse_attributes,
    read_text,
    read_u32,
    unpack_body,
)
from podwire.model.ids import FILTER_HANDLE, FILTER_PRIORITY

RTM_NEWQDISC: Final = 36
RTM_DELQDISC: Final = 37
RTM_GETQDISC: Final = 38
RTM_NEWTFILTER: Final = 44
RTM_DELTFILTER: Final = 45
RTM_GETTFILTER: Final = 46
FROM_POD_HOOK: Final = 0xFFFFFFF2
"""Parent of filters for what the device receives: clsact's ingress (TC_H_CLSACT, TC_H_MIN_INGRESS)."""
TO_POD_HOOK: Final = 0xFFFFFFF3
"""Parent of filters for what the device sends: clsact's egress (TC_H_CLSACT, TC_H_MIN_EGRESS)."""
_CLSACT_HANDLE: Final = 0xFFFF0000
_CLSACT_PARENT: Final = 0xFFFFFFF1
_ROOT_PARENT: Final = 0xFFFFFFFF
SHAPER_HANDLE: Final = 0x07770000
"""Handle of our token buckets (777:), which tells them from anybody else's."""
_ETH_P_ALL_BE: Final = 0x0300
_TCA_KIND: Final = 1
_TCA_OPTIONS: Final = 2
_TCA_TBF_PARMS: Final = 1
_TCA_TBF_RATE64: Final = 4
_TCA_TBF_BURST: Final = 6
_TCA_BPF_FD: Final = 6
_TCA_BPF_NAME: Final = 7
_TCA_BPF_FLAGS: Final = 8
_TCA_BPF_ID: Final = 11
_BPF_FLAG_DIRECT_ACTION: Final = 1
_LINKLAYER_ETHERNET: Final = 1
_MAX_RATE32: Final = 0xFFFFFFFF
_TCMSG: Final = struct.Struct("=BxxxiIII")
"""tcmsg: family, index, handle, parent, info."""
_RATESPEC: Final = struct.Struct("=BBHhHI")
"""tc_ratespec: cell log, link layer, overhead, cell align, mpu, rate in bytes/s."""
_TBF_QOPT: Final = struct.Struct("=12s12sIII")
"""tc_tbf_qopt: rate, peak rate, limit in bytes, buffer in ticks, mtu."""


@dataclass(frozen=True, slots=True)
class TokenBucket:
    """A token bucket: sustained rate, bytes that may pass at once, bytes that may wait."""

    rate_bytes_per_s: int
    burst_bytes: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class QueueDiscipline:
    """A queue discipline as the kernel reports it; rate and limit only of kind `tbf`, whose burst it tells in ticks."""

    index: int
    kind: str
    handle: int
    parent: int
    rate_bytes_per_s: int = 0
    limit_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BpfFilter:
    """A cls_bpf filter as the kernel reports it; `hook` is FROM_POD_HOOK or TO_POD_HOOK."""

    index: int
    hook: int
    priority: int
    handle: int
    program_id: int
    name: str
    direct_action: bool


def add_clsact(index: int) -> Request:
    """Give a device the hooks for filters; EEXIST when something sits there already, our own clsact included."""
    body = _TCMSG.pack(0, index, _CLSACT_HANDLE, _CLSACT_PARENT, 0)
    return Request(
        RTM_NEWQDISC,
        NLM_F_CREATE | NLM_F_EXCL,
        body + attribute_text(_TCA_KIND, "clsact"),
        "add clsact queue to device",
        f"index {index}",
    )


def delete_clsact(index: int) -> Request:
    """Take the hooks and all filters away."""
    body = _TCMSG.pack(0, index, _CLSACT_HANDLE, _CLSACT_PARENT, 0)
    return Request(RTM_DELQDISC, 0, body, "remove clsact queue of device", f"index {index}")


def set_bpf_filter(
    index: int,
    hook: int,
    program_fd: int,
    name: str,
    *,
    priority: int = FILTER_PRIORITY,
    handle: int = FILTER_HANDLE,
) -> Request:
    """Attach a program to a hook, or replace the one that sits there, in place."""
    # Direct action: the program's return value is the verdict, and no action of tc comes behind it.
    options = nested(
        _TCA_OPTIONS,
        attribute_u32(_TCA_BPF_FD, program_fd),
        attribute_text(_TCA_BPF_NAME, name),
        attribute_u32(_TCA_BPF_FLAGS, _BPF_FLAG_DIRECT_ACTION),
    )
    info = priority << 16 | _ETH_P_ALL_BE
    return Request(
        RTM_NEWTFILTER,
        NLM_F_CREATE | NLM_F_REPLACE,
        _TCMSG.pack(0, index, handle, hook, info) + attribute_text(_TCA_KIND, "bpf") + options,
        f"attach program {name} to device",
        f"index {index}",
    )


def delete_bpf_filter(index: int, hook: int, priority: int, handle: int) -> Request:
    """Take one filter away; ENOENT when it is not there."""
    info = priority << 16 | _ETH_P_ALL_BE
    return Request(
        RTM_DELTFILTER,
        0,
        _TCMSG.pack(0, index, handle, hook, info) + attribute_text(_TCA_KIND, "bpf"),
        "detach program from device",
        f"index {index}",
    )


def read_filter_place(body: bytes) -> tuple[int, str, int]:
    """Read priority, kind and handle out of one answer to `list_filters`, whatever filter it is; handle 0 is the head
    of a priority's chain.
    """
    (_, _, handle, _, info), attributes = unpack_body(_TCMSG, body)
    return info >> 16, read_text(attributes, _TCA_KIND), handle


def list_filters(index: int, hook: int) -> Request:
    """Ask for the filters of one hook."""
    body = _TCMSG.pack(0, index, 0, hook, 0)
    return Request(RTM_GETTFILTER, 0, body, "list filters of device", f"index {index}")


def read_bpf_filter(body: bytes) -> BpfFilter | None:
    """Read one answer to `list_filters`; None for what is no cls_bpf filter (or only the head of a chain)."""
    (_, index, handle, parent, info), attributes = unpack_body(_TCMSG, body)
    # Each priority's chain is listed once for itself, with handle 0, before its filters.
    if read_text(attributes, _TCA_KIND) != "bpf" or not handle:
        return None
    options = parse_attributes(attributes.get(_TCA_OPTIONS, b""))
    return BpfFilter(
        index=index,
        hook=parent,
        priority=info >> 16,
        handle=handle,
        program_id=read_u32(options, _TCA_BPF_ID),
        name=read_text(options, _TCA_BPF_NAME),
        direct_action=bool(read_u32(options, _TCA_BPF_FLAGS) & _BPF_FLAG_DIRECT_ACTION),
    )


def set_token_bucket(index: int, bucket: TokenBucket) -> Request:
    """Make a token bucket the device's own queue, or change the one that is."""
    # The structure has 32 bits for bytes per second; a faster rate is given by TCA_TBF_RATE64 beside the largest
    # number.
    rate = _RATESPEC.pack(
        0, _LINKLAYER_ETHERNET, 0, 0, 0, min(bucket.rate_bytes_per_s, _MAX_RATE32)
    )
    options = [
        attribute(_TCA_TBF_PARMS, _TBF_QOPT.pack(rate, bytes(12), bucket.limit_bytes, 0, 0)),
        # In bytes: the structure's own field is in ticks, whose length depends on rate and kernel (psched).
        attribute_u32(_TCA_TBF_BURST, bucket.burst_bytes),
    ]
    if bucket.rate_bytes_per_s > _MAX_RATE32:
        options.append(attribute(_TCA_TBF_RATE64, struct.pack("=Q", bucket.rate_bytes_per_s)))
    return Request(
        RTM_NEWQDISC,
        NLM_F_CREATE | NLM_F_REPLACE,
        _TCMSG.pack(0, index, SHAPER_HANDLE, _ROOT_PARENT, 0)
        + attribute_text(_TCA_KIND, "tbf")
        + nested(_TCA_OPTIONS, *options),
        "limit the rate of device",
        f"index {index}",
    )


def delete_token_bucket(index: int) -> Request:
    """Give the device its default queue back; ENOENT when it has no other."""
    body = _TCMSG.pack(0, index, SHAPER_HANDLE, _ROOT_PARENT, 0)
    return Request(RTM_DELQDISC, 0, body, "remove the rate limit of device", f"index {index}")


def list_queues(index: int) -> Request:
    """Ask for the queue disciplines of one device."""
    body = _TCMSG.pack(0, index, 0, 0, 0)
    return Request(RTM_GETQDISC, 0, body, "list queues of device", f"index {index}")


def read_queue(body: bytes) -> QueueDiscipline:
    """Read one answer to `list_queues`."""
    (_, index, handle, parent, _), attributes = unpack_body(_TCMSG, body)
    kind = read_text(attributes, _TCA_KIND)
    if kind != "tbf":
        return QueueDiscipline(index, kind, handle, parent)
    options = parse_attributes(attributes.get(_TCA_OPTIONS, b""))
    raw = options.get(_TCA_TBF_PARMS, b"")
    if len(raw) < _TBF_QOPT.size:
        raise malformed(f"token bucket of {len(raw)} bytes")
    rate, _, limit, _, _ = _TBF_QOPT.unpack_from(raw)
    rate64 = options.get(_TCA_TBF_RATE64)
    if rate64 is not None and len(rate64) != 8:
        raise malformed(f"rate of {len(rate64)} bytes")
    return QueueDiscipline(
        index=index,
        kind=kind,
        handle=handle,
        parent=parent,
        rate_bytes_per_s=struct.unpack("=Q", rate64)[0] if rate64 else _RATESPEC.unpack(rate)[5],
        limit_bytes=limit,
    )
