"""Namespaces for the tests of this directory, and the tools that judge what we made in them."""

import contextlib
import ipaddress
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from podwire.datapath.device import (
    HostSide,
    Programs,
    compare_device,
    create_device,
    plan_device,
    repair_device,
)
from podwire.datapath.routes import SourceAddresses
from podwire.kernel import netns
from podwire.kernel.fd import Fd
from podwire.kernel.netlink import NetlinkSocket
from podwire.kernel.probe import load_program
from podwire.kernel.rtnl.link import set_link
from podwire.kernel.rtnl.route import InterfaceAddress, add_address
from podwire.model.endpoint import AttachmentKey, EndpointRecord, Phase
from podwire.model.ids import (
    ContainerId,
    EndpointId,
    InterfaceName,
    NetworkName,
    host_device_name,
)
from podwire.model.interfaces import PodNamespace
from tests import leavings

NODE: Final = "node-1"
NODE_IPV4: Final = ipaddress.IPv4Address("10.9.0.1")
NODE_IPV6: Final = ipaddress.IPv6Address("fd99::1")
PING_DEADLINE_S: Final = 60


@dataclass(frozen=True)
class Namespace:
    """A named namespace of a test, and the oracles looking into it."""

    name: str
    fd: Fd

    @property
    def pod(self) -> PodNamespace:
        """Give it as the launcher would hand it over."""
        number = self.fd.fileno()
        return PodNamespace(number, netns.named_path(self.name), netns.cookie(number))

    def run(self, *command: str, check: bool = True) -> str:
        """Run a command inside."""
        done = subprocess.run(
            ["ip", "netns", "exec", self.name, *command],
            capture_output=True,
            text=True,
            check=False,
        )
        if check and done.returncode:
            raise AssertionError(f"{command}: {done.stderr}")
        return done.stdout

    def ip(self, *arguments: str) -> list[dict[str, Any]]:
        """Ask iproute2, in JSON with details."""
        return _parse(self.run("ip", "-j", "-d", *arguments))

    def tc(self, *arguments: str) -> list[dict[str, Any]]:
        """Ask tc, in JSON."""
        return _parse(self.run("tc", "-j", *arguments))


def pings(
    namespace: Namespace, address: object, *options: str, deadline_s: int = PING_DEADLINE_S
) -> bool:
    """Tell whether an echo request is answered; another goes out each second.

    One by itself is lost on a busy machine: a new device drops what it gets until the kernel's link-watch has run, and
    neighbours are not asked for while the address to ask with is tentative.
    """
    waiting = "-c", "1", "-w", str(deadline_s)
    text = namespace.run("ping", *waiting, *options, str(address), check=False)
    # After a slow neighbour discovery the answers to several come together, and ping counts them all.
    return re.search(r"\b[1-9]\d* received", text) is not None


def _parse(text: str) -> list[dict[str, Any]]:
    found = json.loads(text or "[]")
    return [item for item in found if item]


@contextlib.contextmanager
def new_namespace() -> Iterator[Namespace]:
    """Make a namespace and remove it at the end, whatever happens."""
    name = leavings.new_name()
    fd = netns.create_named(name)
    try:
        yield Namespace(name, fd)
    finally:
        fd.close()
        netns.delete_named(name)


@pytest.fixture
def host() -> Iterator[Namespace]:
    """A namespace that plays the host: the test's thread is inside, addresses of the node are on
    `lo`.
    """
    with new_namespace() as namespace, netns.namespace(namespace.fd.fileno()):
        with NetlinkSocket() as netlink:
            netlink.execute(
                [
                    set_link(1, up=True),
                    add_address(InterfaceAddress(1, NODE_IPV4, 24)),
                    add_address(InterfaceAddress(1, NODE_IPV6, 64)),
                ]
            )
        yield namespace


@pytest.fixture
def netlink(host: Namespace) -> Iterator[NetlinkSocket]:
    """A socket inside the host's namespace."""
    with NetlinkSocket() as socket:
        yield socket


@pytest.fixture
def pod() -> Iterator[Namespace]:
    """A namespace that plays a pod."""
    with new_namespace() as namespace:
        yield namespace


@pytest.fixture
def other_pod() -> Iterator[Namespace]:
    """A second pod."""
    with new_namespace() as namespace:
        yield namespace


def program_id(fd: Fd) -> int:
    """Read a program's number from the kernel, without any of our code."""
    for line in Path(f"/proc/self/fdinfo/{fd.fileno()}").read_text(encoding="ascii").splitlines():
        if line.startswith("prog_id:"):
            return int(line.split()[1])
    raise AssertionError("no program")


@pytest.fixture
def side() -> Iterator[HostSide]:
    """What the node gives to every pair: two programs that let everything pass."""
    with contextlib.ExitStack() as stack:
        programs = []
        for _ in range(2):
            program, _, log = load_program()
            assert program is not None, log
            programs.append(stack.enter_context(program))
        yield HostSide(
            NODE,
            Programs(
                programs[0].fileno(),
                programs[1].fileno(),
                program_id(programs[0]),
                program_id(programs[1]),
            ),
            SourceAddresses(NODE_IPV4, NODE_IPV6),
        )


RecordMaker = Callable[..., EndpointRecord]


@pytest.fixture
def make_record(netlink: NetlinkSocket) -> RecordMaker:
    """Make a record as ADD would: device planned, nothing in the kernel yet."""

    def make(
        number: int = 1,
        *,
        namespace: Namespace | None = None,
        container: str = "",
        if_name: str = "eth0",
        families: str = "46",
        mtu: int = 1450,
    ) -> EndpointRecord:
        container_id = ContainerId(container or f"container-{number}")
        device = plan_device(
            netlink,
            EndpointId(number),
            host_device_name(container_id, InterfaceName(if_name)),
            InterfaceName(if_name),
            mtu=mtu,
        )
        return EndpointRecord(
            id=EndpointId(number),
            key=AttachmentKey(NetworkName("podwire"), container_id, InterfaceName(if_name)),
            phase=Phase.ADDING,
            boot_id="boot",
            taken_boottime_ns=0,
            netns_path="" if namespace is None else namespace.pod.path,
            netns_cookie=0 if namespace is None else namespace.pod.cookie,
            device=device,
            ipv4=f"10.244.1.{number + 1}" if "4" in families else "",
            ipv6=f"fd00:244::{number + 1:x}" if "6" in families else "",
        )

    return make


@dataclass(frozen=True)
class DeviceRig:
    """A host, a pod beside it, and what a pair between them is made with."""

    host: Namespace
    netlink: NetlinkSocket
    pod: Namespace
    side: HostSide
    make_record: RecordMaker

    def create(self, record: EndpointRecord, pod: Namespace | None = None) -> None:
        """Make the pair of a record, into the pod unless another one is named."""
        create_device(self.netlink, record, (pod or self.pod).pod, self.side)

    def compare(self, record: EndpointRecord) -> list[str]:
        """Tell how the host's side of a pair differs from its record."""
        return compare_device(self.netlink, record, self.side)

    def repair(self, record: EndpointRecord) -> list[str]:
        """Repair the host's side of a pair; gives what differed."""
        return repair_device(self.netlink, record, self.side)


@pytest.fixture
def rig(
    host: Namespace,
    netlink: NetlinkSocket,
    pod: Namespace,
    side: HostSide,
    make_record: RecordMaker,
) -> DeviceRig:
    """Everything that a test of pairs needs."""
    return DeviceRig(host, netlink, pod, side, make_record)
