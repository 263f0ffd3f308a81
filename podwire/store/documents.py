"""What every back end asks of a document before it writes it: a kind, a name, JSON, and not too much of it.

Used by the back ends. Pure. Invariant: what one back end takes, every other takes too.
"""

from typing import Final

import msgspec

from podwire.model.errors import InvalidRequest
from podwire.model.store import StoredObject

DOCUMENT_MAX_BYTES: Final = 1 << 20
"""As JSON. etcd takes requests of 1.5 MiB by default, names and conditions included."""

_encode = msgspec.json.Encoder().encode


def encode_document(new: StoredObject) -> bytes:
    """Write an object's document as JSON; InvalidRequest when no store can keep it."""
    if not new.key.kind or not new.key.name:
        raise InvalidRequest(f"write {new.key}: an object has a kind and a name")
    try:
        encoded = _encode(new.document)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"write {new.key}: its document is no JSON: {error}") from error
    if len(encoded) > DOCUMENT_MAX_BYTES:
        raise InvalidRequest(
            f"write {new.key}: it takes {len(encoded)} bytes; at most {DOCUMENT_MAX_BYTES} are allowed",
            hint="split it into several objects",
        )
    return encoded
