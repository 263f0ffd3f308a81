"""When a node's pods are published, as its thread does it: in real time, with a store in memory."""

import ipaddress
from typing import Any

from podwire.model.ids import EndpointId
from tests.unit.test_cluster_duty import Rig, wait_for


class Looks:
    """Counts how often the publisher looks at the pods."""

    def __init__(self, rig: Rig) -> None:
        self.count = 0
        self._list_pods: Any = rig.duty.list_pods
        rig.duty.list_pods = self  # type: ignore[method-assign]

    def __call__(self) -> Any:
        found = self._list_pods()
        self.count += 1
        return found


def test_a_pod_that_comes_in_the_quiet_second_behind_a_write_is_published_when_that_is_over() -> (
    None
):
    with Rig().running() as rig:
        wait_for(lambda: rig.said() is not None, "the first write")
        looks = Looks(rig)
        rig.duty._publisher.wake()
        wait_for(lambda: looks.count, "a look in the quiet second that finds nothing")
        rig.add_pod(1, "10.244.1.9", 300)
        wait_for(lambda: rig.said().identities == {ipaddress.ip_address("10.244.1.9"): 300})


def test_so_is_one_that_comes_when_the_look_found_only_a_pod_that_went() -> None:
    with Rig().running() as rig:
        rig.add_pod(1, "10.244.1.9", 300)
        wait_for(lambda: rig.said() is not None and rig.said().identities, "the first pod")
        looks = Looks(rig)
        rig.table.discard(EndpointId(1))
        rig.duty._publisher.wake()
        wait_for(lambda: looks.count, "a look in the quiet second that finds a release")
        rig.add_pod(2, "10.244.1.10", 300)
        wait_for(lambda: rig.said().identities == {ipaddress.ip_address("10.244.1.10"): 300})
