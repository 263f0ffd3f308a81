"""What a cluster's pods are attached by: a network is put on each node."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from podwire.lab.kubernetes.cluster import Cluster, Node


class Network(Protocol):
    """One way to attach pods."""

    name: str
    makes_ready: bool
    """Whether nodes get Ready by `install`."""

    def prepare(self, cluster: "Cluster") -> None:
        """Do what is done once for the cluster, when all nodes are registered."""

    def install(self, cluster: "Cluster", node: "Node") -> None:
        """Put it on a node, whose pod CIDR is known."""


class Nothing:
    """No network: somebody else brings one."""

    name = "none"
    makes_ready = False

    def prepare(self, cluster: "Cluster") -> None:
        """Do nothing."""

    def install(self, cluster: "Cluster", node: "Node") -> None:
        """Do nothing."""
