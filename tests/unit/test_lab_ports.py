"""Ports that a lab's servers are given: nobody is given one twice, in this process or in another."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from podwire.lab import ports

_IN_ANOTHER_PROCESS = """
import sys
from podwire.lab import ports
ports._RANGE = range(int(sys.argv[1]), int(sys.argv[2]))
print(ports.claim(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> Iterator[range]:
    """Let only four ports be given out: a repetition then shows at once."""
    claimed: dict[int, socket.socket] = {}
    monkeypatch.setattr(ports, "_claims", claimed)
    first = ports.claim()
    ports.release(first)
    found = range(first, first + 4)
    monkeypatch.setattr(ports, "_RANGE", found)
    yield found
    ports.release(*list(claimed))


def test_a_port_is_given_once(four: range) -> None:
    given: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            given.append(ports.claim())
    assert given
    assert len(set(given)) == len(given) <= len(four)


def test_a_released_port_is_given_again(four: range) -> None:
    given: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            given.append(ports.claim())
    ports.release(given[0], given[0])
    assert ports.claim() == given[0]


def test_a_port_that_another_process_was_given_is_taken_while_it_runs(four: range) -> None:
    command = [sys.executable, "-c", _IN_ANOTHER_PROCESS, str(four.start), str(four.stop)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = int(other.stdout.readline())
        ours: set[int] = set()
        with contextlib.suppress(OSError):
            while True:
                ours.add(ports.claim())
        other.communicate("")
    assert theirs in four
    assert theirs not in ours


def test_a_port_that_a_server_listens_on_is_not_given(four: range) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", four[2]))
        server.listen()
        with contextlib.suppress(OSError):
            while True:
                assert ports.claim() != four[2]
