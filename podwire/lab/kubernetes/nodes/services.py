"""What runs on a node: containerd, kubelet and kube-proxy, with the settings that they need on a machine like this one.

A machine may have cgroups of the old kind, no right to raise resource limits, and no registry. Each setting that is
there for one of these says so.
"""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from podwire.lab import traffic
from podwire.lab.kubernetes import programs
from podwire.lab.kubernetes.daemon import LOOK_S, READY_DEADLINE_S, Daemon
from podwire.lab.kubernetes.nodes import images
from podwire.lab.kubernetes.nodes.containerd import ContainerdSettings
from podwire.lab.kubernetes.nodes.machine import SOCKET, Machine
from podwire.model.errors import Unavailable

CONF_DIRECTORY: Final = "/etc/cni/net.d"
PLUGIN_DIRECTORY: Final = "/opt/cni/bin"
_CONTAINERD_CONFIG: Final = "/etc/containerd/config.toml"
_KUBELET_CONFIG: Final = "/etc/kubernetes/kubelet.json"
_PROXY_CONFIG: Final = "/etc/kubernetes/kube-proxy.json"
KUBELET_HEALTH_PORT: Final = 10248
PROXY_HEALTH_PORT: Final = 10256
_IMAGE_DEADLINE_S: Final = 300.0


def _kubelet_settings(cgroup: str, ca: Path) -> Mapping[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": f"unix://{SOCKET}",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(ca)},
        },
        "authorization": {"mode": "Webhook"},
        # Cgroups of the old kind; all of a node's in one, by which they are found again.
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroup}",
        "enforceNodeAllocatable": [],
        # The machine is shared: its swap, its disk and its processes are no affair of this node.
        "oomScoreAdj": 0,
        "failSwapOn": False,
        "localStorageCapacityIsolation": False,
        "evictionHard": {},
        "makeIPTablesUtilChains": False,
        # There is no registry: images are imported by name.
        "imagePullCredentialsVerificationPolicy": "NeverVerify",
        "imageGCHighThresholdPercent": 100,
        "maxPods": 250,
        "registerNode": True,
        "shutdownGracePeriod": "0s",
        "rotateCertificates": False,
        "staticPodPath": "/etc/kubernetes/manifests",
        "volumePluginDir": "/var/lib/kubelet/plugins",
        "logging": {"verbosity": 2},
    }


