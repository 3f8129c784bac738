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
from vllm_ctx_offload.worker.paths import (
    Pages,
    Path,
    choose_path,
    copy_all,
    runs_within,
)
from vllm_ctx_offload.worker.runs import Run
from vllm_ctx_offload.worker.transfer import check_job

__all__ = ["MAX_COPIES", "DeviceTerms", "InFlight", "Index", "Lane"]

logger = logging.getLogger(__name__)

# Copies of one piece of a job. The driver queues about 1,024 launches. One that finds
# the queue full waits, and was seen to hold up launches by other threads to other
# streams too: the model's. Two pieces under way stay well below.
MAX_COPIES: Final = 256


@dataclass(frozen=True, slots=True)
class DeviceTerms:
    """What a lane has to know of the device."""

    cuda: Any  # torch.cuda, or what stands in for it
    pinned_rows: int  # of the pool, in one piece; no copy may span two. 0: not pinned
    scratch_bytes: int  # of each direction, both halves together
    path: Path | None = None  # for every job; None: by size


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
    path: Path = Path.STAGED
    ok: bool = False
    launched: bool = False


class Index(tuple[torch.Tensor, torch.Tensor]):
    """Block ids of a piece on the host, pinned, and on the device; int64."""

    def fill(self, block_ids: Sequence[int]) -> None:
        """Writes the host's part; no stream may read it any more."""
        ids = array("q", block_ids)
        address, count = ids.buffer_info()
        ctypes.memmove(self[0].data_ptr(), address, count * ids.itemsize)


