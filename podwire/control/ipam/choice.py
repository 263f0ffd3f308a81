"""Which addresses a wish gets out of the blocks of this node, or what must be claimed first.

Used by `control.ipam.pool`, under its lock. Takes nothing and asks no store. Invariant: what is chosen may be taken in
the same moment.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from podwire.control.ipam.blocks import OwnBlocks
from podwire.control.ipam.interface import Wish
from podwire.control.ipam.pool_cache import PoolCache
from podwire.control.ipam.pools import NamespaceFacts, Pool, choose_pools, is_for_pods
from podwire.model.endpoint import IPAddress
from podwire.model.errors import AddressUnavailable, Exhausted
from podwire.model.ids import EndpointId


class Lack(msgspec.Struct, frozen=True):
    """What the store is to be asked for, so that a wish can be granted."""

    address: IPAddress | None = None
    pools: tuple[Pool, ...] = ()
    why: str = ""


class AddressChoice(msgspec.Struct, frozen=True):
    """Chooses among the addresses of one node."""

    known: PoolCache
    mine: OwnBlocks
    owners: Mapping[IPAddress, EndpointId]

    def choose(
        self, wish: Wish, granted: Collection[IPAddress], is_promised: Callable[[IPAddress], bool]
    ) -> tuple[IPAddress, ...] | Lack:
        """Name addresses for a wish, or what is lacking; `granted` ones were claimed for it.

        `is_promised` tells whether another wish is about to get an address. Raises Exhausted, AddressUnavailable.
        """
        chosen: list[IPAddress] = []
        for address in wish.wanted:
            if address not in self.owners and is_promised(address):
                raise AddressUnavailable(f"take address {address}: another pod is about to get it")
            lack = self._check_wanted(address, wish, granted)
            if lack is not None:
                return lack
            chosen.append(address)
        pools = self._choose_pools(wish)
        versions = {pool.version for pool in pools} - {address.version for address in wish.wanted}
        if not versions and not chosen:
            raise Exhausted(
                f"take addresses for a pod of namespace {wish.namespace!r}:"
                f" {self._explain_no_pool()}",
                hint="see `podwire get ippools` and docs/ipam.md",
            )
        for version in sorted(versions):
            same = tuple(pool for pool in pools if pool.version == version)
            names = [pool.name for pool in same]
            address_or_none = self.mine.choose_next(names, wish.identity) or next(
                (address for address in granted if address.version == version), None
            )
            if address_or_none is None:
                return Lack(pools=same, why=self.explain_full(same))
            chosen.append(address_or_none)
        return tuple(sorted(chosen, key=lambda address: address.version))

    def explain_full(self, pools: Sequence[Pool]) -> str:
        """Say how full the own blocks of some pools are."""
        parts = []
        for pool in pools:
            blocks = [own for own in self.mine.by_cidr.values() if own.block.pool == pool.name]
            held = sum(own.fifo.held for own in blocks)
            parts.append(f"pool {pool.name}: {len(blocks)} blocks here, {held} addresses held")
        return "no address is left (" + ", ".join(parts) + ")"

    def _choose_pools(self, wish: Wish) -> list[Pool]:
        namespace = self.known.namespaces.get(wish.namespace, NamespaceFacts())
        return choose_pools(
            self.known.usable(),
            node_labels=self.known.node_labels,
            namespace=namespace,
            named=wish.pools,
        )

    def _check_wanted(
        self, address: IPAddress, wish: Wish, granted: Collection[IPAddress]
    ) -> Lack | None:
        """Refuse a fixed address, or say what must be claimed first; None when it may be taken."""
        holder = self.owners.get(address)
        if holder is not None:
            raise AddressUnavailable(
                f"take address {address}: endpoint {holder} holds it",
                hint=f"see `podwire ipam show --ip {address}`",
            )
        pool = self.known.find_pool(address)
        if pool is None or pool.name in self.known.problems or not is_for_pods(pool):
            raise AddressUnavailable(
                f"take address {address}: no pool that pods may use contains it",
                hint="see `podwire get ippools`",
            )
        if wish.pools and pool.name not in wish.pools:
            raise AddressUnavailable(
                f"take address {address}: it is of pool {pool.name}, which args.cni.pools does not name"
            )
        own = self.mine.find(address)
        if own is not None and own.fifo.node_address == address:
            raise AddressUnavailable(f"take address {address}: it stands for this node itself")
        if address in granted or (
            own is not None and own.is_open and not own.fifo.is_excluded(address)
        ):
            return None
        if own is None and pool.strict_affinity:
            raise AddressUnavailable(
                f"take address {address}: this node has no block with it, and pool {pool.name}"
                " gives no others (strictAffinity)"
            )
        return Lack(address=address, pools=(pool,), why=f"{address} must be claimed first")

    def _explain_no_pool(self) -> str:
        if not self.known.pools:
            return "there is no pool" if self.known.is_listed else "the store has not been read yet"
        if self.known.problems:
            return "; ".join(f"pool {name}: {why}" for name, why in self.known.problems.items())
        return "no pool selects this node and that namespace"