def _proxy_settings(machine: Machine, kubeconfig: Path, options: "Options") -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "clusterCIDR": options.cluster_cidrs,
        "hostnameOverride": machine.name,
        "bindAddress": machine.plan.address,
        "healthzBindAddress": f"127.0.0.1:{PROXY_HEALTH_PORT}",
        "metricsBindAddress": "127.0.0.1:10249",
        # Limits of the whole machine's connection tracking stay what they are.
        "conntrack": {
            **{"maxPerCore": 0, "min": 0},
            **{"tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        },
    }


class Access(msgspec.Struct, frozen=True):
    """How the programs of a node reach the API server: kubeconfigs, and the authority that they trust."""

    kubelet: Path
    proxy: Path
    ca: Path


class Options(msgspec.Struct, frozen=True):
    """What is the same on all nodes of a cluster."""

    proxy_mode: str
    """Empty: there is no kube-proxy."""
    cluster_cidrs: str
    containerd: str
    """Its path."""
    runtime_log: str = "info"


class NodeServices:
    """The programs of one machine; each may be killed and started again."""

    def __init__(self, machine: Machine, access: Access, options: Options) -> None:
        self.machine = machine
        self._options = options
        self.proxy_mode = options.proxy_mode
        """That in which kube-proxy runs; empty: it does not."""
        self._kubelet_settings = _kubelet_settings(machine.plan.cgroup, access.ca)
        self._proxy_settings = _proxy_settings(machine, access.proxy, options)
        paths = programs.find(programs.CLUSTER)
        self.containerd = Daemon(
            f"containerd of {machine.name}",
            [options.containerd, "--config", _CONTAINERD_CONFIG],
            machine.directory / "containerd.log",
            # It looks for its shim in PATH.
            environment={
                **os.environ,
                "PATH": f"{Path(options.containerd).parent}:{os.environ['PATH']}",
            },
        )
        self.kubelet = Daemon(
            f"kubelet of {machine.name}",
            [
                paths["kubelet"],
                f"--config={_KUBELET_CONFIG}",
                f"--kubeconfig={access.kubelet}",
                f"--hostname-override={machine.name}",
                f"--node-ip={','.join(machine.plan.addresses)}",
            ],
            machine.directory / "kubelet.log",
        )
        self.proxy = Daemon(
            f"kube-proxy of {machine.name}",
            [paths["kube-proxy"], f"--config={_PROXY_CONFIG}"],
            machine.directory / "kube-proxy.log",
        )

    @property
    def daemons(self) -> tuple[Daemon, ...]:
        """All of them."""
        return self.containerd, self.kubelet, self.proxy

    def start(self) -> None:
        """Start all, with the images that every node has; the node gets ready when it has a network."""
        for daemon in self.daemons:
            daemon.place = self.machine.place
        self._write_settings()
        self.start_containerd()
        layout = self.machine.plan.shared / "images.tar"
        if not layout.exists():
            images.write_layout(layout, [images.BUSYBOX_IMAGE, images.PAUSE_IMAGE])
        self.import_image(layout)
        self.start_kubelet()
        self._write_proxy_settings()
        if self.proxy_mode:
            self.proxy.start()

    def use_proxy(self, mode: str) -> None:
        """Run kube-proxy in another mode, which removes the rules of the one before; "": stop it and remove them."""
        self.proxy.stop()
        self.proxy_mode = mode
        self._write_proxy_settings()
        if mode:
            self.proxy.start(self._is_proxy_well)
        else:
            self.machine.run(*self.proxy.command, "--cleanup")

    def _is_proxy_well(self) -> bool:
        """Ask for /healthz, which says so once the rules of all services are written."""
        said = traffic.connect(
            self.machine.plan.namespace, "127.0.0.1", PROXY_HEALTH_PORT, timeout_s=5
        )
        return said.ok

    def start_kubelet(self) -> None:
        """Start kubelet and wait until it is well; like a service manager, again while its runtime is not there yet."""
        deadline = time.monotonic() + READY_DEADLINE_S
        while not self._is_kubelet_well():
            if not self.kubelet.runs:
                self.kubelet.launch()
            if time.monotonic() > deadline:
                tail = self.kubelet.read_tail()
                self.kubelet.kill()
                raise Unavailable(f"start {self.kubelet.name}: it is not well in time:\n{tail}")
            time.sleep(LOOK_S)

    def _is_kubelet_well(self) -> bool:
        """Ask for /healthz, which kubelet serves on the node's loopback."""
        return (
            self.kubelet.runs
            and traffic.connect(
                self.machine.plan.namespace, "127.0.0.1", KUBELET_HEALTH_PORT, timeout_s=5
            ).ok
        )

    def start_containerd(self) -> None:
        """Start containerd and wait until it answers."""
        self.containerd.start(self._containerd_answers)

    def import_image(self, archive: Path) -> None:
        """Give the node the images of an archive, which must be a file that it sees."""
        self.machine.run(
            *("ctr", "-a", SOCKET, "-n", "k8s.io", "images", "import", str(archive)),
            timeout_s=_IMAGE_DEADLINE_S,
        )

    def tag_image(self, image: str, name: str) -> None:
        """Give an image of the node another name."""
        self.machine.run(*("ctr", "-a", SOCKET, "-n", "k8s.io", "images", "tag", image, name))

    def stop(self) -> None:
        """End all; containers run on."""
        for daemon in reversed(self.daemons):
            daemon.stop()

    def _containerd_answers(self) -> bool:
        try:
            self.machine.run("ctr", "-a", SOCKET, "version", timeout_s=30)
        except Unavailable:
            return False
        return True

    def _write_settings(self) -> None:
        machine = self.machine
        for directory in (CONF_DIRECTORY, PLUGIN_DIRECTORY, "/etc/kubernetes/manifests"):
            machine.path(directory).mkdir(parents=True, exist_ok=True)
        machine.write(
            _CONTAINERD_CONFIG,
            ContainerdSettings(
                root="/var/lib/containerd",
                state="/run/containerd",
                socket=SOCKET,
                plugins=PLUGIN_DIRECTORY,
                networks=CONF_DIRECTORY,
                log_level=self._options.runtime_log,
            ).write(),
        )
        machine.write(_KUBELET_CONFIG, json.dumps(self._kubelet_settings, indent=1))

    def _write_proxy_settings(self) -> None:
        settings = {**self._proxy_settings, "mode": self.proxy_mode}
        self.machine.write(_PROXY_CONFIG, json.dumps(settings, indent=1))
