"""The API's table of operations, their handlers, and the HTTP status of each error.

`agent.api.server` calls the handlers on its loop, or on a thread where the table says `blocking`. Handlers only look
things up and ask `control` to act; they decide nothing. This is the only module that knows HTTP statuses of errors.
"""

import logging
import os
from collections.abc import Mapping
from typing import Any

from podwire import __version__
from podwire.agent.api import shared as views
from podwire.agent.api.context import Api
from podwire.agent.api.ipam import ROUTES_IPAM, range_views
from podwire.agent.api.ipam_views import IpamTotals
from podwire.agent.api.nodes import count_nodes, list_nodes
from podwire.agent.api.objects import ROUTES_OBJECTS
from podwire.agent.api.openapi import Call, Parameter, Route, describe
from podwire.agent.api.policies import ROUTES_POLICY, policy_totals
from podwire.control.endpoint.find import find_endpoint
from podwire.control.endpoint.states import State
from podwire.control.endpoint.table import Endpoint
from podwire.control.flows.flow import Flow
from podwire.control.identity.describe import IdentityView, describe_identities
from podwire.model import errors

MAP_ROWS_MAX = 10_000
"""Rows of one map in one answer; the rest is left out and the answer says so."""

_log = logging.getLogger(__name__)

STATUS_OF: Mapping[type[errors.PodwireError], int] = {
    errors.InvalidRequest: 400,
    errors.NotFound: 404,
    errors.UnknownContainer: 404,
    errors.Conflict: 409,
    errors.AddressUnavailable: 409,
    errors.ForeignObject: 409,
    errors.NewerData: 409,
    errors.PolicyOverflow: 409,
    errors.CheckFailed: 409,
    errors.Unsupported: 501,
    errors.Unavailable: 503,
    errors.Exhausted: 503,
    errors.CannotServe: 503,
    errors.Impaired: 503,
    errors.StorageFailure: 507,
    errors.PodwireError: 500,
}
"""Status of an error: that of its nearest class."""

_REFUSALS = {
    400: "invalid",
    404: "not-found",
    405: "method",
    408: "timeout",
    413: "too-large",
    429: "overload",
    503: "unavailable",
}


def error_answer(error: BaseException) -> tuple[int, views.ErrorBody]:
    """Give status and body of a failed request. What is no PodwireError is a bug: it is logged here."""
    if not isinstance(error, errors.PodwireError):
        _log.error("an API request failed", extra={"error": repr(error)}, exc_info=error)
        error = errors.Bug(f"serve the request: {error!r}", hint="see the agent's log")
    status = next(STATUS_OF[kind] for kind in type(error).__mro__ if kind in STATUS_OF)
    return status, views.ErrorBody(
        error=views.ErrorView(
            code=error.kind,
            message=error.message,
            hint=error.hint,
            faults=tuple(
                views.FaultView(path=fault.path, message=fault.message) for fault in error.faults
            ),
        )
    )


def make_refusal(status: int, message: str) -> views.ErrorBody:
    """Give the body of an answer that no handler made: a limit, an unknown path."""
    hint = "try again later" if status in (429, 503) else "see /v1/openapi.json"
    code = _REFUSALS.get(status, "http")
    return views.ErrorBody(error=views.ErrorView(code=code, message=message, hint=hint))


def _endpoint(api: Api, call: Call) -> Endpoint:
    return find_endpoint(api.table, call.params["id"])


def get_healthz(api: Api, _call: Call) -> views.HealthView:
    """Ready, or 503 with what fails."""
    if not api.health.ready:
        failing = [check for check in api.health.checks() if check.critical and not check.ok]
        raise errors.Unavailable(
            "serve: the agent is not ready: "
            + (
                "; ".join(f"{check.name}: {check.message}" for check in failing) or "it is starting"
            ),
            hint="see `podwire status --verbose` and the agent's log",
        )
    return views.HealthView(ready=True, failing=())


def get_status(api: Api, _call: Call) -> views.StatusView:
    config = api.config.current
    return views.StatusView(
        ready=api.health.ready,
        version=__version__,
        node=config.node.node_name,
        started=api.format_boottime(api.started_boottime_ns),
        pid=os.getpid(),
        store=views.StoreView(
            kind=config.store.store.partition(":")[0],
            ok=all(check.ok for check in api.health.checks() if check.name == "store"),
        ),
        datapath=views.DatapathView(
            mode=config.datapath.datapath,
            programs=api.facts.template,
            abi_version=api.facts.abi_version,
            mtu=api.nodes.pod_mtu(),
        ),
        endpoints=views.endpoint_totals(api.table),
        ipam=IpamTotals(mode=config.node.ipam, ranges=range_views(api)),
        policy=policy_totals(api.policy, config),
        cluster=count_nodes(api),
        checks=tuple(
            views.CheckView(
                name=check.name,
                ok=check.ok,
                message=check.message,
                since=api.format_boottime(check.since_ns),
            )
            for check in api.health.checks()
        ),
        warnings=tuple(api.health.warnings()),
    )


def get_config(api: Api, _call: Call) -> views.ConfigView:
    return views.config_view(api.config.current, api.config.sources)


def patch_config(api: Api, call: Call) -> views.ConfigView:
    """Change reloadable settings until the next start or reload."""
    api.config.patch(call.body)
    return get_config(api, call)


def list_endpoints(api: Api, _call: Call) -> list[views.EndpointView]:
    return [views.endpoint_view(endpoint) for endpoint in api.table]


def get_endpoint(api: Api, call: Call) -> views.EndpointView:
    return views.endpoint_view(_endpoint(api, call))


