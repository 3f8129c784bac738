"""The worker side: takes the plan of a step through the device backend."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.messages import (
    Terms,
    TransferJob,
    TransferPlan,
    WorkerReport,
    difference,
)
from vllm_ctx_offload.stats import OffloadStats
from vllm_ctx_offload.worker.cpu_transfer import CpuTransfer
from vllm_ctx_offload.worker.cuda_transfer import (
    SCRATCH_BYTES,
    CudaTransfer,
    DeviceTerms,
)
from vllm_ctx_offload.worker.host_pool import HostPool
from vllm_ctx_offload.worker.kv_layout import (
    BlockLayout,
    derive_layout,
    named_tensors,
)
from vllm_ctx_offload.worker.proof import prove_layout
from vllm_ctx_offload.worker.transfer import JobResult, Transfer

if TYPE_CHECKING:
    # Whoever reads a configuration needs pydantic and YAML; a worker is given the plan.
    from vllm_ctx_offload.plan import OffloadPlan

__all__ = ["FinishedTransfers", "OffloadWorker"]

logger = logging.getLogger(__name__)

# How long a step without tokens waits for a transfer instead of spinning: short
# enough for a request that arrives meanwhile.
_IDLE_WAIT_S: Final = 0.005
# How long it waits at once for what is under way to end.
_DRAIN_LOOK_S: Final = 1.0


@dataclass(slots=True)
class FinishedTransfers:
    """What ended since the last step."""

    loaded_requests: set[str] = field(default_factory=set)  # well or not
    # Request id -> targets of its failed load.
    failed_loads: dict[str, set[int]] = field(default_factory=dict)
    report: WorkerReport = field(default_factory=WorkerReport)

    @property
    def failed_block_ids(self) -> set[int]:
        return set().union(*self.failed_loads.values())


class OffloadWorker:
    """One worker's pool and transfers; every method is called on the model's thread.

    In each step: `heed`, `before_forward`, then `start_loads`, the forward pass before
    or after it, `start_stores`, `finish_step`.
    """

    def __init__(self, plan: OffloadPlan, *, in_lockstep: bool = False) -> None:
        """Makes a worker without a pool; see `register`.

        Args:
            plan: the sizes to keep to.
            in_lockstep: other engines wait in each step for this one, which therefore
                waits for no transfer when it has nothing to compute itself.
        """
        self._plan = plan
        self._idle_wait_s = 0.0 if in_lockstep else _IDLE_WAIT_S
        self.stats = OffloadStats()
        self._pool: HostPool | None = None
        self._transfer: Transfer | None = None
        self._idle = False
        self._refuses = False  # to copy anything
        # Ends to report with the next step: of jobs that could not even be submitted,
        # and of those that were open when the transfers were closed.
        self._ended: list[JobResult] = []
        self._num_open = 0

    def register(
        self,
        kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
        num_blocks: int,
    ) -> None:
        """Takes the cache tensors, makes the pool, and proves the layout by use.

        Recurrent layers may have several, one for each of their states.

        Raises:
            ConfigError: unknown layout, too little memory, or unsupported device.
        """
        tensors = named_tensors(kv_caches)
        layout = derive_layout(tensors, num_blocks)
        if layout.bytes_per_block > self._plan.bytes_per_block:
            raise ConfigError(
                f"CtxOffloadConnector: a block takes {layout.bytes_per_block} bytes on "
                f"this worker, but vLLM's specification says "
                f"{self._plan.bytes_per_block}; please report this model, and serve "
                "it without the connector until then."
            )
        self._pool = HostPool(
            self._plan.num_rows,
            layout.bytes_per_block,
            layout.device,
        )
        try:
            self._transfer = _make_transfer(layout, self._pool)
            prove_layout(self._transfer, tensors, num_blocks)
        except ConfigError:
            self.close()
            raise

    @property
    def is_registered(self) -> bool:
        """Whether there are caches; after the end there are none."""
        return self._transfer is not None

    @property
    def pinned(self) -> bool:
        return self._pool is not None and self._pool.pinned

    def heed(self, terms: Terms) -> None:
        """Takes what the scheduler side goes by; if that is something else, jobs fail.

        The start has compared it, but for connectors inside of another one.
        """
        if terms == self._plan.terms or self._refuses:
            return
        self._refuses = True
        logger.error(
            "Nothing is copied between the device and host memory, because this worker "
            "has another plan than the scheduler side (%s); set cpu_bytes_to_use, and "
            "give all hosts the same configuration and the same release of "
            "vllm-ctx-offload.",
            difference(terms, self._plan.terms),
        )

    def before_forward(self, plan: TransferPlan) -> None:
        """Starts late stores and fences the blocks that this step writes anew."""
        self._idle = plan.idle
        for job in plan.late_stores:
            self._submit(job, to_host=True)
        if plan.fences and self._transfer is not None:
            self._transfer.fence(plan.fences)

    def start_loads(self, plan: TransferPlan) -> None:
        for job in plan.loads:
            self._submit(job, to_host=False)

    def start_stores(self, plan: TransferPlan) -> None:
        """Called after the forward pass that computes the blocks was submitted."""
        for job in plan.stores:
            self._submit(job, to_host=True)
        if self._plan.writes_early and plan.stores and self._transfer is not None:
            # The fence of a block that is handed out again would come too late.
            self._transfer.fence(tuple(job.job_id for job in plan.stores))

    def _submit(self, job: TransferJob, *, to_host: bool) -> None:
        if self._transfer is None or self._refuses:
            self._ended.append(JobResult(job, to_host, False, 0.0))
            return
        self._num_open += 1
        self._transfer.submit(job, to_host=to_host)

    def finish_step(self) -> FinishedTransfers:
        """Returns what ended since the last call, each job exactly once."""
        results, self._ended = self._ended, []
        if self._transfer is not None:
            wait = self._idle_wait_s if self._idle and not results else 0.0
            results += self._poll(self._transfer, wait)
        finished = FinishedTransfers()
        for result in results:
            self._count(result)
            finished.report.num_done[result.job.job_id] += 1
            if not result.ok:
                finished.report.failed.add(result.job.job_id)
            if not result.to_host:
                finished.loaded_requests.add(result.job.request_id)
                if not result.ok:
                    targets = set(result.job.block_ids)
                    finished.failed_loads[result.job.request_id] = targets
        return finished

    def _poll(self, transfer: Transfer, timeout_s: float = 0.0) -> list[JobResult]:
        results = transfer.poll(timeout_s)
        self._num_open -= len(results)
        return results

    def wait_until_idle(self) -> None:
        """Returns when no copy touches the caches; ends are reported as ever."""
        while self._num_open and self._transfer is not None:
            self._ended += self._poll(self._transfer, _DRAIN_LOOK_S)

    def _count(self, result: JobResult) -> None:
        direction = "store" if result.to_host else "load"
        if not result.ok:
            self.stats.count("transfer_failures", direction)
        else:
            self.stats.observe("transfer_seconds", direction, value=result.seconds)

    def close(self) -> None:
        """Ends all transfers and gives the pool back. May be called twice."""
        if self._transfer is not None:
            self._transfer.close()
            self._ended += self._poll(self._transfer)
            self._transfer = None
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def _make_transfer(layout: BlockLayout, pool: HostPool) -> Transfer:
    device = layout.device.type
    if device == "cpu":
        return CpuTransfer(layout, pool.rows)
    if device == "cuda":
        terms = DeviceTerms(torch.cuda, pool.pinned_rows, SCRATCH_BYTES)
        return CudaTransfer(layout, pool.rows, terms)
    raise ConfigError(
        f"CtxOffloadConnector: the KV cache lies on a '{device}' device, but only "
        "'cuda' and 'cpu' are supported; serve without the connector there."
    )
