"""The agent's settings: names, units, defaults, and what makes a set of them wrong.

The dataclass fields below are the one table: file key, environment name, flag, help and
docs/configuration.md come from it. `model.config.sources` fills it, `agent.main` hands the groups
to the parts that need them. A key whose capability this build lacks is known, and refused at any value that
would ask for the capability. Values only; nothing here reads the world.
"""

# ruff: noqa: RUF009 - `setting` is dataclasses.field() with a row of the table

import dataclasses
import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from podwire.model.config.settings import (
    ADDRESS,
    BOOL,
    CIDRS,
    LISTEN,
    METADATA_KEY,
    PATH,
    TEXT,
    TEXTS,
    Setting,
    choice,
    integer,
    only_default,
    pattern,
    setting,
)
from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.errors import Fault
from podwire.model.networks import is_within, overlap

SOCKET_PATH_MAX_BYTES = 106
"""sun_path has 108 bytes; the launcher needs the final NUL and one byte of reserve."""
LONGEST_SOCKET_NAME = "api.sock"
IPV6_MIN_MTU_BYTES = 1280
LOG_LEVELS = ("debug", "info", "warning", "error")

_RESERVED_RANGES = (
    "127.0.0.0/8",
    "169.254.0.0/16",
    "224.0.0.0/4",
    "::1/128",
    "fe80::/10",
    "ff00::/8",
)


@dataclass(frozen=True)
class NodeSettings:
    """Who this node is and which addresses belong to it."""

    # The mark on a device is podwire:NODE:NUMBER; the kernel keeps 255 bytes (IFALIASZ).
    node_name: str = setting(
        pattern(
            "name",
            r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,235}",
            "letters, digits, '-', '_' and '.', at most 236, beginning with a letter or digit",
        ),
        "",
        "Name of this node; part of the mark on every device.",
        default_note="the machine's host name; must be set in a pod of Kubernetes (spec.nodeName)",
    )
    node_address: IPAddress | None = setting(
        ADDRESS,
        None,
        "Address of this node among the others, which the host uses towards its pods, too. Its device carries what"
        " nodes exchange.",
        default_note="the core Node's InternalIP with the store `kubernetes`, else detected",
    )
    node_interface: str = setting(
        pattern(
            "pattern of names",
            r"[A-Za-z0-9_.@*?\[\]!-]{0,64}",
            "a device's name; * ? and [...] stand for any characters",
        ),
        "",
        "Device whose address is `node_address`, where that is empty: the first whose name matches. It beats the"
        " InternalIPs.",
    )
    cluster_cidrs: tuple[IPNetwork, ...] = setting(
        CIDRS,
        (),
        "Ranges of all pods of the cluster: never masqueraded, and where other nodes are believed to have pods. Empty:"
        " what kubeadm was told; without the store `kubernetes` the node's own ranges, and of others what is in pools"
        " or near its own (docs/nodes.md).",
    )
    node_cidrs: tuple[IPNetwork, ...] = setting(
        CIDRS,
        (),
        'Ranges that this node\'s pods get their addresses from, of one or both families. Empty with `ipam` "node":'
        " a block of a pool with `use: nodes`, if there is one.",
    )
    ipam: str = setting(
        choice("node", "pool", "delegated"),
        "node",
        "Where addresses come from: the node's ranges, named pools, or another IPAM plugin.",
        built=lambda value: value != "delegated",
        built_note='"node" and "pool"',
    )


@dataclass(frozen=True)
class FileSettings:
    """Where the agent keeps what it remembers, what others look at, and what the kernel holds."""

    run_dir: Path = setting(
        PATH,
        Path("/run/podwire"),
        "Directory of the sockets, the spool and the readable endpoint directories.",
    )
    state_dir: Path = setting(
        PATH, Path("/var/lib/podwire"), "Directory of the journal; one agent at a time."
    )
    bpf_dir: Path = setting(
        PATH, Path("/sys/fs/bpf/podwire"), "Directory on a bpffs below which maps are pinned."
    )

    @property
    def cni_socket(self) -> Path:
        """Where the launcher connects."""
        return self.run_dir / "cni.sock"

    @property
    def api_socket(self) -> Path:
        """Where the CLI connects."""
        return self.run_dir / "api.sock"


