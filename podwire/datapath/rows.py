"""The node's maps as documents: what `podwire bpf ... list` and the API show of them.

`agent.api.routes` calls it on a thread, because a dump walks a map of the running datapath and may be slow. Changes
nothing. Names of fields are those of the layouts. Addresses and MACs are text, and numbers that have names are shown
by name.
"""

import enum
import ipaddress
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from podwire.datapath import abi, conntrack_maps, node_maps, policy_maps, service_maps
from podwire.datapath import maps as typed
from podwire.datapath.flow_events import hook_name, path_name, protocol_name, reason_name
from podwire.datapath.maps import NodeMaps, flag_names
from podwire.kernel import bpf
from podwire.model.errors import NotFound
from podwire.model.ids import IfIndex

Row = dict[str, Any]

_MAC_FIELDS = frozenset({"pod_mac", "host_mac"})
_NAMED: Mapping[str, type[enum.IntEnum]] = {
    "path": abi.Path,
    "tcp_state": abi.TcpState,
    "kind": abi.ConntrackKind,
}
_POLICY_FIELDS = (
    "identity",
    "slot",
    "policy_revision",
    "flags",
    "default_rule_egress",
    "default_rule_ingress",
)
_FLAGS: Mapping[str, type[enum.IntFlag]] = {
    "config": abi.ConfigFlags,
    "ipcache": abi.IpcacheFlags,
    "ct": abi.ConntrackFlags,
}


def _config(maps: NodeMaps) -> Iterator[Row]:
    for index, value in typed.list_config(maps):
        yield {"ifindex": int(index), **_plain(value._asdict(), "config")}


def _endpoint(maps: NodeMaps) -> Iterator[Row]:
    for address, value in typed.list_endpoints(maps):
        row = {name: field for name, field in value._asdict().items() if name != "flags"}
        config = typed.read_config(maps, IfIndex(value.ifindex))
        policy = {} if config is None else {name: getattr(config, name) for name in _POLICY_FIELDS}
        yield {"address": str(address), **_plain(row), **_plain(policy, "config")}


def _ipcache(maps: NodeMaps) -> Iterator[Row]:
    for entry in typed.list_ipcache(maps):
        yield {
            "prefix": str(entry.network),
            "identity": entry.identity,
            "node": entry.node,
            "flags": flag_names(abi.IpcacheFlags, entry.flags),
            "mtu": entry.mtu,
        }


def _nodes(maps: NodeMaps) -> Iterator[Row]:
    addresses: dict[int, list[str]] = {}
    for address, number in node_maps.list_node_numbers(maps):
        addresses.setdefault(number, []).append(str(address))
    for row in sorted(node_maps.list_nodes(maps), key=lambda node: node.number):
        yield {
            "node": row.number,
            "address": str(row.outer),
            "known_addresses": sorted(addresses.get(row.number, [])),
            "mtu": row.mtu,
            "flags": flag_names(abi.NodeFlags, row.flags),
            "mac": row.mac,
            "hops": [str(hop) for hop in row.hops],
        }


def _conntrack(maps: NodeMaps) -> Iterator[Row]:
    for row in conntrack_maps.list_conntrack(maps):
        yield {
            "endpoint": int(row.instance),
            "direction": row.direction.name.lower(),
            "protocol": row.protocol,
            "source": str(row.source),
            "source_port": row.source_port,
            "destination": str(row.destination),
            "destination_port": row.destination_port,
            **_plain(row.value._asdict(), "ct"),
        }


def _metrics(maps: NodeMaps) -> Iterator[Row]:
    for row in typed.read_metrics(maps):
        yield {
            "hook": hook_name(row.hook),
            "reason": reason_name(row.reason) if row.reason else "",
            "path": path_name(row.path),
            "packets": row.packets,
            "bytes": row.size_bytes,
        }


def _policy(maps: NodeMaps) -> Iterator[Row]:
    for row in policy_maps.read_entries(maps):
        yield {
            "slot": row.slot,
            "identity": row.key.identity,
            "direction": row.key.direction.name.lower(),
            "protocol": protocol_name(row.key.protocol) if row.key.protocol else "any",
            "port": f"{row.key.port}/{row.key.port_bits}",
            "verdict": row.entry.verdict.name.lower(),
            "precedence": row.entry.precedence,
            "rule": row.entry.rule,
        }


