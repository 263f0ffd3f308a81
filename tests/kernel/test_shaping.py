"""Limits in both directions: what the kernel gets, what a real stream measures, set and lifted
while the pod runs.
"""

import socket
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from podwire.datapath.device import HostSide, create_device
from podwire.datapath.pod_net import configure_pod
from podwire.datapath.shaping import compare_shaping, compute_bucket, shape_device
from podwire.kernel import netns
from podwire.kernel.netlink import NetlinkSocket
from podwire.kernel.rtnl.tc import TokenBucket
from podwire.model.endpoint import Bandwidth, EndpointRecord
from podwire.model.errors import KernelFailure
from tests.kernel.conftest import NODE_IPV4, Namespace, RecordMaker

MBIT = 1_000_000

BUCKETS = [
    pytest.param(0, 0, 1450, None, id="no-limit"),
    pytest.param(0, 1000, 1450, None, id="burst-without-rate-is-no-limit"),
    pytest.param(8 * MBIT, 8 * 100_000, 1450, TokenBucket(MBIT, 100_000, 125_000), id="given"),
    pytest.param(8 * MBIT, 0, 1450, TokenBucket(MBIT, 65_536, 90_536), id="default-burst"),
    pytest.param(
        8000 * MBIT, 0, 1450, TokenBucket(1000 * MBIT, 25 * MBIT, 50 * MBIT), id="25-ms-burst"
    ),
    pytest.param(
        8 * MBIT, (1 << 32) - 1, 1450, TokenBucket(MBIT, 65_536, 90_536), id="containerd-none"
    ),
    pytest.param(
        8 * MBIT, (1 << 31) - 1, 1450, TokenBucket(MBIT, 65_536, 90_536), id="kubelet-none"
    ),
    pytest.param(8 * MBIT, 80, 1450, TokenBucket(MBIT, 1472, 26_472), id="burst-below-a-frame"),
    pytest.param(1, 0, 1450, TokenBucket(1, 65_536, 65_536), id="one-bit"),
]


@pytest.mark.parametrize(("rate", "burst", "mtu", "bucket"), BUCKETS)
def test_bits_become_a_bucket_in_bytes(
    rate: int, burst: int, mtu: int, bucket: TokenBucket | None
) -> None:
    assert compute_bucket(rate, burst, mtu) == bucket


@pytest.fixture
def record(
    netlink: NetlinkSocket, pod: Namespace, side: HostSide, make_record: RecordMaker
) -> EndpointRecord:
    """An attached pod."""
    made = make_record(1, namespace=pod, families="4")
    create_device(netlink, made, pod.pod, side)
    configure_pod(made, pod.pod)
    return made


def _kinds(namespace: Namespace, device: str) -> list[str]:
    return [qdisc["kind"] for qdisc in namespace.tc("qdisc", "show", "dev", device)]


def test_limits_are_set_changed_and_lifted_on_a_running_pod(
    host: Namespace, netlink: NetlinkSocket, pod: Namespace, record: EndpointRecord
) -> None:
    device = record.device
    steps = [
        Bandwidth(to_pod_bits_per_s=10 * MBIT),
        Bandwidth(to_pod_bits_per_s=20 * MBIT, from_pod_bits_per_s=5 * MBIT),
        Bandwidth(from_pod_bits_per_s=5 * MBIT, from_pod_burst_bits=8 * 90_000),
        Bandwidth(),
    ]
    previous = Bandwidth()
    for bandwidth in steps:
        assert compare_shaping(netlink, device, bandwidth, pod.pod) != []
        shape_device(netlink, device, bandwidth, pod.pod)
        assert compare_shaping(netlink, device, bandwidth, pod.pod) == []
        assert compare_shaping(netlink, device, previous, pod.pod) != []
        shaped = ("tbf" in _kinds(host, device.host_name), "tbf" in _kinds(pod, "eth0"))
        assert shaped == (bandwidth.to_pod_bits_per_s > 0, bandwidth.from_pod_bits_per_s > 0)
        previous = bandwidth


