"""The floor that an ADD is compared with: each batch is answered once, and what is answered is read."""

import socket
from pathlib import Path

import pytest

from bench import floor

ROUNDS = 3
STEPS = {
    "device: create the pair",
    "device: programs, up, route, neighbour",
    "pod-network: visit, addresses, up, routes",
    "pod-network: have the carrier acted on",
    "guard, build: four rows of maps",
    "intent: the first write",
    "commit: the second write",
}


def test_no_answer_is_left_in_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = floor._exchange

    def exchange_and_look(connection: socket.socket, batch: bytes) -> None:
        exchange(connection, batch)
        with pytest.raises(BlockingIOError):
            connection.recv(1, socket.MSG_DONTWAIT)

    monkeypatch.setattr(floor, "_exchange", exchange_and_look)
    samples = floor.measure_floor(ROUNDS, tmp_path)
    assert set(samples) == STEPS
    assert all(len(sample) == ROUNDS and min(sample) > 0 for sample in samples.values())
