"""Devices that have ended, deleted in batches: the kernel waits for a grace period at each deletion.

Used by `datapath.node`, without the node's turn. Deletes nothing but devices of the group that `condemn` puts them in,
which carry podwire's mark (`datapath.device`).
"""

import errno
from collections.abc import Sequence

from podwire.datapath.device import CONDEMNED_GROUP, read_owner
from podwire.kernel.netlink import NetlinkSocket
from podwire.kernel.rtnl.link import delete_group, get_link, read_link, set_link
from podwire.model.ids import EndpointId, IfIndex


class Reaper:
    """Condemned devices: `condemn` only marks one, `reap` deletes all that are marked with one grace period.

    What is condemned is in the kernel (the group), so a new agent finds it by `list_devices` and reaps it too.
    """

    def __init__(self, netlink: NetlinkSocket, deleting: NetlinkSocket) -> None:
        self._netlink = netlink
        # A delete keeps its socket busy for tens of milliseconds; marking must not wait for it.
        self._deleting = deleting
        self._condemned: dict[EndpointId, IfIndex] = {}

    def __len__(self) -> int:
        return len(self._condemned)

    def condemn(self, endpoint_id: EndpointId, index: IfIndex) -> None:
        """Mark the endpoint's device for deletion; absent and foreign ones are only reported gone by `reap`."""
        body = self._netlink.find(get_link(index))
        owner = None if body is None else read_owner(read_link(body))
        if owner is not None and owner.endpoint_id == endpoint_id:
            marking = set_link(index, name=owner.name, group=CONDEMNED_GROUP)
            # The pod's namespace, and the pair with it, may vanish at any moment.
            self._netlink.execute([marking], tolerated=(errno.ENODEV,))
        self._condemned[endpoint_id] = index

    def reap(self) -> Sequence[EndpointId]:
        """Delete what is condemned; gives the endpoints whose devices are really gone.

        Raises KernelFailure.
        """
        waiting = dict(self._condemned)
        if not waiting:
            return ()
        # One group delete costs one RCU grace period (28 ms for 20 devices); each by itself costs 23-31 ms
        # (decisions/0003).
        self._deleting.execute([delete_group(CONDEMNED_GROUP)], tolerated=(errno.ENODEV,))
        gone = [
            endpoint_id
            for endpoint_id, index in waiting.items()
            if self._is_gone(endpoint_id, index)
        ]
        for endpoint_id in gone:
            self._condemned.pop(endpoint_id, None)
        return gone

    def _is_gone(self, endpoint_id: EndpointId, index: IfIndex) -> bool:
        body = self._netlink.find(get_link(index))
        owner = None if body is None else read_owner(read_link(body))
        return owner is None or owner.endpoint_id != endpoint_id
