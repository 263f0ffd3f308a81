"""What Prometheus reads: counters that the agent keeps, and figures that are looked up at each scrape.

`agent.node` hands the `Metrics` to every part that counts something; the API and the metrics listener call `render`.
Any thread on the ADD path may count: what it tells is only noted, and sorted into buckets behind the answer. The
client library is imported at the first scrape, so that a node that nobody scrapes does not pay for it.
"""

import bisect
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from podwire.model.errors import PodwireError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

BUCKETS_S = (
    0.0005,
    0.001,
    0.002,
    0.003,
    0.005,
    0.0075,
    0.01,
    0.02,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)
NOTED_FOR_A_SORT = 64
"""So much is sorted behind a request: sorting is quicker when it goes on for some time."""
NOTED_MAX = 256
"""So much is noted at most before it is sorted, whatever goes on."""
_log = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class _Buckets:
    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(BUCKETS_S, seconds)] += 1
        self.sum_s += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        total = 0
        pairs: list[tuple[str, float]] = []
        for bound, count in zip((*BUCKETS_S, None), self.counts, strict=True):
            total += count
            pairs.append(("+Inf" if bound is None else str(bound), float(total)))
        return pairs


@dataclass(frozen=True)
class Gauge:
    """One figure that is looked up at each scrape: values by label values."""

    name: str
    about: str
    labels: tuple[str, ...]
    read: Callable[[], Mapping[tuple[str, ...], float]]
    counter: bool = False

    @classmethod
    def single(
        cls, name: str, about: str, read: Callable[[], float], *, counter: bool = False
    ) -> "Gauge":
        """Give a figure that has one value and no labels."""
        return cls(name, about, (), lambda: {(): float(read())}, counter)


class Metrics:
    """Counters and histograms of one agent, and the figures it looks up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._noted: deque[tuple[str, tuple[str, ...], float]] = deque()
        """What was observed and is in no bucket yet."""
        self._histograms: dict[tuple[str, tuple[str, ...]], _Buckets] = {}
        self._counters: dict[tuple[str, tuple[str, ...]], float] = {}
        self._gauges: list[Gauge] = []
        self.requests_observed = 0
        """CNI requests ever answered."""

    def observe_request(self, command: str, outcome: str, seconds: float) -> None:
        """Count one CNI request: `outcome` is `ok` or the kind of the error."""
        with self._lock:
            self.requests_observed += 1
        self._observe("cni_request_seconds", (command, outcome), seconds)
        if len(self._noted) >= NOTED_FOR_A_SORT:
            self._sort()

    def observe_step(self, op: str, step: str, ms: float) -> None:
        """Count one step of an operation (the signature that `AttachService` calls)."""
        self._observe("operation_step_seconds", (op, step), ms / 1000)

    def observe_journal(self, seconds: float) -> None:
        """Count one durable write of the journal."""
        self._observe("journal_write_seconds", (), seconds)

    def observe_api(self, method: str, status: int, seconds: float) -> None:
        """Count one API request."""
        self._observe("api_request_seconds", (method, str(status)), seconds)

    def count(self, name: str, labels: tuple[str, ...] = (), by: float = 1) -> None:
        """Add to a counter that is described in COUNTERS."""
        with self._lock:
            key = (name, labels)
            self._counters[key] = self._counters.get(key, 0) + by

    def look_up(self, gauges: Iterable[Gauge]) -> None:
        """Add figures that are read at each scrape."""
        self._gauges.extend(gauges)

    def collect(self) -> "Iterator[Metric]":
        """Give everything as metric families (the protocol of a prometheus_client collector)."""
        # Imported at the first scrape: a restart must be quick.
        from prometheus_client.core import (  # noqa: PLC0415
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        self._sort()
        with self._lock:
            histograms = {
                key: (buckets.cumulative(), buckets.sum_s)
                for key, buckets in self._histograms.items()
            }
            counters = dict(self._counters)
        for name, (about, labels) in HISTOGRAMS.items():
            histogram = HistogramMetricFamily(f"podwire_{name}", about, labels=labels)
            for (figures, values), (pairs, sum_s) in histograms.items():
                if figures == name:
                    histogram.add_metric(values, pairs, sum_s)
            yield histogram
        for name, (about, labels) in COUNTERS.items():
            counter = CounterMetricFamily(f"podwire_{name}", about, labels=labels)
            for (figures, values), value in counters.items():
                if figures == name:
                    counter.add_metric(values, value)
            yield counter
        for gauge in self._gauges:
            kind = CounterMetricFamily if gauge.counter else GaugeMetricFamily
            family = kind(f"podwire_{gauge.name}", gauge.about, labels=gauge.labels)
            for values, value in _read_or_skip(gauge).items():
                family.add_metric(values, value)
            yield family

    def render(self) -> bytes:
        """Write the exposition text."""
        from prometheus_client import CollectorRegistry, generate_latest  # noqa: PLC0415

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def _observe(self, name: str, labels: tuple[str, ...], seconds: float) -> None:
        self._noted.append((name, labels, seconds))
        if len(self._noted) >= NOTED_MAX:
            self._sort()

    def _sort(self) -> None:
        """Put what was noted into its buckets."""
        with self._lock, contextlib.suppress(IndexError):
            while True:
                name, labels, seconds = self._noted.popleft()
                buckets = self._histograms.get((name, labels))
                if buckets is None:
                    buckets = self._histograms[name, labels] = _Buckets()
                buckets.add(seconds)


def _read_or_skip(gauge: Gauge) -> Mapping[tuple[str, ...], float]:
    """One figure that cannot be read (a map, a file) must not hide all the others."""
    try:
        return gauge.read()
    except (PodwireError, OSError) as error:
        _log.warning("read a metric", extra={"key": gauge.name, "error": str(error)})
        return {}


HISTOGRAMS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "cni_request_seconds": (
        "CNI requests, from the whole frame to the reply",
        ("command", "outcome"),
    ),
    "operation_step_seconds": (
        "Steps of ADD and DEL, and phases of a change of policy",
        ("operation", "step"),
    ),
    "journal_write_seconds": ("Durable writes of the journal", ()),
    "api_request_seconds": ("Requests to the API", ("method", "status")),
}
COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "refused_requests": ("Requests refused because of a limit", ("door", "limit")),
    "spool_replayed": ("DELs taken from the spool", ("outcome",)),
    "reconciliations": ("Comparisons of journal and kernel", ("outcome",)),
    "cluster_repairs": ("Repairs of the way to other nodes", ()),
}
