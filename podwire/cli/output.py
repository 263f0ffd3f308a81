"""What people and programs see: tables, JSON and YAML.

Used by every command. A column is a header and a function of the row; `wide` columns are shown with `-o wide`. Colour
appears only on a terminal that wants it, and output never goes through a pager.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

FORMATS = ("table", "wide", "name", "json", "yaml", "jsonl")

Row = dict[str, Any]

_COUNT_IN_FULL: Final = 10**9

_PAINT = re.compile("\033\\[[0-9]*m")


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    header: str
    value: Callable[[Row], Any]
    wide: bool = False


@dataclass(frozen=True)
class Style:
    """How a command shows things."""

    form: str = "table"
    headers: bool = True
    quiet: bool = False

    @property
    def for_programs(self) -> bool:
        """Whether the form is one that programs read whole."""
        return self.form in ("json", "yaml", "jsonl")

    def without_headers(self) -> "Style":
        """Give the style for what follows a first part."""
        return replace(self, headers=False)


def count(name: str) -> Callable[[Row], str]:
    """Give the function that reads a field which counts something."""
    return lambda row: readable_count(row.get(name))


def readable_count(value: Any) -> str:
    """Write a count: in full, or, where it is one of IPv6 addresses that nobody would read, as 1.8e19."""
    if isinstance(value, int) and value >= _COUNT_IN_FULL:
        return f"{value:.1e}".replace("e+", "e")
    return cell(value)


def key(name: str) -> Callable[[Row], Any]:
    """Give the function that reads a field."""
    return lambda row: row.get(name)


def fields(*names: str, wide: bool = False) -> list[Column]:
    """Give the columns of fields that are shown as they are, each under its own name."""
    return [Column(name.upper(), key(name), wide) for name in names]


def show_rows(
    rows: Sequence[Row], columns: Sequence[Column], style: Style, name: Callable[[Row], str]
) -> None:
    """Show a list."""
    if style.form == "jsonl":
        for row in rows:
            show_document(row, "jsonl")
    elif style.for_programs:
        show_document(rows, style.form)
    elif style.form == "name" or style.quiet:
        for row in rows:
            print(name(row))
    else:
        print_table(rows, columns, style)


def show_one(
    document: Any, style: Style, text: Callable[[], Iterable[str]], name: str = ""
) -> None:
    """Show one document; `text` writes it for people, `name` is what `-o name` prints."""
    if style.for_programs:
        show_document(document, style.form)
    elif style.form == "name":
        if name:
            print(name)
    elif not style.quiet:
        for line in text():
            print(line)


def show_document(document: Any, form: str, *, more: bool = False) -> None:
    """Write a document for programs; `more` = it is one of a stream of documents."""
    if form == "json":
        print(json.dumps(document, indent=2, ensure_ascii=False), flush=more)
    elif form == "jsonl":
        print(json.dumps(document, ensure_ascii=False), flush=more)
    else:
        print(("---\n" if more else "") + _write_yaml(document), end="", flush=more)


def _write_yaml(document: Any) -> str:
    """Write YAML that every reader takes for what it is."""
    from podwire.store.manifest import dump  # noqa: PLC0415 (start-up time)

    return dump([document])


def print_table(rows: Sequence[Row], columns: Sequence[Column], style: Style) -> None:
    """Write a table as wide as its content."""
    shown = [column for column in columns if style.form == "wide" or not column.wide]
    if not shown:
        return
    lines = [[cell(column.value(row)) for column in shown] for row in rows]
    heads = [[column.header for column in shown]] if style.headers else []
    widths = [
        max((_width(line[at]) for line in heads + lines), default=0) for at in range(len(shown))
    ]
    for line in heads + lines:
        padded = (
            text + " " * (width - _width(text)) for text, width in zip(line, widths, strict=True)
        )
        print("   ".join(padded).rstrip())


def _width(text: str) -> int:
    """Give how many places a text takes; paint takes none."""
    return len(_PAINT.sub("", text))


def cell(value: Any) -> str:
    """Write one value into a table."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ",".join(str(item) for item in value) or "-"
    return str(value)


def colour(text: str, code: int) -> str:
    """Paint text where a person with a colour terminal reads it."""
    # Set to anything but nothing, NO_COLOR means no colour (no-color.org).
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty():
        return text
    return f"\033[{code}m{text}\033[0m"


GREEN, RED, YELLOW = 32, 31, 33
