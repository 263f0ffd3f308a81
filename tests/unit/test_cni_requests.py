"""From frame to reply: every failure has its code, in the asked version, and nothing is left open."""

import asyncio
import json
import os
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

import pytest

from podwire.agent.cni.chained_portmap import ChainedPortmap
from podwire.agent.cni.dispatch import Dispatcher
from podwire.agent.cni.received import Caller, Received
from podwire.agent.cni.requests import INLINE_MAX_BYTES, CniRequests
from podwire.agent.cni.socket import CniServer
from podwire.agent.cni.spool import Spool
from podwire.agent.metrics import Metrics
from podwire.agent.unix_socket import open_unix_socket
from podwire.cni import launcher
from podwire.cni.netconf import decode_request
from podwire.kernel.clock import KernelClock
from podwire.model import errors, wire
from podwire.model.errors import PodwireError
from podwire.model.request import AttachRequest
from podwire.model.wire import Frame, Reply, ReplyStatus
from tests.contract.launcher_clients import LAUNCHER, build_launcher
from tests.fakes.attachments import GatedAttachments

DEADLINE_S = 30.0
NETCONF = {"cniVersion": "0.4.0", "name": "n", "type": "podwire-cni"}


class Bench:
    """Requests, a dispatcher, and attachments in memory."""

    def __init__(self, directory: Path) -> None:
        clock = KernelClock()
        spool = Spool(directory / wire.SPOOL_DIRECTORY, clock, _decode, ran_at=lambda *_: None)
        self.attachments = GatedAttachments()
        self.attachments.open_gates()
        self.dispatcher = Dispatcher(self.attachments, spool, clock)
        self.metrics = Metrics()
        self.old: set[str] = set()
        """Containers that came while the network chained portmap."""
        self.passed_on: list[tuple[str, str, object]] = []
        """Plugin, container and what it was told of ports."""
        self.wrong = ""
        chained = ChainedPortmap(lambda key: key.container_id in self.old, self._run)
        self.requests = CniRequests(self.dispatcher, self.metrics, chained)

    def _run(
        self, plugin: str, variables: Mapping[str, str], stdin: bytes, mount_fd: int | None
    ) -> str:
        assert mount_fd is None
        network = json.loads(stdin)
        assert (network["type"], network["name"]) == (plugin, "n")
        told = (variables["CNI_COMMAND"], variables["CNI_CONTAINERID"])
        self.passed_on.append((*told, network["runtimeConfig"]["portMappings"]))
        return self.wrong

    async def ask(
        self, command: str, netns: str = "", *, stdin: bytes | None = None, **more: str
    ) -> Reply:
        reply = await self.answer(command, netns, lambda _reply: False, stdin=stdin, **more)
        assert reply is not None
        return reply

    async def answer(
        self,
        command: str,
        netns: str,
        answer_at_once: Callable[[Reply], bool],
        *,
        stdin: bytes | None = None,
        **more: str,
    ) -> Reply | None:
        environment = {
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": "c1",
            "CNI_IFNAME": "eth0",
            "CNI_PATH": "/opt/cni/bin",
            "CNI_NETNS": netns or "/run/netns/none",
        }
        descriptors = [os.open(netns, os.O_RDONLY)] if netns else []
        frame = Frame(
            environment=environment,
            stdin=json.dumps(NETCONF).encode() if stdin is None else stdin,
            started_boottime_ns=KernelClock().boottime_ns(),
            boot_id=KernelClock().boot_id(),
            has_netns=bool(netns),
            netns_errno=0 if netns else 2,
            program=more.get("program", "podwire-cni"),
        )
        received = Received(frame, Caller(), descriptors, answer_at_once)
        reply = await self.requests.answer(received)
        async with asyncio.timeout(DEADLINE_S):
            while received.descriptors:  # noqa: ASYNC110 (closed when the thread is done)
                await asyncio.sleep(0)
        return reply


def _decode(frame: Frame) -> AttachRequest:
    return decode_request(frame.environment, frame.stdin, frame.started_boottime_ns)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    yield made
    await made.dispatcher.close(DEADLINE_S)


@pytest.fixture
def netns() -> Iterator[str]:
    name = f"pwt-req-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    yield f"/run/netns/{name}"
    subprocess.run(["ip", "netns", "del", name], check=True)


def error_of(reply: Reply) -> dict[str, object]:
    assert reply.status is not ReplyStatus.DONE
    error = json.loads(reply.body)
    assert isinstance(error, dict)
    return error


@pytest.mark.kernel
async def test_an_add_gets_its_result_in_the_asked_version(bench: Bench, netns: str) -> None:
    reply = await bench.ask("ADD", netns)
    assert reply.status is ReplyStatus.DONE
    assert json.loads(reply.body)["cniVersion"] == "0.4.0"


