"""Ports of the host that lead to pods: who reaches them, what policies say, what survives, what is left afterwards.

One node with a real agent; pods come by real ADDs that ask for ports as a runtime does.
"""

import contextlib
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import pytest

from podwire.journal.records import SqliteJournal
from podwire.kernel import netns
from podwire.model.endpoint import Phase
from tests.lab.labrig import podwire
from tests.lab.prober import sctp_packet
from tests.lab.rig import Outcome, Rig, run
from tests.waiting import wait_for

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

NODE: Final = {4: "192.0.2.1", 6: "2001:db8::1"}
NEIGHBOUR: Final = {4: "192.0.2.2", 6: "2001:db8::2"}
HOST_PORT, POD_PORT = 8080, 80
DEADLINE_S: Final = 60.0
LOOK_S: Final = 0.2
KINDS: Final = {"tcp": socket.SOCK_STREAM, "udp": socket.SOCK_DGRAM}


@dataclass(frozen=True)
class Pod:
    """A pod and its namespace."""

    name: str
    namespace: str
    addresses: Mapping[int, str]


class Town:
    """A node, a neighbour on its wire, and pods."""

    def __init__(self) -> None:
        self.rig = Rig(cluster_cidrs=["10.99.0.0/16", "fd99::/48"])
        self.neighbour = self.rig.make_namespace(f"{self.rig.name}n")
        here, there = ("ip", "-n", self.rig.name), ("ip", "-n", self.neighbour)
        peer = ("peer", "name", "eth0", "netns", self.neighbour)
        run(*here, "link", "add", "wire", "type", "veth", *peer)
        run(*here, "link", "set", "wire", "master", "uplink", "up")
        run(*there, "addr", "add", f"{NEIGHBOUR[4]}/24", "dev", "eth0")
        run(*there, "addr", "add", f"{NEIGHBOUR[6]}/64", "dev", "eth0", "nodad")
        run(*there, "link", "set", "eth0", "up")
        self.rig.start()

    def ask(
        self, name: str, *mappings: Mapping[str, Any], uid: str = "", **labels: str
    ) -> tuple[Outcome, str]:
        """ADD a pod that asks for ports; gives the answer and the namespace."""
        namespace = self.rig.make_pod_namespace()
        pairs = [{"key": key, "value": value} for key, value in labels.items()]
        config = {
            "runtimeConfig": {"portMappings": mappings},
            "args": {"cni": {"labels": pairs}},
        }
        words = ["IgnoreUnknown=1", "K8S_POD_NAMESPACE=default", f"K8S_POD_NAME={name}"]
        words += [f"K8S_POD_UID={uid}"] if uid else []
        environment = {"CNI_ARGS": ";".join(words)}
        outcome = self.rig.cni("ADD", name, namespace, config=config, environment=environment)
        return outcome, namespace

    def add(self, name: str, *mappings: Mapping[str, Any], uid: str = "", **labels: str) -> Pod:
        """ADD a pod that must succeed."""
        outcome, namespace = self.ask(name, *mappings, uid=uid, **labels)
        assert outcome.ok, outcome.document
        return Pod(name, namespace, dict(zip((4, 6), outcome.addresses, strict=True)))

    def delete(self, pod: Pod) -> None:
        """DEL it."""
        outcome = self.rig.cni("DEL", pod.name, pod.namespace)
        assert outcome.ok, outcome.document

    def close(self) -> None:
        """Remove everything."""
        self.rig.close()

    def table(self) -> str:
        """Read our table as a person would; "" when it is not there."""
        words = ("nft", "-s", "list", "table", "inet", "podwire")
        command = ["ip", "netns", "exec", self.rig.name, *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout


@pytest.fixture(scope="module")
def shared() -> Iterator[Town]:
    town = Town()
    with contextlib.closing(town):
        yield town


@pytest.fixture
def town(shared: Town) -> Iterator[Town]:
    """The shared town, without pods afterwards."""
    yield shared
    for endpoint in shared.rig.get("/endpoint")[1]:
        assert shared.rig.cni("DEL", endpoint["containerId"]).ok
    shared.rig.settle()
    assert "host_ports" not in shared.table()


def mapping(protocol: str = "tcp", **more: Any) -> dict[str, Any]:
    """Give a mapping as containerd writes it."""
    wanted = {"HostPort": HOST_PORT, "ContainerPort": POD_PORT, "Protocol": protocol}
    return {**wanted, **more}


def open_socket(namespace: str, family: int, kind: int, protocol: int = 0) -> socket.socket:
    """Open a socket inside a namespace; it is used from outside."""
    domain = socket.AF_INET if family == 4 else socket.AF_INET6
    with netns.open_namespace(netns.named_path(namespace)) as fd, netns.namespace(fd.fileno()):
        made = socket.socket(domain, kind, protocol)
    made.settimeout(DEADLINE_S)
    return made


@contextlib.contextmanager
def serving(pod: Pod, protocol: str, family: int, port: int = POD_PORT) -> Iterator[socket.socket]:
    """Listen in a pod."""
    with open_socket(pod.namespace, family, KINDS[protocol]) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((pod.addresses[family], port))
        if protocol == "tcp":
            server.listen(16)
        yield server


def talk(server: socket.socket, client: socket.socket, address: str, port: int) -> str:
    """Ask and be answered; gives whom the server saw."""
    client.connect((address, port))
    if client.type == socket.SOCK_DGRAM:
        client.send(b"ask")
        words, peer = server.recvfrom(16)
        server.sendto(b"answer", peer)
    else:
        accepted, peer = server.accept()
        with accepted:
            accepted.settimeout(DEADLINE_S)
            client.sendall(b"ask")
            words = accepted.recv(16)
            accepted.sendall(b"answer")
            assert client.recv(16) == b"answer"
            return str(peer[0])
    assert words == b"ask"
    assert client.recv(16) == b"answer"
    return str(peer[0])


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_everybody_reaches_the_pod_and_is_seen_as_who_it_is(
    town: Town, protocol: str, family: int
) -> None:
    web = town.add("web", mapping(protocol))
    other = town.add("other")
    node = NODE[family]
    # From where, to which address, and whom the pod sees; None: some address of the node's.
    asking: list[tuple[str, str, str | None]] = [
        (town.neighbour, node, NEIGHBOUR[family]),
        (town.rig.name, node, node),
        (other.namespace, node, other.addresses[family]),
        # A pod takes no packet that has its own address for sender.
        (web.namespace, node, None),
    ]
    if family == 4:
        asking += [(town.rig.name, "127.0.0.1", None), (town.rig.name, "127.9.9.9", None)]
    with serving(web, protocol, family) as server:
        for place, address, seen in asking:
            with open_socket(place, family, KINDS[protocol]) as client:
                peer = talk(server, client, address, HOST_PORT)
            assert peer == (seen or peer), (place, address)
            assert not peer.startswith("127.")
            assert peer != web.addresses[family]


def ports_of(text: str) -> list[str]:
    """Give the elements in a listing of the table."""
    return [line.strip() for line in text.splitlines() if f". {HOST_PORT} :" in line]


def is_served(town: Town, web: Pod) -> bool:
    """Tell whether the neighbour reaches the pod by the node's port."""
    with (
        serving(web, "tcp", 4) as server,
        open_socket(town.neighbour, 4, socket.SOCK_STREAM) as client,
    ):
        client.settimeout(DEADLINE_S)
        try:
            talk(server, client, NODE[4], HOST_PORT)
        except ConnectionRefusedError:
            return False
        return True


def test_del_takes_the_port_away_and_the_next_pod_gets_it(town: Town) -> None:
    before = town.table()
    first = town.add("first", mapping())
    assert is_served(town, first)
    outcome, _ = town.ask("second", mapping())
    assert outcome.document["code"] == 7
    assert "TCP port 8080 leads to pod default/first" in outcome.document["msg"]
    town.delete(first)
    assert town.table() == before
    with (
        open_socket(town.neighbour, 4, socket.SOCK_STREAM) as client,
        pytest.raises(ConnectionRefusedError),
    ):
        client.connect((NODE[4], HOST_PORT))
    assert is_served(town, town.add("second", mapping()))


def test_an_endpoint_tells_its_ports(town: Town) -> None:
    town.add("web", mapping(), mapping("udp", HostPort=53, HostIP="127.0.0.1"))
    wanted = ["hostPort 8080, protocol TCP, containerPort 80"]
    wanted.append("hostIp 127.0.0.1, hostPort 53, protocol UDP, containerPort 80")
    said = podwire("endpoint", "get", "default/web", "--agent", f"{town.rig.directory}/api.sock")
    assert "; ".join(wanted) in said.out
    assert "agrees with the journal" in said.out


@pytest.mark.parametrize("family", [4, 6])
def test_a_client_that_keeps_its_port_reaches_each_pod_that_has_the_hosts(
    town: Town, family: int
) -> None:
    """The stack remembers flows of datagrams, also those that nobody served and those to a pod that is gone."""
    with open_socket(town.neighbour, family, socket.SOCK_DGRAM) as client:
        client.bind((NEIGHBOUR[family], 40123))
        client.connect((NODE[family], HOST_PORT))
        wait_for(lambda: is_refused(client), "the port to be refused", DEADLINE_S)
        client.settimeout(DEADLINE_S)
        for name in ("first", "second"):
            pod = town.add(name, mapping("udp"))
            assert_answered(client, pod, family)
            town.delete(pod)


def is_refused(client: socket.socket) -> bool:
    """Ask; a kernel tells of only so many refusals in a second."""
    client.settimeout(LOOK_S)
    try:
        client.send(b"nobody")
        client.recv(16)
    except ConnectionRefusedError:
        return True
    except TimeoutError:
        pass
    return False


def assert_answered(client: socket.socket, pod: Pod, family: int) -> None:
    """Ask until the pod answers: what the stack remembers of others is forgotten some moments after the ADD."""
    with serving(pod, "udp", family) as server:
        server.settimeout(LOOK_S)

        def hear() -> tuple[bytes, Any] | None:
            # What the last try met may be told at the next one.
            with contextlib.suppress(ConnectionRefusedError, TimeoutError):
                client.send(b"ask")
                return server.recvfrom(16)
            return None

        words, peer = wait_for(hear, f"{pod.name} to be asked", DEADLINE_S)
        assert (words, peer[0]) == (b"ask", NEIGHBOUR[family])
        server.sendto(b"answer", peer)
        assert client.recv(16) == b"answer"


def test_a_kill_in_the_middle_of_a_del_leaves_no_flow_behind(town: Town) -> None:
    """The journal says that the pod ends, and nothing else was done: the next agent finds only the record."""
    with contextlib.ExitStack() as opened:
        clients = {}
        for family in (4, 6):
            client = opened.enter_context(open_socket(town.neighbour, family, socket.SOCK_DGRAM))
            client.bind((NEIGHBOUR[family], 40124))
            client.connect((NODE[family], HOST_PORT))
            clients[family] = client
        first = town.add("first", mapping("udp"))
        for family, client in clients.items():
            assert_answered(client, first, family)
        town.rig.kill()
        path = town.rig.directory / "state" / "journal.db"
        with contextlib.closing(SqliteJournal(path)) as journal:
            [record] = journal.list_records()
            journal.write(msgspec.structs.replace(record, phase=Phase.DELETING))
        town.rig.start()
        town.rig.settle()
        # After a restart the first address is given again, and a flow to it would reach whichever pod gets it.
        town.add("heir")
        second = town.add("second", mapping("udp"))
        for family, client in clients.items():
            assert_answered(client, second, family)


def test_ports_of_the_node_itself_are_refused(town: Town) -> None:
    outcome, _ = town.ask("web", mapping("udp", HostPort=8472))
    assert outcome.document["code"] == 7
    assert "tunnel_port" in outcome.document["msg"]


def test_the_newer_sandbox_of_a_pod_has_the_port(town: Town) -> None:
    old = town.add("old", mapping(), uid="u1")
    new = town.add("new", mapping(), uid="u1")
    assert is_served(town, new)
    town.delete(old)
    assert is_served(town, new)


@pytest.mark.parametrize("family", [4, 6])
def test_a_port_of_one_address_is_served_there_only(town: Town, family: int) -> None:
    web = town.add("web", mapping(HostIP=NODE[family]))
    with (
        serving(web, "tcp", family) as server,
        open_socket(town.neighbour, family, socket.SOCK_STREAM) as client,
    ):
        talk(server, client, NODE[family], HOST_PORT)
    with (
        open_socket(town.rig.name, family, socket.SOCK_STREAM) as client,
        pytest.raises(ConnectionRefusedError),
    ):
        client.connect(("127.0.0.1" if family == 4 else "::1", HOST_PORT))


@pytest.mark.parametrize("family", [4, 6])
def test_sctp_is_led_to_the_pod_and_back(town: Town, family: int) -> None:
    web = town.add("web", mapping("sctp"))
    with (
        open_socket(web.namespace, family, socket.SOCK_RAW, socket.IPPROTO_SCTP) as server,
        open_socket(town.neighbour, family, socket.SOCK_RAW, socket.IPPROTO_SCTP) as client,
    ):
        client.sendto(sctp_packet(40000, HOST_PORT, 1, 0), (NODE[family], 0))
        assert take_ports(server) == (40000, POD_PORT)
        server.sendto(sctp_packet(POD_PORT, 40000, 2, 0x70770001), (NEIGHBOUR[family], 0))
        assert take_ports(client) == (HOST_PORT, 40000)


def take_ports(raw: socket.socket) -> tuple[int, ...]:
    """Receive a packet with its transport header; raw sockets of IPv4 give the IP header, too."""
    packet = raw.recv(2048)
    offset = 4 * (packet[0] & 15) if raw.family == socket.AF_INET else 0
    return struct.unpack_from("!HH", packet, offset)


def elements(town: Town) -> set[str]:
    """Read the ports that nftables has, without their order."""
    return {line.strip("\t ,}") for line in town.table().splitlines() if f". {HOST_PORT} :" in line}


def nft(town: Town, *words: str) -> str:
    """Run `nft` on the node."""
    return run("ip", "netns", "exec", town.rig.name, "nft", *words)


@pytest.mark.parametrize(
    "change",
    [
        "flush ruleset",
        "flush map inet podwire host_ports4",
        "flush chain inet podwire to_pod",
        "delete element inet podwire host_ports4 { 6 . 8080 }",
        "add element inet podwire host_ports4 { 6 . 9999 : 10.99.0.200 . 80 }",
        "flush set inet podwire behind_host_ports4",
    ],
)
def test_what_somebody_changes_comes_back(town: Town, change: str) -> None:
    web = town.add("web", mapping())
    before = sorted(town.table())
    nft(town, change)
    wait_for(lambda: sorted(town.table()) == before, "the table to be back", DEADLINE_S)
    assert is_served(town, web)


@pytest.mark.parametrize("change", ["flush ruleset", "flush map inet podwire host_ports4"])
def test_an_add_or_a_del_into_a_changed_table_repairs_it(town: Town, change: str) -> None:
    """Whoever comes before the duty that repairs meets what is left."""
    first = town.add("first", mapping())
    nft(town, change)
    second = town.add("second", mapping(HostPort=8081))
    wait_for(lambda: is_served(town, first), "the first pod to be served", DEADLINE_S)
    nft(town, change)
    town.delete(first)
    assert "8081" in town.table()
    town.delete(second)


class Asking:
    """A neighbour that opens one connection after the other, and notes what fails."""

    def __init__(self, town: Town, web: Pod) -> None:
        self._town, self._web = town, web
        self._is_ending = threading.Event()
        self.answered = 0
        self.failures: list[str] = []

    def _ask(self) -> None:
        with serving(self._web, "tcp", 4) as server:
            while not self._is_ending.is_set():
                with open_socket(self._town.neighbour, 4, socket.SOCK_STREAM) as client:
                    client.settimeout(DEADLINE_S)
                    try:
                        talk(server, client, NODE[4], HOST_PORT)
                        self.answered += 1
                    except OSError as error:
                        self.failures.append(repr(error))

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """Ask as long as the block lasts."""
        thread = threading.Thread(target=self._ask)
        thread.start()
        try:
            wait_for(lambda: self.answered, "a first answer", DEADLINE_S)
            yield
            answered = self.answered
            wait_for(lambda: self.answered > answered, "an answer afterwards", DEADLINE_S)
        finally:
            self._is_ending.set()
            thread.join()


def test_a_restart_and_a_kill_leave_no_gap(town: Town) -> None:
    web = town.add("web", mapping())
    asking = Asking(town, web)
    with asking.going_on():
        town.rig.stop()
        town.rig.start()
        town.rig.kill()
        town.rig.start()
        other = town.add("other", mapping(HostPort=8081))
        town.delete(other)
    assert asking.failures == []
    assert asking.answered > 1


def test_a_del_without_an_agent_ends_the_port_at_the_next_start(town: Town) -> None:
    web = town.add("web", mapping())
    town.rig.kill()
    town.delete(web)
    town.rig.start()
    town.rig.settle()
    assert elements(town) == set()


LOCAL: Final = "127.0.0.1"


def test_a_neighbour_never_reaches_what_is_for_the_host_alone(town: Town) -> None:
    """It sends to 127.0.0.1 by its wire: kernels refuse that to themselves, not to a machine that means to do it."""
    web = town.add("web", mapping(HostIP=LOCAL))
    pod = town.add("pod")
    gateway = {town.neighbour: NODE[4], pod.namespace: "169.254.1.1"}
    nft(town, "add table ip seen")
    nft(town, "add chain ip seen first { type filter hook prerouting priority -400; }")
    nft(town, "add chain ip seen last { type filter hook postrouting priority 400; }")
    nft(town, "add rule ip seen first iifname uplink ip daddr 127.0.0.1 counter")
    nft(town, f"add rule ip seen last ip daddr {web.addresses[4]} tcp dport {POD_PORT} counter")
    for place, via in gateway.items():
        ip = ("ip", "-n", place)
        run("ip", "netns", "exec", place, "sysctl", "-qw", "net.ipv4.conf.eth0.route_localnet=1")
        run(*ip, "route", "del", "local", "127.0.0.0/8", "dev", "lo", "table", "local")
        run(*ip, "route", "del", "local", "127.0.0.1", "dev", "lo", "table", "local")
        run(*ip, "route", "add", "127.0.0.1", "via", via, "dev", "eth0", "onlink")
        with open_socket(place, 4, socket.SOCK_STREAM) as client:
            client.bind((NEIGHBOUR[4] if place == town.neighbour else pod.addresses[4], 0))
            client.setblocking(False)
            client.connect_ex((LOCAL, HOST_PORT))
            if place == town.neighbour:
                wait_for(lambda: counted(town, "first"), "the packet to come", DEADLINE_S)
            else:
                wait_for(lambda: is_dropped(town, pod), "the pod's drop", DEADLINE_S)
    assert counted(town, "last") == 0
    # The control: the host itself does reach it.
    with (
        serving(web, "tcp", 4) as server,
        open_socket(town.rig.name, 4, socket.SOCK_STREAM) as client,
    ):
        talk(server, client, LOCAL, HOST_PORT)
    assert counted(town, "last") > 0
    nft(town, "delete table ip seen")


def counted(town: Town, chain: str) -> int:
    """Read how many packets a chain of `seen` counted."""
    return int(nft(town, "list", "chain", "ip", "seen", chain).partition("packets ")[2].split()[0])


def is_dropped(town: Town, pod: Pod) -> bool:
    """Tell whether a packet of the pod's to the loopback address was dropped."""
    flows = town.rig.get("/flows?last=200&verdict=dropped")[1]
    lines = flows.decode().splitlines() if isinstance(flows, bytes) else flows
    return any(LOCAL in str(line) and pod.name in str(line) for line in lines)
