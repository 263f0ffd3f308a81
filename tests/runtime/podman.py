"""A real podman with the CNI back end: storage, configuration and mounts of its own, no daemon.

Settings that matter on small machines: no systemd (cgroupfs, file events), runc, and limits that need no
CAP_SYS_RESOURCE. Source of the behaviours: podman 4.3.1.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

from podwire.lab.kubernetes.nodes.images import BUSYBOX_IMAGE, write_layout
from podwire.model.closing import Closing
from tests.runtime.machine import Machine

COMMAND_DEADLINE_S: Final = 180.0

_CONFIG = """
[containers]
cgroupns = "private"
ipcns = "private"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
[network]
network_backend = "cni"
cni_plugin_dirs = ["{bin}"]
network_config_dir = "{conf}"
"""
_LIMITS: Final = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")


class Podman(Closing):
    """Podman in the place where its machine's runtimes live."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        base = machine.directory / "podman"
        base.mkdir()
        config = base / "containers.conf"
        config.write_text(_CONFIG.format(bin=machine.bin, conf=machine.conf))
        (base / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
        self._words = (
            *("env", f"CONTAINERS_CONF={config}", f"TMPDIR={base}", "podman"),
            *("--root", f"{base}/root", "--runroot", f"{base}/runroot"),
            *("--tmpdir", f"{base}/tmp", "--cgroup-manager", "cgroupfs"),
        )
        layout = base / "image.tar"
        write_layout(layout, [BUSYBOX_IMAGE])
        self.run("load", "--signature-policy", f"{base}/policy.json", "--input", str(layout))

    def run(self, *words: str) -> str:
        """Run one podman command; its failure is the test's."""
        try:
            return self._run(*words)
        except AssertionError as error:
            # Podman waits 5 s for what it has killed; a busy machine may take longer. Asked again, it cleans up.
            if "did not die within timeout" not in str(error):
                raise
            return self._run(*words)

    def _run(self, *words: str) -> str:
        return self.machine.run(*self._words, *words, timeout_s=COMMAND_DEADLINE_S).strip()

    def start_container(
        self, name: str, *options: str, networks: Sequence[str] = ("podwire",)
    ) -> str:
        """Run a sleeping container and give its id."""
        words = [word for network in networks for word in ("--network", network)]
        return self.run(
            *("run", "--detach", "--name", name, *_LIMITS, *words, *options),
            *("--cgroup-parent", f"/{self.machine.node.name}", BUSYBOX_IMAGE, "/bin/sleep", "9999"),
        )

    def stop_container(self, name: str) -> None:
        """Kill a container and wait until podman has taken its network away."""
        self.run("stop", "--time", "0", name)

    def inspect(self, name: str) -> Any:
        """Give everything that podman knows of a container."""
        [found] = json.loads(self.run("inspect", name))
        return found

    def pid(self, name: str) -> int:
        """Give the process of a running container."""
        return int(self.inspect(name)["State"]["Pid"])

    def close(self) -> None:
        """Remove every container."""
        self.run("rm", "--all", "--force", "--time", "0")
