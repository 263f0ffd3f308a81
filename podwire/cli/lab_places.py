"""Which lab, node and pod a command of `podwire lab` means: options, arguments and their completion.

Used by `cli.lab` and `cli.lab_faults`. Modules that are slow to import are imported inside functions.
"""

import sys
from collections.abc import Callable

import click

from podwire.cli.options import Common


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def progress_of(opts: Common) -> Callable[[str], None]:
    return (lambda _line: None) if opts.style.quiet else say


def choose(name: str | None) -> str:
    from podwire.lab.state import choose_lab  # noqa: PLC0415 (start-up time)

    return choose_lab(name)


LAB_OPTION = click.option(
    "--lab", metavar="LAB", envvar="PODWIRE_LAB", help="The lab (PODWIRE_LAB)."
)


def complete_nodes(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    return [name for name in _names(ctx)[0] if name.startswith(incomplete)]


def complete_places(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    nodes, pods = _names(ctx)
    return [name for name in (*pods, *nodes, "world") if name.startswith(incomplete)]


def _names(ctx: click.Context) -> tuple[list[str], list[str]]:
    """Name nodes and pods of the lab that is meant; none when that cannot be said."""
    from podwire.lab.state import read_state  # noqa: PLC0415
    from podwire.model.errors import PodwireError  # noqa: PLC0415

    try:
        state = read_state(choose(ctx.params.get("lab")))
    except PodwireError:
        return [], []
    pods = [pod.full_name.removeprefix("default/") for pod in state.pods]
    return [node.name for node in state.plan.nodes], pods


NODE_ARGUMENT = click.argument("name", metavar="NODE", shell_complete=complete_nodes)
POD_ARGUMENT = click.argument("pod", shell_complete=complete_places)
