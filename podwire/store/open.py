"""Open the store that a URL names.

Called by `agent.node` and by object commands with `--store`. Decides nothing but which back end is meant.
"""

from functools import partial
from pathlib import Path
from typing import Final

from podwire.model.errors import InvalidConfiguration, Unavailable
from podwire.model.store import OpenWaker, Store
from podwire.store.late import LateStore
from podwire.store.sqlite import SqliteStore
from podwire.store.sqlite_watch import ThreadWaker

SQLITE: Final = "sqlite://"
PATIENT_S: Final = 3.0
"""How long one try to open may take when another one follows: an agent's pods wait for it."""


def open_store(
    url: str,
    *,
    open_waker: OpenWaker = ThreadWaker,
    create: bool = True,
    patient: bool = False,
) -> Store:
    """Open `sqlite:///PATH`. `create`: make it when it is missing, else StorageFailure.

    With `patient` a file that is locked is opened later, and each call until then raises Unavailable. Raises
    InvalidConfiguration for what is no such URL; StorageFailure, NewerData; Unavailable unless `patient`.
    """
    path = url.removeprefix(SQLITE)
    if not url.startswith(SQLITE) or not path.startswith("/") or path.endswith("/"):
        raise InvalidConfiguration(
            f"open store {url!r}: this is no store that this podwire knows",
            hint=f"write {SQLITE}/PATH, the absolute path of a file",
        )
    return _open_file(Path(path), open_waker, create=create, patient=patient)


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
