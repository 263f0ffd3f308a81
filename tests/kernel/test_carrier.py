"""Waiting for the carrier of a pair: also where a look brings nothing forward, and never for ever."""

import pytest

from podwire.datapath import carrier
from podwire.datapath.carrier import await_carrier
from podwire.datapath.pod_net import configure_pod
from podwire.kernel.netlink import NetlinkSocket, Request
from podwire.kernel.rtnl.link import is_operating, list_links, read_link
from podwire.model.errors import Unavailable
from tests.kernel.conftest import DeviceRig

PODS = 50


class OlderKernel(NetlinkSocket):
    """Looks devices up in the list of all, which brings nothing forward on any kernel: before 6.8 no look did."""

    def get(self, request: Request) -> bytes:
        """Find the device that is asked for."""
        index = int.from_bytes(request.body[4:8], "little")
        return next(
            body for body in self.dump(list_links(kind="veth")) if read_link(body).index == index
        )


def test_a_kernel_that_puts_it_off_is_waited_for(rig: DeviceRig) -> None:
    with OlderKernel() as older:
        for number in range(1, PODS + 1):
            record = rig.make_record(number, namespace=rig.pod, if_name=f"eth{number}")
            rig.create(record)
            configure_pod(record, rig.pod.pod)
            await_carrier(older, record.device)
            assert all(is_operating(body) for body in older.dump(list_links(kind="veth")))


def test_a_carrier_that_does_not_come_is_refused(
    rig: DeviceRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = rig.make_record(1, namespace=rig.pod)
    rig.create(record)
    monkeypatch.setattr(carrier, "WAIT_S", 0.05)
    with pytest.raises(Unavailable, match="was not there"):
        await_carrier(rig.netlink, record.device)
