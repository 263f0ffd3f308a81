"""Rows and numbers shared with the programs. Made by scripts/generate-abi: do not edit.

Used by `datapath` only. Sizes and places are those of bpf/include/podwire/abi.h, asked of the
compiler. `pack` writes padding and the spin lock as zero, `unpack` leaves them out; fields named
`_be` in C are host-order integers here, under the name without the suffix.
"""

import enum
import struct
from collections.abc import Iterator
from socket import htons, ntohs
from typing import Any, Final, NamedTuple, Self

ABI_VERSION: Final = 3
ABI_OLDEST_READER: Final = 1
CONNTRACK_SHARDS: Final = 64
SPARE_PART: Final = 4
MARK_JUDGED: Final = 1886846977
MARK_POD_PIECE: Final = 1886846978
MARK_FOREIGN_BITS: Final = 49152
CIDR_WORLD_BIT: Final = 33554432
IDENTITY_FIXED_FIRST: Final = 256
SLOT_OF_MEMBER: Final = 2147483648
AFFINITY_PLACES: Final = 1024
OPENER_BUCKETS: Final = 32
BRIEF_PART: Final = 4
METRICS_HOOKS: Final = 6
METRICS_REASONS: Final = 48
METRICS_PATHS: Final = 5


class Direction(enum.IntEnum):
    """enum pw_direction"""

    EGRESS = 0
    INGRESS = 1


class Hook(enum.IntEnum):
    """enum pw_hook"""

    FROM_POD = 0
    TO_POD = 1
    FROM_OVERLAY = 2
    TO_OVERLAY = 3
    FROM_NETDEV = 4
    TO_NETDEV = 5


class Path(enum.IntEnum):
    """enum pw_path"""

    NONE = 0
    LOCAL = 1
    STACK = 2
    TUNNEL = 3
    NATIVE = 4


class Identity(enum.IntEnum):
    """enum pw_identity"""

    UNKNOWN = 0
    HOST = 1
    WORLD = 2
    UNMANAGED = 3
    HEALTH = 4
    INIT = 5
    REMOTE_NODE = 6
    SELF = 4294967295


class DropReason(enum.IntEnum):
    """enum pw_drop_reason"""

    NONE = 0
    NO_ENDPOINT = 1
    TRUNCATED = 2
    ETHERTYPE = 3
    SOURCE_MAC = 4
    SOURCE_ADDRESS = 5
    DESTINATION_MAC = 6
    ARP = 7
    NEIGHBOUR = 8
    GATEWAY = 9
    QUIET = 10
    HEADER = 11
    PROTOCOL = 12
    FRAGMENT = 13
    POLICY = 14
    CONNTRACK_FULL = 15
    CONNTRACK_QUOTA = 16
    MTU = 17
    TTL = 18
    NO_POD = 19
    TUNNEL_PORT = 20
    INTERNAL = 21
    DESTINATION = 22
    TUNNEL_SOURCE = 23
    TUNNEL_IDENTITY = 24
    TUNNEL_INNER = 25
    NO_NODE = 26
    REDIRECT = 27
    NO_BACK_END = 28
    NO_SERVICE_PORT = 29
    NOT_ENCRYPTED = 30


DROP_REASONS: Final = 31


class EventKind(enum.IntEnum):
    """enum pw_event_kind"""

    DROP = 1
    TRACE = 2
    POLICY = 3


class ConfigFlags(enum.IntFlag):
    """enum pw_config_flags"""

    OPEN = 1
    DENY_EGRESS = 2
    DENY_INGRESS = 4
    SHAPED = 8
    AUDIT = 16
    HOST_ALLOWED = 32
    CIDR_EGRESS = 64
    CIDR_INGRESS = 128
    TRACE = 256


class IpcacheFlags(enum.IntFlag):
    """enum pw_ipcache_flags"""

    TUNNEL = 1
    NATIVE = 2
    LOCAL = 4
    NODE_ADDRESS = 8
    DIRECT = 16


