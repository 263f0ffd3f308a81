"""Pods of other nodes: which publication counts for an address, and the rows of the ipcache that follow from it.

Owned by `agent.duties.cluster.duty`. Every thread that enters it holds that duty's lock: `store-watch` hands in
publications, `cluster` asks for rows, `cluster-publish` names this node's own pods, and the API reads problems. Only
the gauge `cluster_pods` reads `count` without it. Several sources may say something of an address; the first of these
counts: a pod of this node; a node's own address; the newest publication of the node in whose range the address is;
since blocks of pools lend addresses, the publication of the node that claimed the address in the highest epoch; the
range that the address is in. If the epochs of one block are equal, the older claim counts, as for the block itself. If
one of the nodes has no block there and the epochs are equal, no node gets the address. Invariant: `rows` is always what
the publications and the last plan say, so an address that no node publishes any more belongs to its range again.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from podwire.control.cluster.ownership import UNNUMBERED, Problem, claimed_ranges
from podwire.control.cluster.planner import UNMANAGED, Planned, route_to_pod
from podwire.control.cluster.published import Publication
from podwire.control.cluster.reach import Reach, single
from podwire.model.cluster import HostRoute, NodeFacts, Prefix
from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.ids import IdentityId

_NOBODY: Final = NodeFacts("", "", 0, ())


@dataclass(frozen=True)
class View:
    """What of the nodes decides about their pods."""

    own: NodeFacts
    planned: Planned

    @property
    def facts(self) -> Mapping[str, NodeFacts]:
        """Of the other nodes: what is believed of them."""
        return self.planned.facts


@dataclass(frozen=True)
class Changes:
    """Rows that are others than before."""

    put: Mapping[IPNetwork, Prefix] = field(default_factory=dict)
    remove: Collection[IPNetwork] = ()
    routes_changed: bool = False
    """Single pods need other routes: a whole plan is to be applied."""

    def __bool__(self) -> bool:
        return bool(self.put or self.remove or self.routes_changed)


class RemotePods:
    """All pods of other nodes that are published."""

    def __init__(self) -> None:
        self.rows: dict[IPNetwork, Prefix] = {}
        """What belongs into the ipcache beside a plan's own rows."""
        self.routes: dict[IPAddress, HostRoute] = {}
        """To pods whose addresses are in none of their node's ranges."""
        self._problems: dict[IPAddress, Problem] = {}
        self._refused: dict[IPAddress, Mapping[str, str]] = {}
        """By address and node: why it is not believed to have it."""
        self._publications: dict[str, tuple[str, Publication]] = {}
        self._claimants: dict[IPAddress, tuple[str, ...]] = {}
        self._view: View | None = None
        self._own_pods: frozenset[IPAddress] = frozenset()
        self._prefixes: dict[tuple[str, int, int], Prefix] = {}
        self._strangers: set[IPAddress] = set()
        """Published addresses in none of their node's ranges: borrowed ones, and wrong ones."""
        self._news: set[IPNetwork] | None = None
        """Rows that have changed since `take_news`; None while nobody takes any."""

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is contested, and what is refused."""
        return tuple(sorted({*self._problems.values(), *self._describe_refused()}))

    @property
    def count(self) -> int:
        """How many addresses are published."""
        return len(self._claimants)

    def take_news(self) -> tuple[bool, dict[IPAddress, IdentityId | None]]:
        """Give whose addresses are others' since the last call, None = nobody's; at first, and after `drop_news`,
        (True, all that there are)."""
        news, self._news = self._news, set()
        changed = self.rows.keys() if news is None else news
        found = {network.network_address: self.rows.get(network) for network in changed}
        return news is None, {
            address: row.identity if row is not None else None for address, row in found.items()
        }

    def drop_news(self) -> None:
        """Collect no news: nobody takes them."""
        self._news = None

    def list_strangers(self, facts: Mapping[str, NodeFacts]) -> Iterator[tuple[str, IPNetwork]]:
        """Give (node, single address) of all that is published outside of what its node says are its ranges."""
        for node, (_, publication) in self._publications.items():
            known = facts.get(node, _NOBODY)
            ranges = [network for network, _ in claimed_ranges(known)]
            for address in publication.identities:
                if not any(address in cidr for cidr in ranges):
                    yield node, single(address)

    def is_published(self, node: str, network: IPNetwork) -> bool:
        """Tell whether a node publishes a single address."""
        known = self._publications.get(node)
        is_single = network.prefixlen == network.max_prefixlen
        return is_single and known is not None and network.network_address in known[1].identities

    def put(self, publication: Publication, uid: str) -> set[IPAddress]:
        """Take a publication in; gives the addresses about which it says something new.

        An older one than the one known, of the same object, is an echo and changes nothing.
        """
        old_uid, old = self._publications.get(publication.node, ("", None))
        # Only within one object: a NodeEndpoints that was deleted and made anew may begin at a lower order.
        if old is not None and old_uid == uid and publication.order < old.order:
            return set()
        self._publications[publication.node] = uid, publication
        before: Mapping[IPAddress, IdentityId] = {} if old is None else old.identities
        return self._change_claims(publication.node, before, publication.identities)

    def remove(self, node: str) -> set[IPAddress]:
        """Forget what a node published; gives the addresses that it named."""
        known = self._publications.pop(node, None)
        return set() if known is None else self._change_claims(node, known[1].identities, {})

    def replace(self, publications: Iterable[tuple[Publication, str]]) -> set[IPAddress]:
        """Take all publications that there are, (publication, uid), for those known; gives what changed."""
        given = list(publications)
        changed: set[IPAddress] = set()
        for node in self._publications.keys() - {publication.node for publication, _ in given}:
            changed |= self.remove(node)
        for publication, uid in given:
            changed |= self.put(publication, uid)
        return changed

    def view(self, view: View) -> Changes:
        """Take over another plan; gives the rows that differ because of it."""
        before, self._view = self._view, view
        self._prefixes.clear()
        if before is None or before.own != view.own:
            return self._update(self._claimants, view)
        touched = {
            address
            for node, (_, publication) in self._publications.items()
            if before.planned.reaches.get(node) != view.planned.reaches.get(node)
            or before.facts.get(node) != view.facts.get(node)
            for address in publication.identities
        }
        # A contest can be decided by a change of any node, so contested addresses are judged again each time. There
        # are few.
        touched.update(self._problems)
        if (
            before.planned.cidr_owners != view.planned.cidr_owners
            or before.planned.belief != view.planned.belief
        ):
            touched.update(self._strangers)
        for network in before.planned.plan.prefixes.keys() ^ view.planned.plan.prefixes.keys():
            if (
                network.prefixlen == network.max_prefixlen
                and network.network_address in self._claimants
            ):
                touched.add(network.network_address)
        return self._update(touched, view)

    def update(self, addresses: Iterable[IPAddress]) -> Changes:
        """Judge addresses again; nothing before the first `view`."""
        return Changes() if self._view is None else self._update(addresses, self._view)

    def set_own_pods(self, addresses: Collection[IPAddress]) -> Changes:
        """Say which addresses this node's pods have."""
        before, self._own_pods = self._own_pods, frozenset(addresses)
        moved = (before ^ self._own_pods) & self._claimants.keys()
        return self.update(moved)

    def _change_claims(
        self,
        node: str,
        before: Mapping[IPAddress, IdentityId],
        after: Mapping[IPAddress, IdentityId],
    ) -> set[IPAddress]:
        changed = {
            address for address, identity in after.items() if before.get(address) != identity
        }
        for address in changed:
            claimants = self._claimants.get(address, ())
            if node not in claimants:
                self._claimants[address] = tuple(sorted((*claimants, node)))
        for address in before.keys() - after.keys():
            changed.add(address)
            left = tuple(claimant for claimant in self._claimants[address] if claimant != node)
            if left:
                self._claimants[address] = left
            else:
                del self._claimants[address]
        return changed

    def _update(self, addresses: Iterable[IPAddress], view: View) -> Changes:
        put: dict[IPNetwork, Prefix] = {}
        remove: list[IPNetwork] = []
        routes_changed = False
        for address in addresses:
            network = single(address)
            row, route = self._judge(address, view)
            if self._news is not None and self.rows.get(network) != row:
                self._news.add(network)
            if row is None:
                if self.rows.pop(network, None) is None:
                    pass
                elif network in view.planned.plan.prefixes:  # a block of this one address
                    put[network] = view.planned.plan.prefixes[network]
                else:
                    remove.append(network)
            elif self.rows.get(network) != row:
                self.rows[network] = put[network] = row
            if self.routes.get(address) != route:
                routes_changed = True
                if route is None:
                    del self.routes[address]
                else:
                    self.routes[address] = route
        return Changes(put, remove, routes_changed)

    def _judge(self, address: IPAddress, view: View) -> tuple[Prefix | None, HostRoute | None]:
        """Give row and route of one address, and keep what is wrong with it."""
        claimants = self._claimants.get(address, ())
        if all(self._is_at_home(address, claimant, view) for claimant in claimants):
            self._strangers.discard(address)
        else:
            self._strangers.add(address)
        owner = self._find_cidr_owner(address, claimants, view)
        believed = [
            claimant
            for claimant in claimants
            if claimant in view.planned.reaches and owner in ("", claimant)
        ]
        problem = self._find_refusal(address, view, claimants)
        if problem is None:
            believed = self._believe(address, believed, view)
        else:
            self._refused.pop(address, None)
        if problem is not None or not believed:
            self._note(address, problem)
            return None, None
        winner = believed[0]
        if len(believed) > 1:
            winner, problem = _contest(address, believed, view)
        if owner and len(claimants) > 1:
            problem = _foreign(address, owner, claimants)
        self._note(address, problem)
        if not winner:
            return UNMANAGED, None
        reach = view.planned.reaches[winner]
        identity = self._publications[winner][1].identities[address]
        return self._prefix(winner, reach, address.version, identity), route_to_pod(
            view.own, reach, address
        )

    def _believe(self, address: IPAddress, claimants: list[str], view: View) -> list[str]:
        """Give those of the nodes that may have an address, and keep why the others may not."""
        if address not in self._strangers:
            self._refused.pop(address, None)
            return claimants  # nearly always
        network, belief = single(address), view.planned.belief
        faults = {
            claimant: fault
            for claimant in claimants
            if not self._is_at_home(address, claimant, view)
            and (fault := belief.find_fault(claimant, network))
        }
        if faults:
            self._refused[address] = faults
        else:
            self._refused.pop(address, None)
        return [claimant for claimant in claimants if claimant not in faults]

    def _describe_refused(self) -> Iterator[Problem]:
        """Give one problem for each node and reason, however many addresses it is about."""
        several: dict[tuple[str, str], list[IPAddress]] = {}
        for address, faults in self._refused.items():
            for node, why in faults.items():
                several.setdefault((node, why), []).append(address)
        for (node, why), addresses in several.items():
            first = min(addresses, key=lambda address: (address.version, int(address)))
            more = f" (and {len(addresses) - 1} more)" if len(addresses) > 1 else ""
            yield Problem(
                (node,),
                f"address {first}{more}, which node {node} publishes as a pod's, is refused: {why}",
            )

    def _prefix(self, node: str, reach: Reach, family: int, identity: IdentityId) -> Prefix:
        """One object for all pods of a node with one identity: there are many."""
        key = (node, family, identity)
        prefix = self._prefixes.get(key)
        if prefix is None:
            prefix = self._prefixes[key] = reach.prefix(family, identity)
        return prefix

    def _note(self, address: IPAddress, problem: Problem | None) -> None:
        if problem is None:
            self._problems.pop(address, None)
        else:
            self._problems[address] = problem

    def _is_of_a_node(self, address: IPAddress, view: View) -> bool:
        row = view.planned.plan.prefixes.get(single(address))
        return address in view.own.addresses or (row is not None and row.is_node_address)

    def _is_at_home(self, address: IPAddress, node: str, view: View) -> bool:
        reach = view.planned.reaches.get(node)
        return reach is not None and any(address in network for network in reach.ranges)

    def _find_cidr_owner(self, address: IPAddress, claimants: tuple[str, ...], view: View) -> str:
        """Give the node in whose own range an address is, "" when it is in none."""
        if address not in self._strangers and len(claimants) < 2:
            return ""  # nearly always
        return view.planned.cidr_owners.find(address) or ""

    def _find_refusal(
        self,
        address: IPAddress,
        view: View,
        claimants: tuple[str, ...],
    ) -> Problem | None:
        """Say why no other node may have an address: a pod of this node has it, it is in this node's range, or it is a
        node's own."""
        if not claimants:
            return None
        own, why = view.own, ""
        if address in self._own_pods:
            why = f"a pod of node {own.name} has it"
        elif any(address in network for network in own.pod_cidrs if network not in own.blocks):
            why = f"it is in the pod range of node {own.name}"
        elif self._is_of_a_node(address, view):
            why = "it is a node's own address"
        else:
            owner = self._find_cidr_owner(address, claimants, view)
            if owner and owner not in claimants:
                return _foreign(address, owner, claimants)
        if not why:
            return None
        return Problem(
            tuple(sorted({own.name, *claimants})),
            f"address {address}, which node {' and '.join(claimants)} publishes as a pod's, is refused: {why}",
        )


