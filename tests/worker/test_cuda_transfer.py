"""Orders on the device: every wait that CudaTransfer makes, and that each is needed.

`FakeCuda` runs the three streams in random orders that respect nothing but the waits.
`Traffic` plays vLLM and the planner on top of it and knows which bytes belong where.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from worker.fake_cuda import FakeCuda, FakeEvent

from vllm_ctx_offload.messages import TransferJob
from vllm_ctx_offload.worker.cuda_transfer import CudaTransfer
from vllm_ctx_offload.worker.kv_layout import derive_layout
from vllm_ctx_offload.worker.transfer import JobResult

NUM_BLOCKS = 10
NUM_ROWS = 8
NUM_SEEDS = 40


class WrongBytesError(AssertionError):
    """Something was read before it was written, or overwritten before it was read."""


def check(tensor: torch.Tensor, value: int, what: str) -> None:
    if not bool((tensor == value).all()):
        raise WrongBytesError(f"{what} holds {tensor.unique().tolist()}, not {value}")


class Traffic:
    """Steps of an engine, each block and row filled with one value."""

    def __init__(
        self, seed: int, *, kind: type[CudaTransfer] = CudaTransfer, deaf: str = ""
    ) -> None:
        self.rng = random.Random(seed)
        self.gpu = FakeCuda(seed, deaf=deaf)
        self.caches = [torch.zeros((NUM_BLOCKS, 4), dtype=torch.uint8) for _ in (0, 1)]
        layout = derive_layout({"a": self.caches[0], "b": self.caches[1]}, NUM_BLOCKS)
        self.pool = torch.zeros((NUM_ROWS, layout.bytes_per_block), dtype=torch.uint8)
        self.transfer = kind(
            layout, self.pool, pinned=False, cuda=self.gpu, scratch_bytes=2 * 8
        )
        self.num_jobs = 0
        self.next_value = 0
        self.blocks = [0] * NUM_BLOCKS  # the value that compute finds in a block
        self.ready: dict[int, int] = {}  # row -> value, of ended stores
        self.stores: dict[int, tuple[TransferJob, list[int]]] = {}
        self.loads: dict[int, tuple[TransferJob, list[int]]] = {}
        self.outputs: list[tuple[torch.Tensor, int]] = []
        self.reported: list[int] = []

    def play(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step()
        while self.stores or self.loads:
            with self.gpu:
                self.gpu.advance(3)
                results = self.transfer.poll()
            self._take(results)
        self.gpu.drain()
        for output, value in self.outputs:
            check(output, value, "an output")
        for block, value in enumerate(self.blocks):
            self._check_block(block, value)
        assert sorted(self.reported) == list(range(self.num_jobs))

    def _step(self) -> None:
        """Forward passes and jobs as a plan orders them; some loads come after it."""
        writable = [b for b in range(NUM_BLOCKS) if b not in self._targets()]
        self.rng.shuffle(writable)
        late, to_load, written = writable[:1], writable[1:3], writable[3:6]
        read = writable[5:8]
        with self.gpu:
            self.gpu.advance(self.rng.randrange(12))
            results = self.transfer.poll()
        self._take(results)
        with self.gpu:
            self._store(late)
            self.transfer.fence(self._sources_in({*to_load, *written}))
            loads_first = self.rng.random() < 0.5
            if loads_first:
                self._load(to_load)
            self._forward(read, written)
            if not loads_first:
                self._load(to_load)
            self._store(written)

    def _targets(self) -> set[int]:
        return {b for job, _ in self.loads.values() for b in job.block_ids}

    def _sources_in(self, reused: Iterable[int]) -> list[int]:
        blocks = set(reused)
        return [
            job_id
            for job_id, (job, _) in self.stores.items()
            if blocks & set(job.block_ids)
        ]

    def _forward(self, read: list[int], written: list[int]) -> None:
        for block in read:
            for cache in self.caches:
                output = torch.empty(4, dtype=torch.uint8)
                output.copy_(cache[block])
                self.outputs.append((output, self.blocks[block]))
        for block in written:
            self.next_value = self.next_value % 250 + 1
            self.blocks[block] = self.next_value
            for cache in self.caches:
                cache[block].fill_(self.next_value)

    def _store(self, blocks: list[int]) -> None:
        free = self._free_rows()
        self.rng.shuffle(free)
        pairs = list(zip(blocks, free, strict=False))
        if pairs:
            for _, row in pairs:
                self.ready.pop(row, None)
            job = self._job(pairs)
            self.stores[job.job_id] = (job, [self.blocks[b] for b in job.block_ids])
            self.transfer.submit(job, to_host=True)

    def _load(self, blocks: list[int]) -> None:
        rows = self.rng.sample(sorted(self.ready), min(len(self.ready), len(blocks)))
        pairs = list(zip(blocks, rows, strict=False))
        if pairs:
            job = self._job(pairs)
            self.loads[job.job_id] = (job, [self.ready[row] for row in rows])
            self.transfer.submit(job, to_host=False)

    def _free_rows(self) -> list[int]:
        """Rows that no open job uses; what they hold is evicted."""
        used = {
            row
            for job, _ in [*self.stores.values(), *self.loads.values()]
            for row in job.rows
        }
        return [row for row in range(NUM_ROWS) if row not in used]

    def _job(self, pairs: list[tuple[int, int]]) -> TransferJob:
        blocks, rows = zip(*pairs, strict=True)
        self.num_jobs += 1
        return TransferJob(self.num_jobs - 1, "r", blocks, rows)

    def _take(self, results: list[JobResult]) -> None:
        for result in results:
            self.reported.append(result.job.job_id)
            jobs = self.stores if result.to_host else self.loads
            job, values = jobs.pop(result.job.job_id)
            for block, row, value in zip(job.block_ids, job.rows, values, strict=True):
                if result.to_host:
                    self._end_store(row, value, ok=result.ok)
                else:
                    self._end_load(block, value, ok=result.ok)

    def _end_store(self, row: int, value: int, *, ok: bool) -> None:
        if ok:
            check(self.pool[row], value, "a stored row")
            self.ready[row] = value
        else:
            # Free at once: a copy that still runs would spoil the next chunk here.
            self.pool[row] = 255
            self.ready[row] = 255

    def _end_load(self, block: int, value: int, *, ok: bool) -> None:
        if ok:
            self.blocks[block] = value
        else:
            # The block goes to another request, which may read what it wrote.
            self.blocks[block] = 254
            for cache in self.caches:
                cache[block] = 254
        self._check_block(block, self.blocks[block])

    def _check_block(self, block: int, value: int) -> None:
        for cache in self.caches:
            check(cache[block], value, f"block {block}")


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_every_byte_is_right_in_any_order_that_the_waits_allow(seed: int) -> None:
    Traffic(seed).play(30)


class FailsSometimes(CudaTransfer):
    """Fails in the middle of some jobs, when a part of their copies is under way."""

    num_calls = 0

    def _fail_now(self) -> None:
        self.num_calls += 1
        if self.num_calls % 5 == 0:
            raise RuntimeError("injected")

    def _store_piece(self, *args: Any) -> None:
        super()._store_piece(*args)
        self._fail_now()

    def _load_piece(self, *args: Any) -> None:
        super()._load_piece(*args)
        self._fail_now()


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_a_failed_job_is_reported_once_its_copies_are_over(seed: int) -> None:
    Traffic(seed, kind=FailsSometimes).play(30)


class OneScratch(CudaTransfer):
    """Broken: both directions share their scratch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loads.scratch = self._stores.scratch


