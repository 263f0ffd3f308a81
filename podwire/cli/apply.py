"""`podwire apply`, `podwire diff` and `podwire delete`: write objects from files to the store, and delete them.

This process reads the files. The documents are checked where they are applied: by the agent, or with `--store` by this
process. A fault names file, line, document and field, and nothing was written then.
"""

import difflib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from podwire.cli.client import EXIT_NOT_FOUND, EXIT_NOT_SO, EXIT_USAGE, CliError
from podwire.cli.object_access import Objects, open_objects
from podwire.cli.objects import from_files, in_namespace, read_kind, read_name, with_store
from podwire.cli.options import Common, common, table
from podwire.cli.output import (
    GREEN,
    RED,
    Column,
    Row,
    colour,
    fields,
    key,
    show_document,
    show_rows,
)

if TYPE_CHECKING:
    from podwire.store.manifest import Manifest

_F = TypeVar("_F", bound=Callable[..., Any])


def _dry_run(command: _F) -> _F:
    return click.option(
        "--dry-run", is_flag=True, help="Check, and only report what would be done."
    )(command)


@click.command(epilog="Example: podwire apply -f policies.yaml --dry-run")
@from_files(required=True)
@_dry_run
@in_namespace
@with_store
@table
@common
def apply(
    opts: Common,
    files: tuple[str, ...],
    dry_run: bool,
    namespace: str | None,
    store: str | None,
) -> None:
    """Create or replace objects from files; with one fault in them nothing is changed."""
    from podwire.cli.documents import documents_of, read_manifests, speaking_of  # noqa: PLC0415

    manifests = read_manifests(files)
    with (
        open_objects(opts, store, create=not dry_run) as objects,
        speaking_of(manifests, namespace),
    ):
        done = objects.apply(documents_of(manifests), namespace or "", dry_run=dry_run)
        _warn(opts, manifests, objects, namespace or "")
    _show_done(opts, done, dry_run=dry_run)


def _warn(opts: Common, manifests: "Sequence[Manifest]", objects: Objects, namespace: str) -> None:
    """Say which policies name what nothing has; what is no policy costs nothing."""
    if opts.style.quiet or not any("Policy" in manifest.document["kind"] for manifest in manifests):
        return
    from podwire.cli.unmatched import warn_of_files  # noqa: PLC0415 (start-up time)

    warn_of_files(manifests, objects, namespace)


@click.command(epilog="Example: podwire diff -f policies.yaml")
@from_files(required=True)
@in_namespace
@with_store
@common
def diff(opts: Common, files: tuple[str, ...], namespace: str | None, store: str | None) -> None:
    """Show what `apply` would change; exit code 1 when it is anything."""
    from podwire.cli.documents import documents_of, read_manifests, speaking_of  # noqa: PLC0415

    manifests = read_manifests(files)
    with open_objects(opts, store) as objects, speaking_of(manifests, namespace):
        done = objects.apply(documents_of(manifests), namespace or "", dry_run=True)
    changed = [row for row in done if row["action"] != "unchanged"]
    _show_differences(opts, changed)
    if changed:
        raise click.exceptions.Exit(EXIT_NOT_SO)


@click.command(epilog="Example: podwire delete networkpolicy web -n default")
@click.argument("kind", metavar="[KIND", required=False)
@click.argument("names", metavar="NAME...]", nargs=-1)
@from_files(required=False)
@_dry_run
@in_namespace
@with_store
@table
@common
def delete(
    opts: Common,
    kind: str | None,
    names: tuple[str, ...],
    files: tuple[str, ...],
    dry_run: bool,
    namespace: str | None,
    store: str | None,
) -> None:
    """Delete objects: those that files name, or one kind's by name.

    All that exist are deleted; exit code 4 when others did not.
    """
    if bool(files) == bool(kind) or bool(kind) != bool(names):
        raise CliError(
            EXIT_USAGE, "name what to delete", "podwire delete -f FILE, or podwire delete KIND NAME"
        )
    if kind is not None:
        known_kind = read_kind(kind)
        wanted = [(known_kind.plural, *read_name(known_kind, name, namespace)) for name in names]
    else:
        wanted = _identify(files, namespace)
    with open_objects(opts, store) as objects:
        done, missing = _delete_all(objects, wanted, dry_run=dry_run)
    if done:
        _show_done(opts, done, dry_run=dry_run)
    if missing:
        raise CliError(EXIT_NOT_FOUND, "; ".join(missing), "podwire get KIND lists them")


def _identify(files: Sequence[str], namespace: str | None) -> list[tuple[str, str, str]]:
    from podwire.cli.documents import documents_of, read_manifests, speaking_of  # noqa: PLC0415
    from podwire.control.documents.apply import identify_all  # noqa: PLC0415 (start-up time)

    manifests = read_manifests(files)
    with speaking_of(manifests, namespace):
        keys = identify_all(documents_of(manifests), namespace=namespace or "")
    return [(object_key.kind, object_key.namespace, object_key.name) for object_key in keys]


def _delete_all(
    objects: Objects, wanted: Sequence[tuple[str, str, str]], *, dry_run: bool
) -> tuple[list[Row], list[str]]:
    """Delete what is there; gives what was done, and what was not found."""
    from podwire.model.errors import NotFound  # noqa: PLC0415 (start-up time)

    done: list[Row] = []
    missing: list[str] = []
    for kind, namespace, name in wanted:
        try:
            done.append(objects.delete(read_kind(kind), namespace, name, dry_run=dry_run))
        except NotFound as error:
            missing.append(error.message)
        except CliError as error:
            if error.exit_code != EXIT_NOT_FOUND:
                raise
            missing.append(error.message)
    return done, missing


def _show_done(opts: Common, done: Sequence[Row], *, dry_run: bool) -> None:
    rows = [
        {"kind": row["kind"], "namespace": row["namespace"], "name": row["name"]}
        | {"action": row["action"], "dryRun": dry_run}
        | {"revision": None if dry_run else row["revision"]}
        for row in done
    ]
    show_rows(rows, _COLUMNS, opts.style, _name)


def _show_differences(opts: Common, changed: Sequence[Row]) -> None:
    if opts.style.for_programs:
        rows = [{**row, "diff": list(_compare(row))} for row in changed]
        for document in rows if opts.style.form == "jsonl" else [rows]:
            show_document(document, opts.style.form)
    elif opts.style.form == "name":
        for row in changed:
            print(_name(row))
    elif not opts.style.quiet:
        for row in changed:
            for line in _compare(row):
                print(_paint(line))


def _compare(row: Row) -> Iterator[str]:
    """Write the difference of one object as unified lines."""
    from podwire.store.manifest import dump  # noqa: PLC0415 (start-up time)

    before, after = (
        dump([row[side]]).splitlines() if row[side] is not None else []
        for side in ("before", "after")
    )
    yield from difflib.unified_diff(before, after, f"{_name(row)} (now)", _name(row), lineterm="")


def _paint(line: str) -> str:
    if line.startswith("+"):
        return colour(line, GREEN)
    return colour(line, RED) if line.startswith("-") else line


def _name(row: Row) -> str:
    return "/".join(filter(None, (row["kind"], row["namespace"], row["name"])))


def _result(row: Row) -> str:
    return f"{row['action']} (dry run)" if row["dryRun"] else str(row["action"])


_COLUMNS = (
    *fields("kind", "namespace", "name"),
    Column("RESULT", _result),
    Column("REVISION", key("revision"), wide=True),
)
