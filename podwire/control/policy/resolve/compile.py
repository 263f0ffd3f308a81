"""Compile rules into entries: one family of entries (one peer identity, one direction) at a time, exactly.

Called by `subject`. Pure. The program finds a family's entry by the longest prefix of protocol and port. Each entry
therefore holds the best rule that covers the whole of the entry's prefix. Invariant: for every packet the longest
entry of a block names a rule that wins among all rules of the block that cover the packet.
"""

from collections.abc import Iterable, Iterator
from typing import Final
from weakref import WeakValueDictionary

from podwire.control.policy.rule import SCTP, TCP, UDP, PortMatch
from podwire.model.identity import NamedPort
from podwire.model.policy import Direction, PolicyEntry, PolicyKey

ALL: Final = 0
"""The prefix of every protocol. Others are `protocol << 24 | port << 8 | bits of the port`."""
PORT_BITS: Final = 16
WITH_PORTS: Final = (TCP, UDP, SCTP)
"""What "every protocol" means where a port is named."""


def pack(protocol: int, port: int = 0, bits: int = 0) -> int:
    """Give a prefix as one number."""
    return protocol << 24 | port << 8 | bits


def length(prefix: int) -> int:
    """Give how much of protocol and port a prefix fixes: 0 nothing, 1 the protocol, up to 17."""
    return 1 + (prefix & 0xFF) if prefix >> 24 else 0


def unpack(identity: int, direction: Direction, prefix: int) -> PolicyKey:
    """Give the key of an entry."""
    return PolicyKey(identity, direction, prefix >> 24, prefix >> 8 & 0xFFFF, prefix & 0xFF)


def pack_key(key: PolicyKey) -> int:
    """Give the prefix of an entry's key."""
    return pack(key.protocol, key.port, key.port_bits)


def split_range(first: int, last: int) -> Iterator[tuple[int, int]]:
    """Give the (port, bits) of the fewest prefixes that make up a range of ports, at most 30."""
    while first <= last:
        # The lowest bit that is set says how large an aligned block may begin here.
        free = (first & -first).bit_length() - 1 if first else PORT_BITS
        free = min(free, (last - first + 1).bit_length() - 1)
        yield first, PORT_BITS - free
        first += 1 << free


def resolve_port(match: PortMatch, named_ports: Iterable[NamedPort]) -> list[int]:
    """Give the prefixes of one port match; none for a name that nobody of `named_ports` has."""
    if match.name:
        return [
            pack(named.protocol, named.port, PORT_BITS)
            for named in named_ports
            if named.name == match.name and match.protocol in (0, named.protocol)
        ]
    if match.icmp:
        # The program looks ICMP up by type << 8 | code in the place of the port. A type is thus a prefix of 8 bits,
        # and holds for all codes.
        bits = split_range(match.first << 8, match.last << 8 | 0xFF)
        return [pack(match.protocol, port, length_) for port, length_ in bits]
    if not match.last:
        return [pack(match.protocol)]
    protocols = (match.protocol,) if match.protocol else WITH_PORTS
    return [
        pack(protocol, port, bits)
        for protocol in protocols
        for port, bits in split_range(match.first, match.last)
    ]


class Term:
    """One rule as a family sees it: its prefixes and what it says. Compared by identity: one per rule and prefixes."""

    __slots__ = ("entry", "order", "prefixes", "rank", "strength")

    def __init__(self, order: int, entry: PolicyEntry, prefixes: tuple[int, ...]) -> None:
        self.order = order
        """Of the rule, on this node: blocks hold terms by it."""
        self.entry = entry
        self.prefixes = prefixes
        self.strength = (entry.precedence, entry.verdict)
        self.rank = (*self.strength, -entry.rule)
        """The stronger of two terms; the older rule where they say the same, so that entries stay as they are."""


class Block:
    """The entries of one family, and the terms they came from. One object per set of terms."""

    __slots__ = ("__weakref__", "_rows", "terms")

    def __init__(self, terms: tuple[Term, ...], rows: dict[int, PolicyEntry] | None = None) -> None:
        self.terms = terms
        self._rows = rows

    @property
    def rows(self) -> dict[int, PolicyEntry]:
        """Prefix -> entry, shorter prefixes first. Never to be changed; computed when first asked for."""
        if self._rows is None:
            self._rows = resolve_rows(self.terms)
        return self._rows


class Blocks:
    """Every block in use, so that identities under the same rules share one."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[tuple[Term, ...], Block] = WeakValueDictionary()

    def of(self, terms: tuple[Term, ...]) -> Block:
        """Give the block of a set of terms, ordered by `Term.order`."""
        block = self._known.get(terms)
        if block is None:
            block = self._known[terms] = Block(terms)
        return block

    def with_term(self, block: Block | None, term: Term) -> Block:
        """Give the block with one term more, instead of the one that its rule had."""
        others = block.terms if block else ()
        kept = [other for other in others if other.order != term.order]
        return self.of(tuple(sorted((*kept, term), key=lambda listed: listed.order)))

    def without_term(self, block: Block, order: int) -> Block | None:
        """Give the block without a rule's term; None when none is left."""
        kept = tuple(term for term in block.terms if term.order != order)
        return self.of(kept) if kept else None


def resolve_rows(terms: Iterable[Term]) -> dict[int, PolicyEntry]:
    """Compute the entries of one family, shorter prefixes first; an entry that says what the shorter one around it
    says is left out."""
    own: dict[int, Term] = {}
    for term in terms:
        for prefix in term.prefixes:
            known = own.get(prefix)
            if known is None or term.rank > known.rank:
                own[prefix] = term
    best: dict[int, Term] = {}
    rows: dict[int, PolicyEntry] = {}
    for prefix in sorted(own, key=length):
        term = own[prefix]
        above = find_covering(best, prefix)
        # The program stops at the longest prefix, so a weaker rule there would hide the stronger one around it.
        if above is not None and above.strength >= term.strength:
            best[prefix] = above
        else:
            best[prefix] = term
            rows[prefix] = term.entry
    return rows


def find_covering(rows: dict[int, Term], prefix: int) -> Term | None:
    """Give what the longest prefix around `prefix`, but not itself, has."""
    return next((rows[wider] for wider in _around(prefix) if wider in rows), None)


def find_entry(rows: dict[int, PolicyEntry], prefix: int) -> PolicyEntry | None:
    """Give the entry that a packet of `prefix` meets: of itself, or of the longest prefix around it."""
    entry = rows.get(prefix)
    if entry is not None or not rows:
        return entry
    return next((rows[wider] for wider in _around(prefix) if wider in rows), None)


def _around(prefix: int) -> Iterator[int]:
    """Give the prefixes around one, longest first."""
    if prefix >> 24 == 0:
        return
    port = prefix >> 8
    for bits in range((prefix & 0xFF) - 1, -1, -1):
        free = PORT_BITS - bits
        yield (port >> free << free) << 8 | bits
    yield ALL
