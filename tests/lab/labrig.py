"""A lab for tests: made by the code that people use, asked by other tools (`ip`, `tc`, the API's socket by hand).

Only how agents start is not what people use (tests/lab/quick_labs.py). Names begin with the mark of this run
(tests/leavings.py), so that the leak check can tell what is ours from what others do on this machine.
"""

import contextlib
import http.client
import io
import itertools
import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from podwire.cli.main import main
from podwire.kernel import netns
from podwire.lab import labs
from podwire.lab.pod import launcher_program
from podwire.lab.state import LabState, read_state
from podwire.lab.topology import LabShape, NodePlan
from podwire.model.cluster import TUNNEL_DEVICE
from podwire.model.errors import NotFound
from tests import leavings
from tests.lab.rig import Outcome, run
from tests.waiting import wait_for

ATTEMPTS: Final = 5
_numbers = itertools.count(1)


def quiet(_line: str) -> None:
    """Take progress and say nothing."""


def lab_name() -> str:
    """Give a name that no other lab has."""
    return f"{leavings.LAB}-{next(_numbers)}"


@contextlib.contextmanager
def asking(
    lab: "Lab", source: str, target: str, ask: Callable[[str, str], Iterable[bool]]
) -> Iterator[list[bool]]:
    """Ask all the time, from a namespace towards an address; each entry is one answer or its lack."""
    namespace, _ = labs.locate(lab.state, source)
    address = labs.find_addresses(lab.state, target)[0]
    seen: list[bool] = []
    ended = threading.Event()

    def ask_on() -> None:
        while not ended.wait(0.01):
            seen.extend(ask(namespace, address))

    thread = threading.Thread(target=ask_on)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


@dataclass(frozen=True)
class Said:
    """What a command said, and how it ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Its output as JSON."""
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        """Its output in lines."""
        return self.out.splitlines()


