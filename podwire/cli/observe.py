"""`podwire observe` (flows) and `podwire monitor` (every event of the programs, live)."""

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from podwire.cli import client
from podwire.cli.client import EXIT_UNREACHABLE, CliError
from podwire.cli.options import Agent, Common, common
from podwire.cli.output import GREEN, RED, YELLOW, Style, colour, show_document

_QUEUE_LINES = 1024
_LAST = 20
_NOISE_HELP = "Also what every pod's kernel sends by itself (reason quiet)."
_AWAY = "is its agent running? see `podwire status`"


@click.command(epilog="Example: podwire observe -f --pod default/web --verdict dropped")
@click.option("-f", "--follow", is_flag=True, help="Continue with new flows.")
@click.option("--last", type=click.IntRange(0), metavar="N", help="Begin with the last N.")
@click.option("--since", metavar="5m", help="Begin with flows since then.")
@click.option("--from", "source", metavar="X", help="NS/POD, address, range or label.")
@click.option("--to", "target", metavar="X", help="NS/POD, address, range or label.")
@click.option("--pod", metavar="X", help="Either end.")
@click.option("--verdict", type=click.Choice(["forwarded", "dropped", "audit"]))
@click.option("--port", metavar="P/proto", help="On either end.")
@click.option("--noise", is_flag=True, help=_NOISE_HELP)
@common
def observe(
    opts: Common, follow: bool, last: int | None, noise: bool, **conditions: str | None
) -> None:
    """Show flows: source, destination and verdict of packets.

    Drops are always there, and so is the first packet of each new flow (of an endpoint: up to 100 in a second). What
    passes after it is told only while somebody follows, with -f or by `podwire monitor`.
    """
    query = {
        "follow": "true" if follow else None,
        "last": _LAST if last is None and not conditions["since"] else last,
        "noise": _say_noise(noise),
        **{name: value for name, value in conditions.items() if name not in ("source", "target")},
        "from": conditions["source"],
        "to": conditions["target"],
    }
    _show(opts, query)


@click.command(epilog="Example: podwire monitor --type drop --endpoint default/web")
@click.option(
    "--type",
    "kind",
    type=click.Choice(["drop", "trace", "policy"]),
    help="Only drops, only single packets that pass, or only verdicts on new connections.",
)
@click.option("--endpoint", "endpoint_id", metavar="ID", help="Only at this endpoint.")
@click.option("--noise", is_flag=True, help=_NOISE_HELP)
@common
def monitor(opts: Common, kind: str | None, endpoint_id: str | None, noise: bool) -> None:
    """Show what the programs report from now on, until interrupted."""
    query: dict[str, Any] = {
        "follow": "true",
        "last": 0,
        "type": kind,
        "noise": _say_noise(noise),
    }
    agents = opts.agents()
    if endpoint_id is not None:
        from podwire.cli.endpoint import find_endpoint  # noqa: PLC0415

        agent, row = find_endpoint(agents, endpoint_id)
        agents, query["endpoint"] = [agent], row["id"]
    _show(opts, query, agents)


def _say_noise(wanted: bool) -> str | None:
    return None if wanted else "false"


def _show(opts: Common, query: Mapping[str, Any], agents: Sequence[Agent] | None = None) -> None:
    flows = _merge(opts.agents() if agents is None else agents, query)
    if not query.get("follow"):
        flows = iter(_in_order(flows, query.get("last")))
        if opts.style.form in ("json", "yaml"):
            show_document(list(flows), opts.style.form)
            return
    for flow in flows:
        if opts.style.for_programs:
            show_document(flow, "yaml" if opts.style.form == "yaml" else "jsonl", more=True)
        else:
            print(_line(flow, opts.style), flush=True)


def _in_order(flows: Iterator[dict[str, Any]], last: int | None) -> list[dict[str, Any]]:
    """Put what several agents remember in one order, and keep the last of all."""
    ordered = sorted(flows, key=lambda flow: str(flow.get("time")))
    return ordered if last is None else ordered[max(0, len(ordered) - last) :]


def _merge(agents: Sequence[Agent], query: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Read all agents at once; an agent that ends ends only its own part."""
    if len(agents) == 1:
        yield from client.stream(agents[0].socket, "/flows", query)
        return
    # Bounded: a terminal that is slower than the agents holds them up instead of filling memory.
    lines: queue.Queue[dict[str, Any] | CliError | None] = queue.Queue(_QUEUE_LINES)

    def read(agent: Agent) -> None:
        try:
            for flow in client.stream(agent.socket, "/flows", query):
                lines.put(flow)
        except CliError as error:
            lines.put(error)
        except OSError as error:
            lines.put(CliError(EXIT_UNREACHABLE, f"follow {agent.node}: {error}", _AWAY))
        finally:
            lines.put(None)

    # Daemons, because each waits in its socket for as long as its agent lives: the process would never end.
    for agent in agents:
        threading.Thread(target=read, args=(agent,), daemon=True).start()
    running = len(agents)
    while running:
        line = lines.get()
        if line is None:
            running -= 1
        elif isinstance(line, CliError):
            raise line
        else:
            yield line


def _line(flow: dict[str, Any], style: Style) -> str:
    ends = f"{_end(flow.get('from') or {})} -> {_end(flow.get('to') or {})}"
    if style.form == "name" or style.quiet:
        return ends
    verdict = str(flow.get("verdict"))
    code = {"forwarded": GREEN, "dropped": RED}.get(verdict, YELLOW)
    reason = f" ({flow['reason']})" if flow.get("reason") else ""
    lost = f"  [{flow['lost']} events lost before]" if flow.get("lost") else ""
    what = (
        f"{flow.get('protocol') or '-'} {flow.get('direction') or ''} {flow.get('bytes', 0)} bytes"
    )
    meant = _meant(flow)
    return (
        f"{flow.get('time')}  {flow.get('node') or '-':8} {colour(verdict + reason, code)}"
        f"  {ends}{meant}"
        f"  {what}{_decided(flow)}{lost}"
    )


def _meant(flow: Mapping[str, Any]) -> str:
    """Say which service was asked, at which address."""
    service = (flow.get("to") or {}).get("service")
    named = f"service {service['namespace']}/{service['name']}:{service['port']}" if service else ""
    address = f"to {_end(flow['originalTo'])}" if flow.get("originalTo") else ""
    said = ", ".join(filter(None, (named, address)))
    return f" ({said})" if said else ""


def _decided(flow: Mapping[str, Any]) -> str:
    """Name the rule that decided."""
    named = [
        f"{policy['kind']} {policy['namespace']}/{policy['name']}".replace(" /", " ")
        + f" {policy['rule']}"
        for policy in flow.get("policies") or ()
    ]
    return f"  by {'; '.join(named)}" if named else ""


def _end(end: Mapping[str, Any]) -> str:
    address = str(end.get("ip") or "?")
    port = end.get("port")
    place = f"[{address}]" if port and ":" in address else address
    if port:
        place += f":{port}"
    if end.get("pod"):
        return f"{end.get('namespace')}/{end['pod']} {place}"
    return place
