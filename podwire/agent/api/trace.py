"""`POST /policy/trace`: which two parties a flow has, and what the oracle says of it.

A row of `agent.api.policies`'s table. The parties are resolved here, because only this node knows its pods.
"""

import ipaddress
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from podwire.agent.api.context import Api, PolicyReaders
from podwire.agent.api.openapi import Call
from podwire.agent.api.shared import Document
from podwire.control.endpoint.find import find_endpoint
from podwire.control.endpoint.table import Endpoint, EndpointTable
from podwire.control.policy.oracle import Enforcement, Party, Question, Settings
from podwire.control.policy.rule import ICMP, ICMPV6, SCTP, TCP, UDP
from podwire.control.policy.trace import trace
from podwire.control.services.catalogue import ServiceView
from podwire.control.services.facts import ServiceName
from podwire.model.errors import Fault, InvalidRequest, NotFound
from podwire.model.identity import RESERVED_LABELS, IdentityFacts, Reserved
from podwire.model.interfaces import BackEnd, Frontend
from podwire.model.labels import SOURCE_CNI, SOURCES
from podwire.model.policy import Direction

SERVICE: Final = "service:"
ALLOWED: Final = "allowed"
DENIED: Final = "denied"
PARTLY: Final = "partly"
PROTOCOLS: Final = {"tcp": TCP, "udp": UDP, "sctp": SCTP, "icmp": ICMP, "icmpv6": ICMPV6}
_FAMILY_OF_ICMP: Final = {"icmp": 4, "icmpv6": 6}
_ECHO_REQUEST: Final = {"icmp": 8, "icmpv6": 128}


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


class TraceBackEnd(Document, frozen=True, kw_only=True):
    """What would happen to a flow that one back end of a service answers."""

    address: str
    port: int
    pod: str
    """NS/NAME of a pod of this node, else empty."""
    verdict: str
    ingress: TraceHalf
    egress: TraceHalf
    why: tuple[str, ...]


class TraceView(Document, frozen=True, kw_only=True):
    """The verdict of both ends, and why."""

    verdict: str
    """allowed, denied, or of a service also partly: some of its back ends are denied, and flows to them fail."""
    ingress: TraceHalf
    egress: TraceHalf
    why: tuple[str, ...]
    revision: int
    known_ends: int
    """How many of the two ends are pods of this node: others it knows by labels or address only."""
    service: str = ""
    """NS/NAME of the service that was asked about; `ingress` and `egress` are those of the back end that decides."""
    back_ends: tuple[TraceBackEnd, ...] = ()
    """Of the service: each with its own verdict."""


def trace_flow(api: Api, call: Call) -> TraceView:
    """Say what would happen to a flow, by the oracle."""
    asked: TraceRequest = call.body
    if asked.target.startswith(SERVICE):
        return _trace_service(api, asked)
    return _trace(api, asked)


def _trace_service(api: Api, asked: TraceRequest) -> TraceView:
    """Say what would happen to a flow by each back end that may answer it."""
    name = _read_service_name(asked.target)
    find = api.policy.find_service
    known = find(name) if find is not None else None
    if known is None:
        raise NotFound(
            f"find service {name}: this node knows none",
            hint="podwire service list; podwire config (translate_services)",
        )
    faults: list[Fault] = []
    protocol, port = _read_port(asked.port, faults)
    frontends = [
        frontend
        for frontend in known.claims
        if (frontend.port, frontend.protocol) == (port, protocol)
    ]
    family = _choose_service_family(asked, api.policy.table, frontends, faults)
    if faults:
        raise _invalid(faults)
    frontend = next(
        (frontend for frontend in frontends if frontend.address.version == family), None
    )
    back_ends = known.claims[frontend] if frontend is not None else ()
    is_left = not known.is_translated or any(back_end.is_stack for back_end in back_ends)
    if frontend is None and any(
        back_end.is_stack for claimed in known.claims.values() for back_end in claimed
    ):
        # Only some ports are left: the address is the programs', and they refuse its other ports.
        is_left = False
    if frontend is not None and not is_left:
        return _trace_back_ends(api, asked, known, back_ends)
    if not is_left:
        return _refuse(api, known, f"it has no port {asked.port}: refused at once")
    address = next(iter(frontends or known.claims)).address
    answer = _trace(api, msgspec.structs.replace(asked, target=f"ip:{address}"))
    left = (
        f"{name} is left to the stack, which translates behind the egress verdict: {known.problem}"
    )
    return msgspec.structs.replace(answer, service=str(name), why=(left, *answer.why))


