"""Publish this node and its pods, on a thread of its own, because it may wait for the store.

Made by `agent.duties.cluster.duty`. `control.cluster.publish` decides what is written and when. Never holds the node's
turn. Invariant: a change of pods is looked at within a second, however many there are. While the store is away, the
publisher tries again after growing delays.
"""

import contextlib
import ipaddress
import logging
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from podwire.agent.duties.worker import Worker, WorkingDuty
from podwire.control.cluster.backoff import Backoff
from podwire.control.cluster.publish import (
    CHANGE_EVERY_S,
    EndpointsPublisher,
    NodeInUse,
    NodePublisher,
    PublishSchedule,
)
from podwire.control.cluster.state import OwnNode
from podwire.model.cluster import NodeFacts
from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.errors import PodwireError, Unavailable
from podwire.model.ids import IdentityId
from podwire.model.interfaces import FactStore
from podwire.model.store import Store

if TYPE_CHECKING:
    from podwire.agent.duties.cluster.duty import ClusterDuty

INSTANCE_FACT: Final = "node-instance"
"""Random, chosen once: tells this machine from another of its name."""
DEBOUNCE_S: Final = 0.02
"""A request that goes on is served first."""
GATHER_MAX_S: Final = 0.1
"""So long a burst of them is, before what it has changed so far is published."""
PUBLISH_AGAIN_S: Final = 60.0
"""How often what is published is looked at without a cause."""

_log = logging.getLogger(__name__)

Pods = Mapping[IPAddress, IdentityId]


class Publisher(WorkingDuty):
    """The thread that publishes this node and its pods."""

    def __init__(
        self,
        duty: "ClusterDuty",
        store: Store,
        node: NodePublisher,
        address: IPAddress | None,
        is_awaited: Callable[[IdentityId], bool] = lambda _identity: False,
    ) -> None:
        self._duty = duty
        self._address = address
        self._node = node
        self._endpoints = EndpointsPublisher(store, node.name)
        self._schedule = PublishSchedule(is_awaited=is_awaited)
        self._worker = Worker("cluster-publish", self._work, self._fail, wake_ends_pause=True)
        self._said: NodeFacts | None = None
        self._said_s = 0.0
        self._backoff = Backoff()
        self._quiet_until_s = 0.0

    def stop(self) -> None:
        """End the thread and give the name up."""
        super().stop()
        try:
            self._node.close()
        except PodwireError as error:
            _log.warning("give the node's name up", extra={"error": error.message})

    def wake(self) -> None:
        """Look soon whether something is to be published."""
        self._worker.wake()

    def pods_changed(self) -> None:
        """Look at the pods soon: at once, or when the next write may be."""
        # After a write or a failure the thread wakes by itself when the next try may be: an ADD must not wake it for
        # nothing.
        if time.monotonic() >= max(self._quiet_until_s, self._backoff.until_s):
            self._worker.wake()

    def store_is_back(self) -> None:
        """Do not wait any longer with what could not be written."""
        self._backoff.stop_waiting()
        self._schedule.forget_failures()
        self._worker.wake()

    def named(self, pods: Pods) -> Pods:
        """Give what others know of this node's pods, or will within a second when nothing is in the way."""
        is_well = not self._backoff.failures and self._schedule.published is not None
        return pods if is_well else self._schedule.published or {}

    def _work(self) -> float:
        if self._worker.was_woken:
            self._gather()
        return 0.0 if self._worker.is_stopping else self._step()

    def _gather(self) -> None:
        """Let a burst end: each request in it would wait for this thread, and this one for the store."""
        until_s = time.monotonic() + GATHER_MAX_S
        self._worker.pause(DEBOUNCE_S)
        while self._worker.take_wake() and time.monotonic() < until_s:
            self._worker.pause(DEBOUNCE_S)

    def _step(self) -> float:
        """Publish what is due; gives how long nothing is."""
        duty = self._duty
        if duty.own is None:
            return PUBLISH_AGAIN_S
        looked_s = time.monotonic()
        pods = duty.list_pods()
        # Before it is published: no other node has an address that a pod of this one has.
        duty.set_own_pods(pods)
        if (silent := duty.why_silent()) is not None:
            if silent:
                duty.report("publication", silent)
            return PUBLISH_AGAIN_S
        # What was written counts no more: somebody else has changed or deleted it, and it is written anew.
        if duty.take_overwritten():
            self._said = None
            self._schedule.published = None
        self._publish_node(duty.own)
        due_s = self._publish_pods(duty.own, pods, looked_s)
        self._backoff.forget()
        duty.report("node-name", "", critical=True)
        duty.report("publication", "")
        return due_s

    def _publish_node(self, own: OwnNode) -> None:
        now_s = time.monotonic()
        if own.facts == self._said and now_s - self._said_s < PUBLISH_AGAIN_S:
            return
        self._node.claim(find_address(self._address))
        numbered = self._node.claims
        self._node.publish(own.facts, self._duty.list_others)
        if self._node.claims is not numbered:
            self._duty.claims_changed()
        self._said, self._said_s = own.facts, now_s

    def _publish_pods(self, own: OwnNode, pods: Pods, looked_s: float) -> float:
        begin_s, ranges = time.monotonic(), (*own.facts.pod_cidrs, *own.facts.blocks)
        due_s = self._schedule.due_in(pods, begin_s, ranges)
        if due_s is None or due_s > 0:
            # Nobody wakes this thread in the quiet second behind a write: it looks itself when that is over.
            quiet_s = self._quiet_until_s - looked_s
            next_s = PUBLISH_AGAIN_S if due_s is None else min(due_s, PUBLISH_AGAIN_S)
            return min(quiet_s, next_s) if quiet_s > 0 else next_s
        try:
            self._endpoints.write(pods, ranges, own.facts.core_uid)
        except PodwireError:
            self._schedule.failed(time.monotonic())
            raise
        self._schedule.written(pods, time.monotonic())
        self._quiet_until_s = time.monotonic() + CHANGE_EVERY_S
        self._duty.observe("publish", begin_s)
        return CHANGE_EVERY_S

    def _fail(self, error: PodwireError) -> float:
        now_s = time.monotonic()
        self._backoff.failed(now_s)
        if isinstance(error, NodeInUse):
            self._duty.report("node-name", error.told, critical=True)
        else:
            self._duty.report("publication", error.told)
        return self._backoff.until_s - now_s


