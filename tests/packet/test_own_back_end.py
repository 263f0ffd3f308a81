"""A pod is the back end of the service that it asks: its packet comes back from the service, and so does its answer."""

import pytest

from podwire.datapath.abi import Action, ConfigFlags, ConntrackKind, DropReason, Path
from tests.packet import frames
from tests.packet.frames import ACK, FIN, MORE_FRAGMENTS, RST, SYN, check_frame, packet_of
from tests.packet.overlay import packet
from tests.packet.rig import ALLOW, OUTSIDE, SMALL, A, B, Outcome, Rig
from tests.packet.services import (
    ANSWER,
    POD_PORT,
    PORT,
    PROTOCOLS,
    SOURCE,
    Tuple,
    ask,
    is_whole,
    offer,
    pod_port,
    remove_back_end,
    speak,
    tuple_of,
    vip,
)

pytestmark = pytest.mark.packet

both_families = pytest.mark.parametrize("version", [4, 6])
every_protocol = pytest.mark.parametrize("name", PROTOCOLS)
both_protocols = pytest.mark.parametrize("name", ["tcp", "udp"])


def offer_itself(rig: Rig, version: int, name: str, port: int = 0) -> None:
    """Let pod A answer for the service."""
    offer(
        rig, vip(version), [(A.address(version), port or pod_port(name))], protocol=PROTOCOLS[name]
    )


def answer(
    rig: Rig,
    version: int,
    name: str,
    flags: int = SYN | ACK,
    dport: int = SOURCE,
    sport: int = 0,
) -> Outcome:
    """Let pod A answer whom it takes for its client."""
    segment = speak(name, sport or pod_port(name), dport, flags)
    return rig.sent(A, packet(A.address(version), vip(version), segment))


@both_families
@every_protocol
@pytest.mark.parametrize(
    "flags",
    [ConfigFlags(0), ConfigFlags.DENY_EGRESS, ConfigFlags.DENY_INGRESS, ConfigFlags.SHAPED],
    ids=["open", "no-egress", "no-ingress", "shaped"],
)
def test_it_gets_its_own_packet_and_its_answer_from_the_service(
    rig: Rig, version: int, name: str, flags: ConfigFlags
) -> None:
    """A pod always reaches itself, whatever policies say."""
    offer_itself(rig, version, name)
    rig.change(A, flags=ALLOW | flags)
    for _ in range(2):
        went = ask(rig, A, version, name)
        assert (went.action, went.reason, went.path) == (
            Action.ANSWER,
            DropReason.NONE,
            Path.LOCAL,
        )
        assert tuple_of(went.data) == (vip(version), SOURCE, A.address(version), pod_port(name))
        came = answer(rig, version, name, ANSWER[name])
        assert (came.action, came.path) == (Action.ANSWER, Path.LOCAL)
        assert tuple_of(came.data) == (vip(version), PORT, A.address(version), SOURCE)
        for frame in (went.data, came.data):
            assert is_whole(frame)
            assert frame[:12] == bytes.fromhex((A.pod_mac + A.host_mac).replace(":", ""))


@both_families
def test_a_connection_lives_and_ends(rig: Rig, version: int) -> None:
    offer_itself(rig, version, "tcp")
    ask(rig, A, version, "tcp")
    answer(rig, version, "tcp")
    ask(rig, A, version, "tcp", flags=ACK)
    assert sorted(value.kind for value in rig.entries(A).values()) == [
        ConntrackKind.SERVICE,
        ConntrackKind.OF_ITSELF,
    ]
    usage = rig.usage_row(A)
    assert (usage.connections, usage.brief_flows) == ((1, 0), 0)
    ask(rig, A, version, "tcp", flags=FIN | ACK)
    answer(rig, version, "tcp", FIN | ACK)
    usage = rig.usage_row(A)
    assert (usage.connections, usage.brief_flows) == ((0, 0), 1)
    # The same ports again, and this time somebody else answers.
    offer(rig, vip(version), [(B.address(version), POD_PORT)], first=200)
    assert tuple_of(ask(rig, A, version, "tcp").data).destination == B.address(version)


@both_families
def test_datagrams_stop_when_it_is_no_back_end_any_more(rig: Rig, version: int) -> None:
    offer_itself(rig, version, "udp")
    ask(rig, A, version, "udp")
    offer(rig, vip(version), [(B.address(version), POD_PORT)], first=200, protocol=PROTOCOLS["udp"])
    remove_back_end(rig, 100)
    assert tuple_of(ask(rig, A, version, "udp").data).destination == B.address(version)


