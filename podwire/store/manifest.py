"""The one place for YAML: documents from people's files, and documents written for people.

Called by the command line and by every module that keeps documents as text. Pure. Never runs a tag, never expands to
more than a file's size allows. Invariant: what is accepted means the same to every reader of YAML: keys are unique and
text, there are no tags but those of plain data, no merge keys, no control characters, and depth and size are bounded.
`no`, `on` and `010` are text, as in YAML 1.2. Where a boolean or a number is required, they are then refused.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec
import ryaml
import yaml
from msgspec.structs import replace

from podwire.model.errors import Fault, InvalidRequest

FILE_MAX_BYTES: Final = 8 << 20
DEPTH_MAX: Final = 64
DOCUMENTS_MAX: Final = 20_000

_BOUNDARY: Final = re.compile(r"^---(?=[ \t\r\n]|\Z)", re.MULTILINE)
"""At the beginning of a line these marks end whatever came before, even a text (YAML 1.2, section 9.1.2)."""
_NO_CONTENT: Final = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\r?(?:\n|\Z)|%[^\n]*(?:\n|\Z))*")
_LINE: Final = re.compile(r" at line (\d+) column \d+")
_UNSAFE: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
_PLAIN_TAGS: Final = frozenset(
    f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "map", "seq")
)
_PATH_PART: Final = re.compile(
    r"\[(?P<index>\d+)\]|\[(?P<quoted>'[^']*'|\"[^\"]*\")\]|(?P<plain>[A-Za-z_<][A-Za-z0-9_-]*)"
)
_load_yaml: Final[Callable[[str], Any]] = ryaml.loads  # type: ignore[attr-defined]  # its types do not export it
_HARMLESS: Final = frozenset({int, bool, type(None)})
_PARSER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Manifest(msgspec.Struct, frozen=True):
    """One object of a file, as it was written."""

    document: dict[str, Any]
    file: str
    number: int
    """Of the document in the file, from 1; empty ones count."""
    line: int
    """Where the document begins, from 1."""
    item: int | None = None
    """Index in the `items` of a List."""
    text: str = ""
    """The document's part of the file."""

    @property
    def place(self) -> str:
        """Say where it stands, for people."""
        item = "" if self.item is None else f", items[{self.item}]"
        return f"{self.file}: document {self.number} (line {self.line}){item}"

    def find_line(self, path: str) -> int | None:
        """Find the line of a field, or of the nearest part of its path that is there."""
        if self.item is not None:
            path = f"items[{self.item}].{path}"
        return _find_line(self.text, self.line, path)


def load_manifests(raw: bytes, file: str) -> list[Manifest]:
    """Read the objects of a file: YAML of several documents or JSON values one after another; Lists become their items.

    Raises InvalidRequest with a fault for each document that cannot be read; its path names file, document and line.
    """
    text = _decode(raw, file)
    manifests: list[Manifest] = []
    faults: list[Fault] = []
    count = 0
    for number, (line, part) in enumerate(_split(text), 1):
        if number > DOCUMENTS_MAX:
            faults.append(Fault(file, f"has more than {DOCUMENTS_MAX} documents"))
            break
        try:
            documents = _load(part)
        except _Unreadable as error:
            at = line if error.line is None else line + error.line - 1
            faults.append(Fault(f"{file}: document {number} (line {at})", error.message))
            continue
        for document, offset, own in documents:
            if document is not None:
                count += 1
                place = Manifest({}, file, number, line + offset, text=own)
                manifests += _flatten(place, document, faults)
    if faults:
        raise _refuse(faults)
    if not count:
        raise _refuse([Fault(file, "holds no object")])
    return manifests


def dump(documents: Sequence[Any]) -> str:
    """Write documents as YAML: keys in their order, words that other readers take for booleans or numbers quoted."""
    # Through JSON and back no two places share an object: no anchors are written.
    plain = [json.loads(json.dumps(document)) for document in documents]
    return "---\n".join(
        yaml.dump(piece, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)
        for piece in plain
    )


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Writes by YAML 1.1, and also quotes what only YAML 1.2 takes for a number: `0o10`, `1e3`."""


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|[-+]?0o[0-7]+$"),
    list("-+.0123456789"),
)


class _Unreadable(Exception):
    """What is wrong with one document, and in which of its lines."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.line = line


def _refuse(faults: Sequence[Fault]) -> InvalidRequest:
    named = [f"{fault.path}: {fault.message}" for fault in faults[:3]]
    if len(faults) > len(named):
        named.append(f"and {len(faults) - len(named)} more")
    return InvalidRequest(
        f"read {'; '.join(named)}",
        hint="nothing was changed; correct the file",
        faults=tuple(faults),
    )


