"""Fixtures of the contracts of the launcher and of the store."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from podwire.lab.kubernetes.api_server import ApiServer
from podwire.model import wire
from podwire.model.store import Store
from podwire.store.etcd.store import EtcdStore
from tests.contract import api_rig, kubernetes_rig
from tests.contract.etcd_rig import ENDPOINT_VARIABLE, Etcd, started
from tests.contract.launcher_clients import CLIENTS, LAUNCHER, Run, build_launcher
from tests.contract.proxy import Proxy
from tests.contract.stores import BACK_ENDS, DEADLINE_S, KUBERNETES, Place, others_at_work


@pytest.fixture(scope="session", autouse=True)
def _servers_never_collect() -> Iterator[None]:
    """Let servers written in Go grow up to a limit without looking for garbage: a start needs a third less."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GOGC", "off")
        patch.setenv("GOMEMLIMIT", "400MiB")
        yield


@pytest.fixture(scope="session")
def launcher() -> Path:
    """The C program, up to date."""
    build_launcher()
    return LAUNCHER


@pytest.fixture(params=CLIENTS)
def run(request: pytest.FixtureRequest, launcher: Path) -> Run:
    """One of the two clients, as a function of environment and stdin."""
    assert launcher.exists()
    return CLIENTS[request.param]


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    """Where nobody listens yet."""
    path = tmp_path / "cni.sock"
    assert len(str(path)) <= wire.SOCKET_PATH_MAX_BYTES
    return path


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """An etcd for all tests that leave it running."""
    with started(tmp_path_factory.mktemp("etcd")) as server:
        os.environ[ENDPOINT_VARIABLE] = server.endpoint
        yield server
        del os.environ[ENDPOINT_VARIABLE]


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[Etcd]:
    """An etcd that the test may kill."""
    with started(tmp_path) as server:
        yield server


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server for all tests that leave it running."""
    with api_rig.started(tmp_path_factory.mktemp("api")) as server:
        yield server


@pytest.fixture(scope="session")
def own_kinds(
    api_server: ApiServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApiServer]:
    """The API server that all tests share, with podwire's CRDs."""
    with kubernetes_rig.serving(api_server, tmp_path_factory.mktemp("kubeconfig")):
        yield api_server


@pytest.fixture(params=BACK_ENDS)
def back_end(request: pytest.FixtureRequest) -> str:
    """Give the name of a back end that is ready, and empty if it is podwire's own."""
    if request.param == "etcd":
        request.getfixturevalue("etcd").wipe()
    if request.param == KUBERNETES:
        request.getfixturevalue("own_kinds")
    return str(request.param)


@pytest.fixture
def open_again(back_end: str, tmp_path: Path) -> Callable[[], Store]:
    """Open the same store once more."""
    return lambda: BACK_ENDS[back_end].open(tmp_path)


@pytest.fixture
def store(back_end: str, open_again: Callable[[], Store], tmp_path: Path) -> Iterator[Store]:
    opened = open_again()
    with others_at_work(back_end, tmp_path):
        yield opened
    opened.close()


@pytest.fixture
def place(store: Store, back_end: str) -> Place:
    """Where the test has its objects."""
    return Place(store, BACK_ENDS[back_end])


@pytest.fixture
def etcd_store(own_etcd: Etcd) -> Iterator[EtcdStore]:
    with closing(EtcdStore([own_etcd.endpoint], deadline_s=DEADLINE_S)) as opened:
        yield opened


@pytest.fixture
def proxy(own_etcd: Etcd) -> Iterator[Proxy]:
    with Proxy(own_etcd.endpoint) as made:
        yield made
