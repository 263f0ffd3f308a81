"""Endings under two threads: the reaper works without the node's turn, and nobody misses what it found."""

import threading
from collections.abc import Sequence

from podwire.model.ids import EndpointId
from podwire.model.interfaces import PodNamespace
from tests.fakes.node import FakeNode
from tests.unit.test_attach_service import request

NETNS = PodNamespace(fd=-1, path="/run/netns/a", cookie=7)


class SlowKernel:
    """A reaper that stays in the kernel until it is let go; a second caller waits behind it, as in KernelDatapath."""

    def __init__(self, node: FakeNode) -> None:
        self._reap = node.datapath.reap_devices
        self._one_at_a_time = threading.Lock()
        self.inside = threading.Event()
        self.let_go = threading.Event()
        node.datapath.reap_devices = self.reap_devices  # type: ignore[method-assign]

    def reap_devices(self) -> Sequence[EndpointId]:
        with self._one_at_a_time:
            gone = self._reap()
            self.inside.set()
            assert self.let_go.wait(30)
        return gone


def test_another_attachment_is_added_while_the_kernel_deletes(node: FakeNode) -> None:
    node.service.add(request(), NETNS)
    node.service.delete(request("DEL", at_ns=200))
    kernel = SlowKernel(node)
    reaper = threading.Thread(target=node.service.settle)
    reaper.start()
    assert kernel.inside.wait(30)
    node.service.add(request(container="c2"), NETNS)
    kernel.let_go.set()
    reaper.join(30)
    assert [endpoint.record.key.container_id for endpoint in node.table] == ["c2"]


def test_an_add_of_the_same_attachment_has_what_the_reaper_found(node: FakeNode) -> None:
    node.service.add(request(), NETNS)
    node.service.delete(request("DEL", at_ns=200))
    kernel = SlowKernel(node)
    reaper = threading.Thread(target=node.service.settle)
    reaper.start()
    assert kernel.inside.wait(30)
    again = threading.Thread(target=node.service.add, args=(request(at_ns=300), NETNS))
    again.start()
    kernel.let_go.set()
    again.join(30)
    reaper.join(30)
    [endpoint] = node.table
    assert endpoint.record.taken_boottime_ns == 300
