"""What the pool holds, as the scheduler side reports it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.request import Request

from vllm_ctx_offload.adapters.catalogue import METRICS
from vllm_ctx_offload.adapters.scheduler_side import SchedulerSide
from vllm_ctx_offload.core import HostMemoryManager
from vllm_ctx_offload.messages import WorkerReport
from vllm_ctx_offload.scheduler import StepEvents, TableUpdate

MakeSide = Callable[..., SchedulerSide]
MakeRequest = Callable[..., Request]
BLOCKS = [1, 2, 3, 4, 5]
TENANTS: dict[str, Any] = {
    "acme": {"limit": 30, "reserved": 25},
    "zeta": {},
}  # chunks have 10 bytes


def taken(side: SchedulerSide) -> dict[tuple[str, ...], Any]:
    return {tuple(json.loads(key)): value for key, value in side.take_stats().items()}


def compute(side: SchedulerSide, request: Request) -> int:
    """Computes a prompt of 16 tokens; returns how many chunks are being stored."""
    side.lookup(request, 0)
    side.on_allocated(request, [[1, 2, 3, 4]], 0)
    table = TableUpdate(request.request_id, [[1, 2, 3, 4]], 0, replace=True)
    plan = side.plan_step(lambda: StepEvents({request.request_id: 16}, [table]))
    return sum(len(job.rows) for job in plan.stores)


def test_the_first_figures_hold_every_known_series(make_side: MakeSide) -> None:
    """Prometheus sees an increase only of what was there before."""
    figures = taken(make_side(tenants=TENANTS))
    tenants = ("acme", "zeta", "default")
    gauges = {
        ("capacity_bytes",): 160,
        ("pinned_bytes",): 0,
        ("protected_bytes",): 0,
        ("disabled",): 0,
        **{("resident_bytes", name): 0 for name in tenants},
        **{("limit_bytes", name): 160 for name in tenants},
        **{("reserved_bytes", name): 0 for name in tenants},
        ("limit_bytes", "acme"): 30,
        ("reserved_bytes", "acme"): 20,  # whole chunks
    }
    per_tenant = ("lookup_tokens", "hit_tokens", "missed_tokens")
    per_tenant += ("stored_bytes", "loaded_bytes")
    counters: dict[tuple[str, ...], Any] = {
        (counter, name): 0 for counter in per_tenant for name in tenants
    }
    counters |= {("transfer_failures", way): 0 for way in ("load", "store")}
    observed: dict[tuple[str, ...], Any] = {
        ("transfer_seconds", "load"): [],
        ("transfer_seconds", "store"): [],
        ("load_wait_seconds",): [],
    }
    assert figures == gauges | counters | observed


def test_gauges_follow_a_store_and_are_taken_when_they_change(
    make_side: MakeSide, make_request: MakeRequest
) -> None:
    side = make_side(tenants=TENANTS)
    taken(side)
    request = make_request(16, params={"ctx": {"tenant": "zeta", "priority": 80}})
    assert compute(side, request) == 4
    first = taken(side)
    assert first["resident_bytes", "zeta"] == first["pinned_bytes",] == 40
    assert first["protected_bytes",] == 40
    assert ("resident_bytes", "acme") not in first
    assert taken(side) == {}
    side.on_worker_report(WorkerReport(Counter([0])))
    assert taken(side) == {("stored_bytes", "zeta"): 40, ("pinned_bytes",): 0}
    side.reset()
    after = taken(side)
    assert after == {("resident_bytes", "zeta"): 0, ("protected_bytes",): 0}


def test_a_step_looks_at_no_tenant_that_nothing_happened_to(
    make_side: MakeSide, make_request: MakeRequest
) -> None:
    """P8: thousands of declared tenants cost a step nothing."""
    side = make_side(tenants={f"tenant{n}": {} for n in range(1_000)})
    taken(side)
    compute(side, make_request(16, params={"ctx": {"tenant": "tenant7"}}))
    assert isinstance(side.manager, HostMemoryManager)
    assert side.manager.take_changed() == {"tenant7": 4}
    assert side.manager.take_changed() == {}


def test_behind_a_reuse_filter_gauges_are_those_of_the_pool(
    make_side: MakeSide, make_request: MakeRequest
) -> None:
    side = make_side(tenants=TENANTS, store_threshold=2)
    assert compute(side, make_request(16, "one")) == 0
    assert compute(side, make_request(16, "two")) == 4
    assert taken(side)["resident_bytes", "default"] == 40


def test_plain_lru_reserves_and_limits_nothing(make_side: MakeSide) -> None:
    figures = taken(make_side(tenants=TENANTS, eviction_policy="lru"))
    assert figures["reserved_bytes", "acme"] == 0
    assert figures["limit_bytes", "acme"] == 160


def test_after_an_internal_error_the_gauge_says_so_and_counting_goes_on(
    make_side: MakeSide, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = make_side()
    taken(side)
    compute(side, make_request(16))

    def fail() -> dict[str, int]:
        raise RuntimeError("resident")

    monkeypatch.setattr(side._gauges._memory, "take_changed", fail)
    figures = taken(side)
    assert figures["disabled",] == 1
    assert figures["lookup_tokens", "default"] == 16
    assert taken(side) == {}


def test_lookups_are_hits_misses_and_skipped(
    make_side: MakeSide, make_request: MakeRequest
) -> None:
    side = make_side(tenants=TENANTS)
    totals: Counter[tuple[str, ...]] = Counter()
    for index in range(9):
        tenant = ("acme", "zeta", "nobody")[index % 3]
        params = {"ctx": {"tenant": tenant, "load": index != 6}}
        request = make_request(17 + index % 2, f"r{index}", params)
        num_found, _ = side.lookup(request, 0)
        side.on_allocated(request, [BLOCKS], num_found or 0)
        if not num_found:
            table = TableUpdate(request.request_id, [BLOCKS], 0, replace=True)
            events = StepEvents({request.request_id: 17}, [table])
            plan = side.plan_step(lambda events=events: events)
        else:
            plan = side.plan_step(StepEvents)
        done = [job.job_id for job in (*plan.stores, *plan.loads)]
        side.on_worker_report(WorkerReport(Counter(done)))
        totals.update(
            {k: v for k, v in taken(side).items() if k[0].endswith("_tokens")}
        )
    for tenant in ("acme", "zeta", "default"):
        parts = sum(
            value
            for (name, *labels), value in totals.items()
            if name in ("hit_tokens", "missed_tokens", "skipped_tokens")
            and labels[0] == tenant
        )
        assert totals["lookup_tokens", tenant] == parts > 0
        assert totals["hit_tokens", tenant] > 0
    assert totals["skipped_tokens", "acme", "load_off"] == 17


def test_every_figure_of_the_scheduler_side_is_in_the_catalogue(
    make_side: MakeSide,
) -> None:
    names = {key[0] for key in taken(make_side(tenants=TENANTS))}
    assert names - {"transfer_seconds"} <= METRICS.keys()
