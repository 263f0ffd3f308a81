"""Bandwidth limits of a pod, each direction by a token bucket on the device that sends.

Towards the pod the queue is that of the host device. Such an endpoint carries a flag, and the fast path sends through
that queue, because a redirect to the peer would skip it. From the pod the queue is that of the pod's end. Called on
ADD, and on a running pod when its limits change. Only buckets with podwire's handle are changed or removed. CNI counts
bits; the kernel counts bytes. A pod with NET_ADMIN can lift the limit on what it sends itself, because it owns that
queue.
"""

import errno
from typing import Final

from podwire.kernel.netlink import NetlinkSocket
from podwire.kernel.probe import Feature, explain_failure
from podwire.kernel.rtnl.tc import (
    SHAPER_HANDLE,
    QueueDiscipline,
    TokenBucket,
    delete_token_bucket,
    list_queues,
    read_queue,
    set_token_bucket,
)
from podwire.model.endpoint import Bandwidth, Device
from podwire.model.ids import IfIndex
from podwire.model.interfaces import PodNamespace

_NO_BURST_GIVEN_BITS: Final = (1 << 31) - 1
"""containerd sends 2^32-1 and the kubelet used to send 2^31-1 when nobody asked for a burst:
half a gigabyte would pass.
"""
_DEFAULT_BURST_MS: Final = 25
_QUEUE_MS: Final = 25
"""How long a packet may wait: the reference plugin's 25 ms."""
_HEADER_BYTES: Final = 22
"""Ethernet header and one VLAN tag: a bucket smaller than one frame passes nothing."""
_FLOOR_BYTES: Final = 64 * 1024
_MAX_BURST_BYTES: Final = (1 << 32) - 1
_GONE: Final = (errno.ENODEV, errno.ENOENT, errno.EINVAL)
# What the kernel says of a queue to be deleted depends on what is missing: the device (ENODEV), or the queue with that
# handle (ENOENT, or EINVAL where another one stands at its place; net/sched/sch_api.c:tc_get_qdisc).


def compute_bucket(rate_bits_per_s: int, burst_bits: int, mtu: int) -> TokenBucket | None:
    """Compute the bucket of one direction; None when there is no limit. `mtu` in bytes.

    Without a burst, or with the value that means "none given", 25 ms of the rate and at least 64 KiB, so that a segment
    as big as offloading makes them passes unsplit. A burst below one frame is raised to one.
    """
    if rate_bits_per_s <= 0:
        return None
    # Bits in the CNI capability, bytes in the kernel: a rate below eight bits must not become none.
    rate = max(1, rate_bits_per_s // 8)
    if 0 < burst_bits < _NO_BURST_GIVEN_BITS:
        burst = burst_bits // 8
    else:
        # A segment as big as offloading makes them (64 KiB) must fit, or tbf splits it into packets
        # (net/sched/sch_tbf.c:tbf_segment).
        burst = max(_FLOOR_BYTES, rate * _DEFAULT_BURST_MS // 1000)
    # tbf drops a packet that is larger than its bucket.
    burst = min(max(burst, mtu + _HEADER_BYTES), _MAX_BURST_BYTES)
    limit = min(burst + rate * _QUEUE_MS // 1000, _MAX_BURST_BYTES)
    return TokenBucket(rate, burst, limit)


def _compute_buckets(
    device: Device, bandwidth: Bandwidth
) -> tuple[TokenBucket | None, TokenBucket | None]:
    to_pod = compute_bucket(bandwidth.to_pod_bits_per_s, bandwidth.to_pod_burst_bits, device.mtu)
    return to_pod, compute_bucket(
        bandwidth.from_pod_bits_per_s, bandwidth.from_pod_burst_bits, device.mtu
    )


def shape_device(
    netlink: NetlinkSocket, device: Device, bandwidth: Bandwidth, namespace: PodNamespace | None
) -> None:
    """Set, change or remove the limits of both directions; without a namespace only that of the host device.

    Raises KernelFailure when a limit cannot be set; a limit that is to go and is not there is success.
    """
    to_pod, from_pod = _compute_buckets(device, bandwidth)
    _apply(netlink, device.host_ifindex, to_pod)
    if namespace is None:
        return
    # A netlink socket belongs for ever to the namespace in which it was opened, so this thread need not stay there.
    with NetlinkSocket.open_in(namespace.fd) as inside:
        _apply(inside, device.pod_ifindex, from_pod)


def compare_shaping(
    netlink: NetlinkSocket, device: Device, bandwidth: Bandwidth, namespace: PodNamespace | None
) -> list[str]:
    """Name what differs between the limits wanted and those in force."""
    to_pod, from_pod = _compute_buckets(device, bandwidth)
    differences = _compare(netlink, device.host_ifindex, to_pod, "to the pod")
    if namespace is not None:
        with NetlinkSocket.open_in(namespace.fd) as inside:
            differences += _compare(inside, device.pod_ifindex, from_pod, "from the pod")
    return differences


def _apply(netlink: NetlinkSocket, index: IfIndex, wanted: TokenBucket | None) -> None:
    if wanted is not None:
        failure = netlink.attempt([set_token_bucket(index, wanted)])[0]
        if failure is not None:
            unknown = failure.errno in (errno.ENOENT, errno.EOPNOTSUPP)
            raise explain_failure(failure, Feature.TOKEN_BUCKET) if unknown else failure
    elif _find_bucket(netlink, index) is not None:
        netlink.execute([delete_token_bucket(index)], tolerated=_GONE)


def _compare(
    netlink: NetlinkSocket, index: IfIndex, wanted: TokenBucket | None, direction: str
) -> list[str]:
    present = _find_bucket(netlink, index)
    if wanted is None:
        return [] if present is None else [f"a rate limit {direction} is in force, wanted none"]
    if present is None:
        return [f"the rate limit {direction} is missing"]
    if present.rate_bytes_per_s != wanted.rate_bytes_per_s:
        return [
            f"the rate limit {direction} is {present.rate_bytes_per_s * 8} bit/s,"
            f" wanted {wanted.rate_bytes_per_s * 8}"
        ]
    # The kernel reports the burst in ticks only. The limit contains it in bytes.
    if present.limit_bytes != wanted.limit_bytes:
        return [f"the burst of the rate limit {direction} is not the wanted one"]
    return []


def _find_bucket(netlink: NetlinkSocket, index: IfIndex) -> QueueDiscipline | None:
    for body in netlink.dump(list_queues(index), absent=_GONE):
        queue = read_queue(body)
        if (queue.index, queue.kind, queue.handle) == (index, "tbf", SHAPER_HANDLE):
            return queue
    return None
