"""The world the packets meet: programs of the test build, their maps, endpoints, devices that exist only as numbers.

Used by the packet tests, and by others that run a program themselves. A `Rig` loads the programs once and owns their
maps; `reset` gives each test the same rows, and maps without flows; `Outcome` is what a test run came to. Devices are
pairs in a namespace of its own, made because test runs want an index that exists; nothing is attached to them here.
"""

import contextlib
import errno
import functools
import ipaddress
import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from podwire.datapath import abi
from podwire.datapath.abi import Action, ConfigFlags, Direction, DropReason, IpcacheFlags
from podwire.datapath.maps import mac_bytes, split_metrics_index, to_mapped, to_prefix_key
from podwire.datapath.policy_maps import pack_key
from podwire.kernel import bpf, netns
from podwire.kernel.bpf_object import BpfObject, MapShape
from podwire.kernel.bpf_program import Packet, Program
from podwire.kernel.bpf_ring import RingReader
from podwire.kernel.fd import Fd
from podwire.kernel.netlink import NetlinkSocket
from podwire.kernel.rtnl.link import LinkEnd, create_veth
from podwire.model.policy import PolicyEntry, PolicyKey
from tests.empty_maps import changed_rows, clear_hashes, zero_rows
from tests.packet import frames

ROOT: Final = Path(__file__).resolve().parents[2]
OBJECTS: Final = ROOT / "build" / "bpf"
PROGRAMS: Final = ("from_pod", "to_pod", "from_overlay", "to_overlay", "from_netdev", "mark_tunnel")
SHARD_ROWS: Final = 64
NEW_FLOW_ROWS: Final = 16_384
QUOTA: Final = 100
TUNNEL_PORT: Final = 8472
TUNNEL_MARK: Final = 0x12340001
NEW_FLOW_RATE: Final = 1 << 20
GATEWAY_4: Final = "169.254.1.1"
GATEWAY_6: Final = "fe80::1"
GSO_BY_FRAGMENTS: Final = 0xFFFF
FLOOD_TIMES: Final = 2 if "PODWIRE_GUEST" in os.environ else 4
"""How many times the room for new flows a flood has: an emulated machine needs milliseconds for each packet."""
FEW_ROWS: Final = {
    "pw_hits": 4096,
    "pw_nodes": 256,
    "pw_node_numbers": 1024,
    "pw_service_list": 4096,
    "pw_back_ends": 4096,
    "pw_affinity": 4096,
}
"""Rows that hashes of the rig have room for: to find one empty, each of its buckets is looked at before every test."""
MAPPED_INTO_MEMORY: Final = frozenset({"pw_stack_cells", "pw_decision", "pw_tunnel_key"})
"""Arrays that tests read and write as memory: they are asked for each packet, or so long that to read their rows takes
an emulated kernel a quarter of a second.
"""
MMAPABLE: Final = 1 << 10
"""BPF_F_MMAPABLE of linux/bpf.h. Programs reach rows of such an array as those of any other."""
NODE_ROWS: Final[Mapping[str, int]] = {}
"""As the programs declare it."""
ALLOW: Final = ConfigFlags.OPEN | ConfigFlags.HOST_ALLOWED
ZERO: Final = bytes(4)
EMPTY_SHARDS: Final = [
    (row.to_bytes(4, "little"), bytes(4)) for row in range(abi.CONNTRACK_SHARDS + 1)
]
"""Rows of pw_shard_fill where nothing is in any shard, and nothing is said of their room."""


