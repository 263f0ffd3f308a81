"""The rig by hand: `python -m podwire.lab.kubernetes up|down|kubectl|enter`, for whoever develops on it.

`up [NETWORK] [--nodes N ...]` leaves a cluster running; `kubectl WORDS...` talks to it, `enter NODE COMMAND...` runs a
command on a node.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from podwire.kernel import netns
from podwire.lab.kubernetes import cluster as clusters
from podwire.lab.kubernetes import programs, residue
from podwire.lab.kubernetes.cluster import CONTROL, ClusterShape
from podwire.lab.kubernetes.networks import Network, Nothing
from podwire.lab.kubernetes.networks.agents import PlainAgents
from podwire.lab.kubernetes.networks.installed import Podwire
from podwire.lab.kubernetes.networks.reference import Ptp
from podwire.lab.kubernetes.nodes.machine import KEEPER_FILE
from podwire.model.errors import PodwireError

NAME: Final = os.environ.get("PWK_CLUSTER", "hand")
NETWORKS: Final[Mapping[str, Callable[[], Network]]] = {
    "ptp": Ptp,
    "none": Nothing,
    "agents": PlainAgents,
    "podwire": Podwire,
}


def main(words: Sequence[str]) -> int:
    """Run one command; gives the exit status."""
    match [*words]:
        case ["up", *rest]:
            network, shape = _read_shape(rest)
            clusters.up(NAME, shape, NETWORKS[network]())
        case ["down"]:
            clusters.down(NAME)
        case ["kubectl", *rest]:
            _become_kubectl(rest)
        case ["enter", node, *rest]:
            _enter(node, rest or ["sh"])
        case _:
            print(f"{__doc__}`up --help` says which networks and shapes there are", file=sys.stderr)
            return 2
    return 0


def _read_shape(words: Sequence[str]) -> tuple[str, ClusterShape]:
    """Read which network is wanted, in a cluster of which shape."""
    usual = ClusterShape()
    parser = argparse.ArgumentParser(
        prog="up", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("network", nargs="?", choices=NETWORKS, default="ptp")
    parser.add_argument("--nodes", type=int, default=usual.nodes)
    parser.add_argument("--families", choices=["4", "46"], default=usual.families)
    parser.add_argument("--proxy", choices=["nftables", "iptables", "none"], default=usual.proxy)
    parser.add_argument("--newer", nargs="*", choices=["containerd", "etcd"], default=[])
    said = parser.parse_args(words)
    return said.network, ClusterShape(
        nodes=said.nodes,
        families=said.families,
        proxy="" if said.proxy == "none" else said.proxy,
        newer=frozenset(said.newer),
    )


def _become_kubectl(words: Sequence[str]) -> None:
    kubectl = programs.find(programs.CLUSTER)["kubectl"]
    kubeconfig = residue.directory_of(NAME) / "admin.kubeconfig"
    namespace = netns.named_path(residue.namespace_of(NAME, CONTROL))
    command = [f"--net={namespace}", kubectl, f"--kubeconfig={kubeconfig}", *words]
    os.execvp("nsenter", ["nsenter", *command])


def _enter(node: str, words: Sequence[str]) -> None:
    keeper = (residue.directory_of(NAME) / node / KEEPER_FILE).read_text()
    os.execvp("nsenter", ["nsenter", f"--target={keeper}", "--net", "--mount", *words])


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except PodwireError as error:
        sys.exit(f"error: {error.message}\nhint: {error.hint}")
