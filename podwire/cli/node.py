"""`podwire node`: list."""

from typing import Final

import click

from podwire.cli.client import CliError
from podwire.cli.lists import ask_all, get_rows, show_watched
from podwire.cli.options import Common, common, listing
from podwire.cli.output import Column, Row, fields, key

SEEN_BY: Final = "seenBy"
"""The node of a lab whose agent says a row."""


@click.group(epilog="Example: podwire node list")
def node() -> None:
    """Nodes."""


@node.command("list", epilog="Example: podwire node list -o wide")
@listing
@common
def list_nodes(opts: Common) -> None:
    """List the nodes that the agents know.

    In a lab every node says how it reaches the others; with --node only that one does.
    """

    def read() -> tuple[list[Row], CliError | None]:
        answers, failure = ask_all(opts, lambda agent: get_rows(agent, "/node"))
        rows = [
            {SEEN_BY: agent.node, **row} if agent.node else row
            for agent, seen in answers
            for row in seen
        ]
        return rows, failure

    several = opts.node is None and len(opts.agents()) > 1
    columns = [
        *([Column("SEEN BY", key(SEEN_BY))] if several else ()),
        Column("NAME", key("name")),
        Column("ALIVE", _alive),
        Column("WAYS", lambda row: ",".join(row.get("ways", ())) or "not reached"),
        Column("ADDRESSES", key("addresses")),
        Column("POD CIDRS", key("podCidrs")),
        Column("MTU", key("mtu")),
        Column("OUTER", key("outer"), wide=True),
        Column("ENCRYPTED", lambda row: "yes" if row.get("encrypted") else "no", wide=True),
        *fields("epoch", "kernel", wide=True),
        Column("BOOT", key("bootId"), wide=True),
    ]
    show_watched(opts, read, columns, lambda row: _name(row) if several else str(row["name"]))


def _name(row: Row) -> str:
    return str(row["name"]) if "local" in row.get("ways", ()) else f"{row[SEEN_BY]}/{row['name']}"


def _alive(row: Row) -> str:
    alive = row.get("alive")
    return "unknown" if alive is None else "yes" if alive else "no"