@dataclass(frozen=True)
class Endpoint:
    """An endpoint of the rig's node, as its rows say."""

    name: str
    ifindex: int
    instance: int
    identity: int
    ipv4: str
    ipv6: str
    mtu: int = 1500
    flags: ConfigFlags = ALLOW
    revision: int = 1
    slot: int = 0

    @property
    def pod_mac(self) -> str:
        """MAC of the pod's side."""
        return f"0a:70:00:00:00:{self.instance:02x}"

    @property
    def host_mac(self) -> str:
        """MAC of the host's side, which the pod takes for its gateway's."""
        return f"0e:70:00:00:00:{self.instance:02x}"

    def address(self, version: int) -> str:
        """Give its address of a family."""
        return self.ipv4 if version == 4 else self.ipv6

    def row(self) -> abi.ConfigValue:
        """Give its row in `pw_config`."""
        return abi.ConfigValue(
            ifindex=self.ifindex,
            instance=self.instance,
            identity=self.identity,
            slot=self.slot,
            policy_revision=self.revision,
            mtu=self.mtu,
            flags=self.flags,
            default_rule_egress=900,
            default_rule_ingress=901,
            ipv6=ipaddress.IPv6Address(self.ipv6 or 0).packed,
            ipv4=ipaddress.IPv4Address(self.ipv4 or 0).packed,
            pod_mac=mac_bytes(self.pod_mac),
            host_mac=mac_bytes(self.host_mac),
        )

    def frame(self, packet: bytes, **ends: str) -> bytes:
        """Frame a packet as this pod sends it to its gateway; `source` and `destination` are MACs."""
        ethertype = frames.ETH_P_IPV6 if packet[0] >> 4 == 6 else frames.ETH_P_IP
        source, destination = ends.get("source"), ends.get("destination")
        return frames.ethernet(
            destination or self.host_mac, source or self.pod_mac, ethertype, packet
        )

    def frame_in(self, packet: bytes) -> bytes:
        """Frame a packet as the host's stack sends it to this pod."""
        return self.frame(packet, source=self.host_mac, destination=self.pod_mac)


A: Final = Endpoint("a", 1001, 11, 3001, "10.7.0.10", "fd07::10")
B: Final = Endpoint("b", 1002, 12, 3002, "10.7.0.11", "fd07::11")
SMALL: Final = Endpoint("small", 1003, 13, 3003, "10.7.0.12", "fd07::12", mtu=1400)
SHAPED: Final = Endpoint(
    "shaped", 1004, 14, 3004, "10.7.0.13", "fd07::13", flags=ALLOW | ConfigFlags.SHAPED
)
GUARD: Final = Endpoint("guard", 1005, 15, 0, "10.7.0.14", "fd07::14", flags=ConfigFlags(0))
ONLY_4: Final = Endpoint("only4", 1006, 16, 3006, "10.7.0.15", "")
ONLY_6: Final = Endpoint("only6", 1007, 17, 3007, "", "fd07::16")
ENDPOINTS: Final = (A, B, SMALL, SHAPED, GUARD, ONLY_4, ONLY_6)
OUTSIDE: Final = 1008
"""Index of a device that is not ours."""
TUNNEL: Final = 1009
"""Index of the tunnel device; rows have to name it before it is one."""

WORLD_4: Final = "198.51.100.7"
WORLD_6: Final = "2001:db8::7"
NODE_4: Final = "192.0.2.1"
NODE_6: Final = "2001:db8:1::1"
REMOTE_POD_4: Final = "10.7.5.5"
REMOTE_POD_6: Final = "fd07:5::5"
REMOTE_IDENTITY: Final = 2005
NARROW_4: Final = "10.7.6.6"
NARROW_6: Final = "fd07:6::6"
"""A destination whose path the ipcache calls narrower than the pod's device."""
NARROW_MTU: Final = 1300
NOBODY_4: Final = "10.7.0.99"
NOBODY_6: Final = "fd07::99"
"""Addresses of an own block that no endpoint has."""

IPCACHE: Final[Mapping[str, abi.IpcacheValue]] = {
    "10.7.0.0/16": abi.IpcacheValue(3, 0, 0, 0),
    "fd07::/16": abi.IpcacheValue(3, 0, 0, 0),
    "10.7.0.0/24": abi.IpcacheValue(3, 0, IpcacheFlags.LOCAL, 0),
    "fd07::/64": abi.IpcacheValue(3, 0, IpcacheFlags.LOCAL, 0),
    "10.7.5.0/24": abi.IpcacheValue(REMOTE_IDENTITY, 2, 0, 0),
    "fd07:5::/64": abi.IpcacheValue(REMOTE_IDENTITY, 2, 0, 0),
    "10.7.6.0/24": abi.IpcacheValue(2006, 3, 0, NARROW_MTU),
    "fd07:6::/64": abi.IpcacheValue(2006, 3, 0, NARROW_MTU),
    "192.0.2.1/32": abi.IpcacheValue(1, 1, IpcacheFlags.NODE_ADDRESS, 0),
    "2001:db8:1::1/128": abi.IpcacheValue(1, 1, IpcacheFlags.NODE_ADDRESS, 0),
    "192.0.2.2/32": abi.IpcacheValue(6, 2, IpcacheFlags.NODE_ADDRESS, 0),
}


