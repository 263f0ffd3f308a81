"""Read documents from files for the commands that take `-f`, and say in which file and line a document is.

Used by `apply`, `diff`, `delete` and `policy validate`. It is imported only when there is a file to read, because YAML
and the decoders of policies take long to import.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from podwire.cli.client import EXIT_REFUSED, EXIT_USAGE, CliError
from podwire.model.errors import Fault, InvalidRequest
from podwire.model.ids import DEFAULT_NAMESPACE
from podwire.model.store.kinds import kind_of_document
from podwire.store.manifest import FILE_MAX_BYTES, Manifest, load_manifests

SUFFIXES = (".yaml", ".yml", ".json")

_NAME_MAX = 200
_PLACE = re.compile(r"documents\[(?P<index>\d+)\](?:\.(?P<path>(?:\[[^\]]*\]|[^\s;:])+))?")


def read_manifests(files: Sequence[str]) -> list[Manifest]:
    """Read the objects of all files; of a directory its YAML and JSON files are read, and `-` is stdin.

    CliError names every document that cannot be read.
    """
    manifests: list[Manifest] = []
    faults: list[Fault] = []
    for name in _expand(files):
        try:
            manifests += load_manifests(_read(name), "stdin" if name == "-" else name)
        except InvalidRequest as error:
            faults += error.faults
    if faults:
        raise CliError(
            EXIT_REFUSED,
            "; ".join(f"{fault.path} {fault.message}" for fault in faults),
            "nothing was changed; correct the file and try again",
        )
    return manifests


@contextmanager
def speaking_of(manifests: Sequence[Manifest], namespace: str | None = None) -> Iterator[None]:
    """In errors of the block, write `documents[3].spec` as file, line, object, document and field."""
    try:
        yield
    except InvalidRequest as error:
        faults = [f"{fault.path} {fault.message}" for fault in error.faults]
        lines = [error.message, *(fault for fault in faults if fault not in error.message)]
        message = _translate("; ".join(lines), manifests, namespace or "")
        raise CliError(EXIT_REFUSED, message, error.hint) from None
    except CliError as error:
        message = _translate(error.message, manifests, namespace or "")
        raise CliError(error.exit_code, message, error.hint) from None


def documents_of(manifests: Sequence[Manifest]) -> list[dict[str, Any]]:
    """Give the bare documents."""
    return [manifest.document for manifest in manifests]


def _expand(files: Sequence[str]) -> Iterator[str]:
    for name in files:
        path = Path(name)
        if name == "-" or not path.is_dir():
            yield name
            continue
        inside = sorted(
            file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file()
        )
        if not inside:
            raise CliError(
                EXIT_USAGE, f"read {name}: no {', '.join(SUFFIXES)} file is in it", "name a file"
            )
        yield from map(str, inside)


def _read(name: str) -> bytes:
    """Read a file, and a little more than is allowed: what is too large is said by the loader."""
    try:
        if name == "-":
            return sys.stdin.buffer.read(FILE_MAX_BYTES + 1)
        with Path(name).open("rb") as file:
            return file.read(FILE_MAX_BYTES + 1)
    except OSError as error:
        raise CliError(
            EXIT_USAGE, f"read {name}: {error.strerror or error}", "name a file, or - for stdin"
        ) from error


def find_place(manifest: Manifest, path: str, *, name: str = "") -> str:
    """Say where a field is: file, line, object (its `name`, where nothing else tells it), document and path."""
    line = manifest.find_line(path) or manifest.line
    item = "" if manifest.item is None else f" items[{manifest.item}]"
    named = f", {name}" if name else ""
    return f"{manifest.file}:{line} (document {manifest.number}{item}{named}) {path}".rstrip()


def describe_object(document: Mapping[str, Any], namespace: str) -> str:
    """Write kind, namespace and name of a document, as far as it has them. `namespace`: of objects that name none."""
    kind, metadata = document.get("kind"), document.get("metadata")
    metadata = metadata if isinstance(metadata, Mapping) else {}
    own, name = metadata.get("namespace"), metadata.get("name")
    known = kind_of_document(document.get("apiVersion"), kind)
    if known is not None and not known.namespaced:
        own = ""
    elif known is not None and own is None:
        own = namespace or DEFAULT_NAMESPACE
    words = [word for word in (own, name) if isinstance(word, str) and word]
    said = " ".join(word for word in (kind, "/".join(words)) if isinstance(word, str) and word)
    return said[:_NAME_MAX]


def _translate(text: str, manifests: Sequence[Manifest], namespace: str) -> str:
    def speak(match: "re.Match[str]") -> str:
        index, path = int(match["index"]), match["path"] or ""
        if index >= len(manifests):
            return match[0]
        name = describe_object(manifests[index].document, namespace)
        return find_place(manifests[index], path, name=name)

    return _PLACE.sub(speak, text)
