"""The keys in etcd, and the form of an object's value.

Used by `store.etcd` alone. Pure. Invariant: a key of etcd names one ObjectKey, and each ObjectKey has one key of etcd,
whatever characters its names have.
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
    """A random mark of the write that made this: a writer that lost the answer recognises its own write by it."""
    document: msgspec.Raw


UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What a decoder says of bytes that are not what it expects: RecursionError of very deep ones."""

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
    # `quote` leaves "_" alone, and a namespace of that name must not look like cluster-wide.
    quoted = quote(namespace, safe=":").replace("_", "%5F") if namespace else _CLUSTER_WIDE
    return kind_prefix(kind) + quoted.encode() + b"/"


def range_of_kinds(kinds: list[str]) -> tuple[bytes, bytes]:
    """Give the first key and the end of the shortest range that holds all of some kinds."""
    # One stream for all kinds. What lies between the first and the last prefix comes along and is dropped by its
    # kind.
    prefixes = sorted(map(kind_prefix, kinds))
    return prefixes[0], prefix_end(prefixes[-1])


def parse_key(raw: bytes) -> ObjectKey | None:
    """Read a key of etcd back; None for what is no object's."""
    parts = raw.removeprefix(OBJECTS).decode(errors="replace").split("/")
    if len(parts) != 3 or not raw.startswith(OBJECTS):
        return None
    kind, namespace, name = parts
    key = ObjectKey(
        unquote(kind), "" if namespace == _CLUSTER_WIDE else unquote(namespace), unquote(name)
    )
    # Otherwise two keys of etcd would be one object.
    return key if object_key(key) == raw else None


def name_key(raw: bytes) -> ObjectKey:
    """Name what a key of etcd is about: its object, else the key itself, which no object is called."""
    key = parse_key(raw)
    if key is not None:
        return key
    kind = raw.removeprefix(OBJECTS).decode(errors="replace").partition("/")[0]
    return ObjectKey(unquote(kind), "", raw.decode(errors="replace"))


def encode_value(value: Value) -> bytes:
    """Write the value of an object's key."""
    return _encode(value)


def decode_value(pair: KeyValue) -> Value:
    """Read the value of an object's key; StorageFailure when it is none that we wrote."""
    try:
        return _decode(pair.value)
    except UNDECODABLE as error:
        raise StorageFailure(describe_foreign(pair, str(error))) from error


def decode_object(pair: KeyValue) -> StoredObject:
    """Read an object. One that something else wrote has a `fault` that names the key of etcd, and no document."""
    try:
        value = _decode(pair.value)
        document = _decode_document(value.document)
    except UNDECODABLE as error:
        return _unreadable(pair, str(error))
    key = parse_key(pair.key)
    if key is None:
        return _unreadable(
            pair,
            f"its name is not an object's; etcdctl del '{pair.key.decode(errors='replace')}' removes it",
        )
    return StoredObject(
        key=key,
        uid=value.uid,
        revision=pair.mod_revision,
        created=value.created,
        document=document,
    )


def describe_foreign(pair: KeyValue, reason: str) -> str:
    """Say what is wrong with a key of etcd."""
    text = pair.key.decode(errors="replace")
    return f"key {text!r} of etcd, of revision {pair.mod_revision}, is not podwire's: {reason}"


def _unreadable(pair: KeyValue, reason: str) -> StoredObject:
    return StoredObject(
        key=name_key(pair.key),
        revision=pair.mod_revision,
        fault=describe_foreign(pair, reason),
    )
