"""Connections that policy may or may not let through, and the drops that tell why.

A server echoes on a port that policies can name. A refusal counts as seen only when the agent told of the drop, so a
test never takes something else that is broken for a policy.
"""

import contextlib
import selectors
import socket
import threading
from collections.abc import Iterator
from typing import Any, Final

from tests.runtime.machine import Machine, Place
from tests.waiting import wait_for

ANSWER_DEADLINE_S: Final = 30.0
REFUSED_AFTER_S: Final = 0.5
"""How long a connection that is to be dropped is tried; its drop must be told besides."""
_LOOK_S: Final = 0.1


@contextlib.contextmanager
def echo_server(machine: Machine, place: Place, address: str, port: int) -> Iterator[None]:
    """Echo what comes to an address and port at a place, on as many connections as there are."""
    stop = threading.Event()
    with machine.open_socket(place, address) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(16)
        server = threading.Thread(target=_echo, args=(listener, stop))
        server.start()
        try:
            yield
        finally:
            stop.set()
            server.join()


def _echo(listener: socket.socket, stop: threading.Event) -> None:
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as opened:
        selector.register(listener, selectors.EVENT_READ)
        while not stop.is_set():
            for key, _ in selector.select(_LOOK_S):
                one = key.fileobj
                assert isinstance(one, socket.socket)
                if one is listener:
                    accepted = opened.enter_context(listener.accept()[0])
                    selector.register(accepted, selectors.EVENT_READ)
                    continue
                with contextlib.suppress(OSError):
                    if data := one.recv(4096):
                        one.sendall(data)
                        continue
                selector.unregister(one)


def reaches(
    machine: Machine,
    place: Place,
    address: str,
    port: int,
    *,
    source: str = "",
    within_s: float = REFUSED_AFTER_S,
) -> bool:
    """Tell whether a server answers in time; `source` is the client's own address, of several."""
    try:
        with Conversation(
            machine, place, address, port, source=source, within_s=within_s
        ) as opened:
            return opened.is_answered(within_s)
    except TimeoutError:
        return False


class Conversation:
    """One open connection to an echo server."""

    def __init__(
        self,
        machine: Machine,
        place: Place,
        address: str,
        port: int,
        *,
        source: str = "",
        within_s: float = ANSWER_DEADLINE_S,
    ) -> None:
        self._sent = 0
        self._echoed = 0
        self._socket = machine.open_socket(place, address)
        try:
            self._socket.settimeout(within_s)
            if source:
                self._socket.bind((source, 0))
            self._socket.connect((address, port))
            self.own_port: int = self._socket.getsockname()[1]
        except BaseException:
            self._socket.close()
            raise

    def say(self) -> None:
        """Send something."""
        self._socket.sendall(b".")
        self._sent += 1

    def is_answered(self, within_s: float = ANSWER_DEADLINE_S) -> bool:
        """Send something, and tell whether everything that was ever sent comes back in time."""
        self.say()
        self._socket.settimeout(within_s)
        with contextlib.suppress(TimeoutError):
            while self._echoed < self._sent and (data := self._socket.recv(4096)):
                self._echoed += len(data)
        return self._echoed == self._sent

    def is_silent(self) -> bool:
        """Tell whether nothing has come that was not read yet."""
        self._socket.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            self._echoed += len(self._socket.recv(4096, socket.MSG_PEEK))
            return False
        return True

    def __enter__(self) -> "Conversation":
        return self

    def __exit__(self, *_exception: object) -> None:
        self._socket.close()


def list_drops(machine: Machine, source: str, target: str) -> list[dict[str, Any]]:
    """Give the drops between two addresses that the agent remembers, oldest first."""
    said = machine.change(
        *("observe", "--verdict", "dropped", "--last", "10000", "-o", "json"),
        *("--from", source, "--to", target),
    )
    found: list[dict[str, Any]] = said.document
    return found


def assert_refused(
    machine: Machine, place: Place, source: str, target: str, port: int, *, by: str
) -> dict[str, Any]:
    """Fail unless policy drops a connection and names the policy; gives the event of the drop."""
    before = len(list_drops(machine, source, target))
    assert not reaches(machine, place, target, port, source=source)
    return wait_drop(machine, source, target, before, by=by)


def wait_drop(
    machine: Machine, source: str, target: str, before: int = 0, *, by: str
) -> dict[str, Any]:
    """Wait for a drop after the first `before` ones, and give it; it must name the policy."""
    found: list[dict[str, Any]] = wait_for(
        lambda: list_drops(machine, source, target)[before:], f"a drop of {source} -> {target}", 30
    )
    assert found[-1]["reason"] == "policy", found[-1]
    assert [policy["name"] for policy in found[-1]["policies"]] == [by], found[-1]
    return found[-1]
