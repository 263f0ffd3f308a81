"""`podwire service`: list and get."""

from collections.abc import Iterator
from typing import Any

import click

from podwire.cli.client import EXIT_NOT_FOUND, CliError
from podwire.cli.lists import ask_all, get_rows, show_list
from podwire.cli.objects import in_namespace, read_name
from podwire.cli.options import Agent, Common, common, listing, namespaced
from podwire.cli.output import Column, Row, fields, key, show_one
from podwire.model.store.kinds import SERVICE


@click.group(epilog="Example: podwire service list")
def service() -> None:
    """Services: their addresses, who answers there, and whether the programs translate them."""


@service.command("list", epilog="Example: podwire service list -n default -o wide")
@namespaced
@listing
@common
def list_services(opts: Common, namespace: str | None) -> None:
    """List the services that the agents know; none where `translate_services` leaves them to the stack."""

    def read(agent: Agent) -> list[Row]:
        return [row for row in get_rows(agent, "/service") if namespace in (None, row["namespace"])]

    show_list(opts, read, _COLUMNS, _name)


@service.command("get", epilog="Example: podwire service get default/web")
@click.argument("name", metavar="[NS/]NAME")
@in_namespace
@common
def get_service(opts: Common, name: str, namespace: str | None) -> None:
    """Show one service: every port, and the back ends that answer there."""
    wanted = read_name(SERVICE, name, namespace)

    def read(agent: Agent) -> list[Row]:
        return [
            row for row in get_rows(agent, "/service") if (row["namespace"], row["name"]) == wanted
        ]

    answers, failure = ask_all(opts, read)
    services = [row for _, rows in answers for row in rows]
    if not services:
        raise CliError(
            EXIT_NOT_FOUND,
            f"get service {'/'.join(wanted)}: this node knows none",
            "podwire service list; podwire config (translate_services)",
        )
    show_one(services[0], opts.style, lambda: _describe(services[0]), _name(services[0]))
    if failure is not None:
        raise failure


def _name(row: Row) -> str:
    return f"{row['namespace']}/{row['name']}"


def _addresses(row: Row) -> str:
    return ",".join(dict.fromkeys(port["address"] for port in row["ports"])) or "-"


def _ports(row: Row) -> str:
    ports = (f"{port['port']}/{port['protocol']}" for port in row["ports"])
    return ",".join(dict.fromkeys(ports)) or "-"


def _count(row: Row) -> int:
    return len({back_end for port in row["ports"] for back_end in port["backEnds"]})


def _back_ends(row: Row) -> str:
    return (
        ",".join(dict.fromkeys(back_end for port in row["ports"] for back_end in port["backEnds"]))
        or "-"
    )


def _describe(row: dict[str, Any]) -> Iterator[str]:
    by = "translated by the programs" if row["translated"] else "left to the stack"
    yield f"service {_name(row)}, {by}"
    if row["problem"]:
        yield f"problem: {row['problem']}"
    for port in row["ports"]:
        left = ", left to the stack" if port["left"] else ""
        yield f"{port['address']} {port['port']}/{port['protocol']}{left}"
        for back_end in port["backEnds"]:
            yield f"  {back_end}"


_COLUMNS = [
    *fields("namespace", "name"),
    Column("ADDRESSES", _addresses),
    Column("PORTS", _ports),
    Column("BACK ENDS", _count),
    Column("BY", lambda row: "podwire" if row["translated"] else "stack"),
    Column("PROBLEM", key("problem")),
    Column("ENDPOINTS", _back_ends, wide=True),
]
