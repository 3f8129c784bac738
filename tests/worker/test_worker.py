"""The worker's steps: what is refused, what is counted, each job reported once."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from worker.layouts import NUM_BLOCKS, build

from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.messages import TransferJob, TransferPlan
from vllm_ctx_offload.plan import GroupShape, OffloadPlan
from vllm_ctx_offload.worker import FinishedTransfers, OffloadWorker
from vllm_ctx_offload.worker.transfer import JobResult

NUM_ROWS = 6


def make_plan(bytes_per_block: int, num_rows: int = NUM_ROWS) -> OffloadPlan:
    return OffloadPlan(
        groups=(GroupShape(16),),
        blocks_per_chunk=1,
        tokens_per_hash=16,
        bytes_per_block=bytes_per_block,
        num_workers=1,
        num_slots=num_rows,
    )


@pytest.fixture
def caches() -> dict[str, torch.Tensor]:
    return build("block_first", torch.uint8).caches


@pytest.fixture
def worker(caches: dict[str, torch.Tensor]) -> Iterator[OffloadWorker]:
    block_bytes = sum(cache[0].nbytes for cache in caches.values())
    made = OffloadWorker(make_plan(block_bytes))
    made.register(caches, NUM_BLOCKS)
    yield made
    made.close()


def job(job_id: int, blocks: tuple[int, ...], rows: tuple[int, ...]) -> TransferJob:
    return TransferJob(job_id, f"r{job_id}", blocks, rows)


def finish(worker: OffloadWorker, count: int) -> FinishedTransfers:
    """Runs idle steps until so many jobs ended, and sums them up."""
    total = FinishedTransfers()
    while sum(total.report.num_done.values()) < count:
        worker.before_forward(TransferPlan(idle=True))
        got = worker.finish_step()
        total.loaded_requests |= got.loaded_requests
        total.failed_loads.update(got.failed_loads)
        total.report = total.report.merge(got.report)
    return total


def test_a_block_goes_out_and_comes_back_in_two_steps(
    worker: OffloadWorker, caches: dict[str, torch.Tensor]
) -> None:
    worker.before_forward(TransferPlan())
    worker.start_stores(TransferPlan(stores=(job(0, (3, 4), (5, 1)),)))
    stored = finish(worker, 1)
    assert stored == FinishedTransfers(report=stored.report)
    assert stored.report.num_done == Counter({0: 1})
    expected = {name: cache[[3, 4]].clone() for name, cache in caches.items()}

    worker.start_loads(TransferPlan(loads=(job(1, (7, 9), (5, 1)),)))
    loaded = finish(worker, 1)
    assert loaded.loaded_requests == {"r1"}
    assert loaded.failed_block_ids == set()
    assert loaded.report.failed == set()
    for name, cache in caches.items():
        assert torch.equal(cache[[7, 9]], expected[name])


@pytest.mark.parametrize(
    ("blocks", "rows"),
    [
        ((1,), ()),
        ((1, 2), (0,)),
        ((), (0,)),
        ((1,), (NUM_ROWS,)),
        ((1,), (-1,)),
        ((NUM_BLOCKS,), (0,)),
        ((NUM_BLOCKS - 1, NUM_BLOCKS), (0, 1)),
        ((-1,), (0,)),
    ],
)
@pytest.mark.parametrize("to_host", [True, False])
def test_a_job_outside_cache_or_pool_fails_alone_and_touches_nothing(
    worker: OffloadWorker,
    caches: dict[str, torch.Tensor],
    blocks: tuple[int, ...],
    rows: tuple[int, ...],
    to_host: bool,
) -> None:
    before = {name: cache.clone() for name, cache in caches.items()}
    assert worker._pool is not None
    pool = worker._pool.rows.clone()
    bad = job(7, blocks, rows)
    if to_host:
        worker.start_stores(TransferPlan(stores=(bad,)))
    else:
        worker.start_loads(TransferPlan(loads=(bad,)))
    ended = finish(worker, 1)
    assert ended.report.num_done == Counter({7: 1})
    assert ended.report.failed == {7}
    assert ended.loaded_requests == (set() if to_host else {"r7"})
    assert ended.failed_block_ids == (set() if to_host else set(blocks))
    assert worker.finish_step() == FinishedTransfers()
    for name, cache in caches.items():
        assert torch.equal(cache, before[name])
    assert torch.equal(worker._pool.rows, pool)


def test_a_worker_with_another_plan_than_the_scheduler_side_copies_nothing(
    worker: OffloadWorker,
    caches: dict[str, torch.Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also not within a pool that is as large here; and it says why, once."""
    before = {name: cache.clone() for name, cache in caches.items()}
    assert worker._pool is not None
    pool = worker._pool.rows.clone()
    terms = {**worker._plan.terms, "num_slots": NUM_ROWS + 1}
    for _ in range(2):
        worker.heed(terms)
    worker.before_forward(TransferPlan(late_stores=(job(0, (1,), (0,)),)))
    worker.start_loads(TransferPlan(loads=(job(1, (2,), (1,)),)))
    worker.start_stores(TransferPlan(stores=(job(2, (3,), (2,)),)))
    ended = finish(worker, 3)
    assert ended.report.failed == {0, 1, 2}
    assert ended.failed_loads == {"r1": {2}}
    for name, cache in caches.items():
        assert torch.equal(cache, before[name])
    assert torch.equal(worker._pool.rows, pool)
    assert (
        caplog.text.count("Nothing is copied between the device and host memory") == 1
    )
    assert "num_slots is 6 on the worker and 7 on the scheduler side" in caplog.text


