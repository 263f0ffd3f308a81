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
    tool: str, what: str, pair: PodPair, amount: int, cpus: tuple[str, str]
) -> Sequence[int]:
    """Run `flow` (see flow.c) once; `amount` is milliseconds or round trips. RuntimeError shows what it said."""
    places = [netns.named_path(one) for one in (pair.server, pair.client)]
    done = subprocess.run(
        [tool, what, *places, pair.address, str(amount), *cpus],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{what} from {pair.client} to {pair.server}: {done.stderr}")
    return [int(word) for word in done.stdout.split()]