@dataclass(frozen=True)
class Outcome:
    """What a program did with one packet."""

    action: Action
    reason: DropReason
    path: abi.Path
    data: bytes
    mark: int
    retval: int
    decision: abi.Decision = field(repr=False)


@dataclass
class Rig:
    """Programs, maps and devices. `maps` are those of the programs; `shards` what pw_conntrack holds."""

    namespace: Fd
    programs: Mapping[str, Program]
    maps: Mapping[str, bpf.Map]
    shards: list[bpf.Map]
    new_flows: bpf.Map
    events: RingReader
    decision: mmap.mmap
    """Memory of pw_decision; of nothing where programs are as they are shipped."""
    tunnel_key: mmap.mmap
    """Memory of pw_tunnel_key."""
    visitor: int = 0
    """The thread that is in `namespace` anyway."""
    counts: bool = False
    """Whether this test has asked for metrics that begin with it."""
    has_pieces: bool = True
    """Whether programs may remember pieces of datagrams. To look at each of their sets takes as long as all else that
    `reset` does.
    """

    @contextmanager
    def visited(self) -> Iterator["Rig"]:
        """Keep the calling thread in the devices' namespace until the block ends: to go there and back for each packet
        costs more than the packet.
        """
        with netns.namespace(self.namespace.fileno()):
            self.visitor = threading.get_ident()
            try:
                yield self
            finally:
                self.visitor = 0

    def _visit(self) -> contextlib.AbstractContextManager[None]:
        if self.visitor == threading.get_ident():
            return contextlib.nullcontext()
        return netns.namespace(self.namespace.fileno())

    def reset(self) -> None:
        """Put every row back and forget every flow."""
        self.write_settings()
        for name in (
            "pw_config",
            "pw_endpoints",
            "pw_usage",
            "pw_ipcache",
            "pw_policy",
            "pw_cidrs",
            "pw_hits",
            "pw_nodes",
            "pw_node_numbers",
            "pw_services",
            "pw_service_list",
            "pw_back_ends",
            "pw_affinity",
        ):
            self.maps[name].clear()
        self.counts = False
        self.maps["pw_shard_fill"].update_batch(EMPTY_SHARDS)
        self.maps["pw_strangers"].update(ZERO, bytes(abi.USAGE_VALUE_BYTES))
        clear_hashes((*self.shards, self.new_flows), abi.CONNTRACK_KEY_BYTES)
        self.forget_fragments()
        for name, rows in _first_rows().items():
            self.maps[name].update_batch(rows)
        while self.events.take()[0]:
            pass

    def forget_metrics(self) -> None:
        """Let `metrics` count from now on. Few tests ask, and to empty the map takes as long as the rest of a reset."""
        zero_rows(self.maps["pw_metrics"])
        self.counts = True

    def forget_stack_ports(self) -> None:
        """Forget by which ports pods have asked through the stack."""
        table = self.maps["pw_stack_cells"]
        size_bytes = table.info.max_entries * table.info.value_size
        with mmap.mmap(table.fd, size_bytes) as cells:
            cells.write(bytes(size_bytes))

    def forget_fragments(self) -> None:
        """Empty every set that has something in it."""
        if self.has_pieces:
            zero_rows(self.maps["pw_fragments"])
        self.has_pieces = False

    def write_settings(
        self,
        *,
        quota: int = QUOTA,
        tunnel_port: int = TUNNEL_PORT,
        tunnel_ifindex: int = 0,
        native_ifindex: int = 0,
        new_flow_rate: int = NEW_FLOW_RATE,
        flags: int = 0,
    ) -> None:
        """Write the node's knobs."""
        self.maps["pw_settings"].update(
            ZERO,
            abi.Settings(
                conntrack_quota=quota,
                tunnel_port=tunnel_port,
                flags=flags,
                hash_seed=0x5EED,
                tunnel_ifindex=tunnel_ifindex,
                native_ifindex=native_ifindex,
                tunnel_mark=TUNNEL_MARK,
                new_flow_rate=new_flow_rate,
            ).pack(),
        )

    def write(self, endpoint: Endpoint) -> Endpoint:
        """Write an endpoint's row as the agent does, and its usage row if there is none."""
        key = endpoint.instance.to_bytes(4, "little")
        if self.maps["pw_usage"].lookup(key) is None:
            self.maps["pw_usage"].update(key, bytes(abi.USAGE_VALUE_BYTES))
        index, row = config_row(endpoint)
        self.maps["pw_config"].update(index, row, bpf.Update.LOCK)
        return endpoint

    def publish(self, endpoint: Endpoint) -> None:
        """Write the rows of an endpoint's addresses."""
        for key, value in address_rows(endpoint):
            self.maps["pw_endpoints"].update(key, value)

    def change(self, endpoint: Endpoint, **changes: object) -> Endpoint:
        """Rewrite an endpoint's row with some fields changed."""
        return self.write(replace(endpoint, **changes))  # type: ignore[arg-type]

    def rule(self, slot: int, key: PolicyKey, entry: PolicyEntry, flags: int = 0) -> None:
        """Write one row of a slot; `flags`: abi.PolicyFlags, which the agent does not set."""
        raw_key = pack_key(slot, key)
        value = abi.PolicyValue(entry.precedence, entry.rule, entry.verdict, flags, raw_key[0])
        self.maps["pw_policy"].update(raw_key, value.pack())

    def cidr(self, network: str, identity: int) -> None:
        """Write the local identity of a prefix."""
        key = to_prefix_key(ipaddress.ip_network(network))
        self.maps["pw_cidrs"].update(key, identity.to_bytes(4, "little"))

    def hits(self) -> dict[int, tuple[int, int]]:
        """Give (judgements, bytes) of each rule that has decided."""
        table = self.maps["pw_hits"]
        found = {}
        for key, raw in table.items():
            counters = [abi.Counter.unpack(value) for value in table.split_cpus(raw)]
            found[int.from_bytes(key, "little")] = (
                sum(counter.packets for counter in counters),
                sum(counter.bytes_ for counter in counters),
            )
        return found

    def run(
        self,
        hook: str,
        ifindex: int,
        frame: bytes,
        *,
        ingress_ifindex: int = 0,
        mark: int = 0,
        gso_size: int = 0,
        gso_segs: int = 0,
    ) -> Outcome:
        """Run a program over one frame at a device."""
        self.has_pieces = self.has_pieces or may_be_piece(frame)
        packet = Packet(
            frame,
            ifindex=ifindex,
            ingress_ifindex=ingress_ifindex,
            mark=mark,
            gso_size=gso_size,
            gso_segs=gso_segs,
        )
        self.decision[: abi.DECISION_BYTES] = bytes(abi.DECISION_BYTES)
        with self._visit():
            result = self.programs[hook].run(packet)
        decision = abi.Decision.unpack(self.decision[: abi.DECISION_BYTES])
        return Outcome(
            Action(decision.action),
            DropReason(decision.reason),
            abi.Path(decision.path),
            result.data,
            result.mark,
            result.retval,
            decision,
        )

    def sent(self, endpoint: Endpoint, packet: bytes, **fields: int) -> Outcome:
        """Let an endpoint send a packet to its gateway."""
        return self.run("from_pod", endpoint.ifindex, endpoint.frame(packet), **fields)

    def flood(self, endpoint: Endpoint, packet: bytes, count: int) -> None:
        """Let an endpoint send a packet so often, as fast as the kernel can; it must not be changed on its way."""
        frame = endpoint.frame(packet)
        self.has_pieces = self.has_pieces or may_be_piece(frame)
        with self._visit():
            self.programs["from_pod"].run(Packet(frame, ifindex=endpoint.ifindex), repeat=count)

    def pour(
        self, hook: str, ifindex: int, packets: Iterable[bytes], *, ingress_ifindex: int = 0
    ) -> None:
        """Run a program over many frames at a device, and look at no outcome."""
        program = self.programs[hook]
        with self._visit():
            for frame in packets:
                self.has_pieces = self.has_pieces or may_be_piece(frame)
                program.run(Packet(frame, ifindex=ifindex, ingress_ifindex=ingress_ifindex))

    def received(self, endpoint: Endpoint, packet: bytes, **fields: int) -> Outcome:
        """Let the host's stack send a packet to an endpoint."""
        return self.run("to_pod", endpoint.ifindex, endpoint.frame_in(packet), **fields)

    def entries(
        self, endpoint: Endpoint | None = None
    ) -> dict[abi.ConntrackKey, abi.ConntrackValue]:
        """Give the remembered flows, of all endpoints or of one; rows that their flow has left are none."""
        return {
            key: value
            for shard in (self.new_flows, *self.shards)
            for raw_key, raw in shard.items()
            for key, value in [(abi.ConntrackKey.unpack(raw_key), abi.ConntrackValue.unpack(raw))]
            if endpoint is None or key.instance == endpoint.instance
            if not value.flags & abi.ConntrackFlags.LEFT
        }

    def entry(self, endpoint: Endpoint) -> tuple[abi.ConntrackKey, abi.ConntrackValue]:
        """Give the only flow of an endpoint."""
        [found] = self.entries(endpoint).items()
        return found

    @contextmanager
    def smaller_shards(self, rows: int) -> Iterator["Rig"]:
        """Let the programs keep connections in shards of so many rows, until the block ends."""
        with ExitStack() as stack:
            stack.callback(put_shards, self.maps["pw_conntrack"], self.shards)
            self.has_pieces = True  # what the other rig sends, this one does not see
            yield replace(self, shards=make_shards(self.maps["pw_conntrack"], rows, stack))

    def tell_shard_room(self, rows: int) -> None:
        """Tell the programs how many rows a shard has room for, so that they shrink quotas; `reset` takes it back."""
        behind = abi.CONNTRACK_SHARDS.to_bytes(4, "little")
        self.maps["pw_shard_fill"].update(behind, rows.to_bytes(4, "little"))

    def shard_fill(self) -> list[int]:
        """Give how many rows each shard has, by what the programs have counted."""
        rows = sorted(self.maps["pw_shard_fill"].items())
        return [int.from_bytes(raw, "little") for _, raw in rows[: abi.CONNTRACK_SHARDS]]

    def change_entry(self, key: abi.ConntrackKey, **changes: int) -> None:
        """Rewrite some fields of a remembered flow, in whichever shard it is."""
        for shard in (*self.shards, self.new_flows):
            found = shard.lookup(key.pack())
            if found is not None:
                value = abi.ConntrackValue.unpack(found)
                value = abi.ConntrackValue(**{**value._asdict(), **changes})
                shard.update(key.pack(), value.pack(), bpf.Update.EXIST)
                return
        raise KeyError(key)

    def forget(self, endpoint: Endpoint) -> None:
        """Lose every flow of an endpoint, as after a crash of the machine's memory of them."""
        for key in self.entries(endpoint):
            for shard in (*self.shards, self.new_flows):
                shard.delete(key.pack())
        usage = bytes(abi.USAGE_VALUE_BYTES)
        self.maps["pw_usage"].update(endpoint.instance.to_bytes(4, "little"), usage)

    def usage(self, endpoint: Endpoint) -> int:
        """Give how many connections an endpoint is charged with."""
        return sum(self.usage_row(endpoint).connections)

    def usage_row(self, endpoint: Endpoint) -> abi.UsageValue:
        """Give what an endpoint uses."""
        raw = self.maps["pw_usage"].lookup(endpoint.instance.to_bytes(4, "little"))
        assert raw is not None
        return abi.UsageValue.unpack(raw)

    def metrics(self) -> dict[tuple[abi.Hook, DropReason, abi.Path], tuple[int, int]]:
        """Give (packets, bytes) of each outcome since `forget_metrics`, summed over the CPUs."""
        assert self.counts, "call forget_metrics first"
        table = self.maps["pw_metrics"]
        found = {}
        for raw, values in changed_rows(table):
            hook, reason, path = split_metrics_index(int.from_bytes(raw, "little"))
            counters = [abi.Counter.unpack(value) for value in table.split_cpus(values)]
            where = abi.Hook(hook), DropReason(reason), abi.Path(path)
            found[where] = (
                sum(counter.packets for counter in counters),
                sum(counter.bytes_ for counter in counters),
            )
        return found

    def take_events(self) -> list[abi.Event]:
        """Give the events since the last call."""
        taken: list[abi.Event] = []
        while True:
            data, _ = self.events.take()
            if not data:
                return taken
            taken += list(abi.Event.unpack_all(data))


