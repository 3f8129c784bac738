"""The copy threads: order, fences, failures, and their end.

Copies are held back by events, never by time, so every order here is forced.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from vllm_ctx_offload.messages import TransferJob
from vllm_ctx_offload.worker import cpu_transfer
from vllm_ctx_offload.worker.copy import CpuCopy
from vllm_ctx_offload.worker.cpu_transfer import CpuTransfer
from vllm_ctx_offload.worker.kv_layout import BlockLayout, derive_layout
from vllm_ctx_offload.worker.transfer import JobResult

# Long enough for any machine; only a bug makes a test wait for it.
PATIENCE_S = 60.0
NUM_BLOCKS = 8


class GatedCopy:
    """A copy that waits for permission, job by job, and can be told to fail."""

    def __init__(self, layout: BlockLayout, pool: torch.Tensor) -> None:
        self._copy = CpuCopy(layout, pool)
        self.started: list[tuple[int, ...]] = []
        self.failing: set[tuple[int, ...]] = set()
        self._permits = threading.Semaphore(0)
        self._begun = threading.Semaphore(0)

    def __call__(
        self, block_ids: Sequence[int], rows: Sequence[int], *, to_host: bool
    ) -> None:
        self.started.append(tuple(rows))
        self._begun.release()
        assert self._permits.acquire(timeout=PATIENCE_S)
        if tuple(rows) in self.failing:
            raise RuntimeError("injected")
        self._copy(block_ids, rows, to_host=to_host)

    def let(self, count: int) -> None:
        self._permits.release(count)

    def wait_until_begun(self) -> None:
        assert self._begun.acquire(timeout=PATIENCE_S)


@pytest.fixture
def layout() -> BlockLayout:
    return derive_layout({"l": torch.zeros((NUM_BLOCKS, 5))}, NUM_BLOCKS)


@pytest.fixture
def pool(layout: BlockLayout) -> torch.Tensor:
    return torch.zeros((NUM_BLOCKS, layout.bytes_per_block), dtype=torch.uint8)


@pytest.fixture
def copy(layout: BlockLayout, pool: torch.Tensor) -> GatedCopy:
    return GatedCopy(layout, pool)


@pytest.fixture
def transfer(
    layout: BlockLayout, pool: torch.Tensor, copy: GatedCopy
) -> Iterator[CpuTransfer]:
    made = CpuTransfer(layout, pool, copy)
    yield made
    copy.let(1000)
    made.close()
    assert not any(thread.is_alive() for thread in made._threads.values())


def job(job_id: int) -> TransferJob:
    return TransferJob(job_id, f"r{job_id}", (job_id,), (job_id,))


def take(transfer: CpuTransfer, count: int) -> list[JobResult]:
    """Polls until so many results came."""
    results: list[JobResult] = []
    while len(results) < count:
        got = transfer.poll(PATIENCE_S)
        assert got, "no result came"
        results += got
    return results


def in_background(call: object) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)  # type: ignore[arg-type]
    thread.start()
    return thread


def test_jobs_of_each_direction_run_in_the_order_submitted(
    transfer: CpuTransfer, copy: GatedCopy
) -> None:
    directions = [True, False, False, True, False, True]
    for job_id, to_host in enumerate(directions):
        transfer.submit(job(job_id), to_host=to_host)
    copy.let(6)
    ended = [(result.job.job_id, result.to_host) for result in take(transfer, 6)]
    assert sorted(ended) == list(enumerate(directions))
    for to_host, ids in ((True, [0, 3, 5]), (False, [1, 2, 4])):
        assert [job_id for job_id, stored in ended if stored == to_host] == ids
        assert [rows[0] for rows in copy.started if rows[0] in ids] == ids


def test_a_load_does_not_wait_for_the_stores_before_it(
    layout: BlockLayout, pool: torch.Tensor
) -> None:
    may_end = threading.Event()

    def copy(blocks: Sequence[int], rows: Sequence[int], *, to_host: bool) -> None:
        if to_host:
            assert may_end.wait(PATIENCE_S)

    transfer = CpuTransfer(layout, pool, copy)
    for job_id, to_host in enumerate([True, True, False]):
        transfer.submit(job(job_id), to_host=to_host)
    assert [result.job.job_id for result in take(transfer, 1)] == [2]
    may_end.set()
    assert [result.job.job_id for result in take(transfer, 2)] == [0, 1]
    transfer.close()


def test_submitting_does_not_wait_for_a_copy(
    transfer: CpuTransfer, copy: GatedCopy
) -> None:
    transfer.submit(job(0), to_host=True)
    copy.wait_until_begun()
    transfer.submit(job(1), to_host=False)
    assert transfer.poll() == []


def test_a_fence_waits_for_the_stores_that_it_names(
    transfer: CpuTransfer, copy: GatedCopy
) -> None:
    """Stores 0, 1 and 2 are queued; a fence for 1.

    1. Copy 0 ends: the fence still waits.
    2. Copy 1 ends: the fence returns, though copy 2 has not ended.
    """
    for job_id in range(3):
        transfer.submit(job(job_id), to_host=True)
    passed = threading.Event()
    in_background(lambda: (transfer.fence([1]), passed.set()))
    copy.let(1)
    take(transfer, 1)
    assert not passed.is_set()
    copy.let(1)
    assert passed.wait(PATIENCE_S)
    assert [result.job.job_id for result in take(transfer, 1)] == [1]
    assert transfer.poll() == []


def test_a_fence_does_not_wait_for_ended_unknown_and_other_jobs(
    transfer: CpuTransfer, copy: GatedCopy
) -> None:
    transfer.submit(job(0), to_host=True)
    copy.let(1)
    take(transfer, 1)
    transfer.submit(job(1), to_host=False)
    transfer.submit(job(2), to_host=True)
    transfer.fence([0, 1, 77])
    transfer.fence([])
    assert transfer.poll() == []


def test_a_fence_returns_when_the_store_failed(
    transfer: CpuTransfer, copy: GatedCopy
) -> None:
    copy.failing = {(0,)}
    transfer.submit(job(0), to_host=True)
    copy.let(1)
    transfer.fence([0])
    (result,) = transfer.poll()
    assert not result.ok


def test_polling_waits_for_a_result_only_while_a_job_is_open(
    transfer: CpuTransfer, copy: GatedCopy
) -> None:
    # Nothing is open: with this time limit the test would end on the suite's.
    assert transfer.poll(1e6) == []
    transfer.submit(job(0), to_host=True)
    assert transfer.poll(0.001) == []
    copy.let(1)
    (result,) = transfer.poll(1e6)
    assert result.job.job_id == 0
    assert transfer.poll(1e6) == []


def test_results_that_wait_are_returned_without_waiting(
    transfer: CpuTransfer, copy: GatedCopy
) -> None:
    transfer.submit(job(0), to_host=True)
    transfer.submit(job(1), to_host=True)
    copy.let(1)
    transfer.fence([0])
    assert [result.job.job_id for result in transfer.poll(1e6)] == [0]


def test_a_failed_copy_is_a_result_and_the_next_job_runs(
    transfer: CpuTransfer, copy: GatedCopy, caplog: pytest.LogCaptureFixture
) -> None:
    copy.failing = {(0,), (2,)}
    for job_id in range(4):
        transfer.submit(job(job_id), to_host=job_id < 2)
    copy.let(4)
    results = sorted(take(transfer, 4), key=lambda result: result.job.job_id)
    assert [result.ok for result in results] == [False, True, False, True]
    assert all(result.seconds >= 0 for result in results)
    assert sorted(r.getMessage() for r in caplog.records) == [
        "Transfer job 0 failed.",
        "Transfer job 2 failed.",
    ]


@pytest.mark.parametrize("to_host", [True, False])
def test_closing_ends_the_copy_being_made_and_reports_the_queue_as_failed(
    *, to_host: bool, transfer: CpuTransfer, copy: GatedCopy
) -> None:
    """1. copy 0 is being made, 1 and 2 wait. 2. close. 3. copy 0 may go on."""
    for job_id in range(3):
        transfer.submit(job(job_id), to_host=to_host)
    copy.wait_until_begun()
    closing = in_background(transfer.close)
    fencing = in_background(lambda: transfer.fence([2]))
    with transfer._changed:
        assert transfer._changed.wait_for(lambda: transfer._closing, PATIENCE_S)
    copy.let(1)
    closing.join(PATIENCE_S)
    fencing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert not fencing.is_alive()
    assert not any(thread.is_alive() for thread in transfer._threads.values())
    ended = [(result.job.job_id, result.ok) for result in transfer.poll()]
    assert ended == [(0, True), (1, False), (2, False)]
    assert transfer.poll() == []
    assert copy.started == [(0,)]


def test_closing_does_not_wait_for_a_copy_that_hangs(
    transfer: CpuTransfer, copy: GatedCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_ctx_offload.worker.cpu_transfer._CLOSE_WAIT_S", 0.01)
    transfer.submit(job(0), to_host=True)
    copy.wait_until_begun()
    transfer.close()
    # It may still touch memory: no end is reported before it has one.
    assert transfer.poll() == []
    copy.let(1)
    assert [result.ok for result in take(transfer, 1)] == [True]


def test_a_job_submitted_after_the_end_is_reported_as_failed(
    transfer: CpuTransfer,
) -> None:
    transfer.close()
    transfer.submit(job(0), to_host=True)
    transfer.fence([0])
    assert [result.ok for result in transfer.poll(PATIENCE_S)] == [False]


THREE_BLOCKS = TransferJob(0, "r", (0, 1, 2), (0, 1, 2))


@pytest.mark.parametrize(
    ("to_host", "wait"),
    [
        (True, lambda transfer: transfer.fence([0])),
        (True, lambda transfer: transfer.poll(PATIENCE_S)),
        (True, lambda transfer: transfer.close()),
        (False, lambda transfer: transfer.poll(PATIENCE_S)),
        (False, lambda transfer: transfer.close()),
    ],
)
def test_a_thread_rests_between_pieces_until_somebody_waits(
    to_host: bool,
    wait: Callable[[CpuTransfer], object],
    layout: BlockLayout,
    pool: torch.Tensor,
) -> None:
    """1. Block 0 is copied. 2. Nobody waits: no other is. 3. Somebody does: all are."""
    copy = GatedCopy(layout, pool)
    copy.let(1000)
    # It would rest for hours.
    transfer = CpuTransfer(layout, pool, copy, piece_bytes=1, share=1e-10)
    transfer.submit(THREE_BLOCKS, to_host=to_host)
    copy.wait_until_begun()
    assert transfer.poll() == []
    assert copy.started == [(0,)]
    wait(transfer)
    assert copy.started == [(0,), (1,), (2,)]
    transfer.close()


def test_with_cores_enough_no_thread_rests(
    layout: BlockLayout, pool: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of a direction take a twentieth of 20 cores: all of one."""
    monkeypatch.setattr(cpu_transfer, "process_cores", lambda: set(range(20)))
    copy = GatedCopy(layout, pool)
    copy.let(1000)
    transfer = CpuTransfer(layout, pool, copy, piece_bytes=1)
    transfer.submit(THREE_BLOCKS, to_host=False)
    for _ in range(3):
        copy.wait_until_begun()
    assert transfer._rest == 0
    transfer.close()