def _decode(raw: bytes, file: str) -> str:
    if len(raw) > FILE_MAX_BYTES:
        raise _refuse([Fault(file, f"has more than {FILE_MAX_BYTES} bytes")])
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _refuse([Fault(f"{file} (line {line})", "is no UTF-8")]) from None
    unsafe = _UNSAFE.search(text)
    if unsafe is not None:
        line = text.count("\n", 0, unsafe.start()) + 1
        shown = f"has the control character {unsafe[0]!a}"
        raise _refuse([Fault(f"{file} (line {line})", shown)])
    return text


def _split(text: str) -> Iterator[tuple[int, str]]:
    """Give each document's text, and the line it begins in."""
    begins = [0, *(match.start() for match in _BOUNDARY.finditer(text))]
    if len(begins) > 1 and _NO_CONTENT.fullmatch(text, 0, begins[1]):
        del begins[1]  # comments and directives before the first mark belong to its document
    line, at = 1, 0
    for begin, end in zip(begins, [*begins[1:], len(text)], strict=True):
        line += text.count("\n", at, begin)
        at = begin
        yield line, text[begin:end]


def _load(part: str) -> list[tuple[Any, int, str]]:
    """Load one document: its value, in which line of it that begins, and its text. JSON may be several values."""
    documents = _load_json(part)
    if documents is None:
        _refuse_tricks(part)
        try:
            documents = [(_load_yaml(part), 0, part)]
        except ValueError as error:
            raise _explain(part, str(error)) from None
    for document, _, _ in documents:
        _check(document, "", 1)
    return documents


def _load_json(part: str) -> list[tuple[Any, int, str]] | None:
    """Read JSON values; None when this is none. YAML's readers stumble over some of JSON's escapes."""
    if part.lstrip()[:1] not in ("{", "["):
        return None
    decoder = json.JSONDecoder(object_pairs_hook=_refuse_duplicates)
    documents = []
    at = _skip_space(part, 0)
    try:
        while at < len(part):
            begin = at
            document, at = decoder.raw_decode(part, begin)
            documents.append((document, part.count("\n", 0, begin), part[begin:at]))
            at = _skip_space(part, at)
    except json.JSONDecodeError:
        return None
    except RecursionError:
        raise _Unreadable(f"is nested deeper than {DEPTH_MAX}") from None
    except ValueError as error:
        raise _Unreadable(f"has a number that is too long: {error}") from None
    return documents


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _refuse_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for key in made if names.count(key) > 1)
        raise _Unreadable(f"has the key {twice!a} twice")
    return made


def _refuse_tricks(part: str) -> None:
    """Look at the events before anything is made of them: tags, which the loader drops or makes keys of, and aliases,
    which it copies."""
    if "!" not in part and "&" not in part:
        return
    sizes = _Sizes()
    try:
        for event in yaml.parse(part, Loader=_PARSER):
            tag = getattr(event, "tag", None)
            if tag is not None and tag not in _PLAIN_TAGS and tag != "!":
                shown = tag.replace("tag:yaml.org,2002:", "!!")
                raise _Unreadable(f"has the tag {shown!a}", _line_of(event))
            fault = sizes.add(event)
            if fault:
                raise _Unreadable(fault, _line_of(event))
    except yaml.YAMLError:
        return  # the loader says it better


class _Sizes:
    """How large a document becomes when its aliases are written out."""

    def __init__(self) -> None:
        self._open: list[str | None] = []
        """Anchors of the collections that have not ended."""
        self._sums = [0]
        self._anchors: dict[str, int] = {}

    def add(self, event: Any) -> str:
        """Count one event; gives what is wrong with it, or ""."""
        if isinstance(event, yaml.CollectionStartEvent):
            self._open.append(event.anchor)
            self._sums.append(1)
        elif isinstance(event, yaml.CollectionEndEvent):
            self._count(self._open.pop(), self._sums.pop())
        elif isinstance(event, yaml.ScalarEvent):
            self._count(event.anchor, len(event.value) + 1)
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor in self._open:
                return f"has the alias {event.anchor!a} inside its own value"
            self._count(None, self._anchors.get(event.anchor or "", 0))
        return "has aliases that repeat too much" if self._sums[-1] > FILE_MAX_BYTES else ""

    def _count(self, anchor: str | None, size: int) -> None:
        self._sums[-1] += size
        if anchor is not None:
            self._anchors[anchor] = size


def _line_of(marked: Any) -> int:
    """Give the line, from 1, that an event or node begins in."""
    return int(marked.start_mark.line) + 1