class NodeFlags(enum.IntFlag):
    """enum pw_node_flags"""

    CLASSIC = 1
    ENCRYPTED = 2


class TcpState(enum.IntEnum):
    """enum pw_tcp_state"""

    NONE = 0
    OPENING = 1
    ANSWERED = 2
    ESTABLISHED = 3
    HALF_CLOSED = 4
    CLOSED = 5


class ConntrackFlags(enum.IntFlag):
    """enum pw_conntrack_flags"""

    REPLIED = 1
    FIN_ORIGINAL = 2
    FIN_REPLY = 4
    PICKED_UP = 8
    EXPIRED = 16
    TRANSLATED = 32
    NEW = 64
    LEFT = 128
    CONNECTION = 256
    UNPROTECTED = 512


class ConntrackKind(enum.IntEnum):
    """enum pw_conntrack_kind"""

    PLAIN = 0
    SERVICE = 1
    OF_BACK_END = 2
    OF_ITSELF = 3


class Charge(enum.IntEnum):
    """enum pw_charge"""

    NONE = 0
    CONNECTION = 1
    BRIEF = 2


class PolicyVerdict(enum.IntEnum):
    """enum pw_policy_verdict"""

    ALLOW = 1
    DENY = 2


class PolicyFlags(enum.IntFlag):
    """enum pw_policy_flags"""

    FINAL = 1
    AUDIT = 2


class Action(enum.IntEnum):
    """enum pw_action"""

    DROP = 0
    STACK = 1
    PEER = 2
    EGRESS = 3
    ANSWER = 4
    TUNNEL = 5
    NATIVE = 6


class SettingsFlags(enum.IntFlag):
    """enum pw_settings_flags"""

    SERVICES = 1
    UNATTENDED = 2
    MOVING = 4


_SETTINGS: Final = struct.Struct("=IIIIIIII")


class Settings(NamedTuple):
    """struct pw_settings"""

    conntrack_quota: int
    tunnel_port: int
    flags: int
    hash_seed: int
    tunnel_ifindex: int
    native_ifindex: int
    tunnel_mark: int
    new_flow_rate: int

    def pack(self) -> bytes:
        """Give the row's bytes."""
        return _SETTINGS.pack(
            self.conntrack_quota,
            self.tunnel_port,
            self.flags,
            self.hash_seed,
            self.tunnel_ifindex,
            self.native_ifindex,
            self.tunnel_mark,
            self.new_flow_rate,
        )

    @classmethod
    def unpack(cls, row: bytes) -> Self:
        """Read the row's bytes."""
        return cls(*_SETTINGS.unpack(row))


SETTINGS_BYTES: Final = _SETTINGS.size


_ENDPOINT_KEY: Final = struct.Struct("=16s")


class EndpointKey(NamedTuple):
    """struct pw_endpoint_key"""

    addr: bytes

    def pack(self) -> bytes:
        """Give the row's bytes."""
        return _ENDPOINT_KEY.pack(self.addr)

    @classmethod
    def unpack(cls, row: bytes) -> Self:
        """Read the row's bytes."""
        return cls(*_ENDPOINT_KEY.unpack(row))


ENDPOINT_KEY_BYTES: Final = _ENDPOINT_KEY.size


_ENDPOINT_VALUE: Final = struct.Struct("=II6s6sI")


class EndpointValue(NamedTuple):
    """struct pw_endpoint_value"""

    ifindex: int
    instance: int
    pod_mac: bytes
    host_mac: bytes
    flags: int

    def pack(self) -> bytes:
        """Give the row's bytes."""
        return _ENDPOINT_VALUE.pack(
            self.ifindex, self.instance, self.pod_mac, self.host_mac, self.flags
        )

    @classmethod
    def unpack(cls, row: bytes) -> Self:
        """Read the row's bytes."""
        return cls(*_ENDPOINT_VALUE.unpack(row))


ENDPOINT_VALUE_BYTES: Final = _ENDPOINT_VALUE.size


