"""Which node has a range or an address when several nodes publish it.

Used by `control.cluster.planner`, and by `control.cluster.publish` before a node starts. Pure. A claim gets a number
when it is first published: one more than the highest number there was. Of two claims the lower number is the older
claim, and it stands. Claims with equal numbers (two that began at once) are ordered by the age of the nodes' core Nodes
and by the nodes' names. With Kubernetes, what the API server says of a range comes before all numbers. Between blocks
of pools the higher epoch comes first, because there the store itself has said which node follows which. No other node
gets here what this node itself has. Invariants: the result does not depend on the order of nodes, nor on
which node computes it. A claim that no other contradicts is valid. A valid claim is defeated by no later claim.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network
from typing import Final

from podwire.control.cluster.reading import EPOCH_MAX
from podwire.model.cluster import Claimed, NodeFacts
from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.networks import NetworkIndex, index_networks, network_key

UNNUMBERED: Final = 0
"""Of a claim whose node gives it no number: an older agent's, so it was there first."""
NOT_YET: Final = math.inf
"""Of what this node has not published yet."""
RANGES: Final = (IPv4Network, IPv6Network)
_CONFIRMED: Final = -1
_NOT_ASKED: Final = 0
_DENIED: Final = 1
"""What Kubernetes says of a claim to a range; the lower, the stronger."""


@dataclass(frozen=True, order=True)
class Problem:
    """Something between nodes that a person must put right; both parties are named."""

    nodes: tuple[str, ...]
    """The nodes that it is about, sorted."""
    message: str


@dataclass(frozen=True)
class Claim:
    """What one node says that it has."""

    node: str
    what: Claimed
    number: float
    """The lower, the older."""
    epoch: int | None = None
    """Of a pool's block; None of everything else."""
    standing: int = _NOT_ASKED
    since: str = ""
    """Of the core Node, where it was read."""

    @property
    def rank(self) -> tuple[int, float, str, str]:
        """The lower, the stronger."""
        return self.standing, self.number, self.since, self.node


@dataclass
class Outcome:
    """Which claims are valid."""

    ranges: dict[str, list[IPNetwork]] = field(default_factory=dict)
    """By node: its ranges that stand, in the order in which it names them."""
    refused: set[IPNetwork] = field(default_factory=set)
    """Ranges of other nodes that they do not get here."""
    addresses: dict[str, list[IPAddress]] = field(default_factory=dict)
    """By node: its underlay addresses that stand."""
    problems: set[Problem] = field(default_factory=set)
    lost: list[tuple[Claim, Claim]] = field(default_factory=list)
    """What of this node's claims falls, and to which."""
    contested: set[str] = field(default_factory=set)
    """Nodes that claim a range that another one claims, too; but for blocks, which the store decides."""


def settle(own: NodeFacts, peers: Sequence[NodeFacts]) -> Outcome:
    """Say which of the other nodes' claims are valid."""
    outcome = Outcome()
    _settle_addresses(own, peers, outcome)
    _settle_ranges(own, peers, outcome)
    return outcome


def claimed_ranges(facts: NodeFacts) -> Iterator[tuple[IPNetwork, int]]:
    """Give a node's ranges with the epochs of its claims, each once: a block that is named as range too has its own."""
    for network in facts.pod_cidrs:
        if network not in facts.blocks:
            yield network, facts.epoch
    yield from facts.blocks.items()


def everything_claimed(facts: NodeFacts) -> tuple[Claimed, ...]:
    """Give all that a node's claims have numbers for."""
    return *facts.addresses, *(network for network, _ in claimed_ranges(facts))


def number_claims(
    wanted: Iterable[Claimed],
    before: Mapping[Claimed, int],
    others: Collection[NodeFacts],
    living: Collection[str],
) -> dict[Claimed, int]:
    """Give what is wanted its numbers: those it had `before`, else one more than all others have.

    An address goes along with its machine, so one that stronger claims of other nodes have, none of them `living`, is
    taken over: it gets the number before theirs. A range stays with the name that has it: its pods are there.
    """
    highest = max(
        (number for facts in others for number in facts.claims.values()), default=UNNUMBERED
    )
    # A node that says the highest number there is must not make the next one unreadable for all others.
    following = min(max(highest, *before.values(), UNNUMBERED) + 1, EPOCH_MAX)
    numbers: dict[Claimed, int] = {}
    for claimed in wanted:
        number = before.get(claimed, following)
        rivals = {
            other.name: other.claims.get(claimed, UNNUMBERED)
            for other in others
            if claimed in other.addresses and other.claims.get(claimed, UNNUMBERED) <= number
        }
        if rivals and not rivals.keys() & living:
            # Below the rivals' numbers, because they are not alive: when one of them comes back, its claim is the
            # later one on every node.
            number = max(min(rivals.values()) - 1, -EPOCH_MAX)
        numbers[claimed] = number
    return numbers


