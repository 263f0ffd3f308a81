"""`podwire node`: list."""

import click

from podwire.cli import client
from podwire.cli.options import Common, common, listing
from podwire.cli.output import Column, key, show_rows


@click.group()
def node() -> None:
    """Nodes."""


@node.command("list", epilog="Example: podwire node list -o wide")
@listing
@common
def list_nodes(opts: Common) -> None:
    """List the nodes that the agents know."""
    rows = {}
    for agent in opts.agents():
        for row in client.request(agent.socket, "GET", "/node"):
            rows[row["name"]] = row
    columns = [
        Column("NAME", key("name")),
        Column("ADDRESSES", key("addresses")),
        Column("POD CIDRS", key("podCidrs")),
        Column("MTU", key("mtu")),
        Column("KERNEL", key("kernel"), wide=True),
        Column("BOOT", key("bootId"), wide=True),
    ]
    show_rows(list(rows.values()), columns, opts.style, lambda row: str(row["name"]))
