"""The contestants of the latency benchmark, each on a node of its own: podwire, and Go `ptp` with `host-local`.

A node is a network namespace with nothing in it that belongs to the other: masquerade rules of one would slow the
other's DEL. IPv4 only, because the reference plugins wait seconds for IPv6 address detection.
"""

import json
import os
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from podwire.kernel import netns
from podwire.lab import labs
from podwire.lab.pod import launcher_program, network_config

REFERENCE_PLUGINS: Final = Path("/usr/lib/cni")
SUBNET: Final = "10.99.0.0/16"
LAB: Final = "bench"


@dataclass(frozen=True)
class Contestant:
    """One CNI plugin and the node it works on."""

    name: str
    program: str
    config: dict[str, Any]
    node_namespace: str
    tracer: str
    directory: Path

    def call(
        self, command: str, container_id: str, pod_namespace: str, gate: str = "-"
    ) -> tuple[float, float]:
        """Execute the plugin once; gives begin and end in milliseconds of one clock for all calls.

        `gate` is a FIFO that the call waits for. RuntimeError shows what the plugin said when it failed.
        """
        stdin = self.directory / f"{self.name}.json"
        if not stdin.exists():
            stdin.write_text(json.dumps(self.config), encoding="utf-8")
        answer = self.directory / f"{self.name}.{container_id}.out"
        environment = {
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": container_id,
            "CNI_NETNS": netns.named_path(pod_namespace),
            "CNI_IFNAME": "eth0",
            "CNI_PATH": str(REFERENCE_PLUGINS),
            "CNI_ARGS": f"IgnoreUnknown=1;K8S_POD_NAMESPACE=bench;K8S_POD_NAME=p{container_id[:8]}",
            "PATH": os.environ["PATH"],
        }
        done = subprocess.run(
            [
                *("nsenter", f"--net={netns.named_path(self.node_namespace)}", self.tracer),
                *(str(stdin), str(answer), gate, self.program),
            ],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        begin_ns, end_ns, status = done.stdout.split()
        if status != "0":
            raise RuntimeError(f"{self.name} {command}: {answer.read_text()} {done.stderr}")
        answer.unlink()
        return int(begin_ns) / 1e6, int(end_ns) / 1e6


@contextmanager
def two_contestants() -> Iterator[tuple[Contestant, Contestant]]:
    """Give podwire and the reference, each on its node; both are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="podwire-bench-") as text:
        directory = Path(text)
        tracer = build_tracer(directory)
        state = labs.up(LAB, node_count=1, families="4", progress=lambda _line: None)
        reference_node = f"pw.{LAB}.reference"
        netns.create_named(reference_node).close()
        try:
            node = state.plan.nodes[0]
            subprocess.run(["ip", "-n", reference_node, "link", "set", "lo", "up"], check=True)
            yield (
                Contestant(
                    name="podwire",
                    program=launcher_program(),
                    config=network_config(node),
                    node_namespace=node.namespace,
                    tracer=tracer,
                    directory=directory,
                ),
                Contestant(
                    name="ptp",
                    program=str(REFERENCE_PLUGINS / "ptp"),
                    config=reference_config(directory),
                    node_namespace=reference_node,
                    tracer=tracer,
                    directory=directory,
                ),
            )
        finally:
            labs.down(LAB, progress=lambda _line: None)


def reference_config(directory: Path) -> dict[str, Any]:
    """Give the reference's configuration: routed, addresses of host-local, no masquerade to slow it down."""
    return {
        "cniVersion": "1.0.0",
        "name": "reference",
        "type": "ptp",
        "ipMasq": False,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": SUBNET}]],
            "routes": [{"dst": "0.0.0.0/0"}],
            "dataDir": str(directory / "host-local"),
        },
    }


def build_tracer(directory: Path) -> str:
    """Compile the tracer."""
    source = Path(__file__).with_name("trace.c")
    target = directory / "trace"
    subprocess.run(["gcc", "-O2", "-o", str(target), str(source)], check=True)
    return str(target)


@contextmanager
def pod_namespace() -> Iterator[str]:
    """Give a fresh namespace for one pod."""
    name = f"pw.{LAB}.p.{uuid.uuid4().hex[:8]}"
    netns.create_named(name).close()
    try:
        yield name
    finally:
        netns.delete_named(name)
