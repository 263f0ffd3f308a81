"""What the kernel alone takes for the steps of an ADD: the same messages, encoded beforehand, sent in a bare loop.

podwire's own code makes a pair once, with sockets that remember what they send. Then a loop sends the same bytes again
and again, deletes the pair in between, and times nothing but the system calls. What a step of the agent takes beyond
that is podwire's to save; the rest is the kernel's. Used by `bench.breakdown`.
"""

import ctypes
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final
from unittest import mock

import msgspec

from podwire.datapath import abi, pod_net
from podwire.datapath.carrier import await_carrier
from podwire.datapath.device import HostSide, Programs, create_device, plan_device
from podwire.datapath.routes import SourceAddresses
from podwire.kernel import bpf, netns
from podwire.kernel.netlink import NetlinkSocket, encode_batch
from podwire.kernel.probe import load_program
from podwire.kernel.rtnl.link import delete_link, set_link
from podwire.kernel.rtnl.route import InterfaceAddress, add_address
from podwire.model.endpoint import AttachmentKey, EndpointRecord, Phase
from podwire.model.ids import (
    ContainerId,
    EndpointId,
    InterfaceName,
    NetworkName,
    host_device_name,
)
from podwire.model.interfaces import PodNamespace

ROWS: Final = 1024
NODE_ADDRESS: Final = ipaddress.IPv4Address("10.9.0.1")
MTU_BYTES: Final = 1500
_RECEIVE_BYTES: Final = 1 << 16
_libc = ctypes.CDLL(None)

Batches = list[bytes]
"""What one socket sends, one element for each call."""


class _Recorder(NetlinkSocket):
    """A socket that remembers what it sends."""

    def __init__(self, batches: Batches) -> None:
        super().__init__()
        self._batches = batches

    def _transmit(self, data: bytes | bytearray, call: str, *, changes: bool) -> None:
        self._batches.append(bytes(data))
        super()._transmit(data, call, changes=changes)


def _exchange(connection: socket.socket, batch: bytes) -> None:
    """Send a batch and read its one answer: a second one would wait in the socket until it overflows."""
    connection.send(batch)
    answer = connection.recv(_RECEIVE_BYTES)
    kind, error = struct.unpack_from("=4xH10xi", answer)
    if kind == 2 and error:
        raise OSError(-error, os.strerror(-error))


def measure_floor(rounds: int, directory: Path) -> dict[str, list[float]]:
    """Give milliseconds by step, `rounds` of each; IPv4 only, like the comparison with other plugins."""
    samples: dict[str, list[float]] = {}

    def timed(name: str, do: Callable[[], object]) -> None:
        begin_ns = time.perf_counter_ns()
        do()
        samples.setdefault(name, []).append((time.perf_counter_ns() - begin_ns) / 1e6)

    with _world() as (pod, record, on_host, in_pod), _raw_socket() as host:
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        create, furnish, look = on_host
        delete, _ = encode_batch([delete_link(record.device.host_ifindex)])
        for _ in range(rounds):
            timed("device: create the pair", lambda: _exchange(host, create))
            timed("device: programs, up, route, neighbour", lambda: _exchange(host, furnish))
            timed("pod-network: visit, addresses, up, routes", lambda: _in_pod(pod, home, in_pod))
            timed("pod-network: have the carrier acted on", lambda: _exchange(host, look))
            _exchange(host, delete)
        os.close(home)
    _time_rows(rounds, timed)
    _time_journal(record, directory, rounds, timed)
    return samples


def _in_pod(pod: PodNamespace, home: int, batches: Batches) -> None:
    _libc.setns(pod.fd, netns.CLONE_NEWNET)
    with _raw_socket() as connection:
        _libc.setns(home, netns.CLONE_NEWNET)
        for batch in batches:
            _exchange(connection, batch)


