"""Figures for Prometheus: names, buckets, labels, and what is looked up at a scrape."""

import sys
import threading

from prometheus_client.parser import text_string_to_metric_families

from podwire.agent.metrics import BUCKETS_S, COUNTERS, HISTOGRAMS, Gauge, Metrics


def scrape(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = metrics.render().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_name_begins_with_podwire() -> None:
    metrics = Metrics()
    for name, (_, labels) in HISTOGRAMS.items():
        metrics._observe(name, tuple("x" for _ in labels), 0.001)
    for name, (_, labels) in COUNTERS.items():
        metrics.count(name, tuple("x" for _ in labels))
    samples = scrape(metrics)
    assert samples
    assert all(name.startswith("podwire_") for name, _ in samples)


def test_buckets_are_cumulative_and_end_at_infinity() -> None:
    metrics = Metrics()
    for seconds in (0.0005, 0.0006, 4.0, 100.0):
        metrics.observe_request("ADD", "ok", seconds)
    samples = scrape(metrics)
    name = "podwire_cni_request_seconds"
    labels = (("command", "ADD"), ("outcome", "ok"))

    def bucket(bound: str) -> float:
        return samples[f"{name}_bucket", tuple(sorted((*labels, ("le", bound))))]

    assert bucket("0.0005") == 1
    assert bucket("0.001") == 2
    assert bucket("5.0") == 3
    assert bucket(str(BUCKETS_S[-1])) == 3
    assert bucket("+Inf") == samples[f"{name}_count", labels] == 4
    assert samples[f"{name}_sum", labels] == 0.0005 + 0.0006 + 4.0 + 100.0


def test_outcomes_are_told_apart() -> None:
    metrics = Metrics()
    metrics.observe_request("ADD", "ok", 0.001)
    metrics.observe_request("ADD", "exhausted", 0.001)
    counts = {
        labels: value
        for (name, labels), value in scrape(metrics).items()
        if name.endswith("_count")
    }
    assert counts == {
        (("command", "ADD"), ("outcome", "ok")): 1,
        (("command", "ADD"), ("outcome", "exhausted")): 1,
    }


def test_figures_are_looked_up_at_each_scrape() -> None:
    metrics = Metrics()
    value: dict[tuple[str, ...], float] = {("ready",): 1.0}
    metrics.look_up([Gauge("endpoints", "Endpoints by state", ("state",), lambda: value)])
    assert scrape(metrics)["podwire_endpoints", (("state", "ready"),)] == 1
    value[("ready",)] = 2.0
    assert scrape(metrics)["podwire_endpoints", (("state", "ready"),)] == 2


def test_a_looked_up_counter_has_the_suffix_of_counters() -> None:
    metrics = Metrics()
    metrics.look_up([Gauge("drops", "Drops", ("reason",), lambda: {("mtu",): 3.0}, counter=True)])
    assert scrape(metrics)["podwire_drops_total", (("reason", "mtu"),)] == 3


def test_a_figure_that_cannot_be_read_leaves_the_others() -> None:
    def fail() -> dict[tuple[str, ...], float]:
        raise OSError("gone")

    metrics = Metrics()
    metrics.look_up([Gauge("bad", "x", (), fail), Gauge("good", "x", (), lambda: {(): 1.0})])
    samples = scrape(metrics)
    assert samples["podwire_good", ()] == 1
    assert ("podwire_bad", ()) not in samples


def test_counting_from_many_threads_loses_nothing() -> None:
    metrics = Metrics()

    def work() -> None:
        for _ in range(1000):
            metrics.count("spool_replayed", ("done",))
            metrics.observe_step("ADD", "guard", 1.0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    samples = scrape(metrics)
    assert samples["podwire_spool_replayed_total", (("outcome", "done"),)] == 4000
    labels = (("operation", "ADD"), ("step", "guard"))
    assert samples["podwire_operation_step_seconds_count", labels] == 4000
