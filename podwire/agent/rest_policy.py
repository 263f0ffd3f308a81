"""What the API answers about policy: lists, selectors, entries, traces, and labels of endpoints.

Rows of `agent.rest`'s table. Nothing is decided here: the engine and the oracle are asked. Ends of a trace are read
here, because only this node knows who its pods are.
"""

import ipaddress
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from podwire.agent.openapi import Call, Parameter, Route
from podwire.agent.views import EndpointView, LabelsView, PolicyTotals, endpoint_view
from podwire.agent.views_policy import (
    EndpointPatch,
    EntryView,
    PolicyView,
    SelectorView,
    TraceHalf,
    TraceRequest,
    TraceView,
)
from podwire.control.endpoint.enforce import Enforcer, describe_failure
from podwire.control.endpoint.find import find_endpoint
from podwire.control.endpoint.policies import PolicyObjects, name_policy
from podwire.control.endpoint.states import State
from podwire.control.endpoint.table import Endpoint, EndpointTable
from podwire.control.identity.resolver import IdentityResolver
from podwire.control.policy.engine import PolicyEngine
from podwire.control.policy.oracle import Enforcement, Party, Question, Settings
from podwire.control.policy.rule import ICMP, ICMPV6, SCTP, TCP, UDP, PolicyId
from podwire.control.policy.trace import trace
from podwire.model.config import AgentConfig
from podwire.model.endpoint import EndpointRecord, IPAddress
from podwire.model.errors import Fault, InvalidRequest, NotFound
from podwire.model.identity import RESERVED_LABELS, IdentityFacts, Reserved
from podwire.model.ids import EndpointId
from podwire.model.labels import SOURCE_CNI, SOURCES
from podwire.model.policy import ANY_IDENTITY, CIDR_WORLD_BIT, Direction, PolicyKey, Verdict

PROTOCOLS: Final = {"tcp": TCP, "udp": UDP, "sctp": SCTP, "icmp": ICMP, "icmpv6": ICMPV6}
_PROTOCOL_NAMES: Final = {number: name for name, number in PROTOCOLS.items()}
_FAMILY_OF_ICMP: Final = {"icmp": 4, "icmpv6": 6}
_ECHO_REQUEST: Final = {"icmp": 8, "icmpv6": 128}
_VERDICTS: Final = {Verdict.ALLOW: "allow", Verdict.DENY: "deny"}


@dataclass(frozen=True)
class PolicyReaders:
    """What the handlers look at."""

    enforcer: Enforcer
    objects: PolicyObjects
    resolver: IdentityResolver
    table: EndpointTable
    identity_at: Callable[[IPAddress], int | None]
    """Who the programs take an address for that no pod of this node has; None or 0 = in no prefix that they know."""
    hits: Callable[[], Mapping[int, tuple[int, int]]]
    """Rule -> packets and bytes of what it decided."""
    change_labels: Callable[[EndpointId, list[str]], EndpointRecord]
    """Change labels and have the endpoint built; waits for the store."""
    set_audit: Callable[[EndpointId, bool | None], EndpointRecord]
    """Let policies of one endpoint only report (True), or be enforced (False), or as the node says (None)."""

    @property
    def engine(self) -> PolicyEngine:
        """The engine."""
        return self.enforcer.engine


class Live(Protocol):
    """Settings in force."""

    @property
    def current(self) -> AgentConfig: ...


class Api(Protocol):
    """What `agent.rest.Api` has for these handlers."""

    @property
    def policy(self) -> PolicyReaders: ...

    @property
    def config(self) -> Live: ...

    @property
    def turn(self) -> threading.RLock: ...


def policy_totals(readers: PolicyReaders, config: AgentConfig) -> PolicyTotals:
    """Sum policy up for `status`."""
    return PolicyTotals(
        revision=readers.enforcer.revision,
        enforcement=config.policy.policy_enforcement,
        policies=len(readers.objects.rules),
        identities=len(readers.resolver.allocator.known),
        not_in_force=(
            *(f"{key}: {why}" for key, why in sorted(readers.objects.problems.items())),
            *(
                f"identity {one.identity}: {describe_failure(one)}"
                for one in readers.enforcer.failures
            ),
        ),
    )


