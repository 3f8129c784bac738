"""Several KV cache groups: one looks at the whole prompt, one at a window of it."""

from __future__ import annotations

import pytest
from helpers import make_req_context
from scheduler.bench import Bench, FakeRequest

from vllm_ctx_offload.plan import GroupShape
from vllm_ctx_offload.scheduler import TableUpdate

FULL, SLIDING = (
    GroupShape(4),
    GroupShape(4, window=9),
)  # two blocks of 4 and the token itself
BLOCKS, OTHERS = [1, 2, 3, 4, 5], [11, 12, 13, 14, 15]


@pytest.fixture
def bench() -> Bench:
    return Bench(num_slots=64, groups=(FULL, SLIDING))


def store_all(bench: Bench, num_tokens: int = 20, request_id: str = "first") -> None:
    """Stores every chunk of a prompt, which is computed in one piece."""
    request = bench.add(num_tokens, request_id)
    count = num_tokens // 4
    tables = [list(range(first, first + count)) for first in (100, 200)]
    plan = bench.run(request, num_tokens, *tables)
    bench.end(*(job.job_id for job in plan.stores))
    bench.planner.on_finished(request, tables)
    bench.check()


@pytest.mark.parametrize(
    ("shape", "num_tokens", "first"),
    [
        (GroupShape(4), 100, 0),
        (GroupShape(4, window=9), 5, 0),
        (GroupShape(4, window=9), 100, 92),
        (GroupShape(4, stretch=32), 31, 0),
        (GroupShape(4, stretch=32), 32, 32),
        (GroupShape(4, stretch=32), 100, 96),
    ],
)
def test_a_group_says_from_where_on_it_reads(
    shape: GroupShape, num_tokens: int, first: int
) -> None:
    assert shape.first_needed(num_tokens) == first


def test_chunks_of_all_groups_are_stored_side_by_side(bench: Bench) -> None:
    plan = bench.run(bench.add(20), 20, BLOCKS, OTHERS)
    (job,) = plan.stores
    assert job.block_ids == (1, 11, 2, 12, 3, 13, 4, 14, 5, 15)
    assert job.rows == tuple(range(10))


def test_holes_of_a_window_are_not_stored(bench: Bench) -> None:
    plan = bench.run(bench.add(20), 20, BLOCKS, [0, 0, 13, 14, 15])
    assert plan.stores[0].block_ids == (1, 2, 3, 13, 4, 14, 5, 15)


def test_blocks_that_left_the_window_are_somebody_elses(bench: Bench) -> None:
    """vLLM frees them and tells nobody. 1. computes 3 blocks; 2. two more.

    At 2. the window begins at the second block; a refused store is tried again.
    """
    request = bench.add(20)
    bench.run(request, 12, BLOCKS[:3], OTHERS[:3])
    bench.manager.reset()
    bench.end(0, failed=True)
    plan = bench.run(request, 8, BLOCKS[3:], OTHERS[3:], replace=False)
    state = bench.planner._states["r"]
    assert state.block_ids == [BLOCKS, [0, *OTHERS[1:]]]
    assert plan.stores[0].block_ids == (1, 2, 12, 3, 13, 4, 14, 5, 15)
    bench.run(request, 1)
    assert state.block_ids == [BLOCKS, [0, 0, 0, *OTHERS[3:]]]


def test_a_hit_loads_all_of_one_group_and_the_window_of_the_other(bench: Bench) -> None:
    store_all(bench)
    request = bench.add(24, "again")
    assert bench.lookup(request) == (20, True)
    bench.planner.on_allocated(request, [[*BLOCKS, 6], [0, 0, 0, 14, 15, 16]], 20)
    (job,) = bench.idle().loads
    assert job.block_ids == (1, 2, 3, 4, 14, 5, 15)
    bench.end(job.job_id)
    bench.check()
    assert bench.manager.num_pinned == 0


def test_what_misses_in_one_group_moves_the_boundary_of_all(bench: Bench) -> None:
    """A chunk of the window is missing: the two before it count from there."""
    store_all(bench)
    request = bench.add(24, "again")
    keys = bench.planner.on_new_request(request).chain(5, bench.chain)
    bench.manager.remove([keys[2 * 3 + 1]], make_req_context())
    assert bench.lookup(request) == (12, True)
    lease = bench.planner._states["again"].lease
    assert lease is not None
    assert lease.places == (0, 2, 3, 4, 5)  # of the first block only the full group's


def test_a_window_that_is_nowhere_whole_hits_only_from_the_head(bench: Bench) -> None:
    store_all(bench)
    request = bench.add(24, "again")
    keys = bench.planner.on_new_request(request).chain(5, bench.chain)
    bench.manager.remove([keys[1], keys[5], keys[9]], make_req_context())
    assert bench.lookup(request) == (0, False)


