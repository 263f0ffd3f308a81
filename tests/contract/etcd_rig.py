"""A real etcd on the loopback, with an own directory: started, killed, stopped for a while, started again."""

import base64
import json
import os
import shutil
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from podwire.lab import ports
from podwire.lab.state import describe_process, freeze_process

PROGRAM = "etcd"
MISSING = "no program 'etcd': apt-get install etcd-server"
ENDPOINT_VARIABLE = "PODWIRE_TEST_ETCD"
"""Where processes that tests start find the endpoint."""
DEADLINE_S = 180.0


def require() -> None:
    """Skip the test where there is no etcd to start."""
    if shutil.which(PROGRAM) is None:
        pytest.skip(MISSING)


class Etcd:
    """One etcd of one member. `flags`: further ones of its command line."""

    def __init__(self, directory: Path, flags: Sequence[str] = (), *, scheme: str = "http") -> None:
        self.directory = directory
        self.flags = list(flags)
        self.scheme = scheme
        self.context: ssl.SSLContext | None = None
        """How this rig asks it, when it wants TLS."""
        self.token = ""
        self.client_port, self.peer_port = ports.claim(), ports.claim()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """HOST:PORT of the clients."""
        return f"127.0.0.1:{self.client_port}"

    @property
    def pid(self) -> int:
        """Of the process that runs."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it with what its directory holds, and wait until it answers."""
        assert self._process is None, "it runs"
        clients = f"{self.scheme}://{self.endpoint}"
        peers = f"http://127.0.0.1:{self.peer_port}"
        command = [
            PROGRAM,
            *("--name", "one", "--data-dir", str(self.directory / "data")),
            *("--listen-client-urls", clients, "--advertise-client-urls", clients),
            *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
            *("--initial-cluster", f"one={peers}", "--logger", "zap"),
            *self.flags,
        ]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline_s = time.monotonic() + DEADLINE_S
        while not self._answers():
            assert self._process.poll() is None, self.read_log()
            assert time.monotonic() < deadline_s, self.read_log()
            time.sleep(0.02)

    def kill(self) -> None:
        """End it without warning."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it, if it runs."""
        if self._process is not None:
            self._end(signal.SIGTERM)

    def freeze(self) -> None:
        """Let it answer nobody, and keep its connections."""
        freeze_process(describe_process(self.pid))

    def thaw(self) -> None:
        """End `freeze`."""
        os.kill(self.pid, signal.SIGCONT)

    def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """Ask the gateway, by other code than ours."""
        request = urllib.request.Request(
            f"{self.scheme}://{self.endpoint}/v3/{path}",
            json.dumps(body).encode(),
            {"Authorization": self.token} if self.token else {},
        )
        with urllib.request.urlopen(request, timeout=30, context=self.context) as answer:
            return json.load(answer)

    def put(self, key: str, value: bytes) -> int:
        """Set a key; gives the revision."""
        body = {"key": _encode(key.encode()), "value": _encode(value)}
        return int(self.ask("kv/put", body)["header"]["revision"])

    def read(self, key: str) -> bytes | None:
        """Read a key."""
        found = self.ask("kv/range", {"key": _encode(key.encode())}).get("kvs", [])
        return base64.b64decode(found[0].get("value", "")) if found else None

    def compact(self, revision: int) -> None:
        """Make it forget what was before a revision."""
        self.ask("kv/compaction", {"revision": revision, "physical": True})

    def wipe(self) -> None:
        """Remove all that is ours."""
        body = {"key": _encode(b"/podwire/"), "range_end": _encode(b"/podwire0")}
        self.ask("kv/deleterange", body)

    def read_log(self, characters: int = 2000) -> str:
        """Give the end of what it said."""
        return (self.directory / "log").read_text(errors="replace")[-characters:]

    def _answers(self) -> bool:
        try:
            self.ask("kv/range", {"key": _encode(b"x")})
        except urllib.error.HTTPError as error:
            with error:
                return error.code in (400, 401)  # it asks who we are
        except (OSError, ValueError):
            return False
        return True

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        assert process is not None
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        try:
            process.wait(DEADLINE_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


@contextmanager
def started(directory: Path, flags: Sequence[str] = ()) -> Iterator[Etcd]:
    """An etcd that runs; skips the test where none is installed."""
    require()
    server = Etcd(directory, flags)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        ports.release(server.client_port, server.peer_port)


def _encode(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
