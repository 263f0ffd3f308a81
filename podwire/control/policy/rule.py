"""Rules: what a policy of any kind says, in the one form that the oracle and the resolver read.

`rules_k8s` and `rules_cilium` make them from documents. Frozen and hashable: a selector is its own name in the
selector cache. Nothing here knows which pods exist.
"""

from dataclasses import dataclass
from typing import Final

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


@dataclass(frozen=True, slots=True, order=True)
class Requirement:
    """One condition on labels. `source` "any" matches every source but `reserved`."""

    source: str
    key: str
    operator: Operator
    values: tuple[str, ...] = ()
    """Sorted, without duplicates."""


@dataclass(frozen=True, slots=True)
class LabelSelector:
    """Every identity whose labels fulfil all requirements (sorted); none = every identity of any kind, also of
    addresses that nobody knows."""

    requirements: tuple[Requirement, ...] = ()


@dataclass(frozen=True, slots=True)
class CidrSelector:
    """Addresses inside `cidr` and outside every `exceptions`.

    `everybody`: also pods and nodes (NetworkPolicy's ipBlock); else only what is outside the cluster.
    """

    cidr: IPNetwork
    exceptions: tuple[IPNetwork, ...] = ()
    everybody: bool = False


@dataclass(frozen=True, slots=True)
class CidrGroupSelector:
    """The addresses of CiliumCIDRGroup objects, by name or by their labels, less `exceptions`. What they hold changes
    without the rule: the resolver and the oracle are given the groups."""

    name: str = ""
    labels: LabelSelector | None = None
    exceptions: tuple[IPNetwork, ...] = ()


PeerSelector = LabelSelector | CidrSelector | CidrGroupSelector


@dataclass(frozen=True, slots=True)
class PortMatch:
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


@dataclass(frozen=True, slots=True)
class PolicyId:
    """Which object a rule is from. `kind` as in the object; `namespace` "" for cluster-wide kinds."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return spell_name(self.kind, self.namespace, self.name)


@dataclass(frozen=True, slots=True)
class Rule:
    """One entry of a policy's list: these peers, these ports, this verdict. Peers and ports are both alternatives
    ("or"); an empty `peers` matches nobody, an empty `ports` nothing."""

    direction: Direction
    verdict: Verdict
    peers: tuple[PeerSelector, ...]
    ports: tuple[PortMatch, ...]
    path: str
    """Where it is written, as people find it: `ingress[0]`, `spec.egressDeny[1]`, `specs[2].ingress[0]`."""
    precedence: int = TIER_DEFAULT


@dataclass(frozen=True, slots=True)
class PolicyRules:
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


@dataclass(frozen=True, slots=True)
class CidrGroup:
    """A CiliumCIDRGroup."""

    name: str
    labels: tuple[str, ...]
    """Canonical: `source:key=value`."""
    cidrs: tuple[IPNetwork, ...]


@dataclass(frozen=True, slots=True)
class LabelMention:
    """A label by which a policy selects endpoints, and where it says so. Whether any can have it the filter knows."""

    path: str
    source: str
    key: str


@dataclass(frozen=True, slots=True)
class GroupMention:
    """A CiliumCIDRGroup that a policy names, and where. Whether there is one the store knows."""

    path: str
    name: str


Mention = LabelMention | GroupMention
