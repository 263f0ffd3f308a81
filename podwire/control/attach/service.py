"""ADD, DEL, CHECK, GC and STATUS, as decisions: what to refuse, which steps to take, what to answer.

`agent.cni.dispatch` calls it on a worker thread; it implements the protocol of that module. Every change happens under
the node's *turn*, one lock for all kernel work (four workers side by side were measured to be slower than one). Raises
nothing but PodwireError. Invariant: the journal knows of an attachment before the kernel does, and until after the
kernel has forgotten it.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
from msgspec.structs import replace

from podwire.control.attach.ending import Endings
from podwire.control.attach.result import compare_with_result, describe_attachment
from podwire.control.attach.steps import RECIPES, Context, Step
from podwire.control.endpoint.states import State
from podwire.control.endpoint.table import Endpoint, EndpointTable
from podwire.control.identity.key import convert_ports
from podwire.control.identity.resolver import IdentityResolver, Resolution
from podwire.control.ipam.interface import Given, Ipam, Reservation, Wish
from podwire.model.endpoint import AttachmentKey, EndpointRecord, Phase
from podwire.model.errors import (
    AddressUnavailable,
    Bug,
    Cancelled,
    CannotServe,
    CheckFailed,
    Exhausted,
    Fault,
    InvalidConfiguration,
    InvalidEnvironment,
    PodwireError,
    StorageFailure,
    Unavailable,
    UnknownContainer,
)
from podwire.model.ids import EndpointId, IdentityId, host_device_name
from podwire.model.interfaces import Clock, Datapath, Journal, PodNamespace
from podwire.model.request import AttachRequest, AttachResult

_log = logging.getLogger(__name__)

Observe = Callable[[str, str, float], None]
"""Told of each step: operation, step, milliseconds."""


class AttachService(msgspec.Struct, frozen=True):
    """The attachments of one node."""

    journal: Journal
    datapath: Datapath
    ipam: Ipam
    table: EndpointTable
    endings: Endings
    context: Context
    identities: IdentityResolver
    clock: Clock
    turn: threading.RLock
    mode: str = "veth"
    status_on_exhaustion: bool = True
    address_wait_s: float = 10.0
    """So long, from the launcher's start on, an ADD waits for a block of addresses."""
    observe: Observe = lambda _op, _step, _ms: None

    def add(
        self,
        request: AttachRequest,
        namespace: PodNamespace | None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> AttachResult:
        """Attach a pod; returns when its datapath is live. Whatever fails, nothing stays behind."""
        there = _require_namespace(request, namespace)
        # Before the turn: labels that nobody had before wait for the store, and no other pod may wait with them.
        request = self.identities.pods.complete(request, cancelled)
        identity = self._resolve(request, cancelled)
        with self.ipam.reserved(_wish(request, identity.number)) as addresses:
            return self._attach(request, there, identity, addresses, cancelled)

    def add_at_once(
        self,
        request: AttachRequest,
        namespace: PodNamespace | None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> AttachResult | None:
        """Attach like `add`, or give None and do nothing: it would have to ask the store, for labels that no pod of
        this node has or for addresses.
        """
        there = _require_namespace(request, namespace)
        begin_ns = self.clock.boottime_ns()
        known = self.identities.pods.complete_at_once(request)
        if known is None:
            return None
        request = known
        ports = convert_ports(request.ports)
        identity = self.identities.find(request.labels, ports, request.namespace)
        if identity is None:
            return None
        with self.ipam.reserved(_wish(request, identity.number)) as addresses:
            if addresses.needs_store:
                return None
            self.observe("ADD", "resolve", (self.clock.boottime_ns() - begin_ns) / 1e6)
            return self._attach(request, there, identity, addresses, cancelled)

    def announce(self) -> None:
        """Let others hear of an endpoint that came: behind the answer of its ADD, because it wakes their threads."""
        self.table.changed()

    def delete(self, request: AttachRequest, _namespace: PodNamespace | None = None) -> None:
        """Detach; success when nothing is there. Older than the attachment it names, it changes nothing."""
        with self.turn:
            endpoint = self.table.get_by_key(_key(request))
            # CNI specification, DEL: it succeeds when nothing is there, because runtimes repeat it until it does.
            if endpoint is None:
                return
            if endpoint.state is State.DISCONNECTING:
                self.endings.confirm(endpoint.record.id)
                return
            # A DEL may have waited in the spool while the agent was down, and the runtime may have called ADD for the
            # same container since. The old DEL does not mean the new attachment.
            if endpoint.record.taken_boottime_ns > request.started_boottime_ns:
                _log.info(
                    "ignored a DEL that is older than the attachment",
                    extra={"container": endpoint.record.key.container_id, "op": "DEL"},
                )
                return
            self._timed("DEL", "end", lambda: self.endings.end(endpoint, "DEL"))

    def check(self, request: AttachRequest, namespace: PodNamespace | None) -> None:
        """Compare kernel, journal and the runtime's result; CheckFailed names every difference."""
        with self.turn:
            endpoint = self.table.get_by_key(_key(request))
            if endpoint is None or endpoint.state is State.DISCONNECTING:
                raise UnknownContainer(
                    f"check {_key(request)}: no such attachment",
                    hint="the runtime must call ADD for this container and interface first",
                )
            differences = [
                *compare_with_result(endpoint.record, request.prev_result),
                *self._compare_namespace(endpoint.record, namespace),
                *self.datapath.compare_endpoint(endpoint.record, endpoint.config, namespace),
                *self.context.regenerator.enforcer.compare(endpoint),
            ]
        if differences:
            raise CheckFailed(
                f"check {_key(request)}: " + "; ".join(differences),
                hint="DEL and ADD the attachment again",
                faults=tuple(Fault("", difference) for difference in differences),
            )

    def collect(self, request: AttachRequest) -> None:
        """GC: end every attachment of the network that the runtime's list of living ones does not name."""
        # Only the runtime knows which attachments live. Without its list (CNI specification, GC) nothing is removed.
        if request.valid_attachments is None:
            return
        valid = set(request.valid_attachments)
        failures: list[str] = []
        with self.turn:
            for endpoint in self.table:
                record = endpoint.record
                if (
                    record.key.network != request.network
                    or (record.key.container_id, record.key.if_name) in valid
                    # The list was made before GC was called, so it cannot name an attachment whose ADD began later.
                    or record.taken_boottime_ns > request.started_boottime_ns
                    or endpoint.state is State.DISCONNECTING
                ):
                    continue
                try:
                    self.endings.end(endpoint, "GC: not in the runtime's list")
                except PodwireError as error:
                    failures.append(error.message)
        if failures:
            raise PodwireError(
                "collect attachments: " + "; ".join(failures),
                hint="the agent goes on trying to end them; see its log",
            )

    def status(self) -> None:
        """Tell whether an ADD would succeed now; CannotServe names the reason."""
        try:
            # A runtime that hears "no" here calls no ADD any more, whose write would show that the disk has room again.
            self.journal.require_writable()
        except StorageFailure as failure:
            raise CannotServe(failure.message, hint=failure.hint) from failure
        full = self.ipam.list_lacks()
        # Addresses of ending endpoints come free within moments, so the node does not count as full while endpoints
        # are ending.
        if full and self.status_on_exhaustion and not len(self.endings):
            raise CannotServe(
                f"no address left in {', '.join(full)}",
                hint="give the node another CIDR (node_cidrs) or remove pods; see `podwire ipam show`",
            )

    def settle(self) -> int:
        """Let the reaper work on what has ended; tells how many endpoints were forgotten."""
        # The kernel takes tens of milliseconds for a batch: no ADD may wait for that, so the turn comes after it.
        self.endings.reap()
        with self.turn:
            return self.endings.settle(reap=False)

    def taken_boottime_ns(self, key: AttachmentKey) -> int | None:
        """Give the start of the ADD that made the living attachment, to order it against a spooled DEL."""
        endpoint = self.table.get_by_key(key)
        if endpoint is None or endpoint.state is State.DISCONNECTING:
            return None
        return endpoint.record.taken_boottime_ns

    def leaves_host_ports(self, key: AttachmentKey) -> bool:
        """Tell whether a chained plugin, and not podwire, may serve host ports of a living attachment."""
        endpoint = self.table.get_by_key(key)
        return endpoint is not None and not (
            endpoint.is_ending or endpoint.record.may_ask_host_ports
        )

    def _refuse_second_attachment(self, key: AttachmentKey) -> None:
        """An ending attachment of the same name is waited for; a living one is an error (specification, ADD)."""
        holders = self.table.list_by_container(key.container_id, key.if_name)
        # An ending device has the same derived name as the new one, so its end must be complete first.
        if any(endpoint.state is State.DISCONNECTING for endpoint in holders):
            self.endings.settle()
            holders = self.table.list_by_container(key.container_id, key.if_name)
        if not holders:
            return
        if any(endpoint.state is State.DISCONNECTING for endpoint in holders):
            raise Unavailable(
                f"attach {key}: the last attachment of interface {key.if_name!r} has not ended yet",
                hint="call again; `podwire status` and the agent's log say what keeps it",
            )
        holder = holders[0].record.key
        raise InvalidConfiguration(
            f"attach {key}: interface {key.if_name!r} of this container is attached already"
            f" (network {holder.network!r})",
            hint="call DEL first, or use another CNI_IFNAME",
        )

    def _attach(
        self,
        request: AttachRequest,
        namespace: PodNamespace,
        identity: Resolution,
        addresses: Reservation,
        cancelled: Callable[[], bool],
    ) -> AttachResult:
        self._fill(addresses, request, cancelled)
        with self.turn:
            self._refuse_second_attachment(_key(request))
            endpoint = self._admit(request, namespace, identity, addresses)
            self._build_up(endpoint, namespace, cancelled)
        return describe_attachment(endpoint.record)

    def _resolve(self, request: AttachRequest, cancelled: Callable[[], bool]) -> Resolution:
        begin_ns = self.clock.boottime_ns()
        # It may have waited for a thread already, behind others that wait for the store.
        waited_s = (begin_ns - request.started_boottime_ns) / 1e9
        resolution = self.identities.resolve(
            request.labels,
            convert_ports(request.ports),
            request.namespace,
            cancelled,
            wait_s=max(0.0, self.identities.wait_s - waited_s),
        )
        self.observe("ADD", "resolve", (self.clock.boottime_ns() - begin_ns) / 1e6)
        return resolution

    def _fill(
        self, addresses: Reservation, request: AttachRequest, cancelled: Callable[[], bool]
    ) -> None:
        """Have addresses for a pod, before the turn: when all are in use, the reaper finishes first."""
        waited_s = (self.clock.boottime_ns() - request.started_boottime_ns) / 1e9
        wait_s = max(0.0, self.address_wait_s - waited_s)
        try:
            addresses.fill(cancelled, wait_s)
        except (Exhausted, AddressUnavailable):
            if not self.settle():
                raise
            addresses.fill(cancelled, wait_s)

    def _admit(
        self,
        request: AttachRequest,
        namespace: PodNamespace,
        identity: Resolution,
        addresses: Reservation,
    ) -> Endpoint:
        """Choose id, addresses and device, and write the intent: from here on the node remembers it."""
        endpoint_id = self.journal.next_endpoint_id()
        ipv4, ipv6 = self._take(endpoint_id, addresses)
        try:
            record = self._plan(endpoint_id, request, namespace, str(ipv4 or ""), str(ipv6 or ""))
            record = identity.write_into(record)
            self.context.host_ports.refuse_taken(record)
            self._timed("ADD", "intent", lambda: self.journal.write(record))
        # Whatever went wrong: an address without a record would stay held until a restart.
        except BaseException:
            self.ipam.release(endpoint_id)
            raise
        endpoint = Endpoint(record, State.WAITING_FOR_IDENTITY, self.clock, cause="ADD")
        self.table.insert(endpoint)
        return endpoint

    def _plan(
        self,
        endpoint_id: EndpointId,
        request: AttachRequest,
        namespace: PodNamespace,
        ipv4: str,
        ipv6: str,
    ) -> EndpointRecord:
        key = _key(request)
        return EndpointRecord(
            id=endpoint_id,
            key=key,
            phase=Phase.ADDING,
            boot_id=self.clock.boot_id(),
            taken_boottime_ns=request.started_boottime_ns,
            netns_path=namespace.path,
            netns_cookie=namespace.cookie,
            device=self.datapath.plan_device(
                endpoint_id,
                host_device_name(key.container_id, key.if_name),
                key.if_name,
                mtu=request.mtu,
                pod_mac=request.wanted_mac,
            ),
            ipv4=ipv4,
            ipv6=ipv6,
            namespace=request.namespace,
            pod=request.pod,
            pod_uid=request.pod_uid,
            bandwidth=request.bandwidth,
            cni_version=request.cni_version,
            fixed_addresses=bool(request.wanted_ips),
            is_plain=request.is_plain,
            host_ports=request.host_ports,
            may_ask_host_ports=request.may_ask_host_ports,
        )

    def _take(self, endpoint_id: EndpointId, addresses: Reservation) -> Given:
        """Take addresses; when all are in use or resting behind a dying device, let the reaper finish first."""
        try:
            return addresses.take(endpoint_id)
        except (Exhausted, AddressUnavailable):
            if not self.endings.settle():
                raise
            return addresses.take(endpoint_id)

    def _build_up(
        self, endpoint: Endpoint, namespace: PodNamespace, cancelled: Callable[[], bool]
    ) -> None:
        """Do the recipe and commit; on any failure, a cancellation included, take back what was begun."""
        context = replace(self.context, namespace=namespace)
        begun: list[Step] = []
        try:
            for step in RECIPES[self.mode]:
                if not step.is_needed(endpoint.record):
                    continue
                if cancelled():
                    raise Cancelled(
                        f"attach {endpoint.record.key}: the caller went away or a DEL overtook it",
                        hint="nothing was left behind; call ADD again if the pod is still wanted",
                    )
                # Noted before the step runs: a step that fails in its middle has something to undo, and every undo
                # tolerates what is not there.
                begun.append(step)
                self._timed("ADD", step.name, partial(step.do, context, endpoint))
            self._timed("ADD", "commit", partial(self._commit, endpoint))
        except BaseException as error:
            self._take_back(endpoint, begun, error)
            raise

    def _commit(self, endpoint: Endpoint) -> None:
        record = msgspec.structs.replace(endpoint.record, phase=Phase.LIVE)
        self.journal.write(record)
        self.table.replace_record(record, quietly=True)

    def _take_back(self, endpoint: Endpoint, begun: Sequence[Step], error: BaseException) -> None:
        """Undo a failed ADD. Raised from here, a second failure would hide the first: it is logged instead."""
        try:
            self.endings.end(endpoint, f"ADD failed: {error}", begun)
        except PodwireError as failure:
            _log.warning(
                "undo of a failed ADD is not complete; it is retried",
                extra={"endpoint": endpoint.record.id, "error": failure.message},
            )

    def _compare_namespace(
        self, record: EndpointRecord, namespace: PodNamespace | None
    ) -> Sequence[str]:
        if namespace is None:
            return [f"network namespace {record.netns_path!r} is gone"]
        if namespace.cookie != record.netns_cookie:
            return [
                f"network namespace is {namespace.cookie}, the attachment was made in"
                f" {record.netns_cookie}"
            ]
        return []

    def _timed(self, op: str, step: str, do: Callable[[], object]) -> None:
        begin_ns = self.clock.boottime_ns()
        do()
        self.observe(op, step, (self.clock.boottime_ns() - begin_ns) / 1e6)


def _require_namespace(request: AttachRequest, namespace: PodNamespace | None) -> PodNamespace:
    if namespace is None:
        raise InvalidEnvironment(
            f"attach {_key(request)}: network namespace {request.netns_path!r} is gone",
            hint="the runtime must keep CNI_NETNS mounted until ADD has answered",
        )
    return namespace


def _wish(request: AttachRequest, identity: IdentityId) -> Wish:
    return Wish(
        key=request.key,
        identity=identity,
        wanted=request.wanted_ips,
        pools=request.pools,
        namespace=request.namespace,
    )


def _key(request: AttachRequest) -> AttachmentKey:
    if request.key is None:
        raise Bug(f"{request.command} reached the attachments without a key")
    return request.key
