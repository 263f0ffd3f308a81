"""`podwire get` and `podwire describe`, and what the other commands about objects share with them.

Objects are read through `podwire.cli.object_access`.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import click

from podwire.cli.client import EXIT_USAGE, CliError
from podwire.cli.endpoint import Requirement, matches, read_selector
from podwire.cli.lists import show_watched
from podwire.cli.object_access import Document, open_objects
from podwire.cli.options import Common, common, listing
from podwire.cli.output import Column, show_document, show_one
from podwire.model.store.kinds import KINDS, Kind, find_kind, kind_of_document

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")


def with_store(command: _F) -> _F:
    """Add the option of what can do without an agent."""
    return click.option(
        "--store",
        metavar="URL",
        help="The store itself, without an agent: sqlite:///PATH, etcd://HOST:PORT or kubernetes.",
    )(command)


def from_files(*, required: bool) -> Callable[[_F], _F]:
    """Add the option that names files of documents."""
    return click.option(
        "-f",
        "--file",
        "files",
        multiple=True,
        required=required,
        metavar="FILE",
        help="YAML or JSON, a directory of such files, or - for stdin.",
    )


def in_namespace(command: _F) -> _F:
    """Add the option that chooses a namespace."""
    return click.option("-n", "--namespace", metavar="NS", help="The namespace.")(command)


def read_kind(word: str) -> Kind:
    """Find the kind that somebody means."""
    kind = find_kind(word)
    if kind is None:
        known = ", ".join("/".join((kind.words[0], *kind.short_names[:1])) for kind in KINDS)
        raise CliError(EXIT_USAGE, f"find kind {word!r}: there is no such kind", f"say {known}")
    return kind


def read_name(kind: Kind, text: str, namespace: str | None) -> tuple[str, str]:
    """Read `NAME` or `NS/NAME`; gives namespace and name."""
    before, slash, name = text.rpartition("/")
    if slash and namespace and before != namespace:
        raise CliError(EXIT_USAGE, f"read {text!r}: -n says {namespace!r}", "leave one of them out")
    place = before or namespace or ""
    if place and not kind.namespaced:
        raise CliError(
            EXIT_USAGE, f"read {text!r}: {kind.name} objects have no namespace", "leave it out"
        )
    return (place or "default") if kind.namespaced else "", name


@click.command(epilog="Example: podwire get networkpolicies -n default -o yaml")
@click.argument("kind", metavar="KIND")
@click.argument("name", metavar="[NAME]", required=False)
@in_namespace
@click.option(
    "-A", "--all-namespaces", is_flag=True, help="All namespaces (the default of a list)."
)
@click.option("-l", "--selector", metavar="SELECTOR", help="k=v, k!=v, k, !k, joined by commas.")
@with_store
@listing
@common
def get(
    opts: Common,
    kind: str,
    name: str | None,
    namespace: str | None,
    all_namespaces: bool,
    selector: str | None,
    store: str | None,
) -> None:
    """Show the objects of a kind, or one object.

    KIND: networkpolicy (netpol), ciliumnetworkpolicy (cnp), ciliumclusterwidenetworkpolicy (ccnp), ciliumcidrgroup
    (ccg), namespace (ns), workload, identity, node (pwn), nodeendpoints, nodes.core, pod (po), ippool (pool), ipblock,
    ipaddress, service (svc), endpointslice; or their plural.
    """
    known_kind = read_kind(kind)
    if namespace and all_namespaces:
        raise CliError(EXIT_USAGE, "-n and -A exclude each other", "leave one of them out")
    if name is not None and (all_namespaces or selector):
        raise CliError(EXIT_USAGE, "-A and -l are for lists", "leave NAME out")
    with open_objects(opts, store) as objects:
        if name is not None:
            _show_one(
                opts,
                functools.partial(objects.get, known_kind, *read_name(known_kind, name, namespace)),
            )
        else:
            wanted = read_selector(selector or "")
            _show_list(
                opts, known_kind, lambda: select(objects.list(known_kind, namespace or ""), wanted)
            )


@click.command(epilog="Example: podwire describe networkpolicy web")
@click.argument("kind", metavar="KIND")
@click.argument("name", metavar="NAME")
@in_namespace
@with_store
@common
def describe(opts: Common, kind: str, name: str, namespace: str | None, store: str | None) -> None:
    """Show one object for people: its name, its age, and what it says."""
    known_kind = read_kind(kind)
    with open_objects(opts, store) as objects:
        document = objects.get(known_kind, *read_name(known_kind, name, namespace))
    show_one(document, opts.style, lambda: _describe(document), name_object(document))


def validate_files(files: Sequence[str], *, warned: bool = False) -> list[str]:
    """Check the documents of files without an agent; gives the objects' names. CliError with every fault.

    `warned`: say on stderr what is named and nothing can have.
    """
    from podwire.cli.documents import documents_of, read_manifests, speaking_of  # noqa: PLC0415
    from podwire.control.documents.apply import decode_all  # noqa: PLC0415

    manifests = read_manifests(files)
    with speaking_of(manifests):
        names = [str(stored.key) for stored in decode_all(documents_of(manifests))]
    if warned:
        from podwire.cli.unmatched import warn_of_files  # noqa: PLC0415

        warn_of_files(manifests, None)
    return names


def select(documents: Sequence[Document], wanted: Sequence[Requirement]) -> list[Document]:
    """Give the documents whose labels fulfil all requirements."""
    return [
        document
        for document in documents
        if matches(wanted, [f"{key}={value}" for key, value in _labels(document).items()])
    ]


def _show_one(opts: Common, read: Callable[[], Document]) -> None:
    if opts.watch:
        raise CliError(EXIT_USAGE, "-w is for lists", "leave NAME or -w out")
    document = read()
    if opts.style.form in ("table", "wide") and not opts.style.quiet:
        kind = _kind_of(document)
        assert kind is not None
        _show_list(opts, kind, lambda: [document])
        return
    show_one(document, opts.style, lambda: (), name_object(document))


def _show_list(opts: Common, kind: Kind, read: Callable[[], list[Document]]) -> None:
    if opts.style.form in ("json", "yaml") and not opts.watch:
        show_document({"apiVersion": "v1", "kind": "List", "items": read()}, opts.style.form)
        return
    columns = [column for column in _COLUMNS if kind.namespaced or column.header != "NAMESPACE"]
    show_watched(
        opts,
        lambda: (read(), None),
        columns,
        name_object,
        identify=lambda row: _metadata(row).get("uid"),
    )


def _metadata(document: Document) -> Document:
    metadata: Document = document["metadata"]
    return metadata


def _labels(document: Document) -> dict[str, str]:
    return _metadata(document).get("labels") or {}


def name_object(document: Document) -> str:
    """Name an object as `-o name` does: `networkpolicies/default/web`."""
    metadata = _metadata(document)
    kind = _kind_of(document)
    plural = kind.plural if kind else document["kind"]
    return "/".join(filter(None, (plural, metadata.get("namespace"), metadata["name"])))


def _kind_of(document: Document) -> Kind | None:
    return kind_of_document(document.get("apiVersion"), document["kind"])


def _describe(document: Document) -> Iterator[str]:
    from podwire.store.manifest import dump  # noqa: PLC0415 (start-up time)

    metadata = _metadata(document)
    yield from _field("Name", [metadata["name"]])
    if "namespace" in metadata:
        yield from _field("Namespace", [metadata["namespace"]])
    yield from _field("Kind", [f"{document['kind']} ({document['apiVersion']})"])
    for title, pairs in (
        ("Labels", _labels(document)),
        ("Annotations", metadata.get("annotations")),
    ):
        yield from _field(title, [f"{key}={value}" for key, value in (pairs or {}).items()])
    yield from _field("Created", [metadata.get("creationTimestamp", "")])
    yield from _field("Revision", [metadata.get("resourceVersion", "")])
    for name in ("spec", "specs"):
        if name in document:
            yield f"{name.capitalize()}:"
            yield from (f"  {line}" for line in dump([document[name]]).splitlines())


def _field(title: str, values: Iterable[str]) -> Iterator[str]:
    lines = [line for value in values for line in value.splitlines()] or ["-"]
    for at, line in enumerate(lines):
        yield f"{title + ':' if at == 0 else '':<13}{line}"


_COLUMNS = (
    Column("NAMESPACE", lambda row: _metadata(row).get("namespace")),
    Column("NAME", lambda row: _metadata(row)["name"]),
    Column("CREATED", lambda row: _metadata(row).get("creationTimestamp")),
    Column("REVISION", lambda row: _metadata(row).get("resourceVersion"), wide=True),
    Column(
        "LABELS", lambda row: [f"{key}={value}" for key, value in _labels(row).items()], wide=True
    ),
)
