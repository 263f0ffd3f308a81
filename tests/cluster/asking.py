"""Many questions at once from inside a pod, and what became of each: answered, refused, or dropped by which policy."""

import contextlib
import enum
import errno
import functools
import selectors
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from podwire.kernel import netns
from podwire.model.closing import Closing
from tests.lab.prober import DropFeed

DEADLINE_S: Final = 30.0
AGAIN_S: Final = 1.5
"""Agents tell of 200 drops of an endpoint in a second. TCP repeats what is silent by itself, datagrams do not."""
_REFUSALS: Final = frozenset({"no-back-end", "no-service-port"})
"""Reasons of drops that the asker is told of by its own kernel, too: that is waited for."""
_QUESTION: Final = {"tcp": b"GET / HTTP/1.0\r\n\r\n", "udp": b"?"}


class Fate(enum.StrEnum):
    """What became of a question."""

    ANSWERED = "answered"
    REFUSED = "refused"
    DENIED = "denied"
    """By a policy, as a drop event says."""
    DROPPED = "dropped"
    """For another reason."""
    ANSWER_DROPPED = "answer dropped"
    SILENT = "neither answered nor reported"
    FAILED = "failed at the socket"


@dataclass(frozen=True)
class Target:
    """What is asked."""

    protocol: str
    address: str
    port: int

    def __str__(self) -> str:
        return f"{self.protocol} {self.address} {self.port}"


@dataclass
class Outcome:
    """What became of a question."""

    fate: Fate = Fate.SILENT
    answer: str = ""
    """The server's line, or the error."""
    event: Mapping[str, Any] = field(default_factory=dict)

    @property
    def goal(self) -> str:
        """Where the packet that was dropped was going."""
        return str(self.event["to"]["ip"])

    @property
    def policies(self) -> list[tuple[str, str]]:
        """Those that the drop names."""
        return [(policy["namespace"], policy["name"]) for policy in self.event["policies"]]

    def __str__(self) -> str:
        keys = ("reason", "direction", "from", "to", "originalTo", "policies")
        shown = {key: self.event[key] for key in keys if key in self.event}
        return f"{self.fate} {self.answer} {shown if shown else ''}".strip()


_Key = tuple[str, str, int]
"""Protocol, address and port of a socket that asks."""


class Asker(Closing):
    """Asks from one network namespace; the agents of some sockets tell of drops."""

    def __init__(self, network_fd: int, api_sockets: Sequence[str]) -> None:
        self._network_fd = network_fd
        self._selector = selectors.DefaultSelector()
        self._waiting: dict[_Key, Outcome] = {}
        self._read: dict[_Key, bytes] = {}
        self._ports: set[tuple[str, int]] = set()
        self._datagrams: dict[_Key, socket.socket] = {}
        self._feeds = [DropFeed(path) for path in api_sockets]
        for feed in self._feeds:
            hear = functools.partial(self._hear, feed)
            self._selector.register(feed.socket, selectors.EVENT_READ, hear)

    def ask(self, targets: Iterable[Target]) -> Mapping[Target, Outcome]:
        """Ask all at once, each from a port of its own, and wait for what becomes of all."""
        outcomes = {target: Outcome() for target in targets}
        with contextlib.ExitStack() as opened:
            for target, outcome in outcomes.items():
                self._begin(target, outcome, opened)
            begin_s = again_s = time.monotonic()
            while self._waiting and time.monotonic() - begin_s < DEADLINE_S:
                for key, _ in self._selector.select(0.5):
                    key.data()
                if time.monotonic() - again_s > AGAIN_S:
                    again_s = time.monotonic()
                    self._repeat_datagrams()
            self._waiting.clear()
            self._datagrams.clear()
        return outcomes

    def _begin(self, target: Target, outcome: Outcome, opened: contextlib.ExitStack) -> None:
        made = opened.enter_context(self._open(target))
        made.setblocking(False)
        made.connect_ex((target.address, target.port))
        address, port = made.getsockname()[:2]
        key = (target.protocol, address, port)
        self._waiting[key] = outcome
        self._read[key] = b""
        opened.callback(self._forget, made)
        self._selector.register(
            made, selectors.EVENT_WRITE, functools.partial(self._send, made, key)
        )

    def _open(self, target: Target) -> socket.socket:
        """Open a socket with a port that no question had before: by it the answers and the drops are told apart."""
        family = socket.AF_INET6 if ":" in target.address else socket.AF_INET
        kind = socket.SOCK_STREAM if target.protocol == "tcp" else socket.SOCK_DGRAM
        with netns.namespace(self._network_fd):
            while True:
                made = socket.socket(family, kind)
                # connect(2) gives two connections one port where they go to different places; and a socket that was
                # refused lets go of a port that the kernel chose, though it is still open.
                made.bind(("", 0))
                port = target.protocol, made.getsockname()[1]
                if port not in self._ports:
                    self._ports.add(port)
                    return made
                made.close()

    def _repeat_datagrams(self) -> None:
        for key in self._waiting.keys() & self._datagrams.keys():
            with contextlib.suppress(OSError):  # what failed is read by the selector
                self._datagrams[key].send(_QUESTION[key[0]])

    def _send(self, made: socket.socket, key: _Key) -> None:
        failure = made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        try:
            if failure:
                raise OSError(failure, errno.errorcode[failure])
            made.send(_QUESTION[key[0]])
        except OSError as error:
            self._fail(made, key, error)
            return
        if key[0] == "udp":
            self._datagrams[key] = made
        receive = functools.partial(self._receive, made, key)
        self._selector.modify(made, selectors.EVENT_READ, receive)

    def _receive(self, made: socket.socket, key: _Key) -> None:
        try:
            data = made.recv(4096)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(made, key, error)
            return
        self._read[key] += data
        if data and key[0] == "tcp":
            return
        head, blank, body = self._read[key].decode(errors="replace").partition("\r\n\r\n")
        self._finish(key, Fate.ANSWERED, (body if blank else head).strip())
        self._forget(made)

    def _fail(self, made: socket.socket, key: _Key, error: OSError) -> None:
        is_refused = error.errno == errno.ECONNREFUSED
        self._finish(key, Fate.REFUSED if is_refused else Fate.FAILED, str(error))
        self._forget(made)

    def _finish(
        self, key: _Key, fate: Fate, answer: str = "", event: Mapping[str, Any] | None = None
    ) -> None:
        outcome = self._waiting.pop(key, None)
        if outcome is not None:
            outcome.fate, outcome.answer, outcome.event = fate, answer, event or {}

    def _hear(self, feed: DropFeed) -> None:
        for event in feed.take():
            if event["reason"] in _REFUSALS:
                continue
            sender, goal = (
                (str(event["protocol"]), end["ip"], end.get("port", 0))
                for end in (event["from"], event["to"])
            )
            fate = Fate.DENIED if event["reason"] == "policy" else Fate.DROPPED
            self._finish(sender, fate, event=event)
            self._finish(goal, Fate.ANSWER_DROPPED, event=event)

    def _forget(self, made: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(made)

    def close(self) -> None:
        """Stop following the drops."""
        self._selector.close()
        for feed in self._feeds:
            feed.close()
