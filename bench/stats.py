"""Medians and ratios with their 95 % interval, from paired samples. Pure: the bootstrap has a fixed seed."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

RESAMPLES = 1000
SEED = 1
_T = TypeVar("_T")


@dataclass(frozen=True)
class Interval:
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


def quantile(samples: Sequence[float], q: float) -> float:
    """Give a quantile by linear interpolation."""
    ordered = sorted(samples)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def median(samples: Sequence[float]) -> float:
    """Give the median."""
    return quantile(samples, 0.5)


def in_turns(names: Sequence[_T], rounds: int) -> Iterator[_T]:
    """Give each name once in each round, in an order that turns from round to round; says when one is over."""
    for number in range(rounds):
        turn = number % len(names)
        yield from (*names[turn:], *names[:turn])
        print(f"round {number + 1} of {rounds}", flush=True)


def ratio_of(
    ours: Sequence[float],
    theirs: Sequence[float],
    figure: Callable[[Sequence[float]], float] = median,
) -> Interval:
    """Give figure(ours) / figure(theirs); pairs are resampled together, so that drift stays in both."""
    pairs = list(zip(ours, theirs, strict=True))
    source = random.Random(SEED)
    resampled = []
    for _ in range(RESAMPLES):
        drawn = source.choices(pairs, k=len(pairs))
        below = figure([two for _, two in drawn])
        resampled.append(figure([one for one, _ in drawn]) / below)
    return Interval(
        figure(ours) / figure(theirs), quantile(resampled, 0.025), quantile(resampled, 0.975)
    )


def median_of(samples: Sequence[float]) -> Interval:
    """Give the median with its interval."""
    source = random.Random(SEED)
    resampled = [quantile(source.choices(samples, k=len(samples)), 0.5) for _ in range(RESAMPLES)]
    return Interval(quantile(samples, 0.5), quantile(resampled, 0.025), quantile(resampled, 0.975))
