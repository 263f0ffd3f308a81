"""The node's maps as typed rows: endpoints, configuration, ipcache, settings, usage, metrics, conntrack.

Called by `datapath.node`, `datapath.inventory` and the readers behind `podwire bpf ... list`. Never opens a pin (that
is `datapath.programs`). Invariant: addresses are v4-mapped bytes only inside this module and `abi`. A row of a live
endpoint is changed in place under its lock and never replaced, and a row that belongs to another endpoint is never
removed. As thread-safe as the kernel's maps: two writers of one endpoint must take turns, which the caller's lock
ensures.
"""

import enum
import ipaddress
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Self, TypedDict, Unpack

import msgspec

from podwire.datapath import abi
from podwire.kernel import bpf
from podwire.model.endpoint import EndpointRecord, IPAddress, IPNetwork
from podwire.model.errors import Bug
from podwire.model.ids import EndpointId, IfIndex
from podwire.model.interfaces import EndpointConfig

MAPPED_PREFIX: Final = bytes(10) + b"\xff\xff"
MAPPED_PREFIX_BITS: Final = 96
MARKS_OF_OTHERS: Final = 0xC000
"""Bits of a packet's mark that kube-proxy (0x4000) and kubelet (0x8000) act on."""
# Plain numbers, because every ADD computes with them: each operation on an IntFlag looks its result up in the
# enumeration.
_OPEN: Final = abi.ConfigFlags.OPEN.value
_SHAPED: Final = abi.ConfigFlags.SHAPED.value
_FLAGS: Final = {
    name: abi.ConfigFlags[name.upper()].value
    for name in (
        *("deny_egress", "deny_ingress", "audit", "host_allowed"),
        *("cidr_egress", "cidr_ingress", "trace"),
    )
}
"""Fields of an EndpointConfig that are flags of its row."""


def to_mapped(address: IPAddress) -> bytes:
    """Give the 16 bytes under which the maps know an address."""
    return address.packed if address.version == 6 else MAPPED_PREFIX + address.packed


def from_mapped(raw: bytes) -> IPAddress:
    """Read the 16 bytes of an address; v4-mapped ones are IPv4."""
    if raw.startswith(MAPPED_PREFIX):
        return ipaddress.IPv4Address(raw[12:])
    return ipaddress.IPv6Address(raw)


def to_prefix_key(network: IPNetwork) -> bytes:
    """Give the key of a prefix in a longest-prefix map."""
    extra = 0 if network.version == 6 else MAPPED_PREFIX_BITS
    return abi.PrefixKey(network.prefixlen + extra, to_mapped(network.network_address)).pack()


def from_prefix_key(raw: bytes) -> IPNetwork:
    """Read the key of a prefix."""
    key = abi.PrefixKey.unpack(raw)
    address = from_mapped(key.addr)
    if address.version == 4 and key.prefix_bits >= MAPPED_PREFIX_BITS:
        return ipaddress.ip_network((address, key.prefix_bits - MAPPED_PREFIX_BITS))
    return ipaddress.ip_network((ipaddress.IPv6Address(key.addr), key.prefix_bits))


def mac_bytes(mac: str) -> bytes:
    """Read a MAC written with colons."""
    return bytes.fromhex(mac.replace(":", ""))


def u32(number: int) -> bytes:
    """Give a number as keys and values have it."""
    return number.to_bytes(4, "little")


def from_u32(raw: bytes) -> int:
    """Read such a number."""
    return int.from_bytes(raw, "little")


class IpcacheEntry(msgspec.Struct, frozen=True):
    """What is known of a prefix: its identity, its node, and how it is reached."""

    network: IPNetwork
    identity: int
    node: int = 0
    flags: int = 0
    mtu: int = 0


class MetricRow(msgspec.Struct, frozen=True):
    """Packets of one outcome at one hook, summed over the CPUs. `reason` NONE = passed.

    Numbers, not enums: after a return to an older build the map may hold what it has no name for.
    """

    hook: int
    reason: int
    path: int
    packets: int
    size_bytes: int


