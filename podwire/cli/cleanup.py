"""`podwire cleanup`: remove what podwire left on this machine.

It needs no agent, and refuses to work while one runs. The settings of the agent say where its files and pins are, so
the command reads them exactly as the agent does.
"""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import click

from podwire.cli.client import EXIT_USAGE, CliError
from podwire.cli.options import Common, common, read_agent_settings
from podwire.cli.output import show_one
from podwire.model.config import AgentConfig, FileSettings

_STATE_FILES = ("journal.db*", "remembered.db*")
_RUN_FILES = ("cni.sock", "api.sock", "alive", "spool", "endpoints")


@click.command(
    epilog="Example: podwire cleanup --all --config /etc/podwire/agent.toml --yes",
    context_settings={"ignore_unknown_options": True},
)
@click.option("--all", "everything", is_flag=True, help="Also of this machine's own node.")
@click.option(
    "--yes", is_flag=True, help="Do it; without this option only say what would be removed."
)
@click.option("--config", metavar="FILE", help="The agent's settings; as for podwire-agent.")
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, metavar="[--KEY VALUE]...")
@common
def cleanup(
    opts: Common, everything: bool, yes: bool, config: str | None, settings: tuple[str, ...]
) -> None:
    """Remove labs that are not up any more; with --all every lab, device, route, table and pin of ours.

    With --all, running pods lose their network. What the agent remembers and has in its run directory goes as well:
    nothing of what it tells of exists afterwards. Where that is, the agent's settings say: file, environment and
    flags (--state-dir, --bpf-dir, --run-dir, ...) are those of podwire-agent.
    """
    from podwire.lab import labs  # noqa: PLC0415 (start-up time)

    agent = read_agent_settings(config, settings) if everything else AgentConfig()
    if (config or settings) and not everything:
        given = ("--config", *settings)[config is None]
        raise CliError(EXIT_USAGE, f"{given}: no node of this machine is meant", "say --all, too")
    leftovers = labs.list_leftovers(running_too=everything)
    removed = [f"lab {name}" for name in leftovers]
    if everything and not yes:
        removed.extend(_survey_own_node(agent.files))
    if yes:
        # The locks first: a command that is refused removes nothing, no lab either.
        with _stopped_agent(agent) if everything else nullcontext():
            for name in leftovers:
                labs.down(name, progress=lambda _line: None)
            if everything:
                removed.extend(_remove_own_node(agent.files))
    document = {"done": yes, "removed": removed}
    verb = "removed" if yes else "would remove"
    lines = [f"{verb} {name}" for name in removed] or ["nothing of podwire is here"]
    show_one(document, opts.style, lambda: lines)
    if removed and not yes:
        raise CliError(EXIT_USAGE, "nothing was removed", "say --yes to do it")


def _survey_own_node(files: FileSettings) -> list[str]:
    from podwire.datapath.survey import read_hooks, survey_leftovers  # noqa: PLC0415

    _, hooks = _read_noted(files.state_dir / "journal.db")
    return [
        *survey_leftovers(files.bpf_dir, read_hooks(hooks)),
        *(str(path) for path in _list_files(files)),
    ]


def _remove_own_node(files: FileSettings) -> list[str]:
    from podwire.datapath.survey import (  # noqa: PLC0415
        read_hooks,
        remove_everything,
        restore_settings,
    )

    settings, hooks = _read_noted(files.state_dir / "journal.db")
    removed = remove_everything(files.bpf_dir, read_hooks(hooks))
    removed.extend(restore_settings(settings))
    for path in _list_files(files):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
        removed.append(str(path))
    return removed


@contextmanager
def _stopped_agent(config: AgentConfig) -> Iterator[None]:
    """Keep an agent from running; Conflict when one does, under these directories or this node's name."""
    from podwire.journal.lock import locked_node_name, locked_state_directory  # noqa: PLC0415
    from podwire.model.errors import Conflict  # noqa: PLC0415

    # The locks are held until all is removed, because an agent that starts in between would put back what was removed,
    # and its programs would then lose their pins.
    with ExitStack() as locks:
        try:
            for directory in (config.files.state_dir, config.files.run_dir):
                if directory.exists():
                    locks.enter_context(locked_state_directory(directory))
            locks.enter_context(locked_node_name(config.node.node_name))
        except Conflict as held:
            raise Conflict(
                held.message, hint="nothing was removed; stop that agent first"
            ) from held
        yield


def _list_files(files: FileSettings) -> list[Path]:
    return [
        path
        for directory, patterns in ((files.state_dir, _STATE_FILES), (files.run_dir, _RUN_FILES))
        for pattern in patterns
        for path in sorted(directory.glob(pattern))
    ]


def _read_noted(path: Path) -> tuple[str, str]:
    """Give what the agent noted of settings and of hooks; a journal that cannot be read any more tells nothing and is
    removed all the same."""
    from podwire.journal.records import (  # noqa: PLC0415
        HOST_SETTINGS_FACT,
        UNDERLAY_HOOKS_FACT,
        SqliteJournal,
    )
    from podwire.model.errors import PodwireError  # noqa: PLC0415

    if not path.exists():
        return "", ""
    try:
        journal = SqliteJournal(path)
    except PodwireError as error:
        click.echo(
            f"warning: {error.message}; settings of the host and clsact queues stay", err=True
        )
        return "", ""
    try:
        return journal.read_fact(HOST_SETTINGS_FACT), journal.read_fact(UNDERLAY_HOOKS_FACT)
    finally:
        journal.close(folds=False)  # without --yes the agent may be running
