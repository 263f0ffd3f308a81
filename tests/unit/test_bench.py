"""The benchmarks' arithmetic: quantiles, paired ratios with their intervals, and the judgement of a bar."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import summary
from bench.results_file import interval
from bench.stats import Interval, median_of, quantile, ratio_of
from bench.summary import BARS, Bar, find_figures, judge

SAMPLES = st.lists(st.floats(0.1, 1e6), min_size=1, max_size=50)


def median(samples: Sequence[float]) -> float:
    return quantile(samples, 0.5)


@pytest.mark.parametrize(
    ("q", "expected"),
    [(0.0, 1.0), (0.25, 2.0), (0.5, 3.0), (0.9, 4.6), (1.0, 5.0)],
    ids=["lowest", "quarter", "median", "between-two", "highest"],
)
def test_quantiles_interpolate(q: float, expected: float) -> None:
    assert quantile([5.0, 3.0, 1.0, 4.0, 2.0], q) == pytest.approx(expected)


@given(SAMPLES)
def test_the_median_lies_in_its_interval_and_among_the_samples(samples: list[float]) -> None:
    found = median_of(samples)
    assert min(samples) <= found.low <= found.value <= found.high <= max(samples)


def test_pairs_are_resampled_together() -> None:
    drifting = [float(2**number) for number in range(20)]
    found = ratio_of([3 * value for value in drifting], drifting, sum)
    assert (found.value, found.low, found.high) == pytest.approx((3.0, 3.0, 3.0))


def test_unpaired_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        ratio_of([1.0, 2.0], [1.0], sum)


def test_noise_widens_the_interval() -> None:
    source = random.Random(3)
    steady = [100 + source.random() for _ in range(100)]
    noisy = [100 + 50 * source.random() for _ in range(100)]
    narrow, wide = (ratio_of(one, steady, median) for one in (steady, noisy))
    assert wide.high - wide.low > 10 * (narrow.high - narrow.low)


@pytest.mark.parametrize(
    ("bar", "held"),
    [
        (Bar("a", "b", (), at_most=0.5), True),
        (Bar("a", "b", (), at_most=0.49), False),
        (Bar("a", "b", (), at_most=0.5, reached_by="high"), False),
        (Bar("a", "b", (), at_least=0.6), False),
        (Bar("a", "b", (), at_least=0.6, reached_by="high"), True),
    ],
    ids=["just", "above", "interval-above", "below", "interval-reaches"],
)
def test_a_bar_is_judged_by_the_figure_it_names(bar: Bar, held: bool) -> None:
    assert judge(bar, interval(Interval(0.5, 0.4, 0.6))).startswith("yes" if held else "NO")


OVER = Bar("a", "programs", ("with",), over="without", at_most=1.03)


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        ({"with": [103.0, 206.0, 103.0], "without": [100.0, 200.0, 100.0]}, [1.03]),
        ({"with": [103.0]}, []),
    ],
    ids=["paired", "one-is-missing"],
)
def test_a_bar_may_divide_one_series_by_another(
    raw: dict[str, list[float]],
    found: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(summary, "RESULTS", tmp_path)
    (tmp_path / "programs.json").write_text(json.dumps({"summary": {}, "raw": raw}))
    assert [figure["value"] for figure in find_figures(OVER)] == pytest.approx(found)


@pytest.mark.parametrize("bar", BARS, ids=[bar.what for bar in BARS])
def test_every_bar_has_one_limit(bar: Bar) -> None:
    assert (bar.at_most is None) != (bar.at_least is None)
