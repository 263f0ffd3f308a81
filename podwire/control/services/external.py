"""Addresses beside the cluster's that a Service is asked at: externalIPs, and what a load balancer has given it.

Called by `control.services.facts`. Pure. Invariant: what would let a pod reach more than kube-proxy does is left to the
stack and named.
"""

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from podwire.control.services.reading import Left, is_back_end_address
from podwire.model.documents.lenient import items_of, members_of, read_address, text_of, texts_of
from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.networks import is_within

PROXY_MODE: Final = "proxy-mode"
"""Reason: somebody has wanted that."""
_UNREADABLE: Final = "is no address that packets can be sent to"


def read_external(
    document: Mapping[str, Any], pods: Sequence[IPNetwork]
) -> tuple[tuple[IPAddress, ...], tuple[Left, ...]]:
    """Give the addresses that are translated, and what is said of the others. `pods`: the ranges of all pods."""
    spec = members_of(document, "spec")
    found: dict[IPAddress, None] = {}
    left: list[Left] = []
    for text in texts_of(spec, "externalIPs"):
        address = read_address(text)
        if address is None or not is_back_end_address(address, address.version):
            left.append(Left("address", f"externalIP {text[:60]} {_UNREADABLE}"))
        else:
            found[address] = None
    for address, fault in _list_balanced(document):
        if why := fault or _find_limit(address, spec, pods):
            about = f"load balancer's address {address} is left to the stack"
            left.append(Left(why.reason, f"{about}: {why.message}"))
        else:
            found[address] = None
    return tuple(found), tuple(left)


def _list_balanced(document: Mapping[str, Any]) -> Iterator[tuple[IPAddress, Left | None]]:
    """Give the load balancer's addresses, each with what is wrong about it; those that are no address are names."""
    balancer = members_of(members_of(document, "status"), "loadBalancer")
    for ingress in items_of(balancer, "ingress"):
        address = read_address(text_of(ingress, "ip"))
        if address is None:
            continue
        why = None
        if ingress.get("ipMode") == "Proxy":
            why = Left(PROXY_MODE, "the load balancer itself answers there (ipMode Proxy)")
        elif not is_back_end_address(address, address.version):
            why = Left("address", f"it {_UNREADABLE}")
        yield address, why


def _find_limit(
    address: IPAddress, spec: Mapping[str, Any], pods: Sequence[IPNetwork]
) -> Left | None:
    """Say why the programs cannot keep loadBalancerSourceRanges, None when every pod is in them or there are none.

    The rows of a service know no sources. Which pods there are is known by the ranges of all pods alone.
    """
    texts = texts_of(spec, "loadBalancerSourceRanges")
    read = [_read_range(text.strip()) for text in texts]
    allowed = [
        allowed_range
        for allowed_range in read
        if allowed_range is not None and allowed_range.version == address.version
    ]
    if None in read:
        return Left("source-ranges", "loadBalancerSourceRanges has what is no range")
    # As kube-proxy does it: none of the family is no limit.
    if not allowed or any(allowed_range.prefixlen == 0 for allowed_range in allowed):
        return None
    mine = [pod_range for pod_range in pods if pod_range.version == address.version]
    if mine and all(any(is_within(pod_range, by) for by in allowed) for pod_range in mine):
        return None
    return Left("source-ranges", "loadBalancerSourceRanges does not name all pods")


def _read_range(text: str) -> IPNetwork | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None
