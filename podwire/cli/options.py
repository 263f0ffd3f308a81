"""Options that every command has, and which agents a command means.

`--agent` names a socket; `--lab` and `--node` name nodes of a lab. Without any of them the command means the machine's
agent, or the only lab if the machine has no agent.
"""

import functools
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from podwire.cli.client import EXIT_NOT_FOUND, EXIT_USAGE, CliError
from podwire.cli.output import FORMATS, Style

if TYPE_CHECKING:
    from podwire.model.config import AgentConfig

DEFAULT_SOCKET = "/run/podwire/api.sock"
LAB_ROOT = Path("/run/podwire/lab")

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Agent:
    """One agent to ask: its socket, and, in a lab, its node."""

    socket: str
    node: str = ""


@dataclass(frozen=True)
class Common:
    """What the options of every command say."""

    style: Style
    agents: Callable[[], Sequence[Agent]]
    lab: str | None = None
    """The lab that was named, if any."""
    node: str | None = None
    """The node that was named, if any."""
    watch: bool = False


def common(command: _F) -> _F:
    """Add the options of every command; the command gets them as one Common."""

    @functools.wraps(command)
    def with_common(
        output: str,
        quiet: bool,
        agent: str | None,
        lab: str | None,
        node: str | None,
        no_headers: bool = False,
        watch: bool = False,
        **rest: Any,
    ) -> Any:
        style = Style(output, headers=not no_headers, quiet=quiet)
        chosen = lab or os.environ.get("PODWIRE_LAB") or None
        agents = functools.partial(find_agents, agent, lab, node)
        return command(Common(style, agents, chosen, node, watch), **rest)

    for option in (
        click.option(
            "-o",
            "--output",
            type=click.Choice(FORMATS),
            default="table",
            help="Output format.",
        ),
        click.option("-q", "--quiet", is_flag=True, help="Only names, or only the exit code."),
        click.option("--agent", metavar="SOCKET", help="The agent's api.sock (PODWIRE_AGENT)."),
        click.option("--lab", metavar="LAB", help="A lab (PODWIRE_LAB)."),
        click.option("--node", metavar="NODE", help="A node of the lab."),
    ):
        with_common = option(with_common)
    return with_common  # type: ignore[return-value]


def table(command: _F) -> _F:
    """Add the option of what prints a table."""
    return click.option("--no-headers", is_flag=True, help="Leave the header line out.")(command)


def listing(command: _F) -> _F:
    """Add the options of lists."""
    watch = click.option("-w", "--watch", is_flag=True, help="Continue, and show what changes.")
    return watch(table(command))


def namespaced(command: _F) -> _F:
    """Add the options of lists of what is in namespaces; the command gets `namespace`, None = all of them."""

    @functools.wraps(command)
    def in_namespaces(namespace: str | None, all_namespaces: bool, **rest: Any) -> Any:
        if namespace and all_namespaces:
            raise CliError(EXIT_USAGE, "-n and -A exclude each other", "leave one of them out")
        return command(namespace=namespace, **rest)

    for option in (
        click.option("-A", "--all-namespaces", is_flag=True, help="All namespaces (the default)."),
        click.option("-n", "--namespace", metavar="NS", help="Only this namespace."),
    ):
        in_namespaces = option(in_namespaces)
    return in_namespaces  # type: ignore[return-value]


def selecting(command: _F) -> _F:
    """Add the option of lists of what has labels."""
    return click.option(
        "-l", "--selector", metavar="SELECTOR", help="k=v, k!=v, k, !k, joined by commas."
    )(command)


def find_agents(agent: str | None, lab: str | None, node: str | None) -> list[Agent]:
    """Find the sockets that the options mean."""
    agent = agent or (None if lab else os.environ.get("PODWIRE_AGENT"))
    if agent:
        return [Agent(agent)]
    lab = lab or os.environ.get("PODWIRE_LAB") or None
    if lab is None and node is None and Path(DEFAULT_SOCKET).exists():
        return [Agent(DEFAULT_SOCKET)]
    labs = sorted(path.parent.name for path in LAB_ROOT.glob("*/lab.json"))
    if lab is None:
        if len(labs) > 1:
            raise CliError(
                EXIT_USAGE, f"choose a lab: there are {', '.join(labs)}", "say --lab LAB"
            )
        if not labs:
            return [_agent_of_machine(node)]
        lab = labs[0]
    if lab not in labs:
        raise CliError(
            EXIT_NOT_FOUND,
            f"find lab {lab!r}: there is {', '.join(labs) or 'none'}",
            "podwire lab up --name LAB, or name another with --lab",
        )
    return _lab_agents(lab, node)


def read_agent_settings(config: str | None, flags: Sequence[str]) -> "AgentConfig":
    """Read the settings of this machine's agent as it does: from the file, the environment and flags."""
    from podwire.model.config.files import settle_from_file  # noqa: PLC0415 (start-up time)
    from podwire.model.config.sources import parse_arguments  # noqa: PLC0415

    parsed = parse_arguments(flags)
    parsed.config = Path(config) if config is not None else None
    return settle_from_file(parsed, os.environ, socket.gethostname()).config


def _agent_of_machine(node: str | None) -> Agent:
    if node is not None:
        raise CliError(
            EXIT_NOT_FOUND,
            f"find node {node!r}: no lab is up",
            "leave --node out, or podwire lab up",
        )
    return Agent(DEFAULT_SOCKET)


def _lab_agents(lab: str, node: str | None) -> list[Agent]:
    nodes = sorted(
        (path.parent.name for path in (LAB_ROOT / lab).glob("*/agent.toml")),
        key=lambda name: (len(name), name),
    )
    if node is not None and node not in nodes:
        raise CliError(
            EXIT_NOT_FOUND,
            f"find node {node!r}: lab {lab!r} has {', '.join(nodes)}",
            "say --node with one of them",
        )
    chosen = [node] if node is not None else nodes
    return [Agent(str(LAB_ROOT / lab / name / "api.sock"), name) for name in chosen]
