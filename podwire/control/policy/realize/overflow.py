"""Name the policies that need the most room when policies do not fit, so that a person knows which to change.

Called by the engine when nothing can make room. Pure.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Final

from podwire.control.policy.resolve.rule_numbers import RuleNumbers
from podwire.control.policy.resolve.subject import Subject
from podwire.model.errors import PolicyOverflow

POLICIES_NAMED: Final = 3
HINT: Final = "write fewer or broader rules, or raise `policy_entries`"


def explain_overflow(
    error: PolicyOverflow, subject: Subject, subjects: Iterable[Subject], rules: RuleNumbers
) -> PolicyOverflow:
    """Add to the error which policies need the most entries: of the subject that does not fit, and of the largest
    subject if that is another one."""
    largest = max(subjects, key=Subject.count_wanted, default=subject)
    message = f"{error.message}; {_describe(subject, rules)}"
    if largest.count_wanted() > subject.count_wanted():
        message += f"; the largest is {_describe(largest, rules)}"
    return PolicyOverflow(f"{message} (setting `policy_entries`)", hint=error.hint or HINT)


def _describe(subject: Subject, rules: RuleNumbers) -> str:
    counts: Counter[str] = Counter()
    for blocks in subject.families:
        for block in blocks.values():
            names = (rules.name(entry.rule) for entry in block.rows.values())
            counts.update(str(name.policy) for name in names if name is not None)
    named = ", ".join(f"{name} ({count})" for name, count in counts.most_common(POLICIES_NAMED))
    return f"identity {subject.number} with {subject.count_wanted()} entries, most of {named}"
