"""A store that is opened when that becomes possible: while it is away, every call says so and tries again.

Made by `store.open` for an agent, which also starts without its store. Waits only for a store that is away. A store
that is damaged, of a newer layout or no store at all is refused as usual. Implements `model.store.Store`.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from podwire.model.errors import Unavailable
from podwire.model.store import Fields, Known, ObjectKey, Revisions, Store, StoredObject, Watch
from podwire.model.store.leases import Leases
from podwire.model.store.promises import FULL, Promises

TRY_AGAIN_S: Final = 1.0


class LateStore:
    """The store that `open_it` gives, as soon as that does not raise Unavailable any more."""

    def __init__(self, open_it: Callable[[], Store], first_failure: Unavailable) -> None:
        self._open_it = open_it
        self._failure = first_failure
        self._again_s = time.monotonic() + TRY_AGAIN_S
        self._opened: Store | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    @property
    def promises(self) -> Promises:
        """See `model.store.Store`, as for all that follows. Only a store of podwire's own is opened late."""
        return FULL

    def get(self, key: ObjectKey) -> StoredObject | None:
        return self._open().get(key)

    def list(
        self,
        kind: str,
        namespace: str | None = None,
        *,
        at_least: int | None = None,
        known: Known | None = None,
    ) -> tuple[Sequence[StoredObject], int]:
        return self._open().list(kind, namespace, at_least=at_least, known=known)

    def create(self, new: StoredObject) -> StoredObject:
        return self._open().create(new)

    def update(self, new: StoredObject) -> StoredObject:
        return self._open().update(new)

    def patch(
        self, key: ObjectKey, changes: Fields, *, revision: int | None = None, uid: str = ""
    ) -> StoredObject:
        return self._open().patch(key, changes, revision=revision, uid=uid)

    def delete(self, key: ObjectKey, *, revision: int | None = None, uid: str = "") -> StoredObject:
        return self._open().delete(key, revision=revision, uid=uid)

    @contextmanager
    def together(self) -> Iterator[None]:
        with self._open().together():
            yield

    def watch(self, after: Revisions) -> Watch:
        return self._open().watch(after)

    def leases(self) -> Leases | None:
        return self._open().leases()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._opened is not None:
                self._opened.close()

    def _open(self) -> Store:
        """Give the store; one caller at a time tries to open it, the others hear at once that it is away."""
        if self._opened is not None:
            return self._opened
        # Opening may take as long as a busy timeout. Callers that would queue behind it are ADDs, which need an
        # answer.
        if not self._lock.acquire(blocking=False):
            raise self._away()
        try:
            if self._opened is None:
                if self._is_closed or time.monotonic() < self._again_s:
                    raise self._away()
                self._opened = self._try()
            return self._opened
        finally:
            self._lock.release()

    def _try(self) -> Store:
        try:
            return self._open_it()
        except Unavailable as failure:
            self._failure = failure
            self._again_s = time.monotonic() + TRY_AGAIN_S
            raise

    def _away(self) -> Unavailable:
        return Unavailable(self._failure.message, hint=self._failure.hint)
