"""A real containerd with files, sockets and mounts of its own, driven through the container runtime interface.

The messages are compiled from cri.proto at the first use. Its settings are those of the cluster's nodes.
"""

import functools
import importlib
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from podwire.lab.kubernetes.nodes.containerd import ContainerdSettings
from podwire.lab.kubernetes.nodes.images import BUSYBOX_IMAGE, PAUSE_IMAGE, write_layout
from podwire.model.closing import Closing
from tests import leavings
from tests.runtime.machine import Machine
from tests.waiting import wait_for

START_DEADLINE_S: Final = 180.0
CALL_DEADLINE_S: Final = 120.0


@functools.cache
def load_messages() -> tuple[Any, Any, Any]:
    """Compile cri.proto; gives grpc, the messages and the stubs."""
    source = Path(__file__).parent
    protoc = importlib.import_module("grpc_tools.protoc")
    with tempfile.TemporaryDirectory(prefix=leavings.NAME) as output:
        outputs = [f"--python_out={output}", f"--grpc_python_out={output}"]
        assert protoc.main(["", f"-I{source}", *outputs, "cri.proto"]) == 0
        sys.path.insert(0, output)
        try:
            names = ("grpc", "cri_pb2", "cri_pb2_grpc")
            grpc, messages, stubs = (importlib.import_module(name) for name in names)
        finally:
            sys.path.remove(output)
    return grpc, messages, stubs


@dataclass(frozen=True)
class Sandbox:
    """A pod's sandbox."""

    id: str
    config: Any
    pid: int
    addresses: tuple[str, ...]
    """As the runtime reports them: that of its preferred family first."""


class Containerd(Closing):
    """One containerd, in the place where its machine's runtimes live."""

    def __init__(self, machine: Machine, *, networks: int = 1) -> None:
        self.machine = machine
        self._base = machine.directory / "containerd"
        self._base.mkdir()
        self._log = self._base / "log"
        config = self._base / "config.toml"
        config.write_text(
            ContainerdSettings(
                root=f"{self._base}/root",
                state=f"{self._base}/state",
                socket=f"{self._base}/c.sock",
                plugins=str(machine.bin),
                networks=str(machine.conf),
                networks_max=networks,
            ).write()
        )
        self._grpc, self._messages, stubs = load_messages()
        self._process = machine.popen("containerd", "--config", str(config), log=self._log)
        self._channel = self._grpc.insecure_channel(f"unix://{self._base}/c.sock")
        self._stub = stubs.RuntimeServiceStub(self._channel)
        try:
            wait_for(self._answers, "containerd to answer", START_DEADLINE_S)
            self._import_images()
        except BaseException:
            self.close()
            raise

    def call(self, method: str, **values: Any) -> Any:
        """Call a method of the runtime with its request's fields."""
        request = getattr(self._messages, f"{method}Request")(**values)
        return getattr(self._stub, method)(request, timeout=CALL_DEADLINE_S)

    def _answers(self) -> bool:
        assert self._process.poll() is None, f"containerd ended:\n{self.log_tail()}"
        try:
            self.call("Version")
        except self._grpc.RpcError:
            return False
        return True

    def _import_images(self) -> None:
        layout = self._base / "images.tar"
        write_layout(layout, [BUSYBOX_IMAGE, PAUSE_IMAGE])
        self.machine.run(
            *("ctr", "-a", f"{self._base}/c.sock", "-n", "k8s.io", "images", "import"),
            str(layout),
        )

    def log_tail(self, lines: int = 30) -> str:
        """Give the end of containerd's log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    def conditions(self) -> dict[str, str]:
        """Give the runtime's conditions: "" = true, else why not."""
        found = self.call("Status").status.conditions
        return {
            condition.type: "" if condition.status else condition.message or condition.reason
            for condition in found
        }

    def wait_network_ready(self) -> None:
        """Wait until the runtime has read its network configuration."""
        wait_for(lambda: self.conditions().get("NetworkReady") == "", "the runtime's network", 60)

    def network_configuration(self) -> str:
        """Give the network configurations that the runtime has read, as it tells them."""
        return str(self.call("Status", verbose=True).info["cniconfig"])

    def describe_pod(
        self,
        name: str,
        *,
        namespace: str = "shop",
        annotations: Mapping[str, str] | None = None,
        ports: Sequence[tuple[int, int]] = (),
    ) -> Any:
        """Make a sandbox configuration; `ports` are (host port, container port), TCP."""
        messages = self._messages
        return messages.PodSandboxConfig(
            metadata=messages.PodSandboxMetadata(
                name=name, uid=f"uid-{name}", namespace=namespace, attempt=0
            ),
            hostname=name,
            annotations=dict(annotations or {}),
            port_mappings=[
                messages.PortMapping(protocol=messages.TCP, host_port=host, container_port=port)
                for host, port in ports
            ],
            linux=messages.LinuxPodSandboxConfig(cgroup_parent=f"/{self.machine.node.name}"),
        )

    def run_pod(self, name: str, **options: Any) -> Sandbox:
        """Start a pod's sandbox."""
        config = self.describe_pod(name, **options)
        sandbox_id = self.call("RunPodSandbox", config=config).pod_sandbox_id
        reply = self.call("PodSandboxStatus", pod_sandbox_id=sandbox_id, verbose=True)
        network = reply.status.network
        others = [extra.ip for extra in network.additional_ips]
        pid = json.loads(reply.info["info"])["pid"]
        return Sandbox(sandbox_id, config, pid, tuple(filter(None, [network.ip, *others])))

    def run_pods(self, names: Sequence[str]) -> list[Sandbox]:
        """Start several pods at the same time."""
        with ThreadPoolExecutor(len(names)) as threads:
            return list(threads.map(self.run_pod, names))

    def stop_pod(self, sandbox: Sandbox) -> None:
        """Stop a pod; may be repeated, as the kubelet does."""
        self.call("StopPodSandbox", pod_sandbox_id=sandbox.id)

    def remove_pod(self, sandbox: Sandbox) -> None:
        """Remove a stopped pod."""
        self.call("RemovePodSandbox", pod_sandbox_id=sandbox.id)

    def run_container(self, sandbox: Sandbox, name: str, *command: str) -> str:
        """Start a container of busybox in a pod and give its id."""
        messages = self._messages
        made = self.call(
            "CreateContainer",
            pod_sandbox_id=sandbox.id,
            sandbox_config=sandbox.config,
            config=messages.ContainerConfig(
                metadata=messages.ContainerMetadata(name=name),
                image=messages.ImageSpec(image=BUSYBOX_IMAGE),
                command=list(command),
            ),
        )
        self.call("StartContainer", container_id=made.container_id)
        return str(made.container_id)

    def execute(self, container_id: str, *command: str) -> str:
        """Run a command in a container; its failure is the test's."""
        reply = self.call("ExecSync", container_id=container_id, cmd=list(command), timeout=60)
        assert reply.exit_code == 0, f"{' '.join(command)}: {reply.stdout}{reply.stderr}"
        return bytes(reply.stdout).decode()

    def remove_all(self) -> None:
        """Stop and remove every pod."""
        for item in self.call("ListPodSandbox").items:
            self.call("StopPodSandbox", pod_sandbox_id=item.id)
            self.call("RemovePodSandbox", pod_sandbox_id=item.id)

    def close(self) -> None:
        """Remove every pod, then end the daemon."""
        try:
            if self._process.poll() is None and self._answers():
                self.remove_all()
        finally:
            self._channel.close()
            self._process.terminate()
            try:
                self._process.wait(20)
            finally:
                self._process.kill()
                self._process.wait(20)
