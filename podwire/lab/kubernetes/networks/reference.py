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
    """ptp with host-local, and a static route to the pods of each other node."""

    name = "ptp"
    makes_ready = True
    _file: Final = f"{CONF_DIRECTORY}/20-ptp.conflist"
    _plugins: Final = ("ptp", "host-local", "loopback", "portmap")

    def prepare(self, cluster: "Cluster") -> None:
        """Let every node reach the pods of the others."""
        for node in cluster.nodes:
            for other in cluster.nodes:
                if other is not node:
                    node.machine.run(
                        *("ip", "route", "replace", cluster.pod_cidr(other)),
                        *("via", other.machine.plan.address),
                    )

    def install(self, cluster: "Cluster", node: "Node") -> None:
        """Copy the plugins, then write the network's configuration."""
        copy_plugins(node, self._plugins)
        document = {
            "cniVersion": "1.0.0",
            "name": self.name,
            "plugins": [
                {
                    "type": "ptp",
                    "ipMasq": False,
                    "ipam": {
                        "type": "host-local",
                        "subnet": cluster.pod_cidr(node),
                        "dataDir": "/run/cni-ipam",
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                },
                {"type": "portmap", "capabilities": {"portMappings": True}},
            ],
        }
        node.machine.write(self._file, json.dumps(document))

    def uninstall(self, cluster: "Cluster", node: "Node") -> None:
        """Remove the network's configuration; the plugins stay, DEL needs them."""
        node.machine.path(self._file).unlink(missing_ok=True)


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
