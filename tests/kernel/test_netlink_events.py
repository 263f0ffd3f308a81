"""What the kernel tells of changes, and what it does not even bring to this process."""

import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from podwire.kernel.netlink import NetlinkSocket
from podwire.kernel.netlink_events import (
    GROUP_IPV4_ADDRESS,
    GROUP_IPV4_ROUTE,
    GROUP_IPV6_ADDRESS,
    GROUP_IPV6_ROUTE,
    GROUP_LINK,
    NetlinkEvents,
)
from podwire.kernel.rtnl.link import RTM_DELLINK, RTM_NEWLINK, LinkEnd, create_link, delete_link
from podwire.kernel.rtnl.route import (
    RTM_DELADDR,
    RTM_DELROUTE,
    RTM_NEWADDR,
    RTM_NEWROUTE,
    read_route,
)
from tests.kernel.conftest import Namespace

ROOT = Path(__file__).resolve().parents[2]
IGNORED_FROM = 1 << 20
LOOPBACK = 1
GROUPS = GROUP_LINK | GROUP_IPV4_ADDRESS | GROUP_IPV4_ROUTE | GROUP_IPV6_ADDRESS | GROUP_IPV6_ROUTE


def test_a_burst_is_one_change(netlink: NetlinkSocket) -> None:
    # Of the loopback the kernel may still be telling.
    with NetlinkEvents(GROUP_LINK, lambda kind, body: _device_of(kind, body) != LOOPBACK) as events:
        for number in range(60, 65):
            netlink.execute([create_link("bridge", LinkEnd(f"pwb{number}", number))])
        assert events.wait(30)
        assert not events.wait(0)


def test_what_does_not_matter_does_not_end_the_wait(netlink: NetlinkSocket) -> None:
    kinds = []

    def matters(kind: int, _body: bytes) -> bool:
        kinds.append(kind)
        return False

    with NetlinkEvents(GROUP_LINK, matters) as events:
        netlink.execute([create_link("bridge", LinkEnd("pwbr", 55))])
        assert not events.wait(0.05)
    assert kinds


def test_what_was_lost_counts_as_a_change(netlink: NetlinkSocket) -> None:
    with NetlinkEvents(GROUP_LINK, lambda _kind, _body: False, buffer_bytes=1) as events:
        for _ in range(50):
            netlink.execute([create_link("bridge", LinkEnd("pwbr", 55))])
            netlink.execute([delete_link(55)])
        assert events.wait(0)
        assert not events.wait(0)


def test_another_thread_ends_the_wait(host: Namespace) -> None:
    del host
    with NetlinkEvents(GROUP_LINK, lambda _kind, _body: True) as events:
        waker = threading.Timer(0.05, events.wake)
        waker.start()
        began = time.monotonic()
        assert not events.wait(60)
        assert time.monotonic() - began < 30
        waker.join()
    events.wake()


def _device_of(kind: int, body: bytes) -> int:
    """Give the index of the device that a message is about, 0 when it names none."""
    if kind in (RTM_NEWROUTE, RTM_DELROUTE):
        return read_route(body).index
    return int(struct.unpack_from("=I", body, 4)[0])


def _kinds_told(host: Namespace, index: int, commands: Sequence[str]) -> set[int]:
    """Give the types of messages that arrive while `pwbr`, with this index, comes, is used and goes."""
    told: set[int] = set()

    def matters(kind: int, body: bytes) -> bool:
        if (
            _device_of(kind, body) != LOOPBACK
        ):  # the kernel may still be telling of a namespace's first moments
            told.add(kind)
        return False

    with NetlinkEvents(GROUPS, matters, ignored_from=IGNORED_FROM) as events:
        host.run("ip", "link", "add", "pwbr", "index", str(index), "type", "bridge")
        for command in commands:
            host.run("ip", *command.split())
        host.run("ip", "link", "delete", "pwbr")
        assert not events.wait(0)
    return told


USE = (
    "link set pwbr up",
    "addr add 10.9.0.1/24 dev pwbr",
    "addr add fd09::1/64 dev pwbr nodad",
    "route add 10.10.0.0/24 dev pwbr proto 99",
    "route add fd10::/64 dev pwbr proto 99",
    "route delete 10.10.0.0/24 dev pwbr",
    "route delete fd10::/64 dev pwbr",
    "addr delete 10.9.0.1/24 dev pwbr",
)


@pytest.mark.parametrize("index", [IGNORED_FROM, IGNORED_FROM + 5, (1 << 31) - 1])
def test_nothing_arrives_about_a_device_that_is_ignored(host: Namespace, index: int) -> None:
    assert _kinds_told(host, index, USE) == set()


@pytest.mark.parametrize("index", [7, 256, 65536, IGNORED_FROM - 1])
def test_everything_arrives_about_any_other(host: Namespace, index: int) -> None:
    assert _kinds_told(host, index, USE) == {
        *(RTM_NEWLINK, RTM_DELLINK, RTM_NEWADDR, RTM_DELADDR, RTM_NEWROUTE, RTM_DELROUTE)
    }


def test_a_route_without_a_device_arrives(host: Namespace) -> None:
    told: set[int] = set()

    def matters(kind: int, _body: bytes) -> bool:
        told.add(kind)
        return kind == RTM_NEWROUTE

    with NetlinkEvents(GROUPS, matters, ignored_from=IGNORED_FROM) as events:
        host.run("ip", "route", "add", "unreachable", "10.11.0.0/24")
        assert events.wait(30)
    assert RTM_NEWROUTE in told


WHO_COMMITS = """
import subprocess, sys
from podwire.datapath.changes import watch_tables
from podwire.kernel.nft import Nftables

told = []
with watch_tables(told.append) as news, Nftables() as tables:
    tables.run("add table inet one")
    print(tables.in_process, news.wait(0.2), told)
    subprocess.run(["nft", "add", "table", "inet", "two"], check=True)
    print(news.wait(60), told)
"""


@pytest.mark.parametrize("is_contained", [False, True], ids=["on the host", "in a container"])
def test_an_own_commit_is_told_from_a_strangers(is_contained: bool) -> None:
    """The kernel names the thread by its number in the first pid namespace, where a container's agent is not."""
    room = ["unshare", "--net", *(["--pid", "--fork", "--mount-proc"] if is_contained else [])]
    done = subprocess.run(
        [*room, sys.executable, "-c", WHO_COMMITS],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        timeout=120,
    )
    assert done.stdout.splitlines() == ["True False ['']", "True ['', 'nft']"], done.stderr