def may_be_piece(frame: bytes) -> bool:
    """Tell whether a frame may be a piece of a datagram; what is not plainly something else counts as one."""
    ethertype = int.from_bytes(frame[12:14], "big")
    if ethertype == frames.ETH_P_IP:
        return bool(int.from_bytes(frame[20:22], "big") & _PIECE_BITS)
    return ethertype != frames.ETH_P_IPV6 or frame[20:21] not in _WHOLE_NEXT_HEADERS


_PIECE_BITS: Final = 0x3FFF
"""More fragments, and the offset (RFC 791, 3.1)."""
_WHOLE_NEXT_HEADERS: Final = frozenset(bytes([kind]) for kind in (6, 17, 58, 132))
"""TCP, UDP, ICMPv6, SCTP: no fragment header comes behind (RFC 8200, 4.1)."""


@functools.lru_cache(maxsize=1024)
def config_row(endpoint: Endpoint) -> tuple[bytes, bytes]:
    """Make an endpoint's row in `pw_config`."""
    return endpoint.ifindex.to_bytes(4, "little"), endpoint.row().pack()


def address_rows(endpoint: Endpoint) -> list[tuple[bytes, bytes]]:
    """Make the rows of an endpoint's addresses in `pw_endpoints`."""
    macs = mac_bytes(endpoint.pod_mac), mac_bytes(endpoint.host_mac)
    value = abi.EndpointValue(endpoint.ifindex, endpoint.instance, *macs, 0).pack()
    texts = filter(None, (endpoint.ipv4, endpoint.ipv6))
    return [(to_mapped(ipaddress.ip_address(text)), value) for text in texts]