def _trace_back_ends(
    api: Api, asked: TraceRequest, known: ServiceView, back_ends: Sequence[BackEnd]
) -> TraceView:
    if not back_ends:
        return _refuse(api, known, "it has no back end that answers: refused at once")
    suffix = asked.port.partition("/")[2] or "tcp"
    answers = [
        _trace(
            api,
            TraceRequest(
                source=asked.source,
                target=f"ip:{back_end.address}",
                port=f"{back_end.port}/{suffix}",
            ),
        )
        for back_end in back_ends
    ]
    denied = [answer for answer in answers if answer.verdict != ALLOWED]
    decides = (denied or answers)[0]
    verdict = decides.verdict if len(denied) in (0, len(answers)) else PARTLY
    return msgspec.structs.replace(
        decides,
        verdict=verdict,
        known_ends=max(answer.known_ends for answer in answers),
        service=str(known.name),
        back_ends=tuple(
            _view_back_end(api.policy.table, back_end, answer)
            for back_end, answer in zip(back_ends, answers, strict=True)
        ),
    )


def _view_back_end(table: EndpointTable, back_end: BackEnd, answer: TraceView) -> TraceBackEnd:
    endpoint = table.get_by_address(str(back_end.address))
    return TraceBackEnd(
        address=str(back_end.address),
        port=back_end.port,
        pod=f"{endpoint.record.namespace}/{endpoint.record.pod}" if endpoint is not None else "",
        verdict=answer.verdict,
        ingress=answer.ingress,
        egress=answer.egress,
        why=answer.why,
    )


def _refuse(api: Api, known: ServiceView, why: str) -> TraceView:
    nobody = TraceHalf(verdict=DENIED, policy="", rule="")
    return TraceView(
        verdict=DENIED,
        ingress=nobody,
        egress=nobody,
        why=(f"service {known.name}: {why}",),
        revision=api.policy.enforcer.revision,
        known_ends=0,
        service=str(known.name),
    )


def _read_service_name(text: str) -> ServiceName:
    namespace, slash, name = text.removeprefix(SERVICE).rpartition("/")
    if not name or (slash and not namespace):
        raise _invalid([Fault("to", f"is {text!r}: write service:NS/NAME")])
    return ServiceName(namespace or "default", name)


def _choose_service_family(
    asked: TraceRequest, table: EndpointTable, frontends: Sequence[Frontend], faults: list[Fault]
) -> int:
    """Say which of its addresses is asked: IPv4 where both ends have it."""
    versions = {frontend.address.version for frontend in frontends}
    if asked.source.startswith(("pod:", "ip:")):
        alone = msgspec.structs.replace(asked, target="world")
        family = _choose_family(alone, table, faults)
        return family if family in versions or not versions else min(versions)
    return min(versions, default=4)


def _trace(api: Api, asked: TraceRequest) -> TraceView:
    readers, config = api.policy, api.config.current
    faults: list[Fault] = []
    family = _choose_family(asked, readers.table, faults)
    source = _read_end(readers, asked.source, family, "from", faults)
    target = _read_end(readers, asked.target, family, "to", faults)
    protocol, port = _read_port(asked.port, faults)
    if faults or source is None or target is None:
        raise _invalid(faults)
    settings = Settings(
        enforcement=Enforcement(config.policy.policy_enforcement),
        host_allowed=config.datapath.host_access,
        audit=config.policy.policy_audit,
    )
    # The turn is held for the copies only: the oracle is pure, and slow with many policies.
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
        ingress=msgspec.convert(answer["ingress"], TraceHalf),
        egress=msgspec.convert(answer["egress"], TraceHalf),
        why=(*_name_not_in_force(readers.table, asked), *answer["why"]),
        revision=answer["revision"],
        known_ends=sum(party.endpoint and party.address is not None for party in (source, target)),
    )


def _invalid(faults: Sequence[Fault]) -> InvalidRequest:
    return InvalidRequest(
        "trace: " + "; ".join(f"{fault.path} {fault.message}" for fault in faults),
        hint="podwire policy trace -h",
        faults=tuple(faults),
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


def _read_end(
    readers: PolicyReaders, text: str, family: int, path: str, faults: list[Fault]
) -> Party | None:
    kind, colon, rest = text.partition(":")
    if not colon:
        named = {
            str(reserved.name).lower().replace("_", "-"): int(reserved) for reserved in Reserved
        }
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
    address = next((address for address in addresses if address.version == family), None)
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
        faults.append(Fault(path, f"has {text!r}, which is not an address"))
        return None
    endpoint = readers.table.get_by_address(text)
    if endpoint is not None:
        return _pod_party(endpoint, family, path, faults)
    # By the ipcache's longest prefix, as the programs do it.
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