def list_policies(api: Api, _call: Call) -> list[PolicyView]:
    """Show every policy and whom it selects here."""
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
        problems |= {one: why for one in failure.policies if one not in problems}
    selected = _count_selected(readers)
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
                problem=problems.get(policy, ""),
            )
        )
    return views


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
    """Show the selectors in use and whom they select."""
    with api.turn:
        found = api.policy.engine.list_selectors()
    return [
        SelectorView(
            selector=one["selector"], users=one["users"], identities=tuple(one["identities"])
        )
        for one in found
    ]


def list_entries(api: Api, call: Call) -> list[EntryView]:
    """Show what the programs look up, with the rule of each entry."""
    readers = api.policy
    holders = _holders(readers.table)
    wanted = str(call.query.get("endpoint", ""))
    if wanted:
        endpoint = find_endpoint(readers.table, wanted)
        holders = {_judged_as(endpoint): [endpoint.record.id]}
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
        return f"type {key.port >> 8}"
    last = key.port | ((1 << (16 - key.port_bits)) - 1)
    return str(key.port) if last == key.port else f"{key.port}-{last}"


def trace_flow(api: Api, call: Call) -> TraceView:
    """Say what would happen to a flow, by the oracle."""
    asked: TraceRequest = call.body
    readers, config = api.policy, api.config.current
    faults: list[Fault] = []
    family = _choose_family(asked, readers.table, faults)
    source = _read_end(readers, asked.source, family, "from", faults)
    target = _read_end(readers, asked.target, family, "to", faults)
    protocol, port = _read_port(asked.port, faults)
    if faults or source is None or target is None:
        raise InvalidRequest(
            "trace: " + "; ".join(f"{fault.path} {fault.message}" for fault in faults),
            hint="podwire policy trace -h",
            faults=tuple(faults),
        )
    settings = Settings(
        enforcement=Enforcement(config.policy.policy_enforcement),
        host_allowed=config.datapath.host_access,
        audit=config.policy.policy_audit,
    )
    with api.turn:
        policies, groups = readers.engine.list_policies(), readers.engine.list_groups()
    answer = trace(
        policies,
        groups,
        Question(source, target, Direction.EGRESS, protocol, port),
        revision=readers.enforcer.revision,
        settings=settings,
    )
    return TraceView(
        verdict=answer["verdict"],
        ingress=_half(answer["ingress"]),
        egress=_half(answer["egress"]),
        why=(*_name_not_in_force(readers.table, asked), *answer["why"]),
        revision=answer["revision"],
        known_ends=sum(one.endpoint and one.address is not None for one in (source, target)),
    )


def _name_not_in_force(table: EndpointTable, asked: TraceRequest) -> Iterator[str]:
    """Say of which pods the programs know an earlier policy: there, the answer is what would be, not what is."""
    for text in (asked.source, asked.target):
        kind, _, rest = text.partition(":")
        endpoint = None
        if kind == "pod":
            endpoint = find_endpoint(table, f"pod-name:{rest}")
        elif kind == "ip":
            endpoint = table.get_by_address(rest)
        if endpoint is not None and endpoint.policy_error:
            yield f"not in force for {text}, which keeps its earlier policy: {endpoint.policy_error}"


def _half(answer: Mapping[str, str]) -> TraceHalf:
    return TraceHalf(verdict=answer["verdict"], policy=answer["policy"], rule=answer["rule"])


def _read_end(
    readers: PolicyReaders, text: str, family: int, path: str, faults: list[Fault]
) -> Party | None:
    kind, colon, rest = text.partition(":")
    if not colon:
        named = {str(one.name).lower().replace("_", "-"): int(one) for one in Reserved}
        if text in named:
            return Party(IdentityFacts(named[text], RESERVED_LABELS[named[text]]))
        faults.append(Fault(path, f"is {text!r}: no entity ({', '.join(named)})"))
    elif kind == "pod":
        return _pod_party(find_endpoint(readers.table, f"pod-name:{rest}"), family, path, faults)
    elif kind == "labels":
        return _labels_party(readers, rest, path, faults)
    elif kind == "ip":
        return _address_party(readers, rest, family, path, faults)
    else:
        faults.append(
            Fault(path, f"is {text!r}: write pod:NS/NAME, labels:K=V,..., ip:ADDRESS or an entity")
        )
    return None


