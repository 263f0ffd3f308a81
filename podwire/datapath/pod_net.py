"""The pod's side of a pair: addresses, gateway, routes, neighbours and settings, made in one send.

`datapath.node` combines these for `model.interfaces.Datapath`. Works through a netlink socket opened in the pod's
namespace; the calling thread is inside the namespace only to open that socket and to write settings. Never touches
what another plugin made. Invariant: the link is the last thing to come up before the routes, so a pod that sees its
interface running sees its addresses too.

Several networks in one container: the first attachment (per family) owns the default route of the main table. A
further attachment gets a default route with its interface index as metric, for sockets that bind to the device, and a
table of its own (number = interface index) that a rule selects for everything sent from its addresses. Without it,
replies would leave through the first interface and be dropped there as spoofed.
"""

import errno
import ipaddress
from collections.abc import Sequence
from operator import attrgetter
from typing import Final

import msgspec

from podwire.datapath.differences import list_differences
from podwire.datapath.encoded import EncodedPlan
from podwire.datapath.routes import dump_routes
from podwire.kernel import netns
from podwire.kernel.fd import Fd
from podwire.kernel.netlink import NetlinkSocket, Request
from podwire.kernel.rtnl.link import get_link, read_link, set_link
from podwire.kernel.rtnl.route import (
    IPV6_DEFAULT_METRIC,
    ROUTE_LOCAL,
    TABLE_LOCAL,
    TABLE_MAIN,
    InterfaceAddress,
    Neighbour,
    Route,
    SourceRule,
    add_address,
    add_route,
    add_rule,
    host_network,
    list_addresses,
    list_neighbours,
    list_rules,
    read_address,
    read_neighbour,
    read_source_rule,
    set_neighbour,
)
from podwire.kernel.sysctl import ensure_sysctl
from podwire.model.endpoint import Device, EndpointRecord, IPAddress
from podwire.model.errors import KernelFailure
from podwire.model.ids import GATEWAY_IPV4, GATEWAY_IPV6, ROUTE_PROTOCOL
from podwire.model.interfaces import PodNamespace

RULE_PRIORITY: Final = 1990
LOCAL_ROUTE_LIFETIME_S: Final = 60
_LOOPBACK_INDEX: Final = 1
_AF: Final = {4: 2, 6: 10}
_DEFAULT: Final = {
    4: ipaddress.ip_network("0.0.0.0/0"),
    6: ipaddress.ip_network("::/0"),
}
_GATEWAY: Final[dict[int, IPAddress]] = {
    4: ipaddress.ip_address(GATEWAY_IPV4),
    6: ipaddress.ip_address(GATEWAY_IPV6),
}

_GATEWAY_NETWORK: Final = {version: host_network(gateway) for version, gateway in _GATEWAY.items()}