class NodeMaps(msgspec.Struct, frozen=True):
    """The open maps of a node. Owner of their descriptors; closing them takes nothing out of the kernel."""

    pw_config: bpf.Map
    pw_endpoints: bpf.Map
    pw_ipcache: bpf.Map
    pw_nodes: bpf.Map
    pw_node_numbers: bpf.Map
    pw_settings: bpf.Map
    pw_usage: bpf.Map
    pw_metrics: bpf.Map
    pw_conntrack: bpf.Map
    pw_shard_fill: bpf.Map
    pw_new_flows: bpf.Map
    pw_fragments: bpf.Map
    pw_ct_timer: bpf.Map
    pw_events: bpf.Map
    pw_policy: bpf.Map
    pw_cidrs: bpf.Map
    pw_hits: bpf.Map
    pw_services: bpf.Map
    pw_service_list: bpf.Map
    pw_back_ends: bpf.Map
    pw_affinity: bpf.Map

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of the maps the agent itself uses."""
        return cls.__struct_fields__

    @classmethod
    def from_opened(cls, opened: Mapping[str, bpf.Map]) -> Self:
        """Take the maps the agent uses out of all that the programs have, and close the rest."""
        missing = set(cls.names()) - set(opened)
        if missing:
            raise Bug(f"find maps {sorted(missing)!r} in the programs' objects")
        for name in set(opened) - set(cls.names()):
            opened[name].close()
        return cls(**{name: opened[name] for name in cls.names()})

    def close(self) -> None:
        """Give the descriptors back."""
        for name in self.names():
            getattr(self, name).close()


def config_row(record: EndpointRecord, config: EndpointConfig | None) -> abi.ConfigValue:
    """Compute an endpoint's row in `pw_config`; None = the guard, which passes nothing."""
    flags = 0 if config is None else _config_flags(record, config)
    packed = {4: bytes(4), 6: bytes(16)}
    packed.update((address.version, address.packed) for address in record.addresses)
    config = config or EndpointConfig()
    return abi.ConfigValue(
        ifindex=record.device.host_ifindex,
        instance=record.id,
        identity=config.identity,
        slot=config.slot,
        policy_revision=config.policy_revision,
        mtu=record.device.mtu,
        flags=flags,
        default_rule_egress=config.default_rule_egress,
        default_rule_ingress=config.default_rule_ingress,
        ipv4=packed[4],
        ipv6=packed[6],
        pod_mac=mac_bytes(record.device.pod_mac),
        host_mac=mac_bytes(record.device.host_mac),
    )


def _config_flags(record: EndpointRecord, config: EndpointConfig) -> int:
    """Compute the flags of a row in `pw_config`."""
    flags: int = _OPEN | _SHAPED * (record.bandwidth.to_pod_bits_per_s > 0)
    for name, flag in _FLAGS.items():
        flags |= flag * getattr(config, name)
    return flags


def read_endpoint_config(maps: NodeMaps, record: EndpointRecord) -> EndpointConfig | None:
    """Give what an endpoint's row holds; None when there is none, only the guard, or another's row."""
    row = read_config(maps, record.device.host_ifindex)
    if row is None or row.instance != record.id or not row.flags & abi.ConfigFlags.OPEN:
        return None
    return EndpointConfig(
        identity=row.identity,
        slot=row.slot,
        policy_revision=row.policy_revision,
        default_rule_egress=row.default_rule_egress,
        default_rule_ingress=row.default_rule_ingress,
        **{name: bool(row.flags & flag) for name, flag in _FLAGS.items()},
    )


def endpoint_row(record: EndpointRecord) -> abi.EndpointValue:
    """Compute an endpoint's row in `pw_endpoints`, the same under each of its addresses."""
    return abi.EndpointValue(
        ifindex=record.device.host_ifindex,
        instance=record.id,
        pod_mac=mac_bytes(record.device.pod_mac),
        host_mac=mac_bytes(record.device.host_mac),
        flags=0,
    )


def write_guard(maps: NodeMaps, record: EndpointRecord) -> None:
    """Write the row under which a device passes nothing, and let the endpoint have conntrack."""
    ensure_usage(maps, record.id)
    row = config_row(record, None).pack()
    # Under its lock and in place: a plain update recycles the old element at once, and a program that still holds it
    # sees another endpoint's row (148 of 22.7 million runs; with the lock none of 19.7 million).
    maps.pw_config.update(u32(record.device.host_ifindex), row, bpf.Update.LOCK)


def ensure_usage(maps: NodeMaps, endpoint_id: EndpointId) -> None:
    """Make the endpoint's row in `pw_usage` if there is none; a present one counts on."""
    maps.pw_usage.add(u32(endpoint_id), bytes(abi.USAGE_VALUE_BYTES))


def write_endpoint(
    maps: NodeMaps, record: EndpointRecord, config: EndpointConfig, *, is_new: bool = False
) -> None:
    """Publish the addresses, then turn the configuration row over, in place. `is_new`: it has had its guard just now,
    and its row of usage with that.
    """
    if not is_new:
        ensure_usage(maps, record.id)
    row = endpoint_row(record).pack()
    for address in record.addresses:
        key = to_mapped(address)
        # An equal row is not written again: replacing the element of a live endpoint is what a reader may trip over.
        if not maps.pw_endpoints.add(key, row) and maps.pw_endpoints.lookup(key) != row:
            maps.pw_endpoints.update(key, row)
    # EXIST: a policy change that comes after the DEL must not bring the row of a device back that is gone.
    maps.pw_config.update(
        u32(record.device.host_ifindex), config_row(record, config).pack(), bpf.Update.LOCK
    )