@dataclass(frozen=True, slots=True)
class _Half:
    """Half of the scratch; while one is copied, the other is gathered or scattered.

    Every piece takes one, also where it is copied directly: then only `free` is used.
    """

    scratch: torch.Tensor  # uint8 [rows, bytes_per_block] on the device
    # Each segment of the cache, and its columns of the scratch, in the layout's words.
    parts: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    index: Index
    filled: Any  # the last write of its content
    free: Any  # the last read of its content; the launching thread waits for it


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
    by its event `filled`. A job is done when both streams are through with it, also
    after a failure: what was enqueued before that still runs.

    [Note: two pieces]
    A half is taken again when the launching thread has seen its event `free`, so no
    more than two pieces of a direction are ever with the driver. The other half keeps
    the link busy meanwhile.

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
        # Memory that is not pinned is in no pieces.
        self._rows_per_pin = terms.pinned_rows or pool.shape[0]
        self._pages = Pages(layout, pool, self._rows_per_pin)
        cuda = terms.cuda
        # A load is waited for by a request, a store by nobody: a negative priority
        # is a higher one.
        priority = 0 if to_host else -1
        self.kernels = _new_stream(cuda, priority)
        self.copies = _new_stream(cuda, priority)
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
            self._halves = tuple(
                self._half(min(num_rows, layout.num_blocks, MAX_COPIES))
                for _ in range(2)
            )
        # The other stream uses it too, and a load's first copy waits for nothing.
        self.kernels.synchronize()
        self._turn = 0

    def _half(self, num_rows: int) -> _Half:
        scratch = torch.empty(
            (num_rows, self._layout.bytes_per_block),
            dtype=torch.uint8,
            device=self._layout.device,
        )
        parts = tuple(
            (s.view, scratch[:, s.offset : s.offset + s.num_bytes].view(s.view.dtype))
            for s in self._layout.segments
        )
        # Blocking: a thread that waits for it sleeps, instead of asking the driver
        # again and again.
        cuda = self._terms.cuda
        free = cuda.Event(blocking=True)
        return _Half(scratch, parts, self._new_index(num_rows), cuda.Event(), free)

    def _new_index(self, count: int) -> Index:
        device = self._layout.device
        pin = self._terms.pinned_rows > 0 and device.type == "cuda"
        return Index(
            (
                torch.empty(count, dtype=torch.int64, pin_memory=pin),
                torch.empty(count, dtype=torch.int64, device=device),
            )
        )

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
        check_job(job, self._layout.num_blocks, self._pool.shape[0])
        in_flight.path = self._path()
        if in_flight.path is Path.DIRECT:
            self._copy_pages(in_flight)
        else:
            self._copy_staged(in_flight)

    def _path(self) -> Path:
        return self._terms.path or choose_path(
            self._pages, pinned=self._terms.pinned_rows > 0
        )

    def _pieces(self, job: TransferJob, num_rows: int) -> Iterator[tuple[_Half, slice]]:
        """Yields the pieces of a job, each when there is a half of the scratch free."""
        for start in range(0, len(job.rows), num_rows):
            half = self._halves[self._turn]
            self._turn = 1 - self._turn
            # [Note: two pieces] also: gather, copy and index after the last use of
            # this half.
            half.free.synchronize()
            if self.stopping:
                raise _StoppedError
            yield half, slice(start, min(start + num_rows, len(job.rows)))

    def _end(self, in_flight: InFlight) -> None:
        """Records the events of a job, whatever part of it was enqueued."""
        # [Note: event order] what passes from the first stream to the last one.
        in_flight.sources_read.record(self._first)
        self._last.wait_event(in_flight.sources_read)
        if self._to_host and in_flight.path is Path.DIRECT:
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
        num_rows = max(MAX_COPIES // self._pages.per_block, 1)
        for half, piece in self._pieces(job, num_rows):
            on_device, on_host = self._pages.pairs(
                job.block_ids[piece], job.rows[piece]
            )
            with self._terms.cuda.stream(self.copies):
                if self._to_host:
                    copy_all(on_host, on_device)
                else:
                    copy_all(on_device, on_host)
                half.free.record(self.copies)

    def _copy_staged(self, in_flight: InFlight) -> None:
        # [Note: event order] store after the compute that writes its blocks, load
        # after the compute that reads or zeroes them.
        self.kernels.wait_event(in_flight.compute)
        job = in_flight.job
        copy = self._store_piece if self._to_host else self._load_piece
        for half, piece in self._pieces(job, self._halves[0].scratch.shape[0]):
            copy(half, self._upload(half.index, job.block_ids[piece]), job.rows[piece])

    def _upload(self, index: Index, block_ids: Sequence[int]) -> torch.Tensor:
        index.fill(block_ids)
        on_host, on_device = (part[: len(block_ids)] for part in index)
        with self._terms.cuda.stream(self.kernels):
            # non_blocking: the piece has this index until its half is free.
            on_device.copy_(on_host, non_blocking=True)
        return on_device

    def _store_piece(
        self, half: _Half, index: torch.Tensor, rows: Sequence[int]
    ) -> None:
        with self._terms.cuda.stream(self.kernels):
            for segment, part in half.parts:
                torch.index_select(segment, 0, index, out=part[: len(rows)])
            half.filled.record(self.kernels)
        # [Note: event order] copy after the kernels that fill this half.
        self.copies.wait_event(half.filled)
        with self._terms.cuda.stream(self.copies):
            for start, row, length in self._runs(rows):
                # non_blocking: the row is pinned by the manager until `done`.
                self._pool[row : row + length].copy_(
                    half.scratch[start : start + length], non_blocking=True
                )
            half.free.record(self.copies)

    def _load_piece(
        self, half: _Half, index: torch.Tensor, rows: Sequence[int]
    ) -> None:
        with self._terms.cuda.stream(self.copies):
            for start, row, length in self._runs(rows):
                # non_blocking: the row is pinned by the manager until `done`.
                half.scratch[start : start + length].copy_(
                    self._pool[row : row + length], non_blocking=True
                )
            half.filled.record(self.copies)
        # [Note: event order] scatter after the copies that fill this half.
        self.kernels.wait_event(half.filled)
        with self._terms.cuda.stream(self.kernels):
            for segment, part in half.parts:
                segment.index_copy_(0, index, part[: len(rows)])
            half.free.record(self.kernels)

    def _runs(self, rows: Sequence[int]) -> Iterator[Run]:
        """Yields the runs of a piece; the blocks are rows of the scratch."""
        return runs_within(range(len(rows)), rows, self._rows_per_pin)


def _new_stream(cuda: Any, priority: int) -> Any:
    """Returns a stream that is not the model's.

    torch has 32 streams of a priority and hands them out by turns, so the next one can
    be that which the model runs on.
    """
    stream = cuda.Stream(priority=priority)
    return cuda.Stream(priority=priority) if stream == cuda.current_stream() else stream
