"""Pools: what an IPPool says, which pools a pod may get its address from, and which must not exist together.

`control.documents.pools` makes them from documents; `control.ipam.pool` and the claims use them. Pure. Invariant: a
pool is cut into blocks of one size, so two blocks of one pool never overlap.
"""

import ipaddress
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.errors import InvalidConfiguration
from podwire.model.networks import is_within

DEFAULT_BLOCK_SIZE: Final[Mapping[int, int]] = {4: 26, 6: 122}
BLOCK_SIZES: Final[Mapping[int, tuple[int, int]]] = {4: (20, 32), 6: (116, 128)}
"""Smallest and largest prefix length of a block, by IP version: 4096 addresses at most."""
POOLS_ANNOTATION: Final = "podwire.io/pools"
"""On a Namespace: names of pools, parted by commas, or a JSON list of them."""
PODS: Final = "pods"
NODES: Final = "nodes"

Labels = Mapping[str, str]


class Requirement(msgspec.Struct, frozen=True):
    """One condition on labels: `operator` is In, NotIn, Exists or DoesNotExist, as in Kubernetes."""

    key: str
    operator: str
    values: tuple[str, ...] = ()

    def holds(self, labels: Labels) -> bool:
        """Tell whether labels fulfil it; NotIn holds for labels that lack the key."""
        match self.operator:
            case "In":
                return labels.get(self.key) in self.values
            case "NotIn":
                return self.key not in labels or labels[self.key] not in self.values
            case "Exists":
                return self.key in labels
            case _:
                return self.key not in labels


Selector = tuple[Requirement, ...]
"""All must hold; none = everything."""


def selects(selector: Selector, labels: Labels) -> bool:
    """Tell whether a selector takes something with these labels."""
    return all(requirement.holds(labels) for requirement in selector)


class AddressRange(msgspec.Struct, frozen=True):
    """From one address to another, both inclusive, of one family."""

    first: IPAddress
    last: IPAddress

    def contains(self, address: IPAddress) -> bool:
        """Tell whether an address is in it."""
        return address.version == self.first.version and int(self.first) <= int(address) <= int(
            self.last
        )

    def overlaps(self, network: IPNetwork) -> bool:
        """Tell whether it shares an address with a network."""
        return (
            network.version == self.first.version
            and int(self.first) <= int(network.broadcast_address)
            and int(network.network_address) <= int(self.last)
        )

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


class Pool(msgspec.Struct, frozen=True):
    """One IPPool."""

    name: str
    cidr: IPNetwork
    block_size: int
    """Prefix length of its blocks."""
    node_selector: Selector = ()
    namespace_selector: Selector = ()
    strict_affinity: bool = False
    """True: a node never takes an address of a block that another node has."""
    max_blocks_per_node: int = 0
    """0 = no limit."""
    reserved: tuple[AddressRange, ...] = ()
    """Given only to a pod that asks for the very address."""
    use: str = PODS
    disabled: bool = False
    """Nothing new is given; what was given stays."""

    @property
    def version(self) -> int:
        """IP version."""
        return self.cidr.version

    @property
    def block_count(self) -> int:
        """How many blocks it has room for: a power of two."""
        return 1 << (self.block_size - self.cidr.prefixlen)

    def block_at(self, index: int) -> IPNetwork:
        """Give the block of a number from 0 to `block_count` - 1."""
        step = 1 << (self.cidr.max_prefixlen - self.block_size)
        first = int(self.cidr.network_address) + index * step
        if self.cidr.version == 4:
            return ipaddress.IPv4Network((first, self.block_size))
        return ipaddress.IPv6Network((first, self.block_size))

    def block_of(self, address: IPAddress) -> IPNetwork:
        """Give the block that an address of the pool is in."""
        step = self.cidr.max_prefixlen - self.block_size
        return self.block_at((int(address) - int(self.cidr.network_address)) >> step)

    def is_block(self, network: IPNetwork) -> bool:
        """Tell whether a network is one of its blocks."""
        return network.prefixlen == self.block_size and is_within(network, self.cidr)

    def reserves(self, address: IPAddress) -> bool:
        """Tell whether an address is given only to a pod that asks for it."""
        return any(range_.contains(address) for range_ in self.reserved)