@dataclass(frozen=True)
class StoreSettings:
    """Where objects are kept that all nodes share."""

    store: str = setting(
        pattern(
            "URL",
            r"sqlite:///.+|etcd://.+|kubernetes",
            "sqlite:///PATH, etcd://HOST:PORT[,HOST:PORT] or kubernetes",
        ),
        "",
        "Store of the cluster's objects.",
        default_note="`sqlite://STATE_DIR/store.db`",
    )
    etcd_ca: str = setting(
        TEXT, "", "File with the certificate authorities of etcd; given, it is asked by TLS."
    )
    etcd_cert: str = setting(TEXT, "", "File with the client's certificate for etcd.")
    etcd_key: str = setting(TEXT, "", "File with the key of that certificate.")
    etcd_user: str = setting(TEXT, "", "User name for etcd.")
    etcd_password_file: str = setting(TEXT, "", "File with the password of that user.")
    kubeconfig: str = setting(
        TEXT,
        "",
        'Path of a kubeconfig, for the store "kubernetes"; empty: the service account of the agent\'s pod.',
    )

    @property
    def is_kubernetes(self) -> bool:
        """Whether the store is the API server of a cluster."""
        return self.store == "kubernetes"


@dataclass(frozen=True)
class DatapathSettings:
    """How packets go."""

    datapath: str = setting(
        choice("veth", "netkit", "netkit-l2"),
        "veth",
        "Kind of device that a pod gets.",
        built=lambda value: value == "veth",
        built_note='only "veth"',
    )
    routing: str = setting(
        choice("overlay", "native", "auto"),
        "auto",
        "How pods of other nodes are reached; auto: routes where a peer is on a connected subnet.",
    )
    translate_services: str = setting(
        choice("on", "off"),
        "on",
        "Whether the programs translate what pods send to services; off: in Kubernetes kube-proxy does, after the"
        " pod's egress policy.",
    )
    tunnel_port: int = setting(
        integer(1, 65535), 8472, "UDP port of the overlay; pods may not talk to it."
    )
    tunnel_mode: str = setting(
        choice("flow", "classic"), "flow", "One device for all peers, or one fixed-VNI device."
    )
    mtu: int = setting(
        integer(576, 65535, or_zero=True), 0, "MTU of pod devices in bytes; 0: detected."
    )
    masquerade: bool = setting(
        BOOL,
        True,
        "Whether traffic from pods to outside the cluster gets the node's address.",
        reloadable=True,
    )
    masquerade_except: tuple[IPNetwork, ...] = setting(
        CIDRS, (), "Destinations outside the cluster that see the pod's own address."
    )
    host_access: bool = setting(
        BOOL, True, "Whether processes of this host may reach its pods whatever the policy says."
    )
    conntrack_entries: int = setting(
        integer(0, 4_194_304),
        0,
        "Connections that the node's programs can remember, 4096 or more;"
        " 0 = 1048576 on a machine with 8 GB, less in proportion on a smaller one.",
    )
    conntrack_quota: int = setting(
        integer(0, 4_194_304),
        0,
        "Connections that one endpoint may have opened, and as many that others opened to it, 64 or more;"
        " 0 = a sixteenth of all.",
    )


