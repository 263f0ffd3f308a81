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
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from podwire.control.documents.apply import apply_documents
from podwire.datapath import abi
from podwire.kernel import bpf, netns
from podwire.lab import labs
from podwire.lab.pod import launcher_program, network_config
from podwire.lab.state import LabState
from podwire.lab.topology import LabShape, NodePlan
from podwire.model.store import Store
from podwire.store.open import open_store

REFERENCE_PLUGINS: Final = Path("/usr/lib/cni")
SUBNET: Final = "10.99.0.0/16"
LAB: Final = "bench"
HERE: Final = Path(__file__).resolve().parent


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
        begin_ms, end_ms, _ = self.execute(command, container_id, pod_namespace, gate)
        return begin_ms, end_ms

    def execute(
        self, command: str, container_id: str, pod_namespace: str, gate: str = "-"
    ) -> tuple[float, float, dict[str, Any]]:
        """Execute the plugin once, as `call` does; gives its answer as well."""
        stdin = self.directory / f"{self.name}.json"
        if not stdin.exists():
            stdin.write_text(json.dumps(self.config), encoding="utf-8")
        answer = self.directory / f"{self.name}.{container_id}.out"
        done = subprocess.run(
            [
                *("nsenter", f"--net={netns.named_path(self.node_namespace)}", self.tracer),
                *(str(stdin), str(answer), gate, self.program),
            ],
            env=_environment(command, container_id, pod_namespace),
            capture_output=True,
            text=True,
            check=True,
        )
        begin_ns, end_ns, status = done.stdout.split()
        said = answer.read_text(encoding="utf-8")
        answer.unlink()
        if status != "0":
            raise RuntimeError(f"{self.name} {command}: {said} {done.stderr}")
        return int(begin_ns) / 1e6, int(end_ns) / 1e6, json.loads(said) if said.strip() else {}


def _environment(command: str, container_id: str, pod_namespace: str) -> dict[str, str]:
    return {
        "CNI_COMMAND": command,
        "CNI_CONTAINERID": container_id,
        "CNI_NETNS": netns.named_path(pod_namespace) if pod_namespace else "",
        "CNI_IFNAME": "eth0",
        "CNI_PATH": str(REFERENCE_PLUGINS),
        "CNI_ARGS": f"IgnoreUnknown=1;K8S_POD_NAMESPACE=bench;K8S_POD_NAME=p{container_id[:8]}",
        "PATH": os.environ["PATH"],
    }


@contextmanager
def one_node(**shape: Any) -> Iterator[LabState]:
    """Give a lab of one node, IPv4 only; on leaving, every namespace whose name begins like the lab's goes as well."""
    wanted = LabShape(nodes=1, families="4", **shape)
    state = labs.up(LAB, wanted, progress=labs.say_nothing)
    try:
        yield state
    finally:
        labs.down(LAB, progress=labs.say_nothing)


@contextmanager
def one_node_with_store() -> Iterator[tuple[NodePlan, Store]]:
    """Give the node of such a lab, and its store as another writer opens it."""
    with one_node() as state, closing(open_store(state.plan.store_url)) as store:
        yield state.plan.nodes[0], store


@contextmanager
def two_contestants(policies: int = 0) -> Iterator[tuple[Contestant, Contestant]]:
    """Give podwire, with so many policies of which a tenth selects every pod, and the reference, each on its node; both
    are gone afterwards.
    """
    with ExitStack() as stack:
        directory = stack.enter_context(scratch())
        state = stack.enter_context(one_node())
        with closing(open_store(state.plan.store_url)) as store:
            apply_documents(store, [_policy(index) for index in range(policies)])
        yield podwire_on(state, directory), reference("ptp", directory)


@contextmanager
def scratch() -> Iterator[Path]:
    """Give a directory for what is compiled and said."""
    with tempfile.TemporaryDirectory(prefix="podwire-bench-") as text:
        yield Path(text)


def _policy(index: int) -> dict[str, object]:
    """Give a policy of the namespace that all pods of a benchmark are in."""
    subject = {} if index % 10 == 0 else {"matchLabels": {"app": f"app{index}"}}
    peer = {"podSelector": {"matchLabels": {"app": f"peer{index}"}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": f"p{index}", "namespace": "default"},
        "spec": {
            "podSelector": subject,
            "ingress": [{"from": [peer], "ports": [{"port": 80, "endPort": 90 + index}]}],
        },
    }


def podwire_on(state: LabState, directory: Path) -> Contestant:
    """Give podwire, as the lab's one node has it."""
    node = state.plan.nodes[0]
    return Contestant(
        name="podwire",
        program=launcher_program(),
        config=network_config(node),
        node_namespace=node.namespace,
        tracer=compile_c("trace", directory),
        directory=directory,
    )


def reference(plugin: str, directory: Path) -> Contestant:
    """Give a reference plugin (`ptp` or `bridge`) on a node of its own, which goes with the lab."""
    namespace = f"pw.{LAB}.{plugin}"
    netns.create_named(namespace).close()
    subprocess.run(["ip", "-n", namespace, "link", "set", "lo", "up"], check=True)
    return Contestant(
        name=plugin,
        program=str(REFERENCE_PLUGINS / plugin),
        config=reference_config(plugin, directory),
        node_namespace=namespace,
        tracer=compile_c("trace", directory),
        directory=directory,
    )


def reference_config(plugin: str, directory: Path) -> dict[str, Any]:
    """Give a reference's configuration: addresses from host-local; no masquerade, which would slow it down."""
    return {
        "cniVersion": "1.0.0",
        "name": f"reference-{plugin}",
        "type": plugin,
        "ipMasq": False,
        "isGateway": True,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": SUBNET}]],
            "routes": [{"dst": "0.0.0.0/0"}],
            "dataDir": str(directory / "host-local"),
        },
    }


def compile_c(name: str, directory: Path) -> str:
    """Compile one of the C programs beside this file."""
    target = directory / name
    if not target.exists():
        source = str(HERE / f"{name}.c")
        subprocess.run(["gcc", "-O2", "-pthread", "-o", str(target), source], check=True)
    return str(target)


def compile_bpf(name: str, directory: Path) -> bytes:
    """Compile one of the BPF programs below this directory; gives its object."""
    target = directory / f"{name}.bpf.o"
    if not target.exists():
        machine = subprocess.run(
            ["clang", "-print-multiarch"], capture_output=True, text=True, check=False
        ).stdout.strip()
        include = f"/usr/include/{machine or 'x86_64-linux-gnu'}"
        flags = ["-O2", "-g", "-target", "bpf", "-mcpu=v3", "-isystem", include]
        source = str(HERE / "bpf" / f"{name}.bpf.c")
        subprocess.run(["clang", *flags, "-c", source, "-o", str(target)], check=True)
    return target.read_bytes()


def open_node_map(node: NodePlan, name: str) -> bpf.Map:
    """Open one of the maps that a node's agent has pinned."""
    path = f"{node.pins}/v{abi.ABI_VERSION}/maps/{name}"
    opened = bpf.open_any_pinned_map(path)
    if opened is None:
        raise RuntimeError(f"no map is pinned at {path}")
    return opened


def mac_number(mac: str) -> int:
    """Give a MAC as programs here take it: its first byte is the lowest."""
    return int.from_bytes(bytes.fromhex(mac.replace(":", "")), "little")


@contextmanager
def pod_namespace() -> Iterator[str]:
    """Give a fresh namespace for one pod."""
    name = f"pw.{LAB}.p.{uuid.uuid4().hex[:8]}"
    netns.create_named(name).close()
    try:
        yield name
    finally:
        netns.delete_named(name)
