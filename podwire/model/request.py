"""A CNI request and its answer, in forms that are independent of the CNI version.

`cni.netconf` makes requests from environment and configuration, `control.attach` carries them out, `cni.result`
writes the answer in the asked version. Values only.
"""

import msgspec

from podwire.model.endpoint import AttachmentKey, Bandwidth, HostPort, IPAddress, IPNetwork
from podwire.model.ids import ContainerId, InterfaceName, NetworkName


class NamedPort(msgspec.Struct, frozen=True):
    """A port that policies may name. `protocol` is TCP, UDP or SCTP."""

    name: str
    port: int
    protocol: str = "TCP"


class Interface(msgspec.Struct, frozen=True):
    """One device of a result; `sandbox` is the namespace's path, "" = the host's."""

    name: str
    mac: str = ""
    mtu: int = 0
    sandbox: str = ""


class AttachedAddress(msgspec.Struct, frozen=True):
    """One address of a result, with the index of its device in `interfaces` (None = not said)."""

    address: IPAddress
    prefix_bits: int
    gateway: IPAddress | None = None
    interface: int | None = None


class AttachedRoute(msgspec.Struct, frozen=True):
    """One route of a result; `mtu` 0 = not set."""

    destination: IPNetwork
    gateway: IPAddress | None = None
    mtu: int = 0


class Dns(msgspec.Struct, frozen=True):
    """What a result says of name resolution; podwire itself says nothing."""

    nameservers: tuple[str, ...] = ()
    domain: str = ""
    search: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


class AttachResult(msgspec.Struct, frozen=True):
    """The answer to an ADD, or the prevResult of a CHECK or DEL."""

    interfaces: tuple[Interface, ...] = ()
    ips: tuple[AttachedAddress, ...] = ()
    routes: tuple[AttachedRoute, ...] = ()
    dns: Dns = Dns()


class AttachRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One CNI call, decoded and valid in itself."""

    command: str
    """ADD, DEL, CHECK, GC or STATUS (the launcher answers VERSION)."""
    network: NetworkName
    cni_version: str
    key: AttachmentKey | None = None
    """None for GC and STATUS."""
    netns_path: str = ""
    started_boottime_ns: int = 0
    """CLOCK_BOOTTIME at the launcher's start."""
    namespace: str = "default"
    pod: str = ""
    pod_uid: str = ""
    is_plain: bool = False
    """Whether it is a container beside Kubernetes: its runtime names neither a namespace nor a UID."""
    labels: tuple[str, ...] = ()
    """`source:key=value`, sorted by bytes."""
    ports: tuple[NamedPort, ...] = ()
    pools: tuple[str, ...] = ()
    wanted_ips: tuple[IPAddress, ...] = ()
    """At most one of each family."""
    wanted_mac: str = ""
    mtu: int = 0
    """0 = the node's."""
    bandwidth: Bandwidth = Bandwidth()
    host_ports: tuple[HostPort, ...] = ()
    """Sorted, each once."""
    may_ask_host_ports: bool = False
    """Whether the network hands what a pod asks of host ports to podwire; else a chained plugin may serve them."""
    port_mappings: str = ""
    """Of a DEL: the capability as the runtime wrote it, JSON; "" = it says nothing of ports."""
    prev_result: AttachResult | None = None
    valid_attachments: tuple[tuple[ContainerId, InterfaceName], ...] | None = None
    """GC's list; None = the runtime gave none, () = it says that nothing lives."""
    unknown_keys: tuple[str, ...] = ()
    """Keys of the configuration that we do not know, for the log."""
    log_level: str = ""
