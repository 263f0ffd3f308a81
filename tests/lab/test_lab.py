"""Labs as people use them: up, run, connect, check, break, repair, down; nothing is left whatever happened between."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwire.lab import labs, traffic
from podwire.lab import node as nodes
from podwire.lab.state import Pod, end_all, is_running, locked, read_state
from podwire.lab.topology import PIN_ROOT, RUN_ROOT, LabPlan, LabShape, NodePlan
from podwire.model.errors import NotFound, Unavailable
from tests.lab.conftest import MakeLab
from tests.lab.labrig import Lab, Said, lab_name, leaks, own_namespace, podwire, quiet
from tests.lab.rig import run
from tests.waiting import wait_for

pytestmark = pytest.mark.lab

PODWIRE = str(Path(sys.executable).parent / "podwire")


@contextlib.contextmanager
def pods(lab: Lab, **wanted: str) -> Iterator[None]:
    """Run pods (name -> node and what it serves), and remove them."""
    try:
        for name, text in wanted.items():
            node, *ports = text.split()
            serve = [word for port in ports for word in ("--serve", port)]
            said = lab.cli("lab", "run", name, "--node", node, *serve)
            assert said.code == 0, said.err
        yield
    finally:
        for pod in lab.state.pods:
            labs.remove(lab.name, pod.full_name)


LABS_MAX = 3


def connected(lab: Lab, *words: str) -> Said:
    """Give what `lab connect` says once all is answered: it waits for 3 s, and a machine may stand still so long."""

    def ask() -> Said | None:
        said = lab.cli("lab", "connect", *words)
        return None if said.code else said

    return wait_for(ask, f"connect {' '.join(words)}")


@pytest.fixture(scope="module")
def served_lab(pair_lab: Lab) -> Iterator[Lab]:
    """Two nodes with a server on the first and a client on the second."""
    with pods(pair_lab, web="node1 80/tcp 80/udp 53/udp", client="node2"):
        yield pair_lab


# Up and down


def test_up_again_is_a_conflict_and_leaves_the_lab_as_it_is(served_lab: Lab) -> None:
    before = served_lab.state
    said = podwire("lab", "up", "--name", served_lab.name)
    assert said.code == 5
    assert said.err.splitlines()[1] == f"hint: podwire lab down --lab {served_lab.name}"
    assert served_lab.state == before
    connected(served_lab, "client", "web")


def test_the_leak_check_sees_every_kind_of_leak(make_lab: MakeLab) -> None:
    lab = make_lab(families="4")
    before = own_namespace()
    assert lab.cli("lab", "run", "web", "--serve", "80").code == 0
    kinds = {"namespaces", str(RUN_ROOT), str(PIN_ROOT), "processes"}
    assert set(leaks([lab.name], before)) == kinds
    run("ip", "netns", "del", f"pw.{lab.name}.default.web")  # its server lives on
    assert any("podwire.lab.serve" in process for process in leaks([lab.name], before)["processes"])  # type: ignore[attr-defined]
    lab.close()
    # Without the namespace's name the file still knew its server.
    assert not leaks([lab.name], before)
    assert set(leaks([], before | {"devices": ["pw0"]})) == {"devices"}


def test_the_first_packet_to_another_node_is_not_late(make_lab: MakeLab) -> None:
    # A machine that stands still at the wrong moment makes a kernel send again what was not lost: not in each lab.
    assert any(is_first_packet_in_time(make_lab(2, "6")) for _ in range(LABS_MAX))


def is_first_packet_in_time(lab: Lab) -> bool:
    """Tell whether the first connection of a lab took as long as one without a loss."""
    with pods(lab, web="node1 80/tcp", client="node2"):
        [row] = lab.cli("lab", "connect", "client", "web", "-o", "json").document
        # A lost SYN, or a lost question for a neighbour, costs a second; a busy machine may do so without a loss.
        in_time = row["ms"] < 500 or not count_resent(f"pw.{lab.name}.default.client")
        return bool(row["ok"] and in_time)


def count_resent(namespace: str) -> int:
    """Count the TCP segments that a namespace had to send again."""
    shown = run("ip", "netns", "exec", namespace, "nstat", "-j", "-a", "-s", "-z", "TcpRetransSegs")
    return int(json.loads(shown)["kernel"]["TcpRetransSegs"])


def test_down_of_what_is_not_there_is_not_found() -> None:
    assert podwire("lab", "down", "--lab", lab_name()).code == 4


def test_labs_do_not_touch_each_other(served_lab: Lab, make_lab: MakeLab) -> None:
    other = make_lab(families="4")
    assert other.cli("lab", "run", "web", "--serve", "80/tcp").code == 0
    assert other.node().addresses == served_lab.node().addresses[:1]
    answer = other.cli("lab", "connect", "world", "node1:80").out
    assert "refused" in answer  # the other lab's node has the same address
    other.close()
    connected(served_lab, "client", "web")


@pytest.mark.parametrize(
    "name", ["", "-a", "a-", "A", "a.b", "a/b", "..", "x" * 21, "world", "underlay", "a b", "ä"]
)
def test_names_that_could_become_other_paths_are_refused(name: str) -> None:
    before = sorted(RUN_ROOT.glob("*"))
    for command in (("up", "--name", name), ("down", "--lab", name)):
        said = podwire("lab", *command) if name else Said(6, "", "")
        assert said.code == 6, said
    assert sorted(RUN_ROOT.glob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--nodes", "0"), 6),
        (("--nodes", "51"), 6),
        (("--nodes", "two"), 2),
        (("--families", "5"), 2),
        (("--routing", "magic"), 2),
    ],
)
def test_a_lab_that_cannot_be_is_refused(arguments: tuple[str, ...], code: int) -> None:
    name = lab_name()
    assert podwire("lab", "up", "--name", name, *arguments).code == code
    assert not leaks([name], own_namespace())


def test_an_agent_that_does_not_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    name = lab_name()
    write = nodes.write_config

    def write_badly(plan: LabPlan, node: NodePlan) -> None:
        write(plan, node)
        if node.name == "node2":
            with (node.directory / nodes.CONFIG_FILE).open("a") as file:
                file.write('no_such_setting = "x"\n')

    monkeypatch.setattr(nodes, "write_config", write_badly)
    with pytest.raises(Unavailable, match=r"node2.*ended.*no_such_setting"):
        labs.up(name, LabShape(families="4"), progress=quiet)
    assert not leaks([name], own_namespace())


def test_down_finds_everything_without_the_labs_file(make_lab: MakeLab) -> None:
    lab = make_lab(2, "4")
    assert lab.cli("lab", "run", "web", "--node", "node1", "--serve", "80/tcp").code == 0
    shell = subprocess.Popen(
        [PODWIRE, "lab", "exec", "web", "--lab", lab.name, "--", "sleep", "600"],
        env={**os.environ, "PODWIRE_LAB": lab.name},
    )
    inode = os.stat(f"/run/netns/pw.{lab.name}.default.web").st_ino
    wait_for(lambda: os.stat(f"/proc/{shell.pid}/ns/net").st_ino == inode, "the command to run")
    [server] = lab.state.find_pod("web").servers
    agents = list(lab.state.agents.values())
    (RUN_ROOT / lab.name / "lab.json").unlink()
    assert lab.name in labs.list_leftovers(running_too=False)
    said = podwire("lab", "up", "--name", lab.name)
    assert (said.code, "earlier one" in said.err) == (5, True)
    assert podwire("lab", "down", "--lab", lab.name).code == 0
    assert shell.wait(60) is not None
    assert not any(map(is_running, [server.process, *agents]))
    assert not leaks([lab.name], own_namespace())


def test_down_after_all_agents_were_killed_and_the_file_was_damaged(make_lab: MakeLab) -> None:
    lab = make_lab(2, "4")
    assert lab.cli("lab", "run", "web", "--node", "node1", "--serve", "80/tcp").code == 0
    for process in lab.state.agents.values():
        os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: not any(map(is_running, lab.state.agents.values())), "the agents to end")
    assert lab.name in labs.list_leftovers(running_too=False)
    (RUN_ROOT / lab.name / "lab.json").write_text("{ not json")
    said = podwire("lab", "status", "--lab", lab.name)
    assert (said.code, said.err.splitlines()[1]) == (70, f"hint: podwire lab down --lab {lab.name}")
    assert podwire("lab", "down", "--lab", lab.name).code == 0
    assert not leaks([lab.name], own_namespace())


def test_up_over_what_a_killed_down_left_is_a_conflict_until_it_is_gone() -> None:
    name = lab_name()
    journal = RUN_ROOT / name / "node1" / "state" / "journal.db"
    journal.parent.mkdir(parents=True)
    journal.touch()
    said = podwire("lab", "up", "--name", name)
    assert (said.code, said.err.splitlines()[1]) == (5, f"hint: podwire lab down --lab {name}")
    assert journal.exists()
    assert podwire("lab", "down", "--lab", name).code == 0
    assert not leaks([name], own_namespace())


def test_two_commands_at_once_do_not_lose_each_others_pods(served_lab: Lab) -> None:
    names = [f"many{number}" for number in range(6)]
    threads = [
        threading.Thread(target=labs.run, args=(served_lab.name, name, f"node{1 + at % 2}"))
        for at, name in enumerate(names)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {pod.name for pod in served_lab.state.pods} >= set(names)
    for name in names:
        labs.remove(served_lab.name, name)


def test_a_lab_that_goes_down_while_a_command_waits_is_not_found(make_lab: MakeLab) -> None:
    lab = make_lab(families="4")
    errors: list[BaseException] = []

    def attach() -> None:
        try:
            labs.run(lab.name, "late", "node1")
        except NotFound as error:
            errors.append(error)

    with locked(RUN_ROOT / lab.name):
        thread = threading.Thread(target=attach)
        thread.start()
        lock = str(RUN_ROOT / lab.name / "lock")
        inode = os.stat(lock).st_ino
        wait_for(
            lambda: any(f":{inode} " in line and "->" in line for line in _locks()),
            "the command to wait for the lock",
        )
        for name in ("lab.json", "lock"):
            (RUN_ROOT / lab.name / name).unlink()
    thread.join()
    assert len(errors) == 1


def _locks() -> list[str]:
    return Path("/proc/locks").read_text().splitlines()


# Pods


@pytest.mark.parametrize("pod", ["A", "a.b", "../x", "", "x" * 43, "UP/web", "ok/", "a/b/c"])
def test_pod_names_that_could_become_other_paths_are_refused(served_lab: Lab, pod: str) -> None:
    before = os.listdir("/run/netns")
    said = served_lab.cli("lab", "run", pod, "--node", "node1")
    assert said.code == 6, said
    assert os.listdir("/run/netns") == before


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("run", "web", "--node", "node1"), 5),
        (("run", "new", "--node", "node9"), 4),
        (("run", "new"), 2),
        (("run", "world", "--node", "node1"), 6),
        (("run", "shop/node2", "--node", "node1"), 6),
        (("run", "new", "--node", "node1", "--serve", "80/sctp"), 2),
        (("run", "new", "--node", "node1", "--serve", "0"), 2),
        (("run", "new", "--node", "node1", "--serve", "9" * 5000), 2),
        (("run", "new", "--node", "node1", "--serve", "80", "--serve", "80"), 5),
        (("run", "new", "--node", "node1", "--label", "novalue"), 2),
        (("run", "new", "--node", "node1", "--label", "a/b/c=x"), 6),
        (("run", "a/new", "-n", "b", "--node", "node1"), 2),
        (("rm", "nobody"), 4),
        (("logs", "node9"), 4),
        (("node", "stop", "node9"), 4),
        (("link", "down", "node9"), 4),
        (("connect", "client", "nobody"), 4),
        (("connect", "nobody", "web"), 4),
    ],
)
def test_what_a_lab_refuses_ends_with_its_code_and_two_lines(
    served_lab: Lab, arguments: tuple[str, ...], code: int
) -> None:
    before = served_lab.state
    said = served_lab.cli("lab", *arguments)
    assert said.code == code, said
    first, second = said.err.splitlines()
    assert (first[:7], second[:6]) == ("error: ", "hint: ")
    assert served_lab.state == before
    assert f"pw.{served_lab.name}.default.new" not in os.listdir("/run/netns")


def test_who_reads_all_that_run_says_sees_its_end_though_the_server_goes_on(
    served_lab: Lab,
) -> None:
    command = [PODWIRE, "lab", "run", "piped", "--node", "node1", "--serve", "81/tcp"]
    try:
        done = subprocess.run(
            [*command, "--lab", served_lab.name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=120,
            check=True,
        )
        assert done.stdout.startswith(b"pod default/piped runs on node1")
        connected(served_lab, "client", "piped:81")
    finally:
        served_lab.cli("lab", "rm", "piped")


def test_a_pod_is_not_attached_while_its_agent_is_away(make_lab: MakeLab) -> None:
    lab = make_lab(families="4")
    assert lab.cli("lab", "node", "stop", "node1").code == 0
    begin = time.monotonic()
    said = lab.cli("lab", "run", "web")
    assert (said.code, "podwire lab node start node1" in said.err) == (3, True)
    assert time.monotonic() - begin < 20  # a start is waited for longer
    assert lab.state.pods == []
    # Stopped on purpose is not left over.
    assert lab.name not in labs.list_leftovers(running_too=False)


def test_labels_of_a_pod_reach_the_endpoint(pair_lab: Lab) -> None:
    said = pair_lab.cli(
        "lab",
        "run",
        "labelled",
        "-n",
        "shop",
        "--node",
        "node1",
        "--label",
        "app=labelled",
        "-o",
        "json",
    )
    assert said.code == 0, said.err
    assert said.document["networkNamespace"] == f"pw.{pair_lab.name}.shop.labelled"
    listed = pair_lab.cli("endpoint", "list", "-l", "app=labelled", "-n", "shop", "-o", "name")
    assert len(listed.lines) == 1
    assert pair_lab.cli("lab", "rm", "shop/labelled").code == 0
    assert f"pw.{pair_lab.name}.shop.labelled" not in os.listdir("/run/netns")
    assert pair_lab.cli("lab", "rm", "shop/labelled").code == 4


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("web", "true"), 0),
        (("web", "false"), 1),
        (("web", "sh", "-c", "exit 77"), 77),
        (("web", "no-such-program"), 127),
        (("web", "/etc/passwd"), 126),
        (("web", "/etc"), 126),
        (("nobody", "true"), 125),
        (("world", "true"), 0),
        (("node1", "true"), 0),
    ],
)
def test_exec_ends_as_its_command_does(
    served_lab: Lab, command: tuple[str, ...], code: int
) -> None:
    place, *words = command
    done = _spawn(served_lab, "exec", place, "--", *words)
    assert done.returncode == code, done.stderr


def test_exec_is_inside_and_passes_options_streams_and_signals_on(served_lab: Lab) -> None:
    done = _spawn(served_lab, "exec", "web", "--", "ip", "-j", "addr", "show", "dev", "eth0")
    inside = {address["local"] for address in json.loads(done.stdout)[0]["addr_info"]}
    assert inside >= set(served_lab.state.find_pod("web").addresses)
    assert _spawn(served_lab, "exec", "web", "--", "cat", stdin="hello").stdout == "hello"
    # A writer whose reader left must die of SIGPIPE, which Python had switched off.
    script = "(yes; echo $? >&2) | head -n1"
    assert _spawn(served_lab, "exec", "web", "--", "bash", "-c", script).stderr.strip() == "141"


def test_a_shell_runs_inside(served_lab: Lab) -> None:
    done = _spawn(served_lab, "shell", "client", stdin="ip -br addr show eth0\nexit 9\n")
    assert done.returncode == 9
    assert served_lab.state.find_pod("client").addresses[0] in done.stdout


def _spawn(lab: Lab, *words: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [PODWIRE, "lab", *words],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PODWIRE_LAB": lab.name, "SHELL": "/bin/bash"},
    )


# Connections


@pytest.mark.parametrize(
    ("source", "target", "peer"),
    [
        ("client", "web", "default/client"),
        ("default/client", "default/web:80/tcp", "default/client"),
        ("client", "web:80/udp", "default/client"),
        ("client", "web:53/udp", "default/client"),
        ("node1", "web", "node1"),
    ],
)
def test_connect_reaches_every_address_and_shows_who_asked(
    served_lab: Lab, source: str, target: str, peer: str
) -> None:
    said = connected(served_lab, source, target, "-o", "json")
    web = served_lab.state.find_pod("web")
    assert [row["address"] for row in said.document] == list(web.addresses)
    peers = labs.locate(served_lab.state, peer)[1]
    for row, from_address in zip(said.document, peers, strict=True):
        assert row["answer"] == f"default/web node1 {row['address']} {from_address}"
        assert 0 < row["ms"] < 3000


def test_a_node_is_seen_elsewhere_by_its_address_on_the_tunnel(served_lab: Lab) -> None:
    said = connected(served_lab, "node2", "web:80/udp", "-o", "json")
    for row, from_address in zip(said.document, ("10.244.2.1", "fd10:244:0:2::1"), strict=True):
        assert row["answer"] == f"default/web node1 {row['address']} {from_address}"


def test_connect_takes_addresses_with_ipv6_in_brackets(served_lab: Lab) -> None:
    ipv4, ipv6 = served_lab.state.find_pod("web").addresses
    for target, address in (
        (ipv4, ipv4),
        (f"{ipv4}:80", ipv4),
        (ipv6, ipv6),
        (f"[{ipv6}]", ipv6),
        (f"[{ipv6}]:80", ipv6),
        (f"[{ipv6}]:53/udp", ipv6),
    ):
        said = connected(served_lab, "client", target, "-o", "jsonl")
        assert said.document["address"] == address


@pytest.mark.parametrize("target", ["web:", "web:x", "web:80/sctp", "[::1", "a:b:c:80x", ":80", ""])
def test_connect_refuses_a_target_that_is_none(served_lab: Lab, target: str) -> None:
    assert served_lab.cli("lab", "connect", "client", target).code == 2


def test_connect_to_a_closed_port_is_not_so(served_lab: Lab) -> None:
    said = served_lab.cli("lab", "connect", "client", "web:81")
    assert said.code == 1
    assert said.out.count("refused") == 2


def test_connect_counts_and_keeps_time(served_lab: Lab) -> None:
    begin = time.monotonic()
    said = served_lab.cli(
        "lab", "connect", "client", "web", "--count", "4", "--every", "100", "-o", "jsonl"
    )
    assert len(said.lines) == 8  # two addresses
    assert 0.3 <= time.monotonic() - begin < 20


def test_connect_quietly_says_it_by_the_exit_code_only(served_lab: Lab) -> None:
    assert connected(served_lab, "client", "web", "-q") == Said(0, "", "")
    assert served_lab.cli("lab", "connect", "client", "web:81", "-q") == Said(1, "", "")


def test_pods_reach_the_world_as_their_node(served_lab: Lab) -> None:
    state = served_lab.state
    world = Pod(
        namespace="t",
        name="w",
        node="-",
        container_id="",
        netns=state.plan.world_namespace,
        labels={},
    )
    server = traffic.start_servers(world, [(8080, "tcp")])[0]
    try:
        said = connected(served_lab, "client", "world:8080", "-o", "json")
    finally:
        end_all([server.process])
    seen = [row["answer"].split()[-1] for row in said.document]
    assert seen == list(state.plan.node("node2").addresses)


def test_a_server_answers_clients_that_say_nothing(served_lab: Lab) -> None:
    address = served_lab.state.find_pod("web").addresses[0]
    with traffic.socket_in(f"pw.{served_lab.name}.default.client", address, "tcp") as one:
        one.settimeout(60)
        one.connect((address, 80))
        assert one.recv(64).startswith(b"HTTP/1.1 200 OK\r\n")


def test_check_tries_every_pair_in_both_families_and_protocols(served_lab: Lab) -> None:
    said = served_lab.cli("lab", "check", "-o", "json")
    assert said.code == 0, said
    rows = said.document
    # Two pods, two nodes, the world, which has no way to pods: 20 - 2 ordered pairs; 2 families, 3 protocols, 2 sizes.
    assert len(rows) == 18 * 12
    assert {row["protocol"] for row in rows} == {"tcp", "udp", "icmp"}
    assert all(row["ok"] for row in rows)
    assert {":" in row["address"] for row in rows} == {True, False}
    table = served_lab.cli("lab", "check", "--no-headers")
    assert len(table.lines) == len(rows)


@pytest.mark.parametrize("fixture", ["small_lab", "ipv6_lab"])
def test_check_passes_on_a_lab_of_one_family(request: pytest.FixtureRequest, fixture: str) -> None:
    lab: Lab = request.getfixturevalue(fixture)
    with pods(lab, one="node1", two="node1"):
        said = lab.cli("lab", "check", "-o", "json")
        assert said.code == 0, said.out
        assert len(said.document) == 10 * 6


# Nodes and links


def test_nodes_that_are_parted_hear_nothing_of_each_other_until_they_are_healed(
    served_lab: Lab,
) -> None:
    assert served_lab.cli("lab", "partition", "node2", "node1").code == 0
    try:
        assert served_lab.cli("lab", "status", "-o", "json").document["partitions"] == [
            "node1 node2"
        ]
        for place in ("client", "node2"):
            assert served_lab.cli("lab", "connect", place, "web").code == 1
        assert served_lab.cli("lab", "connect", "world", "node2").code == 1  # nobody serves there
        assert ping_from("client", served_lab.state.plan.world_addresses[0], served_lab)
    finally:
        assert served_lab.cli("lab", "partition", "heal").code == 0
    connected(served_lab, "client", "web")


def ping_from(pod: str, address: str, lab: Lab) -> bool:
    """Ask one echo of an address from a pod."""
    return traffic.ping(lab.state.find_pod(pod).netns, address, tries=3).ok


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("node1", "node1"), 6, "from itself"),
        (("node1", "node9"), 4, "node9"),
        (("node1", "store"), 6, "--store etcd"),
        (("node1",), 2, "heal"),
    ],
    ids=["itself", "unknown", "store-is-a-file", "one-side"],
)
def test_a_partition_that_cannot_be_is_refused(
    served_lab: Lab, words: tuple[str, ...], code: int, says: str
) -> None:
    said = served_lab.cli("lab", "partition", *words)
    assert said.code == code
    assert says in said.err
    assert served_lab.state.partitions == []


def test_a_replaced_node_keeps_name_and_ranges_and_nothing_else(make_lab: MakeLab) -> None:
    lab = make_lab(nodes=2, families="4")
    assert lab.cli("lab", "run", "web", "--node", "node2").code == 0
    before = lab.node("node2")
    assert lab.cli("lab", "node", "replace", "node2").code == 0
    assert lab.node("node2") == before
    assert lab.state.pods == []
    assert lab.list_endpoints("node2") == []
    assert lab.cli("lab", "run", "web", "--node", "node2").code == 0
    assert lab.cli("lab", "check").code == 0


def test_a_cut_link_is_seen_and_repaired(served_lab: Lab) -> None:
    address = served_lab.state.find_pod("web").addresses[0]
    assert served_lab.cli("lab", "link", "down", "node2").code == 0
    try:
        attempt = traffic.connect(
            f"pw.{served_lab.name}.default.client", address, 80, timeout_s=0.3
        )
        assert not attempt.ok
    finally:
        assert served_lab.cli("lab", "link", "up", "node2").code == 0
    wait_for(
        lambda: traffic.connect(f"pw.{served_lab.name}.default.client", address, 80).ok,
        "the link to be back",
    )


def test_pods_go_on_while_their_agent_is_stopped_killed_and_started(served_lab: Lab) -> None:
    for action in ("kill", "stop"):
        assert served_lab.cli("lab", "node", action, "node1").code == 0
        status = served_lab.cli("lab", "status", "-o", "json").document
        assert [(node["agent"], node["ready"]) for node in status["nodes"]] == [
            ("stopped", False),
            ("running", True),
        ]
        connected(served_lab, "client", "web")
        assert served_lab.cli("lab", "node", action, "node1").code == 0  # again changes nothing
        assert served_lab.cli("lab", "node", "start", "node1").code == 0
    pid = served_lab.state.agents["node1"].pid
    assert served_lab.cli("lab", "node", "start", "node1").code == 0
    assert served_lab.state.agents["node1"].pid == pid
    connected(served_lab, "client", "web")


def test_an_agent_that_cannot_start_is_told_and_not_left(make_lab: MakeLab) -> None:
    lab = make_lab(families="4")
    assert lab.cli("lab", "node", "stop", "node1").code == 0
    settings = lab.node().directory / "agent.toml"
    good = settings.read_text()
    settings.write_text(good + "mtu = 12\n")
    said = lab.cli("lab", "node", "start", "node1")
    assert said.code == 3
    assert "mtu" in said.err
    assert len(said.err.splitlines()) == 2
    assert lab.state.agents == {}
    settings.write_text(good)
    assert lab.cli("lab", "node", "start", "node1").code == 0


def test_rm_while_the_agent_is_away_is_spooled(make_lab: MakeLab) -> None:
    lab = make_lab(families="4")
    before = lab.look()
    assert lab.cli("lab", "run", "web", "--serve", "80").code == 0
    assert lab.cli("lab", "node", "kill", "node1").code == 0
    assert lab.cli("lab", "rm", "web").code == 0
    assert lab.cli("lab", "node", "start", "node1").code == 0
    wait_for(lambda: lab.look() == before, "the pod to be gone")


# What it shows


def test_status_in_every_form(served_lab: Lab) -> None:
    document = served_lab.cli("lab", "status", "-o", "json").document
    assert [node["name"] for node in document["nodes"]] == ["node1", "node2"]
    assert [pod["serves"] for pod in document["pods"]] == [["80/tcp", "80/udp", "53/udp"], []]
    assert json.loads(served_lab.cli("lab", "status", "-o", "jsonl").out) == document
    assert f"name: {served_lab.name}\n" in served_lab.cli("lab", "status", "-o", "yaml").out
    assert served_lab.cli("lab", "status", "-o", "name").out == f"{served_lab.name}\n"
    for form in ("table", "wide"):
        text = served_lab.cli("lab", "status", "-o", form).out
        assert "node1: agent running" in text
        assert "default/web: " in text


def test_list_in_every_form(served_lab: Lab) -> None:
    row = {"name": served_lab.name, "nodes": 2, "families": "46", "pods": 2}
    assert row in podwire("lab", "list", "-o", "json").document
    assert row in [json.loads(line) for line in podwire("lab", "list", "-o", "jsonl").lines]
    assert served_lab.name in podwire("lab", "list", "-o", "name").lines
    assert served_lab.name in podwire("lab", "list", "-q").lines
    assert f"name: {served_lab.name}\n" in podwire("lab", "list", "-o", "yaml").out
    head, *rows = podwire("lab", "list").lines
    assert head.split() == ["NAME", "NODES", "FAMILIES", "PODS"]
    assert [served_lab.name, "2", "46", "2"] in [line.split() for line in rows]
    bare = podwire("lab", "list", "--no-headers").lines
    assert [line.split() for line in bare] == [line.split() for line in rows]


def test_the_environment_names_the_lab(served_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PODWIRE_LAB", served_lab.name)
    for command in (
        ("lab", "status", "-o", "name"),
        ("lab", "connect", "client", "web", "-q"),
        ("lab", "logs", "node1"),
        ("lab", "check", "-o", "jsonl"),
        ("endpoint", "list"),
    ):
        said = podwire(*command)
        assert said.code == 0, (command, [line for line in said.lines if '"ok": false' in line])
    monkeypatch.setenv("PODWIRE_LAB", lab_name())
    assert podwire("lab", "status").code == 4
    assert podwire("endpoint", "list").code == 4


def test_logs_are_the_agents(served_lab: Lab) -> None:
    lines = served_lab.cli("lab", "logs", "node2").lines
    assert any("done" in line and '"ADD"' in line for line in lines)


def test_nothing_changes_outside_of_the_lab(served_lab: Lab) -> None:
    assert own_namespace()["devices"] == []
    assert "underlay" not in run("ip", "-br", "link", "show")
    assert (RUN_ROOT / served_lab.name).stat().st_mode & 0o077 == 0
    assert sorted(path.name for path in (PIN_ROOT / served_lab.name).iterdir()) == [
        "node1",
        "node2",
    ]
    assert read_state(served_lab.name).plan.node("node1").directory.is_dir()
