"""What leads to sockets of the host is the host from the moment in which the kernel tells of it, and no longer."""

from collections.abc import Iterator

import pytest

from tests.lab.rig import Rig, run
from tests.waiting import wait_for, within

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

WITHIN_S = 20.0
"""For four changes in a row: far below the 30 s that the look at everything would take for each."""


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig() as made:
        made.start()
        yield made


def identity_of(rig: Rig, network: str) -> object:
    """Ask whom the programs take a network for; None = they have no row of it."""
    rows = rig.get("/map/ipcache")[1]["rows"]
    return next((row["identity"] for row in rows if row["prefix"] == network), None)


@pytest.mark.parametrize(
    ("what", "network"),
    [
        pytest.param("addr {} 192.0.2.9/24 dev uplink", "192.0.2.9/32", id="second address"),
        pytest.param("addr {} 169.254.20.10/32 dev uplink", "169.254.20.10/32", id="link-local"),
        pytest.param("addr {} 2001:db8:7::1/64 dev uplink", "2001:db8:7::/128", id="anycast"),
        pytest.param(
            "addr {} 198.51.100.1/24 brd + dev uplink", "198.51.100.255/32", id="broadcast"
        ),
        pytest.param("route {} local 198.18.0.0/15 dev lo", "198.18.0.0/15", id="network"),
        pytest.param("-6 route {} local 2001:db8:8::/48 dev lo", "2001:db8:8::/48", id="network-6"),
    ],
)
def test_what_comes_and_goes_is_followed(rig: Rig, what: str, network: str) -> None:
    def follow() -> None:
        for verb, wanted in (("add", 1), ("del", None), ("add", 1), ("del", None)):
            run("ip", "-n", rig.name, *what.format(verb).split())
            wait_for(lambda wanted=wanted: identity_of(rig, network) == wanted, verb)  # type: ignore[misc]

    within(WITHIN_S, follow)
