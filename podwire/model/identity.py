"""Identities as every layer uses them: reserved numbers, ranges, and what policy needs to know of one.

Made by `control.identity`, read by `control.policy` and the doors. Values only.
"""

import enum
from collections.abc import Mapping
from typing import Final

import msgspec

# Numbers from 256 to below CLUSTER_FIRST are for people who fix them by hand: nobody allocates them.
CLUSTER_FIRST: Final = 65536
CLUSTER_LAST: Final = (1 << 24) - 1
"""Allocated numbers, the same on every node; 24 bits, because they travel in a VNI."""


class Reserved(enum.IntEnum):
    """Identities that are not computed from labels; the same numbers as in Cilium."""

    HOST = 1
    WORLD = 2
    UNMANAGED = 3
    HEALTH = 4
    INIT = 5
    REMOTE_NODE = 6


RESERVED_LABELS: Final[Mapping[int, tuple[str, ...]]] = {
    Reserved.HOST: ("reserved:host=",),
    Reserved.WORLD: ("reserved:world=",),
    Reserved.UNMANAGED: ("reserved:unmanaged=",),
    Reserved.HEALTH: ("reserved:health=",),
    Reserved.INIT: ("reserved:init=",),
    Reserved.REMOTE_NODE: ("reserved:remote-node=",),
}
"""Canonical labels of the reserved identities."""


class NamedPort(msgspec.Struct, frozen=True, order=True):
    """A port that a pod gives a name."""

    name: str
    protocol: int
    port: int


class IdentityFacts(msgspec.Struct, frozen=True):
    """What policy needs to know of one identity: its canonical labels (`source:key=value`, sorted) and named ports."""

    number: int
    labels: tuple[str, ...]
    named_ports: tuple[NamedPort, ...] = ()
