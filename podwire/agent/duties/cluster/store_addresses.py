"""The addresses at which the store answers, because no other node's pods may have them.

Made by `agent.duties.cluster.duty`. Addresses are known at once; names are resolved on a thread of their own, because a
resolver that does not answer takes half a minute. The last result for a name counts until a new one differs.
"""

import ipaddress
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Final

from podwire.agent.duties.worker import Worker
from podwire.model.endpoint import IPAddress

LOOK_UP_S: Final = 60.0
"""How often names are looked up."""


class StoreAddresses:
    """The addresses of the hosts of a store. `known` may be read by any thread.

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
        self._telling = threading.Lock()
        self._worker = Worker("store-names", self._look_up)

    def start(self) -> None:
        """Begin to look names up, if there are any."""
        if self._names:
            self._worker.start()

    def stop(self) -> None:
        """Tell nobody of changes any more."""
        # Nothing ends a call of the resolver, and a stop must not wait for it.
        self._worker.stop(wait=False)
        with self._telling:
            self._changed = lambda: None

    def _look_up(self) -> float:
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
        return LOOK_UP_S

    def _gather(self) -> frozenset[IPAddress]:
        return frozenset(address for several in self._of.values() for address in several)
