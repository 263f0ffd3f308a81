"""A pod asks a service: its back end gets the packet, and what comes back comes from the service."""

import struct

import pytest

from podwire.datapath import abi
from podwire.datapath.abi import Action, ConfigFlags, ConntrackKind, DropReason, Path
from podwire.model.policy import Direction, PolicyEntry, PolicyKey, Verdict
from tests.packet import frames, netdev, overlay
from tests.packet.frames import ACK, FIN, RST, SYN, check_frame, echo, packet_of
from tests.packet.overlay import FAR, packet
from tests.packet.rig import (
    ALLOW,
    NODE_4,
    NODE_6,
    ONLY_4,
    OUTSIDE,
    SMALL,
    TUNNEL_PORT,
    WORLD_4,
    WORLD_6,
    A,
    B,
    Outcome,
    Rig,
)
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
    turn_on,
    vip,
)

pytestmark = pytest.mark.packet

both_families = pytest.mark.parametrize("version", [4, 6])
every_protocol = pytest.mark.parametrize("name", PROTOCOLS)
both_protocols = pytest.mark.parametrize("name", ["tcp", "udp"])


def offer_b(rig: Rig, version: int, name: str = "tcp") -> None:
    """Let pod B answer for the service."""
    offer(rig, vip(version), [(B.address(version), pod_port(name))], protocol=PROTOCOLS[name])


def answer(
    rig: Rig, version: int, name: str, flags: int = SYN | ACK, dport: int = SOURCE
) -> Outcome:
    """Let pod B answer pod A."""
    segment = speak(name, pod_port(name), dport, flags)
    return rig.sent(B, packet(B.address(version), A.address(version), segment))


@both_families
@every_protocol
def test_a_local_back_end_gets_it_and_its_answer_comes_from_the_service(
    rig: Rig, version: int, name: str
) -> None:
    offer_b(rig, version, name)
    went = ask(rig, A, version, name)
    assert (went.action, went.reason, went.path) == (Action.PEER, DropReason.NONE, Path.LOCAL)
    assert tuple_of(went.data) == (A.address(version), SOURCE, B.address(version), pod_port(name))
    came = answer(rig, version, name)
    assert (came.action, came.path) == (Action.PEER, Path.LOCAL)
    assert tuple_of(came.data) == (vip(version), PORT, A.address(version), SOURCE)
    assert is_whole(went.data)
    assert is_whole(came.data)


@both_families
@every_protocol
def test_a_back_end_at_another_node_is_reached_through_the_tunnel(
    rig: Rig, version: int, name: str
) -> None:
    overlay.connect(rig)
    offer(rig, vip(version), [(FAR.pod(version), pod_port(name))], protocol=PROTOCOLS[name])
    went = ask(rig, A, version, name)
    assert (went.action, went.path, went.decision.node) == (Action.TUNNEL, Path.TUNNEL, FAR.number)
    assert tuple_of(went.data) == (A.address(version), SOURCE, FAR.pod(version), pod_port(name))
    back = packet(
        FAR.pod(version), A.address(version), speak(name, pod_port(name), SOURCE, SYN | ACK)
    )
    came = overlay.arrive(rig, back)
    assert (came.action, came.reason) == (Action.PEER, DropReason.NONE)
    assert tuple_of(came.data) == (vip(version), PORT, A.address(version), SOURCE)
    assert is_whole(went.data)
    assert is_whole(came.data)


@both_families
@every_protocol
def test_a_back_end_that_is_reached_natively_past_the_stack(
    rig: Rig, version: int, name: str
) -> None:
    netdev.connect(rig)
    offer(rig, vip(version), [(FAR.pod(version), pod_port(name))], protocol=PROTOCOLS[name])
    went = ask(rig, A, version, name)
    assert (went.action, went.path) == (Action.NATIVE, Path.NATIVE)
    assert tuple_of(went.data) == (A.address(version), SOURCE, FAR.pod(version), pod_port(name))
    back = packet(
        FAR.pod(version), A.address(version), speak(name, pod_port(name), SOURCE, SYN | ACK)
    )
    came = netdev.arrive(rig, back)
    assert came.action == Action.PEER
    assert tuple_of(came.data) == (vip(version), PORT, A.address(version), SOURCE)
    assert is_whole(came.data)


