"""What the kernel holds of podwire on this node, and the removal of what has no owner.

Called by `datapath.node` at the start of the agent and by `podwire cleanup`. Never touches a device, route or row
without podwire's mark, nor one that a record in `keep` accounts for. Invariant: whatever `read_inventory` lists,
`remove_leftovers` can remove, so both together leave nothing.
"""

import errno
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from podwire.datapath import maps as rows
from podwire.datapath.device import CONDEMNED_GROUP, OwnedDevice, list_devices
from podwire.datapath.maps import NodeMaps
from podwire.datapath.masquerade import Masquerade
from podwire.datapath.native import (
    OwnHooks,
    list_attached,
    list_free_hooks,
    remove_attached,
)
from podwire.datapath.programs import remove_directory
from podwire.datapath.routes import (
    is_of_block,
    is_to_node,
    is_to_pod,
    list_own_routes,
    list_pod_routes,
    remove_routes,
)
from podwire.datapath.tunnel import list_tunnels
from podwire.kernel.netlink import NetlinkSocket
from podwire.kernel.nft import Nftables
from podwire.kernel.rtnl.link import delete_group, delete_link, set_link
from podwire.kernel.rtnl.route import Route
from podwire.model.endpoint import EndpointRecord
from podwire.model.ids import NFT_TABLE, EndpointId, IfIndex
from podwire.model.interfaces import Inventory, PresentDevice


@dataclass
class _Keep:
    """What the records account for."""

    endpoint_ids: set[EndpointId] = field(default_factory=set)
    indexes: set[IfIndex] = field(default_factory=set)
    addresses: set[str] = field(default_factory=set)
    devices: set[tuple[EndpointId, IfIndex]] = field(default_factory=set)

    @classmethod
    def of(cls, records: Iterable[EndpointRecord]) -> "_Keep":
        keep = cls()
        for record in records:
            keep.endpoint_ids.add(record.id)
            keep.indexes.add(record.device.host_ifindex)
            keep.addresses.update(str(address) for address in record.addresses)
            keep.devices.add((record.id, record.device.host_ifindex))
        return keep


def read_inventory(netlink: NetlinkSocket, maps: NodeMaps, node_name: str) -> Inventory:
    """List devices, rows and routes with this node's mark."""
    owned, foreign = list_devices(netlink)
    mine = [device for device in owned if is_of_node(device, node_name)]
    return Inventory(
        devices=[PresentDevice(device.endpoint_id, device.name, device.index) for device in mine],
        config_ifindexes=[index for index, _ in rows.list_config(maps)],
        endpoint_addresses=[str(address) for address, _ in rows.list_endpoints(maps)],
        usage_ids=[endpoint_id for endpoint_id, _ in rows.list_usage(maps)],
        host_routes=[_destination(route) for route in _routes_to(netlink, mine)],
        foreign_names=foreign,
    )


def is_of_node(device: OwnedDevice, node_name: str) -> bool:
    """Tell whether a device is this node's. A device without an alias names no node, and counts as every node's."""
    return device.node_name in ("", node_name)


def _routes_to(netlink: NetlinkSocket, devices: Iterable[OwnedDevice]) -> list[Route]:
    indexes = {device.index for device in devices}
    return [route for route in list_pod_routes(netlink) if route.index in indexes]


def _destination(route: Route) -> str:
    return str(route.destination.network_address)


def remove_leftovers(
    netlink: NetlinkSocket,
    maps: NodeMaps,
    node_name: str,
    inventory: Inventory,
    keep_records: Iterable[EndpointRecord],
) -> list[str]:
    """Remove what `inventory` lists and no record accounts for, and routes of ours without an owner; name them."""
    keep = _Keep.of(keep_records)
    # Rows before devices: a device without a row passes nothing.
    removed = _remove_rows(maps, inventory, keep)
    devices = list_devices(netlink)[0]
    mine = [device for device in devices if is_of_node(device, node_name)]
    # A node of another name may have devices in this network namespace: routes to those are its business.
    theirs = {device.index for device in devices} - {device.index for device in mine}
    unwanted = [
        route
        for route in list_own_routes(netlink)
        if not (_is_planned(route) or route.index in theirs or _leads_to_kept(route, keep))
    ]
    remove_routes(netlink, unwanted)
    removed += [f"route to {route.destination}" for route in unwanted]
    return removed + _remove_devices(netlink, mine, keep)