class ReportsEarly(CudaTransfer):
    """Broken: takes a job for done when its stream has reached it."""

    def submit(self, job: TransferJob, *, to_host: bool) -> None:
        lane = self._stores if to_host else self._loads
        begun = FakeEvent()
        begun.record(lane.stream)
        super().submit(job, to_host=to_host)
        lane.jobs[-1].done = begun


class ReportsFailuresEarly(FailsSometimes):
    """Broken: reports a failed job at once."""

    def submit(self, job: TransferJob, *, to_host: bool) -> None:
        super().submit(job, to_host=to_host)
        last = (self._stores if to_host else self._loads).jobs[-1]
        if not last.ok:
            last.done = FakeEvent()  # never recorded, so it has passed


class NoFence(CudaTransfer):
    """Broken: compute does not wait for stores."""

    def fence(self, job_ids: Iterable[int]) -> None:
        pass


class FencesTheFirst(CudaTransfer):
    """Broken: waits for the oldest of the stores only."""

    def fence(self, job_ids: Iterable[int]) -> None:
        super().fence(sorted(job_ids)[:1])


BROKEN: dict[str, tuple[type[CudaTransfer], str]] = {
    "a store does not wait for compute": (CudaTransfer, "stores"),
    "a load does not wait for compute": (CudaTransfer, "loads"),
    "compute does not wait at a fence": (CudaTransfer, "compute"),
    "a fence does nothing": (NoFence, ""),
    "a fence waits for one store": (FencesTheFirst, ""),
    "both directions share a scratch": (OneScratch, ""),
    "jobs are reported early": (ReportsEarly, ""),
    "failed jobs are reported early": (ReportsFailuresEarly, ""),
}