_CONFIG_VALUE: Final = struct.Struct("=4xIIIIIIIII16s4s6s6s")


class ConfigValue(NamedTuple):
    """struct pw_config_value"""

    ifindex: int
    instance: int
    identity: int
    slot: int
    policy_revision: int
    mtu: int
    flags: int
    default_rule_egress: int
    default_rule_ingress: int
    ipv6: bytes
    ipv4: bytes
    pod_mac: bytes
    host_mac: bytes

    def pack(self) -> bytes:
        """Give the row's bytes."""
        return _CONFIG_VALUE.pack(
            self.ifindex,
            self.instance,
            self.identity,
            self.slot,
            self.policy_revision,
            self.mtu,
            self.flags,
            self.default_rule_egress,
            self.default_rule_ingress,
            self.ipv6,
            self.ipv4,
            self.pod_mac,
            self.host_mac,
        )

    @classmethod
    def unpack(cls, row: bytes) -> Self:
        """Read the row's bytes."""
        return cls(*_CONFIG_VALUE.unpack(row))


CONFIG_VALUE_BYTES: Final = _CONFIG_VALUE.size


_PREFIX_KEY: Final = struct.Struct("=I16s")


class PrefixKey(NamedTuple):
    """struct pw_prefix_key"""

    prefix_bits: int
    addr: bytes

    def pack(self) -> bytes:
        """Give the row's bytes."""
        return _PREFIX_KEY.pack(self.prefix_bits, self.addr)

    @classmethod
    def unpack(cls, row: bytes) -> Self:
        """Read the row's bytes."""
        return cls(*_PREFIX_KEY.unpack(row))


PREFIX_KEY_BYTES: Final = _PREFIX_KEY.size


_POLICY_KEY: Final = struct.Struct("=IIIBBH")


class PolicyKey(NamedTuple):
    """struct pw_policy_key"""

    prefix_bits: int
    slot: int
    identity: int
    direction: int
    protocol: int
    port: int

    def pack(self) -> bytes:
        """Give the row's bytes."""
        return _POLICY_KEY.pack(
            self.prefix_bits,
            self.slot,
            self.identity,
            self.direction,
            self.protocol,
            htons(self.port),
        )

    @classmethod
    def unpack(cls, row: bytes) -> Self:
        """Read the row's bytes."""
        return cls._from_values(_POLICY_KEY.unpack(row))

    @classmethod
    def _from_values(cls, values: tuple[Any, ...]) -> Self:
        return cls._make(
            (
                *values[0:5],
                ntohs(values[5]),
            )
        )


POLICY_KEY_BYTES: Final = _POLICY_KEY.size


_POLICY_VALUE: Final = struct.Struct("=IIBBB5x")


class PolicyValue(NamedTuple):
    """struct pw_policy_value"""

    precedence: int
    rule: int
    verdict: int
    flags: int
    prefix_bits: int

    def pack(self) -> bytes:
        """Give the row's bytes."""
        return _POLICY_VALUE.pack(
            self.precedence, self.rule, self.verdict, self.flags, self.prefix_bits
        )

    @classmethod
    def unpack(cls, row: bytes) -> Self:
        """Read the row's bytes."""
        return cls(*_POLICY_VALUE.unpack(row))


POLICY_VALUE_BYTES: Final = _POLICY_VALUE.size


_IPCACHE_VALUE: Final = struct.Struct("=IIII")


class IpcacheValue(NamedTuple):
    """struct pw_ipcache_value"""

    identity: int
    node: int
    flags: int
    mtu: int

    def pack(self) -> bytes:
        """Give the row's bytes."""
        return _IPCACHE_VALUE.pack(self.identity, self.node, self.flags, self.mtu)

    @classmethod
    def unpack(cls, row: bytes) -> Self:
        """Read the row's bytes."""
        return cls(*_IPCACHE_VALUE.unpack(row))


IPCACHE_VALUE_BYTES: Final = _IPCACHE_VALUE.size


