"""Compare two networks: every part that asks means the same, and none across families.

Called by settings, documents, addresses and what other nodes publish. Pure.
"""

from podwire.model.endpoint import IPNetwork


def is_within(inner: IPNetwork, outer: IPNetwork) -> bool:
    """Tell whether every address of one network is in another."""
    # Not by `subnet_of`, which raises across families and takes several times as long; belief in what thousands of
    # nodes publish asks this for each of their ranges.
    return (
        inner.version == outer.version
        and outer.prefixlen <= inner.prefixlen
        and inner.network_address in outer
    )


def overlap(first: IPNetwork, second: IPNetwork) -> bool:
    """Tell whether two networks share an address."""
    # CIDRs are nested or apart, so it is enough to look whether the smaller one is inside the larger one.
    if first.prefixlen >= second.prefixlen:
        return is_within(first, second)
    return is_within(second, first)
