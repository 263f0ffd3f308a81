"""The way to the objects that every command about objects goes: an agent, or the store itself with `--store`.

Used by `get`, `describe`, `apply`, `delete`, `diff` and the commands about policies. The nodes of a lab share one
store, so the first agent that answers is enough. What decodes documents is imported only when it is needed, because
that takes as long as the rest of the command.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from podwire.cli import client
from podwire.cli.client import EXIT_NOT_FOUND, EXIT_UNREACHABLE, EXIT_USAGE, CliError, segment
from podwire.cli.options import Agent, Common
from podwire.cli.output import Row
from podwire.model.store.kinds import CILIUM_CLUSTERWIDE_POLICY, CILIUM_POLICY, NETWORK_POLICY, Kind

if TYPE_CHECKING:
    from podwire.control.documents.apply import Applied
    from podwire.model.store import Store

Document = dict[str, Any]

POLICY_KINDS = (NETWORK_POLICY, CILIUM_POLICY, CILIUM_CLUSTERWIDE_POLICY)


class AgentObjects:
    """Objects by way of an agent. Of each operation `StoreObjects` gives the same."""

    def __init__(self, agents: Sequence[Agent]) -> None:
        self._agents = list(agents)

    def list(self, kind: Kind, namespace: str) -> Sequence[Document]:
        """Give all objects of a kind (of one namespace)."""
        query = f"?namespace={segment(namespace)}" if namespace else ""
        objects: Sequence[Document] = self._ask("GET", f"/object/{kind.plural}{query}")["items"]
        return objects

    def get(self, kind: Kind, namespace: str, name: str) -> Document:
        """Give one object; CliError when there is none."""
        document: Document = self._ask("GET", _resource(kind, namespace, name))
        return document

    def apply(
        self, documents: Sequence[Document], namespace: str, *, dry_run: bool
    ) -> Sequence[Row]:
        """Make objects so; gives kind, namespace, name and action of each, with `before` and `after` if it is dry."""
        namespace = f"&namespace={segment(namespace)}" if namespace else ""
        resource = f"/apply?dryRun={int(dry_run)}{namespace}"
        done: Sequence[Row] = self._ask("POST", resource, documents)
        return done

    def delete(self, kind: Kind, namespace: str, name: str, *, dry_run: bool) -> Row:
        """Delete one object; gives kind, namespace, name and action."""
        resource = f"{_resource(kind, namespace, name)}?dryRun={int(dry_run)}"
        done: Row = self._ask("DELETE", resource)
        return done

    def label_patterns(self) -> Sequence[str]:
        """Give the setting `identity_label_filter`."""
        patterns: Sequence[str] = self._ask("GET", "/config")["settings"]["identity_label_filter"][
            "value"
        ]
        return patterns

    def _ask(self, method: str, resource: str, body: Any = None) -> Any:
        """Ask the first agent that can be reached."""
        away: list[CliError] = []
        for agent in self._agents:
            try:
                return client.request(agent.socket, method, resource, body)
            except CliError as error:
                # Any answer counts, a refusal included: the other agents share the store and would say the same.
                if error.exit_code != EXIT_UNREACHABLE:
                    raise
                away.append(error)
        raise CliError(EXIT_UNREACHABLE, "; ".join(error.message for error in away), away[0].hint)


class StoreObjects:
    """Objects of a store, without an agent."""

    def __init__(self, store: "Store") -> None:
        self._store = store

    def list(self, kind: Kind, namespace: str) -> Sequence[Document]:
        from podwire.control.documents.kinds import show_document  # noqa: PLC0415 (start-up time)

        objects, _ = self._store.list(kind.plural, namespace or None)
        return [show_document(stored) for stored in objects]

    def get(self, kind: Kind, namespace: str, name: str) -> Document:
        from podwire.control.documents.kinds import make_key, show_document  # noqa: PLC0415

        key = make_key(kind.plural, namespace, name)
        stored = self._store.get(key)
        if stored is None:
            raise CliError(
                EXIT_NOT_FOUND, f"get {key}: there is none", f"podwire get {kind.plural}"
            )
        return show_document(stored)

    def apply(
        self, documents: Sequence[Document], namespace: str, *, dry_run: bool
    ) -> Sequence[Row]:
        from podwire.control.documents.apply import apply_documents  # noqa: PLC0415

        done = apply_documents(self._store, documents, namespace=namespace, dry_run=dry_run)
        return [_make_row(applied) for applied in done]

    def delete(self, kind: Kind, namespace: str, name: str, *, dry_run: bool) -> Row:
        from podwire.control.documents.apply import delete_object  # noqa: PLC0415
        from podwire.control.documents.kinds import make_key  # noqa: PLC0415

        key = make_key(kind.plural, namespace, name)
        return _make_row(delete_object(self._store, key, dry_run=dry_run))

    def label_patterns(self) -> Sequence[str]:
        """Give no patterns: agents have their own, and a store knows of none."""
        return ()


Objects = AgentObjects | StoreObjects
"""The objects, wherever they are."""


def _make_row(done: "Applied") -> Row:
    return {
        "kind": done.key.kind,
        "namespace": done.key.namespace,
        "name": done.key.name,
        "action": done.action,
        "revision": done.revision,
        "before": None if done.before is None else dict(done.before.document),
        "after": None if done.after is None else dict(done.after.document),
    }


@contextlib.contextmanager
def open_objects(opts: Common, store: str | None, *, create: bool = False) -> Iterator[Objects]:
    """Find the way to the objects: the store that is named, or an agent.

    `create`: a store that is missing is made.
    """
    if store is None:
        yield AgentObjects(opts.agents())
        return
    from podwire.model.errors import InvalidConfiguration, StorageFailure  # noqa: PLC0415
    from podwire.store.open import (  # noqa: PLC0415
        open_store,
        read_cluster_environment,
        read_environment,
    )

    try:
        opened = open_store(
            store,
            create=create,
            access=read_environment(os.environ),
            cluster=read_cluster_environment(os.environ, _run_helper),
        )
    except InvalidConfiguration as error:
        raise CliError(EXIT_USAGE, error.message, error.hint) from None
    except StorageFailure as error:
        raise CliError(EXIT_UNREACHABLE, error.message, error.hint) from None
    try:
        with contextlib.closing(opened):
            yield StoreObjects(opened)
    except StorageFailure as error:  # damage that shows when it is read
        raise CliError(EXIT_UNREACHABLE, error.message, error.hint) from None


def _run_helper(
    arguments: Sequence[str], environment: Mapping[str, str], timeout_s: float
) -> bytes:
    """Run a plugin for credentials; see `model.store.RunHelper`. What it says to people, people see."""
    from podwire.model.errors import Unavailable  # noqa: PLC0415

    try:
        return subprocess.run(
            arguments, env=environment, timeout=timeout_s, stdout=subprocess.PIPE, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(
            f"run {arguments[0]!r} for credentials: {error}", hint="see `exec` in the kubeconfig"
        ) from None


def _resource(kind: Kind, namespace: str, name: str) -> str:
    parts = [kind.plural, *([namespace] if kind.namespaced else []), name]
    return "/object/" + "/".join(segment(part) for part in parts)
