"""Both launchers behind one call, and what every case of their contract needs."""

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from podwire.cni import launcher
from podwire.cni.launcher import Outcome
from podwire.model import wire

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "build" / "bin" / "podwire-cni"
Run = Callable[..., Outcome]

ATTACHMENT = {
    "CNI_CONTAINERID": "c1",
    "CNI_IFNAME": "eth0",
    "CNI_NETNS": "/proc/self/ns/net",
    "CNI_PATH": "/opt/cni/bin",
    "CNI_ARGS": "K8S_POD_NAME=web;IgnoreUnknown=1",
}


def build_launcher() -> None:
    """Bring build/bin/podwire-cni up to date."""
    subprocess.run(["make", "-s", "-C", str(ROOT / "launcher")], check=True)


def run_c(environment: Mapping[str, str], stdin: bytes, *, program: str = "podwire-cni") -> Outcome:
    process = subprocess.run(
        [LAUNCHER.with_name(program)],
        env=environment,
        input=stdin,
        capture_output=True,
        timeout=60,
        check=False,
    )
    return Outcome(process.returncode, process.stdout, process.stderr)


CLIENTS: Mapping[str, Run] = {"c": run_c, "python": launcher.call}


def config(socket_path: Path, **more: object) -> bytes:
    document = {
        "cniVersion": "1.0.0",
        "name": "n",
        "type": "podwire-cni",
        "socket": str(socket_path),
    }
    return json.dumps(document | {"agent-wait": 0} | more).encode()


def environment(command: str, **more: str) -> dict[str, str]:
    return {"CNI_COMMAND": command, **ATTACHMENT, **more}


def code_of(outcome: Outcome) -> int:
    """The error's code; checks that it is an error as the specification wants it."""
    assert outcome.exit_status == 1
    error = json.loads(outcome.stdout)
    assert error["msg"]
    assert error["details"]
    assert error["cniVersion"] in wire.SUPPORTED_CNI_VERSIONS
    return int(error["code"])


def spooled(socket_path: Path) -> list[wire.Frame]:
    directory = socket_path.parent / wire.SPOOL_DIRECTORY
    if not directory.exists():
        return []
    assert directory.stat().st_mode & 0o777 == 0o700
    names = sorted(os.listdir(directory))
    assert all(wire.is_record_name(name) for name in names)
    assert all((directory / name).stat().st_mode & 0o777 == 0o600 for name in names)
    return [wire.decode_record((directory / name).read_bytes()) for name in names]
