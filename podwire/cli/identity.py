"""`podwire identity`: list and get."""

from collections.abc import Iterator
from typing import Any

import click

from podwire.cli import client
from podwire.cli.client import segment
from podwire.cli.options import Common, common, listing
from podwire.cli.output import Column, key, show_one, show_rows


@click.group()
def identity() -> None:
    """Identities: the numbers of label sets."""


@identity.command("list", epilog="Example: podwire identity list -o json")
@listing
@common
def list_identities(opts: Common) -> None:
    """List the identities that the agent knows."""
    rows = client.request(opts.one_agent().socket, "GET", "/identity")
    columns = [
        Column("ID", key("id")),
        Column("LABELS", key("labels")),
        Column("ENDPOINTS", key("endpoints")),
    ]
    show_rows(rows, columns, opts.style, lambda row: str(row["id"]))


@identity.command("get", epilog="Example: podwire identity get 2")
@click.argument("number", metavar="ID")
@common
def get_identity(opts: Common, number: str) -> None:
    """Show one identity."""
    document = client.request(opts.one_agent().socket, "GET", f"/identity/{segment(number)}")
    show_one(document, opts.style, lambda: _describe(document), str(document["id"]))


def _describe(document: dict[str, Any]) -> Iterator[str]:
    yield f"identity {document['id']}, {document['endpoints']} endpoints on this node"
    for label in document["labels"]:
        yield f"  {label}"