def _is_planned(route: Route) -> bool:
    """Tell whether a route of ours is the business of the plan about other nodes, which a start makes next."""
    return is_to_node(route) or is_of_block(route)


def _leads_to_kept(route: Route, keep: _Keep) -> bool:
    return (
        is_to_pod(route) and route.index in keep.indexes and _destination(route) in keep.addresses
    )


def _remove_rows(maps: NodeMaps, inventory: Inventory, keep: _Keep) -> list[str]:
    indexes = [index for index in inventory.config_ifindexes if index not in keep.indexes]
    maps.pw_config.delete_batch(index.to_bytes(4, "little") for index in indexes)
    removed = [f"row of device index {index}" for index in indexes]
    lost = [
        address
        for address, row in rows.list_endpoints(maps)
        if str(address) not in keep.addresses or row.instance not in keep.endpoint_ids
    ]
    maps.pw_endpoints.delete_batch(rows.to_mapped(address) for address in lost)
    removed += [f"row of address {address}" for address in lost]
    unused = [
        endpoint_id for endpoint_id in inventory.usage_ids if endpoint_id not in keep.endpoint_ids
    ]
    maps.pw_usage.delete_batch(endpoint_id.to_bytes(4, "little") for endpoint_id in unused)
    return removed + [f"quota of endpoint {endpoint_id}" for endpoint_id in unused]


def _remove_devices(netlink: NetlinkSocket, owned: Sequence[OwnedDevice], keep: _Keep) -> list[str]:
    """Delete devices in one batch; of an endpoint's devices only the one its record names is kept."""
    unwanted = [
        device for device in owned if (device.endpoint_id, device.index) not in keep.devices
    ]
    if not unwanted:
        return []
    # By group: the kernel waits for one grace period of RCU at each request to delete, whatever the request names
    # (decisions/0003). A device that died in between with its pod's namespace is no failure.
    netlink.execute(
        [set_link(device.index, name=device.name, group=CONDEMNED_GROUP) for device in unwanted],
        tolerated=(errno.ENODEV,),
    )
    # A device that a record is waiting to have reaped goes as well: that is what it waits for.
    netlink.execute([delete_group(CONDEMNED_GROUP)], tolerated=(errno.ENODEV,))
    return [f"device {device.name} of endpoint {device.endpoint_id}" for device in unwanted]


def _remove_tunnels(netlink: NetlinkSocket) -> list[str]:
    ours = [tunnel.link for tunnel in list_tunnels(netlink) if tunnel.node_name is not None]
    netlink.execute([delete_link(link.index) for link in ours], tolerated=(errno.ENODEV,))
    return [f"tunnel device {link.name}" for link in ours]


def _remove_native(netlink: NetlinkSocket, hooks: OwnHooks) -> list[str]:
    hooks.compare(netlink)
    attached, free = list_attached(netlink), list_free_hooks(netlink, hooks)
    remove_attached(netlink, {*attached, *free}, hooks)
    return name_native(attached, free)


def name_native(attached: Iterable[int], free: Iterable[int]) -> list[str]:
    """Name programs and hooks at devices of the host."""
    return [
        *(f"program from_netdev of device index {index}" for index in attached),
        *(f"clsact queue of device index {index}" for index in free),
    ]


def remove_everything(bpf_dir: Path, hooks: OwnHooks | None = None) -> list[str]:
    """Remove all that any node name has in this network namespace, and the pins; name what was removed.

    For `podwire cleanup --all`, with no agent running: running pods lose their network. `hooks`: what the agent noted.
    """
    hooks = hooks or OwnHooks()
    removed = []
    with NetlinkSocket() as netlink, Nftables() as nft:
        owned = list_devices(netlink)[0]
        removed += _remove_devices(netlink, owned, _Keep())
        leftover = list_own_routes(netlink)
        remove_routes(netlink, leftover)
        removed += [f"route to {route.destination}" for route in leftover]
        removed += _remove_tunnels(netlink)
        removed += _remove_native(netlink, hooks)
        table = Masquerade(nft)
        if table.compare():  # nothing was applied by us, so any table is one too many
            table.remove()
            removed.append(f"nftables table {NFT_TABLE}")
    return removed + remove_directory(bpf_dir)
