"""Recurrent layers, whose blocks hold states, and groups with blocks of other sizes."""

from __future__ import annotations

import pytest
from helpers import make_req_context
from scheduler.bench import Bench, FakeRequest

from vllm_ctx_offload.plan import GroupShape
from vllm_ctx_offload.scheduler import FinalState, TableUpdate

FULL, STATE = GroupShape(4), GroupShape(4, recurrent=True)
BLOCKS = [1, 2, 3, 4, 5, 6]


def make_bench(*groups: GroupShape, **options: int | bool) -> Bench:
    return Bench(num_slots=64, groups=groups, **options)


@pytest.fixture
def bench() -> Bench:
    return make_bench(FULL, STATE)


def store(bench: Bench, *ends: int, num_tokens: int = 24) -> None:
    """Stores a prompt with the states at these ends."""
    request = bench.add(num_tokens, "first")
    done = 0
    for end in [*ends, num_tokens]:
        first, last = done // 4, -(-end // 4)
        tables = [list(range(100 + first, 100 + last)), [0] * (last - first)]
        states = (FinalState(1, 200 + end, end),) if end in ends else ()
        plan = bench.run(request, end - done, *tables, replace=not done, states=states)
        bench.end(*(job.job_id for job in plan.stores))
        done = end
    bench.planner.on_finished(request, [list(range(100, 100 + num_tokens // 4)), [9]])
    bench.check()


def test_a_state_is_needed_where_it_ends() -> None:
    assert [STATE.first_needed(num_tokens) for num_tokens in (0, 1, 8)] == [0, 0, 7]
    assert not STATE.looks_at_all


def test_only_states_that_are_handed_over_are_stored(bench: Bench) -> None:
    """The table names their blocks too, and the one that is written to."""
    request = bench.add(24)
    final = FinalState(1, 12, 8)
    plan = bench.run(request, 8, BLOCKS[:2], [0, 12], states=(final,))
    assert plan.stores[0].block_ids == (1, 2, 12)
    plan = bench.run(request, 6, BLOCKS[2:4], [13, 14], replace=False)
    assert plan.stores[0].block_ids == (3,)
    assert bench.planner._states["r"].block_ids == [BLOCKS[:4], [0] * 4]


def test_a_state_that_is_handed_over_late_is_stored_then(bench: Bench) -> None:
    request = bench.add(24)
    bench.run(request, 8, BLOCKS[:2], [0, 12])
    plan = bench.run(request, 2, states=(FinalState(1, 12, 8),))
    assert plan.stores[0].block_ids == (12,)


def test_a_state_inside_a_block_is_not_stored(bench: Bench) -> None:
    request = bench.add(24)
    plan = bench.run(request, 8, BLOCKS[:2], [0, 12], states=(FinalState(1, 12, 6),))
    assert plan.stores[0].block_ids == (1, 2)


def test_a_state_of_tokens_that_may_not_be_stored_is_not() -> None:
    bench = make_bench(FULL, STATE)
    request = bench.add(24, kv_transfer_params={"max_offload_tokens": 4})
    plan = bench.run(request, 8, BLOCKS[:2], [0, 12], states=(FinalState(1, 12, 8),))
    assert plan.stores[0].block_ids == (1,)


def test_nothing_is_known_of_states_once_the_request_has_ended(bench: Bench) -> None:
    request = bench.add(8)
    bench.run(request, 7, BLOCKS[:2], [0, 12])
    request.num_computed_tokens = 8
    bench.planner.on_finished(request, [BLOCKS[:2], [11, 12]])
    (job,) = bench.idle().late_stores
    assert job.block_ids == (2,)


def test_a_hit_ends_at_a_state_and_loads_no_other(bench: Bench) -> None:
    store(bench, 8, 16)
    request = bench.add(25, "again")
    assert bench.lookup(request) == (16, True)
    bench.planner.on_allocated(request, [BLOCKS[:4], [0, 0, 0, 14]], 16)
    (job,) = bench.idle().loads
    assert job.block_ids == (1, 2, 3, 4, 14)
    bench.end(job.job_id)
    bench.check()


def test_without_the_last_state_the_one_before_is_hit(bench: Bench) -> None:
    store(bench, 8, 16)
    request = bench.add(25, "again")
    keys = bench.planner.on_new_request(request).chain(6, bench.chain)
    bench.manager.remove([keys[2 * 3 + 1]], make_req_context())
    assert bench.lookup(request) == (8, True)
    bench.manager.remove([keys[2 * 1 + 1]], make_req_context())
    assert bench.lookup(request) == (0, False)


def test_a_local_hit_reaches_as_far_as_the_last_state(bench: Bench) -> None:
    store(bench, 8, 16)
    request = bench.add(25, "again")
    assert bench.lookup(request, num_local=16) == (0, False)
    assert bench.lookup(request, num_local=12) == (4, True)


def test_a_state_that_is_being_stored_is_waited_for(bench: Bench) -> None:
    store(bench, 8)
    request = bench.add(24, "second")
    bench.run(request, 16, BLOCKS[:4], [0, 0, 0, 14], states=(FinalState(1, 14, 16),))
    again = bench.add(25, "again")
    assert bench.lookup(again) == (None, False)
    bench.end(*bench.planner._jobs._jobs)
    assert bench.lookup(again) == (16, True)


def test_of_a_chunk_of_states_only_the_last_is_kept() -> None:
    bench = make_bench(FULL, STATE, blocks_per_chunk=2)
    request = bench.add(24)
    states = (FinalState(1, 12, 8), FinalState(1, 11, 4))
    plan = bench.run(request, 8, BLOCKS[:2], [11, 12], states=states[:1])
    (job,) = plan.stores
    assert (job.block_ids, job.rows) == ((1, 2, 12), (0, 1, 3))


def test_groups_go_on_where_the_larger_blocks_end() -> None:
    """Blocks of 4 and of 12 tokens, one of which slides."""
    bench = make_bench(FULL, GroupShape(12, window=9))
    request = bench.add(24, "first")
    plan = bench.run(request, 24, BLOCKS, [21, 22])
    (job,) = plan.stores
    assert job.block_ids == (1, 2, 3, 21, 4, 5, 6, 22)
    bench.end(job.job_id)
    again = bench.add(28, "again")
    assert bench.lookup(again, num_local=12) == (12, True)
    bench.planner.on_allocated(again, [BLOCKS, [0, 32]], 12)
    (job,) = bench.idle().loads
    assert job.block_ids == (4, 5, 6, 32)
    bench.check()


def test_a_chunk_that_is_missing_moves_all_to_the_end_of_a_larger_block() -> None:
    bench = make_bench(FULL, GroupShape(12, window=9))
    bench.end(
        *(j.job_id for j in bench.run(bench.add(24), 24, BLOCKS, [21, 22]).stores)
    )
    again = bench.add(28, "again")
    keys = bench.planner.on_new_request(again).chain(2, bench.chain)
    bench.manager.remove([keys[5]], make_req_context())
    assert bench.lookup(again) == (12, True)


def test_a_prompt_that_fills_no_larger_block_is_not_stored_yet() -> None:
    bench = make_bench(FULL, GroupShape(12))
    request = bench.add(24)
    assert bench.run(request, 11, BLOCKS[:3], [21]).stores == ()
    assert len(bench.run(request, 1).stores[0].block_ids) == 4


def test_the_block_that_a_hit_ends_in_is_told_by_its_own_size() -> None:
    """A table that replaces one: full blocks of the hit are only read."""
    bench = make_bench(FULL, GroupShape(12))
    bench.run(bench.add(24), 24, BLOCKS, [21, 22])
    bench.planner.on_new_request(FakeRequest("other", 24))
    for table, fences in (([[1, 2, 3], [21]], ()), ([[7, 8, 9, 6], [21]], (0,))):
        plan = bench.idle(tables=[TableUpdate("other", table, 12, replace=True)])
        assert plan.fences == fences


def test_a_block_that_another_is_copied_to_is_fenced(bench: Bench) -> None:
    bench.run(bench.add(24), 8, BLOCKS[:2], [0, 12])
    assert bench.idle(copied_to=(9,)).fences == ()
    assert bench.idle(copied_to=(2,)).fences == (0,)


def test_where_vllm_writes_early_nothing_is_stored_late() -> None:
    for writes_early, num_late in ((False, 1), (True, 0)):
        bench = make_bench(FULL, writes_early=writes_early)
        request = bench.add(8)
        bench.run(request, 7, BLOCKS[:2])
        request.num_computed_tokens = 8
        bench.planner.on_finished(request, [BLOCKS[:2]])
        assert len(bench.idle().late_stores) == num_late
