"""The world of the tables of policy cases, with real packets: one node, nine pods, two hosts outside.

Used by the policy tests of this folder. The agent and the launcher are the real ones; policies go in through the API.
`Scene` is the place of it all; who sends what and what became of it is `prober`'s business. Addresses are those of the
tables, so that a case reads the same to the oracle and to the kernel.
"""

import contextlib
import http.client
import itertools
import json
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from podwire.kernel import netns
from podwire.kernel.fd import Fd
from podwire.model.closing import Closing
from tests.lab.rig import Rig, run
from tests.policy_cases import NAMESPACES, OUTSIDE, PODS, Pod
from tests.waiting import wait_for

POD_CIDRS: Final = ("10.244.1.0/24", "fd10:244:0:1::/64")
HOSTS_OUTSIDE: Final = ("client", "server")
ENFORCED_DEADLINE_S: Final = 120.0
_NODE_PLACES: Final = {
    "client": ("198.51.100.1/24", "2001:db8:51::1/64"),
    "server": ("203.0.113.1/24", "2001:db8:113::1/64"),
}
"""Addresses of the node on the way to each host outside."""
_PROTOCOL_NAMES: Final = {6: "TCP", 17: "UDP", 132: "SCTP"}


@dataclass(frozen=True)
class Place:
    """Somebody who can talk: a pod, a host outside, or the node itself."""

    name: str
    fd: Fd
    ipv4: str
    ipv6: str

    def address(self, family: int) -> str:
        """Give its address of a family, 4 or 6."""
        return self.ipv4 if family == 4 else self.ipv6

    def open_socket(self, family: int, kind: int, protocol: int = 0) -> socket.socket:
        """Open a socket inside, bound to nothing and never waiting; it is used from outside."""
        domain = socket.AF_INET if family == 4 else socket.AF_INET6
        with netns.namespace(self.fd.fileno()):
            made = socket.socket(domain, kind, protocol)
        made.setblocking(False)
        return made


class Node(Rig):
    """A node with the addresses of the tables' host, and a wire to each host outside."""

    def __init__(self, **settings: object) -> None:
        wanted: dict[str, object] = {
            "node_address": OUTSIDE["host"].ipv4,
            "cluster_cidrs": ["10.244.0.0/16", "fd10:244::/32"],
            "conntrack_entries": 131_072,
            "conntrack_quota": 65_536,
            **settings,
        }
        super().__init__(cidrs=POD_CIDRS, **wanted)

    def _make_uplink(self) -> None:
        ip = ("ip", "-n", self.name)
        host = OUTSIDE["host"]
        run(*ip, "link", "add", "uplink", "type", "bridge")
        run(*ip, "addr", "add", f"{host.ipv4}/24", "dev", "uplink")
        run(*ip, "addr", "add", f"{host.ipv6}/64", "dev", "uplink", "nodad")
        run(*ip, "link", "set", "uplink", "up")
        for name in HOSTS_OUTSIDE:
            self._wire(name)

    def outside_namespace(self, name: str) -> str:
        """Name the namespace of a host outside."""
        return f"{self.name}{name[0]}"

    def _wire(self, name: str) -> None:
        """Make a host outside: a namespace with a wire to the node, which is its way to everybody."""
        away, host = self.make_namespace(self.outside_namespace(name)), OUTSIDE[name]
        here, there = ("ip", "-n", self.name), ("ip", "-n", away)
        peer = ("peer", "name", "eth0", "netns", away)
        run(*here, "link", "add", name, "type", "veth", *peer)
        near_4, near_6 = _NODE_PLACES[name]
        run(*here, "addr", "add", near_4, "dev", name)
        run(*here, "addr", "add", near_6, "dev", name, "nodad")
        run(*there, "addr", "add", f"{host.ipv4}/24", "dev", "eth0")
        run(*there, "addr", "add", f"{host.ipv6}/64", "dev", "eth0", "nodad")
        run(*here, "link", "set", name, "up")
        run(*there, "link", "set", "eth0", "up")
        run(*there, "route", "add", "default", "via", near_4.partition("/")[0])
        run(*there, "-6", "route", "add", "default", "via", near_6.partition("/")[0])


