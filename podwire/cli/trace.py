"""Combine what several nodes answer about a flow into the one answer of `podwire policy trace`.

A node knows its own pods by name and those of others by address. When the two ends are pods of two nodes of a lab, each
node is therefore asked about its own pod's side, with the address of the other end.
"""

import ipaddress
from collections.abc import Mapping, Sequence

from podwire.cli import client
from podwire.cli.client import EXIT_NOT_FOUND, CliError
from podwire.cli.lists import ask_all, get_rows
from podwire.cli.options import Agent, Common
from podwire.cli.output import Row

_POD = "pod:"
_HINT = "podwire endpoint list; a pod of another node is said by its address: ip:ADDRESS"


def trace_flow(opts: Common, source: str, target: str, port: str) -> tuple[Row, CliError | None]:
    """Ask the agents that are meant; gives the answer, and what to fail with when some were out of reach."""
    unknown: list[CliError] = []

    def ask(agent: Agent) -> Row | None:
        try:
            return _ask(agent, source, target, port)
        except CliError as error:
            if error.exit_code != EXIT_NOT_FOUND:
                raise
            unknown.append(error)  # a pod of another node
            return None

    answers, failure = ask_all(opts, ask)
    traces = [answer for _, answer in answers if answer is not None]
    if traces:
        # Believe the node that knows both ends as its own pods, else the one that knows most of them.
        return max(traces, key=lambda answer: int(answer.get("knownEnds", 0))), failure
    try:
        together = _trace_between(opts, source, target, port)
    except CliError as error:
        if failure is None or error.exit_code != EXIT_NOT_FOUND:
            raise
        raise failure from error  # whoever did not answer may have the pod
    if together is None:
        raise failure or CliError(EXIT_NOT_FOUND, unknown[0].message, _HINT)
    return together, failure


def _ask(agent: Agent, source: str, target: str, port: str) -> Row:
    body = {"from": source, "to": target, "port": port}
    answer: Row = client.request(agent.socket, "POST", "/policy/trace", body)
    return answer


def _trace_between(opts: Common, source: str, target: str, port: str) -> Row | None:
    """Trace between pods of two nodes; None when the ends are not two pods. CliError names a pod that nobody has."""
    if not (source.startswith(_POD) and target.startswith(_POD)):
        return None
    answers, _ = ask_all(opts, lambda agent: get_rows(agent, "/endpoint"))
    (sender, sends), (receiver, receives) = (_find_pod(answers, text) for text in (source, target))
    family = _choose_family((sends, receives), port)
    egress = _ask(sender, source, f"ip:{_address_of(receives, family)}", port)
    ingress = _ask(receiver, f"ip:{_address_of(sends, family)}", target, port)
    return _join(egress, ingress)


def _find_pod(answers: Sequence[tuple[Agent, Sequence[Row]]], pod: str) -> tuple[Agent, Row]:
    """Find the newest endpoint of `pod:NAMESPACE/NAME`, and the agent that has it."""
    pods = [
        (agent, row)
        for agent, rows in answers
        for row in rows
        if f"{_POD}{row['namespace']}/{row['pod']}" == pod
    ]
    if not pods:
        raise CliError(EXIT_NOT_FOUND, f"find {pod}: no node has such a pod", _HINT)
    return max(pods, key=lambda pair: int(pair[1]["id"]))


def _choose_family(pods: Sequence[Row], port: str) -> int:
    """Choose as a node does for two pods of its own: IPv4 where both have it."""
    protocol = port.lower().partition("/")[0]
    if protocol in ("icmp", "icmpv6"):
        return 4 if protocol == "icmp" else 6
    return 4 if all(_address_of(pod, 4) for pod in pods) else 6


def _address_of(pod: Row, family: int) -> str:
    addresses = map(str, pod["addresses"])
    return next(
        (address for address in addresses if ipaddress.ip_address(address).version == family), ""
    )


def _join(egress: Row, ingress: Row) -> Row:
    """Take of each answer the side that its node enforces."""
    halves: Mapping[str, Row] = {"egress": egress, "ingress": ingress}
    verdicts = [answer[side]["verdict"] for side, answer in halves.items()]
    others = {"egress": "ingress:", "ingress": "egress:"}
    why = [
        reason
        for side, answer in halves.items()
        for reason in answer["why"]
        if not reason.startswith(others[side])
    ]
    return {
        **ingress,
        "verdict": "denied" if "denied" in verdicts else "allowed",
        "egress": egress["egress"],
        "why": list(dict.fromkeys(why)),
        "revision": min(int(egress["revision"]), int(ingress["revision"])),
        "knownEnds": 2,
    }
