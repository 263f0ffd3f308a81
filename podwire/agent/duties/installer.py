"""Keep launcher and network where the container runtime looks for them, on a thread of its own.

Made by `agent.assemble` if `cni_install` says so. What is missing or differs is written when the agent starts and
whenever somebody changed it; the network only while an ADD would succeed. Nothing is removed when the agent stops: an
upgrade must not make the node NotReady, and running pods need the launcher for their DEL.
"""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from podwire.agent.duties.worker import Worker, WorkingDuty
from podwire.agent.health import Health
from podwire.control.installation.steps import Installation, find_obstacles
from podwire.model.errors import PodwireError
from podwire.model.installation.files import CniFiles
from podwire.model.store import Waker

CHECK: Final = "cni-files"
_RETRY_S: Final = 1.0
"""While something is missing: no file tells when an ADD begins to succeed."""
_LOOK_S: Final = 60.0
_PAUSE_S: Final = 0.2
"""Pause after a change, so that a program which writes all the time, or writes against us, does not cost a core."""

_log = logging.getLogger(__name__)


class Installer(WorkingDuty):
    """One runtime's directories. `status` does what CNI STATUS does; `installed` is told once, when all is there."""

    def __init__(
        self,
        installation: Installation,
        paths: Iterable[Path],
        *,
        status: Callable[[], None],
        watch: Callable[..., Waker],
        health: Health,
        installed: Callable[[], None] = lambda: None,
    ) -> None:
        self._installation = installation
        self._paths = tuple(paths)
        self._status = status
        self._watch = watch
        self._health = health
        self._installed: Callable[[], None] | None = installed
        self._refused = ""
        self._warned: frozenset[str] = frozenset()
        self._waker: Waker | None = None
        self._worker = Worker("installer", self._work, self._fail, interrupt=self._wake)

    def stop(self) -> None:
        """End the thread; the files stay."""
        super().stop()
        if self._waker is not None:
            self._waker.close()
            self._waker = None

    def look(self) -> bool:
        """Install what is missing, and record how it stands; True when a runtime finds all it needs."""
        files = self._installation.directories.read()
        # The network's file makes the node Ready in the eyes of the runtime, so it is written last, and only while an
        # ADD would succeed.
        if not self._installation.is_complete(files):
            written = self._installation.install(serves=self._serves)
            if written:
                _log.info("installed for the container runtime", extra={"keys": written})
            files = self._installation.directories.read()
        complete = self._installation.is_complete(files)
        self._health.report(CHECK, complete, f"not installed yet: {self._refused}", critical=False)
        self._warn(files)
        if complete and self._installed is not None:
            self._installed()
            self._installed = None
        return complete

    def _serves(self) -> bool:
        try:
            self._status()
        except PodwireError as error:
            self._refused = error.message
            return False
        self._refused = ""
        return True

    def _warn(self, files: CniFiles) -> None:
        warnings = frozenset(find_obstacles(files))
        for message in warnings - self._warned:
            _log.warning("the container runtime", extra={"cause": message})
        for message in self._warned - warnings:
            self._health.warn(message, "")
        for message in warnings:
            self._health.warn(message, message)
        self._warned = warnings

    def _work(self) -> float:
        complete = self._try_to_look()
        # Only now: the directories are there after the first look.
        if self._waker is None:
            self._waker = self._watch(*self._paths)
            # The watch does not tell what changed between the look and its beginning.
            return 0.0
        if not self._worker.is_stopping:
            self._waker.wait(_LOOK_S if complete else _RETRY_S)
        return _PAUSE_S

    def _try_to_look(self) -> bool:
        try:
            return self.look()
        except PodwireError as error:
            self._health.report(CHECK, ok=False, message=error.told, critical=False)
            return False

    def _fail(self, _error: PodwireError) -> float:
        """Look without a watch, as long as there is none."""
        return _RETRY_S

    def _wake(self) -> None:
        if self._waker is not None:
            self._waker.wake()
