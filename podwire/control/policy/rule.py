"""Rules: what a policy of any kind says, in the one form that the oracle and the resolver read.

`rules_k8s` and `rules_cilium` make them from documents. Frozen and hashable: a selector is its own name in the
selector cache. Nothing here knows which pods exist.
"""

from typing import Final

import msgspec

from podwire.model.endpoint import IPNetwork
from podwire.model.labels import Operator
from podwire.model.policy import Direction, Verdict
from podwire.model.store import spell_name

TIER_DEFAULT: Final = 0x4000_0000
"""Precedence of NetworkPolicy and CiliumNetworkPolicy: all of them alike, deny wins among equals. Tiers of other kinds
go above and below."""

ANY_SOURCE: Final = "any"

DEFAULT_DENY_PATH: Final = "default-deny"
"""What decided when a policy closes a direction and no rule allows the packet."""
UNENFORCEABLE_PATH: Final = "unenforceable"
"""The same of a policy that closes because it cannot be enforced whole."""

TCP: Final = 6
UDP: Final = 17
SCTP: Final = 132
ICMP: Final = 1
ICMPV6: Final = 58


class Requirement(msgspec.Struct, frozen=True, order=True):
    """One condition on labels. `source` "any" matches every source but `reserved`."""

    source: str
    key: str
    operator: Operator
    values: tuple[str, ...] = ()
    """Sorted, without duplicates."""


class LabelSelector(msgspec.Struct, frozen=True):
    """Every identity whose labels fulfil all requirements (sorted); none = every identity of any kind, also of
    addresses that nobody knows."""

    requirements: tuple[Requirement, ...] = ()


class CidrSelector(msgspec.Struct, frozen=True):
    """Addresses inside `cidr` and outside every `exceptions`.

    `everybody`: also pods and nodes (NetworkPolicy's ipBlock); else only what is outside the cluster.
    """

    cidr: IPNetwork
    exceptions: tuple[IPNetwork, ...] = ()
    everybody: bool = False


class CidrGroupSelector(msgspec.Struct, frozen=True):
    """The addresses of CiliumCIDRGroup objects, by name or by their labels, less `exceptions`. What they hold changes
    without the rule: the resolver and the oracle are given the groups."""

    name: str = ""
    labels: LabelSelector | None = None
    exceptions: tuple[IPNetwork, ...] = ()


PeerSelector = LabelSelector | CidrSelector | CidrGroupSelector


class PortMatch(msgspec.Struct, frozen=True):
    """What is asked for: a protocol, and of it all ports, a range, a name, or an ICMP type.

    `protocol` 0 = every protocol, ICMP included. `first` to `last`: inclusive; both 0 = all ports. `name`: a named
    port; ingress resolves it on the endpoint itself, egress on each peer. ICMP and ICMPv6: `first` == `last` == the
    type, and `icmp` is true (type 0 exists).
    """

    protocol: int = 0
    first: int = 0
    last: int = 0
    name: str = ""
    icmp: bool = False


ALL_PORTS: Final = (PortMatch(),)


class PolicyId(msgspec.Struct, frozen=True):
    """Which object a rule is from. `kind` as in the object; `namespace` "" for cluster-wide kinds."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return spell_name(self.kind, self.namespace, self.name)


class Rule(msgspec.Struct, frozen=True):
    """One entry of a policy's list: these peers, these ports, this verdict. Peers and ports are both alternatives
    ("or"); an empty `peers` matches nobody, an empty `ports` nothing."""

    direction: Direction
    verdict: Verdict
    peers: tuple[PeerSelector, ...]
    ports: tuple[PortMatch, ...]
    path: str
    """Where it is written, as people find it: `ingress[0]`, `spec.egressDeny[1]`, `specs[2].ingress[0]`."""
    precedence: int = TIER_DEFAULT


class PolicyRules(msgspec.Struct, frozen=True):
    """One rule set with one subject: a NetworkPolicy, or one spec of a CiliumNetworkPolicy.

    `default_deny`: directions in which a selected endpoint is closed but for what rules allow.
    """

    policy: PolicyId
    subject: LabelSelector
    default_deny: frozenset[Direction]
    rules: tuple[Rule, ...]
    closed_because: str = ""
    """Why these rules stand in the place of what the policy says; empty when they are what it says."""

    @property
    def default_path(self) -> str:
        """Name the default denial as rules are named."""
        return UNENFORCEABLE_PATH if self.closed_because else DEFAULT_DENY_PATH


class CidrGroup(msgspec.Struct, frozen=True):
    """A CiliumCIDRGroup."""

    name: str
    labels: tuple[str, ...]
    """Canonical: `source:key=value`."""
    cidrs: tuple[IPNetwork, ...]


class LabelMention(msgspec.Struct, frozen=True):
    """A label by which a policy selects endpoints, and where it says so. Whether any can have it the filter knows."""

    path: str
    source: str
    key: str


class GroupMention(msgspec.Struct, frozen=True):
    """A CiliumCIDRGroup that a policy names, and where. Whether there is one the store knows."""

    path: str
    name: str


Mention = LabelMention | GroupMention
