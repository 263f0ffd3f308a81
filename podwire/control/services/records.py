"""Services, slices and claims as bytes: what is kept of each object until it is needed again.

Used by `control.services.catalogue`. Pure. Ten thousand services have a hundred thousand back ends; as objects each of
these takes some 250 bytes, here some 10. Invariant: reading gives what was written, and the same is written in the same
bytes.
"""

import ipaddress
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

from podwire.control.services.facts import (
    Endpoint,
    ServiceFacts,
    ServiceName,
    ServicePort,
    SliceFacts,
)
from podwire.control.services.reading import Left
from podwire.model.endpoint import IPAddress
from podwire.model.interfaces import BackEnd, Frontend

Claims = Mapping[Frontend, tuple[BackEnd, ...]]

_PORT: Final = struct.Struct("!H")
_FRONTEND_TAIL: Final = struct.Struct("!HB")
"""Behind the address: port, protocol."""
_BYTES_OF: Final = {4: 4, 6: 16}
_encode: Final = msgspec.msgpack.Encoder(order="deterministic").encode


class Claimed(msgspec.Struct, frozen=True):
    """What one service claims, as old as the claims, because objects may have gone since."""

    claims: Claims
    created: str
    external: tuple[IPAddress, ...]
    affinity_s: int


NOTHING: Final = Claimed({}, "", (), 0)


class _Service(msgspec.Struct, array_like=True, frozen=True, omit_defaults=True):
    created: str
    addresses: tuple[bytes, ...]
    ports: tuple[ServicePort, ...]
    uid: str = ""
    is_local_only: bool = False
    external: tuple[bytes, ...] = ()
    affinity_s: int = 0
    is_left: bool = False
    left: tuple[Left, ...] = ()
    selector: tuple[tuple[str, str], ...] = ()
    prefers_node: bool = False


class _Group(msgspec.Struct, array_like=True, frozen=True):
    """Back ends of which the same is said."""

    addresses: bytes
    endpoint: Endpoint


class _Slice(msgspec.Struct, array_like=True, frozen=True):
    service: str
    ports: tuple[tuple[str, int, int], ...]
    family: int
    groups: tuple[_Group, ...]


class _Claims(msgspec.Struct, array_like=True, frozen=True):
    created: str
    external: tuple[bytes, ...]
    affinity_s: int
    lists: tuple[tuple[bytes, tuple[bytes, ...]], ...]
    """Each list of back ends once, with the frontends that share it."""


_decode_service: Final = msgspec.msgpack.Decoder(_Service).decode
_decode_slice: Final = msgspec.msgpack.Decoder(_Slice).decode
_decode_claims: Final = msgspec.msgpack.Decoder(_Claims).decode


def pack_service(facts: ServiceFacts) -> bytes:
    """Write a service, but for its name."""
    return _encode(
        _Service(
            created=facts.created,
            addresses=_pack(facts.addresses),
            ports=facts.ports,
            uid=facts.uid,
            is_local_only=facts.is_local_only,
            external=_pack(facts.external),
            affinity_s=facts.affinity_s,
            is_left=facts.is_left,
            left=facts.left,
            selector=facts.selector,
            prefers_node=facts.prefers_node,
        )
    )


def unpack_service(name: ServiceName, record: bytes) -> ServiceFacts:
    """Read a service."""
    row = _decode_service(record)
    return ServiceFacts(
        name=name,
        created=row.created,
        addresses=_unpack(row.addresses),
        ports=row.ports,
        uid=row.uid,
        is_local_only=row.is_local_only,
        external=_unpack(row.external),
        affinity_s=row.affinity_s,
        is_left=row.is_left,
        left=row.left,
        selector=row.selector,
        prefers_node=row.prefers_node,
    )


def pack_slice(facts: SliceFacts) -> bytes:
    """Write a slice, but for its service's namespace."""
    groups: dict[Endpoint, list[bytes]] = {}
    for address, endpoint in zip(facts.addresses, facts.endpoints, strict=True):
        groups.setdefault(endpoint, []).append(address.packed)
    rows = tuple(_Group(b"".join(addresses), endpoint) for endpoint, addresses in groups.items())
    ports = tuple((name, protocol, number) for (name, protocol), number in facts.ports.items())
    family = facts.addresses[0].version if facts.addresses else 4
    return _encode(_Slice(facts.service.name, ports, family, rows))


def unpack_slice(namespace: str, record: bytes) -> SliceFacts:
    """Read a slice. Its addresses come in another order: those of which the same is said, together."""
    row = _decode_slice(record)
    addresses: list[IPAddress] = []
    endpoints: list[Endpoint] = []
    for group in row.groups:
        here = _unpack(_cut(group.addresses, _BYTES_OF[row.family]))
        addresses += here
        endpoints += [group.endpoint] * len(here)
    return SliceFacts(
        ServiceName(namespace, row.service),
        {(name, protocol): number for name, protocol, number in row.ports},
        tuple(addresses),
        tuple(endpoints),
    )


def read_slice_service(namespace: str, record: bytes) -> ServiceName:
    """Give the service that a slice is of."""
    return ServiceName(namespace, _decode_slice(record).service)


def pack_claims(claimed: Claimed) -> bytes:
    """Write what a service claims; b"" = nothing."""
    if not claimed.claims:
        return b""
    lists: dict[bytes, list[bytes]] = {}
    for frontend, back_ends in claimed.claims.items():
        packed = b"".join(
            back_end.address.packed + _PORT.pack(back_end.port) for back_end in back_ends
        )
        lists.setdefault(packed, []).append(pack_frontend(frontend))
    rows = tuple((back_ends, tuple(frontends)) for back_ends, frontends in lists.items())
    record = _Claims(claimed.created, _pack(claimed.external), claimed.affinity_s, rows)
    return _encode(record)


def unpack_claims(record: bytes) -> Claimed:
    """Read what a service claims."""
    if not record:
        return NOTHING
    row = _decode_claims(record)
    claims: dict[Frontend, tuple[BackEnd, ...]] = {}
    for packed, frontends in row.lists:
        for frontend in map(unpack_frontend, frontends):
            claims[frontend] = tuple(_unpack_back_ends(packed, frontend))
    return Claimed(claims, row.created, _unpack(row.external), row.affinity_s)


def pack_frontend(frontend: Frontend) -> bytes:
    """Write an address and port."""
    return frontend.address.packed + _FRONTEND_TAIL.pack(frontend.port, frontend.protocol)


def unpack_frontend(packed: bytes) -> Frontend:
    """Read an address and port."""
    at = len(packed) - _FRONTEND_TAIL.size
    return Frontend(ipaddress.ip_address(packed[:at]), *_FRONTEND_TAIL.unpack_from(packed, at))


def _unpack_back_ends(packed: bytes, frontend: Frontend) -> Iterator[BackEnd]:
    address_bytes = _BYTES_OF[frontend.address.version]
    for packed_end in _cut(packed, address_bytes + _PORT.size):
        (port,) = _PORT.unpack_from(packed_end, address_bytes)
        yield BackEnd(ipaddress.ip_address(packed_end[:address_bytes]), port, frontend.protocol)


def _pack(addresses: Iterable[IPAddress]) -> tuple[bytes, ...]:
    return tuple(address.packed for address in addresses)


def _unpack(addresses: Iterable[bytes]) -> tuple[IPAddress, ...]:
    return tuple(map(ipaddress.ip_address, addresses))


def _cut(packed: bytes, size_bytes: int) -> Iterator[bytes]:
    return (packed[at : at + size_bytes] for at in range(0, len(packed), size_bytes))
