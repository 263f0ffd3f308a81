"""The API's operations on policy: lists, selectors, entries, and labels of endpoints.

These are rows of `agent.api.routes`'s table. The handlers decide nothing; they ask the engine.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from podwire.agent.api.context import Api, PolicyReaders
from podwire.agent.api.openapi import Call, Parameter, Route
from podwire.agent.api.shared import Document, EndpointView, LabelsView, PolicyTotals, endpoint_view
from podwire.agent.api.trace import PROTOCOLS, TraceRequest, TraceView, trace_flow
from podwire.control.endpoint.enforce import describe_failure
from podwire.control.endpoint.find import find_endpoint
from podwire.control.endpoint.states import State
from podwire.control.endpoint.table import Endpoint, EndpointTable
from podwire.control.policy.engine import PolicyEngine
from podwire.control.policy.reading import name_policy
from podwire.control.policy.rule import ICMP, ICMPV6, PolicyId
from podwire.model.config import AgentConfig
from podwire.model.errors import NotFound
from podwire.model.identity import RESERVED_LABELS
from podwire.model.policy import ANY_IDENTITY, CIDR_WORLD_BIT, Direction, PolicyKey, Verdict

_PROTOCOL_NAMES: Final = {number: name for name, number in PROTOCOLS.items()}
_VERDICTS: Final = {Verdict.ALLOW: "allow", Verdict.DENY: "deny"}


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
    state: str
    """`enforced`; `closed`: it cannot be enforced whole and closes in place of what it says; `kept`: its newest version
    is not in force, and an earlier one is."""
    problem: str
    """Why its newest version is not in force; empty when it is."""


class SelectorView(Document, frozen=True, kw_only=True):
    """One selector, and what it selects now."""

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


class EndpointPatch(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What can be changed of one endpoint."""

    policy_audit: bool | None
    """Policies only report what they would drop; null = as the node's setting says."""


def policy_totals(readers: PolicyReaders, config: AgentConfig) -> PolicyTotals:
    """Sum policy up for `status`."""
    return PolicyTotals(
        revision=readers.enforcer.revision,
        revisions=dict(readers.enforcer.revisions),
        enforcement=config.policy.policy_enforcement,
        policies=len(readers.objects.rules),
        identities=len(readers.resolver.allocator.known),
        not_in_force=(
            *(f"{key}: {why}" for key, why in sorted(readers.objects.problems.items())),
            *(
                f"identity {failure.identity}: {describe_failure(failure)}"
                for failure in readers.enforcer.failures
            ),
        ),
    )


def list_policies(api: Api, _call: Call) -> list[PolicyView]:
    """Show every policy and what it selects here."""
    readers = api.policy
    with api.turn:
        return _describe_policies(readers)


def _describe_policies(readers: PolicyReaders) -> list[PolicyView]:
    problems = {
        name_policy(key): why
        for key, why in readers.objects.problems.items()
        if key.kind != "ciliumcidrgroups"
    }
    for failure in readers.enforcer.failures:
        why = f"identity {failure.identity} keeps what it had: {failure.error.message}"
        problems |= {policy: why for policy in failure.policies if policy not in problems}
    selected = _count_selected(readers)
    closed_policies = {name_policy(key) for key in readers.objects.closed}
    rules = dict(readers.objects.rules)
    views = []
    for policy in sorted({*rules, *problems}, key=str):
        parts = rules.get(policy, ())
        closed = {direction for part in parts for direction in part.default_deny}
        views.append(
            PolicyView(
                kind=policy.kind,
                namespace=policy.namespace,
                name=policy.name,
                rules=sum(len(part.rules) for part in parts),
                endpoints=selected.get(policy, 0),
                ingress=Direction.INGRESS in closed,
                egress=Direction.EGRESS in closed,
                state=_describe_state(policy in closed_policies, policy in problems),
                problem=problems.get(policy, ""),
            )
        )
    return views


def _describe_state(is_closed: bool, has_problem: bool) -> str:
    if is_closed:
        return "closed"
    return "kept" if has_problem else "enforced"


def _count_selected(readers: PolicyReaders) -> dict[PolicyId, int]:
    counts: dict[PolicyId, int] = {}
    for identity, holders in _holders(readers.table).items():
        for policy in _policies_of(readers.engine, identity):
            counts[policy] = counts.get(policy, 0) + len(holders)
    return counts


def _policies_of(engine: PolicyEngine, identity: int) -> Iterable[PolicyId]:
    try:
        return set(engine.policies_of(identity))
    except NotFound:
        return ()


def _holders(table: EndpointTable) -> dict[int, list[int]]:
    holders: dict[int, list[int]] = {}
    for endpoint in table:
        if endpoint.state is not State.DISCONNECTING:
            holders.setdefault(_judged_as(endpoint), []).append(endpoint.record.id)
    return holders


def _judged_as(endpoint: Endpoint) -> int:
    """The identity whose entries the endpoint's row names; that of its labels may still be on its way there."""
    return endpoint.config.identity or endpoint.record.identity


def list_selectors(api: Api, _call: Call) -> list[SelectorView]:
    """Show the selectors in use and what they select."""
    with api.turn:
        selectors = api.policy.engine.list_selectors()
    return [
        SelectorView(
            selector=description["selector"],
            users=description["users"],
            identities=tuple(description["identities"]),
        )
        for description in selectors
    ]


