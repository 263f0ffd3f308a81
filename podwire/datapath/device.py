"""Device pairs of pods, seen from the host: plan, make, repair, compare, list, and delete in batches.

`datapath.node` combines these for `model.interfaces.Datapath`. A pair belongs to podwire when its alias says so.
Between its creation and the alias (one system call later) its group and its MAC identify it. Nothing without such a
mark is ever changed. Invariant: programs are attached to the host device before it is up, so no packet passes unseen.
Indexes derive from the endpoint's number, never from the kernel's choice.
"""

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final

from podwire.datapath.differences import list_differences
from podwire.datapath.encoded import EncodedPlan
from podwire.datapath.routes import (
    SourceAddresses,
    compare_host_routes,
    plan_requests,
    require_free_destinations,
)
from podwire.kernel import netns
from podwire.kernel.netlink import NetlinkSocket, Request
from podwire.kernel.probe import Feature, explain_failure
from podwire.kernel.rtnl.link import (
    Link,
    LinkEnd,
    create_veth,
    delete_link,
    get_link,
    list_links,
    read_link,
    set_link,
)
from podwire.kernel.rtnl.route import RTM_NEWROUTE
from podwire.kernel.rtnl.tc import (
    FROM_POD_HOOK,
    RTM_NEWQDISC,
    TO_POD_HOOK,
    add_clsact,
    list_filters,
    read_bpf_filter,
    set_bpf_filter,
)
from podwire.kernel.sysctl import ensure_sysctl, sysctl_exists
from podwire.model.endpoint import Device, EndpointRecord
from podwire.model.errors import (
    Exhausted,
    ForeignObject,
    InvalidConfiguration,
    InvalidEnvironment,
    KernelFailure,
    Unavailable,
    Unsupported,
)
from podwire.model.ids import (
    DEVICE_HASH_DIGITS,
    DEVICE_PREFIX,
    FILTER_HANDLE,
    FILTER_PRIORITY,
    EndpointId,
    IfIndex,
    InterfaceName,
    device_alias,
    device_mac,
    parse_device_alias,
)
from podwire.model.interfaces import PodNamespace

KIND: Final = "veth"
LIVE_GROUP: Final = 0x70770001
CONDEMNED_GROUP: Final = 0x70770002
"""Group of devices that wait for the reaper: one group delete waits for RCU once, not once per device."""
FIRST_INDEX: Final = 1 << 20
"""Pods' devices have numbers from here on: well above what the kernel hands out by itself, counting up from 1."""
_INDEX_PAIRS: Final = ((1 << 31) - FIRST_INDEX) // 2 - 1
_PLAN_TRIES: Final = 64
_IPV6_MIN_MTU: Final = 1280
"""RFC 8200, section 5; below it the kernel switches IPv6 off on the device."""
_QUEUES: Final = 1
"""The kernel would make one per CPU, with files in sysfs for each, and use one."""
_MAC_MARK: Final = device_mac(EndpointId(1), 1)[:5]


@dataclass(frozen=True)
class Programs:
    """The two programs of a pod's device: descriptors to attach, and the kernel's numbers to recognise them by."""

    from_pod_fd: int
    to_pod_fd: int
    from_pod_id: int
    to_pod_id: int


@dataclass(frozen=True)
class HostSide:
    """What the node gives to every pair's host end."""

    node_name: str
    programs: Programs
    sources: SourceAddresses

    @cached_property
    def own_cookie(self) -> int:
        """The namespace that the node is in, as the thread that asks first."""
        return netns.current_cookie()

    @cached_property
    def pairs(self) -> EncodedPlan:
        """The message that makes a pair."""
        return EncodedPlan(_plan_pair, self.node_name)

    @cached_property
    def furnishings(self) -> EncodedPlan:
        """The messages that give a new pair its host side."""
        return EncodedPlan(partial(_plan_furnishing, self), self.node_name)


@dataclass(frozen=True)
class OwnedDevice:
    """A host device with our mark."""

    endpoint_id: EndpointId
    node_name: str
    """"" when the device died before it got its alias."""
    name: InterfaceName
    index: IfIndex
    condemned: bool


class LeftoverDevice(Unavailable):
    """The name is held by an older device of ours.

    `condemned`: a flush of the reaper frees it at once.
    """

    def __init__(self, name: str, owner: OwnedDevice) -> None:
        of_node = f" of node {owner.node_name!r}" if owner.node_name else ""
        super().__init__(
            f"create device pair {name!r}: the device of endpoint {owner.endpoint_id}{of_node} still exists",
            hint="it is being deleted; try again"
            if owner.condemned
            else f"try again; if it stays, no endpoint has it: ip link del {name}",
        )
        self.owner = owner
        self.condemned = owner.condemned


