"""Which flows a reader wants to see, from the words of `podwire observe` and the API's query.

An end is named by `NS/POD`, by a pod's name in any namespace, by an address or a range, or by a label `key=value`. All
conditions must hold. Pure; every fault of a filter is reported at once.
"""

import ipaddress
import re
from collections.abc import Callable, Mapping

import msgspec

from podwire.control.flows.flow import PROTOCOLS, Flow, FlowEnd
from podwire.model.documents.fields import PORT_MAX
from podwire.model.errors import Fault, UndecodableRequest

Condition = Callable[[Flow], bool]

_PORT = re.compile(r"(?P<port>[0-9]{1,5})(?:/(?P<protocol>[a-z0-9]+))?|(?P<only>[a-z][a-z0-9]*)")
_VERDICTS = ("forwarded", "dropped", "audit")
_NOISE = "quiet"
"""The reason of drops that no person asks for: what every pod's kernel sends by itself."""
_TYPES = ("drop", "trace", "policy")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(?P<count>[0-9]{1,9})(?P<unit>[smhd])")
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?Z")


class FlowFilter(msgspec.Struct, frozen=True):
    """Conditions that must all hold; none = every flow."""

    conditions: tuple[Condition, ...] = msgspec.field(default=())
    passes: bool = True
    """Whether a packet that passed could be wanted: only then the programs have to tell of any."""
    endpoint: int | None = None
    """The only endpoint whose flows are wanted, if there is one."""

    def matches(self, flow: Flow) -> bool:
        """Tell whether a flow is wanted."""
        return all(condition(flow) for condition in self.conditions)


def parse_filter(
    words: Mapping[str, str], *, format_ago: Callable[[int], str] | None = None
) -> FlowFilter:
    """Read `from`, `to`, `pod`, `verdict`, `type`, `port`, `endpoint`, `noise` and `since`;
    UndecodableRequest names all faults.

    `since` is a time or a duration like `5m`; `format_ago` gives the time so many seconds ago.
    """
    conditions: list[Condition] = []
    faults: list[Fault] = []
    for name, text in words.items():
        try:
            if name == "since":
                conditions.append(_since(text, format_ago))
            else:
                conditions.append(_MAKERS[name](text))
        except KeyError:
            faults.append(Fault(name, "is not a condition on flows"))
        except ValueError as error:
            faults.append(Fault(name, str(error)))
    if faults:
        listed = "; ".join(f"{fault.path} {fault.message}" for fault in faults)
        raise UndecodableRequest(
            f"read the filter: {listed}", hint="see `podwire observe -h`", faults=tuple(faults)
        )
    return FlowFilter(
        tuple(conditions),
        passes=words.get("type") != "drop" and words.get("verdict") in (None, "forwarded"),
        endpoint=int(words["endpoint"]) if "endpoint" in words else None,
    )


def _end(text: str) -> Callable[[FlowEnd], bool]:
    if not text:
        raise ValueError("must not be empty")
    if "=" in text:
        return lambda end: any(_is_label(label, text) for label in end.labels)
    try:
        network = ipaddress.ip_network(text)
    except ValueError:
        namespace, slash, pod = text.rpartition("/")
        # No address and no label, so a name: a name of Kubernetes has no "=", and no ":" as addresses of IPv6 do.
        return lambda end: end.pod == pod and (not slash or end.namespace == namespace)
    return lambda end: bool(end.ip) and ipaddress.ip_address(end.ip) in network


def _is_label(label: str, text: str) -> bool:
    return label == text or label.partition(":")[2] == text


def _source(text: str) -> Condition:
    matches = _end(text)
    return lambda flow: matches(flow.source)


def _destination(text: str) -> Condition:
    matches = _end(text)
    return lambda flow: matches(flow.destination)


def _either(text: str) -> Condition:
    matches = _end(text)
    return lambda flow: matches(flow.source) or matches(flow.destination)


def _verdict(text: str) -> Condition:
    if text not in _VERDICTS:
        raise ValueError(f"is {text!r}, not one of {', '.join(_VERDICTS)}")
    return lambda flow: flow.verdict == text


def _type(text: str) -> Condition:
    if text not in _TYPES:
        raise ValueError(f"is {text!r}, not one of {', '.join(_TYPES)}")
    return lambda flow: flow.type == text


def _noise(text: str) -> Condition:
    if text not in ("true", "false"):
        raise ValueError(f"is {text!r}, not true or false")
    return lambda flow: text == "true" or flow.reason != _NOISE


def _endpoint(text: str) -> Condition:
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"is {text!r}, not an endpoint's number")
    number = int(text)
    return lambda flow: number in (flow.source.endpoint, flow.destination.endpoint)


def _port(text: str) -> Condition:
    match = _PORT.fullmatch(text.lower())
    protocol = match and (match["protocol"] or match["only"])
    port = int(match["port"]) if match and match["port"] else None
    if match is None or (protocol and protocol not in PROTOCOLS) or (port or 0) > PORT_MAX:
        raise ValueError(f"is {text!r}, not a port like 80, 80/tcp or udp")

    def matches(flow: Flow) -> bool:
        return (not protocol or flow.protocol == protocol) and (
            port is None or port in (flow.source.port, flow.destination.port)
        )

    return matches


def _since(text: str, format_ago: Callable[[int], str] | None) -> Condition:
    duration = _DURATION.fullmatch(text)
    if duration and format_ago:
        text = format_ago(int(duration["count"]) * _SECONDS[duration["unit"]])
    elif not _TIME.fullmatch(text):
        raise ValueError(f"is {text!r}, not a time like 2026-01-02T03:04:05Z or 90s, 5m, 2h, 1d")
    # Times of flows have six digits after the point: as text they sort as they do as times.
    whole, _, fraction = text.removesuffix("Z").partition(".")
    begin = f"{whole}.{fraction[:6]:0<6}Z"
    return lambda flow: flow.time >= begin


_MAKERS: Mapping[str, Callable[[str], Condition]] = {
    "from": _source,
    "to": _destination,
    "pod": _either,
    "verdict": _verdict,
    "type": _type,
    "port": _port,
    "endpoint": _endpoint,
    "noise": _noise,
}
FILTER_WORDS = (*_MAKERS, "since")
