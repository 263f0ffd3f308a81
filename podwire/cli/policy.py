"""`podwire policy`: list, selectors, entries, trace, wait, validate."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click

from podwire.cli import client
from podwire.cli.client import EXIT_NOT_SO, EXIT_USAGE, CliError
from podwire.cli.endpoint import Requirement, find_endpoint, matches, read_selector
from podwire.cli.lists import ask_all, get_rows, show_list
from podwire.cli.object_access import POLICY_KINDS, AgentObjects, Document
from podwire.cli.objects import from_files, name_object, select, validate_files
from podwire.cli.options import Agent, Common, common, listing, namespaced, selecting
from podwire.cli.output import Column, Row, fields, key, show_one
from podwire.cli.trace import trace_flow
from podwire.model.store.kinds import CIDR_GROUP, find_kind

_WAIT_LOOK_S = 0.05


@click.group(
    epilog="Example: podwire policy trace --from pod:default/web --to pod:default/db --port 5432/tcp"
)
def policy() -> None:
    """Policies: which are in force, what they select, and why a flow is allowed or denied."""


@policy.command("list", epilog="Example: podwire policy list -n default -o wide")
@namespaced
@selecting
@listing
@common
def list_policies(opts: Common, namespace: str | None, selector: str | None) -> None:
    """List the policies that the node enforces, with how many of its endpoints each selects.

    Warns on stderr of those that name a label or a group of addresses that nothing can have. -l is about the labels of
    the policies themselves.
    """
    wanted = read_selector(selector or "")

    def read(agent: Agent) -> list[Row]:
        rows = get_rows(agent, "/policy")
        if namespace:
            rows = [row for row in rows if row["namespace"] == namespace]
        if wanted:
            chosen = {name_object(document) for document in _stored([agent], namespace, wanted)}
            rows = [row for row in rows if _object_name(row) in chosen]
        if rows and not (opts.watch or opts.style.quiet):
            seen.append(agent)
        return rows

    seen: list[Agent] = []
    show_list(opts, read, _POLICY_COLUMNS, _policy_name)
    if seen:
        _warn(seen, namespace, wanted)


def _stored(
    agents: Sequence[Agent], namespace: str | None, wanted: Sequence[Requirement]
) -> list[Document]:
    """Give the documents of policies."""
    objects = AgentObjects(agents)
    return [
        document
        for kind in POLICY_KINDS
        if kind.namespaced or not namespace
        for document in select(objects.list(kind, namespace or ""), wanted)
    ]


def _warn(agents: Sequence[Agent], namespace: str | None, wanted: Sequence[Requirement]) -> None:
    from podwire.cli.unmatched import warn_of_stored  # noqa: PLC0415 (start-up time)

    with contextlib.suppress(CliError):  # the list itself is complete
        warn_of_stored(_stored(agents, namespace, wanted), AgentObjects(agents))


def _object_name(row: Row) -> str:
    kind = find_kind(row["kind"])
    plural = kind.plural if kind else row["kind"]
    return "/".join(filter(None, (plural, row["namespace"], row["name"])))


@policy.command(epilog="Example: podwire policy selectors -o json")
@listing
@common
def selectors(opts: Common) -> None:
    """List the selectors that policies use, with the identities each one selects now."""
    show_list(
        opts,
        lambda agent: get_rows(agent, "/policy/selectors"),
        _SELECTOR_COLUMNS,
        lambda row: str(row["selector"]),
    )


@policy.command(epilog="Example: podwire policy entries --endpoint default/web")
@click.option("--endpoint", metavar="ID", help="Only what the programs hold for this endpoint.")
@namespaced
@selecting
@listing
@common
def entries(
    opts: Common, endpoint: str | None, namespace: str | None, selector: str | None
) -> None:
    """List the entries that the programs look up, each with the rule it is from and how often it decided.

    -n: from policies of this namespace. -l: about peers with such labels.
    """
    query, wanted = "", read_selector(selector or "")
    if endpoint:
        agent, row = find_endpoint(opts.agents(), endpoint)
        opts, query = replace(opts, agents=lambda: [agent]), f"?endpoint={row['id']}"

    def read(agent: Agent) -> list[Row]:
        return [
            row
            for row in get_rows(agent, f"/policy/entries{query}")
            if (not namespace or f" {namespace}/" in row["policy"])
            and matches(wanted, row["labels"])
        ]

    show_list(
        opts,
        read,
        _ENTRY_COLUMNS,
        lambda row: (
            f"{row['slot']}/{row['direction']}/{row['peer']}/{row['protocol']}/{row['ports']}"
        ),
    )


@policy.command(
    epilog="Example: podwire policy trace --from labels:app=web --to ip:192.0.2.7 --port 443/tcp"
)
@click.option(
    "--from",
    "source",
    required=True,
    metavar="X",
    help="pod:NS/NAME, labels:K=V,..., ip:ADDRESS or an entity.",
)
@click.option(
    "--to", "target", required=True, metavar="Y", help="Written as --from, or service:NS/NAME."
)
@click.option(
    "--port",
    required=True,
    metavar="P/PROTO",
    help="80/tcp, 53/udp, 38412/sctp, icmp or icmpv6 (also icmp/8).",
)
@common
def trace(opts: Common, source: str, target: str, port: str) -> None:
    """Say whether a flow would be allowed, which rule decides, and why nothing allows it; exit code 1 when denied.

    To a service: what becomes of the flow at each back end that may answer; exit code 1 when any of them is denied.
    """
    document, failure = trace_flow(opts, source, target, port)
    show_one(document, opts.style, lambda: _trace_lines(document), document["verdict"])
    if failure is not None:
        raise failure
    if document["verdict"] != "allowed":
        raise SystemExit(EXIT_NOT_SO)


def _trace_lines(document: Row) -> list[str]:
    lines = [f"{document['verdict']}  (policy revision {document['revision']})"]
    if not document.get("backEnds"):
        return lines + _end_lines(document, "  ")
    for back_end in document["backEnds"]:
        pod = f" ({back_end['pod']})" if back_end["pod"] else ""
        place = f"[{back_end['address']}]" if ":" in back_end["address"] else back_end["address"]
        lines.append(f"  back end {place}:{back_end['port']}{pod}: {back_end['verdict']}")
        lines += _end_lines(back_end, "    ")
    return lines


def _end_lines(document: Row, indent: str) -> list[str]:
    lines = []
    for direction in ("egress", "ingress"):
        half = document[direction]
        decided = f"{half['policy']} {half['rule']}".strip() or "no policy restricts this direction"
        lines.append(f"{indent}{direction:8}{half['verdict']:9}{decided}")
    return lines + [f"{indent}because: {reason}" for reason in document["why"]]


@policy.command(epilog="Example: podwire policy wait 42 --timeout 10")
@click.argument("revision", type=int)
@click.option(
    "--kind", metavar="KIND", help="Only policies of this kind: REVISION is of one of them."
)
@click.option("--timeout", "timeout_s", type=float, default=30.0, show_default=True, metavar="S")
@common
def wait(opts: Common, revision: int, kind: str | None, timeout_s: float) -> None:
    """Wait until every endpoint enforces at least REVISION (of `apply -o wide`); exit code 1 when it does not.

    Without --kind it waits until policies of every kind are enforced up to REVISION. A store whose kinds have revisions
    of their own may take a minute to say so: name the kind of the policy that you applied.
    """
    plural = _read_policy_kind(kind)
    deadline = time.monotonic() + timeout_s
    while True:
        answers, failure = ask_all(opts, lambda agent: _behind(agent, revision, plural))
        if failure is not None:
            raise failure
        behind = [name for _, part in answers for name in part]
        if not behind:
            show_one(
                {"revision": revision}, opts.style, lambda: [f"revision {revision} is enforced"]
            )
            return
        if time.monotonic() >= deadline:
            raise CliError(
                EXIT_NOT_SO,
                f"wait for revision {revision}: after {timeout_s:g} s not yet on {', '.join(behind[:5])}",
                "podwire endpoint list; podwire endpoint log ID",
            )
        time.sleep(_WAIT_LOOK_S)


def _read_policy_kind(word: str | None) -> str:
    """Give the plural name of a kind of policy, "" = of every kind."""
    kinds = (*POLICY_KINDS, CIDR_GROUP)
    kind = find_kind(word) if word else None
    if word and kind not in kinds:
        known = ", ".join(kind.plural for kind in kinds)
        raise CliError(
            EXIT_USAGE, f"find kind of policy {word!r}: there is none", f"there are {known}"
        )
    return kind.plural if kind is not None else ""


def _behind(agent: Agent, revision: int, kind: str) -> list[str]:
    """Name the endpoints that enforce an older revision, and the node while it has not seen the new one."""

    def read(row: Row, name: str, name_by_kind: str) -> int:
        by_kind = row.get(name_by_kind, {})  # an older agent has one revision for all kinds
        return int(by_kind[kind] if kind in by_kind else row[name])

    rows = get_rows(agent, "/endpoint")
    behind = [
        f"{row['namespace']}/{row['pod']}"
        for row in rows
        if read(row, "policyRevision", "policyRevisions") < revision
        and row["state"] != "disconnecting"
    ]
    status = client.request(agent.socket, "GET", "/status")
    seen = read(status["policy"], "revision", "revisions")
    return behind if seen >= revision else [*behind, agent.node or "the agent"]


@policy.command(epilog="Example: podwire policy validate -f policies.yaml")
@from_files(required=True)
@common
def validate(opts: Common, files: tuple[str, ...]) -> None:
    """Check policies without an agent: exit code 6 with every fault when one would be refused."""
    names = validate_files(files, warned=not opts.style.quiet)
    show_one({"valid": names}, opts.style, lambda: [f"{name} is valid" for name in names])


def _policy_name(row: Row) -> str:
    return f"{row['kind']}/{row['namespace'] or '-'}/{row['name']}"


def _yes(field: str) -> Any:
    return lambda row: "yes" if row[field] else "no"


_POLICY_COLUMNS = [
    *fields("kind", "namespace", "name", "rules", "endpoints"),
    Column("INGRESS", _yes("ingress")),
    Column("EGRESS", _yes("egress")),
    Column("STATE", lambda row: row.get("state", "")),  # an older agent does not say
    Column("PROBLEM", key("problem")),
]
_SELECTOR_COLUMNS = [
    *fields("selector", "users"),
    Column("IDENTITIES", lambda row: ",".join(map(str, row["identities"])) or "-"),
]
_ENTRY_COLUMNS = [
    *fields("slot", "direction", "peer"),
    Column("LABELS", lambda row: ",".join(row["labels"]), wide=True),
    *fields("protocol", "ports", "verdict", "policy", "rule", "hits"),
]
