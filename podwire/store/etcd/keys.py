"""Where things are in etcd, and what the value of an object is.

Used by `store.etcd` alone. Pure. Invariant: a key of etcd names one ObjectKey, and each ObjectKey has one key of etcd,
whatever its names are made of.
"""

from typing import Any, Final
from urllib.parse import quote, unquote

import msgspec

from podwire.model.errors import StorageFailure
from podwire.model.store import ObjectKey, StoredObject
from podwire.store.etcd.wire import KeyValue, prefix_end

ROOT: Final = b"/podwire/v1/"
FORMAT_KEY: Final = ROOT + b"format"
FORMAT: Final = 1
OBJECTS: Final = ROOT + b"objects/"
LEASES: Final = ROOT + b"leases/"
_CLUSTER_WIDE: Final = "_"
"""In place of a namespace. One that has this name is quoted."""


class Value(msgspec.Struct, frozen=True):
    """What the value of an object's key is, as JSON. The revision is etcd's."""

    uid: str
    created: str
    mark: str
    """Random, of the write that made this: tells a writer who lost the answer that it was his own."""
    document: msgspec.Raw


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Value).decode
_decode_document = msgspec.json.Decoder(dict[str, Any]).decode


def object_key(key: ObjectKey) -> bytes:
    """Give the key of etcd."""
    return namespace_prefix(key.kind, key.namespace) + quote(key.name, safe=":").encode()


def kind_prefix(kind: str) -> bytes:
    """Give what the keys of a kind begin with."""
    return OBJECTS + quote(kind, safe=":").encode() + b"/"


def namespace_prefix(kind: str, namespace: str) -> bytes:
    """Give what the keys of a kind in a namespace begin with; "" is cluster-wide."""
    quoted = quote(namespace, safe=":").replace("_", "%5F") if namespace else _CLUSTER_WIDE
    return kind_prefix(kind) + quoted.encode() + b"/"


def range_of_kinds(kinds: list[str]) -> tuple[bytes, bytes]:
    """Give the first key and the end of the shortest range that holds all of some kinds; none named: all objects."""
    prefixes = sorted(map(kind_prefix, kinds)) or [OBJECTS]
    return prefixes[0], prefix_end(prefixes[-1])


def parse_key(raw: bytes) -> ObjectKey | None:
    """Read a key of etcd back; None for what is no object's."""
    parts = raw.removeprefix(OBJECTS).decode(errors="replace").split("/")
    if len(parts) != 3 or not raw.startswith(OBJECTS):
        return None
    kind, namespace, name = parts
    return ObjectKey(
        unquote(kind), "" if namespace == _CLUSTER_WIDE else unquote(namespace), unquote(name)
    )


def encode_value(value: Value) -> bytes:
    """Write the value of an object's key."""
    return _encode(value)


def decode_value(found: KeyValue) -> Value:
    """Read the value of an object's key; StorageFailure when it is none that we wrote."""
    try:
        return _decode(found.value)
    except msgspec.MsgspecError as error:
        raise _foreign(found, str(error)) from error


def decode_object(found: KeyValue) -> StoredObject:
    """Read an object; StorageFailure names the key when it is none that we wrote."""
    key = parse_key(found.key)
    if key is None:
        raise _foreign(found, "its name is no object's")
    value = decode_value(found)
    try:
        document = _decode_document(value.document)
    except msgspec.MsgspecError as error:
        raise _foreign(found, str(error)) from error
    return StoredObject(
        key=key,
        uid=value.uid,
        revision=found.mod_revision,
        created=value.created,
        document=document,
    )


def _foreign(found: KeyValue, reason: str) -> StorageFailure:
    text = found.key.decode(errors="replace")
    return StorageFailure(
        f"read key {text!r} of etcd, of revision {found.mod_revision}: {reason}",
        hint=f"something else wrote it: look at it, and remove it (etcdctl del '{text}')",
    )
