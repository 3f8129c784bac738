"""The scheduler side: events of vLLM's scheduler in, transfer plans out."""

from vllm_ctx_offload.scheduler.planner import Planner, StepEvents, TableUpdate
from vllm_ctx_offload.scheduler.request_state import (
    RequestOffloadState,
    RequestReading,
    RequestView,
)
from vllm_ctx_offload.scheduler.stores import FinalState

__all__ = [
    "FinalState",
    "Planner",
    "RequestOffloadState",
    "RequestReading",
    "RequestView",
    "StepEvents",
    "TableUpdate",
]
