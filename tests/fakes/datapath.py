"""A datapath in memory. It passes tests/contract/test_datapath.py, as the kernel's does."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from podwire.model.endpoint import Bandwidth, Device, EndpointRecord
from podwire.model.errors import ForeignObject, InvalidConfiguration, KernelFailure, PodwireError
from podwire.model.ids import EndpointId, IfIndex, InterfaceName, device_mac
from podwire.model.interfaces import (
    NO_HOST_PORTS,
    EndpointConfig,
    HostPortTable,
    HostSocket,
    Inventory,
    PodNamespace,
    PodSocket,
    PresentDevice,
)


@dataclass
class FakeDatapath:
    """Sets in place of kernel objects; `fail` maps a method's name to the error its next call raises."""

    mtu: int = 1500
    rows: dict[IfIndex, EndpointConfig | None] = field(default_factory=dict)
    """Guard rows are None."""
    addresses: dict[str, EndpointId] = field(default_factory=dict)
    devices: dict[EndpointId, EndpointRecord] = field(default_factory=dict)
    pods: dict[tuple[int, str], EndpointRecord] = field(default_factory=dict)
    """Configured interfaces by (namespace cookie, name)."""
    routes: dict[str, EndpointId] = field(default_factory=dict)
    condemned: list[EndpointId] = field(default_factory=list)
    foreign_host: set[str] = field(default_factory=set)
    foreign_pod: set[tuple[int, str]] = field(default_factory=set)
    fail: dict[str, PodwireError] = field(default_factory=dict)
    reap_blocked: bool = False
    host_ports: HostPortTable = field(default_factory=dict)
    ended_host_ports: list[tuple[HostSocket, PodSocket]] = field(default_factory=list)
    """All of which flows were to be forgotten."""
    loopback_out: set[EndpointId] = field(default_factory=set)
    _next_ifindex: int = 1000

    def _may_fail(self, method: str) -> None:
        if (error := self.fail.pop(method, None)) is not None:
            raise error

    def plan_device(
        self,
        endpoint_id: EndpointId,
        host_name: InterfaceName,
        pod_name: InterfaceName,
        *,
        mtu: int,
        pod_mac: str,
    ) -> Device:
        self._next_ifindex += 2
        return Device(
            kind="veth",
            host_name=host_name,
            host_ifindex=IfIndex(self._next_ifindex),
            host_mac=device_mac(endpoint_id, 1),
            pod_name=pod_name,
            pod_ifindex=IfIndex(self._next_ifindex + 1),
            pod_mac=pod_mac or device_mac(endpoint_id, 0),
            mtu=mtu or self.mtu,
        )

    def create_guard(self, record: EndpointRecord) -> None:
        self._may_fail("create_guard")
        self.rows[record.device.host_ifindex] = None

    def create_device(self, record: EndpointRecord, namespace: PodNamespace) -> None:
        self._may_fail("create_device")
        device = record.device
        if device.host_name in self.foreign_host:
            raise ForeignObject(
                f"create device {device.host_name!r}: a foreign device has the name"
            )
        if (namespace.cookie, device.pod_name) in self.foreign_pod:
            raise InvalidConfiguration(f"create device: interface name {device.pod_name!r} exists")
        assert device.host_ifindex in self.rows, "the guard comes before the device"
        self.devices[record.id] = record
        for address in record.addresses:
            self.routes[str(address)] = record.id

    def repair_device(self, record: EndpointRecord) -> None:
        self._may_fail("repair_device")
        if record.id not in self.devices:
            raise KernelFailure(19, "repair device", record.device.host_name)
        for address in record.addresses:
            self.routes[str(address)] = record.id

    def configure_pod(self, record: EndpointRecord, namespace: PodNamespace) -> None:
        self._may_fail("configure_pod")
        self.pods[namespace.cookie, record.device.pod_name] = record

    def shape(self, device: Device, bandwidth: Bandwidth, namespace: PodNamespace | None) -> None:
        self._may_fail("shape")

    def open_endpoint(
        self, record: EndpointRecord, config: EndpointConfig, *, is_new: bool = False
    ) -> None:
        self._may_fail("open_endpoint")
        for address in record.addresses:
            self.addresses[str(address)] = record.id
        self.rows[record.device.host_ifindex] = config

    def read_config(self, record: EndpointRecord) -> EndpointConfig | None:
        return self.rows.get(record.device.host_ifindex)

    def let_loopback_out(self, record: EndpointRecord) -> None:
        self._may_fail("let_loopback_out")
        self.loopback_out.add(record.id)

    def write_host_ports(self, wanted: HostPortTable, ended: HostPortTable = NO_HOST_PORTS) -> None:
        self._may_fail("write_host_ports")
        self.host_ports = dict(wanted)
        self.ended_host_ports += ended.items()

    def close_endpoint(self, record: EndpointRecord) -> None:
        self._may_fail("close_endpoint")
        self.rows.pop(record.device.host_ifindex, None)
        for address in record.addresses:
            if self.addresses.get(str(address)) == record.id:
                del self.addresses[str(address)]

    def remove_routes(self, record: EndpointRecord) -> None:
        self._may_fail("remove_routes")
        for address in record.addresses:
            if self.routes.get(str(address)) == record.id:
                del self.routes[str(address)]

    def condemn_device(self, record: EndpointRecord) -> None:
        self._may_fail("condemn_device")
        self.condemned.append(record.id)

    def reap_devices(self) -> Sequence[EndpointId]:
        if self.reap_blocked:
            return []
        gone, self.condemned = self.condemned, []
        for endpoint_id in gone:
            record = self.devices.pop(endpoint_id, None)
            if record is not None:
                self.pods.pop((record.netns_cookie, record.device.pod_name), None)
        return gone

    def compare_endpoint(
        self, record: EndpointRecord, config: EndpointConfig, namespace: PodNamespace | None
    ) -> Sequence[str]:
        differences = []
        if record.id not in self.devices:
            differences.append(f"device {record.device.host_name!r} is missing")
        if self.rows.get(record.device.host_ifindex) != config:
            differences.append("row differs")
        for address in record.addresses:
            if self.addresses.get(str(address)) != record.id:
                differences.append(f"address {address} has no row")
            if self.routes.get(str(address)) != record.id:
                differences.append(f"route to {address} is missing")
        return differences

    def read_inventory(self) -> Inventory:
        return Inventory(
            devices=[
                PresentDevice(record.id, record.device.host_name, record.device.host_ifindex)
                for record in self.devices.values()
            ],
            config_ifindexes=list(self.rows),
            endpoint_addresses=list(self.addresses),
            host_routes=list(self.routes),
            foreign_names=[InterfaceName(name) for name in self.foreign_host],
        )

    def remove_leftovers(
        self, inventory: Inventory, keep: Iterable[EndpointRecord]
    ) -> Sequence[str]:
        kept = list(keep)
        ids = {record.id for record in kept}
        addresses = {str(address) for record in kept for address in record.addresses}
        indexes = {record.device.host_ifindex for record in kept}
        removed = [f"device {name}" for name in set(self.devices) - ids]
        self.devices = {name: one for name, one in self.devices.items() if name in ids}
        for index in self.rows.keys() - indexes:
            del self.rows[index]
        self.addresses = {text: one for text, one in self.addresses.items() if text in addresses}
        self.routes = {text: one for text, one in self.routes.items() if text in addresses}
        return removed

    def is_empty(self) -> bool:
        """Tell whether nothing at all is left."""
        return not (
            self.rows
            or self.addresses
            or self.devices
            or self.routes
            or self.condemned
            or self.host_ports
        )
