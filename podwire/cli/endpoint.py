"""`podwire endpoint`: list, get, log."""

import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import click

from podwire.cli import client
from podwire.cli.client import EXIT_NOT_FOUND, EXIT_USAGE, CliError, segment
from podwire.cli.options import Agent, Common, common, listing
from podwire.cli.output import (
    GREEN,
    RED,
    YELLOW,
    Column,
    Row,
    cell,
    colour,
    key,
    show_one,
    show_rows,
)

_PREFIXES = ("cni-attachment-id:", "container-id:", "pod-name:", "ipv4:", "ipv6:")
_REQUIREMENT = re.compile(r"(!?)([^=!]+?)(?:(!=|==?)(.*))?$")
_WATCH_S = 1.0


@click.group()
def endpoint() -> None:
    """The endpoints of a node: one for each interface of a pod."""


@endpoint.command("list", epilog="Example: podwire endpoint list -n default -l app=web -o wide")
@click.option("-n", "--namespace", metavar="NS", help="Only pods of this namespace.")
@click.option("-A", "--all-namespaces", is_flag=True, help="Pods of every namespace (the default).")
@click.option("-l", "--selector", metavar="SELECTOR", help="k=v, k!=v, k, !k, joined by commas.")
@click.option("-w", "--watch", is_flag=True, help="Go on, and show what changes.")
@listing
@common
def list_endpoints(
    opts: Common, namespace: str | None, all_namespaces: bool, selector: str | None, watch: bool
) -> None:
    """List endpoints."""
    if namespace and all_namespaces:
        raise CliError(EXIT_USAGE, "-n and -A exclude each other")
    shown: list[Row] = []
    while True:
        rows = [row for row in _read_all(opts.agents()) if _wanted(row, namespace, selector)]
        fresh = [row for row in rows if row not in shown]
        if fresh or not watch:
            show_rows(fresh if watch else rows, _columns(rows), opts.style, _name)
        if not watch:
            return
        shown = rows
        time.sleep(_WATCH_S)


@endpoint.command("get", epilog="Example: podwire endpoint get default/web -o json")
@click.argument("endpoint_id", metavar="ID")
@common
def get_endpoint(opts: Common, endpoint_id: str) -> None:
    """Show one endpoint. ID: a number, NS/NAME, an address, or the beginning of a container id."""
    agent, row = find_endpoint(opts.agents(), endpoint_id)
    health = client.request(agent.socket, "GET", f"/endpoint/{row['id']}/healthz")
    document = {**row, "differences": health["differences"]}
    show_one(document, opts.style, lambda: _describe(document), _name(row))


@endpoint.command("log", epilog="Example: podwire endpoint log default/web")
@click.argument("endpoint_id", metavar="ID")
@listing
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


def find_endpoint(agents: Sequence[Agent], text: str) -> tuple[Agent, Row]:
    """Find the one endpoint that `text` means, on any of the agents."""
    found: list[tuple[Agent, Row]] = []
    for agent in agents:
        try:
            found.extend((agent, row) for row in _lookup(agent, text))
        except CliError as error:
            if error.exit_code != EXIT_NOT_FOUND:
                raise
    if not found:
        raise CliError(EXIT_NOT_FOUND, f"find endpoint {text!r}", "podwire endpoint list")
    if len(found) > 1:
        ids = ", ".join(f"{agent.node} {row['id']}".strip() for agent, row in found)
        raise CliError(EXIT_USAGE, f"find endpoint {text!r}: it could be {ids}", "say its number")
    return found[0]


def _lookup(agent: Agent, text: str) -> list[Row]:
    if text.isdigit() or text.startswith(_PREFIXES):
        return [client.request(agent.socket, "GET", f"/endpoint/{segment(text)}")]
    if "/" in text:
        return [client.request(agent.socket, "GET", f"/endpoint/{segment(f'pod-name:{text}')}")]
    rows: list[Row] = client.request(agent.socket, "GET", "/endpoint")
    by_address = [row for row in rows if text in row["addresses"]]
    return by_address or [row for row in rows if row["containerId"].startswith(text)]


def _read_all(agents: Sequence[Agent]) -> list[Row]:
    rows = []
    for agent in agents:
        for row in client.request(agent.socket, "GET", "/endpoint"):
            rows.append({"node": agent.node, **row} if agent.node else row)
    return rows


def _wanted(row: Row, namespace: str | None, selector: str | None) -> bool:
    if namespace and row["namespace"] != namespace:
        return False
    labels = dict(label.partition(":")[2].partition("=")[::2] for label in row.get("labels") or ())
    for part in filter(None, (selector or "").split(",")):
        match = _REQUIREMENT.match(part.strip())
        if match is None or (match[1] and match[3]):
            raise CliError(EXIT_USAGE, f"read selector {part!r}", "write k=v, k!=v, k or !k")
        negated, name, operator, value = match.groups()
        if operator is None:
            holds = (name in labels) != bool(negated)
        else:
            holds = (labels.get(name) == value) != (operator == "!=")
        if not holds:
            return False
    return True


def _columns(rows: Sequence[Row]) -> list[Column]:
    columns = [
        Column("ID", key("id")),
        Column("POD", lambda row: f"{row['namespace']}/{row['pod']}"),
        Column("STATE", lambda row: paint_state(row["state"])),
        Column("IPV4", key("ipv4")),
        Column("IPV6", key("ipv6")),
        Column("IDENTITY", key("identity")),
        Column("ENFORCED", lambda row: _enforcement(row["policyEnforcement"])),
        Column("INTERFACE", key("hostInterface")),
        Column("IN POD", key("ifName"), wide=True),
        Column("NETWORK", key("network"), wide=True),
        Column("MTU", key("mtu"), wide=True),
        Column("REVISION", key("policyRevision"), wide=True),
        Column("LABELS", key("labels"), wide=True),
        Column("CONTAINER", lambda row: row["containerId"][:12], wide=True),
    ]
    if any("node" in row for row in rows):
        columns.insert(0, Column("NODE", key("node")))
    return columns


def paint_state(state: str) -> str:
    """Write a state in its colour."""
    code = {"ready": GREEN, "not-ready": RED, "invalid": RED}.get(state, YELLOW)
    return colour(state, code)


def _enforcement(enforcement: dict[str, str]) -> str:
    return f"in {enforcement['ingress']}, out {enforcement['egress']}"


def _name(row: Row) -> str:
    return str(row["id"])


def _describe(document: dict[str, Any]) -> Iterator[str]:
    for name, value in document.items():
        if name == "differences":
            continue
        text = (
            ", ".join(f"{one} {two}" for one, two in value.items())
            if isinstance(value, dict)
            else cell(value)
        )
        yield f"{name + ':':20} {text}"
    yield f"{'kernel:':20} " + ("; ".join(document["differences"]) or "agrees with the journal")
