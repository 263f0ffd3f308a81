"""What the settings and the node's ranges ask of the datapath, apart from pods.

Called by `agent.node` at the start, and when ranges or settings change. Pure.
"""

from podwire.agent.duties.address_source import Addresses
from podwire.datapath.plan import NodePlan
from podwire.model.config import AgentConfig
from podwire.model.endpoint import IPNetwork


def plan_node(
    config: AgentConfig, addresses: Addresses, ranges: tuple[IPNetwork, ...] | None = None
) -> NodePlan:
    """Say what the node's datapath is to be. The tunnel's port is guarded from the first plan of the cluster on."""
    return NodePlan(
        node_name=config.node.node_name,
        bpf_dir=config.files.bpf_dir,
        mtu=config.datapath.mtu,
        node_address=config.node.node_address,
        cluster_cidrs=config.node.cluster_cidrs,
        node_cidrs=addresses.ranges if ranges is None else ranges,
        families=addresses.families,
        # A single address that a node claims of a pool may be of any part of it.
        pod_sources=config.node.cluster_cidrs if config.node.ipam == "pool" else addresses.strays,
        masquerade=config.datapath.masquerade,
        masquerade_except=config.datapath.masquerade_except,
        conntrack_entries=config.datapath.conntrack_entries,
        conntrack_quota=config.datapath.conntrack_quota,
        policy_entries=config.policy.policy_entries,
    )
