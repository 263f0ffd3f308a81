"""The demo: everything podwire can do so far, on a lab of two nodes; ends in a table of what held.

Run by `scripts/demo`. Nothing in it is simulated: pods are attached by the launcher, agents are real processes, and a
fact is in the table only when it was seen to hold in this run.
"""

import socket
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from podwire.kernel import netns
from podwire.lab import labs, traffic
from podwire.lab import state as states
from podwire.lab.show.background import Background, going_on
from podwire.lab.show.drops import send_forged, wait_for_drop
from podwire.lab.show.policy import show_policy
from podwire.lab.show.report import Report, say
from podwire.lab.show.service import show_service
from podwire.lab.state import LabState, Pod
from podwire.lab.topology import LabShape

LAB: Final = "demo"
PING_EVERY_S: Final = 0.01
RESTARTS: Final = 3


def main() -> int:
    """Run the demo; gives the exit status."""
    report = Report()
    begin = time.monotonic()
    if LAB in states.list_labs():
        labs.down(LAB, progress=say)
    with ExitStack() as stack:
        stack.callback(labs.down, LAB, progress=say)
        say("two nodes, an underlay and a world, all on this machine")
        state = labs.up(LAB, LabShape(), progress=say)
        report.add("two nodes with real agents", True, f"{time.monotonic() - begin:.1f} s")
        pods = _attach_pods(report)
        _show_connectivity(state, pods, report)
        _show_spoofing(pods, report)
        say("a policy: only the proxy may reach web; the client is none")
        show_policy(LAB, pods, report.add)
        say("a Service without Kubernetes: one address for web and remote")
        show_service(LAB, pods, report.add)
        _show_restarts(pods, report)
        _show_detach(report)
    _show_nothing_left(report)
    report.print_table(time.monotonic() - begin)
    return 0 if report.holds else 1


def _attach_pods(report: Report) -> dict[str, Pod]:
    say("three pods, each attached by executing the CNI plugin")
    pods, times_ms = {}, []
    for name, node, part, ports in (
        ("web", "node1", "shop", ("80/tcp", "80/udp")),
        ("client", "node1", "street", ()),
        ("remote", "node2", "shop", ("80/tcp", "80/udp")),
    ):
        begin = time.perf_counter()
        pods[name] = labs.run(LAB, name, node, labels={"app": name, "part": part}, serve=ports)
        times_ms.append((time.perf_counter() - begin) * 1e3)
        print(f"    {name} on {node}: {', '.join(pods[name].addresses)}", flush=True)
    report.add("pods by CNI ADD", True, f"{len(pods)} pods, fastest {min(times_ms):.0f} ms")
    return pods


def _show_connectivity(state: LabState, pods: dict[str, Pod], report: Report) -> None:
    say("who reaches whom, by TCP and UDP, IPv4 and IPv6")
    plan = state.plan
    for what, namespace, target in (
        ("pod to pod, same node", pods["client"].netns, pods["web"].addresses),
        ("pod to pod, other node", pods["client"].netns, pods["remote"].addresses),
        ("host to its pod", plan.nodes[0].namespace, pods["web"].addresses),
    ):
        attempts = [
            traffic.connect(namespace, address, 80, protocol)
            for address in target
            for protocol in ("tcp", "udp")
        ]
        report.add_attempts(what, attempts)
    world = Pod(
        namespace="lab",
        name="world",
        node="-",
        container_id="",
        netns=plan.world_namespace,
        labels={},
    )
    servers = traffic.start_servers(world, [(80, "tcp")])
    try:
        attempts = [
            traffic.connect(pods["client"].netns, address, 80) for address in plan.world_addresses
        ]
    finally:
        states.end_process(servers[0].process)
    report.add_attempts("pod to world, masqueraded", attempts)
    nodes = set(plan.nodes[0].addresses)
    seen = {attempt.answer.split()[-1] for attempt in attempts if attempt.ok}
    report.add("the world sees the node, not the pod", seen <= nodes, ", ".join(sorted(seen)))