class Api:
    """The agent's API over one connection that stays open; a connection that ended meanwhile is opened again."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._connection: http.client.HTTPConnection | None = None

    def ask(self, method: str, resource: str, document: object = None) -> tuple[int, Any]:
        """Ask; gives status and document."""
        body = None if document is None else json.dumps(document).encode()
        for attempt in (1, 2):
            connection = self._connection or self._open()
            try:
                connection.request(method, f"/v1{resource}", body=body)
                answer = connection.getresponse()
                text = answer.read()
                if answer.status == http.client.REQUEST_TIMEOUT:
                    raise OSError("this machine stood still in the middle of the request")
            except (http.client.HTTPException, OSError):
                self.close()
                if attempt == 2:
                    raise
                continue
            is_json = "json" in answer.headers.get("Content-Type", "")
            return answer.status, json.loads(text) if is_json and text else text
        raise AssertionError("both attempts return or raise")

    def must(self, method: str, resource: str, document: object = None) -> Any:
        """Ask for what has to succeed."""
        status, found = self.ask(method, resource, document)
        assert status < 300, f"{method} {resource}: {status} {found}"
        return found

    def _open(self) -> http.client.HTTPConnection:
        self._connection = http.client.HTTPConnection("podwire", timeout=30)
        self._connection.sock = socket.socket(socket.AF_UNIX)
        self._connection.sock.settimeout(30)
        self._connection.sock.connect(self._path)
        return self._connection

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


@dataclass(frozen=True)
class Attached:
    """A pod of the table as the node has it."""

    pod: Pod
    container: str
    namespace: str
    endpoint: int
    if_index: int
    """Of its device on the host."""
    pod_mac: str
    host_mac: str


def cni_arguments(pod: Pod) -> dict[str, Any]:
    """Give what a container runtime without Kubernetes would say of a pod."""
    ports = [
        {"name": port.name, "protocol": _PROTOCOL_NAMES[port.protocol], "port": port.port}
        for port in pod.ports
    ]
    labels = [{"key": key, "value": value} for key, value in pod.labels.items()]
    return {"args": {"cni": {"labels": labels, "ports": ports, "ips": [pod.ipv4, pod.ipv6]}}}


class Scene(Closing):
    """The node with everything of the tables on it."""

    def __init__(self, **settings: object) -> None:
        self._undo = ExitStack()
        self.node = Node(**settings)
        self._undo.callback(self.node.close)
        self.places: dict[str, Place] = {}
        self.pods: dict[str, Attached] = {}
        self._applied: dict[str, object] = {}
        """API path of an object -> its document."""
        self._marks = itertools.count(1)
        self.api = Api(str(self.node.directory / "api.sock"))
        self._undo.callback(self.api.close)
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        self.node.start()
        self.api.must("POST", "/apply", [_namespace_document(name) for name in NAMESPACES])
        for pod in PODS.values():
            self.attach(pod)
        for name in HOSTS_OUTSIDE:
            self._place(name, self.node.outside_namespace(name), OUTSIDE[name])
        self._place("host", self.node.name, OUTSIDE["host"])

    def attach(self, pod: Pod) -> Attached:
        """Attach a pod as a runtime does."""
        namespace = self.node.make_pod_namespace()
        outcome = self.node.cni(
            "ADD",
            namespace,
            namespace,
            config=cni_arguments(pod),
            environment=pod_environment(pod),
        )
        assert outcome.ok, outcome.document
        assert outcome.addresses == [pod.ipv4, pod.ipv6], outcome.addresses
        [shown] = [
            endpoint
            for endpoint in self.api.must("GET", "/endpoint")
            if endpoint["containerId"] == namespace
        ]
        attached = Attached(
            pod,
            namespace,
            namespace,
            shown["id"],
            shown["hostIfIndex"],
            shown["podMac"],
            shown["hostMac"],
        )
        self.pods[pod.title] = attached
        self._place(pod.title, namespace, pod)
        return attached

    def _place(self, name: str, namespace: str, owner: Any) -> None:
        fd = self._undo.enter_context(netns.open_namespace(netns.named_path(namespace)))
        self.places[name] = Place(name, fd, owner.ipv4, owner.ipv6)

    # Policies

    def enforce(self, documents: Sequence[Mapping[str, Any]]) -> None:
        """Have exactly these policies in force at every endpoint."""
        self.write(documents)
        self.wait_enforced(self._mark())

    def write(self, documents: Sequence[Mapping[str, Any]]) -> None:
        """Make the store hold exactly these policies, besides what others wrote."""
        wanted = {_object_path(document): document for document in documents}
        for path in [applied for applied in self._applied if applied not in wanted]:
            self.api.must("DELETE", path)
            del self._applied[path]
        changed = [one for path, one in wanted.items() if self._applied.get(path) != one]
        if changed:
            self.api.must("POST", "/apply", changed)
            self._applied.update(wanted)

    def _mark(self) -> int:
        """Write an object that selects nothing and is policy all the same: whoever has seen it has seen all before."""
        written = self.api.must("PUT", f"/object/{_MARKER}", _marker_document(next(self._marks)))
        return int(written["metadata"]["resourceVersion"])

    def wait_enforced(self, revision: int) -> None:
        """Wait until every endpoint is at a revision of the store."""
        wait_for_now(
            lambda: self._is_enforced(revision),
            ENFORCED_DEADLINE_S,
            f"policies of revision {revision}",
        )

    def _is_enforced(self, revision: int) -> bool:
        rows = self.api.must("GET", "/endpoint")
        return all(row["policyRevision"] >= revision and row["state"] == "ready" for row in rows)

    # Endpoints

    def relabel(self, title: str, *changes: str, wait: bool = True) -> None:
        """Change labels of a pod, `key=value` or `key-`; `wait` until its endpoint has them in force."""
        self.api.must("PATCH", f"/endpoint/{self.pods[title].endpoint}/labels", list(changes))
        if wait:
            self.wait_enforced(0)

    def entries(self, title: str) -> str:
        """Show what the programs look up for a pod, a line each."""
        rows = self.api.must("GET", f"/policy/entries?endpoint={self.pods[title].endpoint}")
        return "\n".join(
            f"slot {row['slot']} {row['direction']} peer {row['peer']} {','.join(row['labels'])}"
            f" {row['protocol']} {row['ports']} {row['verdict']} {row['precedence']}"
            f" {row['policy']} {row['rule']}"
            for row in rows
        )

    def close(self) -> None:
        """End and remove everything."""
        self._undo.close()


def wait_for_now(condition: Any, deadline_s: float, what: str) -> None:
    """Look again and again without a pause for a while, for what takes milliseconds; then as `wait_for`."""
    begin_s = time.monotonic()
    while time.monotonic() < begin_s + 0.5:
        if condition():
            return
    wait_for(condition, what, deadline_s)


def pod_environment(pod: Pod) -> dict[str, str]:
    """Give the variables that tell a pod's name and namespace."""
    names = f"K8S_POD_NAMESPACE={pod.namespace};K8S_POD_NAME={pod.name}"
    return {"CNI_ARGS": f"IgnoreUnknown=1;{names}"}


