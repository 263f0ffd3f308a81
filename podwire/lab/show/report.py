"""The table that a demo ends in: a fact is in it only when it was seen to hold, or not to, in this run."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from podwire.lab.traffic import Attempt


@dataclass
class Shown:
    """One line of the final table."""

    what: str
    ok: bool
    figure: str


@dataclass
class Report:
    """What was shown so far."""

    lines: list[Shown] = field(default_factory=list)

    def add(self, what: str, ok: bool, figure: str) -> None:
        """Note a fact, and say it at once."""
        self.lines.append(Shown(what, ok, figure))
        print(f"    {'ok' if ok else 'FAILED'}: {what}: {figure}", flush=True)

    def add_attempts(self, what: str, attempts: Sequence[Attempt]) -> None:
        """Note whether all of some connections came about, and the slowest."""
        good = [attempt for attempt in attempts if attempt.ok]
        slowest = max((attempt.ms for attempt in good), default=0.0)
        failed = "; ".join(attempt.answer for attempt in attempts if not attempt.ok)
        figure = f"{len(good)} of {len(attempts)}, slowest {slowest:.1f} ms"
        holds = bool(good) and len(good) == len(attempts)
        self.add(what, holds, figure + (f" ({failed})" if failed else ""))

    @property
    def holds(self) -> bool:
        """Tell whether all of it held."""
        return bool(self.lines) and all(line.ok for line in self.lines)

    def print_table(self, seconds: float) -> None:
        """Print all facts and how many held."""
        width = max((len(line.what) for line in self.lines), default=0)
        print(f"\n{'shown'.ljust(width)}   held   figure")
        for line in self.lines:
            print(f"{line.what.ljust(width)}   {'yes ' if line.ok else 'NO  '}   {line.figure}")
        good = sum(line.ok for line in self.lines)
        print(f"\n{good} of {len(self.lines)} held, in {seconds:.0f} s")


def say(line: str) -> None:
    """Say what comes next."""
    print(f"==> {line}", flush=True)
