"""What the decisions in `control` need of the outside world: clock, journal, datapath.

`agent.node` passes the real ones in; unit tests pass fakes, which pass the same contract suite. Every method is
synchronous. `create_*` and `open_*` change the world; `remove_*` are idempotent: "already gone" is success.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Protocol

import msgspec

from podwire.model.cluster import ClusterPlan, Prefix, Underlay
from podwire.model.endpoint import Bandwidth, Device, EndpointRecord, IPAddress, IPNetwork
from podwire.model.ids import EndpointId, IfIndex, InterfaceName
from podwire.model.policy import PolicyKey, PolicyRows


class Clock(Protocol):
    """Time as the kernel counts it."""

    def boottime_ns(self) -> int:
        """Give CLOCK_BOOTTIME in nanoseconds."""

    def boot_id(self) -> str:
        """Give the kernel's boot id."""


class Journal(Protocol):
    """The node's durable memory. What a call wrote outlives this process, not always a power loss, after which no
    record counts (docs/decisions/0004); a failure raises StorageFailure."""

    def next_endpoint_id(self) -> EndpointId:
        """Give a number that no record of this node ever had, across restarts."""

    def skip_ids(self, up_to: EndpointId) -> None:
        """Never give a number up to `up_to`: the kernel still knows something by it."""

    def write(self, record: EndpointRecord) -> None:
        """Insert or replace the record with this id."""

    def require_writable(self) -> bool:
        """Where the last record could not be written, try whether one can be now; tell whether that was asked."""

    def remove(self, endpoint_ids: Iterable[EndpointId]) -> None:
        """Forget records, all in one transaction; absent ones are ignored."""

    def list_records(self) -> Sequence[EndpointRecord]:
        """Give every record, oldest id first."""


class FactStore(Protocol):
    """Facts about the node, each a text under a name, that outlive this process."""

    def write_fact(self, name: str, value: str) -> None:
        """Remember a fact in the place of what was known under the name."""

    def read_fact(self, name: str) -> str:
        """Give a fact, "" when there is none of the name."""


class PodNamespace(msgspec.Struct, frozen=True):
    """An open network namespace of a pod: the descriptor the launcher sent, or one opened from the path."""

    fd: int
    path: str
    cookie: int


class EndpointConfig(msgspec.Struct, frozen=True):
    """What the programs are told about one endpoint: one row of the map `pw_config`."""

    identity: int = 0
    slot: int = 0
    policy_revision: int = 0
    deny_egress: bool = False
    deny_ingress: bool = False
    default_rule_egress: int = 0
    """Number of the rule that people are told when nothing in the slot covers a packet."""
    default_rule_ingress: int = 0
    cidr_egress: bool = False
    """The slot has rules for addresses in this direction: the second lookup is worth its time."""
    cidr_ingress: bool = False
    audit: bool = False
    host_allowed: bool = True
    trace: bool = False


class PresentDevice(msgspec.Struct, frozen=True):
    """A host device found in the kernel under our mark."""

    endpoint_id: EndpointId
    host_name: InterfaceName
    host_ifindex: IfIndex


class Inventory(msgspec.Struct, frozen=True):
    """What the kernel holds of ours on this node."""

    devices: Sequence[PresentDevice] = ()
    config_ifindexes: Sequence[IfIndex] = ()
    """Keys of the map `pw_config`."""
    endpoint_addresses: Sequence[str] = ()
    """Keys of the map `pw_endpoints`, in the shortest text form."""
    usage_ids: Sequence[EndpointId] = ()
    host_routes: Sequence[str] = ()
    """Destinations of routes with our protocol number that lead to pod devices."""
    foreign_names: Sequence[InterfaceName] = msgspec.field(default=())
    """Devices that have a name of podwire's form and no mark of podwire: never touched."""


