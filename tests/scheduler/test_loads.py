"""Lookups, leases, caps and the loads that follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from scheduler.bench import Bench, FakeRequest

from vllm_ctx_offload.messages import TransferJob, TransferPlan, WorkerReport
from vllm_ctx_offload.plan import GroupShape
from vllm_ctx_offload.scheduler.request_state import Lease, Status
from vllm_ctx_offload.stats import OffloadStats

MakeBench = Callable[..., Bench]


def state_of(bench: Bench, request: FakeRequest) -> Any:
    return bench.planner._states[request.request_id]


def figures(stats: OffloadStats) -> dict[str, float]:
    return {key: value for key, value in stats.take().items() if "_tokens" in key}


def test_nothing_stored_is_nothing_found(bench: Bench) -> None:
    request = bench.add(20)
    assert bench.lookup(request) == (0, False)
    assert state_of(bench, request).lease is None


def test_hit_is_promised_and_pinned(bench: Bench) -> None:
    bench.store(16)
    request = bench.add(20)
    assert bench.lookup(request) == (16, True)
    assert state_of(bench, request).lease == Lease(
        keys=tuple(state_of(bench, request).keys[:4]),
        slots=(0, 1, 2, 3),
        places=(0, 1, 2, 3),
        start_token=0,
        num_tokens=16,
    )
    assert bench.manager.num_pinned == 4


def test_last_token_is_never_promised(bench: Bench) -> None:
    bench.store(16)
    assert bench.lookup(bench.add(16)) == (12, True)
    assert bench.lookup(bench.add(17, "longer")) == (16, True)


def test_answer_counts_beyond_the_local_hit(bench: Bench) -> None:
    bench.store(16)
    assert bench.lookup(bench.add(20), num_local=8) == (8, True)


@pytest.mark.parametrize("num_local", [16, 20, 24])
def test_answer_is_never_negative_and_nothing_is_not_asynchronous(
    bench: Bench, num_local: int
) -> None:
    """CASES 11."""
    bench.store(16)
    assert bench.lookup(bench.add(20), num_local=num_local) == (0, False)
    assert bench.manager.num_pinned == 0


def test_asking_again_keeps_one_lease(bench: Bench) -> None:
    bench.store(16)
    request = bench.add(20)
    for num_local in (0, 8, 4, 0):
        bench.lookup(request, num_local=num_local)
        assert bench.manager.num_pinned == 4 - num_local // 4
        bench.check()


def test_asking_again_for_the_same_leaves_all_as_it_is(bench: Bench) -> None:
    """vLLM asks in every step while a request finds no free blocks."""
    bench.store(16)
    request = bench.add(20)
    bench.lookup(request)
    lease, uses = state_of(bench, request).lease, bench.manager._policy._stamp
    assert bench.lookup(request) == (16, True)
    assert state_of(bench, request).lease is lease
    assert bench.manager._policy._stamp == uses


def test_a_lease_on_what_was_removed_since_is_not_kept(bench: Bench) -> None:
    bench.store(16)
    request = bench.add(20)
    bench.lookup(request)
    keys, context = state_of(bench, request).keys, state_of(bench, request).req_context
    bench.manager.remove(keys[2:], context)
    assert bench.lookup(request) == (8, True)
    assert state_of(bench, request).lease.keys == tuple(keys[:2])
    assert bench.manager.num_resident == 2


def test_a_lease_is_given_back_while_the_request_waits_for_more(bench: Bench) -> None:
    bench.store(16)
    request = bench.add(24)
    bench.lookup(request)
    other = bench.add(24, "other")
    bench.run(other, 24, list(range(6)))
    assert bench.lookup(request) == (None, False)
    assert state_of(bench, request).lease is None


def test_a_lease_on_other_tokens_is_not_kept(bench: Bench) -> None:
    bench.store(16)
    request = bench.add(20)
    bench.lookup(request)
    other = bench.add(20, "other", block_hashes=[b"x%d" % i for i in range(5)])
    bench.end(*[job.job_id for job in bench.run(other, 20, list(range(5))).stores])
    request.block_hashes = other.block_hashes
    assert bench.lookup(request) == (16, True)
    assert state_of(bench, request).lease.keys == tuple(state_of(bench, other).keys[:4])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"skips_loads": True}, "skip_reading_prefix_cache"),
        ({"kv_transfer_params": {"ctx": {"load": False}}}, "load_off"),
    ],
)
def test_request_that_must_not_read_is_skipped_and_counted(
    bench: Bench, fields: dict[str, Any], reason: str
) -> None:
    bench.store(16)
    figures(bench.stats)
    request = bench.add(20, **fields)
    assert bench.lookup(request, num_local=4) == (0, False)
    bench.planner.on_allocated(request, [[1, 2, 3, 4, 5]], 0)
    assert bench.manager.num_pinned == 0
    assert figures(bench.stats) == {
        '["lookup_tokens", "default"]': 16,
        '["hit_tokens", "default"]': 0,
        '["missed_tokens", "default"]': 0,
        f'["skipped_tokens", "default", "{reason}"]': 16,
    }


def test_a_guess_looks_at_the_head_of_the_chain(bench: Bench) -> None:
    """vLLM asks whenever a request enters its queues, before any lookup."""
    request = bench.add(20)
    assert not bench.planner.may_load(request)
    bench.store(16)
    assert bench.planner.may_load(request)
    assert bench.manager.num_pinned == 0
    assert not bench.planner.may_load(bench.add(3, "short"))
    other = [b"x%d" % index for index in range(5)]
    assert not bench.planner.may_load(bench.add(20, "other", block_hashes=other))
    assert not bench.planner.may_load(bench.add(20, "skips", skips_loads=True))


def test_a_guess_counts_what_is_just_being_stored(bench: Bench) -> None:
    bench.run(bench.add(8, "first"), 8, [1, 2])
    assert bench.planner.may_load(bench.add(9))


def test_of_windows_alone_the_head_says_nothing(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(groups=(GroupShape(4, window=6),))
    request = bench.add(9)
    assert bench.planner.may_load(request)
    assert bench.lookup(request) == (0, False)


def test_cap_counts_what_is_loaded_not_what_is_local(bench: Bench) -> None:
    bench.store(24)
    request = bench.add(30, kv_transfer_params={"max_load_tokens": 11})
    assert bench.lookup(request) == (8, True)
    assert bench.lookup(request, num_local=4) == (8, True)


def test_load_goes_into_the_table_behind_the_local_hit(bench: Bench) -> None:
    bench.store(16)
    request = bench.add(20)
    bench.lookup(request, num_local=4)
    bench.planner.on_allocated(request, [[11, 12, 13, 14]], 12)
    plan = bench.idle()
    assert plan == TransferPlan(
        loads=(TransferJob(1, "r", (12, 13, 14), (1, 2, 3)),), idle=True
    )
    assert state_of(bench, request).status is Status.LOADING
    assert bench.idle() == TransferPlan(idle=True)


def test_load_may_begin_inside_a_chunk(make_bench: MakeBench) -> None:
    """CASES 10: chunks of 2 blocks, a local hit of 1 and of 3 blocks."""
    bench = make_bench(blocks_per_chunk=2)
    bench.store(32)
    for num_local, expected in ((4, (1, 2, 3, 4, 5)), (12, (3, 4, 5))):
        request = bench.add(30, f"after {num_local}")
        assert bench.lookup(request, num_local=num_local) == (24 - num_local, True)
        table = list(range(6))
        bench.planner.on_allocated(request, [table], 24 - num_local)
        (load,) = bench.idle().loads
        assert load.block_ids == load.rows == expected


def test_less_than_promised_gives_the_rest_of_the_lease_back(bench: Bench) -> None:
    bench.store(16)
    request = bench.add(20)
    bench.lookup(request)
    bench.planner.on_allocated(request, [[1, 2]], 7)
    assert bench.manager.num_pinned == 2
    (load,) = bench.idle().loads
    assert load == TransferJob(1, "r", (1, 2), (0, 1))


def test_admission_with_no_tokens_gives_the_lease_back(bench: Bench) -> None:
    """The loser inside a MultiConnector sees real blocks and 0 tokens."""
    bench.store(16)
    request = bench.add(20)
    bench.lookup(request)
    bench.planner.on_allocated(request, [[1, 2, 3, 4, 5]], 0)
    assert bench.manager.num_pinned == 0
    assert not bench.planner.has_work


def test_second_admission_after_a_load_changes_nothing(bench: Bench) -> None:
    bench.store(16)
    request = bench.add(20)
    bench.lookup(request)
    bench.planner.on_allocated(request, [[1, 2, 3, 4]], 16)
    (load,) = bench.idle().loads
    bench.end(load.job_id)
    assert state_of(bench, request).status is Status.WAITING
    figures(bench.stats)
    bench.planner.on_allocated(request, [[1, 2, 3, 4, 5]], 0)
    assert figures(bench.stats) == {}
    assert bench.idle() == TransferPlan(idle=True)
    assert bench.manager.num_pinned == 0


def test_promise_without_a_lease_becomes_a_load_that_fails(bench: Bench) -> None:
    """Never wrong bytes: only the promised blocks, and no rows to fill them from."""
    bench.store(16)
    request = bench.add(20)
    bench.lookup(request, num_local=4)
    bench.planner.reset()
    bench.planner.on_allocated(request, [[1, 2, 3, 4]], 12)
    (load,) = bench.idle().loads
    assert load == TransferJob(1, "r", (2, 3, 4), ())
    bench.end(load.job_id, failed=True)
    assert not bench.planner.has_work


def test_failed_load_takes_its_keys_out_of_the_cache(bench: Bench) -> None:
    """CASES 16."""
    bench.store(16)
    request = bench.add(20)
    bench.lookup(request)
    bench.planner.on_allocated(request, [[1, 2, 3, 4]], 16)
    (load,) = bench.idle().loads
    bench.end(load.job_id, failed=True)
    assert bench.manager.num_resident == 0


def test_request_whose_load_failed_steps_back_once_and_is_computed(
    bench: Bench,
) -> None:
    """CASES 18: at the head of the queue it would hold up all who own blocks."""
    bench.store(16)
    request = bench.add(20)
    bench.lookup(request)
    bench.planner.on_allocated(request, [[1, 2, 3, 4]], 16)
    (load,) = bench.idle().loads
    bench.end(load.job_id, failed=True)
    bench.store(16, "again")
    assert bench.lookup(request) == (None, False)
    assert bench.lookup(request) == (0, False)
    assert bench.lookup(request) == (0, False)
    bench.run(request, 20, [1, 2, 3, 4, 5])
    bench.idle(preempted={"r"})
    assert bench.lookup(request) == (16, True)


@pytest.mark.parametrize(("failed", "num_loaded"), [(False, 16), (True, 0)])
def test_receipt_counts_only_what_was_loaded_well(
    bench: Bench, failed: bool, num_loaded: int
) -> None:
    bench.store(16)
    request = bench.add(20, kv_transfer_params={"ctx": {"receipt": True}})
    bench.lookup(request)
    bench.planner.on_allocated(request, [[1, 2, 3, 4]], 16)
    (load,) = bench.idle().loads
    bench.end(load.job_id, failed=failed)
    receipt = bench.planner.on_finished(request, [[1, 2, 3, 4]])
    assert receipt is not None
    assert receipt["ctx"]["loaded_tokens"] == num_loaded


def test_load_of_several_workers_ends_with_the_last(make_bench: MakeBench) -> None:
    bench = make_bench(num_workers=2)
    bench.store(16)
    bench.end(0)  # the second worker
    request = bench.add(20)
    bench.lookup(request)
    bench.planner.on_allocated(request, [[1, 2, 3, 4]], 16)
    (load,) = bench.idle().loads
    bench.stats.take()
    bench.end(load.job_id)
    assert bench.manager.num_pinned == 4
    bench.end(load.job_id)
    assert bench.manager.num_pinned == 0
    assert bench.stats.take() == {'["loaded_bytes", "default"]': 2 * 4 * 10}


def test_end_of_a_load_leaves_a_new_request_with_its_id_alone(bench: Bench) -> None:
    bench.store(16)
    request = bench.add(20)
    bench.lookup(request)
    bench.planner.on_allocated(request, [[1, 2, 3, 4]], 16)
    (load,) = bench.idle().loads
    bench.planner.on_finished(request, [[1, 2, 3, 4]])
    again = bench.add(20)
    bench.run(again, 20, [5, 6, 7, 8, 9])
    bench.end(load.job_id)
    assert state_of(bench, again).status is Status.RUNNING


class TestWaiting:
    """For chunks that are just being stored."""

    @pytest.fixture
    def bench(self, make_bench: MakeBench) -> Bench:
        bench = make_bench(load_wait_s=1.0)
        storing = bench.add(16, "storing")
        bench.lookup(storing)
        bench.run(storing, 16, [1, 2, 3, 4])
        return bench

    def test_wait_has_a_deadline(self, bench: Bench) -> None:
        """CASES 19."""
        request = bench.add(20)
        answers = [bench.lookup(request, now=now) for now in (5.0, 5.5, 5.99, 6.0)]
        assert answers == [(None, False)] * 3 + [(0, False)]
        assert bench.manager.num_pinned == 4  # by the store alone

    def test_ready_head_is_taken_when_the_wait_is_over(self, bench: Bench) -> None:
        bench.end(0)
        storing = bench.add(24, "longer")
        bench.run(storing, 24, [5, 6, 7, 8, 9, 10])
        request = bench.add(30)
        assert bench.lookup(request, now=1.0) == (None, False)
        assert bench.lookup(request, now=3.0) == (16, True)

    def test_deadline_starts_anew_after_an_admission(self, bench: Bench) -> None:
        request = bench.add(20)
        bench.lookup(request, now=0.0)
        assert bench.lookup(request, now=1.0) == (0, False)
        bench.planner.on_allocated(request, [[]], 0)
        assert bench.lookup(request, now=9.0) == (None, False)

    def test_wait_is_observed_when_the_request_is_admitted(self, bench: Bench) -> None:
        """1. It waits. 2. The store ends. 3. It is answered, and again, for want of
        blocks. 4. Only the wait for the store was one of ours."""
        request = bench.add(20)
        bench.lookup(request, now=5.0)
        bench.end(0)
        for now in (5.25, 9.0):
            assert bench.lookup(request, now=now) == (16, True)
        key = '["load_wait_seconds"]'
        assert key not in bench.stats.take()
        bench.planner.on_allocated(request, [[1, 2, 3, 4]], 16)
        assert bench.stats.take()[key] == [0.25]

    def test_wait_that_was_given_up_is_observed_whole(self, bench: Bench) -> None:
        request = bench.add(20)
        for now in (5.0, 5.5, 6.25):
            bench.lookup(request, now=now)
        bench.planner.on_allocated(request, [[]], 0)
        assert bench.stats.take()['["load_wait_seconds"]'] == [1.25]

    def test_who_did_not_wait_is_not_observed(self, make_bench: MakeBench) -> None:
        """By an answer at once, and where no wait is allowed."""
        bench = make_bench(load_wait_s=0.0)
        storing = bench.add(16, "storing")
        bench.lookup(storing)
        bench.planner.on_allocated(storing, [[1, 2, 3, 4]], 0)
        bench.run(storing, 16, [1, 2, 3, 4])
        request = bench.add(20)
        assert bench.lookup(request, now=5.0) == (0, False)
        bench.planner.on_allocated(request, [[]], 0)
        assert '["load_wait_seconds"]' not in bench.stats.take()


def test_stores_beside_a_failed_load_of_ours_are_kept(bench: Bench) -> None:
    bench.store(16)
    request = bench.add(20)
    bench.lookup(request)
    bench.planner.on_allocated(request, [[1, 2, 3, 4, 5]], 16)
    (load,) = bench.idle().loads
    other = bench.add(16, "other", block_hashes=[b"x%d" % i for i in range(4)])
    (store,) = bench.run(other, 16, [6, 7, 8, 9]).stores
    report = WorkerReport(Counter({load.job_id: 1, store.job_id: 1}), {load.job_id})
    bench.planner.on_worker_report(report, bad_blocks={1, 2, 3, 4})
    assert bench.manager.num_resident == 4


def test_stores_beside_a_failed_load_of_another_connector_are_not(
    bench: Bench,
) -> None:
    bench.store(16)
    request = bench.add(16, block_hashes=[b"x%d" % i for i in range(4)])
    (store,) = bench.run(request, 16, [6, 7, 8, 9]).stores
    bench.planner.on_worker_report(WorkerReport(), bad_blocks={6})
    bench.end(store.job_id)
    assert bench.manager.num_resident == 4
