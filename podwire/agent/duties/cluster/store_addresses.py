"""The addresses at which the store answers, because no other node's pods may have them.

Made by `agent.duties.cluster.duty`. Addresses are known at once; names are resolved on a thread of their own, because a
resolver that does not answer takes half a minute. The last result for a name counts until a new one differs.
"""

import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from podwire.model.endpoint import IPAddress

LOOK_UP_S: Final = 60.0
"""How often names are looked up."""


class StoreAddresses:
    """The addresses of the hosts of a store. `known` may be read by any thread, one thread asks for more.

    `changed` is called after names mean something else, on the thread that looked them up.
    """

    def __init__(self, hosts: Iterable[str], changed: Callable[[], None]) -> None:
        self._changed = changed
        self._names: list[str] = []
        self._of: dict[str, frozenset[IPAddress]] = {}
        for host in hosts:
            try:
                self._of[host] = frozenset({ipaddress.ip_address(host.strip("[]"))})
            except ValueError:
                self._names.append(host)
        self.known = self._gather()
        self._due_s = 0.0
        self._thread: threading.Thread | None = None
        self._telling = threading.Lock()

    def follow(self) -> None:
        """Have names looked up, if it is time; waits for nothing."""
        is_busy = self._thread is not None and self._thread.is_alive()
        if not self._names or is_busy or time.monotonic() < self._due_s:
            return
        self._due_s = time.monotonic() + LOOK_UP_S
        # A daemon: nothing ends a call of the resolver, and a stop must not wait for it.
        self._thread = threading.Thread(target=self._look_up, name="store-names", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Tell nobody of changes any more."""
        with self._telling:
            self._changed = _tell_nobody

    def _look_up(self) -> None:
        for name in self._names:
            try:
                answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError):  # the latter of what can be no name: a..b
                # A resolver that fails takes nothing back: the last answer stands.
                continue
            self._of[name] = frozenset(ipaddress.ip_address(answer[4][0]) for answer in answers)
        before, self.known = self.known, self._gather()
        if before != self.known:
            with self._telling:
                # Under the lock, so that after `stop` nothing is told.
                self._changed()

    def _gather(self) -> frozenset[IPAddress]:
        return frozenset(address for several in self._of.values() for address in several)


def _tell_nobody() -> None:
    pass