def change_endpoint(maps: NodeMaps, record: EndpointRecord, config: EndpointConfig) -> None:
    """Turn the configuration row of a live endpoint over, in place; KernelFailure (ENOENT) where it has none."""
    maps.pw_config.update(
        u32(record.device.host_ifindex),
        config_row(record, config).pack(),
        bpf.Update.LOCK | bpf.Update.EXIST,
    )


def remove_endpoint(maps: NodeMaps, record: EndpointRecord) -> None:
    """Take every row of this endpoint away; rows that a successor has under the same key stay."""
    row = read_config(maps, record.device.host_ifindex)
    if row is not None and row.instance == record.id:
        # Shut first: a program that has found the row before it goes passes nothing either.
        key = u32(record.device.host_ifindex)
        maps.pw_config.update(key, config_row(record, None).pack(), bpf.Update.LOCK)
        maps.pw_config.delete(key)
    for address in record.addresses:
        endpoint = read_endpoint(maps, address)
        if endpoint is not None and endpoint.instance == record.id:
            maps.pw_endpoints.delete(to_mapped(address))
    maps.pw_usage.delete(u32(record.id))


def read_config(maps: NodeMaps, ifindex: IfIndex) -> abi.ConfigValue | None:
    """Read a device's row."""
    # With the lock, or the copy may be half of the old row and half of the new one.
    raw = maps.pw_config.lookup(u32(ifindex), bpf.Update.LOCK)
    return None if raw is None else abi.ConfigValue.unpack(raw)


def read_endpoint(maps: NodeMaps, address: IPAddress) -> abi.EndpointValue | None:
    """Read the row of a pod's address."""
    raw = maps.pw_endpoints.lookup(to_mapped(address))
    return None if raw is None else abi.EndpointValue.unpack(raw)


def list_config(maps: NodeMaps) -> Iterator[tuple[IfIndex, abi.ConfigValue]]:
    """Walk the configuration rows."""
    for key, row in maps.pw_config.items(bpf.Update.LOCK):
        yield IfIndex(from_u32(key)), abi.ConfigValue.unpack(row)


def list_endpoints(maps: NodeMaps) -> Iterator[tuple[IPAddress, abi.EndpointValue]]:
    """Walk the rows of pod addresses."""
    for key, row in maps.pw_endpoints.items():
        yield from_mapped(key), abi.EndpointValue.unpack(row)


def list_usage(maps: NodeMaps) -> Iterator[tuple[EndpointId, abi.UsageValue]]:
    """Walk what each endpoint uses."""
    for key, row in maps.pw_usage.items():
        yield EndpointId(from_u32(key)), abi.UsageValue.unpack(row)


def compare_rows(maps: NodeMaps, record: EndpointRecord, config: EndpointConfig) -> list[str]:
    """Name every field of the endpoint's rows that is not as it should be."""
    name = record.device.host_name
    present = read_config(maps, record.device.host_ifindex)
    differences = _compare_row(f"row of device {name!r}", present, config_row(record, config))
    for address in record.addresses:
        row = read_endpoint(maps, address)
        differences += _compare_row(f"row of address {address}", row, endpoint_row(record))
    if maps.pw_usage.lookup(u32(record.id)) is None:
        differences.append(f"conntrack quota row of endpoint {record.id} is missing")
    return differences


def _compare_row(
    what: str,
    present: abi.ConfigValue | abi.EndpointValue | None,
    wanted: abi.ConfigValue | abi.EndpointValue,
) -> list[str]:
    if present is None:
        return [f"{what} is missing"]
    return [
        f"{what}: {field} is {_shown(field, is_)}, should be {_shown(field, should)}"
        for field, is_, should in zip(wanted._fields, present, wanted, strict=True)
        if is_ != should
    ]


def _shown(field: str, value: object) -> str:
    if isinstance(value, bytes):
        return value.hex(":")
    if field == "flags" and isinstance(value, int):
        return ",".join(flag_names(abi.ConfigFlags, value)) or "none"
    return f"{value:d}"


def flag_names(kind: type[enum.IntFlag], value: int) -> list[str]:
    """Name the flags that are set, as people see them."""
    return [str(flag.name).lower().replace("_", "-") for flag in kind if value & flag]


class Knobs(TypedDict, total=False):
    """What is written of the node's knobs; those that are left out stay as they are."""

    conntrack_quota: int
    tunnel_port: int
    tunnel_ifindex: int
    native_ifindex: int
    new_flow_rate: int


