"""Warn of policies that are valid but name labels or groups that nothing has.

Used by `apply`, `policy validate` and `policy list`. Warnings go to stderr and do not change the exit code. The module
is imported only when there are policies, because decoders take long to import. When an agent does not answer any more,
there is no warning: the command itself has done its work.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from podwire.cli.client import CliError
from podwire.cli.documents import find_place
from podwire.cli.object_access import POLICY_KINDS, Objects
from podwire.control.documents.kinds import decode
from podwire.control.identity.filter import LabelFilter
from podwire.control.policy.rule import GroupMention, Mention
from podwire.control.policy.unmatched import find_mentions, find_unmatched
from podwire.model.errors import InvalidRequest
from podwire.model.store import ObjectKey
from podwire.model.store.kinds import CIDR_GROUP, kind_of_document
from podwire.store.manifest import Manifest

SHOWN: Final = 20

Document = dict[str, Any]
Said = tuple[ObjectKey, list[Mention], Callable[[str], str]]
"""A policy, what it names, and how a field of it is spoken of."""


def warn_of_files(
    manifests: Sequence[Manifest], objects: Objects | None, namespace: str = ""
) -> None:
    """Warn of policies in files that have been accepted; without `objects` only the files themselves are known."""
    policies: list[Said] = []
    for manifest in manifests:
        if manifest.document["kind"] in _KIND_NAMES:
            stored = decode(manifest.document, namespace=namespace)
            mentions = find_mentions(stored.document)
            policies.append((stored.key, mentions, functools.partial(find_place, manifest)))
    _warn(policies, objects, _names_of_groups(manifest.document for manifest in manifests))


def warn_of_stored(documents: Iterable[Document], objects: Objects) -> None:
    """Warn of policies as the store has them."""
    policies: list[Said] = []
    for document in documents:
        # What cannot be read or enforced whole is named in the list itself.
        with contextlib.suppress(InvalidRequest):
            policies.append((_key(document), find_mentions(document), str))
    _warn(policies, objects, set())


def _warn(policies: Sequence[Said], objects: Objects | None, groups: set[str]) -> None:
    mentions = [mention for _key, part, _speak in policies for mention in part]
    if not mentions:
        return
    try:
        label_filter = LabelFilter.parse(objects.label_patterns() if objects else ())
        if objects and any(isinstance(mention, GroupMention) for mention in mentions):
            groups |= _names_of_groups(objects.list(CIDR_GROUP, ""))
    except CliError:
        return
    lines = [
        f"warning: {key}: {speak(fault.path)} {fault.message}"
        for key, part, speak in policies
        for fault in find_unmatched(part, label_filter, groups)
    ]
    for line in lines[:SHOWN]:
        print(line, file=sys.stderr)
    if len(lines) > SHOWN:
        print(f"warning: and {len(lines) - SHOWN} more of this kind", file=sys.stderr)


_KIND_NAMES: Final = frozenset(kind.name for kind in POLICY_KINDS)


def _names_of_groups(documents: Iterable[Document]) -> set[str]:
    return {
        document["metadata"]["name"]
        for document in documents
        if document["kind"] == CIDR_GROUP.name
    }


def _key(document: Document) -> ObjectKey:
    kind = kind_of_document(document["apiVersion"], document["kind"])
    assert kind is not None, "the store has objects of known kinds"
    metadata = document["metadata"]
    return ObjectKey(kind.plural, metadata.get("namespace", ""), metadata["name"])
