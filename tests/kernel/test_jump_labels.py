"""The one clsact queue that an agent keeps for itself: there, where nobody else is, and gone with its holder."""

from podwire.datapath.jump_labels import kept_in_code
from podwire.kernel import netns
from podwire.kernel.netlink import NetlinkSocket
from podwire.kernel.rtnl.tc import list_queues, read_queue

LOOPBACK = 1


def list_kinds(netlink: NetlinkSocket) -> set[str]:
    return {read_queue(body).kind for body in netlink.dump(list_queues(LOOPBACK))}


def test_the_queue_is_in_a_namespace_of_its_own(netlink: NetlinkSocket) -> None:
    with kept_in_code() as namespace:
        assert netns.cookie(namespace.fileno()) != netns.current_cookie()
        with NetlinkSocket.open_in(namespace.fileno()) as inside:
            assert "clsact" in list_kinds(inside)
        assert "clsact" not in list_kinds(netlink)
    assert namespace.closed
