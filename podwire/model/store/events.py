"""Events at objects of Kubernetes, as values: what people find by `kubectl describe`.

`agent.duties.kubernetes.event_writer` tells them, `store.kubernetes` writes them. Any part of the agent may call
`Events.tell`: it returns at once, whatever becomes of the Event. With another store than Kubernetes nobody listens.
"""

from typing import Protocol

import msgspec

from podwire.model.store import ObjectKey


class Subject(msgspec.Struct, frozen=True):
    """The object that an Event is about."""

    key: ObjectKey
    uid: str = ""
    """"" where it is not known: then the Event is found by the object's name alone."""


class EventWrite(msgspec.Struct, frozen=True):
    """One write of one Event."""

    name: str
    about: Subject
    reason: str
    """One word that programs can look for: `PodCIDRContested`."""
    message: str
    """What has happened, and what to do."""
    first: str
    """RFC 3339."""
    last: str
    count: int
    """How often it has happened since `first`."""
    is_new: bool
    """Whether it must be made; else it is there already, and its count rises."""

    @property
    def namespace(self) -> str:
        """Where the Event is. That of a cluster-wide object is in `default` (validation of core/v1 Event)."""
        return self.about.key.namespace or "default"


class Events(Protocol):
    """Takes what people should find at an object."""

    def tell(self, about: Subject, reason: str, message: str) -> None:
        """Have an Event (type Warning) written at an object, soon; waits for nothing and raises nothing.

        The same reason at the same object again only raises the count of one Event, written once a minute at most.
        """


class NoEvents:
    """Where there are no Events: any other store than Kubernetes."""

    def tell(self, about: Subject, reason: str, message: str) -> None:
        """Do nothing."""
