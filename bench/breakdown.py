"""Where the time of an ADD and a DEL goes: from an empty process up to the whole call, each step in the agent, what of
these steps is the kernel's alone, and what Python takes when its memory is in no cache.
"""

import argparse
import contextlib
import os
import re
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from bench import results_file
from bench.cold import measure_python
from bench.contestants import Contestant, one_node, pod_namespace, podwire_on, scratch
from bench.floor import measure_floor
from bench.stats import median_of
from podwire.model import wire
from podwire.model.wire import Reply, ReplyStatus

SETTLE_S = 0.05
READ_BYTES = 65_536
SERIES = re.compile(r"^podwire_(\w+)_seconds_(sum|count)\{([^}]*)\} (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(?:operation|command|step)="([^"]*)"')
MEANING = {
    "empty static program": "the least that executing anything takes",
    "launcher, VERSION": "and the launcher, that asks nobody",
    "launcher, ADD answered at once": "and an agent in Python that does nothing",
    "launcher, STATUS": "and the way to the agent and back",
    "launcher, ADD": "the whole call",
    "launcher, DEL": "the whole call",
}


def main() -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    samples: dict[str, list[float]] = {}
    with ExitStack() as stack:
        directory = stack.enter_context(scratch())
        state = stack.enter_context(one_node())
        ours = podwire_on(state, directory)
        empty = replace(ours, name="empty", program=_empty_program(directory))
        echo_socket = stack.enter_context(_echo(directory))
        echo = replace(ours, name="echo", config={**ours.config, "socket": echo_socket})
        api = state.plan.nodes[0].directory / "api.sock"
        _one_round(ours, empty, echo, {})
        before = read_sums(api)
        for _ in range(arguments.rounds):
            _one_round(ours, empty, echo, samples)
            time.sleep(SETTLE_S)
        inside = _means(before, read_sums(api))
        floor = measure_floor(arguments.rounds, directory)
        python = measure_python(arguments.rounds)
    summary = _summarise(samples, inside)
    raw = dict(samples)
    for title, found in (
        ("the kernel alone", floor),
        ("what computes alone, in a row", python),
    ):
        summary[f"{title}, median ms"] = _summarise_series(title, found)
        raw |= {f"{title}: {name}": _rounded(one) for name, one in found.items()}
    results_file.write("breakdown", summary, raw)


def _one_round(
    ours: Contestant, empty: Contestant, echo: Contestant, samples: dict[str, list[float]]
) -> None:
    container_id = uuid.uuid4().hex
    with pod_namespace() as namespace:
        empty.call("VERSION", container_id, "")  # whoever comes first after a pause pays for it
        for name, contestant, command, pod in (
            ("empty static program", empty, "VERSION", ""),
            ("launcher, VERSION", ours, "VERSION", ""),
            ("launcher, ADD answered at once", echo, "ADD", namespace),
            ("launcher, STATUS", ours, "STATUS", ""),
            ("launcher, ADD", ours, "ADD", namespace),
            ("launcher, DEL", ours, "DEL", namespace),
        ):
            begin_ms, end_ms = contestant.call(command, container_id, pod)
            samples.setdefault(name, []).append(round(end_ms - begin_ms, 3))


@contextmanager
def _echo(directory: Path) -> Iterator[str]:
    """Give a socket at which each ADD is answered at once, by a thread that reads the request and does nothing else."""
    path = str(directory / "echo.sock")
    answer = wire.encode_reply(Reply(ReplyStatus.DONE, b'{"cniVersion":"1.1.0"}'))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()

        def serve() -> None:
            # It ends with the bench: shutdown(2) wakes accept(2) with an error.
            with contextlib.suppress(OSError):
                while True:
                    _answer_one(listener, answer)

        thread = threading.Thread(target=serve, name="echo")
        thread.start()
        try:
            yield path
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def _answer_one(listener: socket.socket, answer: bytes) -> None:
    connection, _ = listener.accept()
    with connection:
        received, descriptors, _, _ = socket.recv_fds(connection, READ_BYTES, 1)
        for number in descriptors:
            os.close(number)
        if received:
            connection.sendall(answer)


def _empty_program(directory: Path) -> str:
    source, target = directory / "empty.c", directory / "empty"
    source.write_text("int main(void) { return 0; }\n", encoding="utf-8")
    subprocess.run(["musl-gcc", "-Os", "-static", "-s", "-o", str(target), str(source)], check=True)
    return str(target)


def read_sums(api: Path) -> dict[str, tuple[float, float]]:
    """Read seconds and counts of every timed thing from an agent's metrics."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(api))
        connection.sendall(b"GET /v1/metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        text = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    sums: dict[str, dict[str, float]] = {}
    for family, kind, labels, value in SERIES.findall(text):
        if family in ("cni_request", "operation_step"):
            name = " ".join(LABEL.findall(labels))
            sums.setdefault(name, {}).setdefault(kind, 0.0)
            sums[name][kind] += float(value)
    return {name: (one["sum"], one["count"]) for name, one in sums.items()}


def _means(
    before: Mapping[str, tuple[float, float]], after: Mapping[str, tuple[float, float]]
) -> dict[str, float]:
    means = {}
    for name, (seconds, count) in after.items():
        earlier_seconds, earlier_count = before.get(name, (0.0, 0.0))
        if count > earlier_count:
            means[name] = (seconds - earlier_seconds) / (count - earlier_count) * 1e3
    return means


def _summarise(
    samples: Mapping[str, list[float]], inside: Mapping[str, float]
) -> dict[str, object]:
    summary: dict[str, object] = {}
    print("\nfrom outside, median ms (95 % interval)")
    for name, series in samples.items():
        found = median_of(series)
        print(f"  {name:30} {found!s:30} {MEANING[name]}")
        summary[name] = results_file.interval(found)
    print("\ninside the agent, mean ms")
    for name, mean_ms in inside.items():
        print(f"  {name:24} {mean_ms:.3f}")
    summary["inside the agent, mean ms"] = {
        name: round(mean_ms, 3) for name, mean_ms in inside.items()
    }
    return summary


def _summarise_series(
    title: str, samples: Mapping[str, list[float]]
) -> dict[str, dict[str, float]]:
    print(f"\n{title}, median ms (95 % interval)")
    found = {name: median_of(series) for name, series in samples.items()}
    for name, one in found.items():
        print(f"  {name:50} {one}")
    return {name: results_file.interval(one) for name, one in found.items()}


def _rounded(series: list[float]) -> list[float]:
    return [round(series_, 3) for series_ in series]


if __name__ == "__main__":
    main()
