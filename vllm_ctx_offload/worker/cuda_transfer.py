"""The backend for CUDA: one stream a direction, ordered by events."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from vllm_ctx_offload.messages import TransferJob
from vllm_ctx_offload.worker.copy import runs_of
from vllm_ctx_offload.worker.kv_layout import BlockLayout
from vllm_ctx_offload.worker.transfer import JobResult

__all__ = ["CudaTransfer"]

logger = logging.getLogger(__name__)

# Of device memory for each direction; longer jobs go through it in pieces.
SCRATCH_BYTES: Final = 32 * 1024**2


@dataclass(slots=True)
class _Lane:
    """One direction: its stream, its scratch, and its open jobs in order."""

    stream: Any
    scratch: torch.Tensor  # uint8 [rows, bytes_per_block] on the device
    jobs: deque[_InFlight]


@dataclass(slots=True)
class _InFlight:
    job: TransferJob
    to_host: bool
    ok: bool
    began: float
    done: Any  # event after the job's last copy
    # Tensors that the lane's stream reads; kept until `done` has passed, because the
    # allocator would hand their memory to the compute stream.
    kept: list[torch.Tensor]


class CudaTransfer:
    """Copies through a device scratch on two streams; see `Transfer` for the contract.

    [Note: event order]
    A store waits for the compute submitted before it, which writes the blocks it
    reads. A load waits for the compute submitted before it, which may still read the
    blocks it overwrites, or zero them. A fence makes the compute stream wait for a
    store whose source blocks are handed out again; loads come after the fence through
    their own wait for compute. A lane's scratch is reused by its own stream only, so
    the order of the stream protects it.
    """

    def __init__(
        self,
        layout: BlockLayout,
        pool: torch.Tensor,
        *,
        pinned: bool,
        cuda: Any = torch.cuda,
        scratch_bytes: int = SCRATCH_BYTES,
    ) -> None:
        self._layout = layout
        self._pool = pool
        self._pinned = pinned
        self._cuda = cuda
        num_rows = max(scratch_bytes // layout.bytes_per_block, 1)
        # A load is waited for by a request, a store by nobody: a negative priority
        # is a higher one.
        self._stores = self._lane(num_rows, priority=0)
        self._loads = self._lane(num_rows, priority=-1)

    def _lane(self, num_rows: int, priority: int) -> _Lane:
        scratch = torch.empty(
            (num_rows, self._layout.bytes_per_block),
            dtype=torch.uint8,
            device=self._layout.device,
        )
        return _Lane(self._cuda.Stream(priority=priority), scratch, deque())

    def submit(self, job: TransferJob, *, to_host: bool) -> None:
        lane = self._stores if to_host else self._loads
        copy = self._store_piece if to_host else self._load_piece
        began = time.monotonic()
        # [Note: event order] store after the compute that writes its blocks, load
        # after the compute that reads or zeroes them.
        compute = self._cuda.Event()
        compute.record(self._cuda.current_stream())
        lane.stream.wait_event(compute)
        kept: list[torch.Tensor] = []
        with self._cuda.stream(lane.stream):
            ok = self._try_copy(job, lane.scratch, copy, kept)
            # Also after a failure: what was enqueued before it still runs, and nobody
            # may use these blocks and rows until it has.
            done = self._cuda.Event()
            done.record(lane.stream)
        lane.jobs.append(_InFlight(job, to_host, ok, began, done, kept))

    # vLLM may have made the caches in this mode, and outside of it they cannot be
    # written.
    @torch.inference_mode()
    def _try_copy(
        self,
        job: TransferJob,
        scratch: torch.Tensor,
        copy: Callable[..., None],
        kept: list[torch.Tensor],
    ) -> bool:
        try:
            for start in range(0, len(job.rows), scratch.shape[0]):
                piece = slice(start, start + scratch.shape[0])
                index = torch.tensor(job.block_ids[piece], pin_memory=self._pinned)
                # non_blocking: the pinned source is in `kept` until the job is done.
                on_device = index.to(self._layout.device, non_blocking=True)
                kept += (index, on_device)
                copy(scratch, on_device, job.rows[piece])
        except Exception:
            # The contract of this class: a failed copy is a result.
            logger.exception("Transfer job %d failed.", job.job_id)
            return False
        return True

    def _store_piece(
        self, scratch: torch.Tensor, index: torch.Tensor, rows: Sequence[int]
    ) -> None:
        for segment, part in self._parts(scratch, len(rows)):
            torch.index_select(segment, 0, index, out=part)
        for start, row, length in runs_of(range(len(rows)), rows):
            # non_blocking: the row is pinned by the manager until `done` has passed.
            self._pool[row : row + length].copy_(
                scratch[start : start + length], non_blocking=True
            )

    def _load_piece(
        self, scratch: torch.Tensor, index: torch.Tensor, rows: Sequence[int]
    ) -> None:
        for start, row, length in runs_of(range(len(rows)), rows):
            # non_blocking: the row is pinned by the manager until `done` has passed.
            scratch[start : start + length].copy_(
                self._pool[row : row + length], non_blocking=True
            )
        for segment, part in self._parts(scratch, len(rows)):
            segment.index_copy_(0, index, part)

    def _parts(
        self, scratch: torch.Tensor, num_rows: int
    ) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Yields each segment of the cache with its part of the scratch."""
        for segment in self._layout.segments:
            end = segment.offset + segment.num_bytes
            part = scratch[:num_rows, segment.offset : end].view(self._layout.word)
            yield segment.view, part

    def fence(self, job_ids: Iterable[int]) -> None:
        waited = set(job_ids)
        for in_flight in self._stores.jobs:
            if in_flight.job.job_id in waited:
                # [Note: event order] compute after the store whose source it reuses.
                self._cuda.current_stream().wait_event(in_flight.done)

    def poll(self, timeout_s: float = 0.0) -> list[JobResult]:
        results = []
        for lane in (self._stores, self._loads):
            while lane.jobs and lane.jobs[0].done.query():
                results.append(self._result(lane.jobs.popleft()))
        return results

    def _result(self, in_flight: _InFlight) -> JobResult:
        num_bytes = len(in_flight.job.rows) * self._layout.bytes_per_block
        return JobResult(
            in_flight.job,
            in_flight.to_host,
            in_flight.ok,
            num_bytes if in_flight.ok else 0,
            time.monotonic() - in_flight.began,
        )

    def close(self) -> None:
        # The pool is freed next: no copy may still use it.
        self._stores.stream.synchronize()
        self._loads.stream.synchronize()