def test_a_local_hit_is_not_loaded_again(bench: Bench) -> None:
    store_all(bench)
    request = bench.add(24, "again")
    assert bench.lookup(request, num_local=16) == (4, True)
    bench.planner.on_allocated(request, [BLOCKS, [0, 0, 0, 14, 15]], 4)
    (job,) = bench.idle().loads
    assert job.block_ids == (5, 15)


def test_a_chunk_that_lies_half_in_the_window_is_loaded_by_half() -> None:
    groups = (FULL, GroupShape(4, window=5))
    bench = Bench(num_slots=64, blocks_per_chunk=2, groups=groups)
    store_all(bench, 40)
    request = bench.add(44, "again")
    assert bench.lookup(request) == (40, True)
    tables = [list(range(1, 11)), [0] * 9 + [29]]
    bench.planner.on_allocated(request, tables, 40)
    (job,) = bench.idle().loads
    assert job.block_ids == (*range(1, 11), 29)
    assert job.rows[-1] == bench.manager.find(job_keys(bench, job.job_id))[-1] * 2 + 1


def job_keys(bench: Bench, job_id: int) -> tuple[bytes, ...]:
    return bench.planner._jobs._jobs[job_id].keys


def test_less_than_was_promised_is_computed(bench: Bench) -> None:
    """The window before the shorter boundary was never looked for."""
    store_all(bench)
    request = bench.add(24, "again")
    assert bench.lookup(request) == (20, True)
    bench.planner.on_allocated(request, [BLOCKS[:4], [0, 0, 13, 14]], 16)
    (job,) = bench.idle().loads
    assert (job.block_ids, job.rows) == ((1, 2, 3, 4, 13, 14), ())
    bench.end(job.job_id, failed=True)
    bench.check()


def test_of_a_full_group_alone_less_than_was_promised_is_loaded() -> None:
    bench = Bench(num_slots=64, groups=(FULL, FULL))
    store_all(bench)
    request = bench.add(24, "again")
    assert bench.lookup(request) == (20, True)
    bench.planner.on_allocated(request, [BLOCKS[:4], OTHERS[:4]], 16)
    (job,) = bench.idle().loads
    assert job.block_ids == (1, 11, 2, 12, 3, 13, 4, 14)


def test_a_reallocated_block_of_any_group_is_fenced(bench: Bench) -> None:
    bench.run(bench.add(20), 20, BLOCKS, OTHERS)
    other = FakeRequest("other", 8)
    bench.planner.on_new_request(other)
    plan = bench.idle(
        num_scheduled_tokens={"other": 8},
        tables=[TableUpdate("other", [[21, 22], [0, 13]], 0, replace=True)],
    )
    assert plan.fences == (0,)


def test_receipts_count_tokens_once_for_all_groups(bench: Bench) -> None:
    request = bench.add(20, kv_transfer_params={"ctx": {"receipt": True}})
    bench.run(request, 20, BLOCKS, OTHERS)
    receipt = bench.planner.on_finished(request, [BLOCKS, OTHERS])
    assert receipt is not None
    assert receipt["ctx"]["stored_tokens"] == 20


def protected_chunks(bench: Bench) -> set[tuple[int, int]]:
    """Returns (group, chunk of it) of what the request `first` has protected."""
    keys = bench.planner._states["first"].keys
    places = {key: place for place, key in enumerate(keys)}
    return {
        bench.chain.chunk_at(places[key])
        for run in bench.manager._table
        if run.priority > 35
        for key in run.chunks
    }


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_hints_in_tokens_hold_for_the_chunks_of_every_group(
    blocks_per_chunk: int,
) -> None:
    """Each group's chunks that the range touches, whatever else is in their span."""
    size = 4 * blocks_per_chunk
    groups = (GroupShape(8), GroupShape(4), GroupShape(4))
    bench = Bench(num_slots=64, groups=groups, blocks_per_chunk=blocks_per_chunk)
    directive = {"start": 0, "end": size, "priority": 90, "duration": 5}
    late = {"start": 5 * size + 1, "end": 7 * size, "priority": 80, "duration": 5}
    params = {"ctx": {"retention_directives": [directive, late]}}
    request = bench.add(10 * size, "first", kv_transfer_params=params)
    tables = [list(range(1, 10 * blocks_per_chunk + 1)) for _ in groups]
    bench.run(request, 10 * size, *tables)
    small = {(group, chunk) for group in (1, 2) for chunk in (0, 5, 6)}
    assert protected_chunks(bench) == {(0, 0), (0, 2), (0, 3), *small}