@pytest.mark.parametrize("what", BROKEN)
def test_without_it_bytes_go_wrong(what: str) -> None:
    kind, deaf = BROKEN[what]
    caught = 0
    for seed in range(NUM_SEEDS):
        try:
            Traffic(seed, kind=kind, deaf=deaf).play(30)
        except WrongBytesError:
            caught += 1
    assert caught > 0


def test_closing_waits_for_copies_that_still_use_the_pool() -> None:
    traffic = Traffic(0)
    with traffic.gpu:
        traffic._forward([], [1, 2, 3])
        traffic._store([1, 2, 3])
        traffic.transfer.close()
        (result,) = traffic.transfer.poll()
    assert result.ok
    for row, value in zip(result.job.rows, (1, 2, 3), strict=True):
        check(traffic.pool[row], value, "a stored row")


def test_jobs_of_a_direction_are_reported_in_order_and_no_earlier() -> None:
    traffic = Traffic(0)
    with traffic.gpu:
        traffic._forward([], [1, 2])
        traffic._store([1])
        traffic._store([2])
        assert traffic.transfer.poll() == []
        traffic.gpu.drain()
        results = traffic.transfer.poll()
        assert traffic.transfer.poll() == []
    assert [result.job.job_id for result in results] == [0, 1]
    assert [result.num_bytes for result in results] == [8, 8]


def test_a_failed_job_moved_no_bytes() -> None:
    class Fails(CudaTransfer):
        def _store_piece(self, *args: Any) -> None:
            raise RuntimeError("injected")

    traffic = Traffic(0, kind=Fails)
    with traffic.gpu:
        traffic._store([1, 2, 3])
        traffic.gpu.drain()
        (result,) = traffic.transfer.poll()
    assert not result.ok
    assert result.num_bytes == 0


def test_index_tensors_live_until_their_job_is_done() -> None:
    traffic = Traffic(0)
    with traffic.gpu:
        traffic._store([4, 2, 7])
    (in_flight,) = traffic.transfer._stores.jobs
    # On a GPU each piece has one index on the host and one on the device.
    kept = [index.tolist() for index in in_flight.kept]
    assert kept == [[4, 2], [4, 2], [7], [7]]


def test_a_block_larger_than_the_scratch_still_fits() -> None:
    cache = torch.zeros((NUM_BLOCKS, 64), dtype=torch.uint8)
    layout = derive_layout({"l": cache}, NUM_BLOCKS)
    pool = torch.zeros((2, 64), dtype=torch.uint8)
    transfer = CudaTransfer(
        layout, pool, pinned=False, cuda=FakeCuda(0), scratch_bytes=10
    )
    assert transfer._stores.scratch.shape == (1, 64)
