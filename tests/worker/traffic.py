"""Plays vLLM and the planner on a fake device, and knows which bytes belong where."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from unittest import mock

import torch
from worker.fake_cuda import FakeCuda
from worker.fake_launcher import LateLauncher

from vllm_ctx_offload.messages import TransferJob
from vllm_ctx_offload.worker import cuda_transfer
from vllm_ctx_offload.worker.cuda_transfer import CudaTransfer, DeviceTerms
from vllm_ctx_offload.worker.kv_layout import derive_layout
from vllm_ctx_offload.worker.lane import Index, Lane
from vllm_ctx_offload.worker.paths import Path
from vllm_ctx_offload.worker.transfer import JobResult

NUM_BLOCKS = 10
NUM_ROWS = 12
ROWS_PER_PIN = 5


class WrongBytesError(AssertionError):
    """Something was read before it was written, or overwritten before it was read."""


def check(tensor: torch.Tensor, value: int, what: str) -> None:
    if not bool((tensor == value).all()):
        raise WrongBytesError(f"{what} holds {tensor.unique().tolist()}, not {value}")


class NotedIndex(Index):
    """Tells the checker of what a launching thread writes."""

    gpu: FakeCuda

    def fill(self, block_ids: Sequence[int]) -> None:
        self.gpu.on_host("the next index", writes=[self[0][: len(block_ids)]])
        super().fill(block_ids)


class Traffic:
    """Steps of an engine, each block and row filled with one value.

    Without `path` about half of the jobs take each. `checked`: whether the checker
    sees the memory, or only the bytes are compared.
    """

    def __init__(
        self,
        seed: int,
        *,
        kind: type[CudaTransfer] = CudaTransfer,
        lane: type[Lane] = Lane,
        deaf: str = "",
        path: Path | None = None,
        checked: bool = True,
        num_layers: int = 2,
    ) -> None:
        self.rng = random.Random(seed)
        self.gpu = FakeCuda(seed, deaf=deaf, granule=4)
        self.caches = [
            torch.zeros((NUM_BLOCKS, 4), dtype=torch.uint8) for _ in range(num_layers)
        ]
        named = {str(number): cache for number, cache in enumerate(self.caches)}
        layout = derive_layout(named, NUM_BLOCKS)
        self.pool = torch.zeros((NUM_ROWS, layout.bytes_per_block), dtype=torch.uint8)
        self.launchers: list[LateLauncher] = []
        # A half of the scratch holds one block, so that jobs go in pieces.
        self.gpu.pin(self.pool, ROWS_PER_PIN)
        scratch_bytes = 2 * layout.bytes_per_block
        terms = DeviceTerms(self.gpu, ROWS_PER_PIN, scratch_bytes, path)
        with mock.patch.object(cuda_transfer, "Lane", lane):
            self.transfer = kind(layout, self.pool, terms, self._launcher)
        if path is None:
            self._draw_paths()
        if checked:
            self.gpu.checker.watch(self.pool, *self.caches)
            for each in (self.transfer._stores, self.transfer._loads):
                self._watch(each)
        self.num_jobs = 0
        self.next_value = 0
        self.blocks = [0] * NUM_BLOCKS  # the value that compute finds in a block
        self.ready = {0: 251, 2: 252, 4: 253}  # row -> value, of ended stores
        for row, value in self.ready.items():
            self.pool[row] = value
        self.stores: dict[int, tuple[TransferJob, list[int]]] = {}
        self.loads: dict[int, tuple[TransferJob, list[int]]] = {}
        self.outputs: list[tuple[torch.Tensor, int]] = []
        self.reported: list[int] = []
        self.num_failed = 0

    def _watch(self, lane: Lane) -> None:
        for half in lane._halves:
            index = NotedIndex(half.index)
            index.gpu = self.gpu
            object.__setattr__(half, "index", index)
            self.gpu.checker.watch(half.scratch, *index)

    def _launcher(self, name: str, begin: Callable[[], None]) -> LateLauncher:
        self.launchers.append(LateLauncher(self.gpu, name, begin))
        return self.launchers[-1]

    def _draw_paths(self) -> None:
        for lane in (self.transfer._stores, self.transfer._loads):
            lane._path = lambda: self.rng.choice(list(Path))  # type: ignore[method-assign]

    def _advance(self, num_steps: int) -> None:
        """Lets launching threads and the device go on, by turns.

        The device mostly keeps up, or all that a launch enqueues would be over as soon
        as the next launch has waited for its half of the scratch.
        """
        for _ in range(max(num_steps // 3, 1)):
            self.rng.choice(self.launchers).run(self.rng.randrange(3))
            self.gpu.advance(self.rng.randrange(30))

    def play(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step()
        while self.stores or self.loads:
            with self.gpu:
                self._advance(3)
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
        late, to_load, written = writable[:1], writable[1:3], writable[3:5]
        read = writable[5:7]
        with self.gpu:
            self._advance(self.rng.randrange(12))
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
        if len(self.loads) == 2:  # or blocks to write run out
            return
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
            self.num_failed += not result.ok
            jobs = self.stores if result.to_host else self.loads
            job, values = jobs.pop(result.job.job_id)
            for block, row, value in zip(job.block_ids, job.rows, values, strict=True):
                if result.to_host:
                    self._end_store(row, value, ok=result.ok)
                else:
                    self._end_load(block, value, ok=result.ok)

    def _end_store(self, row: int, value: int, *, ok: bool) -> None:
        if ok:
            self.gpu.on_host("a hit", reads=[self.pool[row]])
            check(self.pool[row], value, "a stored row")
            self.ready[row] = value
        else:
            # Free at once: a copy that still runs would spoil the next chunk here.
            self.gpu.on_host("the next chunk", writes=[self.pool[row]])
            self.pool[row] = 255
            self.ready[row] = 255

    def _end_load(self, block: int, value: int, *, ok: bool) -> None:
        whole = [cache[block] for cache in self.caches]
        if ok:
            self.gpu.on_host("a loaded block", reads=whole)
            self.blocks[block] = value
        else:
            self.gpu.on_host("the next request", writes=whole)
            # The block goes to another request, which may read what it wrote.
            self.blocks[block] = 254
            for cache in self.caches:
                cache[block] = 254
        self._check_block(block, self.blocks[block])

    def _check_block(self, block: int, value: int) -> None:
        for cache in self.caches:
            check(cache[block], value, f"block {block}")
