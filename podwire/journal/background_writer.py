"""Endpoint directories written in order by one background thread, so that an ADD need not wait for them.

Wraps `journal.directories.RunDirectories` for `agent.node`. The directories are for people, so a moment's delay harms
nobody. A caller that is faster than the disk waits when the queue is full. `close` writes what is still waiting. The
thread looks for work by itself: if it were woken at once, it would take the interpreter from the ADD that is about to
answer.
"""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from podwire.journal.directories import RunDirectories
from podwire.model.endpoint import EndpointRecord
from podwire.model.ids import EndpointId
from podwire.model.interfaces import EndpointConfig

_log = logging.getLogger(__name__)

LINE_MAX: Final = 4096
LOOK_S: Final = 0.5
GATHER_MAX_S: Final = 1.0
"""So long a line that still grows is left alone."""


class BackgroundWriter:
    """Implements `model.interfaces.EndpointDirectories`. Calls return at once; what cannot be written is logged."""

    def __init__(self, directories: RunDirectories) -> None:
        self._directories = directories
        self._line: queue.Queue[Callable[[], None]] = queue.Queue(LINE_MAX)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="directories", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what is waiting and end the thread."""
        self._closing.set()
        self._thread.join()

    def publish(self, record: EndpointRecord, config: EndpointConfig) -> None:
        self._line.put(partial(self._directories.publish, record, config))

    def keep_failure(self, record: EndpointRecord, config: EndpointConfig, cause: str) -> None:
        self._line.put(partial(self._directories.keep_failure, record, config, cause))

    def remove(self, endpoint_id: EndpointId) -> None:
        self._line.put(partial(self._directories.remove, endpoint_id))

    def prune(self, keep: Iterable[EndpointId]) -> None:
        self._line.put(partial(self._directories.prune, tuple(keep)))

    def _run(self) -> None:
        seen, waited_s = 0, 0.0
        while not self._closing.wait(LOOK_S):
            before, seen = seen, self._line.qsize()
            waited_s += LOOK_S
            # While the line grows a burst of ADDs goes on, and this thread would take the interpreter from them.
            if seen == before or waited_s >= GATHER_MAX_S or self._line.full():
                self._write_waiting()
                seen, waited_s = 0, 0.0
        self._write_waiting()

    def _write_waiting(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                write = self._line.get_nowait()
                try:
                    write()
                except OSError as failure:
                    _log.warning("write an endpoint's directory", extra={"error": str(failure)})