class EndpointDirectories(Protocol):
    """What people can read about each endpoint below the run directory; nothing is ever restored from it.

    No call raises: a full run directory must never keep a pod from its network.
    """

    def publish(self, record: EndpointRecord, config: EndpointConfig) -> None:
        """Write `<id>_next/` and swap it for `<id>/`."""

    def keep_failure(self, record: EndpointRecord, config: EndpointConfig, cause: str) -> None:
        """Leave what a failed build wanted in `<id>_next_fail/`, with the cause."""

    def remove(self, endpoint_id: EndpointId) -> None:
        """Remove every directory of the endpoint."""

    def prune(self, keep: Iterable[EndpointId]) -> None:
        """Remove the directories of all other endpoints."""


class HostSocket(msgspec.Struct, frozen=True):
    """A port of this host: at one of its addresses, or at each of a family (0.0.0.0, ::)."""

    address: IPAddress
    protocol: int
    port: int


class PodSocket(msgspec.Struct, frozen=True):
    """What a port of this host leads to."""

    address: IPAddress
    port: int


HostPortTable = Mapping[HostSocket, PodSocket]
"""Everything that leads from this host to its pods."""
NO_HOST_PORTS: Final[HostPortTable] = MappingProxyType({})


class Datapath(Protocol):
    """The kernel's side of endpoints. Raises KernelFailure, Unsupported, ForeignObject, InvalidRequest."""

    def plan_device(
        self,
        endpoint_id: EndpointId,
        host_name: InterfaceName,
        pod_name: InterfaceName,
        *,
        mtu: int,
        pod_mac: str,
    ) -> Device:
        """Choose indexes and MACs of a pair that does not exist yet (mtu 0 = the node's, pod_mac "" = derived)."""

    def create_guard(self, record: EndpointRecord) -> None:
        """Write the row that drops everything, under the index the device is going to have."""

    def create_device(self, record: EndpointRecord, namespace: PodNamespace) -> None:
        """Make the pair, the peer directly inside `namespace`, with mark, programs, host routes and neighbours."""

    def repair_device(self, record: EndpointRecord) -> None:
        """Put right what differs on the host's side of an existing pair: the node's current programs (replaced in
        place, no packet lost), routes, neighbours. Cheap when nothing differs."""

    def configure_pod(self, record: EndpointRecord, namespace: PodNamespace) -> None:
        """Give the pod's side its addresses, gateway, routes, neighbours and sysctls, and set it up."""

    def shape(self, device: Device, bandwidth: Bandwidth, namespace: PodNamespace | None) -> None:
        """Set the limits of both directions, or remove them where they are 0."""

    def open_endpoint(
        self, record: EndpointRecord, config: EndpointConfig, *, is_new: bool = False
    ) -> None:
        """Publish the endpoint's addresses and turn its guard row into `config`, in place. `is_new`: `create_guard` was
        called a moment ago.
        """

    def read_config(self, record: EndpointRecord) -> EndpointConfig | None:
        """Give what the endpoint's row holds; None when there is none, or only the guard."""

    def let_loopback_out(self, record: EndpointRecord) -> None:
        """Let what this host sends from 127.0.0.1 leave by the pod's device, where it gets another source."""

    def write_host_ports(self, wanted: HostPortTable, ended: HostPortTable = NO_HOST_PORTS) -> None:
        """Lead exactly these ports of the host to pods. What is there already costs nothing. `ended`: what some
        endpoint had, perhaps in an earlier life of the agent; the kernel is to forget flows by it, and has done so
        before `reap_devices` tells that the endpoint's device is gone."""

    def close_endpoint(self, record: EndpointRecord) -> None:
        """Take every row of the endpoint out of the maps: from here on its device passes nothing."""

    def remove_routes(self, record: EndpointRecord) -> None:
        """Take the host's routes and neighbours of the endpoint away."""

    def condemn_device(self, record: EndpointRecord) -> None:
        """Hand the pair to the reaper; returns at once. Only a device with our mark and this endpoint's number is
        touched; one that is absent (or foreign) is reported gone by the next `reap_devices`."""

    def reap_devices(self) -> Sequence[EndpointId]:
        """Delete what is condemned, in one batch, and tell whose devices are really gone now."""

    def compare_endpoint(
        self, record: EndpointRecord, config: EndpointConfig, namespace: PodNamespace | None
    ) -> Sequence[str]:
        """Name every difference between the record and the kernel; empty = they agree. Changes nothing."""

    def read_inventory(self) -> Inventory:
        """List what the kernel holds of ours."""

    def remove_leftovers(
        self, inventory: Inventory, keep: Iterable[EndpointRecord]
    ) -> Sequence[str]:
        """Remove what `inventory` has and no record in `keep` accounts for; name what was removed."""


