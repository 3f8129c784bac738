"""One direction of the CUDA backend: what is enqueued for a job, and after what."""

from __future__ import annotations

import ctypes
import logging
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from vllm_ctx_offload.messages import TransferJob
from vllm_ctx_offload.worker.kv_layout import BlockLayout
from vllm_ctx_offload.worker.paths import Pages, Path, choose_path, copy_all
from vllm_ctx_offload.worker.runs import runs_of
from vllm_ctx_offload.worker.transfer import check_job

__all__ = ["DeviceTerms", "InFlight", "Index", "Lane"]

logger = logging.getLogger(__name__)

# Blocks of the smallest index. Larger ones are made at the first job that needs them.
_MIN_INDEX: Final = 4096


@dataclass(frozen=True, slots=True)
class DeviceTerms:
    """What a lane has to know of the device."""

    cuda: Any  # torch.cuda, or what stands in for it
    pinned: bool  # whether the pool is
    scratch_bytes: int  # of each direction, both halves together
    path: Path | None = None  # for every job; None: by size and count


@dataclass(slots=True)
class InFlight:
    """A job, and the events that others wait for. Events are reused once it is done.

    `launched` is written last, by the launching thread: before, the events below it
    still stand for earlier jobs.
    """

    job: TransferJob
    to_host: bool
    began: float
    compute: Any  # all compute before the job was submitted
    sources_read: Any  # the job reads its source no more
    done: Any  # its last copy
    ok: bool = False
    launched: bool = False
    # Read by the lane's stream until `done` has passed; then it is reused.
    index: Index | None = None


class Index(tuple[torch.Tensor, torch.Tensor]):
    """Block ids on the host, pinned, and on the device; int64, reused job by job."""

    def fill(self, block_ids: Sequence[int]) -> None:
        """Writes the host's part; no stream may read it any more."""
        ids = array("q", block_ids)
        address, count = ids.buffer_info()
        ctypes.memmove(self[0].data_ptr(), address, count * ids.itemsize)


@dataclass(frozen=True, slots=True)
class _Half:
    """Half of the scratch; while one is copied, the other is gathered or scattered."""

    scratch: torch.Tensor  # uint8 [rows, bytes_per_block] on the device
    filled: Any  # the last write of its content
    free: Any  # the last read of its content


class _StoppedError(Exception):
    """The transfers are being closed."""


