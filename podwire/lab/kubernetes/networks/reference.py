"""The network that podwire is measured against: the reference plugins of the distribution, which need no agent."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from podwire.lab.kubernetes.nodes.services import CONF_DIRECTORY, PLUGIN_DIRECTORY
from podwire.model.errors import NotFound

if TYPE_CHECKING:
    from podwire.lab.kubernetes.cluster import Cluster, Node

REFERENCE_PLUGINS: Final = Path("/usr/lib/cni")


class Ptp:
    """ptp with host-local, and a static route to the pods of each other node; for host ports portmap as well."""

    name = "ptp"
    makes_ready = True
    _file: Final = f"{CONF_DIRECTORY}/20-ptp.conflist"

    def __init__(self, *, host_ports: bool = True) -> None:
        self._host_ports = host_ports

    def prepare(self, cluster: "Cluster") -> None:
        """Let every node reach the pods of the others."""
        for node in cluster.nodes:
            for other in cluster.nodes:
                if other is not node:
                    pairs = zip(cluster.pod_cidrs(other), other.machine.plan.addresses, strict=True)
                    for cidr, address in pairs:
                        node.machine.run("ip", "route", "replace", cidr, "via", address)

    def install(self, cluster: "Cluster", node: "Node") -> None:
        """Copy the plugins, then write the network's configuration."""
        copy_plugins(node, ("ptp", "host-local", "loopback", "portmap"))
        host_ports = {"type": "portmap", "capabilities": {"portMappings": True}}
        document = {
            "cniVersion": "1.0.0",
            "name": self.name,
            "plugins": [
                {
                    "type": "ptp",
                    "ipMasq": False,
                    "ipam": {
                        "type": "host-local",
                        "ranges": [[{"subnet": cidr}] for cidr in cluster.pod_cidrs(node)],
                        "dataDir": "/run/cni-ipam",
                        "routes": [
                            {"dst": "::/0" if ":" in cidr else "0.0.0.0/0"}
                            for cidr in cluster.pod_cidrs(node)
                        ],
                    },
                },
                *([host_ports] if self._host_ports else []),
            ],
        }
        node.machine.write(self._file, json.dumps(document))


def copy_plugins(node: "Node", names: tuple[str, ...]) -> None:
    """Copy reference plugins to a node."""
    for name in names:
        source = REFERENCE_PLUGINS / name
        if not source.exists():
            raise NotFound(
                f"find plugin {name!r} in {str(REFERENCE_PLUGINS)!r}",
                hint="apt-get install containernetworking-plugins",
            )
        node.machine.install(f"{PLUGIN_DIRECTORY}/{name}", source)