def plan_device(
    netlink: NetlinkSocket,
    endpoint_id: EndpointId,
    host_name: InterfaceName,
    pod_name: InterfaceName,
    *,
    mtu: int,
    pod_mac: str = "",
) -> Device:
    """Choose indexes and MACs of a pair that does not exist yet; `mtu` in bytes."""
    for attempt in range(_PLAN_TRIES):
        # Both indexes differ: equal ones make the kernel report a pair's loss of carrier up to a second late.
        host_index = FIRST_INDEX + 2 * ((int(endpoint_id) + attempt * 7919) % _INDEX_PAIRS)
        if not netlink.has_index(host_index):
            return Device(
                kind=KIND,
                host_name=host_name,
                host_ifindex=IfIndex(host_index),
                host_mac=device_mac(endpoint_id, 1),
                pod_name=pod_name,
                pod_ifindex=IfIndex(host_index + 1),
                pod_mac=pod_mac or device_mac(endpoint_id, 0),
                mtu=mtu,
            )
    raise Exhausted(f"choose a device index for endpoint {endpoint_id}: all tried ones are taken")


def create_device(
    netlink: NetlinkSocket, record: EndpointRecord, namespace: PodNamespace, side: HostSide
) -> None:
    """Make the pair with its peer inside `namespace`, then programs, mark, routes and neighbours in one send.

    The calling thread must be in the host's namespace. Two sends, because the kernel goes on after a failed request:
    had the first one failed, the others would hit whatever device has that index. Raises InvalidConfiguration (the pod
    has an interface of that name, the MTU is too small), ForeignObject, LeftoverDevice, Unavailable (an index is taken:
    plan again), KernelFailure; nothing is left then.
    """
    # Pods in the host's network need no CNI. With the host taken for a pod, address and default route would be set on
    # the host.
    if namespace.cookie == side.own_cookie:
        raise InvalidEnvironment(
            f"create device pair {record.device.host_name!r}: the pod's namespace"
            f" {namespace.path!r} is the host's own",
            hint="CNI_NETNS must name the container's namespace",
        )
    device = record.device
    if record.ipv6 and device.mtu < _IPV6_MIN_MTU:
        raise InvalidConfiguration(
            f"create device pair {device.host_name!r}: MTU {device.mtu} is below IPv6's minimum"
            f" of {_IPV6_MIN_MTU}",
            hint="raise `mtu`, or give the pod IPv4 only",
        )
    pair = side.pairs.encode(record, namespace.fd)
    # By itself: the kernel goes on after a failed request, and what follows would change whatever device has that
    # index.
    for failure in filter(None, netlink.attempt_batch(pair)):
        cause = _explain(netlink, record, namespace, failure)
        # What had the name may be gone by now: a pair dies with its namespace, whenever the kernel likes.
        if not isinstance(cause, Unavailable) or any(netlink.attempt_batch(pair)):
            raise cause from failure
    try:
        _furnish(netlink, record, side)
    except BaseException:
        netlink.attempt([delete_link(device.host_ifindex)])
        raise


def repair_device(netlink: NetlinkSocket, record: EndpointRecord, side: HostSide) -> list[str]:
    """Put right what differs on the host's side, programs replaced in place; gives what differed."""
    differences = compare_device(netlink, record, side)
    if differences and require_owned(netlink, record) is not None:
        _furnish(netlink, record, side, replace=True)
    return differences


def compare_device(netlink: NetlinkSocket, record: EndpointRecord, side: HostSide) -> list[str]:
    """Name what differs between the host's side of a pair and what it should be."""
    device = record.device
    body = netlink.find(get_link(device.host_ifindex))
    if body is None:
        return [f"host device {device.host_name!r} is missing"]
    link = read_link(body)
    wanted = {
        "name": (link.name, device.host_name),
        "alias": (link.alias, device_alias(side.node_name, record.id)),
        "kind": (link.kind, KIND),
        "mtu": (link.mtu, device.mtu),
        "mac": (link.mac, device.host_mac),
        "peer index": (link.peer_index, device.pod_ifindex),
        "state": ("up" if link.up else "down", "up"),
    }
    differences = list_differences(f"host device {device.host_name!r}", wanted)
    differences += _compare_programs(netlink, device, side.programs)
    return differences + compare_host_routes(netlink, record, side.sources)


