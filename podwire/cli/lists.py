"""Lists over one or several agents: read, marked with their node, shown, and followed.

Used by every command that lists. When an agent of a lab does not answer, the lists of the others are shown, and the
command then fails with exit code 3.
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from podwire.cli import client
from podwire.cli.client import EXIT_UNREACHABLE, CliError
from podwire.cli.options import Agent, Common
from podwire.cli.output import Column, Row, Style, key, show_document, show_rows

NODE = "node"
_WATCH_S = 1.0

_T = TypeVar("_T")


def ask_all(
    opts: Common, ask: Callable[[Agent], _T]
) -> tuple[list[tuple[Agent, _T]], CliError | None]:
    """Ask every agent that is meant; gives the answers, and what to fail with when some were out of reach.

    Raises CliError when none answered, or when one refused.
    """
    answers: list[tuple[Agent, _T]] = []
    away: list[CliError] = []
    for agent in opts.agents():
        try:
            answers.append((agent, ask(agent)))
        except CliError as error:
            if error.exit_code != EXIT_UNREACHABLE:
                raise
            away.append(error)
    if not away:
        return answers, None
    message = "; ".join(error.message for error in away)
    failure = CliError(EXIT_UNREACHABLE, message, away[0].hint)
    if not answers:
        raise failure
    return answers, failure


def get_rows(agent: Agent, resource: str) -> list[Row]:
    """Ask an agent for a list."""
    rows: list[Row] = client.request(agent.socket, "GET", resource)
    return rows


def marked(agent: Agent, rows: Sequence[Row]) -> list[Row]:
    """Say of each row which node of the lab it is from."""
    return [{NODE: agent.node, **row} for row in rows] if agent.node else list(rows)


def show_list(
    opts: Common,
    read: Callable[[Agent], Sequence[Row]],
    columns: Sequence[Column],
    name: Callable[[Row], str],
) -> None:
    """Show what `read` gives of every agent; with `--watch` go on with what changes."""

    def rows() -> tuple[list[Row], CliError | None]:
        answers, failure = ask_all(opts, read)
        return [row for agent, part in answers for row in marked(agent, part)], failure

    show_watched(opts, rows, columns, name)


def show_watched(
    opts: Common,
    read: Callable[[], tuple[list[Row], CliError | None]],
    columns: Sequence[Column],
    name: Callable[[Row], str],
    *,
    identify: Callable[[Row], object] | None = None,
) -> None:
    """Show rows once, or with `--watch` again whenever one is new, changed or gone.

    `identify` tells which rows are the same thing at two times; by default the name and the node do.
    """
    rows, failure = read()
    shown = with_node_column(opts, rows, columns)
    if not opts.watch:
        show_rows(rows, shown, opts.style, name)
        if failure is not None:
            raise failure
        return
    style = opts.style
    known: dict[object, Row] = {}
    which = identify or (lambda row: (row.get(NODE), name(row)))
    while True:
        current = {which(row): row for row in rows}
        changed = [row for mark, row in current.items() if known.get(mark) != row]
        gone = [{**row, "gone": True} for mark, row in known.items() if mark not in current]
        if changed or gone or not known:
            _show_changes(changed, gone, shown, style, name)
            style = style.without_headers()
        known = current
        time.sleep(_WATCH_S)
        rows, failure = read()
        if failure is not None:
            raise failure


def _show_changes(
    changed: Sequence[Row],
    gone: Sequence[Row],
    columns: Sequence[Column],
    style: Style,
    name: Callable[[Row], str],
) -> None:
    """Show one round of a watch: each changed row as a document of its own, or a few lines of the table."""
    if style.for_programs:
        for row in (*changed, *gone):
            show_document(row, style.form, more=True)
        return
    show_rows(changed, columns, style, name)
    for row in gone:
        print(f"gone: {name(row)}")
    print(end="", flush=True)


def with_node_column(opts: Common, rows: Sequence[Row], columns: Sequence[Column]) -> list[Column]:
    """Lead with the node where several nodes were asked."""
    if opts.node is None and any(NODE in row for row in rows):
        return [Column("NODE", key(NODE)), *columns]
    return list(columns)