def list_entries(api: Api, call: Call) -> list[EntryView]:
    """Show what the programs look up, with the rule of each entry."""
    readers = api.policy
    holders = _holders(readers.table)
    wanted = str(call.query.get("endpoint", ""))
    if wanted:
        endpoint = find_endpoint(readers.table, wanted)
        holders = {_judged_as(endpoint): [endpoint.record.id]}
    # Before the turn is taken: the walk of the map may be long.
    hits = readers.hits()
    with api.turn:
        names = _Names(readers)
        return [
            view
            for identity, ids in sorted(holders.items())
            for view in _entries(readers, names, identity, ids, hits)
        ]


class _Names:
    """Labels of identities, those of CIDRs included, as they are now."""

    def __init__(self, readers: PolicyReaders) -> None:
        self._known = readers.resolver.allocator.known
        self._cidrs = {number: str(cidr) for cidr, number in readers.engine.list_cidrs().items()}

    def labels(self, identity: int) -> tuple[str, ...]:
        """Give the labels of one; () for "anybody" and for what nobody knows."""
        if identity == ANY_IDENTITY:
            return ()
        if identity in RESERVED_LABELS:
            return RESERVED_LABELS[identity]
        # Entries of an `ipBlock` stand twice, once with the bit for addresses of the world (decisions/0006).
        cidr = self._cidrs.get(identity & ~CIDR_WORLD_BIT)
        if cidr is not None:
            return (f"cidr:{cidr}", *(("reserved:world=",) if identity & CIDR_WORLD_BIT else ()))
        known = self._known.get(identity)
        return known.key.labels if known is not None else ()


def _entries(
    readers: PolicyReaders,
    names: _Names,
    identity: int,
    ids: list[int],
    hits: Mapping[int, tuple[int, int]],
) -> Iterator[EntryView]:
    engine = readers.engine
    try:
        slot, rows = engine.config_for(identity).slot, dict(engine.rows_for(identity))
    except NotFound:
        return
    for key, entry in sorted(rows.items(), key=lambda item: _order(item[0])):
        name = engine.rule_name(entry.rule)
        yield EntryView(
            slot=slot,
            identity=identity,
            endpoints=tuple(ids),
            direction=key.direction.name.lower(),
            peer=key.identity,
            labels=names.labels(key.identity),
            protocol=_PROTOCOL_NAMES.get(key.protocol, str(key.protocol))
            if key.protocol
            else "any",
            ports=describe_ports(key),
            verdict=_VERDICTS[entry.verdict],
            precedence=entry.precedence,
            policy=str(name.policy) if name else "",
            rule=name.path if name else "",
            hits=hits.get(entry.rule, (0, 0))[0],
        )


def _order(key: PolicyKey) -> tuple[int, ...]:
    return (key.direction, key.identity, key.protocol, key.port, key.port_bits)


def describe_ports(key: PolicyKey) -> str:
    """Write the ports of an entry: `any`, `80`, `8080-8087`; ICMP: the type."""
    if not key.port_bits:
        return "any"
    if key.protocol in (ICMP, ICMPV6):
        # ICMP entries have type and code in the place of the port, the type in the upper byte.
        return f"type {key.port >> 8}"
    # An entry covers the ports with its prefix: a range of a rule becomes several entries.
    last = key.port | ((1 << (16 - key.port_bits)) - 1)
    return str(key.port) if last == key.port else f"{key.port}-{last}"


def patch_labels(api: Api, call: Call) -> LabelsView:
    """Change labels of an endpoint: `key=value` sets, `key-` takes away."""
    endpoint = find_endpoint(api.policy.table, call.params["id"])
    record = api.policy.change_labels(endpoint.record.id, list(call.body))
    return LabelsView(labels=record.labels)


def patch_endpoint(api: Api, call: Call) -> EndpointView:
    """Change what can be changed of one endpoint: whether its policies only report."""
    asked: EndpointPatch = call.body
    endpoint = find_endpoint(api.policy.table, call.params["id"])
    api.policy.set_audit(endpoint.record.id, asked.policy_audit)
    return endpoint_view(endpoint)


ROUTES_POLICY: Final = (
    Route(
        "PATCH",
        "/endpoint/{id}",
        "Let policies of an endpoint only report",
        patch_endpoint,
        EndpointView,
        body=EndpointPatch,
        errors=(404, 409, 507),
        blocking=True,
    ),
    Route("GET", "/policy", "Policies in force", list_policies, list[PolicyView], blocking=True),
    Route(
        "GET",
        "/policy/selectors",
        "Selectors in use",
        list_selectors,
        list[SelectorView],
        blocking=True,
    ),
    Route(
        "GET",
        "/policy/entries",
        "What the programs look up",
        list_entries,
        list[EntryView],
        query=(Parameter("endpoint", "Only those of one endpoint."),),
        errors=(404, 409),
        blocking=True,
    ),
    Route(
        "POST",
        "/policy/trace",
        "What would happen to a flow?",
        trace_flow,
        TraceView,
        body=TraceRequest,
        errors=(404, 409),
        blocking=True,
    ),
    Route(
        "PATCH",
        "/endpoint/{id}/labels",
        "Change labels of an endpoint",
        patch_labels,
        LabelsView,
        body=list[str],
        errors=(404, 409),
        blocking=True,
    ),
)