@functools.cache
def _first_rows() -> Mapping[str, list[tuple[bytes, bytes]]]:
    """Make what each test finds: by map, its rows."""
    usage = bytes(abi.USAGE_VALUE_BYTES)
    return {
        "pw_ipcache": [
            (to_prefix_key(ipaddress.ip_network(network)), value.pack())
            for network, value in IPCACHE.items()
        ],
        "pw_usage": [(endpoint.instance.to_bytes(4, "little"), usage) for endpoint in ENDPOINTS],
        "pw_config": [config_row(endpoint) for endpoint in ENDPOINTS],
        "pw_endpoints": [row for endpoint in ENDPOINTS for row in address_rows(endpoint)],
    }


def make_shards(outer: bpf.Map, rows: int, stack: ExitStack) -> list[bpf.Map]:
    """Fill every slot of pw_conntrack with a hash of its own, as the loader has to."""
    shards = []
    for _ in range(abi.CONNTRACK_SHARDS):
        shard = bpf.create_map(
            bpf.MapType.HASH,
            "pw_ct_shard",
            key_size=abi.CONNTRACK_KEY_BYTES,
            value_size=abi.CONNTRACK_VALUE_BYTES,
            max_entries=rows,
            flags=bpf.CreateFlags.NO_PREALLOC,
        )
        shards.append(stack.enter_context(shard))
    put_shards(outer, shards)
    return shards