class Lane:
    """Two streams, a scratch of two halves, and the jobs that are under way.

    [Note: event order]
    A store waits for the compute submitted before it, which writes the blocks that it
    reads. A load waits for the compute submitted before it, which may still read the
    blocks that it overwrites, or zero them; into the scratch it copies without that.
    A fence makes the compute stream wait until a store has read the blocks that are
    handed out again; loads come after the fence through their own wait for compute.
    Kernels run on one stream and copies on the other, so that the link does not idle
    while blocks are gathered; between the two, each half of the scratch is handed over
    by its events `filled` and `free`. A job is done when both streams are through with
    it, also after a failure: what was enqueued before that still runs.

    `launch` is called on the launching thread, everything else on the model's.
    """

    def __init__(
        self,
        layout: BlockLayout,
        pool: torch.Tensor,
        terms: DeviceTerms,
        *,
        to_host: bool,
    ) -> None:
        self._layout = layout
        self._pool = pool
        self._terms = terms
        self._to_host = to_host
        self._pages = Pages(layout, pool)
        cuda = terms.cuda
        # A load is waited for by a request, a store by nobody: a negative priority
        # is a higher one.
        priority = 0 if to_host else -1
        self.kernels = cuda.Stream(priority=priority)
        self.copies = cuda.Stream(priority=priority)
        # In the order in which data passes them.
        self._first, self._last = (
            (self.kernels, self.copies) if to_host else (self.copies, self.kernels)
        )
        self.open: deque[InFlight] = deque()
        self.stopping = False
        num_rows = max(terms.scratch_bytes // (2 * layout.bytes_per_block), 1)
        # The allocator hands a stream's memory to that stream only, so what is made
        # here is not still in use by compute.
        with cuda.stream(self.kernels):
            self._halves = tuple(self._half(num_rows) for _ in range(2))
            self._indices = [self._new_index(_MIN_INDEX)]
        self._turn = 0

    def _half(self, num_rows: int) -> _Half:
        scratch = torch.empty(
            (min(num_rows, self._layout.num_blocks), self._layout.bytes_per_block),
            dtype=torch.uint8,
            device=self._layout.device,
        )
        return _Half(scratch, self._terms.cuda.Event(), self._terms.cuda.Event())

    def _new_index(self, count: int) -> Index:
        count = max(_MIN_INDEX, 1 << (count - 1).bit_length())
        device = self._layout.device
        pin = self._terms.pinned and device.type == "cuda"
        return Index(
            (
                torch.empty(count, dtype=torch.int64, pin_memory=pin),
                torch.empty(count, dtype=torch.int64, device=device),
            )
        )

    def give_back(self, in_flight: InFlight) -> None:
        """Takes back the index of a job that is done."""
        if in_flight.index is not None:
            self._indices.append(in_flight.index)
            in_flight.index = None

    def launch(self, in_flight: InFlight) -> None:
        """Enqueues a job and sets what became of it. Does not raise for the job."""
        try:
            self._enqueue(in_flight)
            in_flight.ok = True
        except _StoppedError:
            pass
        except Exception:
            # The contract of the backend: a failed copy is a result.
            logger.exception("Transfer job %d failed.", in_flight.job.job_id)
        try:
            self._end(in_flight)
        except Exception:
            # The device is lost: vLLM finds that out by itself, and this thread goes
            # on, so that nobody waits for it in vain.
            logger.exception("Transfer job %d failed.", in_flight.job.job_id)
            in_flight.ok = False
        in_flight.launched = True

    def _enqueue(self, in_flight: InFlight) -> None:
        job = in_flight.job
        self._stop_if_asked()
        check_job(job, self._layout.num_blocks, self._pool.shape[0])
        if self._path(len(job.rows)) is Path.DIRECT:
            self._copy_pages(in_flight)
        else:
            self._copy_staged(in_flight)

    def _path(self, num_blocks: int) -> Path:
        return self._terms.path or choose_path(
            self._pages, num_blocks, pinned=self._terms.pinned
        )

    def _stop_if_asked(self) -> None:
        if self.stopping:
            raise _StoppedError

    def _end(self, in_flight: InFlight) -> None:
        """Records the events of a job, whatever part of it was enqueued."""
        # [Note: event order] what passes from the first stream to the last one.
        in_flight.sources_read.record(self._first)
        self._last.wait_event(in_flight.sources_read)
        if self._to_host and in_flight.index is None:
            # Copied page by page, on the last stream.
            in_flight.sources_read.record(self._last)
        in_flight.done.record(self._last)
        if not in_flight.ok:
            # A piece that was begun may have left a half without its events.
            for half in self._halves:
                half.free.record(self._last)

    def _copy_pages(self, in_flight: InFlight) -> None:
        # [Note: event order] store after the compute that writes its blocks, load
        # after the compute that reads or zeroes them.
        self.copies.wait_event(in_flight.compute)
        job = in_flight.job
        on_device, on_host = self._pages.pairs(job.block_ids, job.rows)
        sources, targets = (
            (on_device, on_host) if self._to_host else (on_host, on_device)
        )
        with self._terms.cuda.stream(self.copies):
            for start in range(0, len(sources), 512):
                self._stop_if_asked()
                copy_all(targets[start : start + 512], sources[start : start + 512])

    def _copy_staged(self, in_flight: InFlight) -> None:
        job = in_flight.job
        on_host, on_device = in_flight.index = self._index_for(len(job.rows))
        in_flight.index.fill(job.block_ids)
        with self._terms.cuda.stream(self.kernels):
            count = len(job.block_ids)
            # non_blocking: the job has this index until it is done.
            on_device[:count].copy_(on_host[:count], non_blocking=True)
        # [Note: event order] store after the compute that writes its blocks, load
        # after the compute that reads or zeroes them.
        self.kernels.wait_event(in_flight.compute)
        copy = self._store_piece if self._to_host else self._load_piece
        num_rows = self._halves[0].scratch.shape[0]
        for start in range(0, len(job.rows), num_rows):
            self._stop_if_asked()
            piece = slice(start, min(start + num_rows, len(job.rows)))
            half = self._halves[self._turn]
            self._turn = 1 - self._turn
            copy(half, on_device[piece], job.rows[piece])

    def _index_for(self, count: int) -> Index:
        for number, index in enumerate(self._indices):
            if index[0].shape[0] >= count:
                return self._indices.pop(number)
        with self._terms.cuda.stream(self.kernels):
            return self._new_index(count)

    def _store_piece(
        self, half: _Half, index: torch.Tensor, rows: Sequence[int]
    ) -> None:
        # [Note: event order] gather after the copies that still read this half.
        self.kernels.wait_event(half.free)
        with self._terms.cuda.stream(self.kernels):
            for segment, part in self._parts(half.scratch, len(rows)):
                torch.index_select(segment, 0, index, out=part)
            half.filled.record(self.kernels)
        # [Note: event order] copy after the kernels that fill this half.
        self.copies.wait_event(half.filled)
        with self._terms.cuda.stream(self.copies):
            for start, row, length in runs_of(range(len(rows)), rows):
                # non_blocking: the row is pinned by the manager until `done`.
                self._pool[row : row + length].copy_(
                    half.scratch[start : start + length], non_blocking=True
                )
            half.free.record(self.copies)

    def _load_piece(
        self, half: _Half, index: torch.Tensor, rows: Sequence[int]
    ) -> None:
        # [Note: event order] copy after the kernels that still read this half.
        self.copies.wait_event(half.free)
        with self._terms.cuda.stream(self.copies):
            for start, row, length in runs_of(range(len(rows)), rows):
                # non_blocking: the row is pinned by the manager until `done`.
                half.scratch[start : start + length].copy_(
                    self._pool[row : row + length], non_blocking=True
                )
            half.filled.record(self.copies)
        # [Note: event order] scatter after the copies that fill this half.
        self.kernels.wait_event(half.filled)
        with self._terms.cuda.stream(self.kernels):
            for segment, part in self._parts(half.scratch, len(rows)):
                segment.index_copy_(0, index, part)
            half.free.record(self.kernels)

    def _parts(
        self, scratch: torch.Tensor, num_rows: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields each segment of the cache with its part of the scratch."""
        for segment in self._layout.segments:
            end = segment.offset + segment.num_bytes
            part = scratch[:num_rows, segment.offset : end].view(self._layout.word)
            yield segment.view, part
