"""Whole steps: fences, tables, preemption, ends and resets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from scheduler.bench import Bench, FakeRequest

from vllm_ctx_offload.messages import TransferJob, TransferPlan
from vllm_ctx_offload.scheduler import StepEvents, TableUpdate
from vllm_ctx_offload.scheduler.request_state import Status

MakeBench = Callable[..., Bench]


def state_of(bench: Bench, request: FakeRequest) -> Any:
    return bench.planner._states[request.request_id]


def other(bench: Bench, num_tokens: int, request_id: str = "other") -> FakeRequest:
    """Adds a request that shares no prefix with the rest."""
    hashes = [f"{request_id}-{i}".encode() for i in range(num_tokens // 4)]
    return bench.add(num_tokens, request_id, block_hashes=hashes)


def loading(bench: Bench, request: FakeRequest, table: list[int]) -> TransferJob:
    """Admits the request with a load of its whole table."""
    bench.lookup(request)
    bench.planner.on_allocated(request, [table], 4 * len(table))
    (load,) = bench.idle().loads
    return load


def test_context_is_made_once_and_reaches_every_call(bench: Bench) -> None:
    request = bench.add(20, kv_transfer_params={"ctx": {"priority": "high"}})
    bench.lookup(request)
    bench.run(request, 20, [1, 2, 3, 4, 5])
    assert bench.planner.num_requests == 1
    assert bench.stats.take()['["hints_rejected", "priority", "type"]'] == 1
    assert bench.planner.on_finished(request, [[]]) is None
    assert bench.planner.num_requests == 0


def test_unknown_requests_are_ignored(bench: Bench) -> None:
    """A step may name requests that have ended meanwhile."""
    plan = bench.idle(
        num_scheduled_tokens={"gone": 4},
        tables=[TableUpdate("gone", [[1]], 0, replace=True)],
        preempted={"gone"},
    )
    assert plan == TransferPlan()


def test_blocks_that_the_step_writes_are_fenced(bench: Bench) -> None:
    """CASES 1.

    1. A store reads blocks 1 to 3; its request is preempted.
    2. The next step hands out blocks 2 and 9.
    """
    victim = bench.add(12)
    bench.run(victim, 12, [1, 2, 3])
    writer = other(bench, 8)
    plan = bench.planner.plan_step(
        StepEvents(
            num_scheduled_tokens={"other": 8},
            tables=[TableUpdate("other", [[2, 9]], 0, replace=True)],
            preempted={"r"},
        )
    )
    assert plan.fences == (0,)
    assert state_of(bench, victim).status is Status.WAITING
    bench.end(0)
    writer.num_tokens = 12
    assert bench.run(writer, 4, [1], replace=False).fences == ()


def test_blocks_appended_to_a_table_are_fenced(bench: Bench) -> None:
    bench.run(bench.add(8), 8, [1, 2])
    writer = other(bench, 8)
    bench.run(writer, 4, [5])
    assert bench.run(writer, 4, [2], replace=False).fences == (0,)


def test_full_blocks_of_a_hit_are_read_only_and_not_fenced(bench: Bench) -> None:
    """1. A store reads blocks 1 and 2; 2. a request hits them and computes in 3."""
    bench.run(bench.add(8), 8, [1, 2])
    reader = bench.add(10, "reader", num_computed_tokens=8)
    assert bench.run(reader, 2, [1, 2, 3]).fences == ()


def test_targets_of_a_load_are_fenced(bench: Bench) -> None:
    bench.store(8)
    bench.run(other(bench, 8), 8, [1, 2])
    request = bench.add(10)
    bench.lookup(request)
    bench.planner.on_allocated(request, [[2, 7]], 8)
    plan = bench.idle()
    assert plan.fences == (1,)
    assert plan.loads == (TransferJob(2, "r", (2, 7), (0, 1)),)


def test_stores_of_the_same_step_are_not_fenced(bench: Bench) -> None:
    assert bench.run(bench.add(8), 8, [1, 2]).fences == ()


def test_table_is_replaced_on_resumption_and_appended_to_otherwise(
    bench: Bench,
) -> None:
    """CASES 8."""
    request = bench.add(12)
    bench.run(request, 4, [1])
    bench.run(request, 4, [2], replace=False)
    assert state_of(bench, request).block_ids == [[1, 2]]
    request.num_computed_tokens = 0
    bench.idle(preempted={"r"})
    assert state_of(bench, request).block_ids == []
    bench.run(request, 12, [7, 8, 9])
    assert state_of(bench, request).block_ids == [[7, 8, 9]]


def test_table_of_a_session_that_goes_on_is_replaced_without_a_preemption(
    bench: Bench,
) -> None:
    """A streaming-input session keeps its blocks, and is scheduled as a new request."""
    request = bench.add(8)
    bench.run(request, 8, [1, 2])
    bench.run(request, 1, [1, 2, 3])
    assert state_of(bench, request).block_ids == [[1, 2, 3]]


def test_blocks_are_never_appended_to_a_table_that_was_lost(bench: Bench) -> None:
    """Should a release name resumed requests in a way that nobody knows."""
    request = bench.add(8)
    bench.run(request, 4, [1])
    bench.idle(preempted={"r"})
    with pytest.raises(AssertionError):
        bench.run(request, 4, [2], replace=False)


def test_preempted_and_resumed_in_one_step_keeps_the_new_table(bench: Bench) -> None:
    request = bench.add(8)
    bench.run(request, 8, [1, 2])
    plan = bench.planner.plan_step(
        StepEvents(
            num_scheduled_tokens={"r": 8},
            tables=[TableUpdate("r", [[2, 1]], 0, replace=True)],
            preempted={"r"},
        )
    )
    assert plan.fences == (0,)
    assert state_of(bench, request).block_ids == [[2, 1]]


def test_same_request_three_times_with_late_completions(bench: Bench) -> None:
    """CASES 7: jobs are accounted by id.

    1. Job 0 stores; the request is preempted and resumed: its chunks are being stored.
    2. Preempted again; job 0 fails late. The third round stores anew: job 1.
    3. Preempted a third time, and ended before job 1 is reported.
    """
    request = bench.add(8)
    rounds = []
    for table in ([1, 2], [3, 4], [5, 6]):
        request.num_computed_tokens = 0
        plan = bench.run(request, 8, table)
        rounds.append([job.job_id for job in plan.stores])
        bench.idle(preempted={"r"})
        if len(rounds) == 2:
            bench.end(0, failed=True)
    assert rounds == [[0], [], [1]]
    bench.planner.on_finished(request, [[]])
    assert bench.planner.has_work
    bench.end(1)
    assert not bench.planner.has_work
    assert bench.manager.num_resident == 2
    assert bench.manager.num_pinned == 0


def test_preemption_seen_at_the_lookup_comes_before_the_load(bench: Bench) -> None:
    """CASES 21.

    1. A reset takes a running request's blocks between two steps.
    2. The next step looks it up and admits it with a load.
    3. Then it reports the preemption: the load goes on.
    """
    bench.store(16)
    request = bench.add(20)
    bench.run(request, 20, [1, 2, 3, 4, 5])
    request.num_computed_tokens = 0
    assert bench.lookup(request) == (16, True)
    bench.planner.on_allocated(request, [[6, 7, 8, 9]], 16)
    assert len(bench.idle(preempted={"r"}).loads) == 1
    assert state_of(bench, request).status is Status.LOADING
    bench.check()


@pytest.mark.parametrize("failed", [False, True])
def test_abort_during_a_load_leaves_the_pin_to_the_job(
    bench: Bench, failed: bool
) -> None:
    """CASES 4 and 12 of the contract: reported once, whatever became of it."""
    bench.store(16)
    request = bench.add(20)
    load = loading(bench, request, [1, 2, 3, 4])
    bench.planner.on_finished(request, [[1, 2, 3, 4]])
    assert bench.manager.num_pinned == 4
    assert bench.idle() == TransferPlan(idle=True)
    bench.end(load.job_id, failed=failed)
    assert bench.manager.num_pinned == 0
    assert not bench.planner.has_work


def test_abort_after_a_positive_answer_gives_the_lease_back(bench: Bench) -> None:
    """CASES 6."""
    bench.store(16)
    request = bench.add(20)
    bench.lookup(request)
    bench.planner.on_finished(request, [[]])
    assert bench.manager.num_pinned == 0


def test_store_that_failed_is_counted_as_nothing(bench: Bench) -> None:
    request = bench.add(8)
    bench.run(request, 8, [1, 2])
    bench.end(0, failed=True)
    assert bench.manager.num_resident == 0
    assert '["stored_bytes", "default"]' not in bench.stats.take()


class TestReset:
    def test_it_says_no_while_a_load_is_under_way(self, bench: Bench) -> None:
        bench.store(16)
        request = bench.add(20)
        load = loading(bench, request, [1, 2, 3, 4])
        assert not bench.planner.reset()
        bench.end(load.job_id)
        assert bench.planner.reset()
        assert bench.manager.num_resident == 0

    def test_stores_under_way_do_not_survive_it(self, bench: Bench) -> None:
        request = bench.add(8)
        bench.run(request, 8, [1, 2])
        assert bench.planner.reset()
        bench.end(0)
        assert bench.manager.num_resident == 0

    def test_old_kv_of_a_running_request_is_stored_by_nobody(
        self, make_bench: MakeBench
    ) -> None:
        """CASES 32."""
        bench = make_bench(prompt_only=False)
        request = bench.add(8)
        bench.run(request, 8, [1, 2])
        bench.planner.reset()
        request.num_tokens = 12
        request.grow_hashes("prefix")
        assert bench.run(request, 4, [3], replace=False) == TransferPlan()
        bench.planner.on_finished(request, [[1, 2, 3]])
        assert bench.idle() == TransferPlan(idle=True)

    def test_kv_loaded_before_it_is_stored_by_nobody(self, bench: Bench) -> None:
        """CASES 32: the load has ended, the request has not been scheduled."""
        bench.store(16)
        request = bench.add(20)
        load = loading(bench, request, [1, 2, 3, 4])
        request.num_computed_tokens = 16
        bench.end(load.job_id)
        bench.planner.reset()
        assert bench.run(request, 4, [1, 2, 3, 4, 5]) == TransferPlan()

    def test_request_that_lost_its_blocks_stores_anew(self, bench: Bench) -> None:
        request = bench.add(8)
        bench.run(request, 8, [1, 2])
        bench.planner.reset()
        bench.end(0)
        request.num_computed_tokens = 0
        bench.idle(preempted={"r"})
        assert len(bench.run(request, 8, [1, 2]).stores) == 1

    def test_it_takes_leases_back(self, bench: Bench) -> None:
        bench.store(16)
        request = bench.add(20)
        bench.lookup(request)
        assert bench.planner.reset()
        assert bench.manager.num_resident == 0
        assert state_of(bench, request).lease is None


class TestAbandon:
    """After an internal error."""

    def test_loads_of_the_plan_that_failed_are_reported_without_rows(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """1. A load is admitted; 2. planning the step fails after it was noted."""
        bench.store(16)
        request = bench.add(20)
        bench.lookup(request)
        bench.planner.on_allocated(request, [[1, 2, 3, 4]], 16)
        running = other(bench, 8)

        def fail(*args: object) -> None:
            raise RuntimeError

        monkeypatch.setattr(bench.planner._stores, "plan_store", fail)
        with pytest.raises(RuntimeError):
            bench.run(running, 8, [8, 9])
        assert bench.planner.abandon() == (TransferJob(1, "r", (1, 2, 3, 4), ()),)
        assert bench.planner.abandon() == ()


def test_invariants_notice_a_load_that_no_job_makes(make_bench: MakeBench) -> None:
    bench = make_bench()
    request = bench.add(8)
    state_of(bench, request).move_to(Status.LOADING)
    with pytest.raises(AssertionError):
        bench.planner.check_invariants()
    state_of(bench, request).status = Status.WAITING
