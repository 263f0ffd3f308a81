"""The addresses at which the store answers, because no other node's pods may have them.

Made by `agent.duties.cluster.duty`. Addresses are known at once; names are resolved on a thread that may wait. The
last result for a name counts until a new one differs.
"""

import ipaddress
import socket
import time
from collections.abc import Iterable
from typing import Final

from podwire.model.cluster import IPAddress

LOOK_UP_S: Final = 60.0
"""How often names are looked up."""


class StoreAddresses:
    """The addresses of the hosts of a store. `known` may be read by any thread, one thread looks up."""

    def __init__(self, hosts: Iterable[str]) -> None:
        self._names: list[str] = []
        self._of: dict[str, frozenset[IPAddress]] = {}
        for host in hosts:
            try:
                self._of[host] = frozenset({ipaddress.ip_address(host.strip("[]"))})
            except ValueError:
                self._names.append(host)
        self.known = self._gather()
        self._due_s = 0.0

    def look_up(self) -> bool:
        """Look names up, if it is time; tells whether they mean something else now."""
        if not self._names or time.monotonic() < self._due_s:
            return False
        self._due_s = time.monotonic() + LOOK_UP_S
        for name in self._names:
            try:
                found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            except OSError:
                continue
            self._of[name] = frozenset(ipaddress.ip_address(one[4][0]) for one in found)
        before, self.known = self.known, self._gather()
        return before != self.known

    def _gather(self) -> frozenset[IPAddress]:
        return frozenset(address for several in self._of.values() for address in several)