_MARKER: Final = "ciliumcidrgroups/marker"


def _marker_document(number: int) -> dict[str, Any]:
    metadata = {"name": "marker", "labels": {"marker": str(number)}}
    spec: dict[str, Any] = {"externalCIDRs": []}
    kind = "CiliumCIDRGroup"
    return {"apiVersion": "cilium.io/v2", "kind": kind, "metadata": metadata, "spec": spec}


def _namespace_document(name: str) -> dict[str, Any]:
    metadata = {"name": name, "labels": dict(NAMESPACES[name])}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}


_PLURALS: Final = {
    "NetworkPolicy": "networkpolicies",
    "CiliumNetworkPolicy": "ciliumnetworkpolicies",
    "CiliumClusterwideNetworkPolicy": "ciliumclusterwidenetworkpolicies",
    "CiliumCIDRGroup": "ciliumcidrgroups",
}
_CLUSTER_WIDE: Final = ("CiliumClusterwideNetworkPolicy", "CiliumCIDRGroup")


def _object_path(document: Mapping[str, Any]) -> str:
    kind, metadata = document["kind"], document["metadata"]
    parts = ["/object", _PLURALS[kind]]
    if kind not in _CLUSTER_WIDE:
        parts.append(metadata.get("namespace") or "default")
    return "/".join([*parts, metadata["name"]])


@contextlib.contextmanager
def open_scene(**settings: object) -> Iterator[Scene]:
    """Build the world, and take it away at the end; `settings` are the agent's."""
    with Scene(**settings) as scene:
        yield scene
