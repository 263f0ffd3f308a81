"""The API's operations on nodes, and what status says of the cluster.

Routed by `agent.api.routes`, on a thread, because it asks the store which nodes are alive. Changes nothing.
"""

import platform

from msgspec import structs

from podwire.agent.api.context import Api
from podwire.agent.api.openapi import Call
from podwire.agent.api.shared import NodeView
from podwire.control.cluster.state import ClusterTotals, KnownNode
from podwire.model.errors import PodwireError
from podwire.model.store import Store
from podwire.model.store.leases import list_living_nodes


def list_nodes(api: Api, _call: Call) -> list[NodeView]:
    """Show the nodes that this one knows, itself first."""
    alive = _ask_who_lives(api.store)
    known = {known.facts.name: known for known in api.nodes.list_nodes()}
    own = known.pop(api.config.current.node.node_name, None)
    encrypted = api.nodes.list_encrypted()
    others = (_view(node, alive, encrypted) for node in known.values())
    return [_view_own(api, own), *others]


def count_nodes(api: Api) -> ClusterTotals:
    """Count other nodes, and those that the kernel's rows have as encrypted."""
    return structs.replace(api.nodes.totals(), encrypted=len(api.nodes.list_encrypted()))


def _ask_who_lives(store: Store) -> frozenset[str] | None:
    try:
        return list_living_nodes(store.leases())
    # With the store away it is not known which nodes live; they are shown all the same.
    except PodwireError:
        return None


def _view_own(api: Api, known: KnownNode | None) -> NodeView:
    node = api.config.current.node
    ranges = node.node_cidrs if known is None else (*known.facts.pod_cidrs, *known.facts.blocks)
    published = () if known is None else known.facts.addresses
    return NodeView(
        name=node.node_name,
        addresses=tuple(map(str, published)) or api.nodes.addresses,
        pod_cidrs=tuple(map(str, ranges)),
        cluster_cidrs=tuple(map(str, node.cluster_cidrs)),
        mtu=api.nodes.pod_mtu(),
        ways=("local",),
        alive=True,
        kernel=platform.release(),
        boot_id=api.clock.boot_id(),
        instance="" if known is None else known.facts.instance,
        epoch=0 if known is None else known.facts.epoch,
    )


def _view(known: KnownNode, alive: frozenset[str] | None, encrypted: frozenset[str]) -> NodeView:
    facts = known.facts
    addresses = tuple(map(str, facts.addresses))
    return NodeView(
        name=facts.name,
        addresses=addresses,
        pod_cidrs=tuple(map(str, (*facts.pod_cidrs, *facts.blocks))),
        mtu=known.mtu_bytes,
        ways=known.ways,
        outer=known.outer,
        encrypted=not encrypted.isdisjoint(addresses),
        alive=None if alive is None else facts.name in alive,
        instance=facts.instance,
        epoch=facts.epoch,
    )
