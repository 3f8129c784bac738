"""What only a GPU can show: real streams, real pinned memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from worker.layouts import CASE_IDS, CASES, build, copied, storages_of

from vllm_ctx_offload.messages import TransferJob
from vllm_ctx_offload.worker import host_pool
from vllm_ctx_offload.worker.cuda_transfer import CudaTransfer
from vllm_ctx_offload.worker.host_pool import HostPool
from vllm_ctx_offload.worker.kv_layout import derive_layout
from vllm_ctx_offload.worker.proof import prove_layout
from vllm_ctx_offload.worker.transfer import JobResult

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

NUM_BLOCKS = 64
WORDS = 4096
# About a second on any GPU: longer than everything that is enqueued behind it.
LONG_CYCLES = 1_500_000_000


class Device:
    """A cache of one layer on the GPU, one value a block, and its transfers."""

    def __init__(self) -> None:
        self.cache = torch.zeros((NUM_BLOCKS, WORDS), dtype=torch.int32, device="cuda")
        layout = derive_layout({"l": self.cache}, NUM_BLOCKS)
        self.pool = HostPool(NUM_BLOCKS, layout.bytes_per_block, "cuda")
        assert self.pool.pinned
        self.transfer = CudaTransfer(
            layout,
            self.pool.rows,
            pinned=True,
            scratch_bytes=4 * layout.bytes_per_block,
        )
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
        results: list[JobResult] = []
        while not results:
            results = self.transfer.poll()
        assert [result.job.job_id for result in results] == [job_id]
        assert results[0].ok

    def row(self, index: int) -> torch.Tensor:
        return self.pool.rows[index].view(torch.int32)


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device()
    yield made
    made.transfer.close()
    made.pool.close()


@pytest.mark.parametrize(("layout", "dtype"), CASES, ids=CASE_IDS)
def test_blocks_of_every_layout_come_back_and_nothing_else_changes(
    layout: str, dtype: torch.dtype
) -> None:
    case = build(layout, dtype, "cuda")
    found = derive_layout(case.caches, case.num_blocks)
    pool = HostPool(9, found.bytes_per_block, "cuda")
    transfer = CudaTransfer(
        found, pool.rows, pinned=pool.pinned, scratch_bytes=3 * found.bytes_per_block
    )
    prove_layout(transfer, case.caches, case.num_blocks)
    sources, targets = (11, 3, 4, 5, 0), (1, 6, 7, 8, 10)
    rows = (8, 2, 3, 4, 6)
    expected = copied(case, list(zip(sources, targets, strict=True)))
    for job_id, (blocks, to_host) in enumerate([(sources, True), (targets, False)]):
        transfer.submit(TransferJob(job_id, "r", blocks, rows), to_host=to_host)
        results: list[JobResult] = []
        while not results:
            results = transfer.poll()
        assert results[0].ok
    for key, storage in storages_of(case).items():
        assert torch.equal(storage, expected[key])
    transfer.close()
    pool.close()


def test_a_store_reads_what_a_slow_step_before_it_writes(device: Device) -> None:
    torch.cuda._sleep(LONG_CYCLES)
    device.cache.fill_(7)
    job_id = device.start(range(NUM_BLOCKS), to_host=True)
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
    with torch.cuda.stream(device.transfer._stores.stream):
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
    assert not asleep.query()
    torch.cuda.synchronize()
    assert len(device.transfer.poll()) == 2


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
    transfer = CudaTransfer(layout, plain.rows, pinned=False)
    prove_layout(transfer, case.caches, case.num_blocks)
    transfer.close()
