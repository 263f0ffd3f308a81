"""The carrier of a new pair: no ADD answers before both ends can send.

Called by `datapath.node` once the pod's end is up. The end that is set up last finds its carrier present and gets its
queue at once. The host's end was up before it had a carrier. It gets its queue only when the kernel's link-watch work
has run, and drops everything that it should send until then (net/core/link_watch.c,
net/sched/sch_generic.c:dev_activate). Under load that work was seen to run after the ADD's answer, and the first
packet from the node to its pod was lost.

This opens nothing earlier: programs and the row that drops everything were there before either end was up.
"""

import time
from typing import Final

from podwire.kernel.netlink import NetlinkSocket
from podwire.kernel.rtnl.link import get_link, is_operating
from podwire.model.endpoint import Device
from podwire.model.errors import Unavailable

WAIT_S: Final = 5.0
LOOK_S: Final = 0.0002


def await_carrier(netlink: NetlinkSocket, device: Device) -> None:
    """Have the kernel act on the carrier of a pair's host end; Unavailable when it does not within WAIT_S."""
    # Since Linux 6.8 ("net: core: synchronize link-watch when carrier is queried") looking a device up does what is due
    # for it, so that one look is enough. Older kernels are waited for: what they do then is urgent for a device whose
    # peer has another index, and not put off (see `plan_device`).
    request = get_link(device.host_ifindex)
    until_s = time.monotonic() + WAIT_S
    while not is_operating(netlink.get(request)):
        if time.monotonic() > until_s:
            raise Unavailable(
                f"wait for the carrier of device {device.host_name!r}: it was not there after {WAIT_S:g} s",
                hint="try again; if that does not help, check whether something sets the pod's interface down",
            )
        # Linux before 6.8 acts on the carrier in a work queue: there is nothing to wait on, and an ADD waits for
        # this.
        time.sleep(LOOK_S)
