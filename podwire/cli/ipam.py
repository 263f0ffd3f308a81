"""`podwire ipam`: show, check, release."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from podwire.cli import client
from podwire.cli.client import EXIT_NOT_FOUND, EXIT_NOT_SO, EXIT_USAGE, CliError, segment
from podwire.cli.lists import NODE, ask_all, marked, show_list, show_watched
from podwire.cli.options import Agent, Common, common, listing
from podwire.cli.output import Column, Row, count, fields, key, show_one


@click.group(epilog="Example: podwire ipam show")
def ipam() -> None:
    """Addresses: how many, and their owners."""


@ipam.command(epilog="Example: podwire ipam show --ip 10.244.1.7")
@click.option(
    "--show-blocks", is_flag=True, help="With pools: this node's blocks. Else: every held address."
)
@click.option("--show-borrowed", is_flag=True, help="Addresses that are claimed one by one.")
@click.option("--ip", metavar="A", help="Show the owner of this address.")
@listing
@common
def show(opts: Common, show_blocks: bool, show_borrowed: bool, ip: str | None) -> None:
    """Show how full the pools are, or the node's ranges."""
    if show_blocks + show_borrowed + (ip is not None) > 1:
        raise CliError(
            EXIT_USAGE, "say one of --show-blocks, --show-borrowed and --ip", "podwire ipam show -h"
        )
    if ip is not None:
        _show_holder(opts, _read_address(ip))
        return
    if show_borrowed:
        show_list(opts, _reader("borrowed"), _BORROWED_COLUMNS, lambda row: str(row["ip"]))
        return
    has_pools = _has_pools(opts)
    if show_blocks and has_pools:
        columns = [_RANGE_COLUMNS[0], Column("POOL", key("pool")), *_RANGE_COLUMNS[1:]]
        show_list(opts, _reader("ranges"), columns, lambda row: str(row["cidr"]))
    elif show_blocks:
        show_list(opts, _reader("allocations"), _HELD_COLUMNS, lambda row: str(row["ip"]))
    elif has_pools:
        show_list(opts, _read_pools, _POOL_COLUMNS, _name_pool)
    else:
        show_list(opts, _reader("ranges"), _RANGE_COLUMNS, lambda row: str(row["cidr"]))


def _has_pools(opts: Common) -> bool:
    """Tell whether the agents that are meant give addresses out of pools."""
    answers, _ = ask_all(opts, lambda agent: client.request(agent.socket, "GET", "/ipam"))
    return any(answer["mode"] == "pool" for _, answer in answers)


def _read_pools(agent: Agent) -> list[Row]:
    """Give a row for each pool as a whole, and one for each node that has something of it."""
    rows: list[Row] = []
    for pool in client.request(agent.socket, "GET", "/ipam")["pools"]:
        parts = pool.pop("nodes")
        rows.append({**pool, "of": "cluster"})
        rows += (
            {
                "name": pool["name"],
                "cidr": pool["cidr"],
                "of": part["node"],
                "blocksClaimed": part["blocks"],
                "capacity": part["capacity"],
                "used": part["used"],
                "free": part["free"],
                "borrowed": part["borrowed"],
            }
            for part in parts
        )
    return rows


def _name_pool(row: Row) -> str:
    return str(row["name"]) if row["of"] == "cluster" else f"{row['name']}/{row['of']}"


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
            rows = _find_claim(opts, address)
        if not rows:
            raise failure or CliError(
                EXIT_NOT_FOUND,
                f"find a holder of {address}: no endpoint has it",
                "podwire ipam show --show-blocks",
            )
        return rows, failure

    show_watched(opts, read, _HELD_COLUMNS, lambda row: str(row["ip"]))


def _find_claim(opts: Common, address: str) -> list[Row]:
    """Give the node that claimed an address that no endpoint of these agents has, or that no such node is left."""
    answers, _ = ask_all(opts, _reader("borrowed"))
    claims = [row for _, part in answers for row in part if row["ip"] == address]
    return [
        {
            "ip": address,
            "endpoint": None,
            "owner": row["handle"],
            "state": f"claimed by {row['node']}",
        }
        for row in claims[:1]
    ]


def _read_address(text: str) -> str:
    import ipaddress  # noqa: PLC0415 (start-up time)

    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise CliError(
            EXIT_USAGE,
            f"read address {text!r}: this is not an address",
            "write it as 10.244.1.7 or fd10::7",
        ) from None


_RANGE_COLUMNS = [
    Column("CIDR", key("cidr")),
    Column("CAPACITY", count("capacity")),
    Column("USED", count("used")),
    Column("RESTING", key("resting")),
    Column("FREE", count("free")),
]
_POOL_COLUMNS = [
    Column("POOL", key("name")),
    *fields("cidr", "of"),
    Column("BLOCKS", count("blocksClaimed")),
    Column("CAPACITY", count("capacity")),
    Column("USED", count("used")),
    Column("FREE", count("free")),
    Column("BORROWED", key("borrowed")),
    Column("PROBLEM", lambda row: row.get("problem", "")),
]
_BORROWED_COLUMNS = [
    Column("ADDRESS", key("ip")),
    Column("BY", key("node")),
    *fields("pool", "block"),
    Column("BLOCK OF", key("blockNode")),
    Column("HANDLE", key("handle")),
]
_HELD_COLUMNS = [
    Column("ADDRESS", key("ip")),
    *fields("endpoint", "owner", "state"),
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
        _release([agent for agent in agents if node in (None, agent.node)] or agents, address)
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