class PolicyDatapath(Protocol):
    """The kernel's side of policy: slots of entries, and the local identities of CIDRs. Called under the node's turn.

    A slot is a number, never used twice on a node; rows of endpoints name it. Raises KernelFailure, PolicyOverflow.
    """

    def write_slot(self, slot: int, rows: PolicyRows) -> None:
        """Fill a slot that no endpoint's row names yet. Overflow is found before anything is written."""

    def change_slot(self, slot: int, put: PolicyRows, remove: Iterable[PolicyKey]) -> None:
        """Change a slot in place, `put` before `remove`. Overflow is found before anything is written."""

    def remove_slots(self, slots: Iterable[int]) -> None:
        """Delete every entry of slots that no row names any more, after the fence of docs/datapath.md, rule 17."""

    def read_slot(self, slot: int) -> PolicyRows:
        """Give what a slot holds, for restore, CHECK and people."""

    def list_slots(self) -> Sequence[int]:
        """Give the numbers of all slots that have entries."""

    def write_cidrs(self, identities: Mapping[IPNetwork, int]) -> None:
        """Make the map of CIDRs hold exactly these; what is missing is written before what is too much goes."""

    def forget_hits(self, keep: Iterable[int]) -> None:
        """Drop the counts of rules that are not in `keep`."""

    def update_endpoints(self, rows: Iterable[tuple[EndpointRecord, EndpointConfig]]) -> None:
        """Turn the rows of live endpoints over, each in place under its lock."""


class ClusterDatapath(Protocol):
    """The kernel's side of other nodes. Called under the node's turn; raises KernelFailure, ForeignObject,
    Unsupported."""

    def read_underlay(self) -> Underlay:
        """Look at the device that carries this node's traffic. Raises Unavailable when there is none."""

    def apply_cluster(self, plan: ClusterPlan) -> Sequence[str]:
        """Make tunnel device, programs on it, routes, peers and ipcache be what `plan` says; name everything that
        differed. The same plan again repairs, and gives () when nothing was touched. Raises ForeignObject, changing
        nothing, when somebody else's device has the tunnel's port or name."""

    def change_prefixes(
        self, put: Mapping[IPNetwork, Prefix], remove: Iterable[IPNetwork] = ()
    ) -> None:
        """Change single rows of the ipcache between two plans, `put` before `remove`. The next plan has them too."""


class Frontend(msgspec.Struct, frozen=True):
    """An address and port that pods ask. Port and protocol 0: the address itself, whose other ports are refused."""

    address: IPAddress
    port: int = 0
    protocol: int = 0


class BackEnd(msgspec.Struct, frozen=True):
    """Who answers: an address and port, of the frontend's family and protocol. Port 0: nobody of ours does, for what is
    sent to the frontend is left to the stack; it is alone in its list."""

    address: IPAddress
    port: int
    protocol: int

    @property
    def is_stack(self) -> bool:
        """Whether it stands for the stack."""
        return not self.port


ServiceTable = Mapping[Frontend, Sequence[BackEnd]]
"""Everything that is translated; no back ends: refused."""
Affinity = Mapping[Frontend, int]
"""For how many seconds after its last flow a pod keeps its back end; those that are missing keep none."""
NO_AFFINITY: Final[Affinity] = MappingProxyType({})


class ServiceDatapath(Protocol):
    """The kernel's side of services. Called under the node's turn; raises KernelFailure, and Exhausted without a
    change."""

    def write(self, wanted: ServiceTable, affinity: Affinity = NO_AFFINITY) -> int:
        """Translate exactly these; gives how many rows were written or deleted."""

    def change(
        self, put: ServiceTable, gone: Iterable[Frontend], affinity: Affinity = NO_AFFINITY
    ) -> int:
        """Translate `put` so, and `gone` no more; gives how many rows were written or deleted."""
