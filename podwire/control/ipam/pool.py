"""IPAM mode `pool`: pods get addresses from blocks that this node has claimed from pools.

Used by `control.attach`; `agent.duties.addresses` passes on what the store says and does what is due. Only the journal
records which pod has which address of an own block: ADD and DEL do not write to the store while a block has a free
address. Thread-safe; nothing is asked of the store under the lock. Invariant: an address has one holder in the whole
cluster. A block is opened only when everything up to its claim has been heard, it gives nothing that an object claims,
and it gives nothing more once another node has it.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from podwire.control.ipam.blocks import OwnBlocks, leave_out_overlapped
from podwire.control.ipam.choice import AddressChoice, Lack
from podwire.control.ipam.claiming.claims import Claims
from podwire.control.ipam.documents import Block, ClaimedAddress
from podwire.control.ipam.holdings import Holdings
from podwire.control.ipam.interface import (
    NO_IDENTITY,
    CidrUsage,
    Given,
    Holding,
    Wish,
    split_families,
)
from podwire.control.ipam.pool_cache import PoolCache
from podwire.control.ipam.pools import (
    Pool,
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


class PoolReservation:
    """Addresses for one wish: set aside until they are taken, or until the block of `PoolIpam.reserved` ends.

    What it holds is looked at under the lock of its `PoolIpam`.
    """

    def __init__(self, ipam: "PoolIpam", wish: Wish) -> None:
        self.wish = wish
        self.claimed: dict[IPAddress, ClaimedAddress] = {}
        self.chosen: tuple[IPAddress, ...] = ()
        self._ipam = ipam

    @property
    def needs_store(self) -> bool:
        """Tell whether `fill` would ask the store; blocks for nothing."""
        return self._ipam.is_lacking(self)

    def fill(self, cancelled: Callable[[], bool], wait_s: float) -> None:
        """Set addresses aside; claims a block, or single addresses, when own blocks have none."""
        self._ipam.fill(self, cancelled, wait_s)

    def take(self, owner: EndpointId) -> Given:
        """Give `owner` what was set aside, else what own blocks have; asks no store."""
        return self._ipam.take(self, owner)


class PoolIpam:
    """The addresses of one node out of its blocks."""

    def __init__(
        self,
        claims: Claims,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        before_open: Callable[[Mapping[IPNetwork, int]], None] = lambda _blocks: None,
    ) -> None:
        self.claims = claims
        self.known: PoolCache = claims.known
        self.monotonic = monotonic
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.mine = OwnBlocks(self.known)
        """To be looked at under the lock."""
        self.own = self.mine.by_cidr
        self._held = Holdings()
        self._choice = AddressChoice(self.known, self.mine, self._held.owners)
        self._reservations: list[PoolReservation] = []
        self._before_open = before_open
        """Told of all blocks there are going to be, before the first address of a new one is given."""
        self._claiming = threading.Lock()
        """One claim of a block at a time: ADDs that wait meanwhile find it full of free addresses."""

    # What attachments ask

    @contextlib.contextmanager
    def reserved(self, wish: Wish) -> Iterator[PoolReservation]:
        """Keep what is set aside for a wish from others; what was not taken when the block ends goes back."""
        reservation = PoolReservation(self, wish)
        with self.lock:
            self._reservations.append(reservation)
        try:
            yield reservation
        finally:
            with self.lock:
                self._reservations.remove(reservation)
                for address in reservation.chosen:
                    self.mine.give_back(address, wish.identity)

    def is_lacking(self, reservation: PoolReservation) -> bool:
        """Tell whether the store must be asked before a reservation can be filled."""
        with self.lock:
            try:
                return isinstance(self._choose(reservation), Lack)
            except PodwireError:
                return False  # the store would not help: `fill` raises the same

    def fill(
        self, reservation: PoolReservation, cancelled: Callable[[], bool], wait_s: float
    ) -> None:
        """Set addresses aside for a reservation, waiting for the store at most `wait_s`."""
        key = reservation.wish.key
        if key is None:
            raise Bug("set addresses aside for nobody")
        until_s = self.monotonic() + wait_s
        while True:
            with self.lock:
                chosen = self._choose(reservation)
                if not isinstance(chosen, Lack):
                    for address in chosen:
                        self.mine.take(address)
                    reservation.chosen = chosen
                    return
            if cancelled():
                raise Cancelled(f"take addresses for {key}: the caller went away")
            self._fetch(chosen, key, reservation, until_s, cancelled)

    def take(self, reservation: PoolReservation, owner: EndpointId) -> Given:
        """Give `owner` what was set aside, else what own blocks have; asks no store."""
        with self.lock:
            self._held.check_fresh(owner, "allocate")
            chosen, reservation.chosen = reservation.chosen, ()
            if not chosen:
                choice = self._choose(reservation)
                if isinstance(choice, Lack):
                    raise Exhausted(f"take an address: {choice.why}", hint="call again later")
                chosen = choice
                for address in chosen:
                    self.mine.take(address)
            self._held.add(Holding(owner, chosen, reservation.wish.identity))
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
            self._held.adopt(Holding(owner, tuple(addresses), identity, quarantined))
            for address in addresses:
                self.mine.take(address)
                own = self.mine.find(address)
                if own is not None and own.fifo.is_assignable(address):
                    own.fifo.continue_after(address)

    def quarantine(self, owner: EndpointId) -> None:
        """Show the addresses of an ending endpoint as such; they stay held."""
        with self.lock:
            self._held.quarantine(owner)

    def release(self, owner: EndpointId) -> None:
        """Let the addresses of an endpoint rest; those that an object claims the duty gives back later."""
        with self.lock:
            if (holding := self._held.remove(owner)) is not None:
                for address in holding.addresses:
                    self.mine.give_back(address, holding.identity)

    def find_owner(self, address: IPAddress) -> EndpointId | None:
        """Tell which endpoint holds an address."""
        return self._held.owners.get(address)

    def holders(self) -> Mapping[EndpointId, Holding]:
        """Give a copy of what every endpoint holds."""
        with self.lock:
            return dict(self._held.of)

    def list_lacks(self) -> Sequence[str]:
        """Name the families in which neither an own block nor any pool has an address for an ordinary pod."""
        with self.lock:
            pools = self.ordinary_pools()
            lacks = []
            for version in sorted({pool.version for pool in pools}):
                same = [pool for pool in pools if pool.version == version]
                if all(
                    not self.count_free(pool.name) and self.claims.find_limit(pool) for pool in same
                ):
                    lacks.append(f"IPv{version} pools {', '.join(pool.name for pool in same)}")
            return lacks

    def usage(self) -> Sequence[CidrUsage]:
        """Tell how full each own block is, in the order in which they were claimed."""
        with self.lock:
            return self.mine.usage(self._held.list_quarantined())

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
            pool
            for _, pool in sorted(self.known.usable().items())
            if is_for_pods(pool)
            and not pool.namespace_selector
            and selects(pool.node_selector, self.known.node_labels)
        ]

    def sync(self, addresses: Iterable[IPAddress] = ()) -> bool:
        """Follow what is known now: open what was claimed, drop what is not ours. Tells whether blocks changed.

        `addresses`: whose claims changed. `before_open` hears of new blocks first.
        """
        with self.lock, self.known.lock:
            before = self.blocks
            fresh = [block for block in self.known.own.values() if block.cidr not in self.own]
        if fresh:
            # Outside the lock: the listener takes the node's turn, and an ADD that has the turn takes this lock.
            self._before_open({**before, **{block.cidr: block.epoch for block in fresh}})
        with self.lock, self.known.lock:
            # In the order of the claims: of two blocks that overlap, the earlier claim is opened.
            for block in sorted(self.known.own.values(), key=lambda block: block.revision):
                if block.cidr not in self.own:
                    self.mine.open(block, self._list_held())
                else:
                    self.mine.refresh(self.own[block.cidr], block)
            for cidr in [network for network in self.own if network not in self.known.own]:
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
        self.mine.node_addresses.update({address.version: address for address in node_addresses})
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
        """Give claimed addresses of this node that no pod here has or is about to get."""
        with self.lock, self.known.lock:
            # An ADD that is under way has claimed addresses that no endpoint has yet. Giving them back would pull
            # them from under it.
            busy = {reservation.wish.key for reservation in self._reservations}
            return [
                claimed
                for claimed in self.known.claimed.values()
                if claimed.node == self.known.node
                and claimed.address not in self._held.owners
                and claimed.key not in busy
                and not any(
                    claimed.address in reservation.chosen for reservation in self._reservations
                )
            ]

    def close_block(self, cidr: IPNetwork) -> Block | None:
        """Give nothing more of an empty block, so that it can be given back; None when it is in use."""
        with self.lock:
            own = self.own.get(cidr)
            # A block that is only remembered has no revision, and a conditional write needs one.
            if own is None or own.fifo.held or own.lost or own.block.stored is None:
                return None
            own.closing = True
            self.mine.settle_node_addresses()
            return own.block

    # How

    def _choose(self, reservation: PoolReservation) -> tuple[IPAddress, ...] | Lack:
        def is_promised(address: IPAddress) -> bool:
            return any(
                address in other.chosen or address in other.claimed
                for other in self._reservations
                if other is not reservation
            )

        return self._choice.choose(reservation.wish, reservation.claimed, is_promised)

    def _fetch(
        self,
        lack: Lack,
        key: AttachmentKey,
        reservation: PoolReservation,
        until_s: float,
        cancelled: Callable[[], bool],
    ) -> None:
        """Get what is lacking from the store."""
        if lack.address is not None:
            claimed = self.claims.claim_address(lack.address, lack.pools[0], key)
            self._grant(reservation, claimed)
            return
        if not self._claiming.acquire(timeout=max(0.0, until_s - self.monotonic())):
            raise Unavailable(f"take an address: {lack.why}; the claim takes too long")
        try:
            with self.lock:
                # Another ADD may have claimed a block while this one waited for its turn.
                if any(own.fifo.free for own in self.mine.list_open(_names(lack.pools))):
                    return
            limits = []
            for pool in lack.pools:
                try:
                    block = self.claims.claim_block(pool)
                # The next pool may have a block. Only when no pool has one, single addresses are borrowed.
                except Exhausted as error:
                    limits.append(error.message)
                    continue
                except Conflict as error:
                    self._wait_news(error, until_s)
                    return
                self._wait_open(block, until_s, cancelled)
                return
            # The last block may be this node's, claimed ahead a moment ago.
            coming = self._find_coming(lack.pools)
            if coming is not None:
                self._wait_open(coming, until_s, cancelled)
                return
            self._borrow(lack.pools, key, reservation, limits)
        finally:
            self._claiming.release()

    def _find_coming(self, pools: Sequence[Pool]) -> Block | None:
        """Give an own block of these pools that is claimed and not open yet, if there is one that can be opened."""
        with self.lock:
            coming = self.claims.list_unopened(_names(pools), self.own)
        # A pool that was cut anew left a block of another size over it: such a one is never opened.
        return next((one for one in coming if self.known.find_overlapping(one.cidr) is None), None)

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

    def _borrow(
        self,
        pools: Sequence[Pool],
        key: AttachmentKey,
        reservation: PoolReservation,
        limits: Sequence[str],
    ) -> None:
        for pool in pools:
            claimed = self.claims.borrow(pool, key)
            if claimed is not None:
                self._grant(reservation, claimed)
                return
        strict = [pool.name for pool in pools if pool.strict_affinity]
        why = "; ".join(limits)
        why += f"; {', '.join(strict)} lend nothing (strictAffinity)" if strict else ""
        raise Exhausted(
            f"take an IPv{pools[0].version} address: {self._choice.explain_full(pools)}; {why}",
            hint="add a pool, raise maxBlocksPerNode, or remove pods; see `podwire ipam show`",
        )

    def _grant(self, reservation: PoolReservation, claimed: ClaimedAddress) -> None:
        with self.lock:
            # Between the choice and the answer of the store another pod may have got the address from a block.
            if claimed.address in self._held.owners or any(
                claimed.address in other.claimed for other in self._reservations
            ):
                raise AddressUnavailable(
                    f"take address {claimed.address}: another pod was faster", hint="call again"
                )
            reservation.claimed[claimed.address] = claimed

    def _list_held(self) -> list[IPAddress]:
        aside = [address for reservation in self._reservations for address in reservation.chosen]
        return [*self._held.owners, *aside]


def _names(pools: Iterable[Pool]) -> list[str]:
    return [pool.name for pool in pools]
