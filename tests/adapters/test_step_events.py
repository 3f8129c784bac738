"""What is read of a step's output, and of what the workers say of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from real_scheduler.vllm_setup import NAMES_RESUMED, known_requests, new_request
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from vllm_ctx_offload.adapters.step_events import step_events, step_results
from vllm_ctx_offload.adapters.vllm_api import CtxOffloadWorkerMetadata
from vllm_ctx_offload.messages import WorkerReport
from vllm_ctx_offload.scheduler import FinalState, StepEvents, TableUpdate


def test_empty_step_has_no_events() -> None:
    events = step_events(SchedulerOutput.make_empty())
    assert events == StepEvents(tables=[], preempted=set())


def test_tables_of_new_requests_replace_and_those_of_others_grow() -> None:
    """CASES 8; running ones without new blocks are not named."""
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = {"new": 3, "runs": 1, "same": 1}
    output.scheduled_new_reqs = [new_request("new", [1, 2], 32)]
    output.scheduled_cached_reqs = known_requests(runs=([3], 64), same=(None, 7))
    output.preempted_req_ids = {"lost"}
    assert step_events(output) == StepEvents(
        num_scheduled_tokens={"new": 3, "runs": 1, "same": 1},
        tables=[
            TableUpdate("new", ([1, 2],), 32, replace=True),
            TableUpdate("runs", ([3],), 64, replace=False),
        ],
        preempted={"lost"},
    )


@pytest.mark.skipif(not NAMES_RESUMED, reason="resumed requests come as new ones")
@pytest.mark.parametrize("preempted", [None, {"lost"}])
def test_tables_of_resumed_requests_replace(preempted: set[str] | None) -> None:
    """A resumed request was preempted, whether or not vLLM says so too."""
    output = SchedulerOutput.make_empty()
    output.scheduled_cached_reqs = known_requests(["back"], back=([4, 5], 0))
    output.preempted_req_ids = preempted
    events = step_events(output)
    assert events.tables == [TableUpdate("back", ([4, 5],), 0, replace=True)]
    assert events.preempted == {"back"} | (preempted or set())


def test_states_and_copies_of_blocks_are_named() -> None:
    output = SchedulerOutput.make_empty()
    output.kv_connector_block_state = KVConnectorBlockState(
        req_ids={"a"},
        resolve_block_ids=lambda request_id: ([7],),
        boundary_state_offloads={"a": [(1, 7, 64), (2, 9, 64)]},
    )
    output.kv_cache_block_copies = [KVCacheBlockCopy(3, 4), KVCacheBlockCopy(5, 6)]
    events = step_events(output)
    assert events.copied_to == (4, 6)
    assert events.states == {"a": [FinalState(1, 7, 64), FinalState(2, 9, 64)]}


def test_release_that_hands_over_no_states_is_understood() -> None:
    output = SimpleNamespace(**vars(SchedulerOutput.make_empty()))
    del output.kv_connector_block_state
    assert step_events(output).states == {}


def test_results_are_our_report_and_everybodys_bad_blocks() -> None:
    report = WorkerReport()
    output = KVConnectorOutput(invalid_block_ids={7})
    assert step_results(output, CtxOffloadWorkerMetadata) == (report, {7})
    report.num_done[3] = 1
    output.kv_connector_worker_meta = CtxOffloadWorkerMetadata(report)
    assert step_results(output, CtxOffloadWorkerMetadata) == (report, {7})
