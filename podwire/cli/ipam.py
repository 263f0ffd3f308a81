"""`podwire ipam`: show, check, release."""

from pathlib import Path
from typing import Any

import click

from podwire.cli import client
from podwire.cli.client import EXIT_NOT_FOUND, EXIT_NOT_SO, EXIT_USAGE, CliError, segment
from podwire.cli.options import Common, common, listing
from podwire.cli.output import Column, Row, key, print_json, print_yaml, show_one, show_rows


@click.group()
def ipam() -> None:
    """Addresses: how many, and who holds which."""


@ipam.command(epilog="Example: podwire ipam show --ip 10.244.1.7")
@click.option("--show-blocks", is_flag=True, help="Every address that is held.")
@click.option("--ip", metavar="A", help="Who holds this address?")
@listing
@common
def show(opts: Common, show_blocks: bool, ip: str | None) -> None:
    """Show how full the node's ranges are."""
    ranges: list[Row] = []
    held: list[Row] = []
    for agent in opts.agents():
        answer = client.request(agent.socket, "GET", "/ipam")
        mark = {"node": agent.node} if agent.node else {}
        ranges.extend({**mark, **row} for row in answer["ranges"])
        held.extend({**mark, **row} for row in answer["allocations"])
    lead = [Column("NODE", key("node"))] if any("node" in row for row in ranges) else []
    if ip is not None:
        held = [row for row in held if row["ip"] == ip]
        if not held:
            raise CliError(EXIT_NOT_FOUND, f"find a holder of {ip}: nobody has it")
    if show_blocks or ip is not None:
        show_rows(held, [*lead, *_HELD_COLUMNS], opts.style, lambda row: str(row["ip"]))
    else:
        show_rows(ranges, [*lead, *_RANGE_COLUMNS], opts.style, lambda row: str(row["cidr"]))


_RANGE_COLUMNS = [
    Column("CIDR", key("cidr")),
    Column("CAPACITY", key("capacity")),
    Column("USED", key("used")),
    Column("RESTING", key("resting")),
    Column("FREE", key("free")),
]
_HELD_COLUMNS = [
    Column("ADDRESS", key("ip")),
    Column("ENDPOINT", key("endpoint")),
    Column("OWNER", key("owner")),
    Column("STATE", key("state")),
]


@ipam.command(epilog="Example: podwire ipam check -o json > report.json")
@common
def check(opts: Common) -> None:
    """Compare what memory, journal and kernel say of addresses; exit code 1 when they disagree."""
    answers = [client.request(agent.socket, "GET", "/ipam/check") for agent in opts.agents()]
    document = {
        "ok": all(answer["ok"] for answer in answers),
        "checked": sum(answer["checked"] for answer in answers),
        "faults": [fault for answer in answers for fault in answer["faults"]],
    }
    lines = [f"{fault['ip']}: {fault['problem']}" for fault in document["faults"]]
    lines.append(f"{document['checked']} addresses checked, {len(document['faults'])} faults")
    show_one(document, opts.style, lambda: lines)
    if not document["ok"]:
        raise SystemExit(EXIT_NOT_SO)


@ipam.command(epilog="Example: podwire ipam release --ip 10.244.1.7")
@click.option("--ip", metavar="A", help="The address.")
@click.option(
    "--from-report", metavar="FILE", help="Every releasable address of `ipam check -o json`."
)
@common
def release(opts: Common, ip: str | None, from_report: str | None) -> None:
    """Release addresses that no endpoint has; one that is in use is refused."""
    if (ip is None) == (from_report is None):
        raise CliError(EXIT_USAGE, "say either --ip or --from-report", "podwire ipam release -h")
    wanted = [ip] if ip is not None else _read_report(str(from_report))
    agent = opts.one_agent()
    for address in wanted:
        client.request(agent.socket, "DELETE", f"/ipam/{segment(address)}")
    if opts.style.form == "json":
        print_json({"released": wanted})
    elif opts.style.form == "yaml":
        print_yaml({"released": wanted})
    elif not opts.style.quiet:
        print(f"released {', '.join(wanted) or 'nothing'}")


def _read_report(path: str) -> list[str]:
    import json  # noqa: PLC0415

    try:
        report: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        return [fault["ip"] for fault in report["faults"] if fault["releasable"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CliError(
            EXIT_USAGE,
            f"read report {path!r}: {error}",
            "write it with `podwire ipam check -o json`",
        ) from error
