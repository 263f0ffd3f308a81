"""`podwire cni`: install, uninstall and show by hand the files that a container runtime needs.

An agent with the setting `cni_install` does the same by itself. The agent's settings say where the directories and the
socket are.
"""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from podwire.cli import client
from podwire.cli.client import EXIT_CONFLICT, EXIT_NOT_SO, EXIT_UNREACHABLE, CliError
from podwire.cli.options import Common, common, read_agent_settings
from podwire.cli.output import GREEN, RED, colour, show_one
from podwire.model.installation.files import CONFLIST_FILE, LAUNCHER_FILE

if TYPE_CHECKING:
    from podwire.cni.directories import RuntimeDirectories
    from podwire.control.installation.steps import Installation

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Place:
    """Which runtime's directories are meant, and which agent serves there."""

    conf_dir: Path
    bin_dir: Path
    cni_socket: Path
    api_socket: Path

    def path(self, name: str) -> Path:
        """Where one of the files belongs."""
        return (self.conf_dir if name == CONFLIST_FILE else self.bin_dir) / name


def _placed(command: _F) -> _F:
    """Add the options that name the directories; the command gets them as one Place."""

    @click.option("--conf-dir", metavar="D", help="Where the runtime reads networks.")
    @click.option("--bin-dir", metavar="D", help="Where the runtime looks for plugins.")
    @click.option("--config", metavar="FILE", help="The agent's settings; as for podwire-agent.")
    @functools.wraps(command)
    def with_place(
        conf_dir: str | None, bin_dir: str | None, config: str | None, **rest: Any
    ) -> Any:
        return command(place=_find_place(conf_dir, bin_dir, config), **rest)

    return with_place  # type: ignore[return-value]


def _find_place(conf_dir: str | None, bin_dir: str | None, config: str | None) -> Place:
    flags = [("--cni-conf-dir", conf_dir), ("--cni-bin-dir", bin_dir)]
    given = tuple(word for name, value in flags if value is not None for word in (name, value))
    settings = read_agent_settings(config, given)
    files = settings.files
    return Place(
        settings.cni.cni_conf_dir, settings.cni.cni_bin_dir, files.cni_socket, files.api_socket
    )


def _open_directories(place: Place) -> "RuntimeDirectories":
    from podwire.cni.directories import RuntimeDirectories  # noqa: PLC0415 (start-up time)

    return RuntimeDirectories(place.conf_dir, place.bin_dir)


def _make_installation(place: Place) -> "Installation":
    from podwire.cni.directories import read_launcher  # noqa: PLC0415 (start-up time)
    from podwire.control.installation.steps import Installation  # noqa: PLC0415

    return Installation(_open_directories(place), read_launcher(), place.cni_socket)


@click.group(epilog="Example: podwire cni status")
def cni() -> None:
    """What container runtimes find of podwire: launcher and network."""


@cni.command(epilog="Example: podwire cni install --conf-dir /etc/cni/net.d --bin-dir /opt/cni/bin")
@_placed
@common
def install(opts: Common, place: Place) -> None:
    """Install launcher and network, or renew what differs.

    The network comes last, and only when the agent would serve an ADD; otherwise nothing is installed. A plugin
    `loopback` is provided where the runtime has none.
    """
    refusal = _ask_status(place)
    if refusal:
        raise CliError(
            EXIT_UNREACHABLE,
            f"install: an ADD would fail now: {refusal}; nothing was installed",
            "start podwire-agent, see `podwire status`, then install again",
        )
    written = _make_installation(place).install(serves=lambda: True)
    _show_changes(opts, place, "installed", written, "everything is installed already")


@cni.command(epilog="Example: podwire cni uninstall")
@_placed
@common
def uninstall(opts: Common, place: Place) -> None:
    """Remove network and launcher.

    Remove the pods first: without the network a runtime cannot detach them. Then stop the agent, uninstall, and run
    `podwire cleanup --all --yes`.
    """
    from podwire.control.installation import steps  # noqa: PLC0415 (start-up time)

    if _agent_installs(place):
        raise CliError(
            EXIT_CONFLICT,
            f"uninstall: the agent at {str(place.api_socket)!r} would install again at once (cni_install)",
            "stop the agent first; running pods are not affected",
        )
    removed = steps.uninstall(_open_directories(place))
    _show_changes(opts, place, "removed", removed, "nothing of podwire is there")


@cni.command(epilog="Example: podwire cni status -o json")
@_placed
@common
def status(opts: Common, place: Place) -> None:
    """Show what is installed and what keeps it from being used; exit code 1 if a runtime would not use podwire."""
    from podwire.control.installation import steps  # noqa: PLC0415 (start-up time)

    installation = _make_installation(place)
    files = installation.directories.read()
    states = installation.states(files)
    obstacles = list(steps.find_obstacles(files))
    complete = installation.is_complete(files)
    document = {
        "installed": complete,
        "files": [
            {"name": name, "path": str(place.path(name)), "state": state}
            for name, state in states.items()
        ],
        "obstacles": obstacles,
    }

    def lines() -> list[str]:
        good = (steps.INSTALLED, steps.FOREIGN)
        return [
            *(
                f"{place.path(name)}: {colour(state, GREEN if state in good else RED)}"
                for name, state in states.items()
            ),
            *(f"Obstacle: {colour(obstacle, RED)}" for obstacle in obstacles),
        ]

    show_one(document, opts.style, lines)
    if obstacles or not complete:
        raise SystemExit(EXIT_NOT_SO)


def _ask_status(place: Place) -> str:
    """Do CNI STATUS as a runtime would; gives why an ADD would fail, "" when it would succeed."""
    from podwire.cni.launcher import call  # noqa: PLC0415 (start-up time)

    network = {
        "cniVersion": "1.1.0",
        "name": "podwire",
        "type": LAUNCHER_FILE,
        "socket": str(place.cni_socket),
    }
    answer = call({"CNI_COMMAND": "STATUS"}, json.dumps(network).encode())
    return "" if answer.exit_status == 0 else str(json.loads(answer.stdout)["msg"])


def _agent_installs(place: Place) -> bool:
    try:
        settings = client.request(str(place.api_socket), "GET", "/config")["settings"]
    except CliError as error:
        if error.exit_code == EXIT_UNREACHABLE:
            return False
        raise
    return bool(settings["cni_install"]["value"])


def _show_changes(opts: Common, place: Place, verb: str, names: list[str], none: str) -> None:
    paths = [str(place.path(name)) for name in names]
    lines = [f"{verb} {path}" for path in paths] or [none]
    show_one({verb: paths}, opts.style, lambda: lines, "\n".join(paths))
