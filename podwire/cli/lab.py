"""`podwire lab`: nodes and pods on this one machine."""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from podwire.cli import lab_faults
from podwire.cli.client import EXIT_NOT_SO, EXIT_USAGE, CliError
from podwire.cli.lab_places import (
    LAB_OPTION,
    NODE_ARGUMENT,
    POD_ARGUMENT,
    choose,
    complete_places,
    progress_of,
)
from podwire.cli.lists import show_watched
from podwire.cli.options import Common, common, listing, table
from podwire.cli.output import (
    GREEN,
    RED,
    Column,
    Row,
    Style,
    colour,
    fields,
    key,
    show_document,
    show_one,
    show_rows,
)

if TYPE_CHECKING:
    from podwire.lab.state import LabState, Pod
    from podwire.lab.topology import LabPlan

_EXEC_FAILED = 125
_TARGET = re.compile(
    r"(?:\[(?P<bracketed>[^\[\]]+)\]|(?P<plain>[^\[\]:]+))(?::(?P<port>[^:]*))?"
    r"|(?P<bare>[^\[\]:]*:[^\[\]:]*:[^\[\]]*)"
)


@click.group(epilog="Example: podwire lab up && podwire lab run web --node node1 --serve 80/tcp")
def lab() -> None:
    """Build nodes with real agents in network namespaces, and pods by real CNI calls."""


@lab.command(epilog="Example: podwire lab up --nodes 3 --families 46")
@click.option("--nodes", type=int, default=2, show_default=True, help="How many nodes.")
@click.option("--families", type=click.Choice(["4", "6", "46"]), default="46", show_default=True)
@click.option("--name", metavar="LAB", help="The lab's name (PODWIRE_LAB, else `lab`).")
@click.option(
    "--routing",
    type=click.Choice(["overlay", "native", "auto"]),
    default="overlay",
    show_default=True,
    help="How nodes reach each other's pods; auto puts them into two subnets.",
)
@click.option("--store", type=click.Choice(["sqlite", "etcd"]), default="sqlite", show_default=True)
@click.option(
    "--ipam",
    type=click.Choice(["node", "pool"]),
    default="node",
    show_default=True,
    help="Addresses of a node's own range, or of blocks that it claims from pools of the lab.",
)
@click.option(
    "--underlay",
    type=click.Choice(["4", "6", "46"]),
    help="Families of the nodes' own addresses (default: those of --families).",
)
@click.option(
    "--mtu", type=int, default=1500, show_default=True, metavar="BYTES", help="Of the underlay."
)
@common
def up(opts: Common, name: str | None, underlay: str | None, **shape: Any) -> None:
    """Build a lab: nodes on an underlay, and a world outside."""
    from podwire.lab import labs  # noqa: PLC0415
    from podwire.lab.topology import DEFAULT_LAB, LabShape  # noqa: PLC0415

    made = labs.up(
        name or opts.lab or DEFAULT_LAB,
        LabShape(underlay=underlay or "", **shape),
        progress=progress_of(opts),
    )
    line = f"lab {made.name} is up; next: podwire lab run web --node node1 --serve 80/tcp"
    show_one(_describe_lab(made), opts.style, lambda: [line], made.name)


@lab.command(epilog="Example: podwire lab run web --node node1 --label app=web --serve 80/tcp")
@click.argument("pod")
@click.option("-n", "--namespace", metavar="NS", help="The pod's namespace (default: default).")
@click.option("--label", "labels", multiple=True, metavar="K=V", help="A label; may be repeated.")
@click.option("--serve", multiple=True, metavar="PORT/tcp|udp", help="A server; may be repeated.")
@common
def run(
    opts: Common, pod: str, namespace: str | None, labels: tuple[str, ...], serve: tuple[str, ...]
) -> None:
    """Start a pod on --node and attach it by executing the launcher."""
    from podwire.lab import labs  # noqa: PLC0415
    from podwire.lab.state import read_state  # noqa: PLC0415

    if namespace is not None and "/" in pod:
        raise CliError(EXIT_USAGE, f"say where {pod!r} is only once", "write NS/POD, or -n NS POD")
    for text in serve:
        _read_port(text)
    chosen = choose(opts.lab)
    made = labs.run(
        chosen,
        pod if namespace is None else f"{namespace}/{pod}",
        opts.node or _only_node(read_state(chosen).plan),
        labels=_read_labels(labels),
        serve=serve,
    )
    line = f"pod {made.full_name} runs on {made.node}: {', '.join(made.addresses)}"
    show_one(_describe_pod(made), opts.style, lambda: [line], made.full_name)