_NODE_VALUE: Final = struct.Struct("=16sII6s2x16s4s")


class NodeValue(NamedTuple):
    """struct pw_node_value"""

    addr: bytes
    mtu: int
    flags: int
    mac: bytes
    hop_ipv6: bytes
    hop_ipv4: bytes

    def pack(self) -> bytes:
        """Give the row's bytes."""
        return _NODE_VALUE.pack(
            self.addr, self.mtu, self.flags, self.mac, self.hop_ipv6, self.hop_ipv4
        )

    @classmethod
    def unpack(cls, row: bytes) -> Self:
        """Read the row's bytes."""
        return cls(*_NODE_VALUE.unpack(row))


NODE_VALUE_BYTES: Final = _NODE_VALUE.size


_CONNTRACK_KEY: Final = struct.Struct("=IBBH16s16sHH")


class ConntrackKey(NamedTuple):
    """struct pw_conntrack_key"""

    instance: int
    direction: int
    protocol: int
    beside: int
    saddr: bytes
    daddr: bytes
    sport: int
    dport: int

    def pack(self) -> bytes:
        """Give the row's bytes."""
        return _CONNTRACK_KEY.pack(
            self.instance,
            self.direction,
            self.protocol,
            self.beside,
            self.saddr,
            self.daddr,
            htons(self.sport),
            htons(self.dport),
        )

    @classmethod
    def unpack(cls, row: bytes) -> Self:
        """Read the row's bytes."""
        return cls._from_values(_CONNTRACK_KEY.unpack(row))

    @classmethod
    def _from_values(cls, values: tuple[Any, ...]) -> Self:
        return cls._make(
            (
                *values[0:6],
                ntohs(values[6]),
                ntohs(values[7]),
            )
        )


CONNTRACK_KEY_BYTES: Final = _CONNTRACK_KEY.size


_CONNTRACK_VALUE: Final = struct.Struct("=QIIII2Q2QBBHIIHH16sIIIIB3xI")


class ConntrackValue(NamedTuple):
    """struct pw_conntrack_value"""

    last_seen_ns: int
    policy_revision: int
    peer_identity: int
    lifetime_s: int
    rule: int
    packets: tuple[int, int]
    bytes_: tuple[int, int]
    path: int
    tcp_state: int
    flags: int
    node: int
    service: int
    nat_sport: int
    nat_dport: int
    nat_addr: bytes
    tag: int
    charged: int
    answer: int
    backend: int
    kind: int
    vouched: int

    def pack(self) -> bytes:
        """Give the row's bytes."""
        return _CONNTRACK_VALUE.pack(
            self.last_seen_ns,
            self.policy_revision,
            self.peer_identity,
            self.lifetime_s,
            self.rule,
            *self.packets,
            *self.bytes_,
            self.path,
            self.tcp_state,
            self.flags,
            self.node,
            self.service,
            htons(self.nat_sport),
            htons(self.nat_dport),
            self.nat_addr,
            self.tag,
            self.charged,
            self.answer,
            self.backend,
            self.kind,
            self.vouched,
        )

    @classmethod
    def unpack(cls, row: bytes) -> Self:
        """Read the row's bytes."""
        return cls._from_values(_CONNTRACK_VALUE.unpack(row))

    @classmethod
    def _from_values(cls, values: tuple[Any, ...]) -> Self:
        return cls._make(
            (
                *values[0:5],
                (values[5], values[6]),
                (values[7], values[8]),
                *values[9:14],
                ntohs(values[14]),
                ntohs(values[15]),
                *values[16:],
            )
        )


CONNTRACK_VALUE_BYTES: Final = _CONNTRACK_VALUE.size


_SERVICE_KEY: Final = struct.Struct("=16sHB1x")


