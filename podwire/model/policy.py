"""Policy as the programs hold it: entries, local CIDR identities, and the numbers that every layer shares.

Made by `control.policy`, written by `datapath.policy_maps`. Values only.
"""

import enum
from typing import Final, NamedTuple

import msgspec

ANY_IDENTITY: Final = 0
"""In an entry: whoever the peer is."""
ANY_PROTOCOL: Final = 0
CIDR_IDENTITY_FIRST: Final = 1 << 24
"""Node-local identities of CIDRs begin here; they never leave the node."""
CIDR_WORLD_BIT: Final = 1 << 25
"""Set in the identity looked up for a CIDR when the peer is outside the cluster: rules that speak of the world only
(CiliumNetworkPolicy) have entries under it, beside those that speak of every address (NetworkPolicy's ipBlock)."""


class Direction(enum.IntEnum):
    """Seen from the pod; the numbers are those of the programs."""

    EGRESS = 0
    INGRESS = 1


class Verdict(enum.IntEnum):
    """What an entry says."""

    ALLOW = 1
    DENY = 2


# A tuple: a change of policy makes, hashes and packs hundreds of them, and a dataclass takes three times as long.
class PolicyKey(NamedTuple):
    """What an entry covers.

    `protocol` 0 = all protocols (then `port` and `port_bits` are 0). `port_bits` is the length of the port's prefix,
    0 (all ports) to 16 (one port). ICMP: `port` is type << 8 | code, `port_bits` 8 covers all codes of a type.
    """

    identity: int
    direction: Direction
    protocol: int = ANY_PROTOCOL
    port: int = 0
    port_bits: int = 0


class PolicyEntry(msgspec.Struct, frozen=True):
    """What is said about what a key covers. Of two that cover a packet the higher precedence wins, then deny."""

    verdict: Verdict
    precedence: int
    rule: int
    """Number of the rule that decided, for people and counters; 0 = none."""


PolicyRows = dict[PolicyKey, PolicyEntry]
"""All entries of one slot."""