class NamespaceFacts(msgspec.Struct, frozen=True):
    """What pools look at in a namespace."""

    labels: Labels = msgspec.field(default_factory=dict)
    pools: tuple[str, ...] = ()
    """Those that its annotation names."""


def read_pool_names(annotation: str) -> tuple[str, ...]:
    """Read the names of pools in an annotation, each once, in their order."""
    text = annotation.strip()
    if text.startswith("["):
        try:
            listed = json.loads(text)
        except ValueError:
            listed = [text]
        names = [str(name).strip() for name in listed]
    else:
        names = [name.strip() for name in text.split(",")]
    return tuple(dict.fromkeys(name for name in names if name))


def choose_pools(
    pools: Mapping[str, Pool],
    *,
    node_labels: Labels,
    namespace: NamespaceFacts,
    named: Sequence[str] = (),
) -> list[Pool]:
    """Give the pools that a pod may have addresses from, the preferred first.

    Those that the pod names; else those that its namespace names; else all that select node and namespace, by name.
    What is named is taken whatever its selectors say. Raises InvalidConfiguration for a name that cannot be used.
    """
    if named:
        # A name that cannot be used fails the ADD, because an address of another pool is not what was asked for.
        return [_find_named(pools, name, "the pod (args.cni.pools)") for name in named]
    if namespace.pools:
        source = f"the namespace's annotation {POOLS_ANNOTATION}"
        return [_find_named(pools, name, source) for name in namespace.pools]
    return [
        pool
        for _, pool in sorted(pools.items())
        if is_for_pods(pool)
        and selects(pool.node_selector, node_labels)
        and selects(pool.namespace_selector, namespace.labels)
    ]


def is_for_pods(pool: Pool) -> bool:
    """Tell whether pods may have addresses of a pool."""
    return pool.use == PODS and not pool.disabled


def _find_named(pools: Mapping[str, Pool], name: str, source: str) -> Pool:
    pool = pools.get(name)
    if pool is None:
        problem = "there is no such pool"
    elif pool.disabled:
        problem = "it is disabled"
    elif pool.use != PODS:
        problem = f"it is for {pool.use}"
    else:
        return pool
    raise InvalidConfiguration(
        f"take addresses from pool {name!r}, which {source} names: {problem}",
        hint="see `podwire get ippools`",
    )


def find_pool(pools: Mapping[str, Pool], address: IPAddress) -> Pool | None:
    """Give the pool that an address is in."""
    matching = (pool for pool in pools.values() if pool.version == address.version)
    # At most one: pools that overlap are refused, and are not used if something else wrote them.
    return next((pool for pool in matching if address in pool.cidr), None)


def find_overlaps(pools: Iterable[Pool]) -> list[tuple[Pool, Pool]]:
    """Give every two pools that share addresses, the disabled ones too: what they gave is still in use."""
    overlaps: list[tuple[Pool, Pool]] = []
    for version in (4, 6):
        open_ones: list[Pool] = []
        ordered = [pool for pool in pools_by_start(pools) if pool.version == version]
        for pool in ordered:
            # CIDRs are either nested or apart: a CIDR that ends before this one begins overlaps no later one either.
            open_ones = [candidate for candidate in open_ones if candidate.cidr.overlaps(pool.cidr)]
            overlaps += ((candidate, pool) for candidate in open_ones)
            open_ones.append(pool)
    return overlaps


def pools_by_start(pools: Iterable[Pool]) -> list[Pool]:
    """Order pools by their first address, the larger before the smaller."""
    return sorted(
        pools,
        key=lambda pool: (int(pool.cidr.network_address), pool.cidr.prefixlen, pool.name),
    )