def _foreign(address: IPAddress, owner: str, claimants: tuple[str, ...]) -> Problem:
    others = " and ".join(claimant for claimant in claimants if claimant != owner)
    return Problem(
        tuple(sorted({owner, *claimants})),
        f"address {address}, which node {others} publishes as a pod's, is refused:"
        f" it is in the pod range of node {owner}",
    )


def _contest(address: IPAddress, names: list[str], view: View) -> tuple[str, Problem]:
    claims = [_claim_of(address, view.facts.get(name, _NOBODY)) for name in names]
    highest = max(claim.epoch for claim in claims)
    first, *equal = sorted(lent for lent in claims if lent.epoch == highest)
    winner, verdict = first.node, f"{first.node} has it by the newer claim"
    if equal and all(lent.is_block for lent in (first, *equal)):
        verdict = f"{first.node} has it by the older claim to the block it is in"
    elif equal:
        winner, verdict = "", "no node gets it"
    return winner, Problem(
        tuple(names), f"nodes {' and '.join(names)} both publish pod address {address}: {verdict}"
    )


class _Lent(NamedTuple):
    """What speaks for one of several nodes that publish an address; of one epoch the least is the older claim."""

    number: float
    node: str
    epoch: int
    is_block: bool


def _claim_of(address: IPAddress, facts: NodeFacts) -> _Lent:
    """Give the claim to the block that an address is in, else what the node's epoch says."""
    for block, epoch in facts.blocks.items():
        if address in block:
            return _Lent(facts.claims.get(block, UNNUMBERED), facts.name, epoch, is_block=True)
    return _Lent(UNNUMBERED, facts.name, facts.epoch, is_block=False)