def test_a_worker_with_the_scheduler_sides_plan_copies(worker: OffloadWorker) -> None:
    worker.heed(pickle.loads(pickle.dumps(worker._plan.terms)))
    worker.start_stores(TransferPlan(stores=(job(0, (1,), (0,)),)))
    assert finish(worker, 1).report.failed == set()


def test_a_failed_load_is_reported_with_its_request_and_blocks(
    worker: OffloadWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(worker._transfer, "_copy", broken)
    worker.before_forward(TransferPlan(late_stores=(job(0, (1,), (0,)),)))
    worker.start_loads(TransferPlan(loads=(job(1, (2, 5), (1, 2)),)))
    worker.start_stores(TransferPlan(stores=(job(2, (3,), (3,)),)))
    ended = finish(worker, 3)
    assert ended.loaded_requests == {"r1"}
    assert ended.failed_block_ids == {2, 5}
    assert ended.report.num_done == Counter({0: 1, 1: 1, 2: 1})
    assert ended.report.failed == {0, 1, 2}
    counts = {tuple(json.loads(k)): v for k, v in worker.stats.take().items()}
    assert counts == {
        ("transfer_failures", "store"): 2,
        ("transfer_failures", "load"): 1,
    }


def test_the_time_of_each_copy_is_taken_by_direction(worker: OffloadWorker) -> None:
    worker.start_stores(TransferPlan(stores=(job(0, (1, 2), (0, 1)),)))
    finish(worker, 1)
    ((key, times),) = worker.stats.take().items()
    assert json.loads(key) == ["transfer_seconds", "store"]
    assert len(times) == 1


def test_a_fence_makes_its_step_wait(worker: OffloadWorker) -> None:
    worker.start_stores(TransferPlan(stores=(job(0, (1,), (0,)),)))
    worker.before_forward(TransferPlan(fences=(0,)))
    assert worker.finish_step().report.num_done == Counter({0: 1})


def test_late_stores_come_before_the_fence_that_names_them(
    worker: OffloadWorker,
) -> None:
    late = TransferPlan(late_stores=(job(4, (1,), (0,)),), fences=(4,))
    worker.before_forward(late)
    assert worker.finish_step().report.num_done == Counter({4: 1})


def test_jobs_that_were_open_at_the_end_are_reported_once(
    worker: OffloadWorker,
) -> None:
    jobs = tuple(job(number, (number,), (number,)) for number in range(NUM_ROWS))
    worker.start_stores(TransferPlan(stores=jobs))
    worker.close()
    assert worker.finish_step().report.num_done == Counter(range(NUM_ROWS))
    assert worker.finish_step() == FinishedTransfers()


def test_a_worker_without_a_cache_fails_what_it_is_given() -> None:
    worker = OffloadWorker(make_plan(8))
    worker.before_forward(TransferPlan(late_stores=(job(0, (1,), (0,)),), fences=(0,)))
    worker.start_loads(TransferPlan(loads=(job(1, (2,), (0,)),)))
    ended = worker.finish_step()
    assert ended.report.failed == {0, 1}
    assert ended.failed_block_ids == {2}
    assert not worker.pinned
    worker.close()


def test_closing_twice_is_harmless(worker: OffloadWorker) -> None:
    worker.close()
    worker.close()


def test_blocks_larger_than_vllm_says_stop_the_start(
    caches: dict[str, torch.Tensor],
) -> None:
    worker = OffloadWorker(make_plan(8))
    with pytest.raises(
        ConfigError, match=r"768 bytes.*but vLLM's specification says 8"
    ):
        worker.register({"l": caches["l0"].float()}, NUM_BLOCKS)


def test_a_device_that_is_not_supported_stops_the_start() -> None:
    # Layouts need real memory: the device is all that is looked at here.
    cache = torch.zeros((NUM_BLOCKS, 5, 7), device="meta")
    with pytest.raises(ConfigError, match="'meta' device"):
        OffloadWorker(make_plan(1024)).register({"l": cache}, NUM_BLOCKS)


@pytest.mark.parametrize("inside", [True, False])
def test_caches_made_in_inference_mode_are_served(inside: bool) -> None:
    with torch.inference_mode():
        cache = torch.rand((NUM_BLOCKS, 5, 7))
    worker = OffloadWorker(make_plan(140))
    with torch.inference_mode(inside):
        worker.register({"l": cache}, NUM_BLOCKS)
    worker.start_stores(TransferPlan(stores=(job(0, (1,), (0,)),)))
    finish(worker, 1)
    worker.start_loads(TransferPlan(loads=(job(1, (2,), (0,)),)))
    assert finish(worker, 1).failed_block_ids == set()
    assert torch.equal(cache[1], cache[2])
    worker.close()


def test_layers_with_several_states_are_served() -> None:
    pages = torch.rand((NUM_BLOCKS, 40))
    states = [pages[:, :24].view(NUM_BLOCKS, 4, 6), pages[:, 24:]]
    worker = OffloadWorker(make_plan(160))
    worker.register({"attention": pages, "mamba": states}, NUM_BLOCKS)
    assert worker._pool is not None
    assert worker._pool.rows.shape[1] == 160
    worker.start_stores(TransferPlan(stores=(job(0, (1,), (0,)),)))
    finish(worker, 1)
    worker.start_loads(TransferPlan(loads=(job(1, (2,), (0,)),)))
    assert finish(worker, 1).failed_block_ids == set()
    assert torch.equal(states[0][1], states[0][2])
    assert torch.equal(states[1][1], states[1][2])
    worker.close()


@pytest.mark.parametrize("writes_early", [True, False])
def test_where_vllm_writes_early_each_store_is_fenced_at_once(
    worker: OffloadWorker, writes_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        worker, "_plan", replace(worker._plan, writes_early=writes_early)
    )
    fenced: list[int] = []
    assert worker._transfer is not None
    monkeypatch.setattr(worker._transfer, "fence", fenced.extend)
    worker.start_stores(TransferPlan(stores=(job(0, (3,), (5,)), job(1, (4,), (1,)))))
    assert fenced == ([0, 1] if writes_early else [])
    fenced.clear()
    worker.start_stores(TransferPlan())
    assert fenced == []
    finish(worker, 2)


@pytest.mark.parametrize("in_lockstep", [False, True])
def test_a_step_without_tokens_waits_for_transfers_unless_others_wait_for_it(
    in_lockstep: bool,
    caches: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block_bytes = sum(cache[0].nbytes for cache in caches.values())
    worker = OffloadWorker(make_plan(block_bytes), in_lockstep=in_lockstep)
    worker.register(caches, NUM_BLOCKS)
    waited: list[bool] = []
    monkeypatch.setattr(
        worker._transfer, "poll", lambda seconds: waited.append(seconds > 0) or []
    )
    for idle in (False, True):
        worker.before_forward(TransferPlan(idle=idle))
        worker.finish_step()
    monkeypatch.undo()
    worker.close()
    assert waited == [False, not in_lockstep]


def test_it_is_idle_only_when_the_last_copy_has_ended(
    worker: OffloadWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before sleep mode. 1. two stores. 2. nothing yet. 3. one ends. 4. the other.

    Their ends are reported with the next step, like any.
    """
    transfer = worker._transfer
    assert transfer is not None
    poll = transfer.poll
    jobs = tuple(job(number, (number,), (number,)) for number in range(2))
    worker.start_stores(TransferPlan(stores=jobs))
    ends: list[JobResult] = []
    while len(ends) < 2:
        ends += poll(60.0)
    given = [[], ends[:1], [], ends[1:]]

    def next_ends(timeout_s: float) -> list[JobResult]:
        assert timeout_s > 0, "it would spin"
        return given.pop(0)

    monkeypatch.setattr(transfer, "poll", next_ends)
    worker.wait_until_idle()
    assert given == []
    worker.wait_until_idle()  # asks nobody: nothing is open
    monkeypatch.setattr(transfer, "poll", poll)
    assert worker.finish_step().report.num_done == Counter({0: 1, 1: 1})


def test_a_worker_without_transfers_is_idle(worker: OffloadWorker) -> None:
    worker.start_stores(TransferPlan(stores=(job(0, (0,), (0,)),)))
    worker.close()
    worker.start_stores(TransferPlan(stores=(job(1, (1,), (1,)),)))
    worker.wait_until_idle()
    assert sum(worker.finish_step().report.num_done.values()) == 2