class ServiceKey(NamedTuple):
    """struct pw_service_key"""

    addr: bytes
    port: int
    protocol: int

    def pack(self) -> bytes:
        """Give the row's bytes."""
        return _SERVICE_KEY.pack(self.addr, htons(self.port), self.protocol)

    @classmethod
    def unpack(cls, row: bytes) -> Self:
        """Read the row's bytes."""
        return cls._from_values(_SERVICE_KEY.unpack(row))

    @classmethod
    def _from_values(cls, values: tuple[Any, ...]) -> Self:
        return cls._make(
            (
                *values[0:1],
                ntohs(values[1]),
                *values[2:],
            )
        )


SERVICE_KEY_BYTES: Final = _SERVICE_KEY.size


_SERVICE_VALUE: Final = struct.Struct("=4xIIII16sHB1x")


class ServiceValue(NamedTuple):
    """struct pw_service_value"""

    service: int
    back_ends: int
    affinity_place: int
    affinity_s: int
    addr: bytes
    port: int
    protocol: int

    def pack(self) -> bytes:
        """Give the row's bytes."""
        return _SERVICE_VALUE.pack(
            self.service,
            self.back_ends,
            self.affinity_place,
            self.affinity_s,
            self.addr,
            htons(self.port),
            self.protocol,
        )

    @classmethod
    def unpack(cls, row: bytes) -> Self:
        """Read the row's bytes."""
        return cls._from_values(_SERVICE_VALUE.unpack(row))

    @classmethod
    def _from_values(cls, values: tuple[Any, ...]) -> Self:
        return cls._make(
            (
                *values[0:5],
                ntohs(values[5]),
                *values[6:],
            )
        )


SERVICE_VALUE_BYTES: Final = _SERVICE_VALUE.size


_SERVICE_SLOT_KEY: Final = struct.Struct("=II")


class ServiceSlotKey(NamedTuple):
    """struct pw_service_slot_key"""

    service: int
    slot: int

    def pack(self) -> bytes:
        """Give the row's bytes."""
        return _SERVICE_SLOT_KEY.pack(self.service, self.slot)

    @classmethod
    def unpack(cls, row: bytes) -> Self:
        """Read the row's bytes."""
        return cls(*_SERVICE_SLOT_KEY.unpack(row))


SERVICE_SLOT_KEY_BYTES: Final = _SERVICE_SLOT_KEY.size


_AFFINITY_KEY: Final = struct.Struct("=II")


class AffinityKey(NamedTuple):
    """struct pw_affinity_key"""

    instance: int
    place: int

    def pack(self) -> bytes:
        """Give the row's bytes."""
        return _AFFINITY_KEY.pack(self.instance, self.place)

    @classmethod
    def unpack(cls, row: bytes) -> Self:
        """Read the row's bytes."""
        return cls(*_AFFINITY_KEY.unpack(row))


AFFINITY_KEY_BYTES: Final = _AFFINITY_KEY.size


_AFFINITY_VALUE: Final = struct.Struct("=QII")


class AffinityValue(NamedTuple):
    """struct pw_affinity_value"""

    last_ns: int
    service: int
    back_end: int

    def pack(self) -> bytes:
        """Give the row's bytes."""
        return _AFFINITY_VALUE.pack(self.last_ns, self.service, self.back_end)

    @classmethod
    def unpack(cls, row: bytes) -> Self:
        """Read the row's bytes."""
        return cls(*_AFFINITY_VALUE.unpack(row))


AFFINITY_VALUE_BYTES: Final = _AFFINITY_VALUE.size


_SERVICE_SLOT_VALUE: Final = struct.Struct("=II")


class ServiceSlotValue(NamedTuple):
    """struct pw_service_slot_value"""

    service: int
    back_end: int

    def pack(self) -> bytes:
        """Give the row's bytes."""
        return _SERVICE_SLOT_VALUE.pack(self.service, self.back_end)

    @classmethod
    def unpack(cls, row: bytes) -> Self:
        """Read the row's bytes."""
        return cls(*_SERVICE_SLOT_VALUE.unpack(row))


SERVICE_SLOT_VALUE_BYTES: Final = _SERVICE_SLOT_VALUE.size


