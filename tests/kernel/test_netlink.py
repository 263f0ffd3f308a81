"""Many requests, one send, one answer each; and no bytes make the readers stumble."""

import errno
import ipaddress
import struct
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwire.kernel import xfrm
from podwire.kernel.netlink import (
    NetlinkSocket,
    Request,
    attribute,
    attribute_text,
    attribute_u32,
    nested,
    parse_attributes,
    read_text,
    read_u32,
    split_messages,
)
from podwire.kernel.rtnl.link import (
    LinkEnd,
    create_link,
    create_veth,
    delete_link,
    get_link,
    list_links,
    read_link,
    set_link,
)
from podwire.kernel.rtnl.route import (
    InterfaceAddress,
    add_address,
    list_addresses,
    read_address,
    read_neighbour,
    read_route,
    read_source_rule,
)
from podwire.kernel.rtnl.tc import read_bpf_filter, read_queue
from podwire.model.errors import KernelFailure
from tests.kernel.conftest import Namespace
from tests.waiting import wait_for

_FIRST = ipaddress.IPv4Address("10.77.0.0")
READERS: list[Callable[[bytes], object]] = [
    read_link,
    read_address,
    read_route,
    read_neighbour,
    read_source_rule,
    read_queue,
    read_bpf_filter,
    parse_attributes,
    lambda body: list(split_messages(body)),
]


@given(st.lists(st.tuples(st.integers(1, 0x3FFF), st.binary(max_size=40)), max_size=8))
def test_attributes_survive_encoding(pairs: list[tuple[int, bytes]]) -> None:
    encoded = b"".join(attribute(kind, payload) for kind, payload in pairs)
    assert len(encoded) % 4 == 0
    assert parse_attributes(encoded) == dict(pairs)


@given(st.binary(max_size=200))
def test_readers_give_a_value_or_a_kernel_failure_for_any_bytes(body: bytes) -> None:
    for reader in READERS:
        try:
            reader(body)
        except KernelFailure as failure:
            assert failure.errno == errno.EBADMSG  # noqa: PT017


def test_readers_survive_real_messages_cut_at_every_byte(
    host: Namespace, netlink: NetlinkSocket
) -> None:
    netlink.execute([create_veth(LinkEnd("pwa"), LinkEnd("pwb"), None)])
    bodies = [
        *((read_link, body) for body in netlink.dump(list_links())),
        *((read_address, body) for body in netlink.dump(list_addresses())),
    ]
    for reader, body in bodies:
        reader(body)
        for end in range(len(body)):
            try:
                reader(body[:end])
            except KernelFailure as failure:
                assert failure.errno == errno.EBADMSG  # noqa: PT017


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\0" * 15, id="shorter-than-a-header"),
        pytest.param(struct.pack("=IHHII", 15, 16, 0, 1, 0), id="length-below-header"),
        pytest.param(struct.pack("=IHHII", 64, 16, 0, 1, 0), id="length-beyond-end"),
    ],
)
def test_broken_frames_are_refused(data: bytes) -> None:
    with pytest.raises(KernelFailure) as caught:
        list(split_messages(data))
    assert caught.value.errno == errno.EBADMSG


def test_values_are_read_back() -> None:
    attributes = parse_attributes(
        attribute_u32(1, 0xFEDCBA98) + attribute_text(2, "eth0") + nested(3, attribute_u32(4, 5))
    )
    assert read_u32(attributes, 1) == 0xFEDCBA98
    assert read_u32(attributes, 9, 7) == 7
    assert read_text(attributes, 2) == "eth0"
    assert read_text(attributes, 9) == ""
    assert read_u32(parse_attributes(attributes[3]), 4) == 5


def test_each_request_of_a_batch_has_its_own_answer(
    host: Namespace, netlink: NetlinkSocket
) -> None:
    pair = create_veth(LinkEnd("pwa", 5001), LinkEnd("pwb", 5002), None)
    failures = netlink.attempt(
        [pair, pair, set_link(9999, name="nobody", up=True), set_link(5001, up=True)]
    )
    assert [None if failure is None else failure.errno for failure in failures] == [
        None,
        errno.EEXIST,
        errno.ENODEV,
        None,
    ]
    assert host.ip("link", "show", "pwa")[0]["flags"].count("UP") == 1


