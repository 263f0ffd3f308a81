"""20 restarts of the agent, by SIGTERM and by kill -9, under traffic: no packet is lost, no connection is reset."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Self

import pytest

from tests.lab.rig import ROOT, Outcome, Rig
from tests.waiting import wait_for

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]
RESTARTS = 20
PORT = 9000
PING_INTERVAL_S = "0.01"
UNDER_WAY_MAX = 200
"""So many of the last ones may be on their way when ping is told to end: two seconds of a busy machine."""


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig() as made:
        yield made


class Inside:
    """A program in a namespace, with its standard input in our hands."""

    def __init__(self, namespace: str, *command: str) -> None:
        self.process = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{namespace}", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
        )

    def first_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def finish(self, number: int | None = None) -> str:
        """Ask it to end (by its input, or by a signal) and give what it wrote."""
        if number is not None:
            self.process.send_signal(number)
        output, _ = self.process.communicate(timeout=120)
        return output

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


class Ping(Inside):
    """Echo requests without a pause; what ping says, a line for each answer, goes to a file."""

    def __init__(self, namespace: str, address: str, path: Path) -> None:
        self.path = path
        command = f"exec ping -n -i {PING_INTERVAL_S} {address} >{path} 2>&1"
        super().__init__(namespace, "sh", "-c", command)

    def assert_no_loss(self) -> int:
        """Give how many packets were sent: all but the last ones must have been answered."""
        self.finish(signal.SIGINT)
        output = self.path.read_text()
        said = "\n".join(output.splitlines()[-5:])
        match = re.search(r"(\d+) packets transmitted", output)
        assert match, said
        sent = int(match[1])
        answered = set(map(int, re.findall(r"icmp_seq=(\d+) ttl=", output)))
        last = max(answered, default=0)
        assert not set(range(1, last + 1)) - answered, said
        assert last >= sent - UNDER_WAY_MAX, said
        assert "errors" not in said, said
        return sent


def add_pod(rig: Rig, name: str) -> tuple[str, Outcome]:
    namespace = rig.make_pod_namespace()
    outcome = rig.cni("ADD", name, namespace)
    assert outcome.ok, outcome.document
    return namespace, outcome


def read_progress(path: Path) -> int:
    text = path.read_text() if path.exists() else ""
    return int(text) if text else 0


def is_further(path: Path, mark: int) -> bool:
    return read_progress(path) > mark


def test_twenty_restarts_lose_no_packet_and_reset_no_connection(rig: Rig, tmp_path: Path) -> None:
    rig.start()
    client, _ = add_pod(rig, "client")
    server, outcome = add_pod(rig, "server")
    ipv4, ipv6 = outcome.addresses
    before = rig.assert_consistent()
    progress = [tmp_path / "four", tmp_path / "six"]
    with ExitStack() as stack:
        senders = []
        for port, address, path in zip((PORT, PORT + 1), (ipv4, ipv6), progress, strict=True):
            module = [sys.executable, "-m", "tests.lab.stream"]
            echo = stack.enter_context(Inside(server, *module, "serve", str(port)))
            assert echo.first_line() == "listening\n"
            command = [*module, "send", address, str(port), str(path)]
            senders.append(stack.enter_context(Inside(client, *command)))
        pings = [
            stack.enter_context(Ping(*ends, tmp_path / f"ping{number}"))
            for number, ends in enumerate(
                ((client, ipv4), (client, ipv6), (rig.name, ipv4), (rig.name, ipv6))
            )
        ]
        for number in range(RESTARTS):
            marks = [read_progress(path) for path in progress]
            if number % 2:
                rig.kill()
            else:
                assert rig.stop() == 0
            for path, mark in zip(progress, marks, strict=True):
                wait_for(partial(is_further, path, mark), "the streams to go on", 120)
            rig.start()
        sent = [ping.assert_no_loss() for ping in pings]
        for sender in senders:
            assert sender.finish() == ""
            assert sender.process.returncode == 0
    print(f"pings sent: {sent}; blocks echoed: {[read_progress(path) for path in progress]}")
    after = rig.assert_consistent()
    assert (after.devices, after.addresses) == (before.devices, before.addresses)
    assert rig.get("/status")[1]["endpoints"] == {"total": 2, "byState": {"ready": 2}}
