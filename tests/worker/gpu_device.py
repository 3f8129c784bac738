"""A cache and its transfers on a real GPU."""

from __future__ import annotations

import torch

from vllm_ctx_offload.messages import TransferJob
from vllm_ctx_offload.worker.cuda_transfer import CudaTransfer, DeviceTerms
from vllm_ctx_offload.worker.host_pool import HostPool
from vllm_ctx_offload.worker.kv_layout import BlockLayout, derive_layout
from vllm_ctx_offload.worker.paths import Path
from vllm_ctx_offload.worker.transfer import JobResult

NUM_BLOCKS = 64
WORDS = 4096
# Only a bug makes a test wait for it.
PATIENCE_S = 60.0
# About a second on any GPU: longer than everything that is enqueued behind it.
LONG_CYCLES = 1_500_000_000


def make_transfer(
    layout: BlockLayout, pool: HostPool, path: Path | None = None, *, half: int = 2
) -> CudaTransfer:
    """Each half of the scratch holds a few blocks, so that jobs go in pieces."""
    scratch_bytes = 2 * half * layout.bytes_per_block
    terms = DeviceTerms(torch.cuda, pool.pinned_rows, scratch_bytes, path)
    return CudaTransfer(layout, pool.rows, terms)


def wait(transfer: CudaTransfer, count: int) -> list[JobResult]:
    """Polls until so many jobs ended."""
    results: list[JobResult] = []
    while len(results) < count:
        got = transfer.poll(PATIENCE_S)
        assert got, "no job ended"
        results += got
    return results


class Device:
    """A cache of one layer on the GPU, one value a block, and its transfers.

    A job is one piece, which is launched without a look at the device.
    """

    def __init__(self, path: Path, num_blocks: int = NUM_BLOCKS) -> None:
        self.cache = torch.zeros((num_blocks, WORDS), dtype=torch.int32, device="cuda")
        layout = derive_layout({"l": self.cache}, num_blocks)
        self.pool = HostPool(num_blocks, layout.bytes_per_block, "cuda")
        assert self.pool.pinned
        self.transfer = make_transfer(layout, self.pool, path, half=num_blocks)
        self.num_jobs = 0
        # Once through all of it: nothing below waits for a first allocation.
        self.wait(self.start(range(num_blocks), to_host=True))
        self.wait(self.start(range(num_blocks), to_host=False))

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

    def hold_stores_back(self) -> None:
        """Lets them begin late, as a long queue of copies before them would."""
        stores = self.transfer._stores
        for stream in (stores.kernels, stores.copies):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(LONG_CYCLES)

    def close(self) -> None:
        self.transfer.close()
        self.pool.close()