class FamilyPlan(msgspec.Struct, frozen=True):
    """What one family of one attachment needs in the pod; what few need is computed when it is asked for."""

    device: Device
    ip: IPAddress
    mtu: int
    """Bytes, on the default routes; 0 = the device's."""

    @property
    def index(self) -> int:
        """Index of the pod's device."""
        return int(self.device.pod_ifindex)

    @property
    def metric(self) -> int:
        """The family's metric for routes that name none."""
        return 0 if self.ip.version == 4 else IPV6_DEFAULT_METRIC

    @property
    def address(self) -> InterfaceAddress:
        """The address on the pod's device."""
        # A /32 or /128: with a subnet the pod would ask for its neighbours on the link, where only the gateway
        # answers.
        return InterfaceAddress(self.index, self.ip, self.ip.max_prefixlen)

    @property
    def local_route(self) -> Route | None:
        """The route that makes an IPv6 address the pod's own, until the kernel's is there."""
        # The kernel makes one in a work of its own, some time after the address, also where no duplicates are looked
        # for (net/ipv6/addrconf.c:addrconf_dad_start). What comes in before that is dropped, and the first packet
        # after an ADD was lost.
        if self.ip.version == 4:
            return None
        # With a lifetime, so that the kernel's own route remains in the end, and goes with the address.
        return Route(
            host_network(self.ip),
            index=self.index,
            table=TABLE_LOCAL,
            protocol=ROUTE_PROTOCOL,
            metric=self.metric,
            kind=ROUTE_LOCAL,
            lifetime_s=LOCAL_ROUTE_LIFETIME_S,
        )

    @property
    def neighbour(self) -> Neighbour:
        """The gateway's permanent entry."""
        return Neighbour(self.index, _GATEWAY[self.ip.version], self.device.host_mac)

    @property
    def gateway_route(self) -> Route:
        """The route to the gateway."""
        return Route(
            _GATEWAY_NETWORK[self.ip.version],
            index=self.index,
            protocol=ROUTE_PROTOCOL,
            metric=self.metric,
        )

    @property
    def default_route(self) -> Route:
        """The default route of the first attachment."""
        return self._default(self.metric, TABLE_MAIN)

    @property
    def further_default_route(self) -> Route:
        """The default route of a further attachment, for what binds to its device."""
        # The index as metric: no two devices of a pod have the same one, and the first attachment's metric is lower.
        return self._default(self.index, TABLE_MAIN)

    @property
    def table_default_route(self) -> Route:
        """The default route in the table of a further attachment."""
        return self._default(self.metric, self.index)

    @property
    def rule(self) -> SourceRule:
        """The rule that sends what has the address into that table."""
        return SourceRule(host_network(self.ip), self.index, RULE_PRIORITY, ROUTE_PROTOCOL)

    def _default(self, metric: int, table: int) -> Route:
        return Route(
            _DEFAULT[self.ip.version],
            index=self.index,
            gateway=_GATEWAY[self.ip.version],
            table=table,
            protocol=ROUTE_PROTOCOL,
            metric=metric,
            mtu=self.mtu,
            onlink=True,
        )


def plan_family(device: Device, address: IPAddress, *, route_mtu: int = 0) -> FamilyPlan:
    """Plan what an address needs in the pod; `route_mtu` in bytes, 0 or the device's own = none on the route."""
    return FamilyPlan(device, address, 0 if route_mtu == device.mtu else route_mtu)


def configure_pod(
    record: EndpointRecord,
    namespace: PodNamespace,
    *,
    route_mtu: int = 0,
    home: Fd | None = None,
) -> None:
    """Give the pod's end its addresses, gateway, routes and neighbours, and set it up.

    `home`: the namespace of the calling thread, where the caller has it open. Raises KernelFailure.
    """
    with netns.namespace(namespace.fd, home):
        # The socket stays bound to the pod's namespace; the thread leaves it before the requests are sent.
        netlink = NetlinkSocket()
        try:
            if record.ipv6:
                _switch_ipv6_on(record)
        except BaseException:
            netlink.close()
            raise
    with netlink:
        _set_up(netlink, record, route_mtu)


def compare_pod(
    record: EndpointRecord, namespace: PodNamespace, *, route_mtu: int = 0
) -> list[str]:
    """Name what differs inside the pod: device, addresses, routes, neighbours, MTU.

    Changes nothing.
    """
    device = record.device
    with NetlinkSocket.open_in(namespace.fd) as netlink:
        body = netlink.find(get_link(device.pod_ifindex))
        if body is None:
            return [f"pod device {device.pod_name!r} is missing"]
        link = read_link(body)
        wanted = {
            "name": (link.name, device.pod_name),
            "mtu": (link.mtu, device.mtu),
            "mac": (link.mac, device.pod_mac),
            "peer index": (link.peer_index, device.host_ifindex),
            "state": ("up" if link.up else "down", "up"),
        }
        differences = list_differences(f"pod device {device.pod_name!r}", wanted)
        loopback = netlink.find(get_link(_LOOPBACK_INDEX))
        if loopback is None or not read_link(loopback).up:
            differences.append("pod device 'lo' is 'down', wanted 'up'")
        addresses = {
            read_address(body) for body in netlink.dump(list_addresses(device.pod_ifindex))
        }
        neighbours = {
            read_neighbour(body) for body in netlink.dump(list_neighbours(device.pod_ifindex))
        }
        for address in record.addresses:
            family = plan_family(device, address, route_mtu=route_mtu)
            if family.address not in addresses:
                differences.append(f"pod address {address} is missing")
            if family.neighbour not in neighbours:
                differences.append(
                    f"pod neighbour {family.neighbour.address} at {family.neighbour.mac} is missing"
                )
            differences += _compare_routes(netlink, family)
    return differences


