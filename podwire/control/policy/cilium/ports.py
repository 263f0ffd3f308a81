"""Read `toPorts` and `icmps` of a CiliumNetworkPolicy's rule.

Called by `rules_cilium`. Pure. Invariant: a rule without either means every protocol. A list that is present and names
nothing is a fault, because some people would read it as everything and others as nothing.
"""

import re
from collections.abc import Mapping
from typing import Final

from podwire.control.policy.rule import (
    ALL_PORTS,
    ICMP,
    ICMPV6,
    SCTP,
    TCP,
    UDP,
    PortMatch,
)
from podwire.model.documents.fields import PORT_MAX, is_port_name
from podwire.model.documents.reader import Node, shown

PORTS_MAX: Final = 40
"""Of one element of toPorts, and fields of one element of icmps; as in Cilium."""

_PROTOCOLS: Final[Mapping[str, tuple[int, ...]]] = {
    "ANY": (TCP, UDP, SCTP),
    "TCP": (TCP,),
    "UDP": (UDP,),
    "SCTP": (SCTP,),
}
_FAMILIES: Final = {"IPv4": ICMP, "IPv6": ICMPV6}
_NUMBER = re.compile(r"0|[1-9][0-9]{0,5}")

_REFUSED_IN_PORTS: Final = {
    "rules": "nothing above layer 4 is enforced",
    "listener": "there is no proxy",
    "terminatingTLS": "there is no proxy",
    "originatingTLS": "there is no proxy",
    "serverNames": "nothing above layer 4 is enforced",
}

_ICMP_TYPES: Final[Mapping[int, Mapping[str, int]]] = {
    ICMP: {
        "EchoReply": 0,
        "DestinationUnreachable": 3,
        "Redirect": 5,
        "Echo": 8,
        "EchoRequest": 8,
        "RouterAdvertisement": 9,
        "RouterSelection": 10,
        "TimeExceeded": 11,
        "ParameterProblem": 12,
        "Timestamp": 13,
        "TimestampReply": 14,
        "Photuris": 40,
        "ExtendedEchoRequest": 42,
        "ExtendedEchoReply": 43,
    },
    ICMPV6: {
        "DestinationUnreachable": 1,
        "PacketTooBig": 2,
        "TimeExceeded": 3,
        "ParameterProblem": 4,
        "EchoRequest": 128,
        "EchoReply": 129,
        "MulticastListenerQuery": 130,
        "MulticastListenerReport": 131,
        "MulticastListenerDone": 132,
        "RouterSolicitation": 133,
        "RouterAdvertisement": 134,
        "NeighborSolicitation": 135,
        "NeighborAdvertisement": 136,
        "RedirectMessage": 137,
        "RouterRenumbering": 138,
        "ICMPNodeInformationQuery": 139,
        "ICMPNodeInformationResponse": 140,
        "InverseNeighborDiscoverySolicitation": 141,
        "InverseNeighborDiscoveryAdvertisement": 142,
        "HomeAgentAddressDiscoveryRequest": 144,
        "HomeAgentAddressDiscoveryReply": 145,
        "MobilePrefixSolicitation": 146,
        "MobilePrefixAdvertisement": 147,
        "DuplicateAddressRequestCodeSuffix": 157,
        "DuplicateAddressConfirmationCodeSuffix": 158,
        "ExtendedEchoRequest": 160,
        "ExtendedEchoReply": 161,
    },
}
"""Names that Cilium knows. Source: IANA, ICMP and ICMPv6 type numbers."""


def read_ports(rule: Node, *, peers_named: bool) -> tuple[PortMatch, ...] | None:
    """Read what a rule says about ports. None: it names none, and no peers either, so that it says nothing at all."""
    ports, icmps = rule.child("toPorts").items(), rule.child("icmps").items()
    if ports and icmps:
        rule.child("icmps").wrong("stands beside toPorts; give each a rule of its own")
    matches = [match for item in ports for match in _read_port_rule(item)]
    matches += [match for item in icmps for match in _read_icmp_rule(item)]
    if ports or icmps:
        return tuple(dict.fromkeys(matches))
    return ALL_PORTS if peers_named else None


def _read_port_rule(item: Node) -> list[PortMatch]:
    if not item.expect_object(("ports",), _REFUSED_IN_PORTS):
        return []
    return [match for port in _read_members(item.child("ports")) for match in _read_port(port)]


def _read_members(node: Node) -> list[Node]:
    members = node.items()
    if not members and not isinstance(node.value, str | int | Mapping):
        node.wrong("names nothing (leave the whole field out to mean everything)")
    if len(members) > PORTS_MAX:
        node.wrong(f"has {len(members)} elements; at most {PORTS_MAX} are allowed")
        return []
    return members


def _read_port(node: Node) -> list[PortMatch]:
    if not node.expect_object(("port", "endPort", "protocol")):
        return []
    port, end = node.child("port"), node.child("endPort")
    protocol_node = node.child("protocol")
    absent = not protocol_node.present or protocol_node.value == ""
    protocols = _PROTOCOLS.get("ANY" if absent else protocol_node.choice(tuple(_PROTOCOLS)), ())
    if not port.present:
        port.wrong('is missing ("0" means every port)')
        return []
    text = port.text()
    # Cilium's schema has `port` as a string; a number without quotes was reported by `text`.
    if not isinstance(port.value, str):
        return []
    last = end.integer(0, PORT_MAX) or 0
    if _NUMBER.fullmatch(text):
        return _read_range(port, end, int(text), last, protocols)
    if not is_port_name(text.lower()):
        port.wrong(f"is {shown(text)}, neither a port number nor a port name")
    elif last:
        end.wrong("stands beside the name of a port; a range begins with a number")
    # Cilium compares names of ports without case, and names of containers' ports are lower case (IANA_SVC_NAME).
    return [PortMatch(protocol, name=text.lower()) for protocol in protocols]


def _read_range(
    port: Node, end: Node, first: int, last: int, protocols: tuple[int, ...]
) -> list[PortMatch]:
    if first > PORT_MAX:
        port.wrong(f"is {first}, not from 0 to {PORT_MAX}")
    elif last and not first:
        end.wrong('stands beside port "0", which means every port')
    elif last and last < first:
        end.wrong(f"is {last}, below the port {first}")
    return [PortMatch(protocol, first, last or first) for protocol in protocols]


def _read_icmp_rule(item: Node) -> list[PortMatch]:
    if not item.expect_object(("fields",)):
        return []
    fields = [_read_icmp_field(node) for node in _read_members(item.child("fields"))]
    return [match for match in fields if match is not None]


def _read_icmp_field(node: Node) -> PortMatch | None:
    if not node.expect_object(("family", "type")):
        return None
    family = node.child("family")
    chosen = "IPv4" if not family.present or family.value == "" else family.choice(_FAMILIES)
    if not chosen:
        return None
    protocol, kind = _FAMILIES[chosen], node.child("type")
    if not kind.present:
        kind.wrong("is missing")
        return None
    number = _read_icmp_type(kind, chosen, protocol)
    return None if number is None else PortMatch(protocol, number, number, icmp=True)


def _read_icmp_type(node: Node, family: str, protocol: int) -> int | None:
    if not isinstance(node.value, str):
        return node.integer(0, 255)
    if _NUMBER.fullmatch(node.value):
        if int(node.value) > 255:
            node.wrong(f"is {node.value}, not from 0 to 255")
        return int(node.value)
    number = _ICMP_TYPES[protocol].get(node.value)
    if number is None:
        node.wrong(f"is {shown(node.value)}, not a type of ICMP for {family}")
    return number