def test_programs_stay_attached_when_limits_come_and_go(
    host: Namespace, netlink: NetlinkSocket, pod: Namespace, record: EndpointRecord
) -> None:
    name = record.device.host_name
    before = host.tc("filter", "show", "dev", name, "egress")
    shape_device(netlink, record.device, Bandwidth(to_pod_bits_per_s=MBIT), pod.pod)
    assert host.tc("filter", "show", "dev", name, "egress") == before
    shape_device(netlink, record.device, Bandwidth(), pod.pod)
    assert host.tc("filter", "show", "dev", name, "egress") == before


def test_somebody_elses_queue_is_not_removed(
    host: Namespace, netlink: NetlinkSocket, record: EndpointRecord
) -> None:
    name = record.device.host_name
    host.run(*f"tc qdisc add dev {name} root handle 5: tbf rate 1mbit burst 10k limit 10k".split())
    shape_device(netlink, record.device, Bandwidth(), None)
    assert "tbf" in _kinds(host, name)


def test_a_missing_device_is_an_error_only_when_a_limit_is_wanted(
    netlink: NetlinkSocket, make_record: RecordMaker
) -> None:
    device = make_record(9).device
    shape_device(netlink, device, Bandwidth(), None)
    with pytest.raises(KernelFailure, match="limit the rate"):
        shape_device(netlink, device, Bandwidth(to_pod_bits_per_s=MBIT), None)


@pytest.mark.parametrize("towards_pod", [True, False], ids=["to-pod", "from-pod"])
def test_a_stream_runs_at_the_limit_and_no_faster(
    host: Namespace,
    netlink: NetlinkSocket,
    pod: Namespace,
    record: EndpointRecord,
    *,
    towards_pod: bool,
) -> None:
    """Coarse bounds: far below the pair's own speed, and not starved."""
    rate = 40 * MBIT
    bandwidth = (
        Bandwidth(to_pod_bits_per_s=rate) if towards_pod else Bandwidth(from_pod_bits_per_s=rate)
    )
    shape_device(netlink, record.device, bandwidth, pod.pod)
    limited = _measure_until(
        lambda measured: rate * 0.6 < measured < rate * 1.5,
        partial(_measure_bits_per_s, host, pod, record, towards_pod=towards_pod),
    )
    assert rate * 0.6 < limited[-1] < rate * 1.5, limited
    shape_device(netlink, record.device, Bandwidth(), pod.pod)
    free = _measure_until(
        lambda measured: measured > rate * 4,
        partial(_measure_bits_per_s, host, pod, record, towards_pod=towards_pod),
    )
    assert free[-1] > rate * 4, free


def _measure_until(is_good: Callable[[float], bool], measure: Callable[[], float]) -> list[float]:
    """Measure until it is good, ten times at the most: others may keep the machine from sending."""
    found = [measure()]
    while not is_good(found[-1]) and len(found) < 10:
        found.append(measure())
    return found


def _measure_bits_per_s(
    host: Namespace, pod: Namespace, record: EndpointRecord, *, towards_pod: bool
) -> float:
    """Stream for half a second and give what arrived per second."""
    receiver, address = (pod, record.ipv4) if towards_pod else (host, str(NODE_IPV4))
    sender = host if towards_pod else pod
    with netns.namespace(receiver.fd.fileno()):
        server = socket.create_server((address, 0))
    with netns.namespace(sender.fd.fileno()):
        client = socket.create_connection(server.getsockname(), timeout=20)
    connection, _ = server.accept()
    stop = threading.Event()

    def send() -> None:
        data = bytes(64 * 1024)
        with client:
            while not stop.is_set():
                client.sendall(data)

    thread = threading.Thread(target=send)
    with server, connection:
        connection.settimeout(20)
        began, received = time.monotonic(), 0
        thread.start()
        while time.monotonic() - began < 0.5:
            received += len(connection.recv(1 << 18))
        elapsed = time.monotonic() - began
        stop.set()
        while connection.recv(1 << 18):
            pass
        thread.join()
    return received * 8 / elapsed