def _pod_party(endpoint: Endpoint, family: int, path: str, faults: list[Fault]) -> Party:
    record = endpoint.record
    facts = IdentityFacts(record.identity, record.identity_labels, record.named_ports)
    addresses = map(ipaddress.ip_address, record.addresses)
    address = next((one for one in addresses if one.version == family), None)
    if address is None:
        name = f"{record.namespace}/{record.pod}"
        faults.append(Fault(path, f"is pod {name}, which has no IPv{family} address"))
    return Party(facts, address, endpoint=True)


def _choose_family(asked: TraceRequest, table: EndpointTable, faults: list[Fault]) -> int:
    """Say which family the flow is of: the one that is asked for, else IPv4 where all pods have it."""
    ends = (asked.source, asked.target)
    named = {6 if ":" in text[3:] else 4 for text in ends if text.startswith("ip:")}
    protocol = asked.port.lower().partition("/")[0]
    if protocol in _FAMILY_OF_ICMP:
        named.add(_FAMILY_OF_ICMP[protocol])
    if len(named) > 1:
        about = f"{asked.source}, {asked.target} and {asked.port} are not of one family"
        faults.append(Fault("from", about))
    if named:
        return min(named)
    pods = [text.removeprefix("pod:") for text in ends if text.startswith("pod:")]
    records = [find_endpoint(table, f"pod-name:{name}").record for name in pods]
    return 4 if all(record.ipv4 for record in records) else 6


def _labels_party(
    readers: PolicyReaders, text: str, path: str, faults: list[Fault]
) -> Party | None:
    own, namespace = [], "default"
    for pair in filter(None, text.split(",")):
        key, equals, value = pair.partition("=")
        if not key or not equals:
            faults.append(Fault(path, f"has {pair!r}: write KEY=VALUE"))
            return None
        if key.removeprefix("k8s:") == "io.kubernetes.pod.namespace":
            namespace = value
            continue
        source = key.partition(":")[0]
        own.append(f"{key}={value}" if source in SOURCES else f"{SOURCE_CNI}:{key}={value}")
    labels = readers.resolver.sources.effective(own, namespace)
    return Party(IdentityFacts(0, labels), None, endpoint=True)


def _address_party(
    readers: PolicyReaders, text: str, family: int, path: str, faults: list[Fault]
) -> Party | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        faults.append(Fault(path, f"has {text!r}, which is no address"))
        return None
    endpoint = readers.table.get_by_address(text)
    if endpoint is not None:
        return _pod_party(endpoint, family, path, faults)
    number = readers.identity_at(address) or int(Reserved.WORLD)
    if number in RESERVED_LABELS:
        return Party(IdentityFacts(number, RESERVED_LABELS[number]), address)
    known = readers.resolver.allocator.known.get(number)
    if known is None:
        faults.append(
            Fault(
                path,
                f"has {text}, a pod of another node; its identity {number} is not known here yet",
            )
        )
        return None
    # All nodes hold the same policies, so the answer is that of its own node too.
    return Party(known.key.facts(known.number), address, endpoint=True)


def _read_port(text: str, faults: list[Fault]) -> tuple[int, int]:
    """Read `80/tcp`, `icmp` or `icmp/8`; gives protocol and port (of ICMP: type << 8)."""
    first, _, second = text.lower().partition("/")
    try:
        if first in _ECHO_REQUEST:
            kind = int(second) if second else _ECHO_REQUEST[first]
            if 0 <= kind <= 255:
                return PROTOCOLS[first], kind << 8
        elif 0 < int(first) < 65536 and (second or "tcp") in ("tcp", "udp", "sctp"):
            return PROTOCOLS[second or "tcp"], int(first)
    except ValueError:
        pass
    faults.append(Fault("port", f"is {text!r}: write 80/tcp, 53/udp, 38412/sctp, icmp or icmp/8"))
    return 0, 0


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
