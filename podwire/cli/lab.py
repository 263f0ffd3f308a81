"""`podwire lab`: nodes and pods on this one machine."""

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import click

from podwire.cli.client import EXIT_NOT_SO, EXIT_USAGE, CliError
from podwire.cli.options import Common, common, listing
from podwire.cli.output import GREEN, RED, Column, Row, colour, key, show_one, show_rows

_EXEC_FAILED = 125


@click.group()
def lab() -> None:
    """Build nodes with real agents in network namespaces, and pods by real CNI calls."""


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


_LAB = click.option("--lab", metavar="LAB", envvar="PODWIRE_LAB", help="The lab (PODWIRE_LAB).")


def _choose(name: str | None) -> str:
    from podwire.lab.state import choose_lab  # noqa: PLC0415 (start-up time)

    return choose_lab(name)


@lab.command(epilog="Example: podwire lab up --nodes 3 --families 46")
@click.option("--nodes", type=int, default=2, show_default=True, help="How many nodes.")
@click.option("--families", type=click.Choice(["4", "6", "46"]), default="46", show_default=True)
@click.option("--name", default="lab", show_default=True, metavar="LAB", help="The lab's name.")
@click.option("--routing", type=click.Choice(["native"]), default="native", show_default=True)
@click.option("--store", type=click.Choice(["sqlite"]), default="sqlite", show_default=True)
def up(nodes: int, families: str, name: str, routing: str, store: str) -> None:
    """Build a lab: nodes on an underlay, and a world outside."""
    from podwire.lab import labs  # noqa: PLC0415

    del routing, store  # one value each until the overlay and other stores are built
    labs.up(name, node_count=nodes, families=families, progress=_say)
    print(f"lab {name} is up; next: podwire lab run web --node node1 --serve 80/tcp")


@lab.command(epilog="Example: podwire lab run web --node node1 --label app=web --serve 80/tcp")
@click.argument("pod")
@click.option("--node", required=True, metavar="NODE", help="The node it runs on.")
@click.option("-n", "--namespace", default="default", show_default=True, metavar="NS")
@click.option("--label", "labels", multiple=True, metavar="K=V", help="A label; may be repeated.")
@click.option("--serve", multiple=True, metavar="PORT/tcp|udp", help="A server; may be repeated.")
@_LAB
def run(
    pod: str,
    node: str,
    namespace: str,
    labels: tuple[str, ...],
    serve: tuple[str, ...],
    lab: str | None,
) -> None:
    """Start a pod and attach it by executing the launcher."""
    from podwire.lab import labs  # noqa: PLC0415

    pairs = {}
    for text in labels:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise CliError(EXIT_USAGE, f"read label {text!r}", "write K=V")
        pairs[name] = value
    made = labs.run(_choose(lab), f"{namespace}/{pod}", node, labels=pairs, serve=serve)
    print(f"pod {made.full_name} runs on {made.node}: {', '.join(made.addresses)}")


@lab.command(
    "exec",
    context_settings={"ignore_unknown_options": True},
    epilog="Example: podwire lab exec web -- ip addr",
)
@click.argument("pod")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@_LAB
def exec_(pod: str, command: tuple[str, ...], lab: str | None) -> None:
    """Run a command inside a pod (or a node, or `world`); exits as the command does."""
    _enter(lab, pod, command)


@lab.command(epilog="Example: podwire lab shell web")
@click.argument("pod")
@_LAB
def shell(pod: str, lab: str | None) -> None:
    """Open a shell inside a pod (or a node, or `world`)."""
    import os  # noqa: PLC0415

    _enter(lab, pod, (os.environ.get("SHELL", "/bin/sh"),))


def _enter(lab: str | None, place: str, command: tuple[str, ...]) -> None:
    from podwire.lab import labs, pod, state  # noqa: PLC0415
    from podwire.model.errors import PodwireError  # noqa: PLC0415

    try:
        namespace, _ = labs.locate(state.read_state(_choose(lab)), place)
        pod.exec_in_pod(namespace, command)
    except PodwireError as error:
        raise CliError(_EXEC_FAILED, error.message, error.hint) from error


@lab.command(epilog="Example: podwire lab rm web")
@click.argument("pod")
@_LAB
def rm(pod: str, lab: str | None) -> None:
    """Detach a pod and remove it."""
    from podwire.lab import labs  # noqa: PLC0415

    labs.remove(_choose(lab), pod)
    print(f"pod {pod} is gone")


@lab.command(epilog="Example: podwire lab logs node1 | tail")
@click.argument("node")
@_LAB
def logs(node: str, lab: str | None) -> None:
    """Print the log of a node's agent."""
    from podwire.lab import node as nodes  # noqa: PLC0415
    from podwire.lab.state import read_state  # noqa: PLC0415

    for line in nodes.read_log(read_state(_choose(lab)).plan.node(node)):
        print(line)


@lab.command(epilog="Example: podwire lab connect client web:80 --count 3 --every 200")
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO[:PORT[/udp]]")
@click.option("--count", type=click.IntRange(0), default=1, show_default=True, help="0 = for ever.")
@click.option("--every", type=click.IntRange(1), default=1000, show_default=True, metavar="MS")
@common
def connect(opts: Common, source: str, target: str, count: int, every: int) -> None:
    """Connect from a pod, node, `world` to another, or to an address; exit code 1 when an attempt fails."""
    from podwire.lab import labs, traffic  # noqa: PLC0415
    from podwire.lab.state import read_state  # noqa: PLC0415

    state = read_state(_choose(opts.lab))
    destination, port, protocol = _read_target(target)
    namespace, _ = labs.locate(state, source)
    addresses = labs.find_addresses(state, destination)
    failed = 0
    for address in addresses:
        attempt_one = partial(traffic.connect, namespace, address, port, protocol)
        attempts = traffic.repeat(attempt_one, count, every)
        for attempt in attempts:
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
            show_one(row, opts.style, partial(_attempt_lines, row), address)
    if failed:
        raise SystemExit(EXIT_NOT_SO)


