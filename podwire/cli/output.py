"""What people and programs see: tables, JSON, YAML; colour only on a terminal that wants it, and never a pager.

Used by every command. A column is a header and a function of the row; `wide` columns show with `-o wide`.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

FORMATS = ("table", "wide", "name", "json", "yaml", "jsonl")

Row = dict[str, Any]


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


def key(name: str) -> Callable[[Row], Any]:
    """Give the function that reads a field."""
    return lambda row: row.get(name)


def show_rows(
    rows: Sequence[Row], columns: Sequence[Column], style: Style, name: Callable[[Row], str]
) -> None:
    """Show a list."""
    if style.form == "json":
        print_json(rows)
    elif style.form == "yaml":
        print_yaml(rows)
    elif style.form == "jsonl":
        for row in rows:
            print(json.dumps(row))
    elif style.form == "name" or style.quiet:
        for row in rows:
            print(name(row))
    else:
        print_table(rows, columns, style)


def show_one(
    document: Any, style: Style, text: Callable[[], Iterable[str]], name: str = ""
) -> None:
    """Show one document; `text` writes it for people."""
    if style.form == "json":
        print_json(document)
    elif style.form == "jsonl":
        print(json.dumps(document))
    elif style.form == "yaml":
        print_yaml(document)
    elif style.form == "name":
        print(name)
    elif not style.quiet:
        for line in text():
            print(line)


def print_json(document: Any) -> None:
    """Write JSON for people and programs alike."""
    print(json.dumps(document, indent=2, ensure_ascii=False))


def print_yaml(document: Any) -> None:
    """Write YAML; words that other readers take for booleans are quoted."""
    import yaml  # noqa: PLC0415 (start-up time)

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    plain = json.loads(json.dumps(document))
    print(yaml.dump(plain, Dumper=dumper, sort_keys=False, allow_unicode=True), end="")


def print_table(rows: Sequence[Row], columns: Sequence[Column], style: Style) -> None:
    """Write a table as wide as its content."""
    shown = [column for column in columns if style.form == "wide" or not column.wide]
    lines = [[cell(column.value(row)) for column in shown] for row in rows]
    heads = [[column.header for column in shown]] if style.headers else []
    widths = [max((len(line[at]) for line in heads + lines), default=0) for at in range(len(shown))]
    for line in heads + lines:
        padded = (text.ljust(width) for text, width in zip(line, widths, strict=True))
        print("   ".join(padded).rstrip())


def cell(value: Any) -> str:
    """Write one value into a table."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ",".join(str(one) for one in value) or "-"
    return str(value)


def colour(text: str, code: int) -> str:
    """Paint text where a person with a colour terminal reads it."""
    if "NO_COLOR" in os.environ or not sys.stdout.isatty():
        return text
    return f"\033[{code}m{text}\033[0m"


GREEN, RED, YELLOW = 32, 31, 33
