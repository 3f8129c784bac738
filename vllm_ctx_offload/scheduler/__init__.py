"""The scheduler side: events of vLLM's scheduler in, transfer plans out."""

from vllm_ctx_offload.scheduler.planner import Planner, StepEvents, TableUpdate
from vllm_ctx_offload.scheduler.request_state import RequestOffloadState, RequestView
from vllm_ctx_offload.scheduler.stores import FinalState

__all__ = [
    "FinalState",
    "Planner",
    "RequestOffloadState",
    "RequestView",
    "StepEvents",
    "TableUpdate",
]
