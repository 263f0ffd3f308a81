"""What another node's publication is believed for: its own addresses, and what can be a pod's.

Used by `control.cluster.planner` for nodes' addresses and ranges, and by `control.cluster.remote` for single addresses
of pods. Pure (docs/datapath.md, rule 23). Routes and identities follow from publications, and anybody with one node's
credentials can publish anything in that node's name. So nothing is believed that would divert this host's traffic from
its destination. Invariant: what pods may have and what nodes may have is disjoint, so neither kind of publication can
take the other's.
"""

import dataclasses
import ipaddress
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import msgspec
from msgspec.structs import replace

from podwire.control.cluster.facts import NEVER_PODS
from podwire.control.cluster.ownership import Problem, claimed_ranges
from podwire.model.cluster import NodeFacts, Surroundings
from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.networks import is_within, overlap

IMPLIED_BITS: Final[Mapping[int, int]] = {4: 16, 6: 48}
"""Without `cluster_cidrs`: pods may be in so large a network around this node's own range. Kubernetes' usual size of a
cluster for IPv4, a site for IPv6 (RFC 6177)."""
PRIVATE: Final = tuple(
    map(
        ipaddress.IPv4Network,
        ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "198.18.0.0/15"),
    )
)
"""RFC 1918, 6598 and 2544. Around a range of the world nothing is implied: the rest of it is somebody's."""
NAMED_MAX: Final = 3
"""So many refused ranges of one node are named one by one."""


class Grants(msgspec.Struct, frozen=True):
    """Ranges that somebody above the nodes gives to pods: they may be on a link of this host's."""

    pools: tuple[IPNetwork, ...] = ()
    """To pods of any node."""
    of_node: Mapping[str, frozenset[IPNetwork]] = msgspec.field(default_factory=dict)
    """To pods of one node alone, by its name."""

    def to(self, node: str) -> Iterator[IPNetwork]:
        """Give what pods of a node may have."""
        yield from self.pools
        yield from self.of_node.get(node, ())

    def everything(self) -> Iterator[IPNetwork]:
        """Give what pods of some node may have."""
        yield from self.pools
        for several in self.of_node.values():
            yield from several


@dataclass(frozen=True)
class Belief:
    """What is believed on one node at one time. Two that are equal believe the same."""

    node: str
    """Whose belief it is."""
    cluster_cidrs: tuple[IPNetwork, ...]
    """As the setting says."""
    own_addresses: tuple[IPAddress, ...]
    """On the underlay, as it publishes them."""
    own_ranges: tuple[IPNetwork, ...]
    around: Surroundings
    grants: Grants
    nodes: Mapping[IPAddress, str] = field(default_factory=dict)
    """Addresses of other nodes that are believed, and whose they are."""

    @cached_property
    def cluster(self) -> tuple[IPNetwork, ...]:
        """Where pods are by the settings: what this host has on a link is not meant."""
        if self.cluster_cidrs:
            return self.cluster_cidrs
        networks = (_widen(cidr) for cidr in self.own_ranges)
        return tuple(dict.fromkeys(network for network in networks if network is not None))

    def find_fault(self, node: str, network: IPNetwork) -> str:
        """Say why a node's pods cannot have a range, or a single address; "" when they can."""
        never = next((cidr for cidr in _NEVER[network.version] if overlap(cidr, network)), None)
        if never is not None:
            return f"{never} is never a pod's"
        taken = self._find_taken(network)
        if taken:
            return f"{taken}; give node {node} other ranges, or find out who writes in its name"
        # Before the check of links: only a pool, which nobody writes in a node's name, may place pods in a subnet of
        # this host.
        if any(is_within(network, cidr) for cidr in self.grants.to(node)):
            return ""
        links = self._links[network.version]
        link = next((cidr for cidr in links if overlap(cidr, network)), None)
        if link is not None:
            return (
                f"node {self.node} itself is connected to {link}, and no IPPool has it;"
                " if pods are there, apply such a pool (with use: nodes, if node_cidrs says so), else find out who"
                f" writes as node {node}"
            )
        if any(is_within(network, cidr) for cidr in self.cluster):
            return ""
        return (
            f"it is {self._describe_outside()}; if pods are there, add it to cluster_cidrs of every node or apply an"
            f" IPPool with it, else find out who writes as node {node}"
        )

    def find_address_fault(self, node: str, address: IPAddress) -> str:
        """Say why a node cannot have an address on the underlay; "" when it can. Contests are left to `ownership`."""
        if address in self.own_addresses or any(address in cidr for cidr in self.own_ranges):
            return ""  # a contest with this node, which it may lose
        if address in self.around.own:
            return f"it is an address of node {self.node}"
        edge = next((subnet for subnet in self.around.subnets if _is_edge(address, subnet)), None)
        if edge is not None:
            return f"it is no single machine's in {edge}"
        is_linked = any(address in subnet for subnet in self.around.subnets)
        cluster = () if is_linked else self.cluster
        pods = next(
            (network for network in (*self.grants.everything(), *cluster) if address in network),
            None,
        )
        if pods is None:
            return ""
        return (
            f"pods are in {pods}; give node {node} another node_address, or take it out of what pods may have"
            " (cluster_cidrs, IPPools)"
        )

    @cached_property
    def _links(self) -> Mapping[int, Sequence[IPNetwork]]:
        return _by_version(self.around.subnets)

    def _describe_outside(self) -> str:
        if self.cluster_cidrs:
            return f"in no IPPool and not in cluster_cidrs ({_list(self.cluster_cidrs)})"
        if self.cluster:
            return (
                "in no IPPool, cluster_cidrs is not set, and it is not near this node's own range"
                f" ({_list(self.cluster)})"
            )
        return "in no IPPool, and cluster_cidrs is not set"

    def _find_taken(self, network: IPNetwork) -> str:
        """Say whose address is in a range, if somebody's is."""
        owners, ordered = self._taken
        first = int(network.network_address)
        place = bisect_left(ordered, (network.version, first))
        if place == len(ordered) or ordered[place] > (
            network.version,
            first + network.num_addresses - 1,
        ):
            return ""
        address, owner = owners[ordered[place]]
        return f"{address} is an address of {owner}"

    @cached_property
    def _taken(self) -> tuple[dict[tuple[int, int], tuple[IPAddress, str]], list[tuple[int, int]]]:
        """Addresses that no pod may have. What this host has in a range of its own is contested as a range is."""
        around = self.around
        # A route to one of these by way of another node would cut this host off, or hand its traffic with the store
        # to that node.
        uses: dict[IPAddress, str] = dict.fromkeys(around.gateways, "a gateway")
        uses.update(dict.fromkeys(around.store, "the store"))
        uses.update((address, f"node {name}") for address, name in self.nodes.items())
        mine = (
            address
            for address in around.own
            if not any(address in other for other in self.own_ranges)
        )
        uses.update(dict.fromkeys(mine, f"node {self.node}"))
        keyed: dict[tuple[int, int], tuple[IPAddress, str]] = {
            (address.version, int(address)): (address, owner) for address, owner in uses.items()
        }
        return keyed, sorted(keyed)