@both_protocols
def test_a_back_end_behind_the_stack_answers_through_it(rig: Rig, name: str) -> None:
    offer(rig, vip(4), [(NODE_4, 6443)], protocol=PROTOCOLS[name])
    went = ask(rig, A, 4, name)
    assert (went.action, went.path) == (Action.STACK, Path.STACK)
    assert tuple_of(went.data) == (A.ipv4, SOURCE, NODE_4, 6443)
    back = packet(NODE_4, A.ipv4, speak(name, 6443, SOURCE, SYN | ACK))
    came = rig.received(A, back, ingress_ifindex=OUTSIDE)
    assert came.action == Action.STACK
    assert tuple_of(came.data) == (vip(4), PORT, A.ipv4, SOURCE)
    assert is_whole(went.data)
    assert is_whole(came.data)


@both_families
def test_a_connection_keeps_its_back_end_while_others_come(rig: Rig, version: int) -> None:
    offer_b(rig, version)
    ask(rig, A, version, "tcp")
    answer(rig, version, "tcp")
    offer(rig, vip(version), [(SMALL.address(version), POD_PORT)], first=200)
    remove_back_end(rig, 100)
    for _ in range(3):
        went = ask(rig, A, version, "tcp", flags=ACK)
        assert tuple_of(went.data).destination == B.address(version)
    assert tuple_of(ask(rig, A, version, "tcp", sport=5).data).destination == SMALL.address(version)


@both_families
def test_datagrams_leave_a_back_end_that_is_gone_at_once(rig: Rig, version: int) -> None:
    offer_b(rig, version, "udp")
    ask(rig, A, version, "udp")
    offer(rig, vip(version), [(SMALL.address(version), POD_PORT)], first=200, protocol=frames.UDP)
    assert tuple_of(ask(rig, A, version, "udp").data).destination == B.address(version)
    remove_back_end(rig, 100)
    assert tuple_of(ask(rig, A, version, "udp").data).destination == SMALL.address(version)


def test_every_back_end_gets_a_part(rig: Rig) -> None:
    offer(rig, vip(4), [(B.ipv4, POD_PORT), (SMALL.ipv4, POD_PORT)], protocol=frames.UDP)
    chosen = [tuple_of(ask(rig, A, 4, "udp", sport=port).data) for port in range(2000, 2020)]
    assert {row.destination for row in chosen} == {B.ipv4, SMALL.ipv4}


@both_families
def test_without_a_back_end_tcp_is_reset_from_the_service(rig: Rig, version: int) -> None:
    offer(rig, vip(version), [])
    refused = ask(rig, A, version, "tcp")
    assert (refused.action, refused.reason) == (Action.ANSWER, DropReason.NO_BACK_END)
    assert tuple_of(refused.data) == (vip(version), PORT, A.address(version), SOURCE)
    transport = packet_of(refused.data)[20 if version == 4 else 40 :]
    _, _, _, acknowledged, _, flags = struct.unpack_from("!HHIIBB", transport)
    assert (flags, acknowledged) == (RST | ACK, 2)
    assert is_whole(refused.data)
    assert rig.entries() == {}


@both_families
def test_without_a_back_end_a_datagram_is_answered_by_port_unreachable(
    rig: Rig, version: int
) -> None:
    offer(rig, vip(version), [], protocol=frames.UDP)
    refused = ask(rig, A, version, "udp")
    assert (refused.action, refused.reason) == (Action.ANSWER, DropReason.NO_BACK_END)
    assert check_frame(refused.data) == []
    kind = packet_of(refused.data)[20:22] if version == 4 else packet_of(refused.data)[40:42]
    assert tuple(kind) == ((3, 3) if version == 4 else (1, 4))


