"""podwire as its users install it: the image imported on each node, the manifest applied, everything else its own work.

The nodes see neither the checkout nor its environment. Names are read from the manifest, so that it says them once.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from podwire import __version__
from podwire.kernel import spawn
from podwire.lab.kubernetes.networks.agents import MANIFEST, ROOT
from podwire.model.errors import NotFound, Unavailable

if TYPE_CHECKING:
    from podwire.lab.kubernetes.cluster import Cluster, Node

BUILD: Final = ROOT / "deploy" / "image" / "build"
IMAGES: Final = ROOT / "build" / "image"
UNINSTALL: Final = "podwire-uninstall.yaml"
_LOOK: Final = r"""
shopt -s nullglob
files=(/etc/cni/net.d/* /opt/cni/bin/{podwire,.podwire,loopback}*)
for path in "${files[@]}" /run/podwire* /var/lib/podwire* /sys/fs/bpf/podwire*; do
    echo "$path"
done
ip -o link | grep -o 'alias podwire:.*'
ip route show proto 199; ip -6 route show proto 199
tc qdisc show | grep clsact
nft list tables | grep -w podwire
true
"""
_SETTINGS: Final = "grep -rsH . /proc/sys/net/ipv4 /proc/sys/net/ipv6 /proc/sys/net/core; true"
_OF_OTHERS: Final = ("/neigh/", "/route/", "/nf_conntrack", "/tcp_", "/conf/pw")
"""Settings that programs of the node change, or that go with a device."""
_BUILD_DEADLINE_S: Final = 900.0


class Podwire:
    """podwire from `deploy/podwire.yaml` and the archive that `deploy/image/build` writes."""

    name = "podwire"
    makes_ready = True

    def __init__(
        self,
        manifest: Path = MANIFEST,
        *,
        past_services: bool = False,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        if not manifest.exists():
            raise NotFound(f"find the manifest {str(manifest)!r}", hint="git checkout deploy")
        self.manifest = manifest
        self.settings = dict(settings or {})
        """What agent.toml says beside what the manifest lets it say."""
        self.past_services = past_services
        """Agents reach the API server by its own address, as they must without kube-proxy."""
        documents = [
            document for document in yaml.safe_load_all(manifest.read_text("utf-8")) if document
        ]
        self.daemon_set: Mapping[str, Any] = _the("DaemonSet", documents)
        self._config_map: Mapping[str, Any] = _the("ConfigMap", documents)
        self._documents = documents
        self._host_settings: dict[str, Mapping[str, str]] = {}
        """Of each node's network, as they were before anything of podwire was there."""

    @property
    def image(self) -> str:
        """The name of the agents' image."""
        return str(self.daemon_set["spec"]["template"]["spec"]["containers"][0]["image"])

    @property
    def namespace(self) -> str:
        """Where the agents' pods are."""
        return str(self.daemon_set["metadata"]["namespace"])

    @property
    def selector(self) -> str:
        """What chooses the agents' pods."""
        labels = self.daemon_set["spec"]["selector"]["matchLabels"]
        return ",".join(f"{key}={value}" for key, value in labels.items())

    def prepare(self, cluster: "Cluster") -> None:
        """Import the image on every node, and apply the manifest."""
        self._host_settings = {node.name: _read_settings(node) for node in cluster.nodes}
        copy = cluster.directory / "podwire.tar"
        copy.write_bytes(find_image().read_bytes())
        for node in cluster.nodes:
            node.services.import_image(copy)
        changed = self._configure(cluster)
        cluster.apply(
            *(changed if document is self._config_map else document for document in self._documents)
        )

    def change_settings(self, cluster: "Cluster", **settings: object) -> None:
        """Write other settings, and start the agents anew with them."""
        self.settings = {**self.settings, **settings}
        cluster.apply(self._configure(cluster))
        words = ("-n", self.namespace, "rollout")
        cluster.kubectl(*words, "restart", "daemonset/podwire-agent")
        cluster.kubectl(*words, "status", "daemonset/podwire-agent", "--timeout=240s")
        cluster.wait_for_pods(len(cluster.nodes), self.namespace, self.selector)

    def _configure(self, cluster: "Cluster") -> Mapping[str, Any]:
        """Give the ConfigMap with what this network says in it."""
        data = dict(self._config_map["data"])
        data["agent.toml"] += "".join(
            f"{key} = {json.dumps(value)}\n" for key, value in self.settings.items()
        )
        if self.past_services:
            api = cluster.control.api.shape
            data |= {"k8s-service-host": api.address, "k8s-service-port": str(api.port)}
        return {**self._config_map, "data": data}

    def install(self, cluster: "Cluster", node: "Node") -> None:
        """Wait for nothing: the agent's pod installs it."""

    def remove(self, cluster: "Cluster") -> None:
        """Take podwire off as docs/kubernetes.md says, when its pods are gone: agents, then what they left on nodes."""
        uninstall = str(self.manifest.with_name(UNINSTALL))
        cluster.kubectl("delete", "-f", str(self.manifest))
        cluster.kubectl("apply", "-f", uninstall)
        cluster.wait_for_pods(
            len(cluster.nodes), "kube-system", "app.kubernetes.io/name=podwire-uninstall"
        )
        cluster.kubectl("delete", "-f", uninstall)

    def list_left(self, cluster: "Cluster") -> list[str]:
        """List what is on the nodes because of podwire: files, pins, devices, routes, tables, programs, and settings of
        their networks that are not as before; none after `remove`.
        """
        found = []
        for node in cluster.nodes:
            said = node.machine.run("bash", "-c", _LOOK)
            found += [f"{node.name}: {line}" for line in said.splitlines()]
            before, now = self._host_settings[node.name], _read_settings(node)
            found += [
                f"{node.name}: {setting} was {before[setting]}, is {now[setting]}"
                for setting in before.keys() & now.keys()
                if before[setting] != now[setting]
            ]
        return found

    def pod_of(self, cluster: "Cluster", node: str) -> str:
        """Name the agent's pod of a node; Unavailable when there is not exactly one."""
        pods = cluster.list_pods(self.namespace, self.selector)
        names = [pod["metadata"]["name"] for pod in pods if pod["spec"].get("nodeName") == node]
        if len(names) != 1:
            raise Unavailable(f"find the agent's pod of {node}: there are {names}")
        return str(names[0])

    def list_endpoints(self, cluster: "Cluster", node: str) -> list[Mapping[str, Any]]:
        """Ask the agent of a node for its endpoints."""
        return list(json.loads(self.run(cluster, node, "endpoint", "list", "-o", "json")))

    def wait_until_detached(self, cluster: "Cluster") -> None:
        """Wait until no agent has an endpoint."""
        names = [node.name for node in cluster.nodes]
        cluster.wait_for(
            lambda: not any(self.list_endpoints(cluster, name) for name in names), "the last DEL"
        )

    def run(self, cluster: "Cluster", node: str, *words: str) -> str:
        """Run the command `podwire` beside a node's agent and give what it printed."""
        pod = self.pod_of(cluster, node)
        return cluster.kubectl("exec", "-n", self.namespace, pod, "--", "podwire", *words)


def _the(kind: str, documents: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return next(document for document in documents if document["kind"] == kind)


def _read_settings(node: "Node") -> Mapping[str, str]:
    lines = node.machine.run("sh", "-c", _SETTINGS).splitlines()
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {path: value for path, value in pairs if not any(other in path for other in _OF_OTHERS)}


def find_image() -> Path:
    """Give the image's archive, built when it is not there; Unavailable says why it cannot be."""
    images = sorted(IMAGES.glob(f"podwire-{__version__}-*.tar"))
    if not images:
        done = spawn.run([str(BUILD)], timeout_s=_BUILD_DEADLINE_S)
        if done.status:
            raise Unavailable(f"build the image: {done.stderr.decode().strip()[-2000:]}")
        images = sorted(IMAGES.glob(f"podwire-{__version__}-*.tar"))
    return images[0]
