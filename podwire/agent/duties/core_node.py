"""The ranges that Kubernetes gives this node, at the start of the agent: from its core Node, else those it had before.

Called by `agent.node` before the datapath is opened, because the datapath must know the node's ranges. Nothing that is
missing ends the agent: it says what it waits for, and goes on in the moment that it comes. Invariant: an agent that
starts while the API server is away serves with the ranges it had.
"""

import ipaddress
import json
import logging
import time
from collections.abc import Callable
from typing import Final

from podwire.control.kubernetes.core_node import CoreNode, core_node_key, decode_core_node
from podwire.model.endpoint import IPNetwork
from podwire.model.errors import PodwireError, Unavailable
from podwire.model.interfaces import FactStore
from podwire.model.store import Store

RANGES_FACT: Final = "node-ranges"
LOOK_S: Final = 0.5
"""How often a start looks whether what it waits for has come; pods wait with it, so it must notice within a second."""

_log = logging.getLogger(__name__)


def wait_for_ranges(
    store: Store,
    node_name: str,
    facts: FactStore,
    wait_for: Callable[[str, str], None],
    *,
    pause: Callable[[float], None] = time.sleep,
) -> tuple[IPNetwork, ...]:
    """Give the podCIDRs of the own core Node, however long it takes; `wait_for` hears what is missing, and a hint."""
    before = [
        ipaddress.ip_network(text) for text in json.loads(facts.read_fact(RANGES_FACT) or "[]")
    ]
    said = ""
    while True:
        try:
            ranges = _read_ranges(store, node_name)
            facts.write_fact(RANGES_FACT, json.dumps([str(cidr) for cidr in ranges]))
            return ranges
        except PodwireError as error:
            if before and isinstance(error, Unavailable):
                _log.warning("the node keeps its earlier ranges", extra={"cause": error.message})
                return tuple(before)
            if error.message != said:
                said = error.message
                _log.warning("the start waits", extra={"cause": error.message, "hint": error.hint})
            wait_for(error.message, error.hint)
        pause(LOOK_S)


def _read_ranges(store: Store, node_name: str) -> tuple[IPNetwork, ...]:
    """Give the ranges; PodwireError says why there are none yet."""
    node = read_core_node(store, node_name)
    if not node.pod_cidrs:
        raise PodwireError(
            f"give addresses to pods of node {node_name}: its core Node has no podCIDR",
            hint="kube-controller-manager gives them (--allocate-node-cidrs, --cluster-cidr); or set node_cidrs,"
            ' or ipam = "pool"',
        )
    return node.pod_cidrs


def read_core_node(store: Store, node_name: str) -> CoreNode:
    """Read a core Node. Raises PodwireError when there is none, Unavailable, InvalidConfiguration."""
    stored = store.get(core_node_key(node_name))
    if stored is None:
        raise PodwireError(
            f"find core Node {node_name}: there is none",
            hint="kubelet registers it; node_name must be what kubelet calls the node (spec.nodeName)",
        )
    return decode_core_node(stored)
