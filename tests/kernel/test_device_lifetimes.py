"""Many pods, random lives: whatever order things end in, nothing is left and everybody is told."""

import random
from contextlib import ExitStack

from podwire.datapath.device import (
    HostSide,
    LeftoverDevice,
    compare_device,
    create_device,
    list_devices,
)
from podwire.datapath.pod_net import compare_pod, configure_pod
from podwire.datapath.reaper import Reaper
from podwire.datapath.routes import list_pod_routes, remove_host_routes
from podwire.kernel.netlink import NetlinkSocket
from podwire.model.endpoint import EndpointRecord
from podwire.model.ids import EndpointId
from tests.kernel.conftest import DeviceRig, Namespace, RecordMaker, new_namespace

_CONTAINERS = 6


class _Node:
    """A node as its journal would know it, driven by random events."""

    def __init__(
        self, netlink: NetlinkSocket, deleting: NetlinkSocket, side: HostSide, make: RecordMaker
    ) -> None:
        self.netlink, self.deleting, self.side, self.make = netlink, deleting, side, make
        self.reaper = Reaper(netlink, deleting)
        self.live: dict[str, tuple[EndpointRecord, Namespace, ExitStack]] = {}
        self.ending: set[EndpointId] = set()
        self.number = 0

    def add(self, container: str) -> None:
        if container in self.live:
            return
        self.number += 1
        with ExitStack() as stack:
            pod = stack.enter_context(new_namespace())
            record = self.make(self.number, container=container, namespace=pod)
            try:
                create_device(self.netlink, record, pod.pod, self.side)
            except LeftoverDevice:
                self.reap()
                create_device(self.netlink, record, pod.pod, self.side)
            configure_pod(record, pod.pod)
            self.live[container] = (record, pod, stack.pop_all())

    def remove(self, container: str, *, namespace_first: bool) -> None:
        if container not in self.live:
            return
        record, _, stack = self.live.pop(container)
        if namespace_first:
            stack.close()
        remove_host_routes(self.netlink, record)
        self.reaper.condemn(record.id, record.device.host_ifindex)
        self.ending.add(record.id)
        stack.close()

    def restart(self) -> None:
        """A new agent has an empty reaper and condemns again what its journal says is ending."""
        self.reaper = Reaper(self.netlink, self.deleting)
        indexes = {owner.endpoint_id: owner.index for owner in list_devices(self.netlink)[0]}
        for endpoint_id in list(self.ending):
            if endpoint_id in indexes:
                self.reaper.condemn(endpoint_id, indexes[endpoint_id])
            else:
                self.ending.discard(endpoint_id)

    def reap(self) -> None:
        gone = set(self.reaper.reap())
        assert gone <= self.ending
        self.ending -= gone

    def check(self) -> None:
        for record, pod, _ in self.live.values():
            assert compare_device(self.netlink, record, self.side) == []
            assert compare_pod(record, pod.pod) == []


def test_random_lives_leave_nothing(
    rig: DeviceRig,
    seed: int,
    *,
    full: bool,
) -> None:
    chance = random.Random(seed)
    with NetlinkSocket() as deleting:
        node = _Node(rig.netlink, deleting, rig.side, rig.make_record)
        try:
            for _ in range(1000 if full else 120):
                _do_something(node, chance)
            node.check()
        finally:
            for container in list(node.live):
                node.remove(container, namespace_first=False)
        node.reap()
    assert node.ending == set()
    assert list_devices(rig.netlink) == ([], [])
    assert list_pod_routes(rig.netlink) == []
    assert [link["ifname"] for link in rig.host.ip("link")] == ["lo"]


def _do_something(node: _Node, chance: random.Random) -> None:
    container = f"container-{chance.randrange(_CONTAINERS)}"
    event = chance.choices(["add", "remove", "vanish", "reap", "restart"], [8, 4, 3, 2, 1])[0]
    if event == "add":
        node.add(container)
    elif event == "restart":
        node.restart()
    elif event == "reap":
        node.reap()
    else:
        node.remove(container, namespace_first=event == "vanish")