def delete_endpoint(api: Api, call: Call) -> None:
    """End an endpoint as its runtime's DEL would."""
    endpoint = _endpoint(api, call)
    if endpoint.state is not State.DISCONNECTING:
        api.detach(endpoint.record)


def get_endpoint_log(api: Api, call: Call) -> list[views.LogEntryView]:
    return views.endpoint_log_view(_endpoint(api, call), api.wall_offset_ns())


def get_endpoint_health(api: Api, call: Call) -> views.EndpointHealth:
    """Compare an endpoint with the kernel."""
    endpoint = _endpoint(api, call)
    # Without the turn a change that is half made would look like a difference.
    with api.turn:
        differences = [
            *api.datapath.compare_endpoint(endpoint.record, endpoint.config, None),
            *api.policy.enforcer.compare(endpoint),
        ]
    return views.EndpointHealth(
        id=endpoint.record.id,
        ok=endpoint.state is State.READY and not differences,
        state=endpoint.state.value,
        differences=tuple(differences),
    )


def get_endpoint_labels(api: Api, call: Call) -> views.LabelsView:
    return views.LabelsView(labels=_endpoint(api, call).record.labels)


def list_identities(api: Api, _call: Call) -> list[IdentityView]:
    known = api.policy.resolver.allocator.known
    return describe_identities(known, [endpoint.record for endpoint in api.table])


def get_identity(api: Api, call: Call) -> IdentityView:
    text = call.params["id"]
    for identity in list_identities(api, call):
        if str(identity.id) == text:
            return identity
    raise errors.NotFound(
        f"find identity {text!r}: there is none", hint="see `podwire identity list`"
    )


def list_maps(api: Api, _call: Call) -> list[views.MapView]:
    return [views.MapView(**row) for row in api.maps.describe()]


def get_map(api: Api, call: Call) -> views.MapRows:
    limit = min(call.query.get("limit", MAP_ROWS_MAX), MAP_ROWS_MAX)
    rows, truncated = api.maps.rows(call.params["name"], limit)
    return views.MapRows(name=call.params["name"], rows=tuple(rows), truncated=truncated)


def get_openapi(_api: Api, _call: Call) -> dict[str, Any]:
    return describe(ROUTES, __version__)


def _streamed(_api: Api, _call: Call) -> object:
    raise errors.Bug("serve the request: this operation is streamed")


_FLOW_QUERY = (
    Parameter("follow", "Continue with new flows until the connection is closed.", "boolean"),
    Parameter("last", "How many past flows to begin with.", "integer"),
    Parameter("since", "Past flows since a time or for a duration: 90s, 5m, 2h."),
    Parameter("from", "Source: NS/POD, POD, address, range, or label key=value."),
    Parameter("to", "Destination, written as `from`."),
    Parameter("pod", "Either end, written as `from`."),
    Parameter("verdict", "forwarded, dropped or audit."),
    Parameter("type", "drop, trace or policy."),
    Parameter("port", "80, 80/tcp or udp, on either end."),
    Parameter("endpoint", "Number of an endpoint on either end."),
    Parameter("noise", "false: without what every pod's kernel sends by itself (reason quiet)."),
)

ROUTES: tuple[Route, ...] = (
    Route("GET", "/healthz", "Is the agent ready?", get_healthz, views.HealthView),
    Route("GET", "/status", "The agent as a whole", get_status, views.StatusView),
    Route("GET", "/config", "Settings in force", get_config, views.ConfigView),
    Route(
        "PATCH",
        "/config",
        "Change reloadable settings",
        patch_config,
        views.ConfigView,
        body=dict[str, Any],
        blocking=True,
    ),
    Route("GET", "/endpoint", "All endpoints", list_endpoints, list[views.EndpointView]),
    Route(
        "GET", "/endpoint/{id}", "One endpoint", get_endpoint, views.EndpointView, errors=(404, 409)
    ),
    Route(
        "DELETE",
        "/endpoint/{id}",
        "End an endpoint as a DEL would",
        delete_endpoint,
        errors=(404, 409, 507),
        blocking=True,
    ),
    Route(
        "GET",
        "/endpoint/{id}/log",
        "Transitions of an endpoint",
        get_endpoint_log,
        list[views.LogEntryView],
        errors=(404, 409),
    ),
    Route(
        "GET",
        "/endpoint/{id}/healthz",
        "Does the kernel agree with the journal?",
        get_endpoint_health,
        views.EndpointHealth,
        errors=(404, 409),
        blocking=True,
    ),
    Route(
        "GET",
        "/endpoint/{id}/labels",
        "Labels of an endpoint",
        get_endpoint_labels,
        views.LabelsView,
        errors=(404, 409),
    ),
    *ROUTES_POLICY,
    *ROUTES_OBJECTS,
    Route("GET", "/identity", "All identities", list_identities, list[IdentityView]),
    Route("GET", "/identity/{id}", "One identity", get_identity, IdentityView, errors=(404,)),
    *ROUTES_IPAM,
    Route("GET", "/map", "Maps of the datapath", list_maps, list[views.MapView], blocking=True),
    Route(
        "GET",
        "/map/{name}",
        "Rows of a map",
        get_map,
        views.MapRows,
        query=(Parameter("limit", "Rows at most.", "integer"),),
        errors=(404,),
        blocking=True,
    ),
    Route(
        "GET",
        "/flows",
        "Flows as JSON lines",
        _streamed,
        Flow,
        query=_FLOW_QUERY,
        media="application/jsonl",
    ),
    Route("GET", "/node", "The nodes known here", list_nodes, list[views.NodeView], blocking=True),
    Route("GET", "/metrics", "Figures for Prometheus", _streamed, str, media="text/plain"),
    Route("GET", "/openapi.json", "This description", get_openapi, dict[str, Any]),
)