def describe_lost(outcome: Outcome, *, only_ranges: bool = False) -> str:
    """Say which claims of this node another node has, "" when there are none. The store decides blocks."""
    return "; ".join(
        f"{'pod range' if isinstance(mine.what, RANGES) else 'address'} {mine.what} of node {mine.node} is not reached"
        f" by others: node {other.node} has {other.what} by {_name_cause(other, mine)}"
        for mine, other in sorted(outcome.lost, key=lambda pair: str(pair[0].what))
        if mine.epoch is None and (isinstance(mine.what, RANGES) or not only_ranges)
    )


def find_cidr_owners(peers: Iterable[NodeFacts], outcome: Outcome) -> NetworkIndex[str]:
    """Give the owner of each valid range that lends no addresses: blocks of pools do lend."""
    return index_networks(
        (network, facts.name)
        for facts in peers
        for network in outcome.ranges[facts.name]
        if network not in facts.blocks
    )


def _settle_addresses(own: NodeFacts, peers: Sequence[NodeFacts], outcome: Outcome) -> None:
    claims: dict[IPAddress, list[Claim]] = {}
    for facts, unknown in ((own, NOT_YET), *((peer, UNNUMBERED) for peer in peers)):
        outcome.addresses[facts.name] = list(facts.addresses)
        for address in facts.addresses:
            number = facts.claims.get(address, unknown)
            claims.setdefault(address, []).append(Claim(facts.name, address, number))
    del outcome.addresses[own.name]
    my_ranges = [network for network, _ in claimed_ranges(own)]
    for address, several in claims.items():
        first, *losers = sorted(several, key=lambda claim: claim.rank)
        others = [claim.node for claim in several if claim.node != own.name]
        if losers:
            outcome.problems.add(_describe_address(address, first, losers))
            outcome.lost += [(claim, first) for claim in losers if claim.node == own.name]
        elif others and _is_inside(address, own, my_ranges):
            outcome.problems.add(_describe_inside(address, others[0], own))
        is_mine = address in own.addresses or _is_inside(address, own, my_ranges)
        # What this node itself has, no other node gets here, even by an older claim: sending there would lead back to
        # this node.
        for name in others if is_mine else (claim.node for claim in losers):
            outcome.addresses[name].remove(address)


def _is_inside(address: IPAddress, own: NodeFacts, ranges: Sequence[IPNetwork]) -> bool:
    return address in own.tunnel_addresses or any(address in network for network in ranges)


def _describe_address(address: IPAddress, first: Claim, losers: Sequence[Claim]) -> Problem:
    parties = tuple(sorted((first.node, *(claim.node for claim in losers))))
    return Problem(
        parties,
        f"nodes {_join(parties)} have the same address {address}: {_verdict(first, losers)}",
    )


def _describe_inside(address: IPAddress, other: str, own: NodeFacts) -> Problem:
    parties = tuple(sorted((other, own.name)))
    if address in own.tunnel_addresses:
        return Problem(
            parties,
            f"nodes {_join(parties)} have the same address {address}: {own.name} keeps it for its tunnel,"
            f" {other} is not reached there",
        )
    return Problem(
        parties,
        f"node {other} has address {address}, which is in a pod range of node {own.name}:"
        " it is not reached there",
    )


@dataclass(frozen=True)
class _Range:
    """A claim to a range."""

    claim: Claim
    network: IPNetwork
    first: int
    last: int

    @property
    def order(self) -> tuple[int, float, str, str, int, int, int]:
        """Total, so that no order of input matters."""
        return *self.claim.rank, self.network.version, self.first, self.last


