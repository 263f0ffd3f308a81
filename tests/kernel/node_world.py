"""A whole node in a namespace: the kernel's datapath for the contract tests and our own."""

import contextlib
import ipaddress
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from podwire.datapath.inventory import remove_everything
from podwire.datapath.native import OwnHooks
from podwire.datapath.node import KernelDatapath
from podwire.datapath.plan import NodePlan
from podwire.datapath.routes import dump_routes
from podwire.kernel import bpf, netns
from podwire.kernel.netlink import NetlinkSocket
from podwire.kernel.rtnl.link import LinkEnd, create_veth, set_link
from podwire.kernel.rtnl.route import (
    TABLE_LOCAL,
    InterfaceAddress,
    add_address,
    host_network,
)
from podwire.model.endpoint import EndpointRecord
from podwire.model.interfaces import PodNamespace
from tests import kept_programs, plain_pods
from tests.kernel.conftest import NODE, NODE_IPV4, NODE_IPV6, Namespace, new_namespace
from tests.waiting import wait_for

PODS_IPV4 = ipaddress.ip_network("10.77.0.0/24")
PODS_IPV6 = ipaddress.ip_network("fd77::/120")


def make_plan(bpf_dir: Path) -> NodePlan:
    """Describe the node of the tests."""
    return NodePlan(
        node_name=NODE,
        bpf_dir=bpf_dir,
        mtu=1450,
        node_address=NODE_IPV4,
        cluster_cidrs=(ipaddress.ip_network("10.77.0.0/16"), ipaddress.ip_network("fd77::/64")),
        node_cidrs=(PODS_IPV4, PODS_IPV6),
        conntrack_entries=4096,
        conntrack_quota=512,
    )


class KernelWorld:
    """A node with its datapath, and namespaces that play pods."""

    def __init__(self, host: Namespace, plan: NodePlan, stack: ExitStack) -> None:
        self.host = host
        self.plan = plan
        self.hooks_noted = ""
        """What the agent wrote down of hooks that it made."""
        self.datapath = self._make_datapath()
        self.pods: dict[int, Namespace] = {}
        self._stack = stack

    def new_namespace(self) -> PodNamespace:
        namespace = self._stack.enter_context(new_namespace())
        pod = namespace.pod
        self.pods[pod.cookie] = namespace
        return pod

    def add_foreign_host_device(self, name: str) -> None:
        with NetlinkSocket() as netlink:
            netlink.execute([create_veth(LinkEnd(name, 5), LinkEnd("pwtother", 6), None)])

    def add_foreign_pod_device(self, namespace: PodNamespace, name: str) -> None:
        with NetlinkSocket.open_in(namespace.fd) as netlink:
            netlink.execute([create_veth(LinkEnd(name, 5), LinkEnd("pwtother", 6), None)])

    def close(self) -> None:
        """Stop the agent of the moment."""
        self.datapath.close()

    def restart(self, **changes: object) -> None:
        """Be another agent process: nothing is remembered but the kernel and what was written down."""
        self.datapath.close()
        self.plan = replace(self.plan, **changes)
        self.datapath = self._make_datapath()
        self.datapath.prepare()

    def read_hooks(self) -> OwnHooks:
        return OwnHooks(self.hooks_noted, boot_id="boot", write=self._note_hooks)

    def _note_hooks(self, note: str) -> None:
        self.hooks_noted = note

    def _make_datapath(self) -> KernelDatapath:
        return KernelDatapath(self.plan, self.read_hooks())

    def make_record(self, number: int, namespace: PodNamespace) -> EndpointRecord:
        return plain_pods.make_record(self.datapath, number, namespace)

    def attach(self, number: int) -> tuple[EndpointRecord, Namespace]:
        """Connect a pod as ADD does."""
        namespace = self.new_namespace()
        record = self.make_record(number, namespace)
        plain_pods.attach(self.datapath, record, namespace)
        return record, self.pods[namespace.cookie]

    def detach(self, record: EndpointRecord) -> None:
        """Disconnect a pod as DEL does."""
        plain_pods.detach(self.datapath, record)

    def program_ids(self) -> dict[str, int]:
        """Give the kernel's numbers of the loaded programs."""
        return {
            name: program.info.id for name, program in self.datapath._node.loaded.programs.items()
        }


@contextlib.contextmanager
def bpf_directory(tmp_path: Path) -> Iterator[Path]:
    """Give a directory for pins on a BPF file system of our own."""
    directory = tmp_path / "bpf"
    directory.mkdir(parents=True)
    bpf.mount_bpffs(str(directory))
    try:
        yield directory / "podwire"
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


@contextlib.contextmanager
def kernel_world(tmp_path: Path, *, fresh: bool = False) -> Iterator[KernelWorld]:
    """Be inside a prepared node; everything is gone at the end, also after a failure.

    `fresh`: its programs are loaded for it, and nobody else has its maps.
    """
    with ExitStack() as stack:
        plan = make_plan(stack.enter_context(bpf_directory(tmp_path)))
        loan = None if fresh else stack.enter_context(kept_programs.loan(plan))
        host = stack.enter_context(new_namespace())
        stack.enter_context(netns.namespace(host.fd.fileno()))
        with NetlinkSocket() as netlink:
            netlink.execute(
                [
                    set_link(1, up=True),
                    add_address(InterfaceAddress(1, NODE_IPV4, 24)),
                    add_address(InterfaceAddress(1, NODE_IPV6, 64)),
                ]
            )
            # The kernel makes the address this host's in a work of its own, and until then nothing may be sent from it
            # to pods.
            wait_for(partial(_is_local, netlink), "the node's IPv6 address to be its own")
        world = KernelWorld(host, plan, stack)
        stack.callback(remove_everything, plan.bpf_dir)
        stack.callback(world.close)
        world.datapath.prepare()
        if loan is not None:
            loan.learn()
        yield world


def _is_local(netlink: NetlinkSocket) -> bool:
    own = host_network(NODE_IPV6)
    local = dump_routes(netlink, socket.AF_INET6, table=TABLE_LOCAL)
    return any(route.destination == own for route in local)


def in_node(namespace: Namespace, *command: str) -> list[str]:
    """Give the command line that runs `command` inside a namespace."""
    return ["nsenter", f"--net=/proc/{os.getpid()}/fd/{namespace.fd.fileno()}", *command]
