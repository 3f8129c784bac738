"""Drafters whose KV of a token depends on the tokens that come after it."""

from __future__ import annotations

import pytest
from scheduler.bench import Bench, FakeRequest

from vllm_ctx_offload.plan import GroupShape

SLIDING = GroupShape(4, window=5)


def store(bench: Bench, num_tokens: int) -> list[int]:
    """Runs a prompt in one piece; returns the blocks that its step stores."""
    request = bench.add(num_tokens, "first")
    table = list(range(100, 100 + -(-num_tokens // 4)))
    plan = bench.run(request, num_tokens, table)
    stored = [block for job in plan.stores for block in job.block_ids]
    bench.end(*(job.job_id for job in plan.stores))
    bench.planner.on_finished(request, [table])
    return stored


@pytest.mark.parametrize(
    ("lookahead", "num_tokens", "num_stored"),
    [(0, 16, 4), (1, 16, 3), (1, 17, 4), (3, 18, 3), (3, 19, 4)],
)
def test_a_block_is_stored_once_the_tokens_its_drafts_depend_on_are_computed(
    lookahead: int, num_tokens: int, num_stored: int
) -> None:
    bench = Bench(draft_lookahead=lookahead)
    assert store(bench, num_tokens) == [100, 101, 102, 103][:num_stored]


def test_a_block_that_was_left_out_is_stored_with_the_next_step() -> None:
    bench = Bench(draft_lookahead=1)
    request = bench.add(16)
    assert bench.run(request, 16, [1, 2, 3, 4]).stores[0].block_ids == (1, 2, 3)
    request.num_tokens = 17  # decoded
    assert bench.run(request, 1, [5], replace=False).stores[0].block_ids == (4,)


def test_a_rejected_draft_is_no_token_that_came_after() -> None:
    """1. The step computes token 16 and two drafts; 2. both are rejected."""
    bench = Bench(draft_lookahead=1, prompt_only=False)
    request = bench.add(15)
    bench.run(request, 15, [1, 2, 3, 4])
    request.num_tokens = 16
    # The last block is full, and what its drafts depend on is still a guess.
    assert bench.run(request, 3, [5], replace=False).stores == ()
    request.num_tokens, request.num_computed_tokens = 17, 16
    request.grow_hashes("prefix")
    assert bench.run(request, 1).stores[0].block_ids == (4,)


@pytest.mark.parametrize(
    ("num_tokens", "num_local", "promised"),
    [(20, 0, 12), (40, 0, 12), (40, 4, 8), (40, 12, 0), (40, 16, 0), (16, 0, 12)],
)
def test_the_last_block_of_a_hit_is_computed_anew(
    num_tokens: int, num_local: int, promised: int
) -> None:
    """Four blocks are in host memory; a local hit of vLLM's had its own drop."""
    bench = Bench(draft_lookahead=1)
    assert len(store(bench, 17)) == 4
    request = bench.add(num_tokens)
    assert bench.lookup(request, num_local) == (promised, promised > 0)


def test_only_what_is_promised_is_loaded_and_the_rest_given_back() -> None:
    bench = Bench(draft_lookahead=1)
    store(bench, 17)
    request = bench.add(40)
    assert bench.lookup(request) == (12, True)
    bench.planner.on_allocated(request, [[1, 2, 3]], 12)
    (load,) = bench.idle().loads
    assert load.block_ids == (1, 2, 3)
    assert bench.manager.num_pinned == 3
    bench.end(load.job_id)
    assert bench.manager.num_pinned == 0


def test_of_a_chunk_all_blocks_but_the_last_are_loaded() -> None:
    bench = Bench(draft_lookahead=1, blocks_per_chunk=2)
    store(bench, 17)
    request = bench.add(40)
    assert bench.lookup(request, num_local=4) == (8, True)
    bench.planner.on_allocated(request, [[9, 1, 2]], 8)
    (load,) = bench.idle().loads
    # The second block of the first chunk, the first one of the second.
    assert (load.block_ids, load.rows) == ((1, 2), (1, 2))
    bench.end(load.job_id)


def test_a_cap_bounds_what_is_loaded_not_what_is_looked_up() -> None:
    bench = Bench(draft_lookahead=1)
    store(bench, 17)
    for cap, promised in ((0, 0), (7, 4), (8, 8), (100, 12)):
        request = bench.add(
            40, f"capped at {cap}", kv_transfer_params={"max_load_tokens": cap}
        )
        assert bench.lookup(request) == (promised, promised > 0)


def test_a_window_reaches_back_from_where_the_hit_ends() -> None:
    bench = Bench(num_slots=64, groups=(GroupShape(4), SLIDING), draft_lookahead=1)
    first = FakeRequest("first", 21)
    bench.planner.on_new_request(first)
    tables = [[1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16]]
    plan = bench.run(first, 21, *tables)
    bench.end(*(job.job_id for job in plan.stores))
    bench.planner.on_finished(first, tables)

    request = bench.add(40)
    assert bench.lookup(request) == (16, True)
    bench.planner.on_allocated(request, [[31, 32, 33, 34], [0, 0, 0, 44]], 16)
    (load,) = bench.idle().loads
    assert load.block_ids == (31, 32, 33, 34, 44)
    bench.end(load.job_id)
