"""The messages of etcd's JSON gateway: the parts of answers that podwire reads, and the requests that it writes.

Used by `store.etcd` alone. Pure. Bytes are base64 and 64-bit numbers may be text in this JSON; fields with the value
zero are left out. Source: etcd 3.4, `rpc.proto` and its gateway.
"""

from collections.abc import Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec

Body = dict[str, Any]

T = TypeVar("T")

CANCELLED: Final = 1
INVALID_ARGUMENT: Final = 3
DEADLINE_EXCEEDED: Final = 4
PERMISSION_DENIED: Final = 7
RESOURCE_EXHAUSTED: Final = 8
FAILED_PRECONDITION: Final = 9
OUT_OF_RANGE: Final = 11
UNAVAILABLE: Final = 14
UNAUTHENTICATED: Final = 16


class Header(msgspec.Struct, frozen=True):
    """Beginning of every answer."""

    cluster_id: int = 0
    revision: int = 0


class KeyValue(msgspec.Struct, frozen=True):
    """One key as it is, or was."""

    key: bytes = b""
    value: bytes = b""
    mod_revision: int = 0
    lease: int = 0


class RangeAnswer(msgspec.Struct, frozen=True):
    """Answer to `kv/range`."""

    header: Header = Header()
    kvs: Sequence[KeyValue] = ()
    more: bool = False


class TxnPart(msgspec.Struct, frozen=True):
    """Answer to one operation of a transaction; only those of reading are read."""

    response_range: RangeAnswer | None = None


class TxnAnswer(msgspec.Struct, frozen=True):
    """Answer to `kv/txn`."""

    header: Header = Header()
    succeeded: bool = False
    responses: Sequence[TxnPart] = ()

    def values(self) -> list[KeyValue | None]:
        """Give what each read of one key found."""
        ranges = [part.response_range or RangeAnswer() for part in self.responses]
        return [answer.kvs[0] if answer.kvs else None for answer in ranges]


class LeaseAnswer(msgspec.Struct, frozen=True):
    """Answer to `lease/grant` and, within a Framed, to `lease/keepalive`: TTL 0 when there is no such lease."""

    header: Header = Header()
    ID: int = 0
    TTL: int = 0


class TokenAnswer(msgspec.Struct, frozen=True):
    """Answer to `auth/authenticate`."""

    token: str = ""


class Event(msgspec.Struct, frozen=True):
    """One change; `type` is left out for a put."""

    kv: KeyValue
    type: str = "PUT"
    prev_kv: KeyValue | None = None


class WatchAnswer(msgspec.Struct, frozen=True):
    """One message of a watch: it was made or ended, has events, or (none of these) says how far it is."""

    header: Header = Header()
    created: bool = False
    canceled: bool = False
    compact_revision: int = 0
    cancel_reason: str = ""
    events: Sequence[Event] = ()


class Failure(msgspec.Struct, frozen=True):
    """What the gateway says instead of an answer; `code` is gRPC's."""

    code: int
    error: str = ""
    message: str = ""
    grpc_code: int = 0
    """In place of `code` where it is within a stream."""


class Framed(msgspec.Struct, Generic[T], frozen=True):
    """One message of a stream."""

    result: T | None = None
    error: msgspec.Raw = msgspec.Raw()


# etcd knows no prefixes, only ranges: [first, end). The end of a prefix is the prefix with its last byte increased.
def prefix_end(prefix: bytes) -> bytes:
    """Give the first key after all that begin with `prefix`."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


# etcd gives a key that does not exist the mod_revision 0 in comparisons.
def equal(key: bytes, mod_revision: int) -> Body:
    """Write the condition that a key is still of this revision; 0: that there is none."""
    return {"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": mod_revision}


def put(key: bytes, value: bytes, lease: int = 0) -> Body:
    """Write the operation that sets a key."""
    return {"request_put": {"key": key, "value": value, "lease": lease}}


def delete(key: bytes) -> Body:
    """Write the operation that removes a key."""
    return {"request_delete_range": {"key": key}}


def read(key: bytes) -> Body:
    """Write the operation that reads a key."""
    return {"request_range": {"key": key}}
