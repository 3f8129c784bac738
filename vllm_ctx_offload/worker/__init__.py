"""The worker side: host pool, memory layout and transfers. Needs torch, not vLLM."""

from vllm_ctx_offload.worker.worker import FinishedTransfers, OffloadWorker

__all__ = ["FinishedTransfers", "OffloadWorker"]