def write_settings(maps: NodeMaps, **knobs: Unpack[Knobs]) -> bool:
    """Write some of the node's knobs; tells whether any was another one.

    Hash seed and tunnel mark are chosen once: live entries are found under the one, packets leave with the other.
    """
    old = read_settings(maps)
    new = old._replace(
        # Zero means "not chosen yet", so it is never drawn. A seed that others do not know keeps them from filling
        # one shard with tuples of their choice.
        hash_seed=old.hash_seed or secrets.randbelow(2**32 - 1) + 1,
        tunnel_mark=old.tunnel_mark or _choose_mark(),
        **knobs,
    )
    if new != old:
        maps.pw_settings.update(u32(0), new.pack())
    return new != old


def write_settings_flag(maps: NodeMaps, flag: abi.SettingsFlags, *, wanted: bool) -> None:
    """Set or clear one flag of the node's knobs."""
    old = read_settings(maps)
    flags = old.flags | flag if wanted else old.flags & ~flag
    if flags != old.flags:
        maps.pw_settings.update(u32(0), old._replace(flags=flags).pack())


def _choose_mark() -> int:
    mark = 0
    # Zero is no mark, and the other value says already that a packet was judged.
    while mark in (0, abi.MARK_JUDGED & ~MARKS_OF_OTHERS):
        mark = secrets.randbits(32) & ~MARKS_OF_OTHERS
    return mark


def read_settings(maps: NodeMaps) -> abi.Settings:
    """Read the node's knobs; all zero before they were written for the first time."""
    raw = maps.pw_settings.lookup(u32(0))
    if raw is None:
        raise Bug("read settings: the array has no element 0")
    return abi.Settings.unpack(raw)


Rows = dict[bytes, bytes]
"""Rows of a map as the kernel has them: key -> value."""


def ipcache_rows(entries: Iterable[IpcacheEntry]) -> Rows:
    """Give the rows that say `entries`."""
    return {
        to_prefix_key(entry.network): abi.IpcacheValue(
            entry.identity, entry.node, entry.flags, entry.mtu
        ).pack()
        for entry in entries
    }


class RowChanges(msgspec.Struct, frozen=True):
    """Keys of a map whose rows were missing or wrong, and keys of surplus rows."""

    put: tuple[bytes, ...]
    removed: tuple[bytes, ...]


def put_missing(rows: bpf.Map, wanted: Rows) -> RowChanges:
    """Write the rows of `wanted` that are missing or wrong; gives these and the surplus, for `remove_surplus`."""
    present = dict(rows.items())
    missing = [(key, row) for key, row in wanted.items() if present.get(key) != row]
    rows.update_batch(missing)
    # With thousands of rows and no change, which is the usual pass, the two key sets are not built.
    surplus = () if len(wanted) - len(missing) == len(present) else present.keys() - wanted.keys()
    return RowChanges(tuple(key for key, _ in missing), tuple(surplus))


def remove_surplus(rows: bpf.Map, changes: RowChanges) -> None:
    """Remove what `put_missing` found to be too much."""
    rows.delete_batch(changes.removed)


def list_ipcache(maps: NodeMaps) -> Iterator[IpcacheEntry]:
    """Walk the ipcache."""
    for key, row in maps.pw_ipcache.items():
        value = abi.IpcacheValue.unpack(row)
        yield IpcacheEntry(
            from_prefix_key(key),
            value.identity,
            value.node,
            value.flags,
            value.mtu,
        )


def find_identity(maps: NodeMaps, address: IPAddress) -> int:
    """Find the identity of the longest prefix of the ipcache that has the address; 0 = there is none."""
    row = maps.pw_ipcache.lookup(to_prefix_key(ipaddress.ip_network(address)))
    return 0 if row is None else abi.IpcacheValue.unpack(row).identity


def split_metrics_index(index: int) -> tuple[int, int, int]:
    """Give the hook, reason and path that a counter's index means."""
    rest, path = divmod(index, abi.METRICS_PATHS)
    hook, reason = divmod(rest, abi.METRICS_REASONS)
    return hook, reason, path


def read_metrics(maps: NodeMaps) -> list[MetricRow]:
    """Sum the counters of all CPUs."""
    rows = []
    for key, raw in maps.pw_metrics.items():
        # The array has a counter for every hook, reason and path; most have never counted.
        if not any(raw):
            continue
        index = split_metrics_index(from_u32(key))
        rows.append(MetricRow(*index, *sum_counters(maps.pw_metrics, raw)))
    return sorted(rows, key=lambda row: (row.hook, row.reason, row.path))


def sum_counters(counters: bpf.Map, raw: bytes) -> tuple[int, int]:
    """Give the packets and the bytes that all CPUs have counted in one row."""
    rows = [abi.Counter.unpack(cpu) for cpu in counters.split_cpus(raw)]
    return sum(row.packets for row in rows), sum(row.bytes_ for row in rows)