@both_families
@every_protocol
def test_another_port_of_a_service_is_refused(rig: Rig, version: int, name: str) -> None:
    offer_b(rig, version, name)
    refused = ask(rig, A, version, name, dport=81)
    assert (refused.action, refused.reason) == (Action.ANSWER, DropReason.NO_SERVICE_PORT)


@pytest.mark.parametrize("off", [True, False], ids=["switched-off", "another-address"])
def test_what_is_no_service_goes_to_the_stack_as_it_is(rig: Rig, off: bool) -> None:
    offer_b(rig, 4)
    if off:
        rig.write_settings()
    target = vip(4) if off else WORLD_4
    sent = packet(A.ipv4, target, speak("tcp", SOURCE, PORT))
    outcome = rig.sent(A, sent)
    assert (outcome.action, packet_of(outcome.data)) == (Action.STACK, sent)


def test_tcp_in_mid_stream_that_nobody_remembers_is_the_stacks(rig: Rig) -> None:
    offer_b(rig, 4)
    outcome = ask(rig, A, 4, "tcp", flags=ACK)
    assert (outcome.action, tuple_of(outcome.data).destination) == (Action.STACK, vip(4))


def test_a_flow_that_the_stack_translates_stays_with_it(rig: Rig) -> None:
    assert ask(rig, A, 4, "udp").action == Action.STACK
    back = packet(vip(4), A.ipv4, speak("udp", PORT, SOURCE))
    assert rig.received(A, back, ingress_ifindex=OUTSIDE).action == Action.STACK
    offer_b(rig, 4, "udp")
    went = ask(rig, A, 4, "udp")
    assert (went.action, tuple_of(went.data).destination) == (Action.STACK, vip(4))
    assert tuple_of(ask(rig, A, 4, "udp", sport=9).data).destination == B.ipv4


@both_families
@every_protocol
def test_who_asked_before_the_service_was_known_is_translated_as_soon_as_it_is(
    rig: Rig, version: int, name: str
) -> None:
    assert ask(rig, A, version, name).action == Action.STACK
    offer_b(rig, version, name)
    assert tuple_of(ask(rig, A, version, name).data).destination == B.address(version)
    came = answer(rig, version, name, ANSWER[name])
    assert tuple_of(came.data) == (vip(version), PORT, A.address(version), SOURCE)


# An address belongs to its owner, whatever a Service says.


@both_families
@pytest.mark.parametrize("owner", ["local-pod", "itself", "pod-elsewhere", "node"])
def test_a_service_takes_no_address_from_who_has_it(rig: Rig, version: int, owner: str) -> None:
    overlay.connect(rig)
    node = "192.168.8.8" if version == 4 else "fd00:8::8"
    overlay.write_prefix(
        rig, f"{node}/{32 if version == 4 else 128}", 6, 0, abi.IpcacheFlags.NODE_ADDRESS, 0
    )
    address = {
        "local-pod": SMALL.address(version),
        "itself": A.address(version),
        "pod-elsewhere": FAR.pod(version),
        "node": node,
    }[owner]
    offer(rig, address, [(B.address(version), POD_PORT)])
    for port in (PORT, 81):
        sent = packet(A.address(version), address, speak("tcp", SOURCE, port))
        went = rig.sent(A, sent)
        assert went.action != Action.ANSWER
        assert tuple_of(went.data) == (A.address(version), SOURCE, address, port)


@both_families
def test_no_service_leads_into_a_tunnel(rig: Rig, version: int) -> None:
    """Whose back end is the tunnel's end of a node: a pod could send there what claims to come from a node."""
    offer(
        rig, vip(version), [(NODE_4 if version == 4 else NODE_6, TUNNEL_PORT)], protocol=frames.UDP
    )
    refused = ask(rig, A, version, "udp")
    assert (refused.action, refused.reason) == (Action.DROP, DropReason.TUNNEL_PORT)


