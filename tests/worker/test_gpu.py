"""What only a GPU can show: real streams, real pinned memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from worker.layouts import CASE_IDS, CASES, build, copied, storages_of

from vllm_ctx_offload.messages import TransferJob
from vllm_ctx_offload.worker import host_pool
from vllm_ctx_offload.worker.cuda_transfer import CudaTransfer, DeviceTerms
from vllm_ctx_offload.worker.host_pool import HostPool
from vllm_ctx_offload.worker.kv_layout import BlockLayout, derive_layout
from vllm_ctx_offload.worker.paths import Path
from vllm_ctx_offload.worker.proof import prove_layout
from vllm_ctx_offload.worker.transfer import JobResult

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

NUM_BLOCKS = 64
WORDS = 4096
# Only a bug makes a test wait for it.
PATIENCE_S = 60.0
# About a second on any GPU: longer than everything that is enqueued behind it.
LONG_CYCLES = 1_500_000_000


def make_transfer(
    layout: BlockLayout, pool: HostPool, path: Path | None = None
) -> CudaTransfer:
    """Each half of the scratch holds two blocks, so that jobs go in pieces."""
    terms = DeviceTerms(torch.cuda, pool.pinned_rows, 4 * layout.bytes_per_block, path)
    return CudaTransfer(layout, pool.rows, terms)


def wait(transfer: CudaTransfer, count: int) -> list[JobResult]:
    """Polls until so many jobs ended."""
    results: list[JobResult] = []
    while len(results) < count:
        got = transfer.poll(PATIENCE_S)
        assert got, "no job ended"
        results += got
    return results


def copy_one_by_one(
    layout: BlockLayout, pool: torch.Tensor, job: TransferJob, *, to_host: bool
) -> None:
    for block, row in zip(job.block_ids, job.rows, strict=True):
        for segment in layout.segments:
            end = segment.offset + segment.num_bytes
            on_host = pool[row, segment.offset : end].view(layout.word)
            on_device = segment.view[block]
            if to_host:
                on_host.copy_(on_device)
            else:
                on_device.copy_(on_host)


class Device:
    """A cache of one layer on the GPU, one value a block, and its transfers."""

    def __init__(self, path: Path) -> None:
        self.cache = torch.zeros((NUM_BLOCKS, WORDS), dtype=torch.int32, device="cuda")
        layout = derive_layout({"l": self.cache}, NUM_BLOCKS)
        self.pool = HostPool(NUM_BLOCKS, layout.bytes_per_block, "cuda")
        assert self.pool.pinned
        self.transfer = make_transfer(layout, self.pool, path)
        self.num_jobs = 0
        # Once through all of it: nothing below waits for a first allocation.
        self.wait(self.start(range(NUM_BLOCKS), to_host=True))
        self.wait(self.start(range(NUM_BLOCKS), to_host=False))

    def start(self, blocks: range, *, to_host: bool) -> int:
        """Starts a job that takes each block to or from the row of its number."""
        ids = tuple(blocks)
        self.num_jobs += 1
        job = TransferJob(self.num_jobs, "r", ids, ids)
        self.transfer.submit(job, to_host=to_host)
        return job.job_id

    def wait(self, job_id: int) -> None:
        (result,) = wait(self.transfer, 1)
        assert result.job.job_id == job_id
        assert result.ok

    def launched(self) -> None:
        """Returns when all jobs are with the device, however far that is."""
        for to_host, lane in (
            (True, self.transfer._stores),
            (False, self.transfer._loads),
        ):
            for in_flight in lane.open:
                self.transfer._launchers[to_host].wait_until(
                    lambda one=in_flight: one.launched
                )

    def row(self, index: int) -> torch.Tensor:
        return self.pool.rows[index].view(torch.int32)


@pytest.fixture(params=Path)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = Device(request.param)
    yield made
    made.transfer.close()
    made.pool.close()


@pytest.mark.parametrize("path", Path)
@pytest.mark.parametrize(("layout", "dtype"), CASES, ids=CASE_IDS)
def test_blocks_of_every_layout_come_back_and_nothing_else_changes(
    layout: str, dtype: torch.dtype, path: Path
) -> None:
    case = build(layout, dtype, "cuda")
    found = derive_layout(case.caches, case.num_blocks)
    pool = HostPool(9, found.bytes_per_block, "cuda")
    transfer = make_transfer(found, pool, path)
    prove_layout(transfer, case.caches, case.num_blocks)
    sources, targets = (11, 3, 4, 5, 0), (1, 6, 7, 8, 10)
    rows = (8, 2, 3, 4, 6)
    expected = copied(case, list(zip(sources, targets, strict=True)))
    for job_id, (blocks, to_host) in enumerate([(sources, True), (targets, False)]):
        transfer.submit(TransferJob(job_id, "r", blocks, rows), to_host=to_host)
        (result,) = wait(transfer, 1)
        assert result.ok
    for key, storage in storages_of(case).items():
        assert torch.equal(storage, expected[key])
    transfer.close()
    pool.close()


@pytest.mark.parametrize("path", [None, *Path])
@pytest.mark.parametrize("seed", range(5))
def test_random_jobs_do_what_a_copy_a_block_does(seed: int, path: Path | None) -> None:
    """Rounds of a store and a load at once, of blocks and rows that do not meet."""
    rng = random.Random(seed)
    caches = {
        f"l{i}": torch.randint(
            0, 99, (NUM_BLOCKS, words), dtype=torch.int32, device="cuda"
        )
        for i, words in enumerate((WORDS, 24, 1025))
    }
    mirrors = {name: cache.cpu() for name, cache in caches.items()}
    layout, mirror = (derive_layout(c, NUM_BLOCKS) for c in (caches, mirrors))
    pool = HostPool(NUM_BLOCKS, layout.bytes_per_block, "cuda")
    pool.rows.random_()
    mirror_pool = pool.rows.clone()
    transfer = make_transfer(layout, pool, path)
    for job_id in range(0, 40, 2):
        blocks = rng.sample(range(NUM_BLOCKS), rng.randrange(2, NUM_BLOCKS))
        start = rng.randrange(NUM_BLOCKS - len(blocks) + 1)
        rows = list(range(start, start + len(blocks)))
        half = len(blocks) // 2
        for number, part in enumerate((slice(half), slice(half, None))):
            ids = tuple(blocks[part]), tuple(rows[part])
            job, to_host = TransferJob(job_id + number, "r", *ids), number == 0
            transfer.submit(job, to_host=to_host)
            copy_one_by_one(mirror, mirror_pool, job, to_host=to_host)
        assert all(result.ok for result in wait(transfer, 2))
    assert torch.equal(pool.rows, mirror_pool)
    for name, cache in caches.items():
        assert torch.equal(cache.cpu(), mirrors[name])
    transfer.close()
    pool.close()


@pytest.mark.parametrize("path", Path)
def test_a_thousand_jobs_leave_no_memory_behind(path: Path) -> None:
    cache = torch.zeros((NUM_BLOCKS, WORDS), dtype=torch.int32, device="cuda")
    layout = derive_layout({"l": cache}, NUM_BLOCKS)
    pool = HostPool(NUM_BLOCKS, layout.bytes_per_block, "cuda")
    transfer = make_transfer(layout, pool, path)
    used = []
    for round_id in range(10):
        for number in range(100):
            ids = tuple(range(number % 7, NUM_BLOCKS))
            job = TransferJob(100 * round_id + number, "r", ids, ids)
            transfer.submit(job, to_host=bool(number % 2))
            wait(transfer, 1)
        used.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        events = len(transfer._events)
        assert events <= 6
    assert len(set(used[1:])) == 1
    transfer.close()
    pool.close()


def test_a_store_reads_what_a_slow_step_before_it_writes(device: Device) -> None:
    torch.cuda._sleep(LONG_CYCLES)
    device.cache.fill_(7)
    job_id = device.start(range(NUM_BLOCKS), to_host=True)
    device.launched()
    # Nothing has been copied yet, or the sleep was too short to show anything.
    assert device.transfer.poll() == []
    device.wait(job_id)
    assert bool((device.row(0) == 7).all())
    assert bool((device.row(NUM_BLOCKS - 1) == 7).all())


def test_compute_after_a_fence_does_not_overwrite_what_a_store_reads(
    device: Device,
) -> None:
    device.cache.fill_(1)
    torch.cuda.synchronize()
    # Holds the store back, as a long queue of copies before it would.
    stores = device.transfer._stores
    for stream in (stores.kernels, stores.copies):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG_CYCLES)
    job_id = device.start(range(NUM_BLOCKS), to_host=True)
    device.transfer.fence([job_id])
    device.cache.fill_(2)
    device.wait(job_id)
    torch.cuda.synchronize()
    for block in range(NUM_BLOCKS):
        assert bool((device.row(block) == 1).all())
    assert bool((device.cache == 2).all())


def test_a_load_does_not_overwrite_what_a_slow_step_before_it_reads(
    device: Device,
) -> None:
    device.pool.rows.fill_(9)
    device.cache.fill_(3)
    seen = torch.empty_like(device.cache)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_CYCLES)
    seen.copy_(device.cache)
    job_id = device.start(range(NUM_BLOCKS), to_host=False)
    device.launched()
    assert device.transfer.poll() == []
    device.wait(job_id)
    torch.cuda.synchronize()
    assert bool((seen == 3).all())
    assert bool((device.cache.view(torch.uint8) == 9).all())


def test_submitting_does_not_wait_for_the_device(device: Device) -> None:
    torch.cuda._sleep(LONG_CYCLES)
    asleep = torch.cuda.Event()
    asleep.record()
    stored = device.start(range(NUM_BLOCKS // 2), to_host=True)
    device.transfer.fence([stored])
    device.start(range(NUM_BLOCKS // 2, NUM_BLOCKS), to_host=False)
    device.launched()
    assert not asleep.query()
    assert len(wait(device.transfer, 2)) == 2


def test_kernels_run_after_the_pool_could_not_be_pinned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real: Any = torch.cuda.cudart()

    class RegistersTwice:
        """The second time fails in the driver: the range is registered already."""

        def cudaHostRegister(self, *args: int) -> Any:  # noqa: N802 - CUDA's name
            first = real.cudaHostRegister(*args)
            second = real.cudaHostRegister(*args)
            if not int(first):
                real.cudaHostUnregister(args[0])
            return second

    monkeypatch.setattr(host_pool.torch.cuda, "cudart", RegistersTwice)
    pool = HostPool(16, 4096, "cuda")
    assert not pool.pinned
    assert "Pinning host memory failed" in caplog.text
    monkeypatch.undo()

    case = build("block_first", torch.bfloat16, "cuda")
    layout = derive_layout(case.caches, case.num_blocks)
    plain = HostPool(2, layout.bytes_per_block)
    assert not plain.pinned
    transfer = make_transfer(layout, plain)
    prove_layout(transfer, case.caches, case.num_blocks)
    transfer.close()