def _explain(part: str, message: str) -> _Unreadable:
    """Make one message of the loader's, with its line."""
    if message.startswith("TypeError"):
        return _Unreadable("has a key that is not text")
    match = _LINE.search(message)
    line = int(match[1]) if match else None
    message = _LINE.sub("", message) if match else message
    if "recursion limit" in message:
        message = f"is nested deeper than {DEPTH_MAX}, or an alias holds itself"
    elif "more than one document" in message:
        message = "has another document behind it: each begins with ---"
    elif "repetition limit" in message:
        message = "has aliases that repeat too much"
    elif "duplicate entry" in message:
        where, _, _ = message.rpartition(": ")
        key, line = _find_duplicate(part) or (message, line)
        message = f"{where + ' ' if where else ''}has the key {key!a} twice"
    return _Unreadable(message, line)


def _find_duplicate(part: str) -> tuple[str, int] | None:
    """Find the first key that its mapping has already, and its line. Looks at events: aliases stay what they are."""
    seen: list[set[str] | None] = []
    is_key: list[bool] = []
    for event in yaml.parse(part, Loader=_PARSER):
        if isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            seen.pop()
            is_key.pop()
        elif not isinstance(event, yaml.NodeEvent):
            continue
        if seen and seen[-1] is not None and not isinstance(event, yaml.CollectionStartEvent):
            known = seen[-1]
            if is_key[-1] and isinstance(event, yaml.ScalarEvent):
                if event.value in known:
                    return event.value, _line_of(event)
                known.add(event.value)
            is_key[-1] = not is_key[-1]
        if isinstance(event, yaml.CollectionStartEvent):
            seen.append(set() if isinstance(event, yaml.MappingStartEvent) else None)
            is_key.append(True)
    return None


def _check(value: Any, path: str, depth: int) -> None:
    """Refuse what the loader lets through and no document of ours may have."""
    if depth > DEPTH_MAX:
        raise _Unreadable(f"is nested deeper than {DEPTH_MAX}")
    if isinstance(value, dict):
        for key, member in value.items():
            _check_key(key, path)
            if member.__class__ not in _HARMLESS:
                _check(member, f"{path}.{key}" if path else key, depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if item.__class__ not in _HARMLESS:
                _check(item, f"{path}[{index}]", depth + 1)
    elif isinstance(value, str):
        _check_text(value, path)
    elif isinstance(value, float) and not math.isfinite(value):
        raise _Unreadable(f"{path} is {value}, not a number in JSON")


def _check_key(key: object, path: str) -> None:
    if not isinstance(key, str):
        raise _Unreadable(f"{path or 'it'} has the key {key!a}, which is not text: quote it")
    if key == "<<":
        raise _Unreadable(f"{path or 'it'} has a merge key (<<): write the fields out")
    _check_text(key, path)


def _check_text(text: str, path: str) -> None:
    unsafe = _UNSAFE.search(text)
    if unsafe is not None:
        raise _Unreadable(f"{path or 'it'} has the control character {unsafe[0]!a}")


def _flatten(manifest: Manifest, document: Any, faults: list[Fault]) -> Iterator[Manifest]:
    """Give the object, or those of a List."""
    if not isinstance(document, dict):
        faults.append(Fault(manifest.place, f"is {_kind_of(document)}, not an object"))
        return
    kind, items = document.get("kind"), document.get("items")
    if not isinstance(kind, str) or not kind.endswith("List") or "items" not in document:
        yield replace(manifest, document=document)
        return
    if not isinstance(items, list):
        faults.append(Fault(manifest.place, f"has items that are {_kind_of(items)}, not a list"))
        return
    for index, item in enumerate(items):
        inner = replace(manifest, item=index)
        if isinstance(item, dict):
            yield replace(inner, document=item)
        else:
            faults.append(Fault(inner.place, f"is {_kind_of(item)}, not an object"))


def _kind_of(value: object) -> str:
    names = {
        str: "text",
        list: "a list",
        dict: "an object",
        bool: "true or false",
        type(None): "null",
    }
    return names.get(type(value), "a number")


def _find_line(text: str, first: int, path: str) -> int | None:
    try:
        node = yaml.compose(text, Loader=_PARSER)
    except yaml.YAMLError:
        return None
    line = None
    for part in _PATH_PART.finditer(path):
        child = _child(node, part)
        if child is None:
            break
        line, node = child
    return None if line is None else first + line


def _child(node: Any, part: "re.Match[str]") -> tuple[int, Any] | None:
    """Find one step of a path: the line it is written in (from 0) and its value."""
    if part["index"] is not None:
        index = int(part["index"])
        if not isinstance(node, yaml.SequenceNode) or index >= len(node.value):
            return None
        return _line_of(node.value[index]) - 1, node.value[index]
    if not isinstance(node, yaml.MappingNode):
        return None
    for key, value in node.value:
        if part["quoted"] in (ascii(key.value), None) and part["plain"] in (key.value, None):
            return _line_of(key) - 1, value
    return None