_BACK_END_VALUE: Final = struct.Struct("=II16sHB1x")


class BackEndValue(NamedTuple):
    """struct pw_back_end_value"""

    back_end: int
    flags: int
    addr: bytes
    port: int
    protocol: int

    def pack(self) -> bytes:
        """Give the row's bytes."""
        return _BACK_END_VALUE.pack(
            self.back_end, self.flags, self.addr, htons(self.port), self.protocol
        )

    @classmethod
    def unpack(cls, row: bytes) -> Self:
        """Read the row's bytes."""
        return cls._from_values(_BACK_END_VALUE.unpack(row))

    @classmethod
    def _from_values(cls, values: tuple[Any, ...]) -> Self:
        return cls._make(
            (
                *values[0:3],
                ntohs(values[3]),
                *values[4:],
            )
        )


BACK_END_VALUE_BYTES: Final = _BACK_END_VALUE.size


class Share(enum.IntEnum):
    """enum pw_share"""

    OPENED = 0
    KNOWN_OPENERS = 1
    OTHER_OPENERS = 2


_USAGE_VALUE: Final = struct.Struct("=2I3Q32Q2Q2QIHHII")


class UsageValue(NamedTuple):
    """struct pw_usage_value"""

    connections: tuple[int, int]
    shared_until_ns: tuple[int, int, int]
    opener_until_ns: tuple[
        int,
        int,
        int,
        int,
        int,
        int,
        int,
        int,
        int,
        int,
        int,
        int,
        int,
        int,
        int,
        int,
        int,
        int,
        int,
        int,
        int,
        int,
        int,
        int,
        int,
        int,
        int,
        int,
        int,
        int,
        int,
        int,
    ]
    unremembered: tuple[int, int]
    unprotected: tuple[int, int]
    event_second: int
    drops: int
    passes: int
    events_lost: int
    brief_flows: int

    def pack(self) -> bytes:
        """Give the row's bytes."""
        return _USAGE_VALUE.pack(
            *self.connections,
            *self.shared_until_ns,
            *self.opener_until_ns,
            *self.unremembered,
            *self.unprotected,
            self.event_second,
            self.drops,
            self.passes,
            self.events_lost,
            self.brief_flows,
        )

    @classmethod
    def unpack(cls, row: bytes) -> Self:
        """Read the row's bytes."""
        return cls._from_values(_USAGE_VALUE.unpack(row))

    @classmethod
    def _from_values(cls, values: tuple[Any, ...]) -> Self:
        return cls._make(
            (
                (values[0], values[1]),
                (values[2], values[3], values[4]),
                (
                    values[5],
                    values[6],
                    values[7],
                    values[8],
                    values[9],
                    values[10],
                    values[11],
                    values[12],
                    values[13],
                    values[14],
                    values[15],
                    values[16],
                    values[17],
                    values[18],
                    values[19],
                    values[20],
                    values[21],
                    values[22],
                    values[23],
                    values[24],
                    values[25],
                    values[26],
                    values[27],
                    values[28],
                    values[29],
                    values[30],
                    values[31],
                    values[32],
                    values[33],
                    values[34],
                    values[35],
                    values[36],
                ),
                (values[37], values[38]),
                (values[39], values[40]),
                *values[41:],
            )
        )


USAGE_VALUE_BYTES: Final = _USAGE_VALUE.size


_COLLECTION: Final = struct.Struct("=QQQQ")


class Collection(NamedTuple):
    """struct pw_collection"""

    last_tick_ns: int
    examined: int
    removed: int
    ticks: int

    def pack(self) -> bytes:
        """Give the row's bytes."""
        return _COLLECTION.pack(self.last_tick_ns, self.examined, self.removed, self.ticks)

    @classmethod
    def unpack(cls, row: bytes) -> Self:
        """Read the row's bytes."""
        return cls(*_COLLECTION.unpack(row))


COLLECTION_BYTES: Final = _COLLECTION.size


_COUNTER: Final = struct.Struct("=QQ")