@pytest.mark.kernel
@pytest.mark.parametrize("is_taken", [True, False], ids=["taken", "left to the loop"])
async def test_the_thread_of_an_add_answers_it(bench: Bench, netns: str, is_taken: bool) -> None:
    said: list[Reply | None] = []
    threads: list[str] = []

    def answer_at_once(reply: Reply) -> bool:
        threads.append(threading.current_thread().name)
        said.extend([reply] * is_taken)
        return is_taken

    said.append(await bench.answer("ADD", netns, answer_at_once))
    assert [json.loads(reply.body)["cniVersion"] for reply in said if reply] == ["0.4.0"]
    assert threads[0].startswith("attach")


@pytest.mark.parametrize("command", ["DEL", "STATUS", "GC"])
async def test_what_has_no_result_prints_nothing(bench: Bench, command: str) -> None:
    stdin = json.dumps(NETCONF | {"cniVersion": "1.1.0"}).encode()
    assert await bench.ask(command, stdin=stdin) == Reply(ReplyStatus.DONE, b"")


@pytest.mark.parametrize(
    ("netns", "words"),
    [
        pytest.param("", "No such file", id="gone"),
        pytest.param("/proc/self/ns/net", "node's own", id="the node's own"),
        pytest.param("/proc/self/ns/mnt", "not a network namespace", id="a mount namespace"),
        pytest.param("/etc/passwd", "not a network namespace", id="a file"),
        pytest.param("/", "not a network namespace", id="a directory"),
    ],
)
async def test_an_add_without_a_usable_namespace_is_code_4(
    bench: Bench, netns: str, words: str
) -> None:
    reply = await bench.ask("ADD", netns)
    error = error_of(reply)
    assert (error["code"], error["cniVersion"]) == (4, "0.4.0")
    assert words in str(error["msg"])
    assert bench.attachments.history == []


@pytest.mark.parametrize("netns", ["", "/proc/self/ns/net", "/etc/passwd"])
async def test_a_del_does_not_need_the_namespace(bench: Bench, netns: str) -> None:
    assert (await bench.ask("DEL", netns)).status is ReplyStatus.DONE
    assert [command for command, _ in bench.attachments.history] == ["DEL"]


