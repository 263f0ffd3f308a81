"""Which back ends of a service port answer the pods of this node: topology.go of kube-proxy, case by case.

Called by `control.services.catalogue`. Pure. Invariant: as long as any back end is ready, some are chosen, unless only
those of this node may answer and there is none.
"""

from collections.abc import Callable, Collection, Iterable

import msgspec

from podwire.control.services.facts import Endpoint
from podwire.model.interfaces import BackEnd

Candidate = tuple[BackEnd, Endpoint]


class Place(msgspec.Struct, frozen=True):
    """Where the pods are that ask."""

    node: str
    zone: str = ""
    """Of the node's label topology.kubernetes.io/zone; "" = not known."""


def choose_near(candidates: Iterable[Candidate], place: Place) -> set[BackEnd]:
    """Take those that are ready and that hints give to this place; without any that is ready, those that drain."""
    every = list(candidates)
    ready = [candidate for candidate in every if candidate[1].is_ready]
    return {back_end for back_end, _ in _hinted(ready, place)} or _draining(every)


def choose_local(candidates: Iterable[Candidate], place: Place) -> set[BackEnd]:
    """Take those of this node alone (internalTrafficPolicy Local); without any that is ready, those that drain."""
    here = [candidate for candidate in candidates if candidate[1].node == place.node]
    return {back_end for back_end, endpoint in here if endpoint.is_ready} or _draining(here)


def _draining(candidates: Iterable[Candidate]) -> set[BackEnd]:
    return {back_end for back_end, endpoint in candidates if endpoint.is_draining}


def _hinted(ready: Collection[Candidate], place: Place) -> Collection[Candidate]:
    """Go by hints where every back end has them and one is for this place: else some would get nobody's traffic, or
    this place no back end. Hints for nodes count before those for zones."""
    kinds: tuple[tuple[str, Callable[[Endpoint], frozenset[str]]], ...] = (
        (place.node, lambda endpoint: endpoint.for_nodes),
        (place.zone, lambda endpoint: endpoint.for_zones),
    )
    for name, read in kinds:
        if all(read(endpoint) for _, endpoint in ready):
            near = [candidate for candidate in ready if name in read(candidate[1])]
            if near:
                return near
    return ready
