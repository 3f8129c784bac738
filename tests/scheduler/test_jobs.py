from __future__ import annotations

from collections import Counter

import pytest
from helpers import make_req_context

from vllm_ctx_offload.messages import TransferJob, WorkerReport
from vllm_ctx_offload.scheduler.jobs import JobKind, JobTable

CONTEXT = make_req_context("r")


def done(*job_ids: int, failed: tuple[int, ...] = (), count: int = 1) -> WorkerReport:
    return WorkerReport(Counter(dict.fromkeys(job_ids, count)), set(failed))


def add(table: JobTable, kind: JobKind, *block_ids: int) -> TransferJob:
    rows = tuple(range(len(block_ids)))
    return table.add(kind, CONTEXT, (b"key",), block_ids, rows)


def ended(table: JobTable, report: WorkerReport) -> list[int]:
    return [job.job_id for job in table.settle(report)]


def test_job_ends_when_every_worker_has_ended_it() -> None:
    table = JobTable(num_workers=3)
    job = add(table, JobKind.STORE, 7)
    assert ended(table, done(job.job_id, count=2)) == []
    assert len(table) == 1
    assert ended(table, done(job.job_id)) == [job.job_id]
    assert len(table) == 0


def test_failure_on_one_worker_is_remembered_until_the_job_ends() -> None:
    table = JobTable(num_workers=2)
    job = add(table, JobKind.LOAD, 7)
    assert ended(table, done(job.job_id, failed=(job.job_id,))) == []
    (settled,) = table.settle(done(job.job_id))
    assert settled.failed


def test_jobs_end_in_the_order_of_their_ids() -> None:
    table = JobTable(1)
    first, second = add(table, JobKind.STORE, 1), add(table, JobKind.LOAD, 2)
    report = done(second.job_id, first.job_id)
    assert ended(table, report) == [first.job_id, second.job_id]


def test_ids_are_never_reused() -> None:
    table = JobTable(1)
    first = add(table, JobKind.STORE, 1)
    ended(table, done(first.job_id))
    assert add(table, JobKind.STORE, 1).job_id != first.job_id
    with pytest.raises(KeyError):
        ended(table, done(first.job_id))


def test_readers_are_the_latest_open_store_of_each_block() -> None:
    table = JobTable(1)
    first = add(table, JobKind.STORE, 1, 2)
    second = add(table, JobKind.STORE, 2, 3)
    add(table, JobKind.LOAD, 4)
    assert table.readers_of([1, 2, 3]) == (first.job_id, second.job_id)
    assert table.readers_of([2]) == (second.job_id,)
    assert table.readers_of([4, 5]) == ()
    table.check_invariants()
    # The older store ends: the newer one still reads block 2.
    ended(table, done(first.job_id))
    assert table.readers_of([1, 2]) == (second.job_id,)
    ended(table, done(second.job_id))
    assert table.readers_of([1, 2, 3]) == ()
    table.check_invariants()


def test_loads_are_counted_until_they_end() -> None:
    table = JobTable(1)
    job = add(table, JobKind.LOAD, 1)
    add(table, JobKind.STORE, 2)
    assert table.num_loads == 1
    assert table.loading_requests() == {"r"}
    ended(table, done(job.job_id))
    assert table.num_loads == 0
    assert table.loading_requests() == set()
