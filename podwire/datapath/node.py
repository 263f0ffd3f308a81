"""KernelDatapath: the kernel's side of one node, behind `model.interfaces.Datapath`.

Made by `agent.node`, used by `control` under the node's turn (one caller at a time); combines device, pod_net, routes,
shaping and the maps. Never decides what an endpoint should be: record and config say that. Invariant: the row that
drops everything precedes the device, rows of a live endpoint change in place, and nothing here opens a file, starts a
process or passes the verifier after `prepare`.

Thread-safe without the caller's lock: `reap_devices` (own socket, own list), `repair_tables`, `read_metrics`,
`list_programs`, reading `maps`. Everything else belongs under the turn.
"""

import errno
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, Self

from podwire.datapath import abi, pod_net, routes, shaping, upgrade
from podwire.datapath import device as devices
from podwire.datapath import inventory as inventories
from podwire.datapath import maps as tables
from podwire.datapath import rows as documents
from podwire.datapath.carrier import await_carrier
from podwire.datapath.cluster import OtherNodes, read_underlay
from podwire.datapath.conntrack_maps import find_pressure
from podwire.datapath.device import HostSide, LeftoverDevice
from podwire.datapath.host import (
    HostWarning,
    SettingChange,
    detect_underlay,
    find_warnings,
    prepare_host,
)
from podwire.datapath.jump_labels import kept_in_code
from podwire.datapath.loading import (
    load_node,
    netdev_program_of,
    programs_of,
    tunnel_programs_of,
)
from podwire.datapath.maps import NodeMaps
from podwire.datapath.masquerade import Masquerade
from podwire.datapath.native import OwnHooks
from podwire.datapath.plan import NodePlan, choose_sources, list_own_addresses
from podwire.datapath.policy_maps import PolicyTable
from podwire.datapath.programs import (
    LoadedPrograms,
    Pins,
    ensure_bpffs,
    locked_pins,
)
from podwire.datapath.reaper import Reaper
from podwire.datapath.service_maps import ServiceMaps
from podwire.datapath.stack_flows import StackFlows
from podwire.kernel import netns
from podwire.kernel.fd import Fd
from podwire.kernel.netlink import NetlinkSocket
from podwire.kernel.nft import Nftables
from podwire.kernel.sysctl import ensure_sysctl
from podwire.model.cluster import ClusterPlan, Prefix, Underlay
from podwire.model.endpoint import Bandwidth, Device, EndpointRecord, IPNetwork
from podwire.model.errors import Bug, InvalidConfiguration, KernelFailure, Unavailable
from podwire.model.ids import EndpointId, InterfaceName
from podwire.model.interfaces import (
    NO_HOST_PORTS,
    EndpointConfig,
    HostPortTable,
    Inventory,
    PodNamespace,
)

_log = logging.getLogger(__name__)

_FALLBACK_MTU: Final = 1500


@dataclass
class _Opened:
    """What `prepare` opens and `close` gives back."""

    home: Fd
    """The namespace of this node; every thread of its agent is in it."""
    netlink: NetlinkSocket
    reaper: Reaper
    loaded: LoadedPrograms
    policy: PolicyTable
    services: ServiceMaps
    side: HostSide
    masquerade: Masquerade
    nft: Nftables
    others: OtherNodes
    stack_flows: StackFlows
    underlay_mtu: int


