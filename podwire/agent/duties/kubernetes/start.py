"""What Kubernetes gives this node at its start: ranges, an address, and the ranges of all pods.

Called by `agent.node` before the datapath is opened, because the datapath must know them. Nothing that is missing ends
the agent: it says what it waits for, and goes on in the moment that it comes. Invariant: an agent that starts while the
API server is away serves with what it had, and none serves without knowing where the cluster's pods are: an address of
a pod that it has not heard of would count as the world.
"""

import fnmatch
import ipaddress
import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec

from podwire.control.kubernetes.cluster_ranges import (
    KUBEADM_KEY,
    SET_IT,
    decode_pod_subnets,
    find_configuration,
)
from podwire.control.kubernetes.core_node import CoreNode, core_node_key, decode_core_node
from podwire.model.config import AgentConfig, find_contradictions
from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.errors import PodwireError, Unavailable
from podwire.model.interfaces import FactStore
from podwire.model.store import Store
from podwire.store.manifest import load_manifests

RANGES_FACT: Final = "node-ranges"
CLUSTER_FACT: Final = "cluster-ranges"
ADDRESS_FACT: Final = "node-addresses"
LOOK_S: Final = 0.5
"""How often a start looks whether what it waits for has come; pods wait with it, so it must notice within a second."""

DeviceAddress = tuple[str, IPAddress]
"""A device's name, and an address of it."""

_Found = TypeVar("_Found")
_log = logging.getLogger(__name__)


class Start(msgspec.Struct, frozen=True):
    """A start that may have to wait; `wait_for` hears what is missing, and a hint."""

    store: Store
    facts: FactStore
    wait_for: Callable[[str, str], None]
    pause: Callable[[float], None] = time.sleep

    def wait_for_ranges(self, node_name: str) -> tuple[IPNetwork, ...]:
        """Give the podCIDRs of the own core Node, however long it takes."""
        texts = self._ask(RANGES_FACT, lambda: _read_ranges(self.store, node_name))
        return tuple(ipaddress.ip_network(text) for text in texts)

    def wait_for_cluster_cidrs(self, config: AgentConfig) -> tuple[IPNetwork, ...]:
        """Give the ranges of all pods that kubeadm was told, however long it takes."""
        texts = self._ask(CLUSTER_FACT, lambda: _read_cluster_cidrs(self.store, config))
        return tuple(ipaddress.ip_network(text) for text in texts)

    def wait_for_address(
        self, node_name: str, present: Callable[[], Sequence[DeviceAddress]]
    ) -> IPAddress | None:
        """Give the first InternalIP of the own core Node that this host has, however long it takes; None: it has none
        of them."""
        texts = self._ask(
            ADDRESS_FACT, lambda: list(map(str, read_core_node(self.store, node_name).addresses))
        )
        here = {str(address) for _, address in present()}
        address = next((ipaddress.ip_address(text) for text in texts if text in here), None)
        if texts and address is None:
            _log.warning(
                "this host has none of its core Node's InternalIPs; the default route says which address it has",
                extra={"cause": ", ".join(texts)},
            )
        return address

    def wait_for_device(
        self, name_pattern: str, present: Callable[[], Sequence[DeviceAddress]]
    ) -> IPAddress:
        """Give the address of the first device that the pattern names, IPv4 before IPv6, however long it takes."""

        def look() -> IPAddress:
            devices = present()
            if (address := choose_address(name_pattern, devices)) is None:
                names = ", ".join(dict.fromkeys(name for name, _ in devices))
                raise PodwireError(
                    f"find this node's address: no device that node_interface, {name_pattern!r}, names has one",
                    hint=f"devices with an address: {names or 'none'}",
                )
            return address

        return self._wait(look)

    def _ask(self, fact: str, look: Callable[[], Sequence[str]]) -> Sequence[str]:
        """Give what `look` finds, or what it found in an earlier life while the API server is away."""
        before: Sequence[str] = json.loads(self.facts.read_fact(fact) or "[]")

        def look_and_remember() -> Sequence[str]:
            try:
                texts = look()
            # Only for a server that is away: one that is there and says nothing is waited for.
            except Unavailable as error:
                if not before:
                    raise
                _log.warning("the start goes on with what it knew", extra={"cause": error.message})
                return before
            if list(texts) != list(before):
                self.facts.write_fact(fact, json.dumps(list(texts)))
            return texts

        return self._wait(look_and_remember)

    def _wait(self, look: Callable[[], _Found]) -> _Found:
        said = ""
        while True:
            try:
                return look()
            except PodwireError as error:
                if error.message != said:
                    said = error.message
                    _log.warning(
                        "the start waits", extra={"cause": error.message, "hint": error.hint}
                    )
                self.wait_for(error.message, error.hint)
            self.pause(LOOK_S)


def choose_address(name_pattern: str, present: Sequence[DeviceAddress]) -> IPAddress | None:
    """Choose the address of the first device that the pattern names, IPv4 before IPv6: the device carries both."""
    named = [device for device in present if fnmatch.fnmatchcase(device[0], name_pattern)]
    own = [address for name, address in named if name == named[0][0]]
    return min(own, key=lambda address: address.version, default=None)


def read_core_node(store: Store, node_name: str) -> CoreNode:
    """Read a core Node. Raises PodwireError when there is none, Unavailable, InvalidConfiguration."""
    stored = store.get(core_node_key(node_name))
    if stored is None:
        raise PodwireError(
            f"find core Node {node_name}: there is none",
            hint="kubelet registers it; node_name must be what kubelet calls the node (spec.nodeName)",
        )
    return decode_core_node(stored)


def _read_ranges(store: Store, node_name: str) -> Sequence[str]:
    """Give the ranges; PodwireError says why there are none yet."""
    node = read_core_node(store, node_name)
    if not node.pod_cidrs:
        raise PodwireError(
            f"give addresses to pods of node {node_name}: its core Node has no podCIDR",
            hint="kube-controller-manager gives them (--allocate-node-cidrs, --cluster-cidr); or set node_cidrs,"
            ' or ipam = "pool"',
        )
    return [str(cidr) for cidr in node.pod_cidrs]


def _read_cluster_cidrs(store: Store, config: AgentConfig) -> Sequence[str]:
    """Give what kubeadm was told; PodwireError says why that cannot be used."""
    text = find_configuration(store.get(KUBEADM_KEY))
    name = f"{KUBEADM_KEY.namespace}/{KUBEADM_KEY.name}"
    ranges = decode_pod_subnets(load_manifests(text.encode(), name)[0].document) if text else ()
    if not ranges:
        raise PodwireError(
            f"know the ranges of all pods: cluster_cidrs is empty, and ConfigMap {name} says none",
            hint=SET_IT,
        )
    faults = find_contradictions(config.replace({"cluster_cidrs": ranges}))
    if faults:
        told = "; ".join(f"{fault.path} {fault.message}" for fault in faults)
        raise PodwireError(f"use the ranges that ConfigMap {name} says: {told}", hint=SET_IT)
    return [str(cidr) for cidr in ranges]