def _cidrs(maps: NodeMaps) -> Iterator[Row]:
    for network, identity in policy_maps.read_cidrs(maps):
        yield {"prefix": str(network), "identity": identity}


def _hits(maps: NodeMaps) -> Iterator[Row]:
    for rule, (packets, size_bytes) in sorted(policy_maps.read_hits(maps).items()):
        yield {"rule": rule, "packets": packets, "bytes": size_bytes}


def _services(maps: NodeMaps) -> Iterator[Row]:
    for row in sorted(service_maps.read_services(maps), key=lambda row: row.service):
        asked = row.frontend
        yield {
            "address": str(asked.address),
            "port": asked.port,
            "protocol": protocol_name(asked.protocol) if asked.protocol else "any",
            "service": row.service,
            "back_ends": [
                "stack" if back_end.is_stack else f"{back_end.address} {back_end.port}"
                for back_end in row.back_ends
            ],
            "numbers": list(row.slots),
            "affinity_s": row.affinity_s,
        }


def _settings(maps: NodeMaps) -> Iterator[Row]:
    yield _plain(typed.read_settings(maps)._asdict())


def _usage(maps: NodeMaps) -> Iterator[Row]:
    for endpoint_id, value in typed.list_usage(maps):
        yield {"endpoint": int(endpoint_id), **_plain(value._asdict())}


_READERS: Mapping[str, tuple[str, Callable[[NodeMaps], Iterator[Row]]]] = {
    "cidrs": ("pw_cidrs", _cidrs),
    "config": ("pw_config", _config),
    "ct": ("pw_conntrack", _conntrack),
    "endpoint": ("pw_endpoints", _endpoint),
    "hits": ("pw_hits", _hits),
    "ipcache": ("pw_ipcache", _ipcache),
    "metrics": ("pw_metrics", _metrics),
    "nodes": ("pw_nodes", _nodes),
    "policy": ("pw_policy", _policy),
    "service": ("pw_services", _services),
    "settings": ("pw_settings", _settings),
    "usage": ("pw_usage", _usage),
}
"""Name for people -> the map's own name, reader."""


def read_rows(maps: NodeMaps, name: str, limit: int) -> tuple[list[Row], bool]:
    """Give at most `limit` rows and whether there are more; NotFound for a name that is none."""
    if name not in _READERS:
        raise NotFound(
            f"read map {name!r}: there is no such map", hint=f"one of {', '.join(_READERS)}"
        )
    # One row more than asked for tells whether there are more, without a walk of the whole map.
    rows = list(islice(_READERS[name][1](maps), limit + 1))
    return rows[:limit], len(rows) > limit


def describe_maps(maps: NodeMaps, fills: Mapping[str, tuple[int, int]] | None = None) -> list[Row]:
    """Give name, kind and fill of every map that can be read.

    `fills`: by name (rows, capacity) of maps whose writer knows them; the others' rows are counted.
    """
    known = fills or {}
    return [
        {
            "name": name,
            "type": bpf.MapType(own_map.info.type).name.lower().replace("_", "-"),
            "max_entries": capacity,
            "entries": entries,
        }
        for name, (own_name, _) in _READERS.items()
        for own_map in [getattr(maps, own_name)]
        for entries, capacity in [known.get(name) or _measure(maps, own_map)]
    ]


def _measure(maps: NodeMaps, own_map: bpf.Map) -> tuple[int, int]:
    """Give how many rows a map has, and how many it may have."""
    if own_map is maps.pw_conntrack:
        # A map of maps shows its slots, not the rows in them.
        return conntrack_maps.count_conntrack(maps), conntrack_maps.conntrack_capacity(maps)
    return len(list(own_map.keys())), own_map.info.max_entries


def _plain(fields: Mapping[str, Any], kind: str = "") -> Row:
    return {name: _plain_value(name, value, kind) for name, value in fields.items()}


def _plain_value(name: str, value: Any, kind: str) -> Any:
    if name == "flags" and kind in _FLAGS:
        return flag_names(_FLAGS[kind], value)
    if name in _NAMED:
        return _NAMED[name](value).name.lower()
    if isinstance(value, bytes):
        return value.hex(":") if name in _MAC_FIELDS else _address(value)
    return value


def _address(raw: bytes) -> str:
    if not any(raw):
        return ""
    return str(typed.from_mapped(raw) if len(raw) == 16 else ipaddress.ip_address(raw))