class _Taken:
    """Ranges that stand so far; any number of one node's own may be in each other."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, int, int], _Range] = {}
        self._lengths: dict[int, set[int]] = {4: set(), 6: set()}
        self._starts: list[tuple[int, int, int]] = []
        self._ranges: list[_Range] = []

    def find_other(self, claimed: _Range) -> _Range | None:
        """Give a range of another node that overlaps this: around it, else inside it."""
        version, node = claimed.network.version, claimed.claim.node
        # A range around this one is found by one look-up for each length in use; those inside it are neighbours in
        # the sorted list. With 5,000 nodes every plan does this for every range.
        for length in sorted(self._lengths[version]):
            if length > claimed.network.prefixlen:
                break
            other = self._of.get(network_key(version, length, claimed.first))
            if other is not None and other.claim.node != node:
                return other
        place = bisect_left(self._starts, (version, claimed.first, 0))
        while place < len(self._starts) and self._starts[place][:2] <= (version, claimed.last):
            inside = self._ranges[self._starts[place][2]]
            if inside.claim.node != node:
                return inside
            place += 1
        return None

    def add(self, claimed: _Range) -> None:
        version, length = claimed.network.version, claimed.network.prefixlen
        self._of[network_key(version, length, claimed.first)] = claimed
        self._lengths[version].add(length)
        insort(self._starts, (version, claimed.first, len(self._ranges)))
        self._ranges.append(claimed)


def _settle_ranges(own: NodeFacts, peers: Sequence[NodeFacts], outcome: Outcome) -> None:
    mine = list(_list_ranges(own, NOT_YET))
    claims = mine + [claimed for peer in peers for claimed in _list_ranges(peer, UNNUMBERED)]
    blocks = [
        (-claimed.claim.epoch, claimed) for claimed in claims if claimed.claim.epoch is not None
    ]
    # Blocks are settled among themselves first, the highest epoch first: the store itself has ordered their claims.
    blocks.sort(key=lambda pair: (pair[0], pair[1].order))
    standing, fallen = _sift(claimed for _, claimed in blocks)
    rest = [claimed for claimed in claims if claimed.claim.epoch is None]
    standing, later = _sift(sorted((*standing, *rest), key=lambda claimed: claimed.order))
    for loser, other in (*fallen, *later):
        _note_fallen(own, loser, other, outcome)
    here = _Taken()
    # What this node has is not taken from it here, even when its claim is lost: its pods run, and its routes lead to
    # them.
    for claimed in mine:
        here.add(claimed)
    allowed: set[tuple[str, IPNetwork]] = set()
    for claimed in standing:
        ours = here.find_other(claimed)
        if ours is None:
            allowed.add((claimed.claim.node, claimed.network))
        elif claimed.claim.node != own.name:
            outcome.problems.add(_describe_overlap(ours, claimed))
    for peer in peers:
        ranges = outcome.ranges[peer.name] = []
        for network, _ in claimed_ranges(peer):
            if (peer.name, network) in allowed:
                ranges.append(network)
            else:
                outcome.refused.add(network)


def _note_fallen(own: NodeFacts, loser: _Range, other: _Range, outcome: Outcome) -> None:
    outcome.problems.add(_describe_overlap(loser, other))
    if loser.claim.epoch is None and other.claim.epoch is None:
        outcome.contested |= {loser.claim.node, other.claim.node}
    if loser.claim.node == own.name:
        outcome.lost.append((loser.claim, other.claim))


def _list_ranges(facts: NodeFacts, unknown: float) -> Iterator[_Range]:
    for network, epoch in claimed_ranges(facts):
        first = int(network.network_address)
        number = facts.claims.get(network, unknown)
        standing = _ask(facts, network)
        since = facts.granted.since if facts.granted else ""
        block_epoch = epoch if network in facts.blocks else None
        claim = Claim(facts.name, network, number, block_epoch, standing, since)
        yield _Range(claim, network, first, first + network.num_addresses - 1)


def _ask(facts: NodeFacts, network: IPNetwork) -> int:
    """Say what Kubernetes says of a claim, where it was asked."""
    if facts.granted is None or network in facts.blocks:
        return _NOT_ASKED
    is_granted = any(
        granted.version == network.version
        and granted.prefixlen <= network.prefixlen
        and network.network_address in granted
        for granted in facts.granted.ranges
    )
    return _CONFIRMED if is_granted else _DENIED


def _sift(ordered: Iterable[_Range]) -> tuple[list[_Range], list[tuple[_Range, _Range]]]:
    """Take ranges, the strongest first: each is valid unless it overlaps a valid one of another node."""
    taken = _Taken()
    standing: list[_Range] = []
    fallen: list[tuple[_Range, _Range]] = []
    for claimed in ordered:
        other = taken.find_other(claimed)
        if other is None:
            taken.add(claimed)
            standing.append(claimed)
        else:
            fallen.append((claimed, other))
    return standing, fallen


def _describe_overlap(loser: _Range, winner: _Range) -> Problem:
    first, second = sorted((loser, winner), key=lambda claimed: (claimed.claim.node, claimed.order))
    return Problem(
        (first.claim.node, second.claim.node),
        f"pod ranges of nodes {first.claim.node} ({first.network}) and {second.claim.node} ({second.network})"
        f" overlap: {_verdict(winner.claim, [loser.claim])}",
    )


def _verdict(winner: Claim, losers: Sequence[Claim]) -> str:
    names = sorted({claim.node for claim in losers})
    verb = "is" if len(names) == 1 else "are"
    return (
        f"{winner.node} has {_name_reason(winner, losers)} and keeps it, {_join(names)} {verb} not"
        " reached there"
    )


def _name_cause(winner: Claim, loser: Claim) -> str:
    return "its core Node" if winner.standing < loser.standing else "an older claim"


def _name_reason(winner: Claim, losers: Sequence[Claim]) -> str:
    """Say by what a claim stands."""
    is_granted = all(winner.standing < loser.standing for loser in losers)
    return "the core Node with that podCIDR" if is_granted else "the older claim"


def _join(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else names[0]
