"""What somebody takes away from a pod's device comes back within seconds, and is told: there is no policy without."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.lab.rig import Rig, run
from tests.waiting import wait_for

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

DEADLINE_S = 120.0
"""Far below the five minutes of the look at everything, and enough for a busy machine."""


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig() as made:
        made.start()
        yield made


@pytest.mark.parametrize(
    "command",
    [
        pytest.param("tc qdisc del dev {device} clsact", id="both programs"),
        pytest.param("tc filter del dev {device} ingress", id="the program of what it sends"),
        pytest.param("tc filter del dev {device} egress", id="the program of what it gets"),
        pytest.param("ip -4 route flush dev {device}", id="its IPv4 route"),
        pytest.param("ip -6 route flush dev {device}", id="its IPv6 route"),
        pytest.param("ip link set {device} down", id="its carrier"),
    ],
)
def test_what_a_device_lost_comes_back_and_is_told(rig: Rig, command: str) -> None:
    namespace = rig.make_pod_namespace()
    added = rig.cni("ADD", "pod", namespace)
    assert added.ok, added.document
    [record] = rig.read_journal().values()
    device = record["device"]["host_name"]
    previous: dict[str, Any] = {"prevResult": added.document}

    def agrees() -> bool:
        return rig.cni("CHECK", "pod", namespace, config=previous).ok

    def is_missed() -> bool:
        """Take it away and CHECK, which says so unless the agent was faster: then once more."""
        run("ip", "netns", "exec", rig.name, *command.format(device=device).split())
        return not agrees()

    assert agrees()
    wait_for(is_missed, "CHECK to miss it", DEADLINE_S)
    wait_for(agrees, "the device to be whole again", DEADLINE_S)
    wait_for(lambda: "it is repaired" in rig.log_tail(50), "the log to tell it", DEADLINE_S)