@dataclass(frozen=True)
class PolicySettings:
    """What is allowed, and how labels become identities."""

    policy_enforcement: str = setting(
        choice("default", "always", "never"),
        "default",
        "Which endpoints are restricted: those a policy selects, all, or none.",
        reloadable=True,
    )
    policy_audit: bool = setting(BOOL, False, "Whether policies only report what they would drop.")
    policy_entries: int = setting(
        integer(16, 1_000_000),
        131_072,
        "Policy entries that the node's programs may hold, of all endpoints together.",
        reloadable=True,
    )
    policy_cidr_match: tuple[str, ...] = only_default(
        TEXTS, (), "What besides the world CIDR rules of Cilium's policies match."
    )
    identity_label_filter: tuple[str, ...] = setting(
        TEXTS,
        (),
        "Patterns of labels that make an identity; `!` excludes.",
        default_note="everything but labels that differ from one replica to the next",
    )
    identity_wait_s: int = setting(
        integer(0, 600), 10, "How long an ADD waits for the identity of new labels, in seconds."
    )
    endpoint_fanout: str = only_default(
        choice("auto", "direct", "batched"), "auto", "How endpoints are published to other nodes."
    )


@dataclass(frozen=True)
class CniSettings:
    """What container runtimes see."""

    status_grace_s: int = setting(
        integer(0, 3600),
        0,
        "How long after its last sign of life STATUS succeeds without the agent, in seconds.",
        default_note="`120` with the store `kubernetes`, else `0`",
    )
    status_on_exhaustion: bool = setting(
        BOOL,
        True,
        "Whether STATUS fails when no address is left.",
        default_note="`false` with the store `kubernetes`, else `true`",
    )
    cni_install: bool = setting(
        BOOL,
        False,
        "Whether the agent installs launcher and conflist, and renews them when somebody changes them.",
    )
    cni_conf_dir: Path = setting(
        PATH, Path("/etc/cni/net.d"), "Where the container runtime reads networks."
    )
    cni_bin_dir: Path = setting(
        PATH, Path("/opt/cni/bin"), "Where the container runtime looks for plugins."
    )


@dataclass(frozen=True)
class ReportSettings:
    """What the agent tells of itself."""

    flow_ring: int = setting(
        integer(16, 1_048_576), 4096, "Flows kept for `podwire observe --last`."
    )
    log_level: str = setting(
        choice(*LOG_LEVELS), "info", "Least severe messages that are logged.", reloadable=True
    )
    log_format: str = setting(choice("text", "json"), "text", "Form of the log on stderr.")
    metrics_listen: str = setting(
        LISTEN, "", "TCP address that serves Prometheus metrics; empty: only on the API socket."
    )


@dataclass(frozen=True)
class AgentConfig:
    """All settings of one agent, valid together."""

    node: NodeSettings = field(default_factory=NodeSettings)
    files: FileSettings = field(default_factory=FileSettings)
    store: StoreSettings = field(default_factory=StoreSettings)
    datapath: DatapathSettings = field(default_factory=DatapathSettings)
    policy: PolicySettings = field(default_factory=PolicySettings)
    cni: CniSettings = field(default_factory=CniSettings)
    report: ReportSettings = field(default_factory=ReportSettings)

    @property
    def translates_services(self) -> bool:
        """Whether the programs translate what pods send to services."""
        return self.datapath.translate_services == "on"

    def get(self, key: str) -> object:
        return getattr(getattr(self, GROUP_OF[key]), key)

    def replace(self, changes: dict[str, object]) -> "AgentConfig":
        """Give a configuration with other values of some keys."""
        groups: dict[str, dict[str, object]] = {}
        for key, value in changes.items():
            groups.setdefault(GROUP_OF[key], {})[key] = value
        changed = {
            name: dataclasses.replace(getattr(self, name), **values)
            for name, values in groups.items()
        }
        return dataclasses.replace(self, **changed)


IN_KUBERNETES: Final[Mapping[str, object]] = {
    "status_grace_s": 120,
    "status_on_exhaustion": False,
}
"""Other defaults with the store `kubernetes`. Of a node whose STATUS fails Kubernetes evicts the pods: neither an agent
that is being replaced (containerd 2.x asks every few seconds) nor a full range is worth that.
"""


