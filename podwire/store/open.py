"""Open the store that a URL names.

Called by `agent.node` and by object commands with `--store`. Decides only which back end is meant.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from podwire.model.errors import InvalidConfiguration, Unavailable
from podwire.model.store import OpenWaker, RunHelper, Store, StoredObject
from podwire.model.store.events import EventWrite
from podwire.store.etcd.access import SCHEME as ETCD
from podwire.store.etcd.access import StoreAccess, parse_endpoints, read_environment
from podwire.store.late import LateStore
from podwire.store.sqlite import SqliteStore
from podwire.store.sqlite_watch import ThreadWaker

if TYPE_CHECKING:
    from podwire.store.kubernetes.api.access import Access

SQLITE: Final = "sqlite://"
KUBERNETES: Final = "kubernetes"
CLOCKS_APART_S: Final = 30.0
"""From so many seconds on it is said that clocks differ."""
PATIENT_S: Final = 3.0
"""How long one try to open may take when another one follows: an agent's pods wait for it."""
_SIZES: Final = (
    (86_400.0, "a day"),
    (3_600.0, "an hour"),
    (300.0, "5 minutes"),
    (CLOCKS_APART_S, f"{CLOCKS_APART_S:g} seconds"),
)
__all__ = [
    "ETCD",
    "KUBERNETES",
    "SQLITE",
    "ClusterAccess",
    "StoreAccess",
    "list_hosts",
    "open_store",
    "read_cluster_environment",
    "read_environment",
]


@dataclass(frozen=True)
class ClusterAccess:
    """How the API server of a cluster is reached."""

    kubeconfig: str = ""
    """Path of a file; "": as a pod reaches it."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Of this process: where a pod finds its API server, and what plugins for credentials get."""
    node_name: str = ""
    """Whose agent asks: of core Nodes and Pods it reads its own alone. "": all."""
    run_helper: RunHelper | None = None
    """Runs plugins for credentials; without it they are refused."""

    def find(self) -> "Access":
        """Find the API server. InvalidConfiguration when nothing says where it is."""
        # Here, as certificates and YAML take their time to be imported.
        from podwire.store.kubernetes.api.access import access_in_cluster  # noqa: PLC0415
        from podwire.store.kubernetes.api.kubeconfig import load_kubeconfig  # noqa: PLC0415

        if self.kubeconfig:
            return load_kubeconfig(Path(self.kubeconfig), self.environment)
        return access_in_cluster(self.environment)


def read_cluster_environment(
    environment: Mapping[str, str], run_helper: RunHelper | None = None
) -> ClusterAccess:
    """Find a kubeconfig as kubectl does; in a pod without one, its service account."""
    home = Path(environment.get("HOME", "/")) / ".kube" / "config"
    given = environment.get("PODWIRE_KUBECONFIG") or environment.get("KUBECONFIG", "")
    if not given and "KUBERNETES_SERVICE_HOST" not in environment and home.exists():
        given = str(home)
    return ClusterAccess(given, environment, run_helper=run_helper)


def open_store(
    url: str,
    *,
    open_waker: OpenWaker = ThreadWaker,
    create: bool = True,
    access: StoreAccess | None = None,
    cluster: ClusterAccess | None = None,
    patient: bool = False,
) -> Store:
    """Open `sqlite:///PATH`, `etcd://HOST:PORT[,HOST:PORT]` or `kubernetes`. `create`: make what is missing, else
    StorageFailure.

    `open_waker` is for a file, `access` for etcd, `cluster` for Kubernetes. A server that does not answer is opened
    too: its calls raise Unavailable until it does; with `patient` so is a file that is locked. Raises
    InvalidConfiguration for what is no such URL, for credentials that etcd refuses and for a kubeconfig that cannot be
    used; StorageFailure, NewerData; for a file Unavailable unless `patient`.
    """
    if url == KUBERNETES:
        return _open_cluster(cluster or ClusterAccess())
    if url.startswith(ETCD):
        # Here, as it takes 0.1 s: most commands and many agents have no etcd.
        from podwire.store.etcd.store import EtcdStore  # noqa: PLC0415

        return EtcdStore(parse_endpoints(url), access, create=create)
    path = url.removeprefix(SQLITE)
    if not url.startswith(SQLITE) or not path.startswith("/") or path.endswith("/"):
        raise InvalidConfiguration(
            f"open store {url!r}: this podwire does not know such a store",
            hint=f"write {SQLITE}/PATH, the absolute path of a file, {ETCD}HOST:PORT or {KUBERNETES}",
        )
    return _open_file(Path(path), open_waker, create=create, patient=patient)


def find_condition_writer(
    store: Store,
) -> Callable[[StoredObject, Mapping[str, str]], None] | None:
    """Give what writes a condition of a core Node; None: only Kubernetes has these."""
    write: Callable[[StoredObject, Mapping[str, str]], None] | None
    write = getattr(store, "put_condition", None)
    return write


def find_event_writer(store: Store) -> Callable[[EventWrite], None] | None:
    """Give what writes an Event; None: only Kubernetes has these."""
    write: Callable[[EventWrite], None] | None
    write = getattr(store, "write_event", None)
    return write


def end_calls(store: Store) -> None:
    """Have whoever waits for a store on the network hear Unavailable at once, and whoever asks it from now on.

    For an agent that ends: each of its threads would otherwise wait for an answer that may not come. A file answers.
    """
    end: Callable[[], None] | None = getattr(store, "end_calls", None)
    if end is not None:
        end()


def describe_clock(store: Store) -> str:
    """Say that this host's clock and that of the store's server differ; "" when they do not, or nobody can tell."""
    ahead_s: float = getattr(store, "clock_ahead_s", 0.0)
    if abs(ahead_s) < CLOCKS_APART_S:
        return ""
    way = "ahead of" if ahead_s > 0 else "behind"
    # Roughly, so that the same fault is told in the same words.
    size = next(name for least_s, name in _SIZES if abs(ahead_s) >= least_s)
    return (
        f"the clock of this host is more than {size} {way} the API server's: tokens and certificates may be refused,"
        " and times of Events are wrong; have both follow a time server (chrony, systemd-timesyncd)"
    )


def list_hosts(url: str, cluster: ClusterAccess | None = None) -> tuple[str, ...]:
    """Give the names and addresses of the hosts that a store is on; () of a file. Raises InvalidConfiguration."""
    if url == KUBERNETES:
        return ((cluster or ClusterAccess()).find().host,)
    if not url.startswith(ETCD):
        return ()
    return tuple(dict.fromkeys(endpoint.rpartition(":")[0] for endpoint in parse_endpoints(url)))


def _open_cluster(cluster: ClusterAccess) -> Store:
    # Here, as for etcd.
    from podwire.store.kubernetes.api.resources import selectors_of_node  # noqa: PLC0415
    from podwire.store.kubernetes.store import KubernetesStore  # noqa: PLC0415

    return KubernetesStore(
        cluster.find(),
        selectors=selectors_of_node(cluster.node_name) if cluster.node_name else None,
        run_helper=cluster.run_helper,
        name=cluster.node_name,
    )


def _open_file(path: Path, open_waker: OpenWaker, *, create: bool, patient: bool) -> Store:
    open_it = partial(
        SqliteStore,
        path,
        open_waker=open_waker,
        create=create,
        open_timeout_s=PATIENT_S if patient else None,
    )
    try:
        return open_it()
    except Unavailable as failure:
        if not patient:
            raise
        return LateStore(open_it, failure)
