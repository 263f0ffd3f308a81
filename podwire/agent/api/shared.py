"""What the API shows: one type for each answer, computed from what the agent knows.

Used by `agent.api.routes`; `agent.api.openapi` describes the same types. Pure: never asks the kernel or the disk.
Field names are those of the outer contract in camel case. Adding a field is compatible; renaming or removing one is
not.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from podwire.agent.api.ipam_views import IpamTotals
from podwire.control.cluster.state import ClusterTotals
from podwire.control.endpoint.policies import oldest_revision
from podwire.control.endpoint.table import Endpoint
from podwire.control.flows.enrich import format_time_ns
from podwire.model.config import SETTINGS, AgentConfig
from podwire.model.endpoint import HostPort
from podwire.model.interfaces import EndpointConfig

NOT_ENFORCED = "disabled"
"""What enforcement is where no policy closes a direction."""


class Document(msgspec.Struct, frozen=True, rename="camel"):
    """Base of all answers."""


class FaultView(Document, frozen=True, kw_only=True):
    """One thing wrong with a request."""

    path: str
    message: str


class ErrorView(Document, frozen=True, kw_only=True):
    """Why a request failed: a stable word, one line of what, one of what to do."""

    code: str
    message: str
    hint: str = ""
    faults: tuple[FaultView, ...] = ()


class ErrorBody(Document, frozen=True, kw_only=True):
    """Body of every answer from 400 on."""

    error: ErrorView


class Enforcement(Document, frozen=True, kw_only=True):
    """Whether policies restrict a direction: `enabled`, `disabled` or `audit`."""

    ingress: str = NOT_ENFORCED
    egress: str = NOT_ENFORCED


class BandwidthView(Document, frozen=True, kw_only=True):
    """Limits seen from the pod, in bits per second; 0 = none."""

    to_pod_bits_per_s: int
    from_pod_bits_per_s: int


class HostPortView(Document, frozen=True, kw_only=True):
    """A port of this host that leads to the pod."""

    host_ip: str
    """Empty: each address of this host."""
    host_port: int
    protocol: str
    container_port: int


class EndpointView(Document, frozen=True, kw_only=True):
    """One endpoint."""

    id: int
    state: str
    container_id: str
    if_name: str
    network: str
    namespace: str
    pod: str
    pod_uid: str
    identity: int
    labels: tuple[str, ...]
    ipv4: str
    ipv6: str
    addresses: tuple[str, ...]
    host_interface: str
    host_if_index: int
    host_mac: str
    pod_mac: str
    mtu: int
    netns: str
    policy_revision: int
    """Of the store, up to which policies of every kind are in force here."""
    policy_revisions: dict[str, int]
    """The same by kind: revisions of different kinds may be different counts."""
    policy_enforcement: Enforcement
    bandwidth: BandwidthView
    host_ports: tuple[HostPortView, ...]
    cni_version: str


class LogEntryView(Document, frozen=True, kw_only=True):
    """One transition of an endpoint."""

    time: str
    old: str
    """State before; empty for the first entry."""
    new: str
    cause: str


class EndpointHealth(Document, frozen=True, kw_only=True):
    """Whether the kernel has what the journal says of an endpoint."""

    id: int
    ok: bool
    state: str
    differences: tuple[str, ...]


class LabelsView(Document, frozen=True, kw_only=True):
    """The labels of an endpoint."""

    labels: tuple[str, ...]


class StoreView(Document, frozen=True, kw_only=True):
    """The store of objects."""

    kind: str
    ok: bool


class DatapathView(Document, frozen=True, kw_only=True):
    """What carries the packets."""

    mode: str
    programs: str
    """Hash of the loaded template."""
    abi_version: int
    mtu: int


class EndpointTotals(Document, frozen=True, kw_only=True):
    """Endpoints by state."""

    total: int
    by_state: dict[str, int]


class PolicyTotals(Document, frozen=True, kw_only=True):
    """Policy in `status`."""

    revision: int
    """Of the store, up to which policies of every kind were taken in."""
    revisions: dict[str, int]
    """The same by kind."""
    enforcement: str
    policies: int
    identities: int
    not_in_force: tuple[str, ...]
    """Objects whose newest version is not in force: they cannot be read, cannot be enforced whole, or do not fit."""


class CheckView(Document, frozen=True, kw_only=True):
    """One thing that is watched: since when it is so, and what is wrong."""

    name: str
    ok: bool
    message: str
    since: str


class StatusView(Document, frozen=True, kw_only=True):
    """The agent as a whole."""

    ready: bool
    version: str
    node: str
    started: str
    pid: int
    store: StoreView
    datapath: DatapathView
    endpoints: EndpointTotals
    ipam: IpamTotals
    policy: PolicyTotals
    cluster: ClusterTotals
    checks: tuple[CheckView, ...]
    warnings: tuple[str, ...]


class HealthView(Document, frozen=True, kw_only=True):
    """Whether the agent is ready, and what is wrong."""

    ready: bool
    failing: tuple[CheckView, ...]


class SettingView(Document, frozen=True, kw_only=True):
    """One setting in force."""

    value: Any
    source: str
    reloadable: bool


class ConfigView(Document, frozen=True, kw_only=True):
    """Settings in force, by key."""

    settings: dict[str, SettingView]


class NodeView(Document, frozen=True, kw_only=True):
    """A node that is known here."""

    name: str
    addresses: tuple[str, ...]
    pod_cidrs: tuple[str, ...]
    cluster_cidrs: tuple[str, ...] = ()
    """As this node is configured; empty for other nodes."""
    mtu: int
    """Of this node: that of new pods, in bytes. Of another: the largest packet that gets there in one piece."""
    ways: tuple[str, ...] = ()
    """`local`; of another, how its pods are reached: `tunnel`, `native`; none when they are not."""
    outer: str = ""
    """Where tunnel packets to it are sent."""
    encrypted: bool = False
    """Whether its row in the kernel says that what goes there has to be encrypted on the way. Nothing sets that yet."""
    alive: bool | None = None
    """Whether its agent keeps its name alive; null when the store does not say."""
    kernel: str = ""
    boot_id: str = ""
    instance: str = ""
    """Random, of that machine: tells it from another one under its name."""
    epoch: int = 0
    """How many machines have had its name."""


class MapView(Document, frozen=True, kw_only=True):
    """One BPF map."""

    name: str
    type: str
    max_entries: int
    entries: int


class MapRows(Document, frozen=True, kw_only=True):
    """Rows of one map, decoded."""

    name: str
    rows: tuple[dict[str, Any], ...]
    truncated: bool


def enforcement_of(config: EndpointConfig) -> Enforcement:
    """Tell which directions are closed but for what rules allow."""
    closed = "audit" if config.audit else "enabled"
    return Enforcement(
        ingress=closed if config.deny_ingress else NOT_ENFORCED,
        egress=closed if config.deny_egress else NOT_ENFORCED,
    )


def endpoint_view(endpoint: Endpoint) -> EndpointView:
    record = endpoint.record
    device = record.device
    return EndpointView(
        id=record.id,
        state=endpoint.state.value,
        container_id=record.key.container_id,
        if_name=record.key.if_name,
        network=record.key.network,
        namespace=record.namespace,
        pod=record.pod,
        pod_uid=record.pod_uid,
        identity=record.identity,
        labels=record.labels,
        ipv4=record.ipv4,
        ipv6=record.ipv6,
        addresses=tuple(str(address) for address in record.addresses),
        host_interface=device.host_name,
        host_if_index=device.host_ifindex,
        host_mac=device.host_mac,
        pod_mac=device.pod_mac,
        mtu=device.mtu,
        netns=record.netns_path,
        policy_revision=oldest_revision(endpoint.realized_revisions),
        policy_revisions=dict(endpoint.realized_revisions),
        policy_enforcement=enforcement_of(endpoint.config),
        bandwidth=msgspec.convert(record.bandwidth, BandwidthView, from_attributes=True),
        host_ports=tuple(map(_host_port_view, record.host_ports)),
        cni_version=record.cni_version,
    )


def _host_port_view(port: HostPort) -> HostPortView:
    return HostPortView(
        host_ip=port.host_ip,
        host_port=port.host_port,
        protocol=port.protocol,
        container_port=port.pod_port,
    )


def endpoint_log_view(endpoint: Endpoint, wall_offset_ns: int) -> list[LogEntryView]:
    """Show the transitions of an endpoint, oldest first."""
    return [
        LogEntryView(
            time=format_time_ns(entry.boottime_ns + wall_offset_ns),
            old=entry.old.value if entry.old else "",
            new=entry.new.value,
            cause=entry.cause,
        )
        for entry in endpoint.log
    ]


def endpoint_totals(endpoints: Iterable[Endpoint]) -> EndpointTotals:
    counts = Counter(endpoint.state.value for endpoint in endpoints)
    return EndpointTotals(total=counts.total(), by_state=dict(sorted(counts.items())))


def config_view(config: AgentConfig, sources: Mapping[str, str]) -> ConfigView:
    """Show every setting with its source."""
    return ConfigView(
        settings={
            key: SettingView(
                value=plain(config.get(key)),
                source=sources.get(key, "default"),
                reloadable=row.reloadable,
            )
            for key, row in SETTINGS.items()
        }
    )


def plain(value: object) -> Any:
    """Give a setting's value as JSON has it."""
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if value is None:
        return ""
    return value if isinstance(value, bool | int | str) else str(value)
