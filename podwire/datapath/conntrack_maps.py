"""The memory of flows as typed rows: connections in their shards.

Called by `datapath.rows` and `datapath.upgrade`. Never writes a flow: that is what the programs do.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from podwire.datapath import abi
from podwire.datapath.maps import NodeMaps, from_mapped
from podwire.kernel import bpf
from podwire.model.endpoint import IPAddress
from podwire.model.errors import Bug
from podwire.model.ids import EndpointId


@dataclass(frozen=True)
class ConntrackRow:
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
        shard = bpf.open_map_by_id(int.from_bytes(raw_id, "little"))
        if shard is None:
            raise Bug("open conntrack shards: a slot was replaced meanwhile")
        yield shard


def open_conntrack_shards(maps: NodeMaps) -> Iterator[bpf.Map]:
    """Open the hashes of conntrack one after the other; each is closed before the next is given."""
    for shard in open_shards(maps):
        with shard:
            yield shard


def list_conntrack(maps: NodeMaps, instance: EndpointId | None = None) -> Iterator[ConntrackRow]:
    """Walk the remembered flows, of one endpoint or of all. Slow: reads every shard."""
    wanted = b"" if instance is None else instance.to_bytes(4, "little")
    for shard in open_conntrack_shards(maps):
        for raw_key, raw in shard.items():
            if raw_key.startswith(wanted):
                key = abi.ConntrackKey.unpack(raw_key)
                yield ConntrackRow(
                    instance=EndpointId(key.instance),
                    direction=abi.Direction(key.direction),
                    protocol=key.protocol,
                    source=from_mapped(key.saddr),
                    destination=from_mapped(key.daddr),
                    source_port=key.sport,
                    destination_port=key.dport,
                    value=abi.ConntrackValue.unpack(raw),
                )