def put_shards(outer: bpf.Map, shards: Sequence[bpf.Map]) -> None:
    """Let the programs keep connections in these shards."""
    # In one call: the kernel waits for who reads the old ones once for each call (6.12) or row (6.1).
    outer.update_batch(
        [
            (number.to_bytes(4, "little"), shard.fd.to_bytes(4, "little"))
            for number, shard in enumerate(shards)
        ]
    )


def make_new_flows(outer: bpf.Map, rows: int, stack: ExitStack) -> bpf.Map:
    """Give pw_new_flows its hash, as the loader has to."""
    made = bpf.create_map(
        bpf.MapType.LRU_HASH,
        "pw_new",
        key_size=abi.CONNTRACK_KEY_BYTES,
        value_size=abi.CONNTRACK_VALUE_BYTES,
        max_entries=rows,
    )
    stack.enter_context(made)
    outer.update_fd(ZERO, made.fd)
    return made


def load_objects(
    names: tuple[str, ...],
    stack: ExitStack,
    *,
    build: str = ".test",
    constants: Mapping[str, int] | None = None,
    rows: Mapping[str, int] = NODE_ROWS,
) -> tuple[dict[str, Program], dict[str, bpf.Map]]:
    """Load objects that share their maps; `build` "" = as they are shipped. `stack` gives everything back.

    `rows`: for how many rows maps have room that are not to be as large as a node's.
    """
    programs: dict[str, Program] = {}
    maps: dict[str, bpf.Map] = {}
    for name in names:
        path = OBJECTS / f"{name}{build}.bpf.o"
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, "run `make -C bpf` first", str(path))
        with BpfObject(path.read_bytes(), name) as opened:
            for made in (rows.keys() | MAPPED_INTO_MEMORY) & set(opened.map_names) - set(maps):
                maps[made] = stack.enter_context(make_like(opened.shape(made), rows.get(made)))
            for shared in set(opened.map_names) & set(maps):
                opened.use_map(shared, maps[shared])
            opened.set_constants(constants or {})
            opened.load()
            for own in set(opened.map_names) - set(maps):
                maps[own] = stack.enter_context(opened.take_map(own))
            for program in opened.program_names:
                programs[program] = stack.enter_context(opened.take_program(program))
    return programs, maps


