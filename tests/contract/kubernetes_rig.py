"""An API server that has podwire's CRDs, as the store's contract is held against it: with others that write to it."""

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import yaml

from podwire.lab.kubernetes.api_server import ApiServer
from podwire.lab.kubernetes.client import Refused
from podwire.model.store import Store
from podwire.store.kubernetes.api.kubeconfig import load_kubeconfig
from podwire.store.kubernetes.store import KubernetesStore
from tests.waiting import wait_for

KUBECONFIG_VARIABLE: Final = "PODWIRE_TEST_KUBECONFIG"
"""Where the back end finds the API server that runs."""
CRDS: Final = Path(__file__).parents[2] / "deploy" / "crds"
_DEFINITIONS: Final = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
DEADLINE_S: Final = 120.0

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
        wait_for(partial(server.client.answers, path), deadline_s=DEADLINE_S)


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
    client, stop = _server().client, threading.Event()
    path = "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies"
    policy = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "noise"},
        "spec": {"podSelector": {}},
    }
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "noise"}}

    def write() -> None:
        for number in itertools.count():
            if stop.wait(0.02):
                return
            with contextlib.suppress(Refused):
                if number % 2:
                    client.delete(f"{path}/noise")
                else:
                    client.create(path, policy)
                client.apply(
                    "/api/v1/namespaces/default/configmaps/noise",
                    {**config, "data": {"v": str(number)}},
                )

    writer = threading.Thread(target=write, name="others at work")
    writer.start()
    try:
        yield
    finally:
        stop.set()
        writer.join()


def _server() -> ApiServer:
    return _servers[os.environ[KUBECONFIG_VARIABLE]]
