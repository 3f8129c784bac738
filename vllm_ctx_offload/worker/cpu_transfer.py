"""The backend for vLLM's CPU platform: one copy thread beside the model."""

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
from vllm_ctx_offload.worker.copy_thread import (
    give_way_to_the_model,
    leave_the_models_cores,
)
from vllm_ctx_offload.worker.kv_layout import BlockLayout
from vllm_ctx_offload.worker.transfer import JobResult, check_job

__all__ = ["CpuTransfer"]

logger = logging.getLogger(__name__)

# How long an engine that stops waits for a copy that may hang.
_CLOSE_WAIT_S: Final = 1.0


class _Submitted(NamedTuple):
    job: TransferJob
    to_host: bool
    began: float


class CpuTransfer:
    """Runs jobs one after the other, both directions in one queue.

    On the CPU platform compute is over when the model's call returns, so a job that is
    submitted between two forward passes comes after the first of them. The queue
    orders a load after every store before it; `fence` waits, since the next forward
    pass would write at once. See `Transfer` for the contract.
    """

    def __init__(
        self,
        layout: BlockLayout,
        pool: torch.Tensor,
        copy: Callable[..., None] | None = None,
    ) -> None:
        self._layout = layout
        self._pool = pool
        self._copy = copy or CpuCopy(layout, pool)
        self._changed = threading.Condition()
        # All below is guarded by `_changed`.
        self._queue: deque[_Submitted] = deque()
        self._open_stores: set[int] = set()
        self._num_open = 0
        self._results: list[JobResult] = []
        self._closing = False
        # A daemon: a copy that hangs must not keep the process alive.
        self._thread = threading.Thread(
            target=self._run, name="ctx-offload-copy", daemon=True
        )
        self._thread.start()

    def submit(self, job: TransferJob, *, to_host: bool) -> None:
        submitted = _Submitted(job, to_host, time.monotonic())
        with self._changed:
            self._num_open += 1
            if not self._closing:
                self._queue.append(submitted)
                if to_host:
                    self._open_stores.add(job.job_id)
                self._changed.notify_all()
                return
        self._finish(submitted, ok=False)

    def fence(self, job_ids: Iterable[int]) -> None:
        # Without the wait the forward pass would overwrite blocks that a store reads.
        waited = set(job_ids)
        with self._changed:
            self._changed.wait_for(lambda: not (waited & self._open_stores))

    def poll(self, timeout_s: float = 0.0) -> list[JobResult]:
        with self._changed:
            if timeout_s > 0 and self._num_open:
                self._changed.wait_for(lambda: bool(self._results), timeout_s)
            results, self._results = self._results, []
        return results

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_WAIT_S)
        if self._thread.is_alive():
            logger.warning("A copy that is still being made was left behind.")

    def _run(self) -> None:
        leave_the_models_cores()
        give_way_to_the_model()
        while (submitted := self._next()) is not None:
            self._finish(submitted, ok=self._try_copy(submitted))
        with self._changed:
            dropped = list(self._queue)
            self._queue.clear()
        for submitted in dropped:
            self._finish(submitted, ok=False)

    def _next(self) -> _Submitted | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or bool(self._queue))
            return None if self._closing else self._queue.popleft()

    def _try_copy(self, submitted: _Submitted) -> bool:
        job = submitted.job
        try:
            check_job(job, self._layout.num_blocks, self._pool.shape[0])
            self._copy(job.block_ids, job.rows, to_host=submitted.to_host)
        except Exception:
            # The contract of this class: a failed copy is a result.
            logger.exception("Transfer job %d failed.", job.job_id)
            return False
        return True

    def _finish(self, submitted: _Submitted, *, ok: bool) -> None:
        job, to_host, began = submitted
        num_bytes = len(job.rows) * self._layout.bytes_per_block if ok else 0
        result = JobResult(job, to_host, ok, num_bytes, time.monotonic() - began)
        with self._changed:
            self._results.append(result)
            self._num_open -= 1
            self._open_stores.discard(job.job_id)
            self._changed.notify_all()
