"""One node for tests: a namespace with a real agent in it, pods by the real launcher, and an eye that asks others.

What is there is read by `ip`, `bpftool` and sqlite, never through the code under test. Everything has a name that
begins with the mark of this run (tests/leavings.py) and is removed by `close`, whatever happened.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from podwire.model.closing import Closing
from tests import leavings
from tests.lab.agent_forks import AgentForks, ForkedAgent
from tests.waiting import wait_for

ROOT: Final = Path(__file__).resolve().parents[2]
LAUNCHER: Final = ROOT / "build" / "bin" / "podwire-cni"
START_DEADLINE_S: Final = 180.0
SETTLE_DEADLINE_S: Final = 120.0
STOP_DEADLINE_S: Final = 120.0
DIRECTORIES_DEADLINE_S: Final = 120.0
AGENT: Final = ("-c", "import sys; from podwire.agent.main import main; sys.exit(main())")
CRASH_AGENT: Final = ("-m", "tests.lab.crash_agent")
_LED_TO_A_POD: Final = re.compile(r"\. (\d+) : ([0-9a-f.:]+) \. \d+")
"""An element of the table's maps of host ports, as `nft` lists it."""


def run(*command: str, check: bool = True) -> str:
    """Run a tool; its failure is the test's."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Outcome:
    """What the launcher gave back."""

    status: int
    document: Mapping[str, Any]

    @property
    def ok(self) -> bool:
        """Whether it succeeded."""
        return self.status == 0

    @property
    def addresses(self) -> list[str]:
        """Addresses of a result."""
        return [ip["address"].partition("/")[0] for ip in self.document.get("ips", [])]


@dataclass
class Present:
    """What the node holds, as other tools see it. Everything is a set of words that compare well."""

    devices: dict[int, int] = field(default_factory=dict)
    """Endpoint number in the alias -> device index."""
    rows: set[int] = field(default_factory=set)
    """Device indexes with a row in pw_config."""
    addresses: dict[str, int] = field(default_factory=dict)
    """Address -> instance, from pw_endpoints."""
    usage: set[int] = field(default_factory=set)
    routes: set[str] = field(default_factory=set)
    records: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Journal: id -> record."""