def _rows() -> Iterator[tuple[str, type, Setting]]:
    defaults = AgentConfig()
    for group in dataclasses.fields(defaults):
        kind = type(getattr(defaults, group.name))
        for field_ in dataclasses.fields(kind):
            yield (
                group.name,
                kind,
                dataclasses.replace(field_.metadata[METADATA_KEY], key=field_.name),
            )


GROUP_OF = {row.key: group for group, _, row in _rows()}
SETTINGS = {row.key: row for _, _, row in _rows()}
"""Every setting by key, in the order of the documentation."""
GROUP_TITLES = {group: (kind.__doc__ or "").rstrip(".") for group, kind, _ in _rows()}


def find_contradictions(config: AgentConfig) -> list[Fault]:
    """Name what is wrong with settings that are each valid alone; the path is the key."""
    return [
        *_range_faults(config.node),
        *_address_faults(config),
        *_path_faults(config.files),
        *_size_faults(config),
    ]


def _range_faults(node: NodeSettings) -> Iterator[Fault]:
    if node.node_cidrs and node.ipam == "pool":
        given = ", ".join(map(str, node.node_cidrs))
        yield Fault("node_cidrs", f'is {given}: with ipam "pool" addresses come out of pools alone')
    for key in ("cluster_cidrs", "node_cidrs"):
        ranges: tuple[IPNetwork, ...] = getattr(node, key)
        for index, cidr in enumerate(ranges):
            for other in ranges[index + 1 :]:
                if overlap(cidr, other):
                    yield Fault(key, f"has {cidr} and {other}, which overlap")
            for text in _RESERVED_RANGES:
                if overlap(cidr, ipaddress.ip_network(text)):
                    yield Fault(key, f"has {cidr}, which overlaps {text} (never a pod's)")
    for cidr in node.node_cidrs:
        if node.cluster_cidrs and not any(is_within(cidr, outer) for outer in node.cluster_cidrs):
            listed = ", ".join(str(outer) for outer in node.cluster_cidrs)
            yield Fault("node_cidrs", f"has {cidr}, which is in none of cluster_cidrs ({listed})")


def _address_faults(config: AgentConfig) -> Iterator[Fault]:
    address = config.node.node_address
    if address is None:
        return
    if config.node.node_interface:
        yield Fault(
            "node_interface",
            f"is {config.node.node_interface!r}, and node_address {address}: set one of them",
        )
    if address.is_unspecified or address.is_loopback or address.is_multicast:
        yield Fault("node_address", f"is {address}, which no other machine can reach")
    for cidr in (*config.node.node_cidrs, *config.node.cluster_cidrs):
        if address in cidr:
            yield Fault("node_address", f"is {address}, which is in the pods' range {cidr}")
            return


def _path_faults(files: FileSettings) -> Iterator[Fault]:
    longest = files.run_dir / LONGEST_SOCKET_NAME
    length = len(str(longest).encode())
    if length > SOCKET_PATH_MAX_BYTES:
        yield Fault(
            "run_dir",
            f"makes the socket path {str(longest)!r}, {length} bytes long;"
            f" the kernel takes {SOCKET_PATH_MAX_BYTES}",
        )


def _size_faults(config: AgentConfig) -> Iterator[Fault]:
    datapath = config.datapath
    has_ipv6 = any(cidr.version == 6 for cidr in config.node.node_cidrs)
    if has_ipv6 and 0 < datapath.mtu < IPV6_MIN_MTU_BYTES:
        yield Fault("mtu", f"is {datapath.mtu}; IPv6 needs at least {IPV6_MIN_MTU_BYTES}")
    for name, least in (("conntrack_entries", 4096), ("conntrack_quota", 64)):
        if 0 < getattr(datapath, name) < least:
            yield Fault(name, f"is {getattr(datapath, name)}; 0 or at least {least}")
    if 0 < datapath.conntrack_entries < datapath.conntrack_quota:
        yield Fault(
            "conntrack_quota",
            f"is {datapath.conntrack_quota}, more than conntrack_entries"
            f" ({datapath.conntrack_entries})",
        )