def require_owned(netlink: NetlinkSocket, record: EndpointRecord) -> OwnedDevice | None:
    """Give the record's device, None when it is gone; ForeignObject when its index belongs to anything else."""
    # An index alone is no proof: when a device is gone, anybody may make another one with that index.
    body = netlink.find(get_link(record.device.host_ifindex))
    if body is None:
        return None
    link = read_link(body)
    owner = read_owner(link)
    if owner is None or owner.endpoint_id != record.id:
        raise ForeignObject(
            f"touch device {link.name!r}: it is not that of endpoint {record.id}",
            hint=f"see `ip -d link show {link.name}`",
        )
    return owner


def read_owner(link: Link) -> OwnedDevice | None:
    """Tell whose pair a device belongs to; None for anything that has no mark of podwire."""
    condemned = link.group == CONDEMNED_GROUP
    mark = parse_device_alias(link.alias)
    if mark is not None:
        node_name, endpoint_id = mark
    elif not link.alias and link.group in (LIVE_GROUP, CONDEMNED_GROUP) and link.kind == KIND:
        # Killed between birth and alias: the MAC of the host's end carries the endpoint's number.
        if not link.mac.startswith(_MAC_MARK):
            return None
        node_name, endpoint_id = "", EndpointId(int(link.mac[5:].replace(":", ""), 16))
    else:
        return None
    return OwnedDevice(
        endpoint_id, node_name, InterfaceName(link.name), IfIndex(link.index), condemned
    )


def list_devices(netlink: NetlinkSocket) -> tuple[list[OwnedDevice], list[InterfaceName]]:
    """List devices with our mark, and the names of devices that only look like ours."""
    owned, foreign = [], []
    # All links are read: the kernel filters a dump of links by kind, not by alias.
    for body in netlink.dump(list_links()):
        link = read_link(body)
        owner = read_owner(link)
        if owner is not None:
            owned.append(owner)
        elif _has_our_form(link.name):
            foreign.append(InterfaceName(link.name))
    return owned, foreign


def _furnish(
    netlink: NetlinkSocket, record: EndpointRecord, side: HostSide, *, replace: bool = False
) -> None:
    """Give an existing pair its host side; with `replace`, every request may find its work done."""
    if replace:
        require_free_destinations(netlink, record)
        requests = _plan_furnishing(side, record, replace=True)
        failures: Sequence[KernelFailure | None] = netlink.attempt(requests)
    else:
        failures = netlink.attempt_batch(side.furnishings.encode(record))
        if not failures:
            return
        requests = _plan_furnishing(side, record)
    again = [
        (request, failure)
        for request, failure in zip(requests, failures, strict=True)
        if failure is not None and not _is_harmless(record, request, failure, replace=replace)
    ]
    if again:
        _furnish_again(netlink, record, side, again)


def _plan_pair(record: EndpointRecord, namespace_fd: int) -> list[Request]:
    device = record.device
    host = LinkEnd(
        device.host_name,
        device.host_ifindex,
        device.host_mac,
        device.mtu,
        group=LIVE_GROUP,
        queues=_QUEUES,
    )
    pod = LinkEnd(device.pod_name, device.pod_ifindex, device.pod_mac, device.mtu, queues=_QUEUES)
    return [create_veth(host, pod, namespace_fd)]


def _plan_furnishing(
    side: HostSide, record: EndpointRecord, _namespace_fd: int = 0, *, replace: bool = False
) -> list[Request]:
    device = record.device
    index, name = device.host_ifindex, device.host_name
    programs = side.programs
    # Programs before the device is up, because a device that is up passes packets. The kernel makes an IPv6 link-local
    # address at the moment in which a device comes up (net/ipv6/addrconf.c:addrconf_notify), so that is switched off
    # in a request of its own before.
    return [
        add_clsact(index),
        set_bpf_filter(index, FROM_POD_HOOK, programs.from_pod_fd, "from_pod"),
        set_bpf_filter(index, TO_POD_HOOK, programs.to_pod_fd, "to_pod"),
        set_link(index, name=name, no_link_local=True),
        set_link(
            index,
            name=name,
            up=True,
            alias=device_alias(side.node_name, record.id),
            mtu=device.mtu if replace else 0,
            mac=device.host_mac if replace else "",
        ),
        *plan_requests(record, side.sources, replace=replace),
    ]