def believe_nodes(
    belief: Belief, nodes: Sequence[NodeFacts]
) -> tuple[Belief, list[NodeFacts], set[Problem]]:
    """Give the belief with the nodes' addresses in it, the believed part of each node's facts, and what is refused."""
    refused: dict[str, list[tuple[str, str]]] = {}
    screened: list[NodeFacts] = []
    for facts in nodes:
        faults = {
            address: belief.find_address_fault(facts.name, address) for address in facts.addresses
        }
        kept = tuple(address for address in facts.addresses if not faults[address])
        screened.append(facts if kept == facts.addresses else replace(facts, addresses=kept))
        refused[facts.name] = [
            (f"address {address}", why) for address, why in faults.items() if why
        ]
    addresses = {
        address: facts.name
        # In reverse order, so that of two nodes with one address the first by name is entered last and wins, on every
        # node alike.
        for facts in reversed(screened)
        for address in facts.addresses
        if not any(address in cidr for cidr in belief.own_ranges)  # else it would take pods' away
    }
    belief = dataclasses.replace(belief, nodes=addresses)
    believed = [_believe_ranges(belief, facts, refused[facts.name]) for facts in screened]
    return belief, believed, {_describe(name, found) for name, found in refused.items() if found}


def _believe_ranges(belief: Belief, facts: NodeFacts, refused: list[tuple[str, str]]) -> NodeFacts:
    faults = {
        network: why
        for network, _ in claimed_ranges(facts)
        if (why := belief.find_fault(facts.name, network))
    }
    if not faults:
        return facts
    refused += [(f"pod range {network}", why) for network, why in faults.items()]
    return replace(
        facts,
        pod_cidrs=tuple(cidr for cidr in facts.pod_cidrs if cidr not in faults),
        blocks={block: epoch for block, epoch in facts.blocks.items() if block not in faults},
    )


def _describe(node: str, refused: Sequence[tuple[str, str]]) -> Problem:
    """One problem for a node, however much it publishes."""
    said = "; ".join(f"{what} is refused: {why}" for what, why in refused[:NAMED_MAX])
    more = len(refused) - NAMED_MAX
    rest = f"; so are {more} more" if more > 0 else ""
    return Problem((node,), f"of what node {node} publishes, {said}{rest}")


def _is_edge(address: IPAddress, subnet: IPNetwork) -> bool:
    """Tell whether an address means all machines of a subnet, or any of its routers: no route leads over those."""
    if address.version != subnet.version or subnet.max_prefixlen - subnet.prefixlen < 2:
        return False
    is_broadcast = address.version == 4 and address == subnet.broadcast_address
    return is_broadcast or address == subnet.network_address  # RFC 4291, 2.6.1 for IPv6


def _widen(network: IPNetwork) -> IPNetwork | None:
    if network.version == 4 and not any(is_within(network, cidr) for cidr in PRIVATE):
        return None
    bits = min(IMPLIED_BITS[network.version], network.prefixlen)
    return network.supernet(new_prefix=bits)


def _by_version(networks: Iterable[IPNetwork]) -> Mapping[int, Sequence[IPNetwork]]:
    listed = tuple(networks)
    return {
        version: [network for network in listed if network.version == version] for version in (4, 6)
    }


_NEVER: Final = _by_version(NEVER_PODS)


def _list(networks: Iterable[IPNetwork]) -> str:
    return ", ".join(map(str, networks))
