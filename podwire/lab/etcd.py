"""The etcd of a lab: Debian's server on the underlay, where every node reaches it and a partition can cut it off.

Used by `lab.labs`. Its files belong to the lab, so it keeps its data when it is stopped or killed and started again.
"""

import os
import shutil
import signal
import socket
import time
from typing import Final

from podwire.kernel import netns, spawn
from podwire.lab.state import LabState, describe_process, end_process, is_running
from podwire.lab.topology import STORE_PORT, LabPlan
from podwire.model.errors import InvalidRequest, Unavailable

PROGRAM: Final = "etcd"
_PEER_PORT: Final = 2380
_START_DEADLINE_S: Final = 60.0
_LOG_FILE: Final = "etcd.log"


def require_program() -> str:
    """Find etcd; InvalidRequest says how to get it."""
    path = shutil.which(PROGRAM)
    if path is None:
        raise InvalidRequest(
            "use the store etcd: there is no program 'etcd' in PATH",
            hint="apt-get install etcd-server, or use --store sqlite",
        )
    return path


def start_store(plan: LabPlan, state: LabState) -> None:
    """Start the lab's etcd and wait until it answers; one that runs is left alone."""
    if is_running(state.store):
        return
    directory = plan.directory / "etcd"
    directory.mkdir(mode=0o700, exist_ok=True)
    # Appended to: a test that kills etcd wants to read afterwards what it said before.
    log = os.open(
        plan.directory / _LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
    )
    hosts = [f"[{address}]" if ":" in address else address for address in plan.store_addresses]
    clients = ",".join(f"http://{host}:{STORE_PORT}" for host in hosts)
    try:
        with netns.open_namespace(netns.named_path(plan.underlay_namespace)) as fd:
            child = spawn.start(
                [
                    require_program(),
                    *("--data-dir", str(directory)),
                    *("--listen-client-urls", clients, "--advertise-client-urls", clients),
                    *("--listen-peer-urls", f"http://127.0.0.1:{_PEER_PORT}"),
                    *("--logger", "zap", "--log-outputs", "stderr"),
                ],
                place=spawn.Place(network_fd=fd.fileno()),
                stdout_fd=log,
                stderr_fd=log,
            )
    finally:
        os.close(log)
    state.store = describe_process(child.pid)
    child.release()
    _wait_until_open(plan, state)


def stop_store(state: LabState, number: signal.Signals = signal.SIGTERM) -> None:
    """Stop the lab's etcd, or kill it; its files stay."""
    end_process(state.store, number)
    state.store = None


def _wait_until_open(plan: LabPlan, state: LabState) -> None:
    address = plan.store_addresses[0]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    deadline = time.monotonic() + _START_DEADLINE_S
    with netns.open_namespace(netns.named_path(plan.underlay_namespace)) as fd:
        while time.monotonic() < deadline and is_running(state.store):
            connection = netns.run_in(
                fd.fileno(), lambda: socket.socket(family, socket.SOCK_STREAM)
            )
            with connection:
                connection.settimeout(1)
                # The port is open before etcd has elected itself leader; until then it refuses writes.
                if connection.connect_ex((address, STORE_PORT)) == 0 and _is_healthy(connection):
                    return
            time.sleep(0.02)
    end_process(state.store, signal.SIGKILL)
    state.store = None
    log = (plan.directory / _LOG_FILE).read_text(errors="replace").splitlines()[-3:]
    raise Unavailable(
        "start etcd: it does not answer: " + "\n".join(log),
        hint=f"the whole log is {str(plan.directory / _LOG_FILE)!r}",
    )


def _is_healthy(connection: socket.socket) -> bool:
    """Ask for `/health`, which is true as soon as it can read and write."""
    try:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = b""
        while chunk := connection.recv(4096):
            answer += chunk
    except OSError:
        return False
    return b'"true"' in answer
