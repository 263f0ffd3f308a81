"""The memory of flows as typed rows: connections in their shards, new flows beside them, and how near limits are.

Called by `datapath.rows`, `datapath.upgrade` and `datapath.node`. Never writes a flow; only the programs do.
"""

import time
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from podwire.datapath import abi
from podwire.datapath.host import HostWarning
from podwire.datapath.maps import NodeMaps, from_mapped, list_usage, read_settings
from podwire.kernel import bpf
from podwire.model.endpoint import IPAddress
from podwire.model.errors import Bug
from podwire.model.ids import EndpointId

NEAR: Final = 0.8
"""Share of a limit from which on people are told."""
LARGEST_NAMED: Final = 5
NS_PER_S: Final = 1_000_000_000


class ConntrackRow(msgspec.Struct, frozen=True):
    """One remembered flow of one endpoint, seen in the direction it began."""

    instance: EndpointId
    direction: abi.Direction
    protocol: int
    source: IPAddress
    destination: IPAddress
    source_port: int
    destination_port: int
    value: abi.ConntrackValue


def open_shards(maps: NodeMaps) -> Iterator[bpf.Map]:
    """Open the hashes of conntrack, in order; the caller closes each."""
    for _, raw_id in sorted(maps.pw_conntrack.items()):
        # A map of maps shows its inner maps by id; the id is of no map any more when the slot was replaced in
        # between.
        shard = bpf.open_map_by_id(int.from_bytes(raw_id, "little"))
        if shard is None:
            raise Bug("open conntrack shards: a slot was replaced meanwhile")
        yield shard


def open_conntrack_shards(maps: NodeMaps) -> Iterator[bpf.Map]:
    """Open the hashes of conntrack one after the other; each is closed before the next is given."""
    for shard in open_shards(maps):
        with shard:
            yield shard


def open_new_flows(maps: NodeMaps) -> bpf.Map:
    """Open the hash of flows that are no connections yet; the caller closes it."""
    raw_id = maps.pw_new_flows.lookup(bytes(4))
    new_flows = None if raw_id is None else bpf.open_map_by_id(int.from_bytes(raw_id, "little"))
    if new_flows is None:
        raise Bug("open new flows: the slot was replaced meanwhile")
    return new_flows


def list_conntrack(maps: NodeMaps, endpoint_id: EndpointId | None = None) -> Iterator[ConntrackRow]:
    """Walk the remembered flows, of one endpoint or of all. Slow: reads every shard."""
    with open_new_flows(maps) as rows:
        yield from _list_rows(rows, endpoint_id)
    for shard in open_conntrack_shards(maps):
        yield from _list_rows(shard, endpoint_id)


def _list_rows(rows: bpf.Map, endpoint_id: EndpointId | None) -> Iterator[ConntrackRow]:
    wanted = b"" if endpoint_id is None else endpoint_id.to_bytes(4, "little")
    # The programs' clock: bpf_ktime_get_ns() reads CLOCK_MONOTONIC.
    now_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    for raw_key, raw in rows.items():
        # The key begins with the endpoint's number. Comparing bytes leaves most rows of a full table undecoded.
        if not raw_key.startswith(wanted):
            continue
        key, value = abi.ConntrackKey.unpack(raw_key), abi.ConntrackValue.unpack(raw)
        if _is_over(value, now_ns):
            continue
        yield ConntrackRow(
            instance=EndpointId(key.instance),
            direction=abi.Direction(key.direction),
            protocol=key.protocol,
            source=from_mapped(key.saddr),
            destination=from_mapped(key.daddr),
            source_port=key.sport,
            destination_port=key.dport,
            value=value,
        )


def _is_over(value: abi.ConntrackValue, now_ns: int) -> bool:
    """Tell whether a row means nothing any more; nothing removes such a row from the hash of new flows."""
    # A flow that has become a connection leaves its row here, flagged: deleting it would give its memory to another
    # flow while a program reads it (decisions/0007).
    if value.flags & abi.ConntrackFlags.LEFT:
        return True
    stays = not value.flags & abi.ConntrackFlags.NEW
    return not stays and now_ns - value.last_seen_ns > value.lifetime_s * NS_PER_S


def count_conntrack(maps: NodeMaps) -> int:
    """Count the connections without reading them: what the endpoints are charged with."""
    # What the endpoints are charged with is a few rows; the connections themselves may be a million.
    return sum(sum(value.connections) for _, value in list_usage(maps))


def tell_shard_room(maps: NodeMaps, shard_entries: int) -> None:
    """Tell the programs how many rows a shard has room for: where one gets full they shrink quotas."""
    behind = abi.CONNTRACK_SHARDS.to_bytes(4, "little")
    maps.pw_shard_fill.update(behind, shard_entries.to_bytes(4, "little"))


def read_fill(maps: NodeMaps) -> tuple[int, int]:
    """Give how many rows all shards have, those included that wait to be collected, and for how many there is room.

    By what the programs have counted: no shard is read.
    """
    *rows, room = (int.from_bytes(raw, "little") for _, raw in sorted(maps.pw_shard_fill.items()))
    return sum(rows), room * abi.CONNTRACK_SHARDS


def conntrack_capacity(maps: NodeMaps) -> int:
    """Give how many connections fit into all shards together."""
    return sum(shard.info.max_entries for shard in open_conntrack_shards(maps))


def find_pressure(maps: NodeMaps) -> list[HostWarning]:
    """Name what nears its limit, before anything is lost, and what is beyond it."""
    warnings = []
    held, capacity = read_fill(maps)
    used = list(list_usage(maps))
    if capacity and capacity - held <= capacity / abi.SPARE_PART:
        warnings.append(
            HostWarning(
                f"{held} of {capacity} rows for flows are in use; the fuller the table, the fewer flows each pod may"
                f" have: {_name_largest(used)}",
                "raise conntrack_entries, or look who opens them with 'podwire bpf ct list'",
            )
        )
    quota = read_settings(maps).conntrack_quota
    for endpoint_id, usage in used:
        for direction, who in ((abi.Direction.EGRESS, "it"), (abi.Direction.INGRESS, "others")):
            if usage.connections[direction] >= NEAR * quota:
                warnings.append(
                    HostWarning(
                        f"endpoint {endpoint_id} has {usage.connections[direction]} of {quota} connections that {who}"
                        " may have opened; beyond that they are not protected from a flood",
                        "raise conntrack_quota, or look who opens them with 'podwire bpf ct list'",
                    )
                )
        brief = quota // abi.BRIEF_PART
        if usage.brief_flows >= NEAR * brief:
            warnings.append(
                HostWarning(
                    f"endpoint {endpoint_id} has {usage.brief_flows} of {brief} flows to services that are new,"
                    " unanswered or just closed; beyond that new ones are dropped",
                    "raise conntrack_quota, or look what it asks with 'podwire bpf ct list'",
                )
            )
    return warnings


def _name_largest(used: Iterable[tuple[EndpointId, abi.UsageValue]]) -> str:
    """Say which endpoints have most flows."""
    flows = {endpoint_id: sum(usage.connections) + usage.brief_flows for endpoint_id, usage in used}
    largest = sorted(flows, key=lambda endpoint_id: (-flows[endpoint_id], endpoint_id))[
        :LARGEST_NAMED
    ]
    return ", ".join(f"endpoint {endpoint_id} has {flows[endpoint_id]}" for endpoint_id in largest)
