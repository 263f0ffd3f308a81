"""`podwire identity`: list and get."""

from collections.abc import Iterator, Sequence
from typing import Any

import click

from podwire.cli import client
from podwire.cli.client import EXIT_NOT_FOUND, CliError, segment
from podwire.cli.endpoint import matches, read_selector
from podwire.cli.lists import ask_all, get_rows, show_list
from podwire.cli.options import Agent, Common, common, listing, namespaced, selecting
from podwire.cli.output import Column, Row, fields, key, show_one
from podwire.model.labels import NAMESPACE_KEY, SOURCE_K8S


@click.group(epilog="Example: podwire identity list")
def identity() -> None:
    """Identities: the numbers of label sets."""


@identity.command("list", epilog="Example: podwire identity list -l app=web -o wide")
@namespaced
@selecting
@listing
@common
def list_identities(opts: Common, namespace: str | None, selector: str | None) -> None:
    """List the identities that the agent knows: those of every pod of the cluster, and the reserved ones."""
    wanted = read_selector(selector or "")
    if namespace:
        wanted.append((f"{SOURCE_K8S}:{NAMESPACE_KEY}", namespace, False))

    def read(agent: Agent) -> list[Row]:
        return [row for row in get_rows(agent, "/identity") if matches(wanted, row["labels"])]

    show_list(opts, read, _COLUMNS, lambda row: str(row["id"]))


@identity.command("get", epilog="Example: podwire identity get 2")
@click.argument("number", metavar="ID")
@common
def get_identity(opts: Common, number: str) -> None:
    """Show one identity: its labels and named ports, and the endpoints that have it."""
    refused: list[CliError] = []

    def read(agent: Agent) -> Row | None:
        try:
            document: Row = client.request(agent.socket, "GET", f"/identity/{segment(number)}")
        except CliError as error:
            if error.exit_code != EXIT_NOT_FOUND:
                raise
            refused.append(error)  # another node may have heard of it a moment earlier
            return None
        return document

    answers, failure = ask_all(opts, read)
    answered = [(agent, row) for agent, row in answers if row is not None]
    if not answered:
        raise refused[0]
    document = _merge(answered)
    show_one(document, opts.style, lambda: _describe(document), str(document["id"]))
    if failure is not None:
        raise failure


def _merge(answers: Sequence[tuple[Agent, Row]]) -> dict[str, Any]:
    """Give what all nodes say together: a number means the same on every node; endpoints are those of each."""
    document = {
        **answers[0][1],
        "endpoints": sum(row["endpoints"] for _, row in answers),
    }
    if len(answers) > 1:
        document["endpointIds"] = [
            f"{agent.node}/{number}" for agent, row in answers for number in row["endpointIds"]
        ]
    return document


_COLUMNS = [
    *fields("id", "labels", "endpoints"),
    Column("PORTS", key("namedPorts"), wide=True),
    *fields("source", "state", wide=True),
    Column("ENDPOINT IDS", key("endpointIds"), wide=True),
]


def _describe(document: dict[str, Any]) -> Iterator[str]:
    ids = ", ".join(str(number) for number in document["endpointIds"])
    yield f"identity {document['id']}, {document['source']}, {document['state']}"
    yield f"endpoints: {document['endpoints']}" + (f" ({ids})" if ids else "")
    for port in document["namedPorts"]:
        yield f"port {port}"
    for label in document["labels"]:
        yield f"  {label}"