@both_families
@both_protocols
def test_a_client_with_the_servers_own_port(rig: Rig, version: int, name: str) -> None:
    """Both ways would have one tuple: the client gets another port."""
    offer_itself(rig, version, name, PORT)
    went = tuple_of(ask(rig, A, version, name, sport=PORT).data)
    assert (went.source, went.destination, went.dport) == (vip(version), A.address(version), PORT)
    assert went.sport != PORT
    came = answer(rig, version, name, ANSWER[name], dport=went.sport, sport=PORT)
    assert tuple_of(came.data) == (vip(version), PORT, A.address(version), PORT)


@every_protocol
def test_several_clients_in_one_pod(rig: Rig, name: str) -> None:
    offer_itself(rig, 4, name)
    for sport in range(2000, 2010):
        assert tuple_of(ask(rig, A, 4, name, sport=sport).data).sport == sport
    for sport in range(2000, 2010):
        came = answer(rig, 4, name, ANSWER[name], dport=sport)
        assert tuple_of(came.data) == (vip(4), PORT, A.ipv4, sport)


@both_families
@every_protocol
def test_nobody_else_gets_in_by_it(rig: Rig, version: int, name: str) -> None:
    """A sender that forges the service's address is judged as the stranger that it is."""
    offer_itself(rig, version, name)
    rig.change(A, flags=ALLOW | ConfigFlags.DENY_INGRESS | ConfigFlags.DENY_EGRESS)
    ask(rig, A, version, name)
    answer(rig, version, name, ANSWER[name])
    for sport, dport in ((SOURCE, pod_port(name)), (PORT, SOURCE)):
        for flags in (ACK, SYN, RST):
            segment = speak(name, sport, dport, flags)
            forged = packet(vip(version), A.address(version), segment)
            came = rig.received(A, forged, ingress_ifindex=OUTSIDE)
            assert (came.action, came.reason) == (Action.DROP, DropReason.POLICY)


@both_families
@pytest.mark.parametrize("name", ["udp", "sctp"])
def test_an_error_about_it_comes_from_the_service(rig: Rig, version: int, name: str) -> None:
    offer_itself(rig, version, name)
    went = packet_of(ask(rig, A, version, name).data)
    about = frames.icmp(3, 3, 0, went[:28]) if version == 4 else frames.icmpv6(1, 4, 0, went)
    came = rig.sent(A, packet(A.address(version), vip(version), about))
    assert (came.action, came.reason) == (Action.ANSWER, DropReason.NONE)
    assert check_frame(came.data) == []
    outer = tuple_of(came.data)
    assert (outer.source, outer.destination) == (vip(version), A.address(version))
    header = 20 if version == 4 else 40
    quoted = tuple_of(bytes(14) + packet_of(came.data)[header + 8 :])
    assert quoted == Tuple(A.address(version), SOURCE, vip(version), PORT)


def test_all_pieces_come_back(rig: Rig) -> None:
    offer_itself(rig, 4, "udp")
    whole = frames.udp(SOURCE, PORT, bytes(2000))
    framed = frames.ethernet(A.pod_mac, A.host_mac, 0x800, frames.ipv4(A.ipv4, vip(4), whole))
    body = packet_of(framed)[20:]
    first = frames.ipv4(A.ipv4, vip(4), frames.Segment(17, body[:1008]), fragment=MORE_FRAGMENTS)
    later = frames.ipv4(A.ipv4, vip(4), frames.Segment(17, body[1008:]), fragment=1008 // 8)
    went = [rig.sent(A, piece) for piece in (first, later)]
    assert [result.action for result in went] == [Action.ANSWER, Action.ANSWER]
    assert check_frame(went[1].data) == []
    joined = packet_of(went[0].data)[20:] + packet_of(went[1].data)[20:]
    assert joined == frames.ipv4(vip(4), A.ipv4, frames.udp(SOURCE, POD_PORT, bytes(2000)))[20:]


def test_it_shares_its_service_with_others(rig: Rig) -> None:
    both = [(A.ipv4, POD_PORT), (SMALL.ipv4, POD_PORT)]
    offer(rig, vip(4), both, protocol=PROTOCOLS["udp"])
    chosen = {tuple_of(ask(rig, A, 4, "udp", sport=port).data).destination for port in range(20)}
    assert chosen == {A.ipv4, SMALL.ipv4}
