"""`podwire bpf`: rows of the maps, decoded."""

import click

from podwire.cli import client
from podwire.cli.lists import NODE, show_list
from podwire.cli.options import Agent, Common, common, listing
from podwire.cli.output import Column, Row, cell, key

_MAPS = {
    "endpoint": ("Addresses of this node's pods and their devices.", ("address",)),
    "config": ("What the programs know of each device.", ("ifindex",)),
    "ipcache": ("Prefixes, their identities and nodes.", ("prefix",)),
    "ct": (
        "Remembered flows (conntrack).",
        (
            "endpoint",
            "direction",
            "protocol",
            "source",
            "source_port",
            "destination",
            "destination_port",
        ),
    ),
    "policy": (
        "What the rules of each slot say about an identity, protocol and port.",
        ("slot", "identity", "direction", "protocol", "port"),
    ),
    "cidrs": ("Prefixes that rules name, and the identities they have there.", ("prefix",)),
    "hits": ("How often each rule decided about a new flow, or denied a packet.", ("rule",)),
    "metrics": (
        "Packets and bytes by hook, reason of a drop, and path.",
        ("hook", "reason", "path"),
    ),
    "nodes": ("Other nodes, and the addresses their tunnel packets come from.", ("node",)),
    "service": (
        "Addresses of services, and the back ends that answer for them.",
        ("address", "port", "protocol"),
    ),
    "settings": ("What holds for the whole node.", ()),
    "usage": ("Remembered flows per endpoint, for its quota.", ("endpoint",)),
}
"""What a map has, and the fields that tell a row of it from the others."""


@click.group(epilog="Example: podwire bpf metrics list")
def bpf() -> None:
    """Rows of the BPF maps."""


def _add(noun: str) -> None:
    @click.group(noun, help=_MAPS[noun][0], epilog=f"Example: podwire bpf {noun} list")
    def group() -> None:
        pass

    @group.command("list", epilog=f"Example: podwire bpf {noun} list -o jsonl")
    @click.option("--limit", type=click.IntRange(1), default=1000, show_default=True, help="Rows.")
    @listing
    @common
    def list_rows(opts: Common, limit: int) -> None:
        """List the rows."""
        truncated = False
        columns: list[Column] = []

        def read(agent: Agent) -> list[Row]:
            nonlocal truncated
            answer = client.request(agent.socket, "GET", f"/map/{noun}?limit={limit}")
            truncated = truncated or answer["truncated"]
            rows = [_renamed(row) for row in answer["rows"]]
            known = {column.header for column in columns}
            fields = dict.fromkeys(field for row in rows for field in row)
            columns.extend(
                Column(_header(field), key(field))
                for field in fields
                if _header(field) not in known
            )
            return rows

        show_list(opts, read, columns, lambda row: _name(noun, row))
        if truncated:
            click.echo(f"only the first {limit} rows of each map are shown (--limit)", err=True)

    bpf.add_command(group)


def _renamed(row: Row) -> Row:
    """A row's `node` is a number of the datapath; in lists `node` is the name of the node that answered."""
    return {"node_number" if field == NODE else field: value for field, value in row.items()}


def _header(field: str) -> str:
    return field.upper().replace("_", " ")


def _name(noun: str, row: Row) -> str:
    return " ".join(cell(row[field]) for field in _MAPS[noun][1]) or noun


for _noun in _MAPS:
    _add(_noun)
