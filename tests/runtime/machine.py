"""A machine for container runtimes: a node with its agent, a place where runtimes run, and a world outside.

Runtimes get mounts of their own (a process that sleeps keeps them): their namespaces' mounts are seen by nobody else,
the agent included, and go away with the last process. The node has one link to the world, which has no route to pods.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from podwire.kernel import netns
from podwire.model.closing import Closing
from tests.lab.labrig import Said, podwire
from tests.lab.rig import LAUNCHER, Rig, run
from tests.waiting import wait_for

REFERENCE_PLUGINS: Final = Path("/usr/lib/cni")
BORROWED: Final = ("bandwidth", "host-local", "loopback", "portmap", "ptp", "tuning")
NODE_ADDRESSES: Final = ("198.51.100.1", "2001:db8:99::1")
WORLD_ADDRESSES: Final = ("198.51.100.2", "2001:db8:99::2")
_PREFIX_LENGTHS: Final = (24, 64)
RECORDED_TYPE: Final = "podwire-cni"

_ENTER = """
set -e
base=$1
mkdir -p "$base/inside" && mount -n -t tmpfs pwt "$base/inside"
mkdir -p "$base/inside${base#/run}" "$base/inside/netns" "$base/inside/lock"
mount -n --bind "$base" "$base/inside${base#/run}"
mount -n --move "$base/inside" /run
mount -n -t tmpfs pwt /var/lib
echo ready
exec sleep 2147483647
"""
"""A /run of our own that shows the node's directory, and an empty /var/lib: runtimes keep sockets, namespaces and what
they remember of networks in fixed places there.
"""

_RECORDER = """#!/bin/sh
# Keep what the runtime asked, then ask the real plugin.
call=$(mktemp "{calls}/$(date +%s%N).XXXXXX")
cat >"$call.stdin"
env >"$call"
exec "{plugin}" <"$call.stdin"
"""


class Machine(Closing):
    """One machine: `node` is its agent's side, `run` and `popen` act where its runtimes live."""

    def __init__(self, *, cidrs: Sequence[str] = ("10.99.0.0/24", "fd99::/64")) -> None:
        self.node = Rig(cidrs=cidrs)
        self.directory = self.node.directory
        self.bin = self.directory / "bin"
        self.conf = self.directory / "net.d"
        self._calls = self.directory / "calls"
        self._keeper: subprocess.Popen[str] | None = None
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        for directory in (self.bin, self.conf, self._calls):
            directory.mkdir()
        for name in BORROWED:
            (self.bin / name).symlink_to(REFERENCE_PLUGINS / name)
        recorder = self.bin / RECORDED_TYPE
        recorder.write_text(_RECORDER.format(calls=self._calls, plugin=LAUNCHER))
        recorder.chmod(0o755)
        self.world = self.node.make_namespace(f"{self.node.name}w")
        self._join_world()
        self._keeper = subprocess.Popen(
            [
                *("nsenter", f"--net={netns.named_path(self.node.name)}"),
                *("unshare", "--mount", "--propagation", "private"),
                *("sh", "-c", _ENTER, "sh", str(self.directory)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._keeper.stdout is not None
        assert self._keeper.stdout.readline() == "ready\n"

    def _join_world(self) -> None:
        node, world = self.node.name, self.world
        run(
            *("ip", "-n", node, "link", "add", "world0", "type", "veth"),
            *("peer", "name", "world0", "netns", world),
        )
        pairs = zip(NODE_ADDRESSES, WORLD_ADDRESSES, _PREFIX_LENGTHS, strict=True)
        for own, other, length in pairs:
            run("ip", "-n", node, "addr", "add", f"{own}/{length}", "dev", "world0", "nodad")
            run("ip", "-n", world, "addr", "add", f"{other}/{length}", "dev", "world0", "nodad")
        for name in (node, world):
            run("ip", "-n", name, "link", "set", "world0", "up")
        for address in WORLD_ADDRESSES:
            run("ip", "-n", node, "route", "add", "default", "via", address)

    def world_route(self, destination: str) -> None:
        """Let the world reach pods by way of the node."""
        via = NODE_ADDRESSES[1 if ":" in destination else 0]
        run("ip", "-n", self.world, "route", "add", destination, "via", via)

    # Commands and configurations

    @property
    def place(self) -> tuple[str, ...]:
        """Words before a command that has to run where runtimes do."""
        assert self._keeper is not None
        return ("nsenter", f"--target={self._keeper.pid}", "--net", "--mount", "--")

    def run(self, *command: str, timeout_s: float = 180) -> str:
        """Run a tool there; its failure is the test's."""
        done = subprocess.run(
            [*self.place, *command], capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def popen(self, *command: str, log: Path, env: Mapping[str, str] | None = None) -> Any:
        """Start a process there; its output goes to `log`."""
        with log.open("ab") as file:
            return subprocess.Popen(
                [*self.place, *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **(env or {})},
            )

    def write_conflist(
        self,
        *more: Mapping[str, object],
        name: str = "podwire",
        version: str = "1.0.0",
        file_name: str = "05-podwire.conflist",
        agent_wait_s: int = 30,
        **settings: object,
    ) -> None:
        """Write a network of podwire and the plugins chained after it."""
        own = {
            "type": RECORDED_TYPE,
            "socket": str(self.directory / "cni.sock"),
            "agent-wait": agent_wait_s,
            "capabilities": {"bandwidth": True, "ips": True, "mac": True},
            **settings,
        }
        document = {"cniVersion": version, "name": name, "plugins": [own, *more]}
        self.write_configuration(document, file_name)

    def write_configuration(self, document: object, file_name: str) -> None:
        """Write a configuration the way that every runtime sees: in place, by rename."""
        temporary = self.conf / f".{file_name}.tmp"
        temporary.write_text(json.dumps(document))
        temporary.rename(self.conf / file_name)

    def list_calls(self) -> list[dict[str, Any]]:
        """Give what runtimes asked of podwire, in order: the CNI_* variables, and `stdin`."""
        calls = []
        for path in sorted(self._calls.glob("*.stdin")):
            lines = path.with_suffix("").read_text().splitlines()
            pairs = (line.partition("=") for line in lines if line.startswith("CNI_"))
            stdin = json.loads(path.read_text() or "{}")
            calls.append({**{key: value for key, _, value in pairs}, "stdin": stdin})
        return calls

    # The command line

    def podwire(self, *arguments: str) -> Said:
        """Run a command of `podwire` on this machine's agent."""
        return podwire(*arguments, "--agent", str(self.directory / "api.sock"))

    def change(self, *arguments: str) -> Said:
        """Run a command that must succeed."""
        done = self.podwire(*arguments)
        assert done.code == 0, f"{' '.join(arguments)}: {done.err}"
        return done

    def write_objects(self, *documents: Mapping[str, Any]) -> str:
        """Write objects to a file and give its path."""
        path = self.directory / "objects.json"
        path.write_text("\n".join(json.dumps(document) for document in documents))
        return str(path)

    def apply(self, *documents: Mapping[str, Any]) -> None:
        """Apply objects, and wait until the policies among them are in force."""
        self.change("apply", "-f", self.write_objects(*documents))
        for document in documents:
            if document["kind"].endswith("Policy"):
                metadata = document["metadata"]
                found = self.change(
                    *("get", document["kind"], f"{metadata['namespace']}/{metadata['name']}"),
                    *("-o", "json"),
                )
                revision = found.document["metadata"]["resourceVersion"]
                self.change("policy", "wait", revision, "--timeout", "30")

    # Sockets

    @contextlib.contextmanager
    def inside(self, place: "Place") -> Iterator[None]:
        """Act in the network namespace of a process (its pid), of a name, or of the node."""
        path = f"/proc/{place}/ns/net" if isinstance(place, int) else netns.named_path(place)
        with netns.open_namespace(path) as fd, netns.namespace(fd.fileno()):
            yield

    def open_socket(
        self, place: "Place", address: str, kind: socket.SocketKind = socket.SOCK_STREAM
    ) -> socket.socket:
        """Open a socket there, of the family of `address`; it may be used from anywhere."""
        with self.inside(place):
            made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind)
        made.settimeout(30)
        return made

    def close(self) -> None:
        """End what is left and remove everything."""
        try:
            if self._keeper is not None:
                if self._keeper.poll() is None:
                    self._end_inhabitants()
                self._keeper.kill()
                self._keeper.wait(20)
                assert self._keeper.stdout is not None
                self._keeper.stdout.close()
        finally:
            self.node.close()
            self._remove_cgroups()

    def _remove_cgroups(self) -> None:
        """Remove the groups that a runtime made for our pods, in every hierarchy."""
        for root in Path("/sys/fs/cgroup").glob(f"*/{self.node.name}"):
            for directory, _, _ in os.walk(root, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(directory)

    def _end_inhabitants(self) -> None:
        """Kill what still runs with our mounts: only what a runtime of ours started can have them."""
        assert self._keeper is not None
        own = os.readlink(f"/proc/{self._keeper.pid}/ns/mnt")

        def left() -> list[int]:
            found = []
            for entry in os.listdir("/proc"):
                if entry.isdigit() and int(entry) != self._keeper_pid:
                    with contextlib.suppress(OSError):
                        if os.readlink(f"/proc/{entry}/ns/mnt") == own:
                            found.append(int(entry))
            return found

        def none_left() -> bool:
            for pid in left():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not left()

        wait_for(none_left, "the runtime's processes to end", 60)

    @property
    def _keeper_pid(self) -> int:
        return self._keeper.pid if self._keeper is not None else 0


Place = int | str
