"""The demo's part about policy: a flow runs, a policy cuts it, the drop names the policy, the trace explains it.

Called by `lab.show.demo`. Everything is done by the commands that a person would type.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from podwire.kernel import spawn
from podwire.lab import traffic
from podwire.lab.show.background import Background, going_on, wait_until
from podwire.lab.show.drops import wait_for_drop
from podwire.lab.state import Pod
from podwire.model.errors import Unavailable

ONLY_PROXY: Final = """\
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: web-only-from-proxy, namespace: default}
spec:
  podSelector: {matchLabels: {app: web}}
  ingress:
  - from: [{podSelector: {matchLabels: {app: proxy}}}]
    ports: [{port: 80, protocol: TCP}]
"""
_EVERY_S: Final = 0.01
_CUT_DEADLINE_S: Final = 60.0
_REPLY_S: Final = 0.2

Add = Callable[[str, bool, str], None]
"""Notes a fact: what, whether it held, a figure."""


@dataclass
class _Asker(Background):
    """Asks a UDP server all the time on one flow, and remembers when an answer last came."""

    pod: Pod
    target: str
    last_answer_s: float = 0.0
    answered: int = 0

    def run(self) -> None:
        with traffic.socket_in(self.pod.netns, self.target, "udp") as client:
            client.settimeout(_REPLY_S)
            client.connect((self.target, 80))
            while not self.stop.wait(_EVERY_S):
                try:
                    client.send(b"?")
                    client.recv(512)
                except OSError:
                    continue
                self.last_answer_s = time.monotonic()
                self.answered += 1


def show_policy(lab: str, pods: dict[str, Pod], add: Add) -> None:
    """Apply a policy to a running flow and take it away again."""
    web, client = pods["web"], pods["client"]
    asker = _Asker(client, web.addresses[0])
    with going_on(asker):
        _until(lambda: asker.answered > 0)
        run_podwire(lab, "apply", "-f", "-", stdin=ONLY_PROXY)
        # Not from its beginning: on a busy machine the command takes a second to start.
        applied_s = time.monotonic()
        _until(lambda: time.monotonic() - asker.last_answer_s > 2 * _REPLY_S)
        cut_ms = max(0.0, asker.last_answer_s - applied_s) * 1e3
        add(
            "a policy cuts a running flow",
            cut_ms < 1000,
            f"last answer {cut_ms:.0f} ms after `podwire apply` answered",
        )
    _show_drop(lab, web, client, add)
    _show_trace(lab, add)
    run_podwire(lab, "delete", "networkpolicy", "web-only-from-proxy")
    back = traffic.connect(client.netns, web.addresses[0], 80)
    add("and without it the flow is back", back.ok, f"{back.ms:.1f} ms")


def _show_drop(lab: str, web: Pod, client: Pod, add: Add) -> None:
    def provoke() -> None:
        traffic.connect(client.netns, web.addresses[0], 80, timeout_s=_REPLY_S)

    flow = wait_for_drop(lab, client.node, provoke, source=client.addresses[0]) or {}
    named = [policy["name"] for policy in flow.get("policies", ())]
    add(
        "the drop carries the policy's name",
        flow.get("reason") == "policy" and named == ["web-only-from-proxy"],
        f"{flow.get('reason', 'no event was seen')}: {', '.join(named)}",
    )


def _show_trace(lab: str, add: Add) -> None:
    answer = json.loads(
        run_podwire(
            lab,
            *("policy", "trace", "--from", "pod:default/client", "--to", "pod:default/web"),
            *("--port", "80/tcp", "--node", "node1", "-o", "json"),
            may_fail=True,
        )
    )
    add(
        "the trace says why",
        answer.get("verdict") == "denied" and bool(answer.get("why")),
        str((answer.get("why") or ["nothing"])[0]),
    )


def run_podwire(lab: str, *arguments: str, stdin: str = "", may_fail: bool = False) -> str:
    """Run a command of `podwire` on a lab; gives what it prints. Unavailable carries its words when it fails."""
    program = Path(sys.executable).parent / "podwire"
    done = spawn.run(
        [str(program), *arguments, "--lab", lab], input_bytes=stdin.encode(), timeout_s=30
    )
    if done.status and not may_fail:
        raise Unavailable(f"podwire {' '.join(arguments)}: {done.stderr.decode().strip()}")
    return done.stdout.decode()


def _until(holds: Callable[[], bool]) -> None:
    wait_until(holds, _CUT_DEADLINE_S, _EVERY_S)
