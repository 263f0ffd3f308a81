"""Leases: which holders are alive, and which of them has a duty, without a heartbeat in any object.

Part of the store's contract (`Store.leases`); the same suite holds for every back end. A lease is a name that one
holder has for as long as it keeps the lease alive, which happens in the background. Names in use: `node/NAME`, held by
a node's agent, and `duty/...`, held by the agent that does a duty for the cluster. Errors as in `model.store`.
Invariant: while one holder's lease is not lost, no other holder has that name.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol, Self

import msgspec

NODE: Final = "node/"
"""Before the name of a node. The holder is JSON: `instance` and `address`."""
IDENTITY_DUTY: Final = "duty/identities"
ADDRESS_DUTY: Final = "duty/addresses"
"""What one agent does for the whole cluster. A name for each: holders in one agent must not take it from each other."""


class LeaseChange(msgspec.Struct, frozen=True):
    """The holder of a name from now on; `holder` "": none, because the last one gave it up or vanished."""

    name: str
    holder: str


class Lease(Protocol):
    """A name that is held until it is closed or lost. It keeps itself alive in the background."""

    @property
    def name(self) -> str:
        """What is held."""

    @property
    def holder(self) -> str:
        """The process that holds it."""

    @property
    def lost(self) -> bool:
        """Whether another may hold it: the store did not answer for the whole time to live, or another does hold it.

        After an outage of the store it is taken back automatically, and this is False again, unless another was faster.
        """

    @property
    def taken_by(self) -> str:
        """The holder that took it, "" while nobody did. Once taken, it is lost for good."""

    def close(self) -> None:
        """Give it up at once. While the store is away, it expires instead."""


class LeaseWatch(Protocol):
    """The holders of names: first all that live, then every change. One thread reads it; any may close it."""

    @property
    def holders(self) -> Mapping[str, str]:
        """What `next` has given so far, put together: name -> holder."""

    @property
    def is_listed(self) -> bool:
        """Whether all living holders were given once: then a name that is not in `holders` has no living holder."""

    def next(self, timeout_s: float) -> Sequence[LeaseChange]:
        """Give what has changed, waiting up to `timeout_s` for the first; () when nothing did. Raises Unavailable:
        call again later; afterwards come the differences to what was given before."""

    def close(self) -> None:
        """Stop watching; a waiting `next` on another thread returns ()."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_exception: object) -> None: ...


class Leases(Protocol):
    """Leases of one store. Safe to call from several threads."""

    def acquire(self, name: str, holder: str, ttl_s: float) -> Lease:
        """Take a name for `ttl_s` from the last sign of life on. Conflict names the holder when another has it.

        What this `holder` has, of a life before this one, is taken over at once. Back ends may round the time up, to
        whole seconds and at least two.
        """

    def holders(self, prefix: str = "") -> Mapping[str, str]:
        """Give the holders that live, of names that begin with `prefix`: name -> holder."""

    def watch(self, prefix: str = "") -> LeaseWatch:
        """Watch holders come and vanish, of names that begin with `prefix`."""


def list_living_nodes(leases: Leases | None) -> frozenset[str] | None:
    """Name the nodes whose agents are alive; None when nobody knows. Raises Unavailable."""
    if leases is None:
        return None
    return frozenset(name.removeprefix(NODE) for name in leases.holders(NODE))


def compare_holders(before: Mapping[str, str], now: Mapping[str, str]) -> Sequence[LeaseChange]:
    """Give what changed between two states of all holders."""
    names = sorted(before.keys() | now.keys())
    changed = (name for name in names if before.get(name) != now.get(name))
    return tuple(LeaseChange(holder, now.get(holder, "")) for holder in changed)