def take_name(
    store: Store, journal: FactStore, name: str, address: IPAddress | None
) -> NodePublisher:
    """Take the node's name for this machine, before anything of it is touched.

    Raises NodeInUse when a living node elsewhere has it. A store that is away stops nothing: it is taken later.
    """
    instance = journal.read_fact(INSTANCE_FACT)
    if not instance:
        instance = secrets.token_hex(8)
        # Durable beyond a crash of the machine (decisions/0004): another number would be another machine of the same
        # name.
        journal.write_fact(INSTANCE_FACT, instance)
    publisher = NodePublisher(store, name, instance)
    try:
        publisher.claim(find_address(address))
    except Unavailable as error:
        _log.warning("the node's name is not taken yet", extra={"error": error.message})
    return publisher


def refuse_contested(
    publisher: NodePublisher,
    ranges: Sequence[IPNetwork],
    address: IPAddress | None,
    cluster_cidrs: tuple[IPNetwork, ...],
) -> None:
    """Look whether this node's ranges and address can be its own, before anything of it is touched.

    Raises ClaimRefused. With the store away nobody knows: then the nodes settle it when they see each other.
    """
    addresses = find_addresses(address)
    try:
        publisher.refuse_contested(
            NodeFacts(publisher.name, publisher.instance, 0, addresses, tuple(ranges)),
            cluster_cidrs,
        )
    except Unavailable as error:
        _log.warning("it is not known whose the node's ranges are", extra={"error": error.message})


def find_address(wanted: IPAddress | None) -> str:
    """Give the address that people know this host by, "" when there is none. Nothing is sent."""
    return next(map(str, find_addresses(wanted)), "")


def find_addresses(wanted: IPAddress | None) -> tuple[IPAddress, ...]:
    """Give the addresses that packets of this host leave with, at most one of a family. Nothing is sent."""
    if wanted is not None:
        return (wanted,)
    addresses: list[IPAddress] = []
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            # connect(2) on a datagram socket only asks for the route. The addresses are for documentation (RFC 5737,
            # RFC 3849).
            probe.connect((target, 9))
            addresses.append(ipaddress.ip_address(probe.getsockname()[0]))
    return tuple(addresses)
