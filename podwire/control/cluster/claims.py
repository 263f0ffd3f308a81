"""Who has which range and which address, when several nodes say that they have it.

Used by `control.cluster.planner`. Pure. A range or address belongs to whoever claims it in the highest epoch; of equal
ones nobody gets it. What this node itself has no other gets, whatever the epoch. Invariant: the outcome does not
depend on the order of nodes, and a node that nobody contradicts keeps all it claims.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from podwire.model.cluster import IPAddress, IPNetwork, NodeFacts


@dataclass(frozen=True, order=True)
class Problem:
    """Something between nodes that a person must put right; both parties are named."""

    nodes: tuple[str, ...]
    """Whom it is about, sorted."""
    message: str


@dataclass
class Outcome:
    """What of the claims stands."""

    ranges: dict[str, list[IPNetwork]] = field(default_factory=dict)
    """By node: its ranges that stand, in the order in which it names them."""
    refused: set[IPNetwork] = field(default_factory=set)
    """Ranges of other nodes that nobody gets."""
    addresses: dict[str, list[IPAddress]] = field(default_factory=dict)
    """By node: its underlay addresses that stand."""
    problems: set[Problem] = field(default_factory=set)


@dataclass(frozen=True)
class _Claim:
    network: IPNetwork
    node: str
    epoch: float
    """Infinite for what this node has itself."""
    first: int
    last: int

    @property
    def rank(self) -> tuple[float, str, int, int]:
        """The lower, the stronger; total, so that no order of input matters."""
        return -self.epoch, self.node, self.first, self.last


_Best = tuple[_Claim, ...]
"""The strongest claims of the two strongest nodes: enough to find any node's strongest opponent."""


@dataclass
class _Open:
    """A range while those inside it are looked at."""

    claim: _Claim
    around: _Best
    """Of the claims around it, itself included."""
    inside: _Best = ()


def _best(claims: Iterable[_Claim]) -> _Best:
    kept: list[_Claim] = []
    for one in sorted(claims, key=lambda one: one.rank):
        if all(one.node != other.node for other in kept):
            kept.append(one)
    return tuple(kept[:2])


def settle(own: NodeFacts, peers: Sequence[NodeFacts]) -> Outcome:
    """Say what of the other nodes' claims stands."""
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


def _settle_addresses(own: NodeFacts, peers: Sequence[NodeFacts], outcome: Outcome) -> None:
    claimants: dict[IPAddress, list[NodeFacts]] = {}
    for peer in peers:
        outcome.addresses[peer.name] = list(peer.addresses)
        for address in peer.addresses:
            claimants.setdefault(address, []).append(peer)
    mine = {*own.addresses, *own.tunnel_addresses}
    my_ranges = [network for network, _ in claimed_ranges(own)]
    for address, nodes in claimants.items():
        is_mine = address in mine or any(address in network for network in my_ranges)
        if not is_mine and len(nodes) == 1:
            continue
        losers = nodes if is_mine else _losers(nodes)
        for loser in losers:
            outcome.addresses[loser.name].remove(address)
        outcome.problems.add(_describe_address(address, nodes, losers, own if is_mine else None))


def _describe_address(
    address: IPAddress,
    nodes: Sequence[NodeFacts],
    losers: Sequence[NodeFacts],
    own: NodeFacts | None,
) -> Problem:
    if own is not None and address not in (*own.addresses, *own.tunnel_addresses):
        names = tuple(sorted(one.name for one in nodes))
        return Problem(
            tuple(sorted((*names, own.name))),
            f"node {_join(names)} has address {address}, which is in a pod range of node {own.name}:"
            " it is not reached there",
        )
    parties = sorted(one.name for one in (*nodes, *([own] if own else [])))
    lost = {one.name for one in losers}
    winner = next((name for name in parties if name not in lost), "")
    return Problem(
        tuple(parties),
        f"nodes {_join(parties)} have the same address {address}: {_verdict(winner)}",
    )


def _losers(nodes: Sequence[NodeFacts]) -> list[NodeFacts]:
    highest = max(one.epoch for one in nodes)
    best = [one for one in nodes if one.epoch == highest]
    return [one for one in nodes if one is not best[0] or len(best) > 1]


def _settle_ranges(own: NodeFacts, peers: Sequence[NodeFacts], outcome: Outcome) -> None:
    claims = [_claim(network, own.name, math.inf) for network, _ in claimed_ranges(own)]
    claims += [
        _claim(network, facts.name, epoch)
        for facts in peers
        for network, epoch in claimed_ranges(facts)
    ]
    beaten: set[tuple[str, IPNetwork]] = set()
    for claim, opponent in _find_opponents(claims):
        if opponent.epoch >= claim.epoch:
            beaten.add((claim.node, claim.network))
            outcome.problems.add(_describe_overlap(claim, opponent))
    for peer in peers:
        ranges = outcome.ranges[peer.name] = []
        for network, _ in claimed_ranges(peer):
            if (peer.name, network) in beaten:
                outcome.refused.add(network)
            else:
                ranges.append(network)


def _claim(network: IPNetwork, node: str, epoch: float) -> _Claim:
    first = int(network.network_address)
    return _Claim(network, node, epoch, first, first + network.num_addresses - 1)


def _find_opponents(claims: Iterable[_Claim]) -> Iterator[tuple[_Claim, _Claim]]:
    """Give for every claim that another node contradicts the strongest that does.

    Ranges nest or are apart; what contradicts a claim is around it or inside it. One pass, also when all are equal.
    """
    ordered = sorted(claims, key=lambda one: (one.network.version, one.first, -one.last, one.rank))
    opened: list[_Open] = []
    version = 0
    for claim in ordered:
        while opened and (opened[-1].claim.last < claim.first or claim.network.version != version):
            yield from _close(opened)
        version = claim.network.version
        around = _best((*opened[-1].around, claim)) if opened else (claim,)
        opened.append(_Open(claim, around))
    while opened:
        yield from _close(opened)


def _close(opened: list[_Open]) -> Iterator[tuple[_Claim, _Claim]]:
    """End the innermost range: all that is around it or inside it is known."""
    last = opened.pop()
    if opened:
        opened[-1].inside = _best((*opened[-1].inside, *last.inside, last.claim))
    if last.inside or len(last.around) > 1:
        for other in _best((*last.around, *last.inside)):
            if other.node != last.claim.node:
                yield last.claim, other
                return


def _describe_overlap(one: _Claim, other: _Claim) -> Problem:
    first, second = sorted((one, other), key=lambda claim: (claim.node, claim.rank))
    winner = "" if one.epoch == other.epoch else min(one, other, key=lambda claim: claim.rank).node
    return Problem(
        (first.node, second.node),
        f"pod ranges of nodes {first.node} ({first.network}) and {second.node} ({second.network})"
        f" overlap: {_verdict(winner, 'range')}",
    )


def _verdict(winner: str, what: str = "address") -> str:
    if not winner:
        return f"neither claim is newer, so nobody gets the {what}"
    return f"{winner} keeps it, the other is not reached there"


def _join(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else names[0]