def _is_harmless(
    record: EndpointRecord, request: Request, failure: KernelFailure, *, replace: bool
) -> bool:
    """Tell whether a request failed because nothing was to do: hooks in place, or a host without IPv6."""
    if failure.errno == errno.EEXIST:
        return replace and request.type == RTM_NEWQDISC
    return failure.errno == errno.EAFNOSUPPORT and not record.ipv6


def _furnish_again(
    netlink: NetlinkSocket,
    record: EndpointRecord,
    side: HostSide,
    failed: list[tuple[Request, KernelFailure]],
) -> None:
    """Remove what can stand in the way (IPv6 off for new devices, a stale route of ours), try once more."""
    first = failed[0][1]
    numbers = {failure.errno for _, failure in failed}
    # A route of ours may still lead to the address of a pod that is gone; one without our mark is refused.
    if numbers == {errno.EEXIST} and all(request.type == RTM_NEWROUTE for request, _ in failed):
        require_free_destinations(netlink, record)
        netlink.execute(plan_requests(record, side.sources, replace=True))
        return
    if record.ipv6 and numbers <= {errno.EACCES, errno.EINVAL, errno.EAFNOSUPPORT}:
        path = ("ipv6", "conf", record.device.host_name, "disable_ipv6")
        if not sysctl_exists(*path):
            raise Unsupported(
                f"give pod device {record.device.host_name!r} an IPv6 route: this host has no IPv6",
                hint="give pods IPv4 only, or boot without ipv6.disable",
            ) from first
        # net.ipv6.conf.default.disable_ipv6 was set when the device came: the requests for IPv6 are sent once more.
        if ensure_sysctl("0", *path) is not None:
            netlink.execute([request for request, _ in failed])
            return
    if first.errno in (errno.EOPNOTSUPP, errno.ENOENT):
        raise explain_failure(first, Feature.CLSACT_BPF)
    raise first


def _compare_programs(netlink: NetlinkSocket, device: Device, programs: Programs) -> list[str]:
    differences = []
    for name, hook, wanted in (
        ("from_pod", FROM_POD_HOOK, programs.from_pod_id),
        ("to_pod", TO_POD_HOOK, programs.to_pod_id),
    ):
        present = list_attached_programs(netlink, device.host_ifindex, hook)
        if not present:
            differences.append(f"program {name} is not attached to {device.host_name!r}")
        elif present[0] != wanted:
            differences.append(
                f"program {name} of {device.host_name!r} is number {present[0]}, wanted {wanted}"
            )
    return differences


def list_attached_programs(
    netlink: NetlinkSocket, index: int, hook: int, handle: int = FILTER_HANDLE
) -> list[int]:
    """List the numbers of the programs that a hook has where podwire's stand."""
    filters = (read_bpf_filter(body) for body in netlink.dump(list_filters(index, hook)))
    return [
        attached.program_id
        for attached in filters
        if attached is not None
        and (attached.priority, attached.handle) == (FILTER_PRIORITY, handle)
    ]


def _explain(
    netlink: NetlinkSocket, record: EndpointRecord, namespace: PodNamespace, failure: KernelFailure
) -> Exception:
    """Find out why the pair could not be made; looked at only after the failure, never before."""
    if failure.errno == errno.EOPNOTSUPP:
        return explain_failure(failure, Feature.VETH)
    if failure.errno not in (errno.EEXIST, errno.EBUSY):
        return failure
    device = record.device
    body = netlink.find(get_link(name=device.host_name))
    if body is not None:
        owner = read_owner(read_link(body))
        if owner is not None:
            return LeftoverDevice(device.host_name, owner)
        return ForeignObject(
            f"create device pair {device.host_name!r}: a device of that name has no mark of podwire",
            hint=f"rename or delete it: ip link del {device.host_name}",
        )
    with NetlinkSocket.open_in(namespace.fd) as inside:
        if inside.find(get_link(name=device.pod_name)) is not None:
            return InvalidConfiguration(
                f"create interface {device.pod_name!r} in the pod: the interface name exists",
                hint="use another CNI_IFNAME, or delete the interface",
            )
    return Unavailable(
        f"create device pair {device.host_name!r}: device index {device.host_ifindex} or"
        f" {device.pod_ifindex} is taken",
        hint="try again: other indexes are chosen",
    )


def _has_our_form(name: str) -> bool:
    digits = name.removeprefix(DEVICE_PREFIX)
    return (
        name.startswith(DEVICE_PREFIX)
        and len(digits) == DEVICE_HASH_DIGITS
        and all(digit in "0123456789abcdef" for digit in digits)
    )
