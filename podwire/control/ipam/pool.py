"""IPAM mode `pool`: pods get addresses from blocks that this node has claimed from pools.

Used by `control.attach`; `agent.duties.addresses` passes on what the store says and does what is due. Only the journal
records which pod has which address of an own block: ADD and DEL do not write to the store while a block has a free
address. Thread-safe; nothing is asked of the store under the lock. Invariant: an address has one holder in the whole
cluster. A block is opened only when everything up to its claim has been heard, it gives nothing that an object claims,
and it gives nothing more once another node has it.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from podwire.control.ipam.blocks import OwnBlocks, leave_out_overlapped
from podwire.control.ipam.claims import Claims
from podwire.control.ipam.documents import Block, ClaimedAddress
from podwire.control.ipam.interface import (
    NO_IDENTITY,
    NO_WISH,
    CidrUsage,
    Given,
    Holding,
    Wish,
    split_families,
)
from podwire.control.ipam.pool_cache import PoolCache
from podwire.control.ipam.pools import (
    NamespaceFacts,
    Pool,
    choose_pools,
    is_for_pods,
    selects,
)
from podwire.model.endpoint import AttachmentKey, IPAddress, IPNetwork
from podwire.model.errors import (
    AddressUnavailable,
    Bug,
    Cancelled,
    Conflict,
    Exhausted,
    PodwireError,
    Unavailable,
)
from podwire.model.ids import EndpointId, IdentityId

HEAR_S: Final = 0.2
"""How often a thread that waits for a block checks whether its caller went away."""


@dataclass(frozen=True)
class _Lack:
    """What the store is to be asked for, so that a wish can be granted."""

    address: IPAddress | None = None
    pools: tuple[Pool, ...] = ()
    why: str = ""


@dataclass
class _Aside:
    """What is set aside for a wish that is being granted."""

    claimed: dict[IPAddress, ClaimedAddress] = field(default_factory=dict)
    chosen: tuple[IPAddress, ...] = ()


class PoolIpam:
    """The addresses of one node out of its blocks."""

    def __init__(self, claims: Claims, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.claims = claims
        self.known: PoolCache = claims.known
        self.monotonic = monotonic
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.mine = OwnBlocks(self.known)
        """To be looked at under the lock."""
        self.own = self.mine.by_cidr
        self._holdings: dict[EndpointId, Holding] = {}
        self._owners: dict[IPAddress, EndpointId] = {}
        self._aside: dict[AttachmentKey, _Aside] = {}
        self.before_open: Callable[[Mapping[IPNetwork, int]], None] = lambda _blocks: None
        """Told of all blocks there are going to be, before the first address of a new one is given."""
        self._claiming = threading.Lock()
        """One claim of a block at a time: those who wait meanwhile find it full of free addresses."""

    # What attachments ask

    def waits_for_store(self, wish: Wish) -> bool:
        """Tell whether the store must be asked before this wish can be granted."""
        with self.lock:
            try:
                return isinstance(self._choose(wish), _Lack)
            except PodwireError:
                return False

    def make_room(self, wish: Wish, cancelled: Callable[[], bool], wait_s: float) -> None:
        """Set addresses aside for a wish; claims a block, or single addresses, when own blocks have none."""
        if wish.key is None:
            raise Bug("set addresses aside for nobody")
        until_s = self.monotonic() + wait_s
        with self.lock:
            self._aside.setdefault(wish.key, _Aside())
        while True:
            with self.lock:
                found = self._choose(wish)
                if not isinstance(found, _Lack):
                    self._set_aside(wish.key, found)
                    return
            if cancelled():
                raise Cancelled(f"take addresses for {wish.key}: the caller went away")
            self._fetch(found, wish.key, until_s, cancelled)

    def drop(self, wish: Wish) -> None:
        """Let go of what was set aside and not allocated."""
        if wish.key is None:
            return
        with self.lock:
            aside = self._aside.pop(wish.key, None)
            for address in aside.chosen if aside else ():
                self.mine.give_back(address, wish.identity)

    def allocate(self, owner: EndpointId, wish: Wish = NO_WISH) -> Given:
        """Give `owner` what was set aside for the wish, else what own blocks have; asks no store."""
        with self.lock:
            if owner in self._holdings:
                raise Bug(f"allocate addresses for endpoint {owner}: it has some already")
            aside = self._aside.get(wish.key) if wish.key is not None else None
            if aside is not None and aside.chosen:
                chosen, aside.chosen = aside.chosen, ()
            else:
                found = self._choose(wish)
                if isinstance(found, _Lack):
                    raise Exhausted(f"take an address: {found.why}", hint="call again later")
                chosen = found
                for address in chosen:
                    self.mine.take(address)
            self._hold(Holding(owner, chosen, wish.identity))
            return split_families(chosen)

    def adopt(
        self,
        owner: EndpointId,
        addresses: Sequence[IPAddress],
        *,
        identity: IdentityId = NO_IDENTITY,
        quarantined: bool = False,
    ) -> None:
        """Hold again what a record says, whether its block is known (yet) or not."""
        with self.lock:
            if owner in self._holdings:
                raise Bug(f"adopt addresses for endpoint {owner}: it has some already")
            for address in addresses:
                if address in self._owners:
                    raise Bug(
                        f"adopt {address} for endpoint {owner}: endpoint"
                        f" {self._owners[address]} holds it",
                        hint="see `podwire endpoint list`; delete one of the two pods",
                    )
            for address in addresses:
                self.mine.take(address)
                own = self.mine.find(address)
                if own is not None and own.fifo.is_assignable(address):
                    own.fifo.continue_after(address)
            self._hold(Holding(owner, tuple(addresses), identity, quarantined))

    def quarantine(self, owner: EndpointId) -> None:
        """Show the addresses of an ending endpoint as such; they stay held."""
        with self.lock:
            holding = self._holdings.get(owner)
            if holding is not None:
                self._holdings[owner] = replace(holding, quarantined=True)

    def release(self, owner: EndpointId) -> None:
        """Let the addresses of an endpoint rest; those that an object claims the duty gives back later."""
        with self.lock:
            holding = self._holdings.pop(owner, None)
            if holding is None:
                return
            for address in holding.addresses:
                del self._owners[address]
                self.mine.give_back(address, holding.identity)

    def find_owner(self, address: IPAddress) -> EndpointId | None:
        """Tell which endpoint holds an address."""
        return self._owners.get(address)

    def holders(self) -> Mapping[EndpointId, Holding]:
        """Give a copy of what every endpoint holds."""
        with self.lock:
            return dict(self._holdings)

    def list_lacks(self) -> Sequence[str]:
        """Name the families in which neither an own block nor any pool has an address for an ordinary pod."""
        with self.lock:
            pools = self.ordinary_pools()
            found = []
            for version in sorted({one.version for one in pools}):
                same = [one for one in pools if one.version == version]
                if all(
                    not self.count_free(one.name) and self.claims.find_limit(one) for one in same
                ):
                    found.append(f"IPv{version} pools {', '.join(one.name for one in same)}")
            return found

    def usage(self) -> Sequence[CidrUsage]:
        """Tell how full each own block is, in the order in which they were claimed."""
        with self.lock:
            waiting = [
                address
                for holding in self._holdings.values()
                if holding.quarantined
                for address in holding.addresses
            ]
            return self.mine.usage(waiting)

    # What the duty does

    @property
    def blocks(self) -> Mapping[IPNetwork, int]:
        """Give the own blocks with the epochs of their claims, for others to know."""
        with self.lock:
            return self.mine.epochs()

    def count_free(self, pool: str) -> int:
        """Tell how many addresses the open blocks of a pool have left."""
        with self.lock:
            return sum(own.fifo.free for own in self.mine.list_open([pool]))

    def ordinary_pools(self) -> list[Pool]:
        """Give the pools whose blocks a pod of any namespace on this node may have."""
        return [
            one
            for _, one in sorted(self.known.usable().items())
            if is_for_pods(one)
            and not one.namespace_selector
            and selects(one.node_selector, self.known.node_labels)
        ]

    def sync(self, addresses: Iterable[IPAddress] = ()) -> bool:
        """Follow what is known now: open what was claimed, drop what is not ours. Tells whether blocks changed.

        `addresses`: whose claims changed. `before_open` hears of new blocks first.
        """
        with self.lock, self.known.lock:
            before = self.blocks
            fresh = [one for one in self.known.own.values() if one.cidr not in self.own]
        if fresh:
            self.before_open({**before, **{one.cidr: one.epoch for one in fresh}})
        with self.lock, self.known.lock:
            for block in sorted(self.known.own.values(), key=lambda one: one.revision):
                if block.cidr not in self.own:
                    self.mine.open(block, self._list_held())
                else:
                    self.mine.refresh(self.own[block.cidr], block)
            for cidr in [one for one in self.own if one not in self.known.own]:
                self.mine.lose(cidr)
            self.mine.follow_pools()
            for address in addresses:
                own = self.mine.find(address)
                if own is not None:
                    self.mine.exclude(own)
            self.changed.notify_all()
            return self.blocks != before

    def remember(
        self,
        blocks: Iterable[Block],
        claimed: Iterable[IPAddress],
        node_addresses: Iterable[IPAddress] = (),
    ) -> Sequence[str]:
        """Open blocks that an earlier life had, before the store was heard; nothing of `claimed` is given.

        `node_addresses` stood for the node. Gives what had to be left out, and why.
        """
        self.mine.node_addresses.update({one.version: one for one in node_addresses})
        opened, left_out = leave_out_overlapped(blocks)
        with self.lock:
            self.known.remember(opened)
            kept = set(claimed)
            for block in self.known.own.values():
                self.mine.open(block, self._list_held())
                if block.cidr in self.own:
                    self.own[block.cidr].fifo.exclude((*block.kept_addresses(), *kept))
        return left_out

    def list_unheld(self) -> list[ClaimedAddress]:
        """Give claimed addresses of this node that nobody here has, nor is about to have."""
        with self.lock, self.known.lock:
            busy = set(self._aside)
            return [
                one
                for one in self.known.claimed.values()
                if one.node == self.known.node
                and one.address not in self._owners
                and one.key not in busy
                and not any(one.address in other.chosen for other in self._aside.values())
            ]

    def close_block(self, cidr: IPNetwork) -> Block | None:
        """Give nothing more of an empty block, so that it can be given back; None when it is in use."""
        with self.lock:
            own = self.own.get(cidr)
            if own is None or own.fifo.held or own.lost or own.block.stored is None:
                return None
            own.closing = True
            self.mine.settle_node_addresses()
            return own.block

    # How

    def _choose(self, wish: Wish) -> tuple[IPAddress, ...] | _Lack:
        """Name addresses for a wish, all of which may be taken now, or what is lacking."""
        aside = self._aside.get(wish.key) if wish.key is not None else None
        granted = aside.claimed if aside is not None else {}
        chosen: list[IPAddress] = []
        for address in wish.wanted:
            lack = self._check_wanted(address, wish, granted)
            if lack is not None:
                return lack
            chosen.append(address)
        pools = self._choose_pools(wish)
        versions = {one.version for one in pools} - {one.version for one in wish.wanted}
        if not versions and not chosen:
            raise Exhausted(
                f"take addresses for a pod of namespace {wish.namespace!r}:"
                f" {self._explain_no_pool()}",
                hint="see `podwire get ippools` and docs/ipam.md",
            )
        for version in sorted(versions):
            same = tuple(one for one in pools if one.version == version)
            address_or_none = self.mine.choose_next(_names(same), wish.identity) or next(
                (one for one in granted if one.version == version), None
            )
            if address_or_none is None:
                return _Lack(pools=same, why=self._explain_full(same))
            chosen.append(address_or_none)
        return tuple(sorted(chosen, key=lambda one: one.version))

    def _choose_pools(self, wish: Wish) -> list[Pool]:
        namespace = self.known.namespaces.get(wish.namespace, NamespaceFacts())
        return choose_pools(
            self.known.usable(),
            node_labels=self.known.node_labels,
            namespace=namespace,
            named=wish.pools,
        )

    def _check_wanted(
        self, address: IPAddress, wish: Wish, granted: Mapping[IPAddress, ClaimedAddress]
    ) -> _Lack | None:
        """Refuse a fixed address, or say what must be claimed first; None when it may be taken."""
        holder = self._owners.get(address)
        if holder is not None:
            raise AddressUnavailable(
                f"take address {address}: endpoint {holder} holds it",
                hint=f"see `podwire ipam show --ip {address}`",
            )
        if any(
            address in other.chosen or address in other.claimed
            for key, other in self._aside.items()
            if key != wish.key
        ):
            raise AddressUnavailable(f"take address {address}: another pod is about to get it")
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
        return _Lack(address=address, pools=(pool,), why=f"{address} must be claimed first")

    def _fetch(
        self, lack: _Lack, key: AttachmentKey, until_s: float, cancelled: Callable[[], bool]
    ) -> None:
        """Get what is lacking from the store."""
        if lack.address is not None:
            self._grant(key, self.claims.claim_address(lack.address, lack.pools[0], key))
            return
        if not self._claiming.acquire(timeout=max(0.0, until_s - self.monotonic())):
            raise Unavailable(f"take an address: {lack.why}; the claim takes too long")
        try:
            with self.lock:
                if any(own.fifo.free for own in self.mine.list_open(_names(lack.pools))):
                    return
            limits = []
            for pool in lack.pools:
                try:
                    block = self.claims.claim_block(pool)
                except Exhausted as error:
                    limits.append(error.message)
                    continue
                except Conflict as error:
                    self._wait_news(error, until_s)
                    return
                self._wait_open(block, until_s, cancelled)
                return
            self._borrow(lack.pools, key, limits)
        finally:
            self._claiming.release()

    def _wait_open(self, block: Block, until_s: float, cancelled: Callable[[], bool]) -> None:
        """Wait until everything up to the claim was heard: before, somebody may have an address of the block."""
        with self.lock:
            while block.cidr not in self.own:
                left_s = until_s - self.monotonic()
                if cancelled() or left_s <= 0:
                    raise Unavailable(
                        f"take an address: block {block.cidr} of pool {block.pool} is claimed, and"
                        " the store has not confirmed it yet",
                        hint="call again later",
                    )
                self.changed.wait(min(HEAR_S, left_s))

    def _wait_news(self, error: Conflict, until_s: float) -> None:
        """Wait for what others did meanwhile: with it, the next try knows where to look."""
        left_s = until_s - self.monotonic()
        if left_s <= 0:
            raise Unavailable(error.message, hint=error.hint)
        with self.lock:
            self.changed.wait(min(HEAR_S, left_s))

    def _borrow(self, pools: Sequence[Pool], key: AttachmentKey, limits: Sequence[str]) -> None:
        for pool in pools:
            claimed = self.claims.borrow(pool, key)
            if claimed is not None:
                self._grant(key, claimed)
                return
        strict = [one.name for one in pools if one.strict_affinity]
        why = "; ".join(limits)
        why += f"; {', '.join(strict)} lend nothing (strictAffinity)" if strict else ""
        raise Exhausted(
            f"take an IPv{pools[0].version} address: {self._explain_full(pools)}; {why}",
            hint="add a pool, raise maxBlocksPerNode, or remove pods; see `podwire ipam show`",
        )

    def _grant(self, key: AttachmentKey, claimed: ClaimedAddress) -> None:
        with self.lock:
            aside = self._aside.get(key)
            taken = claimed.address in self._owners or any(
                claimed.address in other.claimed for other in self._aside.values()
            )
            if aside is None or taken:
                raise AddressUnavailable(
                    f"take address {claimed.address}: another pod was faster", hint="call again"
                )
            aside.claimed[claimed.address] = claimed

    def _explain_full(self, pools: Sequence[Pool]) -> str:
        parts = []
        for pool in pools:
            blocks = [one for one in self.own.values() if one.block.pool == pool.name]
            held = sum(one.fifo.held for one in blocks)
            parts.append(f"pool {pool.name}: {len(blocks)} blocks here, {held} addresses held")
        return "no address is left (" + ", ".join(parts) + ")"

    def _explain_no_pool(self) -> str:
        if not self.known.pools:
            return "there is no pool" if self.known.is_listed else "the store has not been read yet"
        if self.known.problems:
            return "; ".join(f"pool {name}: {why}" for name, why in self.known.problems.items())
        return "no pool selects this node and that namespace"

    def _set_aside(self, key: AttachmentKey, addresses: tuple[IPAddress, ...]) -> None:
        for address in addresses:
            self.mine.take(address)
        self._aside[key].chosen = addresses

    def _hold(self, holding: Holding) -> None:
        self._holdings[holding.owner] = holding
        for address in holding.addresses:
            self._owners[address] = holding.owner

    def _list_held(self) -> list[IPAddress]:
        aside = [one for other in self._aside.values() for one in other.chosen]
        return [*self._owners, *aside]


def _names(pools: Iterable[Pool]) -> list[str]:
    return [one.name for one in pools]