def make_like(shape: MapShape, rows: int | None) -> bpf.Map:
    """Make a map of this shape, with room for so many rows where that is said."""
    flags = shape.flags | (MMAPABLE if shape.name in MAPPED_INTO_MEMORY else 0)
    return bpf.create_map(
        bpf.MapType(shape.type),
        shape.name,
        key_size=shape.key_size,
        value_size=shape.value_size,
        max_entries=rows or shape.max_entries,
        flags=bpf.CreateFlags(flags),
    )


def make_devices(namespace: Fd) -> None:
    """Make a pair for every index that the tests speak of; both ends stay in the rig's namespace."""
    ends = [(endpoint.ifindex, endpoint.host_mac) for endpoint in ENDPOINTS]
    ends += [(OUTSIDE, "0e:70:00:00:00:ff"), (TUNNEL, "0e:71:00:00:00:01")]
    with NetlinkSocket.open_in(namespace.fileno()) as netlink:
        netlink.execute(
            [
                create_veth(
                    LinkEnd(f"pwt{index}", index, host_mac, 9000), LinkEnd(f"pwx{index}"), None
                )
                for index, host_mac in ends
            ]
        )


@contextmanager
def open_rig(
    *,
    build: str = ".test",
    shard_rows: int = SHARD_ROWS,
    new_flow_rows: int = NEW_FLOW_ROWS,
    constants: Mapping[str, int] | None = None,
    rows: Mapping[str, int] = NODE_ROWS,
) -> Iterator[Rig]:
    """Load the programs and make the devices; everything goes at the end. `rows` as in `load_objects`."""
    with ExitStack() as stack:
        namespace = stack.enter_context(netns.open_new())
        make_devices(namespace)
        programs, maps = load_objects(PROGRAMS, stack, build=build, constants=constants, rows=rows)
        shards = make_shards(maps["pw_conntrack"], shard_rows, stack)
        events = stack.enter_context(RingReader(maps["pw_events"], record_bytes=abi.EVENT_BYTES))
        new_flows = make_new_flows(maps["pw_new_flows"], new_flow_rows, stack)
        decision, tunnel_key = (
            stack.enter_context(mmap.mmap(maps[name].fd if name in maps else -1, mmap.PAGESIZE))
            for name in ("pw_decision", "pw_tunnel_key")
        )
        yield Rig(namespace, programs, maps, shards, new_flows, events, decision, tunnel_key)


def egress(instance: int) -> tuple[int, Direction]:
    """Name the side of an entry that its endpoint began."""
    return instance, Direction.EGRESS