class Counter(NamedTuple):
    """struct pw_counter"""

    packets: int
    bytes_: int

    def pack(self) -> bytes:
        """Give the row's bytes."""
        return _COUNTER.pack(self.packets, self.bytes_)

    @classmethod
    def unpack(cls, row: bytes) -> Self:
        """Read the row's bytes."""
        return cls(*_COUNTER.unpack(row))


COUNTER_BYTES: Final = _COUNTER.size


_EVENT: Final = struct.Struct("=QIIIIIIIIBBBBBBB1xH2xHH16s16s16sH6s")


class Event(NamedTuple):
    """struct pw_event"""

    time_ns: int
    instance: int
    source_identity: int
    destination_identity: int
    length_bytes: int
    rule: int
    ifindex: int
    policy_revision: int
    lost: int
    kind: int
    hook: int
    direction: int
    reason: int
    path: int
    protocol: int
    tcp_flags: int
    ethertype: int
    sport: int
    dport: int
    saddr: bytes
    daddr: bytes
    original_daddr: bytes
    original_dport: int
    source_mac: bytes

    def pack(self) -> bytes:
        """Give the row's bytes."""
        return _EVENT.pack(
            self.time_ns,
            self.instance,
            self.source_identity,
            self.destination_identity,
            self.length_bytes,
            self.rule,
            self.ifindex,
            self.policy_revision,
            self.lost,
            self.kind,
            self.hook,
            self.direction,
            self.reason,
            self.path,
            self.protocol,
            self.tcp_flags,
            self.ethertype,
            htons(self.sport),
            htons(self.dport),
            self.saddr,
            self.daddr,
            self.original_daddr,
            htons(self.original_dport),
            self.source_mac,
        )

    @classmethod
    def unpack(cls, row: bytes) -> Self:
        """Read the row's bytes."""
        return cls._from_values(_EVENT.unpack(row))

    @classmethod
    def _from_values(cls, values: tuple[Any, ...]) -> Self:
        return cls._make(
            (
                *values[0:17],
                ntohs(values[17]),
                ntohs(values[18]),
                *values[19:22],
                ntohs(values[22]),
                *values[23:],
            )
        )

    @classmethod
    def unpack_all(cls, rows: bytes) -> Iterator[Self]:
        """Read rows that stand one behind the other."""
        return map(cls._from_values, _EVENT.iter_unpack(rows))


EVENT_BYTES: Final = _EVENT.size


_DECISION: Final = struct.Struct("=IIIIIIIIIIIII")


class Decision(NamedTuple):
    """struct pw_decision"""

    action: int
    reason: int
    path: int
    target_ifindex: int
    instance: int
    direction: int
    source_identity: int
    destination_identity: int
    rule: int
    sender_rule: int
    audited: int
    node: int
    tunnel_id: int

    def pack(self) -> bytes:
        """Give the row's bytes."""
        return _DECISION.pack(
            self.action,
            self.reason,
            self.path,
            self.target_ifindex,
            self.instance,
            self.direction,
            self.source_identity,
            self.destination_identity,
            self.rule,
            self.sender_rule,
            self.audited,
            self.node,
            self.tunnel_id,
        )

    @classmethod
    def unpack(cls, row: bytes) -> Self:
        """Read the row's bytes."""
        return cls(*_DECISION.unpack(row))


DECISION_BYTES: Final = _DECISION.size


_TUNNEL_END: Final = struct.Struct("=I16s")


class TunnelEnd(NamedTuple):
    """struct pw_tunnel_end"""

    tunnel_id: int
    outer: bytes

    def pack(self) -> bytes:
        """Give the row's bytes."""
        return _TUNNEL_END.pack(self.tunnel_id, self.outer)

    @classmethod
    def unpack(cls, row: bytes) -> Self:
        """Read the row's bytes."""
        return cls(*_TUNNEL_END.unpack(row))


TUNNEL_END_BYTES: Final = _TUNNEL_END.size