def test_a_service_in_the_clusters_own_range_is_one(rig: Rig) -> None:
    overlay.write_prefix(rig, "10.96.0.0/24", abi.Identity.UNMANAGED, 0, 0, 0)
    offer_b(rig, 4)
    assert tuple_of(ask(rig, A, 4, "tcp").data).destination == B.ipv4


@both_families
def test_another_service_is_no_back_end(rig: Rig, version: int) -> None:
    """The stack would translate it a second time, to whom no policy was asked about."""
    second = "10.96.0.20" if version == 4 else "fd96::20"
    offer(rig, second, [(B.address(version), POD_PORT)], service=8, first=300)
    offer(rig, vip(version), [(second, PORT)])
    refused = ask(rig, A, version, "tcp")
    assert (refused.action, refused.reason) == (Action.ANSWER, DropReason.NO_BACK_END)
    offer(rig, vip(version), [(second, PORT), (SMALL.address(version), POD_PORT)], first=400)
    chosen = {
        tuple_of(ask(rig, A, version, "tcp", sport=port).data).destination
        for port in range(2000, 2010)
    }
    assert chosen == {SMALL.address(version)}


def test_a_service_at_an_address_of_this_host_is_the_hosts(rig: Rig) -> None:
    overlay.write_prefix(rig, f"{vip(4)}/32", 1, 0, abi.IpcacheFlags.NODE_ADDRESS, 0)
    offer_b(rig, 4)
    assert tuple_of(ask(rig, A, 4, "tcp").data).destination == vip(4)


def test_other_protocols_to_a_service_are_left_as_they_were(rig: Rig) -> None:
    offer_b(rig, 4)
    sent = packet(A.ipv4, vip(4), echo(4, 3))
    assert packet_of(rig.sent(A, sent).data) == sent


# The policy judges who answers, not who was asked.


@both_families
@pytest.mark.parametrize("name", ["tcp", "sctp"])
@pytest.mark.parametrize("named", ["back-end", "somebody-else"])
def test_an_egress_policy_judges_the_back_end(
    rig: Rig, version: int, name: str, named: str
) -> None:
    offer_b(rig, version, name)
    rig.change(A, slot=1, flags=ALLOW | ConfigFlags.DENY_EGRESS)
    identity = B.identity if named == "back-end" else SMALL.identity
    key = PolicyKey(identity, Direction.EGRESS, PROTOCOLS[name], pod_port(name), 16)
    rig.rule(1, key, PolicyEntry(Verdict.ALLOW, 1, 41))
    went = ask(rig, A, version, name)
    if named == "back-end":
        assert (went.action, went.decision.destination_identity) == (Action.PEER, B.identity)
    else:
        assert (went.action, went.reason) == (Action.DROP, DropReason.POLICY)
        assert rig.entries() == {}


def test_an_ingress_policy_of_the_back_end_judges_the_pod(rig: Rig) -> None:
    offer_b(rig, 4)
    rig.change(B, flags=ALLOW | ConfigFlags.DENY_INGRESS)
    went = ask(rig, A, 4, "tcp")
    assert (went.action, went.reason) == (Action.DROP, DropReason.POLICY)
    assert went.decision.source_identity == A.identity


def test_an_answer_comes_home_to_a_pod_that_nobody_may_reach(rig: Rig) -> None:
    offer_b(rig, 4)
    rig.change(A, flags=ALLOW | ConfigFlags.DENY_INGRESS)
    ask(rig, A, 4, "tcp")
    assert tuple_of(answer(rig, 4, "tcp").data).source == vip(4)


def test_an_event_names_the_service_and_the_back_end(rig: Rig) -> None:
    offer_b(rig, 4)
    rig.change(A, flags=ALLOW | ConfigFlags.TRACE)
    ask(rig, A, 4, "tcp")
    told = rig.take_events()[-1]
    assert (told.daddr[12:], told.dport) == (bytes([10, 7, 0, 11]), POD_PORT)
    assert (told.original_daddr[12:], told.original_dport) == (bytes([10, 96, 0, 10]), PORT)


# What is remembered (rule 14: no two flows have one tuple).


