"""The outcome of a change of policies, for the modules whose endpoints it concerns.

Made by the engine, read by `control.endpoint` and the API. Values only.
"""

from collections.abc import Mapping

import msgspec

from podwire.control.policy.resolve.subject import PolicyValues
from podwire.control.policy.rule import PolicyId
from podwire.model.errors import PodwireError
from podwire.model.ids import EndpointId


class Failure(msgspec.Struct, frozen=True):
    """One identity that could not be brought to its policies; what was in force for it stays in force."""

    identity: int
    error: PodwireError
    endpoints: tuple[EndpointId, ...]
    policies: tuple[PolicyId, ...]
    """The policies that select it, those that changed in this `apply` first."""


class Outcome(msgspec.Struct, frozen=True):
    """What one `apply` did."""

    generation: int
    changed: Mapping[EndpointId, PolicyValues] = msgspec.field(default_factory=dict)
    """Endpoints whose rows were rewritten, with what they hold now."""
    failed: tuple[Failure, ...] = ()
    """All identities that are behind now, also those that failed before and did again."""
    recovered: tuple[EndpointId, ...] = ()
    """Endpoints that were behind before and are not any more."""
