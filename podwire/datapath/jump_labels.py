"""Keep the jumps to the hooks of devices in the kernel's code, whether or not any pod's device has hooks.

Used by `datapath.node` for as long as an agent runs. The kernel writes these jumps into its code when the first clsact
queue of the machine comes, and takes them out when the last one goes (net/core/dev.c:net_inc_ingress_queue). Each costs
the ADD of the first pod, or the deletion of the last, 0.1 to 0.2 ms with the lock for devices held, and interrupts
every CPU. Changes nothing that anybody else can see.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from podwire.kernel import netns
from podwire.kernel.fd import Fd
from podwire.kernel.netlink import NetlinkSocket
from podwire.kernel.rtnl.tc import add_clsact

# The one device that every new namespace has, and always under this index (LOOPBACK_IFINDEX of include/net/flow.h).
_LOOPBACK_INDEX: Final = 1


@contextmanager
def kept_in_code() -> Iterator[Fd]:
    """Hold one clsact queue in an empty namespace that ends with this process; gives the namespace."""
    with netns.open_new() as namespace:
        with NetlinkSocket.open_in(namespace.fileno()) as netlink:
            # Attempted only: a kernel without clsact cannot run pods, and says so when the first one comes.
            netlink.attempt([add_clsact(_LOOPBACK_INDEX)])
        yield namespace