def kinds(rig: Rig) -> list[int]:
    return sorted(value.kind for value in rig.entries(A).values())


@every_protocol
def test_a_flow_has_two_rows_that_count_once(rig: Rig, name: str) -> None:
    offer_b(rig, 4, name)
    ask(rig, A, 4, name)
    assert kinds(rig) == [ConntrackKind.SERVICE, ConntrackKind.OF_BACK_END]
    usage = rig.usage_row(A)
    assert (usage.connections, usage.brief_flows) == ((0, 0), 1)
    assert [value for value in rig.new_flows.items()] != []  # the back end's own
    assert all(value.backend == 100 and value.service == 7 for value in rig.entries(A).values())


def test_without_room_a_new_flow_is_refused_and_open_ones_go_on(rig: Rig) -> None:
    offer_b(rig, 4)
    rig.write_settings(quota=1)
    turn_on(rig)
    assert ask(rig, A, 4, "tcp").action == Action.PEER
    refused = ask(rig, A, 4, "tcp", sport=7)
    assert (refused.action, refused.reason) == (Action.DROP, DropReason.CONNTRACK_QUOTA)
    assert ask(rig, A, 4, "tcp").action == Action.PEER


@both_families
@both_protocols
def test_a_direct_flow_of_the_same_ports_is_another_one(rig: Rig, version: int, name: str) -> None:
    offer_b(rig, version, name)
    ask(rig, A, version, name)
    segment = speak(name, SOURCE, POD_PORT)
    went = rig.sent(A, packet(A.address(version), B.address(version), segment))
    direct = tuple_of(went.data)
    assert (direct.destination, direct.dport) == (B.address(version), POD_PORT)
    assert direct.sport != SOURCE
    back = answer(rig, version, name, dport=direct.sport)
    assert tuple_of(back.data) == (B.address(version), POD_PORT, A.address(version), SOURCE)
    served = answer(rig, version, name)
    assert tuple_of(served.data) == (vip(version), PORT, A.address(version), SOURCE)
    assert all(map(is_whole, (went.data, back.data, served.data)))
    again = rig.sent(
        A, packet(A.address(version), B.address(version), speak(name, SOURCE, POD_PORT, ACK))
    )
    assert tuple_of(again.data) == direct


@both_protocols
def test_a_service_takes_no_tuple_that_a_direct_flow_has(rig: Rig, name: str) -> None:
    offer_b(rig, 4, name)
    rig.sent(A, packet(A.ipv4, B.ipv4, speak(name, SOURCE, POD_PORT)))
    went = tuple_of(ask(rig, A, 4, name).data)
    assert (went.destination, went.dport) == (B.ipv4, POD_PORT)
    assert went.sport != SOURCE
    came = answer(rig, 4, name, dport=went.sport)
    assert tuple_of(came.data) == (vip(4), PORT, A.ipv4, SOURCE)
    direct = answer(rig, 4, name)
    assert tuple_of(direct.data) == (B.ipv4, POD_PORT, A.ipv4, SOURCE)


@pytest.mark.parametrize("last", [RST, FIN], ids=["reset", "closed"])
def test_ports_that_are_used_again_ask_anew(rig: Rig, last: int) -> None:
    offer_b(rig, 4)
    ask(rig, A, 4, "tcp")
    answer(rig, 4, "tcp")
    ask(rig, A, 4, "tcp", flags=ACK)
    ask(rig, A, 4, "tcp", flags=last | ACK)
    if last == FIN:
        answer(rig, 4, "tcp", flags=FIN | ACK)
    offer(rig, vip(4), [(SMALL.ipv4, POD_PORT)], first=200)
    assert tuple_of(ask(rig, A, 4, "tcp").data).destination == SMALL.ipv4
    offer_b(rig, 4)
    ask(rig, A, 4, "tcp", flags=RST | ACK)
    assert tuple_of(ask(rig, A, 4, "tcp").data) == (A.ipv4, SOURCE, B.ipv4, POD_PORT)
    assert tuple_of(answer(rig, 4, "tcp").data).source == vip(4)
    usage = rig.usage_row(A)
    # The connection to the other back end has a row until it is collected, and counts until then.
    assert (usage.connections, usage.brief_flows) == ((0, 0), 2)


