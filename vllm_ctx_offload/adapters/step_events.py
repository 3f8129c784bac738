"""What vLLM's scheduler decided for a step, and what its workers said of it."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from vllm_ctx_offload.adapters.releases import (
    copied_blocks,
    final_states,
    resumed_requests,
)
from vllm_ctx_offload.messages import WorkerReport
from vllm_ctx_offload.scheduler import FinalState, StepEvents, TableUpdate

__all__ = ["step_events", "step_results"]


def step_events(output: Any) -> StepEvents:
    """Translates vLLM's `SchedulerOutput`."""
    cached = output.scheduled_cached_reqs
    resumed = resumed_requests(cached)
    tables = [
        TableUpdate(new.req_id, new.block_ids, new.num_computed_tokens, replace=True)
        for new in output.scheduled_new_reqs
    ]
    for request_id, block_ids, num_computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        if block_ids is not None:
            replace = request_id in resumed
            tables.append(TableUpdate(request_id, block_ids, num_computed, replace))
    return StepEvents(
        num_scheduled_tokens=output.num_scheduled_tokens,
        tables=tables,
        # A resumed request was preempted, whether or not this release says so too.
        preempted=(output.preempted_req_ids or set()) | resumed,
        copied_to=tuple(copied_blocks(output)),
        # vLLM knows best: a table does not say which of its blocks hold states that
        # are final.
        states={
            request_id: [FinalState(*state) for state in states]
            for request_id, states in final_states(output).items()
        },
    )


def step_results(output: Any, metadata_class: type) -> tuple[WorkerReport, Set[int]]:
    """Returns our workers' report, and the blocks that any connector failed to load.

    Args:
        output: vLLM's `KVConnectorOutput`.
        metadata_class: that of our reports.
    """
    metadata = output.kv_connector_worker_meta
    ours = isinstance(metadata, metadata_class)
    return metadata.report if ours else WorkerReport(), output.invalid_block_ids
