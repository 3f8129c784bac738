"""What the two sides tell each other."""

from __future__ import annotations

import dataclasses
import pickle
from collections import Counter

import pytest

from vllm_ctx_offload.messages import TransferJob, TransferPlan, WorkerReport

JOB = TransferJob(job_id=3, request_id="req", block_ids=(5, 6), rows=(0, 1))


def test_an_empty_plan_asks_for_nothing() -> None:
    assert TransferPlan() == TransferPlan(
        late_stores=(), fences=(), loads=(), stores=(), idle=False
    )


@pytest.mark.parametrize(
    "message",
    [
        TransferPlan((JOB,), (1, 2), (JOB,), (JOB,), idle=True),
        WorkerReport(Counter({3: 2}), {3}),
    ],
)
def test_messages_survive_the_way_to_another_process(message: object) -> None:
    assert pickle.loads(pickle.dumps(message)) == message


@pytest.mark.parametrize("record", [JOB, TransferPlan()])
def test_plans_can_not_be_changed_once_made(record: object) -> None:
    (first, *_) = dataclasses.fields(record)
    before = dataclasses.replace(record)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, first.name, 99)
    assert record == before


def test_reports_of_several_workers_add_up() -> None:
    one = WorkerReport(Counter({1: 1, 2: 1}), {2})
    other = WorkerReport(Counter({1: 1, 3: 1}), {3})
    expected = WorkerReport(Counter({1: 2, 2: 1, 3: 1}), {2, 3})
    assert one.merge(other) == other.merge(one) == expected
    assert one == WorkerReport(Counter({1: 1, 2: 1}), {2})
    assert other == WorkerReport(Counter({1: 1, 3: 1}), {3})


def test_a_report_is_true_once_a_job_has_ended() -> None:
    assert not WorkerReport()
    assert WorkerReport(Counter({1: 1}))
    assert not WorkerReport().merge(WorkerReport())


def test_reports_do_not_share_what_they_collect() -> None:
    one = WorkerReport()
    one.num_done[1] += 1
    one.failed.add(1)
    assert WorkerReport() == WorkerReport(Counter(), set())