def _time_rows(rounds: int, timed: Callable[..., None]) -> None:
    """Time the four rows of maps that an ADD writes, in maps of the same shape."""
    sizes = {
        "usage": (4, abi.USAGE_VALUE_BYTES),
        "config": (4, abi.CONFIG_VALUE_BYTES),
        "endpoints": (abi.ENDPOINT_KEY_BYTES, abi.ENDPOINT_VALUE_BYTES),
    }
    with ExitStack() as stack:
        usage, config, endpoints = (
            stack.enter_context(
                bpf.create_map(
                    bpf.MapType.HASH,
                    f"floor_{name}",
                    key_size=key_bytes,
                    value_size=value_bytes,
                    max_entries=ROWS,
                )
            )
            for name, (key_bytes, value_bytes) in sizes.items()
        )
        rows = [
            (one, bytes(one.info.key_size), bytes(one.info.value_size))
            for one in (usage, config, endpoints, config)
        ]

        def write_rows() -> None:
            for one, key, value in rows:
                one.update(key, value)

        for _ in range(rounds):
            timed("guard, build: four rows of maps", write_rows)


def _time_journal(
    record: EndpointRecord, directory: Path, rounds: int, timed: Callable[..., None]
) -> None:
    """Time the two writes of an ADD: one line each, behind the lines of other ADDs."""
    line = b"1 %s\n" % msgspec.json.encode(record)
    fd = os.open(directory / "floor", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    for _ in range(rounds):
        timed("intent: the first write", lambda: os.write(fd, line))
        timed("commit: the second write", lambda: os.write(fd, line))
    os.close(fd)


@contextmanager
def _raw_socket() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as connection:
        yield connection


@contextmanager
def _world() -> Iterator[tuple[PodNamespace, EndpointRecord, Batches, Batches]]:
    """Be in a namespace that plays the node; give a pod, its record, and what an ADD sends on the host and inside."""
    with ExitStack() as stack:
        pod_fd = stack.enter_context(netns.open_new())
        host_fd = stack.enter_context(netns.open_new())
        stack.enter_context(netns.namespace(host_fd.fileno()))
        number = pod_fd.fileno()
        pod = PodNamespace(number, "/pod", netns.cookie(number))
        on_host: Batches = []
        in_pod: Batches = []
        with _Recorder(on_host) as netlink:
            netlink.execute(
                [set_link(1, up=True), add_address(InterfaceAddress(1, NODE_ADDRESS, 24))]
            )
            on_host.clear()
            record = _record(netlink, pod)
            side = stack.enter_context(_side())
            create_device(netlink, record, pod, side)

            def record_in_pod() -> _Recorder:
                return _Recorder(in_pod)

            with mock.patch.object(pod_net, "NetlinkSocket", record_in_pod):
                pod_net.configure_pod(record, pod)
            await_carrier(netlink, record.device)
            made = list(on_host)
            netlink.execute([delete_link(record.device.host_ifindex)])
        yield pod, record, made, in_pod


@contextmanager
def _side() -> Iterator[HostSide]:
    program, _, log = load_program()
    if program is None:
        raise RuntimeError(log)
    with program:
        fd = program.fileno()
        yield HostSide("floor", Programs(fd, fd, 0, 0), SourceAddresses(NODE_ADDRESS))


def _record(netlink: NetlinkSocket, pod: PodNamespace) -> EndpointRecord:
    container, name = ContainerId("floor"), InterfaceName("eth0")
    host_name = host_device_name(container, name)
    return EndpointRecord(
        id=EndpointId(1),
        key=AttachmentKey(NetworkName("floor"), container, name),
        phase=Phase.ADDING,
        boot_id="boot",
        taken_boottime_ns=0,
        netns_path=pod.path,
        netns_cookie=pod.cookie,
        device=plan_device(netlink, EndpointId(1), host_name, name, mtu=MTU_BYTES),
        ipv4="10.99.0.2",
        ipv6="",
        pod="a-pod-of-the-benchmark",
    )
