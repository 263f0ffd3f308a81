"""`podwire doctor`: can podwire work on this machine, and if not, what to do. Needs no agent."""

import click

from podwire.cli.client import EXIT_NOT_SO
from podwire.cli.options import Common, common, table
from podwire.cli.output import GREEN, RED, YELLOW, Column, Row, colour, key, show_rows

_COLOURS = {"ok": GREEN, "warning": YELLOW, "failure": RED}


@click.command(epilog="Example: podwire doctor -o json")
@table
@common
def doctor(opts: Common) -> None:
    """Look at kernel, host and files; exit code 1 when something required is missing."""
    from podwire.datapath.survey import survey_host, survey_kernel  # noqa: PLC0415 (start-up time)

    rows: list[Row] = [
        {
            "check": finding.check,
            "level": finding.level,
            "message": finding.message,
            "hint": finding.hint,
        }
        for finding in [*survey_kernel(), *survey_host()]
    ]
    columns = [
        Column("CHECK", key("check")),
        Column("RESULT", lambda row: colour(row["level"], _COLOURS[row["level"]])),
        Column("FOUND", key("message")),
        Column("WHAT TO DO", key("hint")),
    ]
    show_rows(rows, columns, opts.style, lambda row: f"{row['level']} {row['check']}")
    if any(row["level"] == "failure" for row in rows):
        raise SystemExit(EXIT_NOT_SO)
