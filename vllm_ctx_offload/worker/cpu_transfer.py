"""The backend for vLLM's CPU platform: a copy thread for each direction."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import torch

from vllm_ctx_offload.messages import TransferJob
from vllm_ctx_offload.worker.copy import CpuCopy
from vllm_ctx_offload.worker.kv_layout import BlockLayout
from vllm_ctx_offload.worker.numa import leave_the_models_cores, process_cores
from vllm_ctx_offload.worker.transfer import JobResult, check_job

__all__ = ["CpuTransfer"]

logger = logging.getLogger(__name__)

# How long an engine that stops waits for a copy that may hang.
_CLOSE_WAIT_S: Final = 1.0
# What a thread copies before it looks whether to rest, and how much of the time of all
# cores the copies of a direction take beside a model that computes.
_PIECE_BYTES: Final = 4 * 1024**2
_SHARE: Final = 0.05


class _Submitted(NamedTuple):
    job: TransferJob
    to_host: bool
    began: float


class CpuTransfer:
    """Runs the jobs of each direction one after the other.

    On the CPU platform compute is over when the model's call returns, so a job that is
    submitted between two forward passes comes after the first of them. `fence` waits,
    since the next forward pass, or the next load, would write at once. See `Transfer`
    for the contract.

    Cores and memory are the model's too. While it computes, a thread rests after each
    piece of a job, the longer the fewer cores there are. It does not while somebody
    waits: a fence, an engine that has nothing else to do, or the end.
    """

    def __init__(
        self,
        layout: BlockLayout,
        pool: torch.Tensor,
        copy: Callable[..., None] | None = None,
        *,
        piece_bytes: int = _PIECE_BYTES,
        share: float = _SHARE,
    ) -> None:
        self._layout = layout
        self._pool = pool
        self._copy = copy or CpuCopy(layout, pool)
        self._blocks_a_piece = max(piece_bytes // layout.bytes_per_block, 1)
        # Seconds of rest for each second of copying.
        self._rest = max(1 / (share * max(len(process_cores()), 1)) - 1, 0.0)
        self._changed = threading.Condition()
        # All below is guarded by `_changed`.
        self._queues: dict[bool, deque[_Submitted]] = {True: deque(), False: deque()}
        self._open_stores: set[int] = set()
        self._num_open = 0
        self._num_waiting = 0
        self._results: list[JobResult] = []
        self._closing = False
        # Each thread's own.
        self._rest_until = {True: 0.0, False: 0.0}
        # Daemons: a copy that hangs must not keep the process alive.
        self._threads = {
            to_host: threading.Thread(
                target=self._run,
                args=(to_host,),
                name=f"ctx-offload-{'store' if to_host else 'load'}",
                daemon=True,
            )
            for to_host in (True, False)
        }
        for thread in self._threads.values():
            thread.start()

    def submit(self, job: TransferJob, *, to_host: bool) -> None:
        submitted = _Submitted(job, to_host, time.monotonic())
        with self._changed:
            self._num_open += 1
            if not self._closing:
                self._queues[to_host].append(submitted)
                if to_host:
                    self._open_stores.add(job.job_id)
                self._changed.notify_all()
                return
        self._finish(submitted, ok=False)

    def fence(self, job_ids: Iterable[int]) -> None:
        # Without the wait the forward pass would overwrite blocks that a store reads.
        waited = set(job_ids)
        self._wait_for(lambda: not (waited & self._open_stores))

    def poll(self, timeout_s: float = 0.0) -> list[JobResult]:
        if timeout_s > 0:
            self._wait_for(lambda: bool(self._results) or not self._num_open, timeout_s)
        with self._changed:
            results, self._results = self._results, []
        return results

    def _wait_for(
        self, over: Callable[[], bool], timeout_s: float | None = None
    ) -> None:
        with self._changed:
            self._num_waiting += 1
            self._changed.notify_all()
            self._changed.wait_for(over, timeout_s)
            self._num_waiting -= 1

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        deadline = time.monotonic() + _CLOSE_WAIT_S
        for thread in self._threads.values():
            thread.join(max(deadline - time.monotonic(), 0.0))
        if any(thread.is_alive() for thread in self._threads.values()):
            logger.warning("A copy that is still being made was left behind.")

    def _run(self, to_host: bool) -> None:
        leave_the_models_cores()
        queue = self._queues[to_host]
        while (submitted := self._next(queue)) is not None:
            self._finish(submitted, ok=self._try_copy(submitted))
        with self._changed:
            dropped = list(queue)
            queue.clear()
        for submitted in dropped:
            self._finish(submitted, ok=False)

    def _next(self, queue: deque[_Submitted]) -> _Submitted | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or bool(queue))
            return None if self._closing else queue.popleft()

    def _try_copy(self, submitted: _Submitted) -> bool:
        job = submitted.job
        try:
            check_job(job, self._layout.num_blocks, self._pool.shape[0])
            self._copy_by_pieces(job, to_host=submitted.to_host)
        except Exception:
            # The contract of this class: a failed copy is a result.
            logger.exception("Transfer job %d failed.", job.job_id)
            return False
        return True

    def _copy_by_pieces(self, job: TransferJob, *, to_host: bool) -> None:
        for start in range(0, len(job.rows), self._blocks_a_piece):
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closing or self._num_waiting > 0,
                    self._rest_until[to_host] - time.monotonic(),
                )
            piece = slice(start, start + self._blocks_a_piece)
            began = time.thread_time()
            self._copy(job.block_ids[piece], job.rows[piece], to_host=to_host)
            rest = self._rest * (time.thread_time() - began)
            self._rest_until[to_host] = time.monotonic() + rest

    def _finish(self, submitted: _Submitted, *, ok: bool) -> None:
        job, to_host, began = submitted
        result = JobResult(job, to_host, ok, time.monotonic() - began)
        with self._changed:
            self._results.append(result)
            self._num_open -= 1
            self._open_stores.discard(job.job_id)
            self._changed.notify_all()
