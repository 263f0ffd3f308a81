"""Records of endpoints for tests in which most of their fields do not matter."""

from typing import Any

import msgspec

from podwire.model.endpoint import AttachmentKey, Device, EndpointRecord, Phase
from podwire.model.ids import ContainerId, EndpointId, IfIndex, InterfaceName, NetworkName


def make_record(number: int, **fields: Any) -> EndpointRecord:
    """Give the record of a living endpoint, with the fields that a test is about."""
    record = EndpointRecord(
        id=EndpointId(number),
        key=AttachmentKey(NetworkName("net"), ContainerId(f"c{number}"), InterfaceName("eth0")),
        phase=Phase.LIVE,
        boot_id="b",
        taken_boottime_ns=1,
        netns_path="/x",
        netns_cookie=1,
        device=Device(
            *("veth", InterfaceName(f"pw{number}"), IfIndex(number), ""),
            *(InterfaceName("eth0"), IfIndex(2), "", 1500),
        ),
    )
    return msgspec.structs.replace(record, **fields)
