"""Open the store that a URL names.

Called by `agent.node` and by object commands with `--store`. Decides only which back end is meant.
"""

from functools import partial
from pathlib import Path
from typing import Final

from podwire.model.errors import InvalidConfiguration, Unavailable
from podwire.model.store import OpenWaker, Store
from podwire.store.etcd.access import SCHEME as ETCD
from podwire.store.etcd.access import StoreAccess, parse_endpoints, read_environment
from podwire.store.late import LateStore
from podwire.store.sqlite import SqliteStore
from podwire.store.sqlite_watch import ThreadWaker

SQLITE: Final = "sqlite://"
PATIENT_S: Final = 3.0
"""How long one try to open may take when another one follows: an agent's pods wait for it."""
__all__ = ["ETCD", "SQLITE", "StoreAccess", "list_hosts", "open_store", "read_environment"]


def open_store(
    url: str,
    *,
    open_waker: OpenWaker = ThreadWaker,
    create: bool = True,
    access: StoreAccess | None = None,
    patient: bool = False,
) -> Store:
    """Open `sqlite:///PATH` or `etcd://HOST:PORT[,HOST:PORT]`. `create`: make what is missing, else StorageFailure.

    `open_waker` is for a file, `access` for etcd. An etcd that does not answer is opened too: its calls raise
    Unavailable until it does; with `patient` so is a file that is locked. Raises InvalidConfiguration for what is no
    such URL and for credentials that are refused; StorageFailure, NewerData; for a file Unavailable unless `patient`.
    """
    if url.startswith(ETCD):
        # Here, as it takes 0.1 s: most commands and many agents have no etcd.
        from podwire.store.etcd.store import EtcdStore  # noqa: PLC0415

        return EtcdStore(parse_endpoints(url), access, create=create)
    path = url.removeprefix(SQLITE)
    if not url.startswith(SQLITE) or not path.startswith("/") or path.endswith("/"):
        raise InvalidConfiguration(
            f"open store {url!r}: this podwire does not know such a store",
            hint=f"write {SQLITE}/PATH, the absolute path of a file, or {ETCD}HOST:PORT",
        )
    return _open_file(Path(path), open_waker, create=create, patient=patient)


def list_hosts(url: str) -> tuple[str, ...]:
    """Give the names and addresses of the hosts that a store is on; () of a file. Raises InvalidConfiguration."""
    if not url.startswith(ETCD):
        return ()
    return tuple(dict.fromkeys(one.rpartition(":")[0] for one in parse_endpoints(url)))


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
