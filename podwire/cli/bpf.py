"""`podwire bpf`: rows of the maps, decoded."""

from typing import Any

import click

from podwire.cli import client
from podwire.cli.options import Common, common, listing
from podwire.cli.output import Column, Row, key, show_rows

MAPS = {
    "endpoint": "endpoints",
    "config": "config",
    "ipcache": "ipcache",
    "ct": "conntrack",
    "metrics": "metrics",
}


@click.group()
def bpf() -> None:
    """Rows of the BPF maps."""


def _add(noun: str, name: str) -> None:
    @click.group(noun)
    def group() -> None:
        pass

    group.help = f"Rows of the map {name}."

    @group.command("list", epilog=f"Example: podwire bpf {noun} list -o jsonl")
    @click.option("--limit", type=click.IntRange(1), default=1000, show_default=True, help="Rows.")
    @listing
    @common
    def list_rows(opts: Common, limit: int) -> None:
        """List the rows."""
        rows: list[Row] = []
        truncated = False
        for agent in opts.agents():
            answer: dict[str, Any] = client.request(
                agent.socket, "GET", f"/map/{name}?limit={limit}"
            )
            truncated = truncated or answer["truncated"]
            mark = {"node": agent.node} if agent.node else {}
            rows.extend({**mark, **row} for row in answer["rows"])
        fields = list(dict.fromkeys(field for row in rows for field in row))
        columns = [Column(field.upper(), key(field)) for field in fields]
        show_rows(rows, columns, opts.style, lambda row: str(next(iter(row.values()))))
        if truncated:
            click.echo(f"only the first {limit} rows of each map are shown (--limit)", err=True)

    bpf.add_command(group)


for _noun, _name in MAPS.items():
    _add(_noun, _name)