def test_execute_raises_the_first_failure_and_names_call_and_object(
    netlink: NetlinkSocket,
) -> None:
    with pytest.raises(KernelFailure) as caught:
        netlink.execute(
            [set_link(9999, name="first", up=True), set_link(9998, name="second", up=True)]
        )
    assert (caught.value.errno, caught.value.call) == (errno.ENODEV, "change device")
    assert caught.value.object_name == "first"


def test_the_kernels_own_words_are_in_the_error(netlink: NetlinkSocket) -> None:
    with pytest.raises(KernelFailure, match="Unknown device type"):
        netlink.execute([_link_of_kind("pwnosuch")])


def _link_of_kind(kind: str) -> Request:
    info = nested(18, attribute_text(1, kind))
    body = struct.pack("=BxHiII", 0, 0, 0, 0, 0) + attribute_text(3, "pwx") + info
    return Request(16, 0x600, body, "create", "pwx")


def test_a_batch_bigger_than_the_receive_buffer_loses_no_answer(
    host: Namespace, netlink: NetlinkSocket
) -> None:
    addresses = [add_address(InterfaceAddress(1, _FIRST + number, 32)) for number in range(1000)]
    assert netlink.attempt(addresses + addresses[:500]).count(None) == 1000
    assert len(netlink.dump(list_addresses(1))) >= 1000


def test_find_gives_none_for_what_is_absent_and_raises_everything_else(
    netlink: NetlinkSocket,
) -> None:
    assert netlink.find(get_link(9999)) is None
    assert netlink.find(get_link(name="lo")) is not None
    with pytest.raises(KernelFailure) as caught:
        netlink.find(get_link(name="far-too-long-for-a-device"))
    assert caught.value.errno == errno.ERANGE


def test_dump_of_something_refused_raises(netlink: NetlinkSocket) -> None:
    with pytest.raises(KernelFailure):
        netlink.dump(Request(26, 0, b"\xff" * 12, "list", "nonsense"))


def test_answers_of_an_abandoned_exchange_are_dropped(netlink: NetlinkSocket) -> None:
    netlink._send([get_link(1)])  # its answer stays in the receive buffer
    assert netlink.find(get_link(9999)) is None
    assert read_link(netlink.get(get_link(1))).name == "lo"


def test_socket_stays_in_the_namespace_it_was_opened_in(host: Namespace, pod: Namespace) -> None:
    with NetlinkSocket.open_in(pod.fd.fileno()) as inside:
        inside.execute([create_veth(LinkEnd("pwa"), LinkEnd("pwb"), None)])
    assert {link["ifname"] for link in pod.ip("link")} == {"lo", "pwa", "pwb"}
    assert {link["ifname"] for link in host.ip("link")} == {"lo"}


def _list_names(netlink: NetlinkSocket) -> set[str]:
    """List devices; nothing where the list changed on every try, which says so instead of giving a part."""
    try:
        return {read_link(body).name for body in netlink.dump(list_links())}
    except KernelFailure as failure:
        if failure.errno != errno.EAGAIN:
            raise
        return set()


def test_a_dump_is_whole_while_devices_come_and_go(host: Namespace, netlink: NetlinkSocket) -> None:
    """A list that changed under way is taken again, so what stays is always in it."""
    staying = [f"stay{number}" for number in range(40)]
    netlink.execute([create_link("bridge", LinkEnd(name)) for name in staying])
    stop = threading.Event()

    def disturb() -> None:
        with NetlinkSocket.open_in(host.fd.fileno()) as other:
            while not stop.is_set():
                other.execute([create_link("bridge", LinkEnd("passing", 7777))])
                other.execute([delete_link(7777)])

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for _ in range(100):
            names = wait_for(lambda: _list_names(netlink), "a list that did not change under way")
            assert names >= {"lo", *staying}
    finally:
        stop.set()
        thread.join()


def test_a_kernel_without_ipsec_has_no_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    # The last number that a protocol of netlink may have, which the kernel gives to none.
    monkeypatch.setattr(xfrm, "_NETLINK_XFRM", 31)
    assert not xfrm.has_policies()
