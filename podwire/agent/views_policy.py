"""What the API shows of policy: policies, selectors, entries, traces. Values only; made by `agent.rest_policy`."""

import msgspec

from podwire.agent.views import Document


class PolicyView(Document, frozen=True, kw_only=True):
    """One policy as this node enforces it."""

    kind: str
    namespace: str
    name: str
    rules: int
    endpoints: int
    """Endpoints of this node that it selects."""
    ingress: bool
    """It closes this direction of what it selects."""
    egress: bool
    problem: str
    """Why its newest version is not in force; empty when it is."""


class SelectorView(Document, frozen=True, kw_only=True):
    """One selector, and whom it selects now."""

    selector: str
    users: int
    """Rules that use it."""
    identities: tuple[int, ...]


class EntryView(Document, frozen=True, kw_only=True):
    """One entry that the programs look up."""

    slot: int
    identity: int
    """Whose policy it is."""
    endpoints: tuple[int, ...]
    """Endpoints that share it."""
    direction: str
    peer: int
    """Identity of the other end; 0 = anybody."""
    labels: tuple[str, ...]
    """Labels, or the range of addresses, of the other end."""
    protocol: str
    ports: str
    verdict: str
    precedence: int
    policy: str
    rule: str
    hits: int
    """Flows that this rule decided, through any of its entries."""


class TraceRequest(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What would happen to a flow? Ends are pod:NS/NAME, labels:K=V,..., ip:ADDRESS or an entity."""

    source: str = msgspec.field(name="from")
    target: str = msgspec.field(name="to")
    port: str = ""


class TraceHalf(Document, frozen=True, kw_only=True):
    """What one end's policy says."""

    verdict: str
    """allowed or denied."""
    policy: str
    rule: str


class TraceView(Document, frozen=True, kw_only=True):
    """The verdict of both ends, and why."""

    verdict: str
    ingress: TraceHalf
    egress: TraceHalf
    why: tuple[str, ...]
    revision: int
    known_ends: int
    """How many of the two ends are pods of this node: others it knows by labels or address only."""


class EndpointPatch(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What can be changed of one endpoint."""

    policy_audit: bool | None
    """Policies only report what they would drop; null = as the node's setting says."""
