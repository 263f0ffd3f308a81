"""The steps of an attachment, each with its one undo, and the recipes: which steps an attachment takes, in which order.

ADD runs the steps of its recipe in order. A failed ADD, DEL, GC and restore undo them backwards with the same
functions. An undo is idempotent: "already gone" is success. Steps change the kernel through `Datapath` only. The
journal's intent is on disk before the first step, and the address stays held until the last undo is known to be
complete.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from podwire.control.endpoint.host_ports import HostPorts
from podwire.control.endpoint.regenerate import Regenerator
from podwire.control.endpoint.states import IdentityResolved
from podwire.control.endpoint.table import Endpoint
from podwire.model.endpoint import Bandwidth, EndpointRecord
from podwire.model.errors import Bug, PodwireError
from podwire.model.interfaces import Datapath, PodNamespace

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Context:
    """What a step may use. `namespace` is there on ADD only: no undo needs the pod's namespace."""

    datapath: Datapath
    regenerator: Regenerator
    host_ports: HostPorts
    namespace: PodNamespace | None = None

    def required_namespace(self) -> PodNamespace:
        """Give the namespace of an ADD."""
        if self.namespace is None:
            raise Bug("do a step of ADD without the pod's namespace")
        return self.namespace


@dataclass(frozen=True)
class Step:
    """One step: its name in logs and timings, what it does, what takes it back, and which pods need it."""

    name: str
    do: Callable[[Context, Endpoint], None]
    undo: Callable[[Context, EndpointRecord], None] | None = None
    is_needed: Callable[[EndpointRecord], bool] = lambda _record: True


def _create_guard(context: Context, endpoint: Endpoint) -> None:
    context.datapath.create_guard(endpoint.record)


def _close(context: Context, record: EndpointRecord) -> None:
    context.datapath.close_endpoint(record)
    context.regenerator.enforcer.detach(record.id)


def _create_device(context: Context, endpoint: Endpoint) -> None:
    context.datapath.create_device(endpoint.record, context.required_namespace())


# Condemned, not deleted: the kernel takes tens of milliseconds to delete a batch of devices, and DEL must not wait
# for that.
def _condemn_device(context: Context, record: EndpointRecord) -> None:
    # The device lives until the reaper comes. Its routes go now, so that nothing is sent to it meanwhile.
    context.datapath.remove_routes(record)
    context.datapath.condemn_device(record)


def _configure_pod(context: Context, endpoint: Endpoint) -> None:
    context.datapath.configure_pod(endpoint.record, context.required_namespace())


def _has_bandwidth(record: EndpointRecord) -> bool:
    return record.bandwidth != Bandwidth()


def _shape(context: Context, endpoint: Endpoint) -> None:
    record = endpoint.record
    context.datapath.shape(record.device, record.bandwidth, context.required_namespace())


def _resolve_identity(_context: Context, endpoint: Endpoint) -> None:
    endpoint.report(IdentityResolved())


def _regenerate(context: Context, endpoint: Endpoint) -> None:
    context.regenerator.regenerate_new(endpoint)


def _has_host_ports(record: EndpointRecord) -> bool:
    return bool(record.host_ports)


def _serve_host_ports(context: Context, endpoint: Endpoint) -> None:
    context.host_ports.serve(endpoint.record)


def _withdraw_host_ports(context: Context, record: EndpointRecord) -> None:
    context.host_ports.withdraw(record)


GUARD = Step("guard", _create_guard, _close)
DEVICE = Step("device", _create_device, _condemn_device)
POD_NETWORK = Step("pod-network", _configure_pod)
"""Has no undo: everything it makes dies with the device."""
SHAPING = Step("shaping", _shape, is_needed=_has_bandwidth)
"""Has no undo: queues die with the device."""
IDENTITY = Step("identity", _resolve_identity)
REGENERATION = Step("build", _regenerate, _close)
"""Its name is a label of the metric `operation_step_seconds`, so it stays as it was first given."""
HOST_PORTS = Step("host-ports", _serve_host_ports, _withdraw_host_ports, _has_host_ports)

RECIPES: Mapping[str, tuple[Step, ...]] = {
    # The guard row comes before the device, so that no packet ever meets a device without a row that drops it; the
    # regeneration comes after all of that, so that the first packet that passes meets the whole policy; the host's
    # ports come last, so that whoever asks one meets a pod that answers.
    "veth": (GUARD, DEVICE, POD_NETWORK, SHAPING, IDENTITY, REGENERATION, HOST_PORTS),
}
"""By mode, the device's kind, which the record has. A capability that changes what is done to an attachment adds a row
or a step here, never a branch inside a step."""


def undo_steps(steps: Sequence[Step], context: Context, record: EndpointRecord) -> bool:
    """Take steps back, last first; True when all of it is done. A failing undo is logged and stops no other."""
    complete = True
    # Backwards: the undo of REGENERATION takes the rows away first, and a device without a row passes nothing.
    for step in reversed(steps):
        if step.undo is None:
            continue
        try:
            step.undo(context, record)
        except PodwireError as error:
            complete = False
            _log.warning(
                "undo step failed; it is retried",
                extra={"endpoint": record.id, "step": step.name, "error": error.message},
            )
    return complete
