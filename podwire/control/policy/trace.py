"""Answer "may X talk to Y, and why?" in the document that the command line and REST show.

The doors call it, with X and Y already resolved to parties. Pure; the answer is the oracle's, not the datapath's.
"""

from collections.abc import Sequence
from typing import Any

from podwire.control.policy.oracle import (
    DEFAULT_SETTINGS,
    Basis,
    Decision,
    Question,
    Settings,
    evaluate_flow,
)
from podwire.control.policy.rule import CidrGroup, PolicyRules
from podwire.model.policy import Verdict

_WORDS = {Verdict.ALLOW: "allowed", Verdict.DENY: "denied"}
_NO_ENDPOINT = "no-endpoint"
"""Basis of an end for which no policy holds."""


def trace(
    policies: Sequence[PolicyRules],
    groups: Sequence[CidrGroup],
    flow: Question,
    *,
    revision: int,
    settings: Settings = DEFAULT_SETTINGS,
) -> dict[str, Any]:
    """Give `verdict`, `egress` and `ingress` ({`verdict`, `policy`, `rule`, `basis`}), `why`, `audit`, `revision`.

    `flow` is asked from its source, as in `evaluate_flow`; `revision` is that of the policies. `verdict` is what they
    say; with `audit` true what they deny passes and is reported.
    """
    decided = evaluate_flow(policies, groups, flow, settings)
    why = [
        f"{direction}: {line}"
        for direction, decision in (("egress", decided.egress), ("ingress", decided.ingress))
        for line in (decision.why if decision else ())
    ]
    return {
        "verdict": _WORDS[decided.verdict],
        "egress": _write_end(decided.egress),
        "ingress": _write_end(decided.ingress),
        "why": why,
        "audit": decided.passes and decided.verdict is Verdict.DENY,
        "revision": revision,
    }


def _write_end(decision: Decision | None) -> dict[str, str]:
    if decision is None:
        return {"verdict": "allowed", "policy": "", "rule": "", "basis": _NO_ENDPOINT}
    named = decision.rule
    rule = named.path if named else ""
    if decision.basis is Basis.DEFAULT_DENY:
        rule = Basis.DEFAULT_DENY.value
    return {
        "verdict": _WORDS[decision.verdict],
        "policy": str(named.policy) if named else "",
        "rule": rule,
        "basis": decision.basis.value,
    }
