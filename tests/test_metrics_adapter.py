"""The figures as Prometheus shows them and as vLLM logs them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from vllm_ctx_offload.adapters.catalogue import METRICS, PREFIX, SECONDS_BUCKETS
from vllm_ctx_offload.adapters.metrics import (
    MetricClasses,
    PrometheusMetrics,
    summarize,
)
from vllm_ctx_offload.stats import (
    GAUGES,
    HISTOGRAMS,
    OffloadStats,
    of_connector,
    parse_key,
)

COUNTERS = [name for name, metric in METRICS.items() if metric.kind == "counter"]
OBSERVED = (0.0005, 0.003, 0.004, 40.0)  # seconds
BASE = {"model_name": "llama", "engine": "0", "connector": "0"}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> PrometheusMetrics:
    classes = (functools.partial(c, registry=registry) for c in _CLASSES)
    return PrometheusMetrics(
        MetricClasses(*classes),
        ["model_name", "engine"],
        {0: ["llama", "0"], 1: ["llama", "1"]},
    )


_CLASSES: tuple[Any, ...] = (Counter, Gauge, Histogram)


def value_of(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"vllm:ctx_offload_{name}", {**BASE, **labels})


def test_every_metric_is_registered_with_a_help_text_on_high_values(
    registry: CollectorRegistry, metrics: PrometheusMetrics
) -> None:
    found = {metric.name: metric for metric in registry.collect()}
    assert {*found} == {PREFIX + name for name in METRICS}
    for name, metric in METRICS.items():
        assert found[PREFIX + name].type == metric.kind
        assert found[PREFIX + name].documentation == metric.help
        if name != "transfer_failures":
            assert "High" in metric.help, name
        assert metric.help.endswith(".")


def test_the_scheduler_and_the_metrics_agree_which_kind_a_figure_is() -> None:
    def names(kind: str) -> set[str]:
        return {name for name, metric in METRICS.items() if metric.kind == kind}

    assert names("gauge") == GAUGES
    shown = {"load_seconds", "store_seconds"} | HISTOGRAMS - {"transfer_seconds"}
    assert names("histogram") == shown


@pytest.mark.parametrize("name", COUNTERS)
def test_increments_add_up_under_the_documented_name_and_labels(
    registry: CollectorRegistry, metrics: PrometheusMetrics, name: str
) -> None:
    stats = OffloadStats()
    values = [f"{label} value" for label in METRICS[name].labels]
    for by in (2, 3):
        stats.count(name, *values, by=by)
        metrics.observe(stats.take(), engine=1)
    labels = dict(zip(METRICS[name].labels, values, strict=True))
    assert value_of(registry, f"{name}_total", engine="1", **labels) == 5
    assert value_of(registry, f"{name}_total", engine="0", **labels) is None


@pytest.mark.parametrize("name", sorted(GAUGES))
def test_a_gauge_shows_the_last_value(
    registry: CollectorRegistry, metrics: PrometheusMetrics, name: str
) -> None:
    stats = OffloadStats()
    values = [f"{label} value" for label in METRICS[name].labels]
    labels = dict(zip(METRICS[name].labels, values, strict=True))
    for to in (7, 3):
        stats.set(name, *values, to=to)
        metrics.observe(stats.take(), engine=0)
        metrics.observe(stats.take(), engine=0)  # nothing was set: nothing taken
        assert value_of(registry, name, **labels) == to


@pytest.mark.parametrize(
    ("figure", "name"),
    [
        (("transfer_seconds", "load"), "load_seconds"),
        (("transfer_seconds", "store"), "store_seconds"),
        (("load_wait_seconds",), "load_wait_seconds"),
    ],
)
def test_each_observation_falls_into_its_bucket(
    registry: CollectorRegistry,
    metrics: PrometheusMetrics,
    figure: tuple[str, ...],
    name: str,
) -> None:
    stats = OffloadStats()
    for seconds in OBSERVED:
        stats.observe(*figure, value=seconds)
    metrics.observe(stats.take(), engine=0)
    assert value_of(registry, f"{name}_count") == 4
    assert value_of(registry, f"{name}_sum") == pytest.approx(40.0075)
    buckets = [
        value_of(registry, f"{name}_bucket", le=str(bound)) for bound in SECONDS_BUCKETS
    ]
    expected = [sum(v <= bound for v in OBSERVED) for bound in SECONDS_BUCKETS]
    assert buckets == expected


def test_engines_and_connectors_are_shown_apart(
    registry: CollectorRegistry, metrics: PrometheusMetrics
) -> None:
    stats = OffloadStats()
    for engine in (0, 1):
        for connector in (0, 1):
            stats.count("hit_tokens", "acme", by=1 + engine + 2 * connector)
            stats.set("resident_bytes", "acme", to=10 * engine + connector)
            figures = of_connector(connector, stats.take())
            metrics.observe(figures, engine)
    for engine in (0, 1):
        for connector in (0, 1):
            where = {"engine": str(engine), "connector": str(connector)}
            hits = value_of(registry, "hit_tokens_total", tenant="acme", **where)
            resident = value_of(registry, "resident_bytes", tenant="acme", **where)
            assert hits == 1 + engine + 2 * connector
            assert resident == 10 * engine + connector


def test_a_figure_that_is_not_registered_changes_nothing(
    registry: CollectorRegistry, metrics: PrometheusMetrics
) -> None:
    stats = OffloadStats()
    stats.count("of_a_later_release", "acme")
    before = [*registry.collect()]
    metrics.observe(stats.take(), engine=0)
    assert [*registry.collect()] == before


def test_the_summary_adds_up_all_tenants() -> None:
    stats = OffloadStats()
    for tenant in ("acme", "zeta"):
        stats.count("lookup_tokens", tenant, by=100)
        stats.count("hit_tokens", tenant, by=60)
        stats.count("stored_bytes", tenant, by=1024**2 // 4)
        stats.count("loaded_bytes", tenant, by=3 * 1024**2)
        stats.count("evicted_chunks", tenant, "acme", by=2)
    stats.count("transfer_failures", "load")
    stats.observe("transfer_seconds", "load", value=0.1)
    assert summarize(stats.take()) == {
        "lookup tokens": 200,
        "host hit tokens": 120,
        "stored MiB": 0.5,
        "loaded MiB": 6.0,
        "evicted chunks": 4,
        "failed transfers": 1,
    }


def test_the_summary_of_nothing_is_zeros() -> None:
    assert {*summarize({}).values()} == {0}
    assert summarize({}).keys() == summarize({'["hit_tokens", "acme"]': 1}).keys()


def test_the_summary_keeps_two_connectors_apart() -> None:
    figures = {'["hit_tokens", "acme"]': 1}
    both = figures | of_connector(1, {'["hit_tokens", "acme"]': 2})
    summary = summarize(both)
    assert summary["host hit tokens"] == 1
    assert summary["host hit tokens (1)"] == 2
    assert {parse_key(key).connector for key in both} == {0, 1}
