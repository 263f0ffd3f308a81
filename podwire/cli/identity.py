"""`podwire identity`: list and get."""

from collections.abc import Iterator
from typing import Any

import click

from podwire.cli import client
from podwire.cli.client import segment
from podwire.cli.endpoint import matches, read_selector
from podwire.cli.lists import ask_all, show_list
from podwire.cli.options import Agent, Common, common, listing
from podwire.cli.output import Column, Row, key, show_one


@click.group(epilog="Example: podwire identity list")
def identity() -> None:
    """Identities: the numbers of label sets."""


@identity.command("list", epilog="Example: podwire identity list -o json")
@click.option("-l", "--selector", metavar="SELECTOR", help="k=v, k!=v, k, !k, joined by commas.")
@listing
@common
def list_identities(opts: Common, selector: str | None) -> None:
    """List the identities that the agent knows."""
    wanted = read_selector(selector or "")

    def read(agent: Agent) -> list[Row]:
        rows = client.request(agent.socket, "GET", "/identity")
        return [row for row in rows if matches(wanted, row["labels"])]

    columns = [
        Column("ID", key("id")),
        Column("LABELS", key("labels")),
        Column("ENDPOINTS", key("endpoints")),
    ]
    show_list(opts, read, columns, lambda row: str(row["id"]))


@identity.command("get", epilog="Example: podwire identity get 2")
@click.argument("number", metavar="ID")
@common
def get_identity(opts: Common, number: str) -> None:
    """Show one identity: its labels, and how many endpoints have it."""

    def read(agent: Agent) -> dict[str, Any]:
        found: dict[str, Any] = client.request(agent.socket, "GET", f"/identity/{segment(number)}")
        return found

    answers, failure = ask_all(opts, read)
    # A number means the same on every node; endpoints are counted per node.
    document = {**answers[0][1], "endpoints": sum(one["endpoints"] for _, one in answers)}
    show_one(document, opts.style, lambda: _describe(document), str(document["id"]))
    if failure is not None:
        raise failure


def _describe(document: dict[str, Any]) -> Iterator[str]:
    yield f"identity {document['id']}, {document['endpoints']} endpoints"
    for label in document["labels"]:
        yield f"  {label}"
