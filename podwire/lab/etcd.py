"""The etcd of a lab: Debian's server on the underlay, where every node reaches it and a partition can cut it off.

Used by `lab.labs`. Its files belong to the lab, so it keeps its data when it is stopped or killed and started again.
"""

import shutil
import signal
import socket
import time
from functools import partial
from typing import Final

from podwire.kernel import netns
from podwire.lab.state import LabState, end_process, is_running, launch
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
    hosts = [f"[{address}]" if ":" in address else address for address in plan.store_addresses]
    clients = ",".join(f"http://{host}:{STORE_PORT}" for host in hosts)
    command = [
        require_program(),
        *("--data-dir", str(directory)),
        *("--listen-client-urls", clients, "--advertise-client-urls", clients),
        *("--listen-peer-urls", f"http://127.0.0.1:{_PEER_PORT}"),
        *("--logger", "zap", "--log-outputs", "stderr"),
    ]
    state.store = launch(plan.underlay_namespace, command, plan.directory / _LOG_FILE)
    _wait_until_open(plan, state)


def stop_store(state: LabState, number: signal.Signals = signal.SIGTERM) -> None:
    """Stop the lab's etcd, or kill it; its files stay."""
    end_process(state.store, number)
    state.store = None


def _wait_until_open(plan: LabPlan, state: LabState) -> None:
    address = plan.store_addresses[0]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    deadline = time.monotonic() + _START_DEADLINE_S
    underlay = netns.named_path(plan.underlay_namespace)
    while time.monotonic() < deadline and is_running(state.store):
        with netns.run_at(underlay, partial(socket.socket, family)) as connection:
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
