"""Agents that are forked from one process, which has imported everything: half of what an agent's start takes.

`AgentForks` starts that process (tests.lab.forking) and asks it for agents. `ForkedAgent` is one of them, with what
tests need of `subprocess.Popen`. The process ends when the test closes the connection; its agents are ended by the rig.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Final

from podwire.model.closing import Closing

ROOT: Final = Path(__file__).resolve().parents[2]
ORDER_MAX_BYTES: Final = 1 << 16


class ForkedAgent:
    """One agent. A descriptor of the process tells that it has ended; its parent is asked for the exit code."""

    stdin: IO[bytes] | None = None
    stdout: IO[bytes] | None = None
    stderr: IO[bytes] | None = None

    def __init__(self, pid: int, forks: "AgentForks") -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._forks = forks
        self._process_fd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Give the exit code (of a signal: its number, negative), None while the process lives."""
        return self._look(0.0)

    def wait(self, timeout: float) -> int:
        """Wait for the end and give the exit code; TimeoutError after so many seconds."""
        code = self._look(timeout)
        if code is None:
            raise TimeoutError(f"the agent {self.pid} did not end within {timeout:g} s")
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._process_fd, number)

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def _look(self, wait_s: float) -> int | None:
        if self.returncode is None:
            ended = select.poll()
            ended.register(self._process_fd, select.POLLIN)
            if not ended.poll(wait_s * 1000):
                return None
            self.returncode = self._forks.collect(self.pid)
            os.close(self._process_fd)
        return self.returncode


class AgentForks(Closing):
    """The process that agents are forked from, until `close`."""

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.lab.forking", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
            )

    def start(
        self, namespace: str, config: str, log: IO[bytes], environment: Mapping[str, str]
    ) -> ForkedAgent:
        """Start an agent in a named network namespace; with PWT_CRASH_AT in `environment`, one that dies there."""
        return ForkedAgent(self.fork(namespace, config, log, environment), self)

    def fork(
        self, namespace: str, config: str, log: IO[bytes], environment: Mapping[str, str]
    ) -> int:
        """Start one that nobody waits for; gives its pid."""
        order = {"namespace": namespace, "config": config, "environment": dict(environment)}
        with self._asking:
            socket.send_fds(self._channel, [json.dumps(order).encode()], [log.fileno()])
            return self._answer()

    def collect(self, pid: int) -> int:
        """Give the exit code of an agent that has ended."""
        with self._asking:
            self._channel.send(json.dumps({"ended": pid}).encode())
            return self._answer()

    def close(self) -> None:
        """End the process."""
        self._channel.close()
        self._process.wait()

    def _answer(self) -> int:
        answer = self._channel.recv(ORDER_MAX_BYTES)
        assert answer, "the process that forks agents has ended; what it said is on stderr"
        return int(answer)