@pytest.mark.parametrize("created", [True, False])
@pytest.mark.parametrize("derived", [True, False])
def test_caches_made_in_inference_mode_can_be_written(
    created: bool, derived: bool
) -> None:
    with torch.inference_mode(created):
        cache = torch.rand((NUM_BLOCKS, 5))
    with torch.inference_mode(derived):
        layout = derive_layout({"l": cache}, NUM_BLOCKS)
        pool = torch.zeros((NUM_BLOCKS, layout.bytes_per_block), dtype=torch.uint8)
    transfer = CpuTransfer(layout, pool)
    transfer.submit(TransferJob(0, "r", (1,), (0,)), to_host=True)
    assert take(transfer, 1)[0].ok
    transfer.submit(TransferJob(1, "r", (2,), (0,)), to_host=False)
    assert take(transfer, 1)[0].ok
    assert torch.equal(cache[1], cache[2])
    transfer.close()


@pytest.mark.parametrize("seed", range(30))
def test_every_job_of_a_random_schedule_is_reported_once(seed: int) -> None:
    rng = random.Random(seed)
    failing = {number for number in range(60) if rng.random() < 0.2}

    def copy(*args: object, to_host: bool) -> None:
        if args[1][0] in failing:  # type: ignore[index]
            raise RuntimeError("injected")

    layout = derive_layout({"l": torch.zeros((NUM_BLOCKS, 5))}, NUM_BLOCKS)
    transfer = CpuTransfer(layout, torch.zeros((60, 20), dtype=torch.uint8), copy)
    results: list[JobResult] = []
    for job_id in range(60):
        single = TransferJob(job_id, "r", (0,), (job_id,))
        transfer.submit(single, to_host=rng.random() < 0.5)
        if rng.random() < 0.3:
            results += transfer.poll(rng.choice([0.0, 0.001]))
        if rng.random() < 0.2:
            transfer.fence(range(rng.randrange(60)))
    if rng.random() < 0.5:
        transfer.close()
        results += transfer.poll()
    else:
        results += take(transfer, 60 - len(results))
        transfer.close()
    assert Counter(result.job.job_id for result in results) == Counter(range(60))
    assert not any(result.ok for result in results if result.job.job_id in failing)
    assert transfer.poll() == []
