"""What comes with a connection when it is accepted: bytes, descriptors, and who has sent them."""

import array
import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwire.kernel.arrivals import accept
from podwire.model.wire import Arrival

pytestmark = pytest.mark.kernel

LONG = bytes(range(256)) * 64


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    before = set(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "socket"))
        made.listen()
        made.setblocking(False)
        yield made
    assert set(os.listdir("/proc/self/fd")) == before


def connect(listener: socket.socket) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.connect(listener.getsockname())
    return client


@contextlib.contextmanager
def accepted(listener: socket.socket) -> Iterator[tuple[Arrival, socket.socket]]:
    arrival = accept(listener.fileno())
    with socket.socket(fileno=arrival.connection_fd) as connection:
        yield arrival, connection
    for descriptor in arrival.descriptors:
        os.close(descriptor)


def send(client: socket.socket, data: bytes, descriptors: int) -> None:
    numbers = array.array("i", [client.fileno()] * descriptors)
    client.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)])


def test_nobody_is_there(listener: socket.socket) -> None:
    with pytest.raises(BlockingIOError):
        accept(listener.fileno())


def test_what_is_no_listener_is_an_error_with_its_number() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        accept(-1)


def test_a_connection_on_which_nothing_has_come_yet(listener: socket.socket) -> None:
    with connect(listener) as client, accepted(listener) as (arrival, connection):
        assert arrival[1:] == (os.getpid(), os.getuid(), None, [], False)
        assert not connection.get_inheritable()
        assert connection.getblocking()
        client.sendall(b"later")
        assert connection.recv(100) == b"later"


def test_who_has_closed_has_sent_all(listener: socket.socket) -> None:
    connect(listener).close()
    with accepted(listener) as (arrival, _):
        assert arrival.data == b""


@pytest.mark.parametrize("count", [1, 2, 4])
def test_bytes_and_descriptors_come_together(listener: socket.socket, count: int) -> None:
    with connect(listener) as client:
        send(client, b"frame", count)
        with accepted(listener) as (arrival, _):
            assert (arrival.data, len(arrival.descriptors), arrival.is_cut) == (
                *(b"frame", count, False),
            )
            for descriptor in arrival.descriptors:
                assert os.path.sameopenfile(descriptor, client.fileno())
                assert not os.get_inheritable(descriptor)


def test_too_many_descriptors_are_cut_and_said_to_be(listener: socket.socket) -> None:
    with connect(listener) as client:
        send(client, b"frame", 5)
        with accepted(listener) as (arrival, _):
            assert (len(arrival.descriptors), arrival.is_cut) == (4, True)


def test_what_does_not_fit_is_read_later(listener: socket.socket) -> None:
    with connect(listener) as client:
        client.sendall(LONG)
        with accepted(listener) as (arrival, connection):
            assert arrival.data is not None
            assert 0 < len(arrival.data) < len(LONG)
            assert arrival.data + connection.recv(len(LONG)) == LONG
