"""The states of an endpoint and the one table of legal moves between them.

This file alone decides which state may follow which; no other module assigns a state. Effects are not here:
`control.attach` and `control.endpoint.regenerate` do the step and then report what happened as an event. An event that
the table does not have for a state raises IllegalTransition and changes nothing. Pure.
"""

import enum
from collections.abc import Mapping

import msgspec

from podwire.model.errors import Bug


class State(enum.Enum):
    """Where an endpoint is in its life. The values are the field's own names, as the API shows them."""

    RESTORING = "restoring"
    """Found in the journal after a restart; its datapath is in force and not yet compared."""
    WAITING_FOR_IDENTITY = "waiting-for-identity"
    """Its labels have no number yet: the guard row still drops everything."""
    WAITING_TO_REGENERATE = "waiting-to-regenerate"
    """A regeneration is asked for and has not begun; what was in force stays in force."""
    REGENERATING = "regenerating"
    READY = "ready"
    NOT_READY = "not-ready"
    """The last regeneration failed; the datapath before it stays in force and a retry is due."""
    DISCONNECTING = "disconnecting"
    """DEL was accepted: nothing passes any more, the device and addresses are on their way out."""
    DISCONNECTED = "disconnected"


class Event(msgspec.Struct, frozen=True):
    """Something that happened to an endpoint, and why."""

    cause: str


class IdentityResolved(Event, frozen=True):
    """The labels have a number (again)."""

    cause: str = "identity resolved"


class RegenerationRequested(Event, frozen=True):
    """Something that the datapath depends on changed."""


class RegenerationStarted(Event, frozen=True):
    """The regenerator took the endpoint up."""

    cause: str = "regeneration started"


class RegenerationSucceeded(Event, frozen=True):
    """The kernel holds the desired state."""

    cause: str = "regeneration succeeded"


class RegenerationFailed(Event, frozen=True):
    """The kernel still holds the state before; `cause` is the error."""


class DisconnectAccepted(Event, frozen=True):
    """DEL, GC or a failed ADD: the endpoint ends."""


class DeviceGone(Event, frozen=True):
    """The device pair and every row are out of the kernel."""

    cause: str = "device gone"


_S = State

TRANSITIONS: Mapping[tuple[State, type[Event]], State] = {
    (_S.RESTORING, RegenerationStarted): _S.REGENERATING,
    # Restoring ends with a regeneration of its own, so a trigger before it asks for nothing more.
    (_S.RESTORING, RegenerationRequested): _S.RESTORING,
    (_S.RESTORING, IdentityResolved): _S.RESTORING,
    (_S.RESTORING, DisconnectAccepted): _S.DISCONNECTING,
    (_S.WAITING_FOR_IDENTITY, IdentityResolved): _S.WAITING_TO_REGENERATE,
    # Nothing is regenerated without an identity; the regeneration that follows takes in what the trigger meant.
    (_S.WAITING_FOR_IDENTITY, RegenerationRequested): _S.WAITING_FOR_IDENTITY,
    (_S.WAITING_FOR_IDENTITY, DisconnectAccepted): _S.DISCONNECTING,
    (_S.WAITING_TO_REGENERATE, RegenerationStarted): _S.REGENERATING,
    (_S.WAITING_TO_REGENERATE, RegenerationRequested): _S.WAITING_TO_REGENERATE,
    (_S.WAITING_TO_REGENERATE, IdentityResolved): _S.WAITING_TO_REGENERATE,
    (_S.WAITING_TO_REGENERATE, DisconnectAccepted): _S.DISCONNECTING,
    (_S.REGENERATING, RegenerationSucceeded): _S.READY,
    (_S.REGENERATING, RegenerationFailed): _S.NOT_READY,
    # A trigger during a regeneration stays in the queue and starts the next one; the state tells of the running one.
    (_S.REGENERATING, RegenerationRequested): _S.REGENERATING,
    (_S.REGENERATING, IdentityResolved): _S.REGENERATING,
    (_S.REGENERATING, DisconnectAccepted): _S.DISCONNECTING,
    (_S.READY, RegenerationRequested): _S.WAITING_TO_REGENERATE,
    (_S.READY, IdentityResolved): _S.WAITING_TO_REGENERATE,
    (_S.READY, DisconnectAccepted): _S.DISCONNECTING,
    (_S.NOT_READY, RegenerationRequested): _S.WAITING_TO_REGENERATE,
    (_S.NOT_READY, IdentityResolved): _S.WAITING_TO_REGENERATE,
    (_S.NOT_READY, DisconnectAccepted): _S.DISCONNECTING,
    # Runtimes repeat DEL, and GC may name an endpoint whose DEL was accepted. Nothing else leads out but the device's
    # end.
    (_S.DISCONNECTING, DisconnectAccepted): _S.DISCONNECTING,
    (_S.DISCONNECTING, DeviceGone): _S.DISCONNECTED,
}

ENDING = frozenset({State.DISCONNECTING, State.DISCONNECTED})
"""The states of an endpoint that no longer counts: it is not changed, published or kept from being collected."""


class IllegalTransition(Bug):
    """An event came in a state that does not allow it; the state is as before."""

    def __init__(self, state: State, event: Event) -> None:
        super().__init__(
            f"move endpoint in state {state.value!r}: it does not allow the event {event!r}"
        )
        self.state = state
        self.event = event


def next_state(state: State, event: Event) -> State:
    """Give the state after `event`, or raise IllegalTransition."""
    try:
        return TRANSITIONS[state, type(event)]
    except KeyError:
        raise IllegalTransition(state, event) from None
