"""What every back end requires of a document before it writes it (a kind, a name, JSON, a bounded size), patches, and
the errors of writes that come too late.

Used by the back ends. Pure. Invariant: what one back end accepts, every other accepts too.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from podwire.model.errors import Conflict, InvalidRequest, NotFound
from podwire.model.store import ObjectKey, StoredObject

DOCUMENT_MAX_BYTES: Final = 1 << 20
"""As JSON. etcd takes requests of 1.5 MiB by default, names and conditions included."""

_encode = msgspec.json.Encoder().encode


def merge(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Give a document with single fields changed: a merge patch, as RFC 7386 says. None takes a field away."""
    merged = dict(document)
    for name, change in changes.items():
        if change is None:
            merged.pop(name, None)
        elif isinstance(change, Mapping):
            # RFC 7386, section 2: what was no object before counts as an empty one.
            before = merged.get(name)
            merged[name] = merge(before if isinstance(before, Mapping) else {}, change)
        else:
            merged[name] = change
    return merged


def encode_document(new: StoredObject) -> bytes:
    """Write an object's document as JSON; InvalidRequest when no store can keep it."""
    if not new.key.kind or not new.key.name:
        raise InvalidRequest(f"write {new.key}: an object has a kind and a name")
    # A document comes from a caller: one that contains itself, or is nested too deeply, ends in RecursionError.
    try:
        encoded = _encode(new.document)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"write {new.key}: its document is not JSON: {error}") from error
    if len(encoded) > DOCUMENT_MAX_BYTES:
        raise InvalidRequest(
            f"write {new.key}: it takes {len(encoded)} bytes; at most {DOCUMENT_MAX_BYTES} are allowed",
            hint="split it into several objects",
        )
    return encoded


def none_there(verb: str, key: ObjectKey) -> NotFound:
    """Make the error of a write to what does not exist."""
    return NotFound(f"{verb} {key}: there is none", hint=f"see podwire get {key.kind}")


def exists(key: ObjectKey, revision: int) -> Conflict:
    """Make the error of creating what exists."""
    at = f", at revision {revision}" if revision else ""
    return Conflict(f"create {key}: it exists{at}", hint="update it, or delete it first")


def changed(verb: str, key: ObjectKey, revision: int, expected: int) -> Conflict:
    """Make the error of a revision that is no longer."""
    return Conflict(
        f"{verb} {key}: its revision is {revision}, no longer {expected}",
        hint="somebody else has changed it: read it again and repeat",
    )


def find_conflict(
    verb: str, key: ObjectKey, present: tuple[str, int], uid: str, revision: int | None
) -> Conflict | None:
    """Find why what is present (its uid and revision) is not what a caller means, by `uid` ("": any) and `revision`."""
    if uid and present[0] != uid:
        return Conflict(
            f"{verb} {key}: it was deleted and made anew", hint="read it again and repeat"
        )
    if revision is not None and present[1] != revision:
        return changed(verb, key, present[1], revision)
    return None