FAILURES: dict[str, tuple[PodwireError, int, ReplyStatus, ReplyStatus]] = {
    "configuration": (
        errors.InvalidConfiguration("x"),
        7,
        ReplyStatus.FAILED,
        ReplyStatus.FAILED,
    ),
    "disk full": (errors.StorageFailure("x"), 5, ReplyStatus.FAILED, ReplyStatus.NOT_NOW),
    "kernel": (
        errors.KernelFailure(16, "delete", "pw0"),
        110,
        ReplyStatus.FAILED,
        ReplyStatus.NOT_NOW,
    ),
    "not now": (errors.Unavailable("x"), 11, ReplyStatus.FAILED, ReplyStatus.NOT_NOW),
    "bug": (ZeroDivisionError("x"), 110, ReplyStatus.FAILED, ReplyStatus.NOT_NOW),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("case", FAILURES)
async def test_a_failure_has_its_code_and_a_del_is_left_to_the_spool(
    bench: Bench, case: str
) -> None:
    error, code, check_status, del_status = FAILURES[case]
    prev = {"prevResult": {"cniVersion": "0.4.0", "interfaces": [], "ips": []}}
    stdin = json.dumps(NETCONF | prev).encode()
    for command, status in (("CHECK", check_status), ("DEL", del_status)):
        bench.attachments.failures.append(error)
        reply = await bench.ask(command, "/proc/self/ns/net", stdin=stdin)
        assert (reply.status, error_of(reply)["code"]) == (status, code)


async def test_a_configuration_that_is_no_json_is_code_6(bench: Bench) -> None:
    for stdin in (b"", b"{", b"[]", b"[" * 100_000):
        assert error_of(await bench.ask("DEL", stdin=stdin))["code"] == 6


async def test_a_large_configuration_is_decoded_too(bench: Bench) -> None:
    stdin = json.dumps(NETCONF | {"filler": "x" * INLINE_MAX_BYTES}).encode()
    assert (await bench.ask("DEL", stdin=stdin)).status is ReplyStatus.DONE


async def test_unknown_keys_are_named_once_for_each_network(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    stdin = json.dumps(NETCONF | {"zz": 1, "aa": 2}).encode()
    for _ in range(3):
        await bench.ask("DEL", stdin=stdin)
    lines = [line for line in caplog.records if "mean nothing" in line.message]
    assert [line.__dict__["keys"] for line in lines] == ["aa, zz"]


@pytest.mark.parametrize(
    ("command", "code"), [("ADD", 2), ("CHECK", 2), ("STATUS", 2), ("DEL", 0), ("GC", 0)]
)
async def test_the_ipam_plugin_says_that_it_is_not_built(
    bench: Bench, command: str, code: int
) -> None:
    reply = await bench.ask(command, program=wire.IPAM_PROGRAM)
    assert bench.attachments.history == [], "it never touches the attachment of the same name"
    if code:
        assert error_of(reply)["code"] == code
    else:
        assert reply == Reply(ReplyStatus.DONE, b"")


async def test_an_error_is_logged_once_with_its_facts(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.ask("ADD")
    (line,) = [line for line in caplog.records if line.levelname == "ERROR"]
    facts = line.__dict__
    assert (facts["op"], facts["container"], facts["code"]) == ("ADD", "c1", 4)


async def test_requests_are_counted_by_their_outcome(bench: Bench) -> None:
    await bench.ask("DEL")
    await bench.ask("ADD")
    text = bench.metrics.render().decode()
    assert 'podwire_cni_request_seconds_count{command="DEL",outcome="ok"} 1.0' in text
    assert 'podwire_cni_request_seconds_count{command="ADD",outcome="environment"} 1.0' in text


# --- with the real launcher on a real socket ----------------------------------------------------


@pytest.fixture(params=["loop", "thread"])
async def served(
    bench: Bench, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Path]:
    build_launcher()
    path = tmp_path / "cni.sock"
    at_once = bench.requests if request.param == "thread" else None
    server = CniServer(bench.requests.answer, at_once=at_once)
    async with server.serving(open_unix_socket(path), path):
        assert path.stat().st_mode & 0o777 == 0o600
        yield path


def _stdin(path: Path) -> bytes:
    return json.dumps(NETCONF | {"socket": str(path), "agent-wait": 0}).encode()


def _environment(command: str, netns: str) -> dict[str, str]:
    return {
        "CNI_COMMAND": command,
        "CNI_CONTAINERID": "c1",
        "CNI_IFNAME": "eth0",
        "CNI_NETNS": netns,
        "CNI_PATH": "/opt/cni/bin",
    }


@pytest.mark.kernel
async def test_a_pod_comes_and_goes_through_the_launcher(
    bench: Bench, served: Path, netns: str
) -> None:
    for command, attached in (("ADD", 1), ("DEL", 0), ("DEL", 0)):
        process = await asyncio.create_subprocess_exec(
            LAUNCHER,
            env=_environment(command, netns),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        await process.communicate(_stdin(served))
        assert process.returncode == 0
        assert len(bench.attachments.attached) == attached


@pytest.mark.kernel
async def test_a_killed_launcher_takes_its_add_with_it(
    bench: Bench, served: Path, netns: str
) -> None:
    bench.attachments.open_all = False
    bench.attachments.steps = 2
    process = await asyncio.create_subprocess_exec(
        LAUNCHER, env=_environment("ADD", netns), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    assert process.stdin
    process.stdin.write(_stdin(served))
    process.stdin.close()
    async with asyncio.timeout(DEADLINE_S):
        while not bench.attachments.running:  # noqa: ASYNC110 (it comes from another process)
            await asyncio.sleep(0.001)
        (operation,) = bench.attachments.running
        process.kill()
        await process.wait()
        operation.gate.release()
        while bench.dispatcher._lines.count:
            operation.gate.release()
            await asyncio.sleep(0.001)
    assert bench.attachments.attached == {}
    assert bench.attachments.history[0][0] == "ADD"


async def test_a_del_that_fails_for_now_is_spooled_and_done_later(
    bench: Bench, served: Path
) -> None:
    bench.attachments.failures.append(errors.StorageFailure("disk full"))
    outcome = await asyncio.to_thread(launcher.call, _environment("DEL", ""), _stdin(served))
    assert outcome == launcher.Outcome(0)
    assert await bench.dispatcher.replay() == (1, 0)
    assert os.listdir(served.parent / wire.SPOOL_DIRECTORY) == []


MAPPINGS = [{"HostPort": 80, "ContainerPort": 80}]


@pytest.mark.parametrize("wrong", ["", "exit status 1"])
@pytest.mark.parametrize(
    ("command", "mappings", "is_old", "is_passed_on"),
    [
        ("DEL", MAPPINGS, True, True),
        ("DEL", [], True, False),
        ("DEL", MAPPINGS, False, False),
        ("ADD", MAPPINGS, True, False),
    ],
)
async def test_ports_of_a_chained_portmap_end_with_their_pod(
    bench: Bench,
    netns: str,
    command: str,
    mappings: list[object],
    is_old: bool,
    is_passed_on: bool,
    wrong: str,
) -> None:
    bench.wrong, bench.old = wrong, {"c1"} if is_old else set()
    config = {**NETCONF, "runtimeConfig": {"PortMappings": mappings}}
    reply = await bench.ask(command, netns, stdin=json.dumps(config).encode())
    assert reply.status is ReplyStatus.DONE, "a DEL succeeds whatever another plugin leaves"
    assert bench.passed_on == ([("DEL", "c1", MAPPINGS)] if is_passed_on else [])