def _show_spoofing(pods: dict[str, Pod], report: Report) -> None:
    say("the client sends a packet with somebody else's source address")
    client, web = pods["client"], pods["web"]
    forged = "10.244.1.99"
    flow = wait_for_drop(
        LAB, client.node, lambda: send_forged(client.netns, forged, web.addresses[0]), source=forged
    )
    reason = flow.get("reason", "") if flow else "no event was seen"
    report.add(
        "a forged source address is dropped and seen", reason == "source-address", str(reason)
    )


@dataclass
class _Pinger(Background):
    """Asks a UDP server all the time, and counts what does not come back."""

    pod: Pod
    target: str
    sent: int = 0
    lost: int = 0
    slowest_ms: float = 0.0

    def run(self) -> None:
        with traffic.socket_in(self.pod.netns, self.target, "udp") as client:
            client.settimeout(2)
            client.connect((self.target, 80))
            while not self.stop.wait(PING_EVERY_S):
                begin = time.perf_counter()
                self.sent += 1
                client.send(b"?")
                try:
                    client.recv(512)
                except TimeoutError:
                    self.lost += 1
                self.slowest_ms = max(self.slowest_ms, (time.perf_counter() - begin) * 1e3)


@dataclass
class _Transfer(Background):
    """One TCP connection between two pods that moves data all the time."""

    source: Pod
    target: Pod
    moved_bytes: int = 0
    error: str = ""

    def run(self) -> None:
        address = self.target.addresses[0]
        try:
            with traffic.socket_in(self.target.netns, address, "tcp") as listener:
                listener.bind((address, 5001))
                listener.listen(1)
                with traffic.socket_in(self.source.netns, address, "tcp") as sender:
                    sender.settimeout(5)
                    sender.connect((address, 5001))
                    receiver, _ = listener.accept()
                    with receiver:
                        receiver.settimeout(5)
                        self._pump(sender, receiver)
        except OSError as error:
            self.error = error.strerror or str(error)

    def _pump(self, sender: socket.socket, receiver: socket.socket) -> None:
        data = bytes(16_384)
        while not self.stop.is_set():
            sender.sendall(data)
            left = len(data)
            while left:
                got = len(receiver.recv(left))
                if not got:
                    raise OSError("the connection was closed")
                left -= got
            self.moved_bytes += len(data)


def _show_restarts(pods: dict[str, Pod], report: Report) -> None:
    say(f"node1's agent is killed and started {RESTARTS} times while a ping and a transfer run")
    pinger = _Pinger(pods["client"], pods["web"].addresses[0])
    transfer = _Transfer(pods["client"], pods["remote"])
    ready_ms = []
    with going_on(pinger, transfer):
        for _ in range(RESTARTS):
            labs.change_agent(LAB, "node1", "kill")
            begin = time.perf_counter()
            labs.change_agent(LAB, "node1", "start")
            ready_ms.append((time.perf_counter() - begin) * 1e3)
    figure = f"{pinger.lost} of {pinger.sent} lost, slowest {pinger.slowest_ms:.1f} ms"
    report.add(f"ping across {RESTARTS} kill -9 of the agent", pinger.lost == 0, figure)
    figure = transfer.error or f"{transfer.moved_bytes / 1e6:.0f} MB, one connection"
    moved = transfer.moved_bytes > 0
    report.add("TCP transfer across the same", moved and not transfer.error, figure)
    report.add("agent back in service", True, f"{max(ready_ms):.0f} ms at most")


def _show_detach(report: Report) -> None:
    say("pods leave, the agent of node2 being away")
    labs.change_agent(LAB, "node2", "kill")
    begin = time.perf_counter()
    labs.remove(LAB, "remote")
    figure = f"{(time.perf_counter() - begin) * 1e3:.0f} ms, spooled"
    labs.change_agent(LAB, "node2", "start")
    report.add("DEL with the agent away", True, figure)
    begin = time.perf_counter()
    for name in ("web", "client"):
        labs.remove(LAB, name)
    report.add("pods by CNI DEL", True, f"2 pods in {(time.perf_counter() - begin) * 1e3:.0f} ms")


def _show_nothing_left(report: Report) -> None:
    left = [name for name in netns.list_named() if name.startswith(f"pw.{LAB}.")]
    left += [name for name in labs.list_leftovers(running_too=True) if name == LAB]
    report.add("nothing is left on this machine", not left, ", ".join(left) or "nothing")


if __name__ == "__main__":
    sys.exit(main())
