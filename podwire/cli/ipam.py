"""`podwire ipam`: show, check, release."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from podwire.cli import client
from podwire.cli.client import EXIT_NOT_FOUND, EXIT_NOT_SO, EXIT_USAGE, CliError, segment
from podwire.cli.lists import NODE, ask_all, marked, show_list, show_watched
from podwire.cli.options import Agent, Common, common, listing
from podwire.cli.output import Column, Row, key, show_one


@click.group(epilog="Example: podwire ipam show")
def ipam() -> None:
    """Addresses: how many, and who holds which."""


@ipam.command(epilog="Example: podwire ipam show --ip 10.244.1.7")
@click.option("--show-blocks", is_flag=True, help="Every address that is held.")
@click.option("--ip", metavar="A", help="Who holds this address?")
@listing
@common
def show(opts: Common, show_blocks: bool, ip: str | None) -> None:
    """Show how full the node's ranges are."""
    if ip is not None:
        _show_holder(opts, _read_address(ip))
    elif show_blocks:
        show_list(opts, _reader("allocations"), _HELD_COLUMNS, lambda row: str(row["ip"]))
    else:
        show_list(opts, _reader("ranges"), _RANGE_COLUMNS, lambda row: str(row["cidr"]))


def _reader(field: str) -> Callable[[Agent], list[Row]]:
    def read(agent: Agent) -> list[Row]:
        rows: list[Row] = client.request(agent.socket, "GET", "/ipam")[field]
        return rows

    return read


def _show_holder(opts: Common, address: str) -> None:
    def read() -> tuple[list[Row], CliError | None]:
        answers, failure = ask_all(opts, _reader("allocations"))
        rows = [
            row for agent, part in answers for row in marked(agent, part) if row["ip"] == address
        ]
        if not rows:
            raise failure or CliError(
                EXIT_NOT_FOUND,
                f"find a holder of {address}: nobody has it",
                "podwire ipam show --show-blocks",
            )
        return rows, failure

    show_watched(opts, read, _HELD_COLUMNS, lambda row: str(row["ip"]))


def _read_address(text: str) -> str:
    import ipaddress  # noqa: PLC0415 (start-up time)

    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise CliError(
            EXIT_USAGE, f"read address {text!r}: this is none", "write it as 10.244.1.7 or fd10::7"
        ) from None


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

    def ask(agent: Agent) -> Row:
        answer: Row = client.request(agent.socket, "GET", "/ipam/check")
        return answer

    answers, failure = ask_all(opts, ask)
    document = {
        "ok": all(answer["ok"] for _, answer in answers),
        "checked": sum(answer["checked"] for _, answer in answers),
        "faults": [row for agent, answer in answers for row in marked(agent, answer["faults"])],
    }
    lines = [f"{fault['ip']}: {fault['problem']}" for fault in document["faults"]]
    lines.append(f"{document['checked']} addresses checked, {len(document['faults'])} faults")
    show_one(document, opts.style, lambda: lines)
    if failure is not None:
        raise failure
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
    wanted = [(_read_address(ip), None)] if ip is not None else _read_report(str(from_report))
    agents = opts.agents()
    released: list[str] = []
    for address, node in wanted:
        _release([one for one in agents if node in (None, one.node)] or agents, address)
        released.append(address)
    lines = [f"released {', '.join(released) or 'nothing'}"]
    show_one({"released": released}, opts.style, lambda: lines, "\n".join(released))


def _release(agents: Sequence[Agent], address: str) -> None:
    """Release an address at the agent that knows it; what the last one says counts when none does."""
    for agent in agents:
        try:
            client.request(agent.socket, "DELETE", f"/ipam/{segment(address)}")
        except CliError as error:
            if error.exit_code != EXIT_NOT_FOUND or agent is agents[-1]:
                raise
        else:
            return


def _read_report(path: str) -> list[tuple[str, str | None]]:
    """Give addresses and nodes (None = the only one)."""
    import json  # noqa: PLC0415 (start-up time)

    try:
        report: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        return [
            (_read_address(fault["ip"]), fault.get(NODE))
            for fault in report["faults"]
            if fault["releasable"]
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CliError(
            EXIT_USAGE,
            f"read report {path!r}: {error}",
            "write it with `podwire ipam check -o json`",
        ) from error