class KernelDatapath:
    """The running kernel as the datapath of one node."""

    def __init__(
        self,
        plan: NodePlan,
        hooks: OwnHooks | None = None,
        host_ports: HostPortTable | None = None,
    ) -> None:
        """`hooks`: the devices that podwire gave hooks to; None = none are known, and new ones are not noted.
        `host_ports`: those of pods that run; None = nobody has one."""
        self.plan = plan
        self._host_ports = host_ports
        self._hooks = hooks or OwnHooks()
        self.host_changes: list[SettingChange] = []
        """Settings of the host that `prepare` changed, so that they can be put back."""
        self._opened: _Opened | None = None
        self._stack = ExitStack()
        self._gone: list[EndpointId] = []
        self._reaping = threading.Lock()

    @property
    def _node(self) -> _Opened:
        if self._opened is None:
            raise Bug("use the datapath before it is prepared")
        return self._opened

    def prepare(self) -> None:
        """Bring the node's own things into force: host settings, maps, programs, collector, tables.

        Call it once, in the namespace that the node is to serve. Raises Unavailable (objects are missing), Conflict
        (another agent has the pins), NewerData (the pins belong to a newer podwire): nothing was touched then. After a
        KernelFailure `host_changes` tells what was changed of the host.
        """
        with ExitStack() as stack:
            ensure_bpffs(self.plan.bpf_dir)
            # Before anything else: a second agent over the same pins would remove every pod that it knows nothing of.
            stack.enter_context(locked_pins(self.plan.bpf_dir))
            netlink = stack.enter_context(NetlinkSocket())
            # A socket of its own: a deletion keeps one busy for tens of milliseconds.
            reaper = Reaper(netlink, stack.enter_context(NetlinkSocket()))
            nft = stack.enter_context(Nftables())
            stack.enter_context(kept_in_code())
            loaded = load_node(self.plan, netlink)
            stack.callback(loaded.close)
            # Only now: an agent that is refused must leave the host as it is.
            self.host_changes = prepare_host(
                netlink, ipv4=self.plan.has_family(4), ipv6=self.plan.has_family(6)
            )
            policy = PolicyTable(loaded.maps, self.plan.policy_entries)
            mtu, side = self._describe_host(netlink, loaded)
            masquerade = Masquerade(nft, self._host_ports)
            others = OtherNodes(
                netlink,
                loaded.maps,
                tunnel_programs_of(loaded),
                netdev_program_of(loaded),
                masquerade,
                self._hooks,
            )
            # The first plan may be hours away when the store is: what the predecessor left is in force until then.
            others.recall(self.plan)
            others.apply_own(self.plan)
            flows = stack.enter_context(StackFlows.open())
            # The predecessor may have died between serving a port and forgetting who asked it in vain.
            flows.outdate(set(), masquerade.host_ports)
            self._opened = _Opened(
                stack.enter_context(netns.open_current()),
                netlink,
                reaper,
                loaded,
                policy,
                ServiceMaps(loaded.maps),
                side,
                masquerade,
                nft,
                others,
                flows,
                mtu,
            )
            self._stack = stack.pop_all()

    def _describe_host(
        self, netlink: NetlinkSocket, loaded: LoadedPrograms
    ) -> tuple[int, HostSide]:
        try:
            underlay = detect_underlay(netlink, self.plan.node_address)
        except Unavailable:
            underlay = None
        index = None if underlay is None else underlay.index
        sources = choose_sources(self.plan, index, list_own_addresses(netlink))
        mtu = _FALLBACK_MTU if underlay is None else underlay.mtu
        return mtu, HostSide(self.plan.node_name, programs_of(loaded), sources)

    def change_plan(self, plan: NodePlan) -> None:
        """Put another plan for the node's own things into force: masquerade, blocks, ipcache, quota, policy entries.

        What the programs were loaded with stays: directories, capacities and constants need a restart.
        """
        before, self.plan = self.plan, plan
        # A block of another family may come at any time: forwarding of that family is switched on only then.
        if any(plan.has_family(version) and not before.has_family(version) for version in (4, 6)):
            self.host_changes = prepare_host(
                self._node.netlink, ipv4=plan.has_family(4), ipv6=plan.has_family(6)
            )
        self._node.policy.capacity = plan.policy_entries
        self._node.others.apply_own(plan)

    def close(self) -> None:
        """Give descriptors back. All stays in the kernel, and what waits for an answer where any build finds it."""
        opened, self._opened = self._opened, None
        with self._stack:
            if opened is not None:
                upgrade.hand_flows_over(opened.loaded)

    def __enter__(self) -> Self:
        self.prepare()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    # Endpoints: model.interfaces.Datapath. Many of these calls only add what the node has open, its maps or its socket.
    # They stand here all the same: control decides on endpoints without knowing that either exists.

    @property
    def mtu(self) -> int:
        """MTU of new pod devices, in bytes: the configured one, else what every way to other nodes has room for."""
        node = self._node
        # The smallest MTU of all ways: a packet that only some ways have room for would be lost on the others.
        return self.plan.mtu or node.others.pod_mtu_bytes or node.underlay_mtu

    def plan_device(
        self,
        endpoint_id: EndpointId,
        host_name: InterfaceName,
        pod_name: InterfaceName,
        *,
        mtu: int,
        pod_mac: str,
    ) -> Device:
        """Choose indexes and MACs of a pair that does not exist yet."""
        node = self._node
        return devices.plan_device(
            node.netlink, endpoint_id, host_name, pod_name, mtu=mtu or self.mtu, pod_mac=pod_mac
        )

    def create_guard(self, record: EndpointRecord) -> None:
        """Write the row that drops everything, under the index the device is going to have."""
        tables.write_guard(self._node.loaded.maps, record)

    def create_device(self, record: EndpointRecord, namespace: PodNamespace) -> None:
        """Make the pair with everything on the host's side."""
        node = self._node
        try:
            devices.create_device(node.netlink, record, namespace, node.side)
        except (LeftoverDevice, InvalidConfiguration) as taken:
            # A container or its namespace that was used before: the old device only waits for the reaper.
            lives = isinstance(taken, LeftoverDevice) and not taken.condemned
            if lives or not self._reap():
                raise
            devices.create_device(node.netlink, record, namespace, node.side)

    def repair_device(self, record: EndpointRecord) -> None:
        """Put right what differs on the host's side of an existing pair."""
        node = self._node
        if devices.require_owned(node.netlink, record) is None:
            raise KernelFailure(errno.ENODEV, "repair device", record.device.host_name)
        for difference in devices.repair_device(node.netlink, record, node.side):
            _log.info("repaired device", extra={"endpoint": record.id, "cause": difference})

    def configure_pod(self, record: EndpointRecord, namespace: PodNamespace) -> None:
        """Give the pod's side its addresses, gateway, routes, neighbours and sysctls; both ends can send then."""
        pod_net.configure_pod(record, namespace, home=self._node.home)
        # After the pod's end is up, because only then the host's end has a carrier at all.
        await_carrier(self._node.netlink, record.device)

    def shape(self, device: Device, bandwidth: Bandwidth, namespace: PodNamespace | None) -> None:
        """Set the limits of both directions, or remove them where they are 0."""
        shaping.shape_device(self._node.netlink, device, bandwidth, namespace)

    def open_endpoint(
        self, record: EndpointRecord, config: EndpointConfig, *, is_new: bool = False
    ) -> None:
        """Publish the endpoint's addresses and turn its row into `config`, in place."""
        tables.write_endpoint(self._node.loaded.maps, record, config, is_new=is_new)

    def read_config(self, record: EndpointRecord) -> EndpointConfig | None:
        """Give what the endpoint's row holds; None when there is none, or only the guard."""
        return tables.read_endpoint_config(self._node.loaded.maps, record)

    def let_loopback_out(self, record: EndpointRecord) -> None:
        """Let what this host sends from 127.0.0.1 leave by the pod's device; ends with the device."""
        ensure_sysctl("1", "ipv4", "conf", record.device.host_name, "route_localnet")

    def write_host_ports(self, wanted: HostPortTable, ended: HostPortTable = NO_HOST_PORTS) -> None:
        """Lead exactly these ports of the host to pods."""
        masquerade = self._node.masquerade
        before = masquerade.host_ports.items() | ended.items()
        masquerade.write_host_ports(wanted)
        self._node.stack_flows.outdate(before, wanted)

    def close_endpoint(self, record: EndpointRecord) -> None:
        """Take every row of the endpoint out of the maps."""
        tables.remove_endpoint(self._node.loaded.maps, record)

    def remove_routes(self, record: EndpointRecord) -> None:
        """Take the host's routes of the endpoint away; its neighbours go with the device."""
        routes.remove_host_routes(self._node.netlink, record)

    def condemn_device(self, record: EndpointRecord) -> None:
        """Hand the pair to the reaper."""
        self._node.reaper.condemn(record.id, record.device.host_ifindex)

    def reap_devices(self) -> Sequence[EndpointId]:
        """Delete what is condemned, in one batch, and tell whose devices are really gone."""
        self._reap()
        with self._reaping:
            gone, self._gone = self._gone, []
        # The caller forgets the endpoints of these devices and gives their addresses away.
        if gone:
            try:
                self._node.stack_flows.forget()
            except BaseException:
                with self._reaping:
                    self._gone = [*gone, *self._gone]
                raise
        return gone

    def _reap(self) -> bool:
        with self._reaping:
            gone = self._node.reaper.reap()
            self._gone += gone
        return bool(gone)

    def compare_endpoint(
        self, record: EndpointRecord, config: EndpointConfig, namespace: PodNamespace | None
    ) -> Sequence[str]:
        """Name every difference between the record and the kernel; empty = they agree."""
        node = self._node
        differences = [
            *tables.compare_rows(node.loaded.maps, record, config),
            *devices.compare_device(node.netlink, record, node.side),
            *shaping.compare_shaping(node.netlink, record.device, record.bandwidth, namespace),
        ]
        if namespace is not None:
            differences += pod_net.compare_pod(record, namespace)
        if record.host_ports:
            differences += node.masquerade.compare()
        return differences

    def read_inventory(self) -> Inventory:
        """List what the kernel holds of ours."""
        node = self._node
        return inventories.read_inventory(node.netlink, node.loaded.maps, self.plan.node_name)

    def remove_leftovers(
        self, inventory: Inventory, keep: Iterable[EndpointRecord]
    ) -> Sequence[str]:
        """Remove what `inventory` has and no record in `keep` accounts for."""
        node = self._node
        return inventories.remove_leftovers(
            node.netlink, node.loaded.maps, self.plan.node_name, inventory, keep
        )

    # Other nodes: model.interfaces.ClusterDatapath

    def read_underlay(self) -> Underlay:
        """Look at the device that carries this node's traffic."""
        return read_underlay(self._node.netlink, self.plan.node_address)

    def apply_cluster(self, plan: ClusterPlan) -> Sequence[str]:
        """Make all that the kernel holds because of other nodes be what `plan` says; name what differed."""
        differences = self._refresh_host()
        return differences + self._node.others.apply(self.plan, plan)

    def _refresh_host(self) -> list[str]:
        """Follow this host's own addresses and MTU. Routes to pods that name an address get the new one when their
        endpoint is repaired."""
        node, differences = self._node, []
        mtu, side = self._describe_host(node.netlink, node.loaded)
        if mtu != node.underlay_mtu:
            differences.append(f"MTU of the underlay is {mtu}, was {node.underlay_mtu}")
        if side.sources != node.side.sources:
            differences.append(
                f"addresses towards pods are {side.sources}, were {node.side.sources}"
            )
        node.underlay_mtu, node.side = mtu, side
        return differences

    def change_prefixes(
        self, put: Mapping[IPNetwork, Prefix], remove: Iterable[IPNetwork] = ()
    ) -> None:
        """Change single rows of the ipcache between two plans."""
        self._node.others.change_prefixes(put, remove)

    def repair_pins(self) -> Sequence[str]:
        """Pin again what somebody has unpinned; names it. Needs no turn."""
        return self._node.loaded.repair_pins(Pins(self.plan.bpf_dir, abi.ABI_VERSION))

    def describe_maps(self) -> list[documents.Row]:
        """Give name, kind and fill of every map that can be read."""
        return documents.describe_maps(self._node.loaded.maps, {"policy": self.policy.fill})

    # Parts, for callers that need only one of them

    @property
    def policy(self) -> PolicyTable:
        """Policy entries, CIDRs and counts: `model.interfaces.PolicyDatapath`."""
        return self._node.policy

    @property
    def services(self) -> ServiceMaps:
        """What pods ask for by a service's address: `model.service.ServiceDatapath`."""
        return self._node.services

    @property
    def masquerade(self) -> Masquerade:
        """The node's own table of nftables."""
        return self._node.masquerade

    # What people and metrics ask

    @property
    def node_addresses(self) -> tuple[str, ...]:
        """Addresses that this host uses towards its pods, IPv4 first."""
        sources = self._node.side.sources
        return tuple(
            str(address) for address in (sources.ipv4, sources.ipv6) if address is not None
        )

    @property
    def template_id(self) -> str:
        """Name of the template that is in force."""
        return self._node.loaded.template_id

    @property
    def maps(self) -> NodeMaps:
        """The node's maps, for readers."""
        return self._node.loaded.maps

    def find_host_warnings(self) -> list[HostWarning]:
        """Name what on this host breaks pods' traffic, and what differs in the node's own table."""
        node = self._node
        four, six = self.plan.has_family(4), self.plan.has_family(6)
        warnings = find_pressure(node.loaded.maps)
        warnings += find_warnings(node.netlink, node.nft, ipv4=four, ipv6=six)
        return warnings + [
            HostWarning(
                text, "the agent writes it anew when it next looks at the way to other nodes"
            )
            for text in node.masquerade.compare()
        ]
