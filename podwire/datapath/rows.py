"""The node's maps as documents: what `podwire bpf ... list` and the API show of them.

Called by `agent.rest` on a thread; a dump walks a map of the running datapath and may be slow.
Changes nothing. Names of fields are those of the layouts; addresses and MACs are text, numbers that
have names are named.
"""

import enum
import ipaddress
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from podwire.datapath import abi
from podwire.datapath import maps as typed
from podwire.datapath.events import hook_name, path_name, reason_name
from podwire.datapath.maps import NodeMaps
from podwire.kernel import bpf
from podwire.model.errors import NotFound

Row = dict[str, Any]

_MAC_FIELDS = frozenset({"pod_mac", "host_mac"})
_NAMED: Mapping[str, type[enum.IntEnum]] = {"path": abi.Path, "tcp_state": abi.TcpState}
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
        yield {"address": str(address), **_plain(value._asdict())}


def _ipcache(maps: NodeMaps) -> Iterator[Row]:
    for entry in typed.list_ipcache(maps):
        yield {
            "prefix": str(entry.network),
            "identity": entry.identity,
            "node": entry.node,
            "flags": _flag_names(abi.IpcacheFlags, entry.flags),
            "mtu": entry.mtu,
        }


def _conntrack(maps: NodeMaps) -> Iterator[Row]:
    for row in typed.list_conntrack(maps):
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


def _settings(maps: NodeMaps) -> Iterator[Row]:
    yield _plain(typed.read_settings(maps)._asdict())


def _usage(maps: NodeMaps) -> Iterator[Row]:
    for instance, value in typed.list_usage(maps):
        yield {"endpoint": int(instance), **_plain(value._asdict())}


_READERS: Mapping[str, tuple[str, Callable[[NodeMaps], Iterator[Row]]]] = {
    "config": ("pw_config", _config),
    "ct": ("pw_conntrack", _conntrack),
    "endpoint": ("pw_endpoints", _endpoint),
    "ipcache": ("pw_ipcache", _ipcache),
    "metrics": ("pw_metrics", _metrics),
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
    rows = list(islice(_READERS[name][1](maps), limit + 1))
    return rows[:limit], len(rows) > limit


def describe_maps(maps: NodeMaps) -> list[Row]:
    """Give name, kind and fill of every map that can be read."""
    return [
        {
            "name": name,
            "type": bpf.MapType(one.info.type).name.lower().replace("_", "-"),
            "max_entries": _capacity(maps, own_name),
            "entries": _count(maps, own_name),
        }
        for name, (own_name, _) in _READERS.items()
        for one in [getattr(maps, own_name)]
    ]


def count_conntrack(maps: NodeMaps) -> int:
    """Count the remembered flows without reading them: what the endpoints are charged with."""
    return sum(value.conntrack_entries for _, value in typed.list_usage(maps))


def conntrack_capacity(maps: NodeMaps) -> int:
    """Give how many flows fit into all shards together."""
    return sum(shard.info.max_entries for shard in typed.open_conntrack_shards(maps))


def _capacity(maps: NodeMaps, own_name: str) -> int:
    if own_name == "pw_conntrack":
        return conntrack_capacity(maps)
    found: bpf.Map = getattr(maps, own_name)
    return found.info.max_entries


def _count(maps: NodeMaps, own_name: str) -> int:
    if own_name == "pw_conntrack":
        return count_conntrack(maps)
    found: bpf.Map = getattr(maps, own_name)
    return len(list(found.keys()))


def _plain(fields: Mapping[str, Any], kind: str = "") -> Row:
    return {name: _plain_value(name, value, kind) for name, value in fields.items()}


def _plain_value(name: str, value: Any, kind: str) -> Any:
    if name == "flags" and kind in _FLAGS:
        return _flag_names(_FLAGS[kind], value)
    if name in _NAMED:
        return _NAMED[name](value).name.lower()
    if isinstance(value, bytes):
        return value.hex(":") if name in _MAC_FIELDS else _address(value)
    return value


def _address(raw: bytes) -> str:
    if not any(raw):
        return ""
    return str(typed.from_mapped(raw) if len(raw) == 16 else ipaddress.ip_address(raw))


def _flag_names(kind: type[enum.IntFlag], value: int) -> list[str]:
    return [str(flag.name).lower().replace("_", "-") for flag in kind if value & flag]