def _switch_ipv6_on(record: EndpointRecord) -> None:
    """Undo what some runtimes do to every new namespace; the calling thread is inside the pod's."""
    for device in (record.device.pod_name, "lo"):
        ensure_sysctl("0", "ipv6", "conf", device, "disable_ipv6")


def _set_up(netlink: NetlinkSocket, record: EndpointRecord, route_mtu: int) -> None:
    """Make the pod's end. Where another attachment has the default route, this one's becomes a further one."""
    if route_mtu:
        failures: Sequence[KernelFailure | None] = netlink.attempt(
            _plan_set_up(record, route_mtu=route_mtu)
        )
    else:
        failures = netlink.attempt_batch(_SET_UP.encode(record))
    families = [plan_family(record.device, one, route_mtu=route_mtu) for one in record.addresses]
    routes_at = len(failures) - _ROUTES * len(families)
    further: list[FamilyPlan] = []
    for position, failure in enumerate(failures):
        if failure is None:
            continue
        # Another attachment of this pod has the gateway or the default route already: this one's goes into a table of
        # its own.
        if position >= routes_at and failure.errno == errno.EEXIST:
            family = families[(position - routes_at) // _ROUTES]
            further += [] if family in further else [family]
        # A host without IPv6 cannot switch its link-local address off, and has none.
        elif position != _QUIET_AT or failure.errno != errno.EAFNOSUPPORT or record.ipv6:
            raise failure
    _add_further(netlink, further)


def _plan_set_up(
    record: EndpointRecord, _namespace_fd: int = 0, *, route_mtu: int = 0
) -> list[Request]:
    """List what sets a pod's side up, in order: addresses, the device, then routes, _ROUTES of each family."""
    # Addresses before the device is up, so that it never runs without them.
    device = record.device
    families = [plan_family(device, address, route_mtu=route_mtu) for address in record.addresses]
    local_routes = [route for family in families if (route := family.local_route) is not None]
    requests = [
        # A new namespace has its loopback down.
        set_link(_LOOPBACK_INDEX, name="lo", up=True),
        # By itself: in one message the kernel would set the device up first, and make the address.
        set_link(device.pod_ifindex, name=device.pod_name, no_link_local=True),
        *(add_address(family.address) for family in families),
        set_link(device.pod_ifindex, name=device.pod_name, up=True),
        *(add_route(route) for route in local_routes),
        *(set_neighbour(family.neighbour) for family in families),
    ]
    for family in families:
        requests += [add_route(family.gateway_route), add_route(family.default_route)]
    return requests


_QUIET_AT: Final = 1
"""Where the request that wants no link-local address is."""
_ROUTES: Final = 2
_SET_UP: Final = EncodedPlan(_plan_set_up, "")


def _add_further(netlink: NetlinkSocket, families: list[FamilyPlan]) -> None:
    for family in families:
        netlink.execute(
            [
                add_route(family.further_default_route),
                add_route(family.table_default_route),
                add_rule(family.rule),
            ]
        )


def _compare_routes(netlink: NetlinkSocket, family: FamilyPlan) -> list[str]:
    version = family.address.address.version
    on_device = dump_routes(netlink, _AF[version], index=family.address.index)
    if any(_same_route(route, family.default_route) for route in on_device):
        if any(_same_route(route, family.gateway_route) for route in on_device):
            return []
        return [f"pod route to {family.gateway_route.destination} is missing"]
    differences = [
        f"pod route to {wanted.destination} in table {wanted.table} is missing or has another mtu"
        for wanted in (family.further_default_route, family.table_default_route)
        if not any(_same_route(route, wanted) for route in on_device)
    ]
    rules = [read_source_rule(body) for body in netlink.dump(list_rules(_AF[version]))]
    if differences == [] and family.rule not in rules:
        differences.append(f"pod rule for source {family.rule.source} is missing")
    return differences


def _same_route(route: Route, wanted: Route) -> bool:
    """Compare two routes by all that we set, but for the on-link flag."""
    # The kernel drops or adds the on-link flag as it likes.
    compared = attrgetter("destination", "index", "gateway", "table", "metric", "mtu")
    return bool(compared(route) == compared(wanted))