def podwire(*arguments: str) -> Said:
    """Run the command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main(list(arguments))
        except SystemExit as leave:
            code = leave.code
    assert isinstance(code, int)
    return Said(code, out.getvalue(), err.getvalue())


class Answer(Outcome):
    """What the launcher gave back, with the words of an error."""

    @property
    def code(self) -> int:
        """Number of the error; 0 when there is none."""
        return int(self.document["code"]) if self.status else 0

    @property
    def text(self) -> str:
        """Message and details of an error."""
        return f"{self.document.get('msg', '')} {self.document.get('details', '')}"


class Lab:
    """A running lab."""

    def __init__(self, nodes: int = 1, families: str = "46", name: str = "", **shape: Any) -> None:
        self.name = name or lab_name()
        wanted = LabShape(nodes=nodes, families=families, **shape)
        labs.up(self.name, wanted, progress=quiet)

    def close(self) -> None:
        """Remove it, whatever became of it."""
        with contextlib.suppress(NotFound):
            labs.down(self.name, progress=quiet)

    @property
    def state(self) -> LabState:
        """What the lab's file says."""
        return read_state(self.name)

    def node(self, name: str = "node1") -> NodePlan:
        """Give a node's plan."""
        return self.state.plan.node(name)

    def cli(self, *arguments: str) -> Said:
        """Run a command of the command line on this lab."""
        return podwire(*arguments, "--lab", self.name)

    def api(self, method: str, path: str, node: str = "node1") -> tuple[int, Any]:
        """Ask an agent; again, where the machine stood still in the middle of the request."""
        for _ in range(ATTEMPTS):
            found = self._ask(method, path, node)
            if found[0] != 408:
                break
        return found

    def _ask(self, method: str, path: str, node: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("podwire")
        connection.sock = socket.socket(socket.AF_UNIX)
        try:
            connection.sock.connect(str(self.node(node).directory / "api.sock"))
            connection.request(method, f"/v1{path}")
            answer = connection.getresponse()
            body = answer.read()
            is_json = "json" in answer.headers.get("Content-Type", "")
            return answer.status, json.loads(body) if is_json else body.decode()
        finally:
            connection.close()

    def get(self, path: str, node: str = "node1") -> Any:
        """Ask an agent for what must be there."""
        status, document = self.api("GET", path, node)
        assert status == 200, document
        return document

    def metrics(self, node: str = "node1") -> str:
        """Give a node's metrics as a scraper reads them."""
        return str(self.get("/metrics", node))

    def list_endpoints(self, node: str = "node1") -> list[dict[str, Any]]:
        """Give the endpoints of a node that are not on their way out."""
        return [
            endpoint
            for endpoint in self.get("/endpoint", node)
            if endpoint["state"] != "disconnecting"
        ]

    def endpoints(self, node: str = "node1") -> dict[str, dict[str, Any]]:
        """Give the same by container id, one for each."""
        return {endpoint["containerId"]: endpoint for endpoint in self.list_endpoints(node)}

    def settled(self, node: str = "node1") -> Any:
        """Wait until nothing is on its way out, and the directories, which are written behind an answer, are there."""
        directories = self.node(node).directory / "endpoints"

        def is_settled() -> bool:
            there = self.get("/endpoint", node)
            written = set(os.listdir(directories)) if directories.is_dir() else set()
            return all(endpoint["state"] == "ready" for endpoint in there) and written == {
                str(endpoint["id"]) for endpoint in there
            }

        return wait_for(is_settled, "the node to settle")

    # The CNI door

    def namespace(self) -> str:
        """Make a namespace as a runtime does; the lab's end removes it."""
        name = f"pw.{self.name}.x.{next(_numbers)}"
        run("ip", "netns", "add", name)
        return name

    def cni(
        self,
        command: str,
        container: str = "",
        namespace: str = "",
        *,
        if_name: str = "eth0",
        config: Mapping[str, Any] | None = None,
        args: str = "",
        node: str = "node1",
    ) -> Answer:
        """Execute the launcher as a runtime does."""
        process = self.start_cni(
            command, container, namespace, if_name=if_name, config=config, args=args, node=node
        )
        return finish(process)

    def start_cni(
        self,
        command: str,
        container: str,
        namespace: str,
        *,
        if_name: str = "eth0",
        config: Mapping[str, Any] | bytes | None = None,
        args: str = "",
        node: str = "node1",
    ) -> "subprocess.Popen[bytes]":
        """Start the launcher and give it its configuration."""
        environment = {
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": container,
            "CNI_IFNAME": if_name,
            "CNI_NETNS": f"/run/netns/{namespace}" if namespace else "",
            "CNI_PATH": str(Path(launcher_program()).parent),
            **({"CNI_ARGS": args} if args else {}),
        }
        document = {
            "cniVersion": "1.1.0",
            "name": "podwire",
            "type": "podwire-cni",
            "socket": str(self.node(node).directory / "cni.sock"),
        }
        data = config if isinstance(config, bytes) else json.dumps(document | dict(config or {}))
        process = subprocess.Popen(
            [launcher_program()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(data.encode() if isinstance(data, str) else data)
        process.stdin = None
        return process

    # What is there

    def devices(self, node: str = "node1") -> list[dict[str, Any]]:
        """List the host devices of a node's pods; the tunnel's is none."""
        shown = json.loads(run("ip", "-n", self.node(node).namespace, "-j", "-d", "link", "show"))
        return [
            link
            for link in shown
            if link["ifname"].startswith("pw") and link["ifname"] != TUNNEL_DEVICE
        ]

    def look(self, node: str = "node1") -> dict[str, object]:
        """Read everything that an attachment leaves on a node, in words that compare well."""
        plan = self.node(node)
        routes = [
            route["dst"]
            for family in ("-4", "-6")
            for route in json.loads(
                run("ip", "-n", plan.namespace, family, "-j", "route", "show", "proto", "199")
                or "[]"
            )
        ]
        directories = plan.directory / "endpoints"
        return {
            "devices": sorted(link["ifname"] for link in self.devices(node)),
            "routes": sorted(routes),
            "endpoints": sorted(
                (endpoint["id"], endpoint["state"]) for endpoint in self.get("/endpoint", node)
            ),
            "addresses": sorted(
                allocation["ip"] for allocation in self.get("/ipam", node)["allocations"]
            ),
            "resting": [section["resting"] for section in self.get("/ipam", node)["ranges"]],
            "rows": {
                name: sorted(row[field] for row in self.get(f"/map/{name}", node)["rows"])
                for name, field in (
                    ("config", "ifindex"),
                    ("endpoint", "address"),
                    ("usage", "endpoint"),
                )
            },
            "directories": sorted(os.listdir(directories)) if directories.is_dir() else [],
        }

    @contextlib.contextmanager
    def nothing_left(self, node: str = "node1", *, foreign_devices: int = 0) -> Iterator[None]:
        """Fail unless the node looks afterwards as it looked before, as soon as what was ended is gone.

        `foreign_devices`: how many have a name like ours and are none.
        """
        self.settled(node)
        before: dict[str, Any] = {}

        def is_complete() -> bool:
            """Tell whether devices and rows are those of the endpoints: they go behind the answer of a DEL."""
            before.update(self.look(node))
            numbers = sorted(endpoint_id for endpoint_id, _ in before["endpoints"])
            rows = before["rows"]
            return rows["usage"] == numbers and (
                len(before["devices"]) - foreign_devices == len(rows["config"]) == len(numbers)
            )

        wait_for(is_complete, "what earlier tests ended to be gone")
        yield
        after: dict[str, Any] = {}

        def same() -> bool:
            after.update(self.look(node))
            return after == before

        try:
            wait_for(same, "nothing to be left")
        except AssertionError:
            raise AssertionError(f"before: {before}\nafter: {after}") from None


def finish(process: "subprocess.Popen[bytes]") -> Answer:
    """Wait for a launcher and read its answer."""
    output, _ = process.communicate(timeout=150)
    return Answer(process.returncode, json.loads(output) if output.strip() else {})


def leaks(names: Sequence[str], before: Mapping[str, object]) -> dict[str, object]:
    """Name what labs with these names left behind, and what changed in our own network namespace."""
    found: dict[str, object] = {}
    prefixes = tuple(f"pw.{name}" for name in names)
    left = [name for name in netns.list_named() if name.startswith(prefixes)]
    if left:
        found["namespaces"] = left
    for root in (Path("/run/podwire/lab"), Path("/sys/fs/bpf/podwire/lab")):
        paths = [path for name in names for path in root.glob(f"{name}*")] if root.is_dir() else []
        if paths:
            found[str(root)] = paths
    if processes := _list_processes(names):
        found["processes"] = processes
    now = own_namespace()
    found |= {what: [before[what], now[what]] for what in now if now[what] != before[what]}
    return found


def own_namespace() -> dict[str, object]:
    """Read what of ours is in the network namespace of this process: nothing may change there."""
    links = json.loads(run("ip", "-j", "link", "show"))
    tables = run("nft", "list", "tables", check=False).splitlines()
    return {
        "devices": sorted(link["ifname"] for link in links if link["ifname"].startswith("pw")),
        "routes": [run("ip", family, "route", "show", "proto", "199") for family in ("-4", "-6")],
        "tables": [table for table in tables if table.endswith(" podwire")],
    }


def _list_processes(names: Sequence[str]) -> list[str]:
    """Find processes that were told of a lab in their command line, or write there what they say (a forked agent), and
    servers in a namespace that has no name any more.
    """
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            text = b" ".join(words).decode(errors="replace")
            told = f"{text} > {_find_output(entry)}"
            if any(f"/run/podwire/lab/{name}" in told for name in names) or _is_orphan(entry, text):
                found.append(f"{entry.name}: {told}")
    return found


def _find_output(entry: Path) -> str:
    with contextlib.suppress(OSError):  # it has closed it
        return os.readlink(entry / "fd" / "1")
    return ""


def _is_orphan(entry: Path, text: str) -> bool:
    """Tell whether a lab's server outlived the name of its namespace."""
    if "podwire.lab.serve" not in text or not _sees_our_names(entry):
        return False
    inode = os.stat(entry / "ns" / "net").st_ino
    return all(os.stat(netns.named_path(name)).st_ino != inode for name in netns.list_named())


def _sees_our_names(entry: Path) -> bool:
    """Tell whether a process has our mount namespace; in another (a container, a chroot of its own) names differ."""
    return os.path.samestat(os.stat(entry / "ns" / "mnt"), os.stat("/proc/self/ns/mnt"))