def _read_labels(texts: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise CliError(EXIT_USAGE, f"read label {text!r}", "write K=V")
        pairs[name] = value
    return pairs


def _read_port(text: str) -> tuple[int, str]:
    from podwire.lab.traffic import parse_port  # noqa: PLC0415
    from podwire.model.errors import InvalidRequest  # noqa: PLC0415

    try:
        return parse_port(text)
    except InvalidRequest as error:
        raise CliError(EXIT_USAGE, error.message, error.hint) from error


def _only_node(plan: "LabPlan") -> str:
    if len(plan.nodes) > 1:
        names = ", ".join(node.name for node in plan.nodes)
        raise CliError(EXIT_USAGE, f"choose a node: there are {names}", "say --node NODE")
    return plan.nodes[0].name


@lab.command(
    "exec",
    context_settings={"ignore_unknown_options": True},
    epilog="Example: podwire lab exec web -- ip addr",
)
@POD_ARGUMENT
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@LAB_OPTION
def exec_(pod: str, command: tuple[str, ...], lab: str | None) -> None:
    """Run a command inside a pod (or a node, or `world`); exits as the command does."""
    _enter(lab, pod, command)


@lab.command(epilog="Example: podwire lab shell web")
@POD_ARGUMENT
@LAB_OPTION
def shell(pod: str, lab: str | None) -> None:
    """Open a shell inside a pod (or a node, or `world`)."""
    import os  # noqa: PLC0415

    _enter(lab, pod, (os.environ.get("SHELL", "/bin/sh"),))


def _enter(lab: str | None, place: str, command: tuple[str, ...]) -> None:
    from podwire.lab import labs, pod, state  # noqa: PLC0415
    from podwire.model.errors import PodwireError  # noqa: PLC0415

    try:
        namespace, _ = labs.locate(state.read_state(choose(lab)), place)
        pod.exec_in_pod(namespace, command)
    except PodwireError as error:
        raise CliError(_EXEC_FAILED, error.message, error.hint) from error


@lab.command(epilog="Example: podwire lab rm web")
@POD_ARGUMENT
@click.option("-n", "--namespace", metavar="NS", help="The pod's namespace (default: default).")
@common
def rm(opts: Common, pod: str, namespace: str | None) -> None:
    """Detach a pod and remove it."""
    from podwire.lab import labs  # noqa: PLC0415

    name = pod if namespace is None else f"{namespace}/{pod}"
    labs.remove(choose(opts.lab), name)
    show_one({"removed": name}, opts.style, lambda: [f"pod {name} is gone"], name)


@lab.command(epilog="Example: podwire lab logs node1 | tail")
@NODE_ARGUMENT
@LAB_OPTION
def logs(name: str, lab: str | None) -> None:
    """Print the log of a node's agent."""
    from podwire.lab import node as nodes  # noqa: PLC0415
    from podwire.lab.state import read_state  # noqa: PLC0415

    for line in nodes.read_log(read_state(choose(lab)).plan.node(name)):
        print(line)


@lab.command(epilog="Example: podwire lab connect client web:80 --count 3 --every 200")
@click.argument("source", metavar="FROM", shell_complete=complete_places)
@click.argument("target", metavar="TO[:PORT[/udp]]", shell_complete=complete_places)
@click.option("--count", type=click.IntRange(0), default=1, show_default=True, help="0 = for ever.")
@click.option("--every", type=click.IntRange(1), default=1000, show_default=True, metavar="MS")
@common
def connect(opts: Common, source: str, target: str, count: int, every: int) -> None:
    """Connect from a pod, node or `world` to another, or to an address; exit code 1 when an attempt fails.

    FROM and TO: POD, NS/POD, NODE, `world`; TO may be an address, one of IPv6 in brackets when a port follows. Every
    address of TO is tried. Without a port it is 80/tcp.
    """
    from podwire.lab import labs, traffic  # noqa: PLC0415
    from podwire.lab.state import read_state  # noqa: PLC0415

    destination, port, protocol = _read_target(target)
    state = read_state(choose(opts.lab))
    namespace, _ = labs.locate(state, source)
    addresses = labs.find_addresses(state, destination)
    rows: list[Row] = []
    failed = 0
    for _ in traffic.every(count, every):
        for address in addresses:
            attempt = traffic.connect(namespace, address, port, protocol)
            failed += not attempt.ok
            row: Row = {
                "from": source,
                "to": target,
                "address": address,
                "port": port,
                "protocol": protocol,
                "ok": attempt.ok,
                "ms": round(attempt.ms, 3),
                "answer": attempt.answer,
            }
            if opts.style.form in ("json", "yaml") and count:
                rows.append(row)
            else:
                _show_attempt(row, opts.style)
    if rows:
        show_document(rows, opts.style.form)
    if failed:
        raise SystemExit(EXIT_NOT_SO)


def _show_attempt(row: Row, style: Style) -> None:
    """Show one attempt at once: somebody may be watching."""
    if style.for_programs:
        show_document(row, "jsonl" if style.form == "json" else style.form, more=True)
    elif style.form == "name":
        print(row["address"], flush=True)
    elif not style.quiet:
        print(*_attempt_lines(row), sep="\n", flush=True)


def _read_target(text: str) -> tuple[str, int, str]:
    """Split TO[:PORT[/udp]]; the address of an IPv6 target with a port is written in brackets."""
    match = _TARGET.fullmatch(text)
    if match is None or not _is_ipv6(match["bracketed"] or match["bare"] or "::"):
        raise CliError(
            EXIT_USAGE, f"read target {text!r}", "write POD:80, 10.0.0.1:53/udp or [fd10::7]:80/tcp"
        )
    place = match["bracketed"] or match["bare"] or match["plain"]
    port, protocol = _read_port(match["port"]) if match["port"] is not None else (80, "tcp")
    return place, port, protocol


def _is_ipv6(text: str) -> bool:
    import ipaddress  # noqa: PLC0415

    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def _attempt_lines(row: Row) -> Iterator[str]:
    word = colour("ok", GREEN) if row["ok"] else colour("failed", RED)
    yield f"{row['from']} -> {row['to']} ({row['address']}): {word} in {row['ms']:.1f} ms: {row['answer']}"


@lab.command(epilog="Example: podwire lab check -o json")
@table
@common
def check(opts: Common) -> None:
    """Try every pair of pods, nodes and the world by TCP, UDP and ICMP, with short and with large messages.

    Shows the time that each took; exit code 1 when one fails. A datagram without an answer is sent up to three times,
    as the network may lose one; how many it took is told.
    """
    from podwire.lab.show import matrix  # noqa: PLC0415

    rows: list[Row] = [
        {
            "from": pair.source,
            "to": pair.target,
            "address": pair.address,
            "protocol": pair.protocol,
            "bytes": pair.size_bytes,
            "ok": pair.attempt.ok,
            "ms": round(pair.attempt.ms, 3),
            "answer": pair.attempt.answer,
            "tries": pair.attempt.tries,
        }
        for pair in matrix.check(choose(opts.lab))
    ]
    columns = [
        *fields("from", "to", "address", "protocol"),
        Column("BYTES", lambda row: str(row["bytes"] or "-")),
        Column("RESULT", lambda row: colour("ok", GREEN) if row["ok"] else colour("failed", RED)),
        Column("MS", lambda row: f"{row['ms']:.1f}"),
        Column("TRIES", lambda row: str(row["tries"])),
        Column("ANSWER", key("answer"), wide=True),
    ]
    show_rows(rows, columns, opts.style, lambda row: f"{row['from']} {row['to']} {row['address']}")
    if not all(row["ok"] for row in rows):
        raise SystemExit(EXIT_NOT_SO)


@lab.command(epilog="Example: podwire lab status")
@common
def status(opts: Common) -> None:
    """Show the nodes and pods of a lab."""
    from podwire.lab.state import read_state  # noqa: PLC0415

    state = read_state(choose(opts.lab))
    document = _describe_lab(state)
    show_one(document, opts.style, lambda: _describe(document), state.name)


def _describe_lab(state: "LabState") -> dict[str, Any]:
    from podwire.lab.node import answers  # noqa: PLC0415
    from podwire.lab.state import is_running  # noqa: PLC0415

    return {
        "name": state.name,
        "families": state.shape.families,
        "underlay": state.shape.underlay_families,
        "routing": state.shape.routing,
        "store": state.plan.store_url,
        "ipam": state.shape.ipam,
        "partitions": [f"{node} {other}" for node, other in state.partitions],
        "nodes": [
            {
                "name": node.name,
                "addresses": node.addresses,
                "podCidrs": node.pod_cidrs,
                "agent": "running" if is_running(state.agents.get(node.name)) else "stopped",
                "ready": answers(node),
                "socket": str(node.directory / "api.sock"),
                "networkNamespace": node.namespace,
            }
            for node in state.plan.nodes
        ],
        "pods": [_describe_pod(pod) for pod in state.pods],
    }


def _describe_pod(pod: "Pod") -> dict[str, Any]:
    return {
        "namespace": pod.namespace,
        "name": pod.name,
        "node": pod.node,
        "addresses": pod.addresses,
        "labels": pod.labels,
        "serves": [f"{server.port}/{server.protocol}" for server in pod.servers],
        "containerId": pod.container_id,
        "networkNamespace": pod.netns,
    }


def _describe(document: dict[str, Any]) -> Iterator[str]:
    yield f"lab {document['name']}"
    for node in document["nodes"]:
        yield f"  {node['name']}: agent {node['agent']}, {', '.join(node['addresses'])}"
        for pod in document["pods"]:
            if pod["node"] == node["name"]:
                serves = f", serves {', '.join(pod['serves'])}" if pod["serves"] else ""
                yield f"    {pod['namespace']}/{pod['name']}: {', '.join(pod['addresses'])}{serves}"


@lab.command("list", epilog="Example: podwire lab list -o name")
@listing
@common
def list_(opts: Common) -> None:
    """List the labs of this machine."""
    columns = fields("name", "nodes", "families", "pods")
    show_watched(opts, _read_labs, columns, lambda row: str(row["name"]))


def _read_labs() -> tuple[list[Row], None]:
    from podwire.lab.state import list_labs, read_state  # noqa: PLC0415
    from podwire.model.errors import NotFound  # noqa: PLC0415

    rows: list[Row] = []
    for name in list_labs():
        try:
            lab = read_state(name)
        except NotFound:
            continue  # it went down meanwhile
        rows.append(
            {
                "name": name,
                "nodes": lab.shape.nodes,
                "families": lab.shape.families,
                "pods": len(lab.pods),
            }
        )
    return rows, None


@lab.command(epilog="Example: podwire lab down")
@common
def down(opts: Common) -> None:
    """Remove a lab and everything it made, also what is left of one that was killed."""
    from podwire.lab import labs  # noqa: PLC0415

    chosen = opts.lab or choose(None)
    labs.down(chosen, progress=progress_of(opts))
    if opts.style.for_programs or opts.style.form == "name":
        show_one({"removed": chosen}, opts.style, lambda: [], chosen)


for _command in (lab_faults.node, lab_faults.link, lab_faults.partition, lab_faults.store):
    lab.add_command(_command)
