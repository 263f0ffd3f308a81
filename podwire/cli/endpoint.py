"""`podwire endpoint`: list, get, log."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import click

from podwire.cli import client
from podwire.cli.client import (
    EXIT_CONFLICT,
    EXIT_NOT_FOUND,
    EXIT_UNREACHABLE,
    EXIT_USAGE,
    CliError,
    segment,
)
from podwire.cli.lists import get_rows, show_list
from podwire.cli.options import Agent, Common, common, listing, namespaced, selecting, table
from podwire.cli.output import (
    GREEN,
    RED,
    YELLOW,
    Column,
    Row,
    cell,
    colour,
    fields,
    key,
    show_one,
    show_rows,
)

_PREFIXES = ("cni-attachment-id:", "container-id:", "pod-name:", "ipv4:", "ipv6:")
_REQUIREMENT = re.compile(r"(!?)([^=!\s]+)(?:(!=|==?)([^=!\s]*))?")

Requirement = tuple[str, str | None, bool]
"""Key, value (None = the key alone), and whether it must not hold."""


@click.group(epilog="Example: podwire endpoint list")
def endpoint() -> None:
    """The endpoints of a node: one for each interface of a pod."""


@endpoint.command("list", epilog="Example: podwire endpoint list -n default -l app=web -o wide")
@namespaced
@selecting
@listing
@common
def list_endpoints(opts: Common, namespace: str | None, selector: str | None) -> None:
    """List endpoints."""
    wanted = read_selector(selector or "")

    def read(agent: Agent) -> list[Row]:
        return [
            row
            for row in get_rows(agent, "/endpoint")
            if (not namespace or row["namespace"] == namespace)
            and matches(wanted, row.get("labels") or ())
        ]

    show_list(opts, read, _COLUMNS, _name)


@endpoint.command("get", epilog="Example: podwire endpoint get default/web -o json")
@click.argument("endpoint_id", metavar="ID")
@common
def get_endpoint(opts: Common, endpoint_id: str) -> None:
    """Show one endpoint, and whether the kernel agrees with it.

    ID: a number, NS/NAME, an address, the beginning of a container id, or as the API has it: container-id:CID,
    cni-attachment-id:CID:IFNAME, pod-name:NS/NAME, ipv4:A, ipv6:A.
    """
    agent, row = find_endpoint(opts.agents(), endpoint_id)
    health = client.request(agent.socket, "GET", f"/endpoint/{row['id']}/healthz")
    document = {**row, "differences": health["differences"]}
    if agent.node:
        document = {"node": agent.node, **document}
    show_one(document, opts.style, lambda: _describe(document), _name(row))


@endpoint.command("log", epilog="Example: podwire endpoint log default/web")
@click.argument("endpoint_id", metavar="ID")
@table
@common
def log(opts: Common, endpoint_id: str) -> None:
    """Show how an endpoint moved from state to state, and why."""
    agent, row = find_endpoint(opts.agents(), endpoint_id)
    rows = client.request(agent.socket, "GET", f"/endpoint/{row['id']}/log")
    columns = [
        Column("TIME", key("time")),
        Column("FROM", key("old")),
        Column("TO", key("new")),
        Column("CAUSE", key("cause")),
    ]
    show_rows(rows, columns, opts.style, lambda entry: f"{entry['time']} {entry['new']}")


@endpoint.command(epilog="Example: podwire endpoint label default/web app=web tier-")
@click.argument("endpoint_id", metavar="ID")
@click.argument("changes", metavar="[K=V|K-]...", nargs=-1)
@common
def label(opts: Common, endpoint_id: str, changes: tuple[str, ...]) -> None:
    """Show the labels of an endpoint, or set (K=V) and take away (K-) some."""
    agent, row = find_endpoint(opts.agents(), endpoint_id)
    resource = f"/endpoint/{row['id']}/labels"
    if changes:
        document = client.request(agent.socket, "PATCH", resource, list(changes))
    else:
        document = client.request(agent.socket, "GET", resource)
    show_one(document, opts.style, lambda: document["labels"])


def find_endpoint(agents: Sequence[Agent], text: str) -> tuple[Agent, Row]:
    """Find the one endpoint that `text` means, on any of the agents."""
    matching: list[tuple[Agent, Row]] = []
    away: CliError | None = None
    for agent in agents:
        try:
            matching.extend((agent, row) for row in _lookup(agent, text))
        except CliError as error:
            if error.exit_code == EXIT_UNREACHABLE:
                away = error
            elif error.exit_code != EXIT_NOT_FOUND:
                raise
    if len(matching) == 1:
        return matching[0]
    if matching:
        ids = ", ".join(f"{agent.node} {row['id']}".strip() for agent, row in matching)
        raise CliError(
            EXIT_CONFLICT,
            f"find endpoint {text!r}: it could be {ids}",
            "say its number" + (", and --node NODE" if len(agents) > 1 else ""),
        )
    raise away or CliError(
        EXIT_NOT_FOUND, f"find endpoint {text!r}: there is none", "podwire endpoint list"
    )


def _lookup(agent: Agent, text: str) -> list[Row]:
    if text.startswith(_PREFIXES):
        return [_get(agent, text)]
    if "/" in text:
        return [_get(agent, f"pod-name:{text}")]
    if text.isascii() and text.isdigit():
        try:
            return [_get(agent, text)]
        except CliError as error:
            if error.exit_code != EXIT_NOT_FOUND:
                raise
    # A container id may consist of digits only.
    rows = get_rows(agent, "/endpoint")
    address = _normal_address(text)
    if address is not None:
        return [row for row in rows if address in row["addresses"]]
    # Names like `db` are beginnings of container ids too: what could be meant is not guessed.
    return [
        row
        for row in rows
        if row["containerId"].startswith(text)
        or (row["namespace"], row["pod"]) == ("default", text)
    ]


def _get(agent: Agent, text: str) -> Row:
    row: Row = client.request(agent.socket, "GET", f"/endpoint/{segment(text)}")
    return row


def _normal_address(text: str) -> str | None:
    """Give the canonical form of an address, None for what is none."""
    if ":" not in text and "." not in text:
        return None
    import ipaddress  # noqa: PLC0415 (start-up time)

    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None


def read_selector(text: str) -> list[Requirement]:
    """Read `k=v,k!=v,k,!k`; CliError for what is none of them."""
    requirements: list[Requirement] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        match = _REQUIREMENT.fullmatch(part)
        if match is None or (match[1] and match[3]):
            raise CliError(EXIT_USAGE, f"read selector {part!r}", "write k=v, k!=v, k or !k")
        negated = bool(match[1]) or match[3] == "!="
        requirements.append((match[2], match[4] if match[3] else None, negated))
    return requirements


def matches(requirements: Sequence[Requirement], labels: Sequence[str]) -> bool:
    """Tell whether labels `source:key=value` fulfil all requirements; a key may be written with its source.

    A key without a source means that of any source but `reserved`.
    """
    known: dict[str, str] = {}
    for label in labels:
        name, _, value = label.partition("=")
        known[name] = value
        source, colon, bare = name.partition(":")
        if colon and source != "reserved":
            known.setdefault(bare, value)
    return all(
        (name in known if value is None else known.get(name) == value) != negated
        for name, value, negated in requirements
    )


_COLUMNS = [
    Column("ID", key("id")),
    Column("POD", lambda row: f"{row['namespace']}/{row['pod']}"),
    Column("STATE", lambda row: paint_state(row["state"])),
    *fields("ipv4", "ipv6", "identity"),
    Column("ENFORCED", lambda row: _enforcement(row["policyEnforcement"])),
    Column("INTERFACE", key("hostInterface")),
    Column("IN POD", key("ifName"), wide=True),
    *fields("network", "mtu", wide=True),
    Column("REVISION", key("policyRevision"), wide=True),
    Column("LABELS", key("labels"), wide=True),
    Column("CONTAINER", lambda row: row["containerId"][:12], wide=True),
]


def paint_state(state: str) -> str:
    """Write a state in its colour."""
    code = {"ready": GREEN, "not-ready": RED}.get(state, YELLOW)
    return colour(state, code)


def _enforcement(enforcement: dict[str, str]) -> str:
    return f"in {enforcement['ingress']}, out {enforcement['egress']}"


def _name(row: Row) -> str:
    return str(row["id"])


def _describe(document: dict[str, Any]) -> Iterator[str]:
    for name, value in document.items():
        if name == "differences":
            continue
        yield f"{name + ':':20} {_say(value)}"
    yield f"{'kernel:':20} " + ("; ".join(document["differences"]) or "agrees with the journal")


def _say(value: Any) -> str:
    """Write a value of a document in one line."""
    if isinstance(value, dict):
        return ", ".join(f"{word} {_say(inner)}" for word, inner in value.items() if inner != "")
    if isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        return "; ".join(map(_say, value))
    return cell(value)
