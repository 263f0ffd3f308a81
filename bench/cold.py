"""What the Python of an ADD takes with its memory in the processor's caches, and after something else was there.

The parts of an ADD that compute alone, from podwire's own code, are done one after the other: the frame and the request
are read, an address is taken, rows, record and answer are written. Once that is done in a loop, and once
behind a look through 32 MB of other memory each time, which is what a pause among other processes does. Used by
`bench.breakdown`.
"""

import gc
import time
from collections.abc import Callable
from typing import Final

import msgspec

from podwire.cni.netconf import decode_request
from podwire.cni.result import encode_result
from podwire.control.attach.result import describe_attachment
from podwire.control.ipam.interface import Wish
from podwire.control.ipam.node import NodeIpam
from podwire.datapath.maps import config_row, endpoint_row
from podwire.model import wire
from podwire.model.endpoint import AttachmentKey, Device, EndpointRecord, Phase
from podwire.model.ids import (
    EndpointId,
    IdentityId,
    IfIndex,
    device_mac,
    host_device_name,
)
from podwire.model.wire import Frame

OTHER_BYTES: Final = 32 << 20
"""More than the caches of one processor hold."""
_VERSION: Final = "1.1.0"
_NETNS: Final = "/run/netns/a-pod-of-the-benchmark"
_IDENTITY: Final = IdentityId(77_777)
_NUMBER: Final = EndpointId(7)


def measure_python(rounds: int) -> dict[str, list[float]]:
    """Give milliseconds of `rounds` passes through the parts: in a loop, and each behind a look at other memory."""
    do = _make_pass()
    other = bytearray(OTHER_BYTES)
    gc.freeze()
    try:
        return {
            "in a loop": _measure(rounds, do, lambda: None),
            "behind 32 MB of other memory": _measure(rounds, do, lambda: other.count(b"\1")),
        }
    finally:
        gc.unfreeze()


def _measure(rounds: int, do: Callable[[], None], disturb: Callable[[], object]) -> list[float]:
    samples = []
    for _ in range(rounds):
        disturb()
        begin_ns = time.perf_counter_ns()
        do()
        samples.append((time.perf_counter_ns() - begin_ns) / 1e6)
    return samples


def _make_pass() -> Callable[[], None]:
    """Give one pass; it leaves everything as it was."""
    data = wire.encode_frame(_make_frame())
    ipam = NodeIpam(["10.99.0.0/16"])

    def do() -> None:
        frame = wire.decode_frame(data)
        request = decode_request(frame.environment, frame.stdin, frame.started_boottime_ns)
        assert request.key is not None
        given, _ = ipam.take(_NUMBER, Wish(key=request.key, identity=_IDENTITY))
        record = _make_record(request.key, str(given))
        msgspec.json.encode(record)
        config_row(record, None).pack()
        endpoint_row(record).pack()
        msgspec.json.encode(msgspec.structs.replace(record, phase=Phase.LIVE))
        encode_result(_VERSION, describe_attachment(record))
        ipam.release(_NUMBER)

    do()
    return do


def _make_frame() -> Frame:
    environment = {
        "CNI_COMMAND": "ADD",
        "CNI_CONTAINERID": "c" * 64,
        "CNI_NETNS": _NETNS,
        "CNI_IFNAME": "eth0",
        "CNI_PATH": "/opt/cni/bin",
        "CNI_ARGS": "IgnoreUnknown=1;K8S_POD_NAMESPACE=bench;K8S_POD_NAME=a-pod",
    }
    config = {"cniVersion": _VERSION, "name": "bench", "type": wire.CNI_PROGRAM}
    return Frame(
        environment=environment,
        stdin=msgspec.json.encode(config),
        started_boottime_ns=1,
        boot_id="",
        has_netns=True,
    )


def _make_record(key: AttachmentKey, ipv4: str) -> EndpointRecord:
    device = Device(
        kind="veth",
        host_name=host_device_name(key.container_id, key.if_name),
        host_ifindex=IfIndex(1 << 20),
        host_mac=device_mac(_NUMBER, 1),
        pod_name=key.if_name,
        pod_ifindex=IfIndex((1 << 20) + 1),
        pod_mac=device_mac(_NUMBER, 0),
        mtu=1500,
    )
    return EndpointRecord(
        id=_NUMBER,
        key=key,
        phase=Phase.ADDING,
        boot_id="boot",
        taken_boottime_ns=1,
        netns_path=_NETNS,
        netns_cookie=1,
        device=device,
        ipv4=ipv4,
        identity=_IDENTITY,
    )