class Rig(Closing):
    """A node: its namespace, its directories, its agent."""

    def __init__(
        self, *, cidrs: Sequence[str] = ("10.99.0.0/24", "fd99::/64"), **settings: object
    ) -> None:
        self.name = leavings.new_name()
        self.directory = Path("/run") / self.name
        self.bpf = Path("/sys/fs/bpf") / self.name
        self._processes: list[subprocess.Popen[bytes] | ForkedAgent] = []
        self._namespaces: list[str] = []
        self._numbers = itertools.count(1)
        self.agent: subprocess.Popen[bytes] | ForkedAgent | None = None
        self.agent_command: tuple[str, ...] = (sys.executable, *AGENT)
        """What `start` runs; a test may want another build's."""
        self.forks: AgentForks | None = None
        """Where `start` gets agents of this build from instead, if a test starts hundreds."""
        self.directory.mkdir(mode=0o700)
        self.log = self.directory / "agent.log"
        self._config = self.directory / "agent.toml"
        values: dict[str, object] = {
            "node_name": self.name,
            "run_dir": str(self.directory),
            "state_dir": str(self.directory / "state"),
            "bpf_dir": str(self.bpf),
            "node_cidrs": list(cidrs),
            "conntrack_entries": 8192,
            "conntrack_quota": 1024,
            **settings,
        }
        self._config.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items()))
        self.make_namespace(self.name)
        self._make_uplink()

    def _make_uplink(self) -> None:
        """A node has an address: a bridge stands for its network."""
        run("ip", "-n", self.name, "link", "add", "uplink", "type", "bridge")
        run("ip", "-n", self.name, "addr", "add", "192.0.2.1/24", "dev", "uplink")
        run("ip", "-n", self.name, "addr", "add", "2001:db8::1/64", "dev", "uplink", "nodad")
        run("ip", "-n", self.name, "link", "set", "uplink", "up")

    # The agent

    def start(
        self,
        *,
        crash_at: int | None = None,
        crash_command: str = "",
        wait: bool = True,
    ) -> None:
        """Start the agent, or the one that dies at a point; by default wait until it is ready."""
        program = self.agent_command
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        if crash_at is not None:
            program = (sys.executable, *CRASH_AGENT)
            environment |= {
                "PWT_CRASH_AT": str(crash_at),
                "PWT_CRASH_COMMAND": crash_command,
                "PWT_CRASH_LOG": str(self.crash_log),
                "PWT_CRASH_ARM": str(self.directory / "armed"),
            }
        with self.log.open("ab") as log:
            if self.forks is not None:
                self.agent = self.forks.start(self.name, str(self._config), log, environment)
            else:
                self.agent = self._execute(program, log, environment)
        self._processes.append(self.agent)
        if wait:
            self.wait_ready()

    def _execute(
        self, program: Sequence[str], log: IO[bytes], environment: Mapping[str, str]
    ) -> "subprocess.Popen[bytes]":
        entering = "nsenter", f"--net=/run/netns/{self.name}"
        return subprocess.Popen(
            [*entering, *program, "--config", str(self._config)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            cwd=ROOT,
        )

    @property
    def crash_log(self) -> Path:
        """Where the crash agent writes the points it passed."""
        return self.directory / "points"

    def arm(self, armed: bool = True) -> None:
        """Let the crash agent count from the next request of its command on; or no longer."""
        flag = self.directory / "armed"
        if armed:
            flag.touch()
        else:
            flag.unlink(missing_ok=True)

    def count_points(self) -> int:
        """Tell how many points the crash agent has passed."""
        return self.crash_log.read_bytes().count(b"\n") if self.crash_log.exists() else 0

    def crash_points(self) -> list[str]:
        """Give the points that the last crash agent passed, and forget them."""
        lines = self.crash_log.read_text().splitlines() if self.crash_log.exists() else []
        self.crash_log.unlink(missing_ok=True)
        return lines

    def is_running(self) -> bool:
        """Tell whether the agent's process lives."""
        return self.agent is not None and self.agent.poll() is None

    def wait_ready(self) -> None:
        """Wait until the agent says that it is ready."""

        def ready() -> bool:
            if not self.is_running():
                raise AssertionError(f"the agent ended:\n{self.log_tail()}")
            try:
                return self.get("/healthz")[0] == 200
            except (
                OSError,
                IndexError,
            ):  # nobody listens yet, or the agent ended before it answered
                return False

        wait_for(ready, "the agent to be ready", START_DEADLINE_S)

    def stop(self) -> int:
        """Stop the agent as a service manager does; gives its exit code."""
        assert self.agent is not None
        self.agent.send_signal(signal.SIGTERM)
        return self.agent.wait(STOP_DEADLINE_S)

    def kill(self) -> None:
        """Kill the agent."""
        assert self.agent is not None
        self.agent.kill()
        self.agent.wait(STOP_DEADLINE_S)

    def log_tail(self, lines: int = 20) -> str:
        """Give the end of the agent's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, Any]:
        """Ask the API; status and document."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(30)
            connection.connect(str(self.directory / "api.sock"))
            head = f"{method} /v1{path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            raw = b""
            while chunk := connection.recv(65536):
                raw += chunk
        head_text, _, payload = raw.partition(b"\r\n\r\n")
        status = int(head_text.split(b" ", 2)[1])
        is_json = b"application/json\r\n" in head_text + b"\r\n"
        return status, json.loads(payload) if payload and is_json else payload

    def get(self, path: str) -> tuple[int, Any]:
        """GET from the API."""
        return self.ask("GET", path)

    def settle(self) -> None:
        """Wait until nothing is on its way out any more and every endpoint is ready."""

        def settled() -> bool:
            states = self.get("/status")[1]["endpoints"]["byState"]
            return not set(states) - {"ready"} and not self.spooled()

        wait_for(settled, "the node to settle", SETTLE_DEADLINE_S)

    def is_folded(self) -> bool:
        """Tell whether the journal's database has all that was written."""
        return not (self.directory / "state" / "journal.db-recent").stat().st_size

    def spooled(self) -> list[str]:
        """Names of the DELs that wait."""
        spool = self.directory / "spool"
        return (
            [name for name in os.listdir(spool) if name.endswith(".del")] if spool.is_dir() else []
        )

    # Pods

    def make_namespace(self, name: str) -> str:
        """Make a namespace with loopback up."""
        run("ip", "netns", "add", name)
        self._namespaces.append(name)
        run("ip", "-n", name, "link", "set", "lo", "up")
        return name

    def make_pod_namespace(self) -> str:
        """Make a namespace for a pod."""
        return self.make_namespace(f"{self.name}p{next(self._numbers)}")

    def remove_namespace(self, name: str) -> None:
        """Remove a namespace, as a runtime does after DEL."""
        self._namespaces.remove(name)
        run("ip", "netns", "del", name)

    def cni(
        self,
        command: str,
        container: str = "",
        namespace: str = "",
        *,
        if_name: str = "eth0",
        config: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Outcome:
        """Call the launcher as a runtime does; `config` adds to the network configuration or replaces parts of it."""
        process = self.start_cni(
            command, container, namespace, if_name=if_name, config=config, environment=environment
        )
        return self.finish_cni(process)

    def finish_cni(self, process: "subprocess.Popen[bytes]") -> Outcome:
        """Wait for a launcher and read its answer."""
        output, _ = process.communicate(timeout=150)
        self._processes.remove(process)
        return Outcome(process.returncode, json.loads(output) if output.strip() else {})

    def start_cni(
        self,
        command: str,
        container: str,
        namespace: str,
        *,
        if_name: str = "eth0",
        config: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start the launcher and hand it its configuration."""
        variables = {
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": container,
            "CNI_IFNAME": if_name,
            "CNI_NETNS": f"/run/netns/{namespace}" if namespace else "",
            "CNI_PATH": str(LAUNCHER.parent),
            **(environment or {}),
        }
        document = {
            "cniVersion": "1.1.0",
            "name": "podwire",
            "type": "podwire-cni",
            "socket": str(self.directory / "cni.sock"),
            **(config or {}),
        }
        process = subprocess.Popen(
            [str(LAUNCHER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables
        )
        self._processes.append(process)
        assert process.stdin is not None
        process.stdin.write(json.dumps(document).encode())
        process.stdin.close()
        process.stdin = None
        return process

    # What is there

    def look(self) -> Present:
        """Read what the node holds, through other tools."""
        present = Present()
        names: dict[str, int] = {}
        for link in json.loads(run("ip", "-n", self.name, "-j", "-d", "link", "show")):
            alias = link.get("ifalias", "")
            if alias.startswith("podwire:"):
                number = int(alias.rsplit(":", 1)[1])
                assert number not in present.devices, f"two devices of endpoint {number}"
                present.devices[number] = link["ifindex"]
                names[link["ifname"]] = number
            else:
                assert not link["ifname"].startswith("pw"), f"a device without its mark: {link}"
        for family in ("-4", "-6"):
            shown = run("ip", "-n", self.name, family, "-j", "route", "show", "proto", "199")
            present.routes |= {
                route["dst"] for route in json.loads(shown or "[]") if route.get("dev") in names
            }
        self._look_at_maps(present)
        present.records = self.read_journal()
        return present

    def _list_host_ports(self) -> set[tuple[int, str]]:
        """Give which ports of the host lead to which addresses."""
        command = ["ip", "netns", "exec", self.name, "nft", "list", "table", "inet", "podwire"]
        listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        return {(int(port), address) for port, address in _LED_TO_A_POD.findall(listed)}

    def _list_directories(self) -> set[str]:
        directories = self.directory / "endpoints"
        return set(os.listdir(directories)) if directories.is_dir() else set()

    def _look_at_maps(self, present: Present) -> None:
        for key, _ in self._dump("pw_config"):
            present.rows.add(int.from_bytes(key, "little"))
        for key, _ in self._dump("pw_usage"):
            present.usage.add(int.from_bytes(key, "little"))
        for key, value in self._dump("pw_endpoints"):
            mapped = key.startswith(bytes(10) + b"\xff\xff")
            family, raw = (socket.AF_INET, key[12:]) if mapped else (socket.AF_INET6, key)
            present.addresses[socket.inet_ntop(family, raw)] = int.from_bytes(value[4:8], "little")

    def _dump(self, name: str) -> list[tuple[bytes, bytes]]:
        [path] = self.bpf.glob(f"v*/maps/{name}")
        rows = json.loads(run("bpftool", "-j", "map", "dump", "pinned", str(path)))
        return [
            tuple(bytes(int(byte, 16) for byte in row[part]) for part in ("key", "value"))  # type: ignore[misc]
            for row in rows
        ]

    def read_journal(self) -> dict[int, dict[str, Any]]:
        """Read the records without podwire's code: the database, and behind it the lines that it does not have."""
        path = self.directory / "state" / "journal.db"
        if not path.exists():
            return {}
        lines = path.with_name("journal.db-recent").read_text(encoding="utf-8").splitlines()
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("BEGIN")  # one view for both: the agent may fold the lines meanwhile
            rows = connection.execute("SELECT id, record FROM endpoint").fetchall()
            facts = dict(connection.execute("SELECT name, value FROM fact").fetchall())
        records = {number: json.loads(record) for number, record in rows}
        for line in lines:
            number, _, record = line.partition(" ")
            if int(number) > int(facts.get("recent-records", 0)):
                records[json.loads(record)["id"]] = json.loads(record)
        return records

    def assert_consistent(self) -> Present:
        """Fail unless kernel, maps, directories and journal tell the same; gives what is there."""
        if self.is_running():
            self.settle()
        present = self.look()
        records = present.records
        assert {record["phase"] for record in records.values()} <= {"live"}, records
        addresses: dict[str, int] = {}
        for number, record in records.items():
            for address in filter(None, (record.get("ipv4", ""), record.get("ipv6", ""))):
                assert address not in addresses, f"{address} was given twice"
                addresses[address] = number
        indexes = {number: one["device"]["host_ifindex"] for number, one in records.items()}
        assert present.devices == indexes
        assert present.rows == set(indexes.values())
        assert present.addresses == addresses
        assert present.usage == set(records)
        assert present.routes == set(addresses)
        assert self._list_host_ports() == {
            (port["host_port"], address)
            for record in records.values()
            for port in record.get("host_ports", ())
            for address in filter(None, (record.get("ipv4", ""), record.get("ipv6", "")))
        }
        # Directories are for people and are written behind: they follow.
        wanted = {str(number) for number in records}
        wait_for(
            lambda: self._list_directories() == wanted,
            f"directories {sorted(wanted)}",
            DIRECTORIES_DEADLINE_S,
        )
        if self.is_running():
            shown = {endpoint["id"]: endpoint for endpoint in self.get("/endpoint")[1]}
            assert set(shown) == set(records)
            assert {endpoint["state"] for endpoint in shown.values()} <= {"ready"}, shown
            check = self.get("/ipam/check")[1]
            assert check["ok"], check
        return present

    def close(self) -> None:
        """End and remove everything."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait(STOP_DEADLINE_S)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        for name in self._namespaces:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        shutil.rmtree(self.bpf, ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)