def _read_target(text: str) -> tuple[str, int, str]:
    """Split TO[:PORT[/udp]]; the address of an IPv6 target stands in brackets. Without a port it is 80/tcp."""
    from podwire.lab.traffic import parse_port  # noqa: PLC0415

    if text.startswith("["):
        place, _, rest = text[1:].partition("]")
        port = rest.lstrip(":")
    elif text.count(":") > 1:
        place, port = text, ""
    else:
        place, _, port = text.partition(":")
    return (place, *(parse_port(port) if port else (80, "tcp")))


def _attempt_lines(row: Row) -> Iterator[str]:
    word = colour("ok", GREEN) if row["ok"] else colour("failed", RED)
    yield f"{row['from']} -> {row['to']} ({row['address']}): {word} in {row['ms']:.1f} ms: {row['answer']}"


@lab.command(epilog="Example: podwire lab check -o json")
@listing
@common
def check(opts: Common) -> None:
    """Try every pair of pods, nodes and the world, with the time each took; exit code 1 when one fails."""
    from podwire.lab import labs  # noqa: PLC0415

    rows: list[Row] = [
        {
            "from": pair.source,
            "to": pair.target,
            "address": pair.address,
            "protocol": pair.protocol,
            "ok": pair.attempt.ok,
            "ms": round(pair.attempt.ms, 3),
            "answer": pair.attempt.answer,
        }
        for pair in labs.check(_choose(opts.lab))
    ]
    columns = [
        Column("FROM", key("from")),
        Column("TO", key("to")),
        Column("ADDRESS", key("address")),
        Column("PROTOCOL", key("protocol")),
        Column("RESULT", lambda row: colour("ok", GREEN) if row["ok"] else colour("failed", RED)),
        Column("MS", lambda row: f"{row['ms']:.1f}"),
        Column("ANSWER", key("answer"), wide=True),
    ]
    show_rows(rows, columns, opts.style, lambda row: f"{row['from']} {row['to']} {row['address']}")
    if not all(row["ok"] for row in rows):
        raise SystemExit(EXIT_NOT_SO)


@lab.command(epilog="Example: podwire lab status")
@common
def status(opts: Common) -> None:
    """Show the nodes and pods of a lab."""
    from podwire.lab.state import is_running, read_state  # noqa: PLC0415

    state = read_state(_choose(opts.lab))
    document = {
        "name": state.name,
        "families": state.families,
        "nodes": [
            {
                "name": node.name,
                "addresses": node.addresses,
                "podCidrs": node.pod_cidrs,
                "agent": "running" if is_running(state.agents.get(node.name)) else "stopped",
                "namespace": node.namespace,
            }
            for node in state.plan.nodes
        ],
        "pods": [
            {
                "namespace": pod.namespace,
                "name": pod.name,
                "node": pod.node,
                "addresses": pod.addresses,
                "serves": [f"{server.port}/{server.protocol}" for server in pod.servers],
                "networkNamespace": pod.netns,
            }
            for pod in state.pods
        ],
    }
    show_one(document, opts.style, lambda: _describe(document), state.name)


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
    from podwire.lab.state import list_labs, read_state  # noqa: PLC0415

    states = [read_state(name) for name in list_labs()]
    rows: list[Row] = [
        {"name": one.name, "nodes": one.nodes, "families": one.families, "pods": len(one.pods)}
        for one in states
    ]
    columns = [
        Column("NAME", key("name")),
        Column("NODES", key("nodes")),
        Column("FAMILIES", key("families")),
        Column("PODS", key("pods")),
    ]
    show_rows(rows, columns, opts.style, lambda row: str(row["name"]))


@lab.command(epilog="Example: podwire lab down")
@_LAB
def down(lab: str | None) -> None:
    """Remove a lab and everything it made, also what is left of one that was killed."""
    from podwire.lab import labs  # noqa: PLC0415

    labs.down(lab or _choose(None), progress=_say)


@lab.group()
def node() -> None:
    """Stop, start or kill the agent of a node; its pods keep running."""


def _add_agent_command(action: str, about: str) -> None:
    @node.command(action, help=about, epilog=f"Example: podwire lab node {action} node1")
    @click.argument("name", metavar="NODE")
    @_LAB
    def change(name: str, lab: str | None) -> None:
        from podwire.lab import labs  # noqa: PLC0415

        labs.change_agent(_choose(lab), name, action)


_add_agent_command("start", "Start the agent of a node and wait until it is ready.")
_add_agent_command("stop", "Stop the agent of a node as a service manager does.")
_add_agent_command("kill", "Kill the agent of a node (SIGKILL).")


@lab.group()
def link() -> None:
    """Cut a node from the underlay, or join it again."""


def _add_link_command(word: str, about: str) -> None:
    @link.command(word, help=about, epilog=f"Example: podwire lab link {word} node1")
    @click.argument("name", metavar="NODE")
    @_LAB
    def change(name: str, lab: str | None) -> None:
        from podwire.lab import labs  # noqa: PLC0415

        labs.set_link(_choose(lab), name, is_up=word == "up")


_add_link_command("down", "Cut a node from the underlay.")
_add_link_command("up", "Join a node to the underlay again.")
