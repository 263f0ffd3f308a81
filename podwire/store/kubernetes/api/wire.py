"""The shapes of the API server's answers, as far as they are read here.

Used by `store.kubernetes`. Pure. Bodies of objects stay undecoded (`msgspec.Raw`) until their kind is known. What is
not declared here is skipped without an allocation: `metadata.managedFields` is often most of an object.
"""

from typing import Final

import msgspec

EXPIRED: Final = 410
"""HTTP status, also in a watch's ERROR event: the revision, or the rest of a paged list, is not known any more."""


class Cause(msgspec.Struct, frozen=True):
    """One thing that the server found wrong."""

    reason: str = ""
    message: str = ""
    field: str = ""


class StatusDetails(msgspec.Struct, frozen=True, rename="camel"):
    """What a Status is about."""

    name: str = ""
    group: str = ""
    kind: str = ""
    causes: list[Cause] | None = None
    retry_after_seconds: int = 0


class Status(msgspec.Struct, frozen=True):
    """metav1.Status: how the API server says no."""

    kind: str = ""
    message: str = ""
    reason: str = ""
    code: int = 0
    details: StatusDetails | None = None

    @property
    def subject(self) -> StatusDetails:
        """What it is about, empty when the server does not say."""
        return self.details or StatusDetails()


class ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    """metav1.ListMeta. `continue`: where the next page begins."""

    resource_version: str = ""
    next_page: str = msgspec.field(default="", name="continue")


class ObjectList(msgspec.Struct, frozen=True):
    """Any list."""

    metadata: ListMeta = ListMeta()
    items: list[msgspec.Raw] | None = None


class WatchEvent(msgspec.Struct, frozen=True):
    """One line of a watch."""

    type: str
    object: msgspec.Raw


class ObjectMeta(msgspec.Struct, frozen=True, rename="camel"):
    """What of metadata the store itself needs."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str | None = ""


class Header(msgspec.Struct, frozen=True):
    """What every object has."""

    metadata: ObjectMeta = ObjectMeta()


class Headers(msgspec.Struct, frozen=True):
    """metav1.PartialObjectMetadataList."""

    items: list[Header] | None = None


decode_headers: Final = msgspec.json.Decoder(Headers).decode
decode_status: Final = msgspec.json.Decoder(Status).decode
decode_list: Final = msgspec.json.Decoder(ObjectList).decode
decode_event: Final = msgspec.json.Decoder(WatchEvent).decode
decode_header: Final = msgspec.json.Decoder(Header).decode


def read_status(raw: bytes, code: int) -> Status:
    """Read what the server says of a request that failed; what is no Status becomes one with its text."""
    try:
        found = decode_status(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        found = Status()
    if found.kind == "Status":
        return Status(found.kind, found.message, found.reason, found.code or code, found.details)
    return Status(message=raw[:300].decode(errors="replace").strip(), code=code)
