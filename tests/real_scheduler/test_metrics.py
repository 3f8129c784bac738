"""Figures on their way through vLLM's scheduler and MultiConnector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from real_scheduler.harness import Engine, ours
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
)
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from vllm_ctx_offload.stats import parse_key

MakeEngine = Callable[..., Engine]
PROMPT = list(range(1, 201))  # six blocks and 8 tokens
PAGE_BYTES = 32 * 2 * 2 * 32 * 4


def two_of_ours() -> dict[str, Any]:
    """Returns two pools, of 4 and of 16 chunks."""
    parts = [ours(cpu_bytes_to_use=num * PAGE_BYTES) for num in (4, 16)]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": parts},
    }


def figures(engine: Engine, connector: int) -> dict[tuple[str, ...], Any]:
    found = {}
    for text, value in engine.stats.items():
        key = parse_key(text)
        if key.connector == connector:
            found[key.name, *key.labels] = value
    return found


def test_gauges_and_counters_of_an_engine_are_those_of_its_pool(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(kv_transfer=ours(cpu_bytes_to_use=16 * PAGE_BYTES))
    engine.run(PROMPT)
    engine.settle()
    found = figures(engine, 0)
    assert found["capacity_bytes",] == 16 * PAGE_BYTES
    assert found["resident_bytes", "default"] == 6 * PAGE_BYTES
    assert found["stored_bytes", "default"] == 6 * PAGE_BYTES
    assert found["pinned_bytes",] == found["disabled",] == 0


def test_figures_of_two_of_ours_are_never_added_up(make_engine: MakeEngine) -> None:
    """1. Both store a prompt. 2. It comes back from the first, as far as that holds
    it, though the second has more."""
    engine = make_engine(kv_transfer=two_of_ours())
    engine.run(PROMPT)
    engine.scheduler.reset_prefix_cache()
    engine.run(PROMPT)
    engine.settle()
    first, second = figures(engine, 0), figures(engine, 1)
    assert (first["capacity_bytes",], second["capacity_bytes",]) == (
        4 * PAGE_BYTES,
        16 * PAGE_BYTES,
    )
    assert first["resident_bytes", "default"] == 4 * PAGE_BYTES
    assert second["resident_bytes", "default"] == 6 * PAGE_BYTES
    for found in (first, second):
        assert found["lookup_tokens", "default"] == 2 * len(PROMPT)
        lookups = found["hit_tokens", "default"] + found["missed_tokens", "default"]
        assert lookups == 2 * len(PROMPT)
    assert first["hit_tokens", "default"] == 4 * 32
    assert second["hit_tokens", "default"] == 6 * 32
    assert first["loaded_bytes", "default"] == 4 * PAGE_BYTES
    assert second["loaded_bytes", "default"] == 0


def test_vllms_multi_connector_shows_two_of_ours_apart(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_transfer=two_of_ours())
    engine.run(PROMPT)
    engine.settle()
    metrics = MultiConnector.build_prom_metrics(
        engine.config,
        {kind: kind for kind in (Counter, Gauge, Histogram)},
        ["engine"],
        {0: ["0"]},
    )
    try:
        metrics.observe({"CtxOffloadConnector": engine.stats}, 0)
        labels = {"engine": "0", "tenant": "default"}
        resident = [
            REGISTRY.get_sample_value(
                "vllm:ctx_offload_resident_bytes", {**labels, "connector": connector}
            )
            for connector in ("0", "1")
        ]
        created = REGISTRY.get_sample_value(
            "vllm:ctx_offload_hit_tokens_created", {**labels, "connector": "0"}
        )
    finally:
        unregister_vllm_metrics()
    assert resident == [4 * PAGE_BYTES, 6 * PAGE_BYTES]
    assert created is None, "samples that nearly double a scrape"
