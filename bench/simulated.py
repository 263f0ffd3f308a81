"""Nodes and pods that exist in the store alone: the objects that so many agents would have written.

The node with index i has the range 10.(i / 256).(i % 256).0/24 and the underlay address 172.16.0.0 + i; its pods begin
at the range's third address. Writers use the store as agents do, some at a time.
"""

import ipaddress
import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from podwire.control.cluster.facts import encode_node, node_key, tunnel_mac
from podwire.control.cluster.published import Publication, encode_endpoints, endpoints_key
from podwire.control.identity.key import IdentityKey
from podwire.control.identity.known import make_object
from podwire.model.cluster import NodeFacts
from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.ids import IdentityId
from podwire.model.labels import namespace_labels
from podwire.model.store import Store, StoredObject

WRITERS: Final = 4
BATCH: Final = 100
FIRST_IDENTITY: Final = 100_000
PODS_OF_AN_IDENTITY: Final = 50
FIRST_POD: Final = 2
ROOM: Final = 200
"""Pods that a node may have by its range, some left for churn."""
MTU_BYTES: Final = 1500
_PODS: Final = ipaddress.IPv4Address("10.0.0.0")
_UNDERLAY: Final = ipaddress.IPv4Address("172.16.0.0")
_OTHER_UNDERLAY: Final = 1 << 16


@dataclass
class SimulatedNode:
    """One node: what it would publish next."""

    index: int
    pods: dict[IPAddress, IdentityId]
    sequence: int = 1
    epoch: int = 1
    moved: bool = False
    _next: int = field(default=0)

    @property
    def name(self) -> str:
        """Like a machine's."""
        return f"sim-{self.index:05}"

    @property
    def pod_range(self) -> IPNetwork:
        """Its own range."""
        return ipaddress.ip_network((int(_PODS) + (self.index << 8), 24))

    @property
    def address(self) -> IPAddress:
        """Its address on the underlay."""
        return _UNDERLAY + self.index + (_OTHER_UNDERLAY if self.moved else 0)

    def node(self) -> StoredObject:
        """Give its Node."""
        facts = NodeFacts(
            name=self.name,
            instance=f"instance-{self.index}",
            epoch=self.epoch,
            addresses=(self.address,),
            pod_cidrs=(self.pod_range,),
            tunnel_addresses=(self.pod_range[1],),
            tunnel_mac=tunnel_mac(self.name),
            underlay_mtu_bytes=MTU_BYTES,
        )
        return StoredObject(key=node_key(self.name), document=encode_node(facts))

    def endpoints(self) -> StoredObject:
        """Give its NodeEndpoints."""
        said = Publication(self.name, self.epoch, self.sequence, self.pods)
        document = encode_endpoints(said, [self.pod_range])
        return StoredObject(key=endpoints_key(self.name), document=document)

    def replace_pod(self, identity: IdentityId) -> IPAddress:
        """Let the oldest pod end and another begin; gives the new one's address."""
        del self.pods[next(iter(self.pods))]
        self._next += 1
        offset = len(self.pods) + 1 + self._next
        address = self.pod_range[FIRST_POD + offset % ROOM]
        self.pods[address] = identity
        self.sequence += 1
        return address


def make_nodes(nodes: int, pods: int) -> list[SimulatedNode]:
    """Give nodes with so many pods in all, of identities that lie all over."""
    source = random.Random(1)
    identities = max(1, pods // PODS_OF_AN_IDENTITY)
    each = pods // nodes
    if each >= ROOM:
        raise ValueError(f"{each} pods of one node: there is room for {ROOM - 1}")
    made = []
    for index in range(nodes):
        one = SimulatedNode(index, {})
        for offset in range(each):
            number = IdentityId(FIRST_IDENTITY + source.randrange(identities))
            one.pods[one.pod_range[FIRST_POD + offset]] = number
        made.append(one)
    return made


def identity_objects(pods: int) -> list[StoredObject]:
    """Give the identities of as many pods."""
    found = []
    for index in range(max(1, pods // PODS_OF_AN_IDENTITY)):
        labels = (f"cni:app=app{index}", f"cni:team=team{index % 50}")
        key = IdentityKey(tuple(sorted((*labels, *namespace_labels("default", {})))))
        found.append(make_object(FIRST_IDENTITY + index, key))
    return found


def write_all(
    store: Store, write: Callable[[StoredObject], StoredObject], objects: Iterable[StoredObject]
) -> dict[str, StoredObject]:
    """Write objects, some writers at a time, many in one transaction; gives them by name."""
    everything = list(objects)
    batches = [everything[at : at + BATCH] for at in range(0, len(everything), BATCH)]

    def write_batch(batch: Sequence[StoredObject]) -> list[StoredObject]:
        with store.together():
            return [write(stored) for stored in batch]

    with ThreadPoolExecutor(WRITERS) as threads:
        return {
            stored.key.name: stored
            for batch in threads.map(write_batch, batches)
            for stored in batch
        }
