"""Many short exchanges between pods of one node (`exchanges.c`), and whether every packet of them has arrived."""

import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from podwire.kernel import netns

SETTLE_S: Final = 30


@dataclass(frozen=True)
class Town:
    """Who asks, by namespaces, and who answers, by namespace and IPv4 address."""

    clients: Sequence[str]
    servers: Sequence[tuple[str, str]]

    @property
    def namespaces(self) -> list[str]:
        """Give everybody's namespace."""
        return [*self.clients, *(namespace for namespace, _ in self.servers)]

    def start(
        self, tool: str, *, seconds: float, udp_per_s: float, tcp_per_s: float, at_most_s: float
    ) -> "subprocess.Popen[str]":
        """Start the exchanges of so many seconds, which end after `at_most_s` whatever is missing then."""
        words = [
            str(number) for number in (seconds, at_most_s, udp_per_s, tcp_per_s, len(self.clients))
        ]
        words += [netns.named_path(client) for client in self.clients]
        for namespace, address in self.servers:
            words += [netns.named_path(namespace), address]
        return subprocess.Popen([tool, *words], stdout=subprocess.PIPE, text=True)

    def count_packets(self) -> tuple[int, int]:
        """Give how many IPv4 packets all stacks here have sent, and how many they have received."""
        rows = [_read_ip_counters(namespace) for namespace in self.namespaces]
        return sum(row["OutRequests"] for row in rows), sum(row["InReceives"] for row in rows)

    def count_packets_since(self, before: tuple[int, int]) -> tuple[int, int]:
        """Give (sent, received) since then, once what is on its way has come: what is missing then is lost."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            after = self.count_packets()
            sent, received = (now - then for now, then in zip(after, before, strict=True))
            if sent == received or time.monotonic() > deadline:
                return sent, received
            time.sleep(0.1)


def read_outcome(ended: "subprocess.Popen[str]") -> dict[str, Any]:
    """Wait for the exchanges and read what became of them; RuntimeError when they could not be made."""
    said, _ = ended.communicate()
    if ended.returncode:
        raise RuntimeError(f"exchanges ended with {ended.returncode}")
    found: dict[str, Any] = json.loads(said)
    return found


def read_in(namespace: str, path: str) -> str:
    """Read a file below /proc as a process of a namespace sees it."""
    command = ["nsenter", f"--net={netns.named_path(namespace)}", "cat", path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _read_ip_counters(namespace: str) -> dict[str, int]:
    names, values = read_in(namespace, "/proc/net/snmp").splitlines()[:2]
    return dict(zip(names.split()[1:], map(int, values.split()[1:]), strict=True))
