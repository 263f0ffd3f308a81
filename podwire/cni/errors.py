"""The CNI code of each kind of error, and the error JSON.

Called by the agent's socket. No other module knows these numbers. Sources: CNI specification 1.1.0, "Error"; codes from
100 on are podwire's own (docs/protocol.md).
"""

import json
from collections.abc import Mapping
from typing import Final

from podwire.model import errors
from podwire.model.errors import PodwireError
from podwire.model.wire import SUPPORTED_CNI_VERSIONS

CODES: Final[Mapping[str, int]] = {
    errors.IncompatibleVersion.kind: 1,
    errors.UnsupportedField.kind: 2,
    errors.UnknownContainer.kind: 3,
    errors.InvalidEnvironment.kind: 4,
    errors.StorageFailure.kind: 5,
    errors.UndecodableRequest.kind: 6,
    errors.InvalidConfiguration.kind: 7,
    errors.InvalidRequest.kind: 7,
    errors.Unavailable.kind: 11,
    errors.Cancelled.kind: 11,
    errors.CannotServe.kind: 50,
    errors.Impaired.kind: 51,
    errors.Exhausted.kind: 100,
    errors.AddressUnavailable.kind: 101,
    errors.PolicyOverflow.kind: 102,
    errors.Unsupported.kind: 103,
    errors.CheckFailed.kind: 104,
    errors.PodwireError.kind: 110,
    errors.NotFound.kind: 110,
    errors.Conflict.kind: 110,
    errors.ForeignObject.kind: 110,
    errors.NewerData.kind: 110,
    errors.Bug.kind: 110,
    errors.KernelFailure.kind: 110,
}

DETAILS_MAX_CHARACTERS: Final = 4096


def code_of(error: PodwireError) -> int:
    """Give the CNI code of an error."""
    return CODES[error.kind]


def encode_error(version: str, error: PodwireError) -> bytes:
    """Write the error JSON: what failed in `msg`, every fault and what to do next in `details`."""
    document = {
        # A runtime reads the error by this version, and could read none of a version that nobody knows.
        "cniVersion": version if version in SUPPORTED_CNI_VERSIONS else SUPPORTED_CNI_VERSIONS[-1],
        "code": code_of(error),
        "msg": error.message,
        "details": _write_details(error),
    }
    return json.dumps(document, separators=(",", ":")).encode()


def _write_details(error: PodwireError) -> str:
    """Give one line for each fault and the hint as the last one, which is never cut off."""
    hint = error.hint[:DETAILS_MAX_CHARACTERS]
    faults = "\n".join(f"{fault.path} {fault.message}".strip() for fault in error.faults)
    room = max(0, DETAILS_MAX_CHARACTERS - len(hint) - 1)
    return "\n".join(filter(None, (faults[:room], hint)))
