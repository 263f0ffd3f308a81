"""`podwire cleanup`: remove what podwire left on this machine. Needs no agent, and refuses while one runs."""

from pathlib import Path

import click

from podwire.cli.client import EXIT_USAGE, CliError
from podwire.cli.options import Common, common
from podwire.cli.output import show_one

_STATE_DIR = "/var/lib/podwire"
_BPF_DIR = "/sys/fs/bpf/podwire"


@click.command(epilog="Example: podwire cleanup --all --yes")
@click.option("--all", "everything", is_flag=True, help="Also of this machine's own node.")
@click.option("--yes", is_flag=True, help="Do it; without it only say what would be removed.")
@click.option("--state-dir", default=_STATE_DIR, show_default=True, metavar="DIR")
@click.option("--bpf-dir", default=_BPF_DIR, show_default=True, metavar="DIR")
@common
def cleanup(opts: Common, everything: bool, yes: bool, state_dir: str, bpf_dir: str) -> None:
    """Remove labs that are not up any more; with --all every lab, device, route, table and pin of ours.

    With --all, running pods lose their network. Records in the state directory are removed as well: nothing of
    what they tell of exists afterwards.
    """
    from podwire.lab import labs  # noqa: PLC0415 (start-up time)

    found = labs.list_leftovers(running_too=everything)
    removed = [f"lab {name}" for name in found]
    if everything:
        from podwire.datapath.survey import survey_leftovers  # noqa: PLC0415

        removed.extend(survey_leftovers(Path(bpf_dir)))
    if yes:
        for name in found:
            labs.down(name, progress=lambda _line: None)
        if everything:
            removed = [f"lab {name}" for name in found]
            removed.extend(_remove_own_node(Path(state_dir), Path(bpf_dir)))
    document = {"done": yes, "removed": removed}
    verb = "removed" if yes else "would remove"
    lines = [f"{verb} {one}" for one in removed] or ["nothing of ours is here"]
    show_one(document, opts.style, lambda: lines)
    if removed and not yes:
        raise CliError(EXIT_USAGE, "nothing was removed", "say --yes to do it")


def _remove_own_node(state_dir: Path, bpf_dir: Path) -> list[str]:
    from podwire.datapath.survey import remove_everything, restore_settings  # noqa: PLC0415
    from podwire.journal.lock import locked_state_directory  # noqa: PLC0415

    if not state_dir.exists():
        return remove_everything(bpf_dir)
    with locked_state_directory(state_dir):
        removed = remove_everything(bpf_dir)
        removed.extend(restore_settings(_read_noted_settings(state_dir / "journal.db")))
        for path in sorted((*state_dir.glob("journal.db*"), *state_dir.glob("remembered.db*"))):
            path.unlink()
            removed.append(str(path))
    return removed


def _read_noted_settings(path: Path) -> str:
    """Give what the agent noted; a journal that cannot be read any more tells nothing and is removed all the same."""
    from podwire.journal.records import HOST_SETTINGS_FACT, SqliteJournal  # noqa: PLC0415
    from podwire.model.errors import PodwireError  # noqa: PLC0415

    if not path.exists():
        return ""
    try:
        journal = SqliteJournal(path)
    except PodwireError as error:
        click.echo(f"warning: {error.message}; settings of the host stay as they are", err=True)
        return ""
    try:
        return journal.read_fact(HOST_SETTINGS_FACT)
    finally:
        journal.close()
