"""The agents of a cluster's nodes: what they have in force, asked at their sockets."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from podwire.cli.client import CliError, request
from podwire.lab.kubernetes.cluster import Cluster
from tests.waiting import wait_for

POLICIES: Final = "/apis/networking.k8s.io/v1"
KIND: Final = "networkpolicies"


class Agents:
    """All of them. `sockets` are paths by which they can be reached from here."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.sockets = [str(node.machine.path("/run/podwire/api.sock")) for node in cluster.nodes]

    def enforce(
        self,
        documents: Sequence[Mapping[str, Any]],
        *,
        namespaces: Collection[str],
        addresses: Collection[str],
    ) -> None:
        """Have exactly these policies in force in some namespaces, at the pods with these IPv4 addresses."""
        self.delete_policies(namespaces)
        if documents:
            self._cluster.apply(*documents)
        listed = self._cluster.client.get(f"{POLICIES}/{KIND}")
        # That of the list is beyond what was deleted, too, but agents hear of a revision by a change alone.
        newest = [int(item["metadata"]["resourceVersion"]) for item in listed["items"]]
        if newest:
            wait_for(lambda: self._has_enforced(max(newest), addresses), "the policies")
        else:
            wait_for(lambda: self._has_none_in_force(addresses), "no policy")

    def _has_none_in_force(self, addresses: Collection[str]) -> bool:
        """Policies that an agent knows no more may be in force for a moment still."""
        if any(ask(path, "/policy") for path in self.sockets):
            return False
        rows = [row for path in self.sockets for row in ask(path, "/endpoint")]
        return all(
            row["state"] == "ready" and set(row["policyEnforcement"].values()) == {"disabled"}
            for row in rows
            if row["ipv4"] in addresses
        )

    def delete_policies(self, namespaces: Collection[str]) -> None:
        """Delete all policies of some namespaces."""
        for namespace in namespaces:
            self._cluster.client.delete(f"{POLICIES}/namespaces/{namespace}/{KIND}")

    def _has_enforced(self, revision: int, addresses: Collection[str]) -> bool:
        rows = [row for path in self.sockets for row in ask(path, "/endpoint")]
        return all(
            int(row["policyRevisions"].get(KIND, 0)) >= revision
            for row in rows
            if row["ipv4"] in addresses
        )


def ask(path: str, resource: str) -> Any:
    """Ask an agent; it must answer."""
    try:
        return request(path, "GET", resource)
    except CliError as error:
        raise AssertionError(f"{path} {resource}: {error}") from error