# Pieces, errors, sizes.


def quoted_tuple(frame: bytes, version: int) -> Tuple:
    header = 20 if version == 4 else 40
    return tuple_of(bytes(14) + packet_of(frame)[header + 8 :])


@both_families
@every_protocol
def test_an_error_of_the_back_end_is_about_the_service(rig: Rig, version: int, name: str) -> None:
    offer_b(rig, version, name)
    went = packet_of(ask(rig, A, version, name).data)
    about = frames.icmp(3, 3, 0, went[:28]) if version == 4 else frames.icmpv6(1, 4, 0, went[:80])
    came = rig.sent(B, packet(B.address(version), A.address(version), about))
    assert (came.action, came.reason) == (Action.PEER, DropReason.NONE)
    assert check_frame(came.data) == []
    assert quoted_tuple(came.data, version) == (A.address(version), SOURCE, vip(version), PORT)
    assert tuple_of(came.data).source == vip(version)


@both_families
def test_an_error_of_a_router_keeps_its_sender(rig: Rig, version: int) -> None:
    offer(rig, vip(version), [(WORLD_4 if version == 4 else WORLD_6, 6443)])
    went = packet_of(ask(rig, A, version, "tcp").data)
    router = "203.0.113.1" if version == 4 else "2001:db8:2::1"
    about = (
        frames.icmp(3, 4, 1300, went[:28]) if version == 4 else frames.icmpv6(2, 0, 1300, went[:80])
    )
    came = rig.received(A, packet(router, A.address(version), about), ingress_ifindex=OUTSIDE)
    assert came.action == Action.STACK
    assert check_frame(came.data) == []
    assert quoted_tuple(came.data, version) == (A.address(version), SOURCE, vip(version), PORT)
    assert tuple_of(came.data).source == router


@both_families
def test_too_big_quotes_the_packet_as_the_pod_sent_it(rig: Rig, version: int) -> None:
    offer(rig, vip(version), [(SMALL.address(version), POD_PORT)], protocol=frames.UDP)
    sent = packet(
        A.address(version),
        vip(version),
        frames.udp(SOURCE, PORT, bytes(1450 if version == 4 else 1430)),
    )
    refused = rig.sent(A, sent)
    assert (refused.action, refused.reason) == (Action.ANSWER, DropReason.MTU)
    assert quoted_tuple(refused.data, version) == (A.address(version), SOURCE, vip(version), PORT)


def test_all_pieces_of_a_datagram_go_to_one_back_end(rig: Rig) -> None:
    offer(rig, vip(4), [(B.ipv4, POD_PORT), (ONLY_4.ipv4, POD_PORT)], protocol=frames.UDP)
    whole = frames.udp(SOURCE, PORT, bytes(2000))
    body = packet_of(
        frames.ethernet(A.pod_mac, A.host_mac, 0x800, frames.ipv4(A.ipv4, vip(4), whole))
    )[20:]
    first = frames.ipv4(
        A.ipv4, vip(4), frames.Segment(17, body[:1008]), fragment=frames.MORE_FRAGMENTS
    )
    later = frames.ipv4(A.ipv4, vip(4), frames.Segment(17, body[1008:]), fragment=1008 // 8)
    went = [rig.sent(A, piece) for piece in (first, later)]
    assert [result.action for result in went] == [Action.PEER, Action.PEER]
    chosen = {tuple_of(result.data).destination for result in went}
    assert len(chosen) == 1
    assert check_frame(went[1].data) == []
    joined = packet_of(went[0].data)[20:] + packet_of(went[1].data)[20:]
    target = chosen.pop()
    again = frames.ipv4(A.ipv4, target, frames.udp(SOURCE, POD_PORT, bytes(2000)))[20:]
    assert joined == again
