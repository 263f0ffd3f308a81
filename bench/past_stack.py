"""A lab whose overlay leaves the host's stack out: programs write the outer headers of what leaves, and take them off.

podwire's own programs judge every packet as ever. What is spared is the cost of its device and of the node's netfilter
(bpf/past_stack.bpf.c). It is no product: nothing keeps the programs attached, and IPsec, routing rules and firewalls
of a node do not hold for what passes its stack by.
"""

import ipaddress
import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, cast

from bench.contestants import compile_bpf, scratch
from bench.cross_node import lab_pair
from bench.pair import PodPair
from podwire.kernel import netns
from podwire.kernel.bpf_object import BpfObject
from podwire.kernel.bpf_program import Program, open_program_by_id
from podwire.kernel.netlink import NetlinkSocket
from podwire.kernel.rtnl import tc
from podwire.lab.state import read_state
from podwire.lab.topology import UPLINK, NodePlan
from podwire.model.cluster import DEFAULT_TUNNEL_PORT, TUNNEL_DEVICE

_FIRST_HANDLE: Final = 9
"""Of those of one priority the last one attached runs first: before mark_tunnel and to_overlay."""


@contextmanager
def lab_pair_past_stack(
    name: str, *, leaving: bool = True, arriving: bool = True
) -> Iterator[PodPair]:
    """Give two pods of an overlay whose tunnel packets pass the stack by where they leave, arrive, or both."""
    with ExitStack() as stack:
        compiled = compile_bpf("past_stack", stack.enter_context(scratch()))
        pair = stack.enter_context(lab_pair(name, "overlay"))
        for node in read_state(name).plan.nodes:
            # Until the end, because the kernel empties an array of programs with its last descriptor.
            loaded = stack.enter_context(BpfObject(compiled, "past_stack"))
            fd = stack.enter_context(netns.open_namespace(netns.named_path(node.namespace)))
            netlink = stack.enter_context(NetlinkSocket.open_in(fd.fileno()))
            uplink, tunnel = (_read_index(node, device) for device in (UPLINK, TUNNEL_DEVICE))
            _load(loaded, node, uplink)
            if leaving:
                _attach(netlink, loaded, tunnel, tc.TO_POD_HOOK, "leave")
            if arriving:
                stack.enter_context(_judge(netlink, loaded, tunnel))
                netlink.execute([tc.add_clsact(uplink)])
                _attach(netlink, loaded, uplink, tc.FROM_POD_HOOK, "enter")
        yield pair


def _read_index(node: NodePlan, device: str) -> int:
    words = ["ip", "-n", node.namespace, "-json", "link", "show", "dev", device]
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    [link] = cast("list[dict[str, Any]]", json.loads(shown))
    return int(link["ifindex"])


def _load(loaded: BpfObject, node: NodePlan, uplink: int) -> None:
    address = ipaddress.IPv4Address(node.addresses[0]).packed
    loaded.set_constants(
        {
            "uplink_index": uplink,
            "own_be": int.from_bytes(address, "little"),
            "tunnel_port": DEFAULT_TUNNEL_PORT,
        }
    )
    loaded.load()


def _attach(netlink: NetlinkSocket, loaded: BpfObject, index: int, hook: int, name: str) -> None:
    with loaded.take_program(name) as program:
        netlink.execute([tc.set_bpf_filter(index, hook, program.fd, name, handle=_FIRST_HANDLE)])


def _judge(netlink: NetlinkSocket, loaded: BpfObject, tunnel: int) -> Program:
    """Let `enter` call what judges at the tunnel device; gives that program."""
    [number] = [
        attached.program_id
        for body in netlink.dump(tc.list_filters(tunnel, tc.FROM_POD_HOOK))
        if (attached := tc.read_bpf_filter(body)) is not None
    ]
    judge = open_program_by_id(number)
    if judge is None:
        raise RuntimeError(f"the program of {TUNNEL_DEVICE} is gone")
    with loaded.take_map("judges") as judges:
        judges.update_fd(bytes(judges.info.key_size), judge.fd)
    return judge
