"""podwire on the nodes as plain processes of the checkout: to try an agent without an image."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from podwire.lab.kubernetes.daemon import Daemon
from podwire.lab.kubernetes.networks.reference import copy_plugins
from podwire.lab.kubernetes.nodes.services import CONF_DIRECTORY, PLUGIN_DIRECTORY
from podwire.lab.node import agent_program, answers_at
from podwire.model.errors import NotFound

if TYPE_CHECKING:
    from podwire.lab.kubernetes.cluster import Cluster, Node

ROOT: Final = Path(__file__).resolve().parents[4]
MANIFEST: Final = ROOT / "deploy" / "podwire.yaml"
LAUNCHER: Final = ROOT / "build" / "bin" / "podwire-cni"
API_SOCKET: Final = "/run/podwire/api.sock"
_CONFIG: Final = "/etc/podwire/agent.toml"
_FILE: Final = f"{CONF_DIRECTORY}/05-podwire.conflist"


class PlainAgents:
    """An agent for each node, started by the rig; `settings` go to its file, those `of_nodes` to that of one."""

    name = "podwire, as plain processes"
    makes_ready = True

    def __init__(
        self, of_nodes: Mapping[str, Mapping[str, object]] | None = None, **settings: object
    ) -> None:
        self._settings = settings
        self._of_nodes = of_nodes or {}
        self.agents: dict[str, Daemon] = {}

    def prepare(self, cluster: "Cluster") -> None:
        """Give the API server podwire's own kinds."""
        if definitions := read_definitions():
            cluster.apply(*definitions)

    def install(self, cluster: "Cluster", node: "Node") -> None:
        """Start the agent, and write the conflist when it answers."""
        if not LAUNCHER.exists():
            raise NotFound(f"find {str(LAUNCHER)!r}", hint="scripts/setup")
        machine = node.machine
        settings: dict[str, object] = {
            "node_name": node.name,
            "store": "kubernetes",
            "kubeconfig": str(cluster.kubeconfig),
            **self._settings,
            **self._of_nodes.get(node.name, {}),
        }
        lines = [f"{key} = {json.dumps(value)}\n" for key, value in settings.items()]
        machine.write(_CONFIG, "".join(lines))
        agent = Daemon(
            f"agent of {node.name}",
            [agent_program(), "--config", _CONFIG],
            machine.directory / "agent.log",
            place=machine.place,
        )
        self.agents[node.name] = agent
        agent.start(lambda: answers_at(machine.path(API_SOCKET)))
        copy_plugins(node, ("loopback",))
        machine.install(f"{PLUGIN_DIRECTORY}/podwire-cni", LAUNCHER)
        document = {
            "cniVersion": "1.0.0",
            "cniVersions": ["1.0.0", "1.1.0"],
            "name": "podwire",
            "plugins": [
                {
                    "type": "podwire-cni",
                    "capabilities": {
                        "bandwidth": True,
                        "ips": True,
                        "mac": True,
                        "portMappings": True,
                    },
                }
            ],
        }
        machine.write(_FILE, json.dumps(document))


def read_definitions() -> list[dict[str, Any]]:
    """Read the CRDs of the manifest; none where there is no manifest."""
    if not MANIFEST.exists():
        return []
    documents = yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))
    return [
        document
        for document in documents
        if document and document["kind"] == "CustomResourceDefinition"
    ]
