"""`podwire node`: list."""

import click

from podwire.cli import client
from podwire.cli.client import CliError
from podwire.cli.lists import ask_all, show_watched
from podwire.cli.options import Agent, Common, common, listing
from podwire.cli.output import Column, Row, key


@click.group(epilog="Example: podwire node list")
def node() -> None:
    """Nodes."""


@node.command("list", epilog="Example: podwire node list -o wide")
@listing
@common
def list_nodes(opts: Common) -> None:
    """List the nodes that the agents know."""

    def ask(agent: Agent) -> list[Row]:
        rows: list[Row] = client.request(agent.socket, "GET", "/node")
        return rows

    def read() -> tuple[list[Row], CliError | None]:
        answers, failure = ask_all(opts, ask)
        return list({row["name"]: row for _, rows in answers for row in rows}.values()), failure

    columns = [
        Column("NAME", key("name")),
        Column("ADDRESSES", key("addresses")),
        Column("POD CIDRS", key("podCidrs")),
        Column("MTU", key("mtu")),
        Column("KERNEL", key("kernel"), wide=True),
        Column("BOOT", key("bootId"), wide=True),
    ]
    show_watched(opts, read, columns, lambda row: str(row["name"]))
