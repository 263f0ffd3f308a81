"""`podwire status`, `config` and `version`."""

import time
from collections.abc import Iterator
from typing import Any

import click

from podwire import __version__
from podwire.cli import client
from podwire.cli.client import EXIT_NOT_SO, EXIT_UNREACHABLE, EXIT_USAGE, CliError
from podwire.cli.lists import ask_all, show_list
from podwire.cli.options import Agent, Common, common, table
from podwire.cli.output import (
    GREEN,
    RED,
    YELLOW,
    Column,
    Row,
    cell,
    colour,
    fields,
    key,
    readable_count,
    show_one,
)

_POLL_S = 0.1


@click.command(epilog="Example: podwire status --wait --timeout 30 && podwire status -o json")
@click.option("--brief", is_flag=True, help="One line.")
@click.option("--verbose", is_flag=True, help="All checks, also those that are fine.")
@click.option("--wait", is_flag=True, help="Wait until the agent is ready.")
@click.option(
    "--timeout", type=float, default=60.0, show_default=True, metavar="S", help="Seconds."
)
@common
def status(opts: Common, brief: bool, verbose: bool, wait: bool, timeout: float) -> None:
    """Show the agent as a whole; exit code 1 when it is not ready."""
    deadline = time.monotonic() + timeout
    answers, failure = ask_all(
        opts, lambda agent: _wait_ready(agent, deadline) if wait else _read(agent)
    )
    documents = [answer for _, answer in answers]
    document: Any = documents[0] if len(documents) == 1 else documents
    lines = (
        line
        for document in documents
        for line in (_brief(document) if brief else _long(document, verbose))
    )
    names = "\n".join(str(document.get("node")) for document in documents)
    show_one(document, opts.style, lambda: lines, names)
    if failure is not None:
        raise failure
    if not all(document.get("ready") for document in documents):
        raise SystemExit(EXIT_NOT_SO)


def _read(agent: Agent) -> dict[str, Any]:
    document: dict[str, Any] = client.request(agent.socket, "GET", "/status")
    return document


def _wait_ready(agent: Agent, deadline: float) -> dict[str, Any]:
    while True:
        try:
            document = _read(agent)
            if document.get("ready") or time.monotonic() > deadline:
                return document
        except CliError as error:
            if error.exit_code != EXIT_UNREACHABLE or time.monotonic() > deadline:
                raise
        time.sleep(_POLL_S)


def _brief(document: dict[str, Any]) -> Iterator[str]:
    endpoints = document.get("endpoints", {})
    yield (
        f"{document.get('node')}: {_ready(document)}, {endpoints.get('total', 0)} endpoints,"
        f" {len(document.get('warnings', ()))} warnings"
    )


def _long(document: dict[str, Any], verbose: bool) -> Iterator[str]:
    datapath, store = document.get("datapath", {}), document.get("store", {})
    endpoints = document.get("endpoints", {})
    states = ", ".join(f"{n} {state}" for state, n in endpoints.get("byState", {}).items() if n)
    yield f"Node:       {document.get('node')} ({_ready(document)}), podwire {document.get('version')}"
    yield f"Running:    since {document.get('started')}, pid {document.get('pid')}"
    yield f"Store:      {store.get('kind')}, {'ok' if store.get('ok') else 'out of reach'}"
    yield (
        f"Datapath:   {datapath.get('mode')}, programs {str(datapath.get('programs'))[:12]},"
        f" map layout {datapath.get('abiVersion')}, MTU {datapath.get('mtu')}"
    )
    yield f"Endpoints:  {endpoints.get('total', 0)}" + (f" ({states})" if states else "")
    for usage in document.get("ipam", {}).get("ranges", ()):
        yield f"Addresses:  {usage['cidr']}: {usage['used']} of {readable_count(usage['capacity'])} used"
    cluster = document.get("cluster", {})
    yield (
        f"Cluster:    {cluster.get('reached', 0)} of {cluster.get('nodes', 0)} other nodes reached,"
        f" {cluster.get('encrypted', 0)} encrypted, routing {cluster.get('routing')},"
        f" {cluster.get('pods', 0)} addresses of pods"
    )
    for check in document.get("checks", ()):
        if verbose or not check["ok"]:
            word = colour("ok", GREEN) if check["ok"] else colour("failing", RED)
            yield f"Check:      {check['name']}: {word} {check.get('message', '')}".rstrip()
    for warning in document.get("warnings", ()):
        yield f"Warning:    {colour(warning, YELLOW)}"


def _ready(document: dict[str, Any]) -> str:
    return colour("ready", GREEN) if document.get("ready") else colour("not ready", RED)


@click.command(epilog="Example: podwire config -o wide")
@table
@common
def config(opts: Common) -> None:
    """Show the settings in force and where each comes from."""

    def read(agent: Agent) -> list[Row]:
        settings = client.request(agent.socket, "GET", "/config")["settings"]
        return [{"key": name, **entry} for name, entry in settings.items()]

    columns = [
        *fields("key", "value", "source"),
        Column("RELOADABLE", key("reloadable"), wide=True),
    ]
    show_list(opts, read, columns, lambda row: f"{row['key']}={cell(row['value'])}")


@click.command(epilog="Example: podwire version -o json")
@common
def version(opts: Common) -> None:
    """Show the version of this command and, where one answers, of the agent."""
    document: dict[str, Any] = {"client": __version__, "agent": None}
    try:
        answers, _ = ask_all(opts, _read)
        versions = sorted({answer["version"] for _, answer in answers})
        document["agent"] = ", ".join(versions)
    except CliError as error:
        # Several labs are no reason not to say what this command is.
        if error.exit_code not in (EXIT_UNREACHABLE, EXIT_USAGE):
            raise
    lines = [f"podwire {__version__}", f"agent   {document['agent'] or 'not running'}"]
    show_one(document, opts.style, lambda: lines, __version__)
