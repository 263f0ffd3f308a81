"""Two pods that talk to each other, whoever attached them, and one run of the C program `flow` between them."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from podwire.kernel import netns


@dataclass(frozen=True)
class PodPair:
    """A client and a server by their namespaces."""

    client: str
    server: str
    address: str
    """Of the server."""
    mtu: int
    """Of both devices, in bytes."""


def run_flow(
    tool: str,
    what: str,
    pair: PodPair,
    amount: int,
    cpus: tuple[str, str],
    congestion_control: str | None = None,
) -> Sequence[int]:
    """Run `flow` (see flow.c) once; `amount` is milliseconds or round trips. RuntimeError shows what it said.

    It has a real-time priority: what else the machine has to do waits until it ends.
    """
    places = [netns.named_path(namespace) for namespace in (pair.server, pair.client)]
    more = [congestion_control] if congestion_control else []
    words = ["chrt", "--fifo", "10", tool, what, *places, pair.address, str(amount), *cpus, *more]
    return read_numbers(words, f"{what} from {pair.client} to {pair.server}")


def read_numbers(words: Sequence[str], intent: str) -> list[int]:
    """Run a command that prints numbers; RuntimeError shows what it said when it failed."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{intent}: {done.stderr}")
    return [int(word) for word in done.stdout.split()]
