"""An API server that has podwire's CRDs, as the store's contract is held against it: with others that write to it."""

import contextlib
import http.client
import itertools
import json
import os
import ssl
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import yaml

from podwire.lab.kubernetes.api_server import ApiServer
from podwire.lab.kubernetes.client import APPLY_PATCH, JSON
from podwire.model.store import Store
from podwire.store.kubernetes.api.kubeconfig import load_kubeconfig
from podwire.store.kubernetes.store import KubernetesStore
from tests.waiting import ask_until

KUBECONFIG_VARIABLE: Final = "PODWIRE_TEST_KUBECONFIG"
"""Where the back end finds the API server that runs."""
CRDS: Final = Path(__file__).parents[2] / "deploy" / "crds"
_DEFINITIONS: Final = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
DEADLINE_S: Final = 120.0
PACE_S: Final = 0.05
"""How long others rest between two writes; the first comes at once."""

_servers: dict[str, ApiServer] = {}


def install_crds(server: ApiServer) -> None:
    """Make the CRDs, and wait until their resources are served."""
    documents = [
        yaml.load(path.read_text(), yaml.CSafeLoader) for path in sorted(CRDS.glob("*.yaml"))
    ]
    for document in documents:
        server.client.create(_DEFINITIONS, document)
    for document in documents:
        path = f"/apis/podwire.io/v1/{document['spec']['names']['plural']}"
        ask_until(partial(server.client.answers, path), deadline_s=DEADLINE_S)


@contextlib.contextmanager
def serving(server: ApiServer, directory: Path) -> Iterator[None]:
    """Let `open_store` open this server's store."""
    install_crds(server)
    kubeconfig = directory / "kubeconfig"
    server.write_kubeconfig(kubeconfig)
    os.environ[KUBECONFIG_VARIABLE] = str(kubeconfig)
    _servers[str(kubeconfig)] = server
    try:
        yield
    finally:
        del os.environ[KUBECONFIG_VARIABLE], _servers[str(kubeconfig)]


def open_store(_directory: Path) -> KubernetesStore:
    """Open the store of the server that runs."""
    access = load_kubeconfig(Path(os.environ[KUBECONFIG_VARIABLE]))
    return KubernetesStore(access, deadline_s=DEADLINE_S)


def make_namespace(_store: Store, name: str) -> None:
    """Make a namespace as the cluster's administrator."""
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    _server().client.create("/api/v1/namespaces", namespace)


@contextlib.contextmanager
def others_at_work() -> Iterator[None]:
    """Let another client write to the server while a test runs: objects of the same kind, and of others."""
    server, stop = _server(), threading.Event()
    path = "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies"
    policy = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "noise"},
        "spec": {"podSelector": {}},
    }
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "noise"}}

    def write() -> None:
        with contextlib.closing(_Writer(server)) as writer:
            for number in itertools.count():
                if number % 2:
                    writer.send("DELETE", f"{path}/noise")
                else:
                    writer.send("POST", path, policy)
                writer.send(
                    "PATCH",
                    "/api/v1/namespaces/default/configmaps/noise?fieldManager=rig&force=true",
                    {**config, "data": {"v": str(number)}},
                    APPLY_PATCH,
                )
                if stop.wait(PACE_S):
                    return

    writer = threading.Thread(target=write, name="others at work")
    writer.start()
    try:
        yield
    finally:
        stop.set()
        writer.join()


class _Writer:
    """Sends requests over one connection: a greeting for each would cost more than what is asked."""

    def __init__(self, server: ApiServer) -> None:
        context = ssl.create_default_context(cafile=str(server.ca))
        self._connection = http.client.HTTPSConnection(
            server.shape.address, server.port, timeout=DEADLINE_S, context=context
        )
        self._token = server.admin_token

    def send(self, method: str, path: str, document: object = None, kind: str = JSON) -> None:
        """Send a request; whatever the answer is."""
        body = None if document is None else json.dumps(document)
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": kind}
        try:
            self._connection.request(method, path, body, headers)
            self._connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            # The server may end a connection that it kept; the next request makes another one.
            self._connection.close()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _server() -> ApiServer:
    return _servers[os.environ[KUBECONFIG_VARIABLE]]
