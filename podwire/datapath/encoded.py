"""Messages of an ADD, encoded once for each shape of pod: an ADD only puts its own values into the bytes.

Used by `datapath.device` and `datapath.pod_net`, whose functions remain the one description of what is sent. Encoding
took a third of the time that the kernel needs for the messages. Such a function may only copy what an endpoint does not
share with others of its shape. Invariant: bytes from here are what it gives for the same endpoint. That is compared
when a shape is first met; where it is not so, the function is asked each time.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from podwire.kernel.netlink import EncodedBatch, Request, encode_batch
from podwire.kernel.rtnl.link import parse_mac
from podwire.model.endpoint import EndpointRecord
from podwire.model.ids import EndpointId, IfIndex, InterfaceName, device_alias

Plan = Callable[[EndpointRecord, int], Sequence[Request]]
"""Gives the messages for an endpoint; the number is the descriptor of its namespace."""
_Fields = tuple[bytes, ...]
_SHAPES_MAX: Final = 256
_STAND_IN_NAME: Final = InterfaceName("pw5e17c3a96f2d")
_STAND_IN_DESCRIPTOR: Final = 0x46E1B82D
"""Values that stand for an endpoint's own: no two of them, and nothing else in a message, have the same bytes."""


class _Template(msgspec.Struct, frozen=True):
    data: bytes
    starts: Sequence[int]
    places: Sequence[Sequence[slice]]
    """For each field, where its bytes are."""

    def fill(self, fields: _Fields) -> bytearray:
        data = bytearray(self.data)
        for value, places in zip(fields, self.places, strict=True):
            for place in places:
                data[place] = value
        return data


class EncodedPlan:
    """The messages that `plan` gives, in bytes. `node_name`: whose alias a device gets."""

    def __init__(self, plan: Plan, node_name: str) -> None:
        self._plan = plan
        self._node_name = node_name
        self._templates: dict[tuple[object, ...], _Template | None] = {}

    def encode(self, record: EndpointRecord, namespace_fd: int = 0) -> EncodedBatch:
        """Give what is to be sent for an endpoint."""
        device = record.device
        shape = (
            *(device.pod_name, device.mtu, len(device.host_name), len(str(record.id))),
            *(bool(record.ipv4), bool(record.ipv6)),
        )
        fields = self._fields(record, namespace_fd)
        requests = partial(self._plan, record, namespace_fd)
        if shape not in self._templates:
            if len(self._templates) >= _SHAPES_MAX:  # callers choose names and MTUs
                self._templates.clear()
            self._templates[shape] = self._learn(record, fields, requests())
        template = self._templates[shape]
        if template is None:
            data, starts = encode_batch(requests())
            return EncodedBatch(bytearray(data), starts, requests)
        return EncodedBatch(template.fill(fields), template.starts, requests)

    def _fields(self, record: EndpointRecord, namespace_fd: int) -> _Fields:
        device = record.device
        return (
            namespace_fd.to_bytes(4, "little"),
            device.host_name.encode(),
            device.host_ifindex.to_bytes(4, "little"),
            device.pod_ifindex.to_bytes(4, "little"),
            parse_mac(device.host_mac),
            parse_mac(device.pod_mac),
            device_alias(self._node_name, record.id).encode(),
            *(address.packed for address in record.addresses),
        )

    def _learn(
        self, record: EndpointRecord, fields: _Fields, wanted: Sequence[Request]
    ) -> _Template | None:
        stand_in = _make_stand_in(record)
        data, starts = encode_batch(self._plan(stand_in, _STAND_IN_DESCRIPTOR))
        stand_ins = self._fields(stand_in, _STAND_IN_DESCRIPTOR)
        made = _Template(data, starts, [_find_all(data, value) for value in stand_ins])
        # An attribute's length and the padding behind it stand in the message, too: values of another length would need
        # other bytes around them.
        same_lengths = all(len(a) == len(b) for a, b in zip(fields, stand_ins, strict=True))
        return made if same_lengths and made.fill(fields) == encode_batch(wanted)[0] else None


def _make_stand_in(record: EndpointRecord) -> EndpointRecord:
    device = msgspec.structs.replace(
        record.device,
        host_name=InterfaceName(_STAND_IN_NAME[: len(record.device.host_name)]),
        host_ifindex=IfIndex(0x5B3C71A9),
        host_mac="a3:5f:c1:7e:92:d4",
        pod_ifindex=IfIndex(0x2D9E46F3),
        pod_mac="d8:1b:64:e9:37:af",
    )
    return msgspec.structs.replace(
        record,
        id=EndpointId(int("8" * len(str(record.id)))),
        device=device,
        ipv4="181.77.203.94" if record.ipv4 else "",
        ipv6="fd5c:91e7:3ab4:d62f:80c9:5e13:74ab:c2d6" if record.ipv6 else "",
    )


def _find_all(data: bytes, value: bytes) -> Sequence[slice]:
    places, at = [], data.find(value)
    while at >= 0:
        places.append(slice(at, at + len(value)))
        at = data.find(value, at + len(value))
    return places
