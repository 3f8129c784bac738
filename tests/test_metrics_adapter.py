"""The counters as Prometheus shows them and as vLLM logs them."""

from __future__ import annotations

import functools

import pytest
from prometheus_client import CollectorRegistry, Counter

from vllm_ctx_offload.adapters.metrics import PrometheusCounters, summarize
from vllm_ctx_offload.stats import OffloadStats

LABELS = {
    "lookup_tokens": ("tenant",),
    "hit_tokens": ("tenant",),
    "missed_tokens": ("tenant",),
    "skipped_tokens": ("tenant", "reason"),
    "stored_bytes": ("tenant",),
    "loaded_bytes": ("tenant",),
    "evicted_chunks": ("tenant", "by"),
    "rejected_stores": ("tenant", "reason"),
    "hints_rejected": ("field", "reason"),
    "transfer_failures": ("direction",),
}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def counters(registry: CollectorRegistry) -> PrometheusCounters:
    return PrometheusCounters(
        functools.partial(Counter, registry=registry),
        ["model_name", "engine"],
        {0: ["llama", "0"], 1: ["llama", "1"]},
    )


def test_every_counter_is_registered_with_a_help_text(
    registry: CollectorRegistry, counters: PrometheusCounters
) -> None:
    metrics = {metric.name: metric for metric in registry.collect()}
    assert {*metrics} == {f"vllm:ctx_offload_{name}" for name in LABELS}
    for metric in metrics.values():
        assert metric.documentation.endswith((".", "good.", "look."))


@pytest.mark.parametrize("name", LABELS)
def test_increments_add_up_under_the_documented_name_and_labels(
    registry: CollectorRegistry, counters: PrometheusCounters, name: str
) -> None:
    stats = OffloadStats()
    values = [f"{label} value" for label in LABELS[name]]
    for by in (2, 3):
        stats.count(name, *values, by=by)
        counters.observe(stats.take(), engine=1)
    labels = dict(zip(LABELS[name], values, strict=True))
    labels |= {"model_name": "llama", "engine": "1"}
    exposed = f"vllm:ctx_offload_{name}_total"
    assert registry.get_sample_value(exposed, labels) == 5
    assert registry.get_sample_value(exposed, {**labels, "engine": "0"}) is None


def test_engines_are_counted_apart(
    registry: CollectorRegistry, counters: PrometheusCounters
) -> None:
    stats = OffloadStats()
    for engine in (0, 1):
        stats.count("hit_tokens", "acme", by=engine + 1)
        counters.observe(stats.take(), engine)
    samples = [
        registry.get_sample_value(
            "vllm:ctx_offload_hit_tokens_total",
            {"tenant": "acme", "model_name": "llama", "engine": engine},
        )
        for engine in ("0", "1")
    ]
    assert samples == [1, 2]


def test_a_counter_that_is_not_registered_changes_nothing(
    registry: CollectorRegistry, counters: PrometheusCounters
) -> None:
    stats = OffloadStats()
    stats.count("of_a_later_release", "acme")
    before = [*registry.collect()]
    counters.observe(stats.take(), engine=0)
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
