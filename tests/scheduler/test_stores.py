"""What is stored in which step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from scheduler.bench import Bench, FakeRequest

from vllm_ctx_offload.messages import TransferJob, TransferPlan
from vllm_ctx_offload.plan import GroupShape

MakeBench = Callable[..., Bench]


def test_chunks_are_stored_in_the_step_that_completes_them(bench: Bench) -> None:
    request = bench.add(14)
    assert bench.run(request, 6, [1, 2]) == TransferPlan(
        stores=(TransferJob(0, "r", (1,), (0,)),)
    )
    assert bench.run(request, 6, [3], replace=False) == TransferPlan(
        stores=(TransferJob(1, "r", (2, 3), (1, 2)),)
    )
    assert bench.run(request, 2, [4], replace=False) == TransferPlan()


def test_chunk_of_several_blocks_is_stored_whole(make_bench: MakeBench) -> None:
    bench = make_bench(blocks_per_chunk=2)
    request = bench.add(22)
    assert bench.run(request, 22, [9, 8, 7, 6, 5, 4]).stores == (
        TransferJob(0, "r", (9, 8, 7, 6), (0, 1, 2, 3)),
    )


def test_hash_may_cover_less_than_a_block(make_bench: MakeBench) -> None:
    """CONTRACT 23: two hashes a block; the key is the one at the chunk's end."""
    bench = make_bench(hashes_per_block=2)
    hashes = [b"%d" % index for index in range(4)]
    request = bench.add(8, block_hashes=hashes)
    bench.run(request, 8, [1, 2])
    keys = bench.planner._states["r"].keys
    assert [key[-1:] for key in keys] == [b"1", b"3"]


def test_resident_chunks_are_not_stored_twice(bench: Bench) -> None:
    bench.store(16)
    request = bench.add(24)
    (store,) = bench.run(request, 24, [1, 2, 3, 4, 5, 6]).stores
    assert store.block_ids == (5, 6)


def test_what_has_no_hash_yet_is_stored_in_a_later_step(make_bench: MakeBench) -> None:
    """CASES 12: the count of computed tokens runs ahead of the hashes."""
    bench = make_bench(prompt_only=False)
    request = bench.add(8, num_prompt_tokens=4)
    request.block_hashes.pop()
    (first,) = bench.run(request, 8, [1, 2]).stores
    assert first.block_ids == (1,)
    assert bench.run(request, 1, [3], replace=False).stores == ()
    request.num_tokens = 9
    request.grow_hashes("prefix")
    (second,) = bench.run(request, 1).stores
    assert second.block_ids == (2,)


def test_tokens_beyond_the_known_ones_are_not_stored(make_bench: MakeBench) -> None:
    """CONTRACT 10: drafts and placeholders may be rejected."""
    bench = make_bench(prompt_only=False)
    request = bench.add(7)
    assert bench.run(request, 7 + 5, [1, 2, 3]).stores[0].block_ids == (1,)


def test_decoded_chunks_are_stored_on_request_only(make_bench: MakeBench) -> None:
    for prompt_only, expected in ((True, (1,)), (False, (1, 2, 3))):
        bench = make_bench(prompt_only=prompt_only)
        request = bench.add(12, num_prompt_tokens=5)
        (store,) = bench.run(request, 12, [1, 2, 3]).stores
        assert store.block_ids == expected


def decode(
    bench: Bench, request: FakeRequest, end: int, num_groups: int = 1
) -> list[int]:
    """Decodes token by token; returns the ends at which chunks were stored."""
    stored_at = []
    while request.num_tokens < end:
        request.num_tokens += 1
        request.grow_hashes("prefix")
        more = [request.num_tokens // 4 + 1] if request.num_tokens % 4 == 1 else []
        if bench.run(request, 1, *[more] * num_groups, replace=False).stores:
            stored_at.append(request.num_tokens)
    return stored_at


def test_a_long_chain_that_decodes_is_offered_when_it_has_grown_by_a_part(
    make_bench: MakeBench,
) -> None:
    """Or every chunk would cost a look at all before it. The end brings the rest."""
    bench = make_bench(num_slots=300, prompt_only=False)
    request = bench.add(4 * 128)
    bench.run(request, 4 * 128, list(range(128)))
    assert decode(bench, request, 4 * 134) == [4 * 130, 4 * 133]
    bench.planner.on_finished(request, [list(range(134))])
    (late,) = bench.idle().late_stores
    assert late.block_ids == (133,)


def test_a_short_chain_that_decodes_is_offered_with_every_chunk(
    make_bench: MakeBench,
) -> None:
    bench = make_bench(num_slots=300, prompt_only=False)
    request = bench.add(4 * 60)
    bench.run(request, 4 * 60, list(range(60)))
    assert decode(bench, request, 4 * 64) == [4 * n for n in range(61, 65)]


def test_where_blocks_are_freed_early_nothing_waits(make_bench: MakeBench) -> None:
    groups = (GroupShape(4), GroupShape(4, window=5))
    bench = make_bench(num_slots=600, prompt_only=False, groups=groups)
    request = bench.add(4 * 128)
    bench.run(request, 4 * 128, *[list(range(1, 129))] * 2)
    assert decode(bench, request, 4 * 129, num_groups=2) == [4 * 129]


@pytest.mark.parametrize(("window", "wait"), [(15, 1), (16, 2), (31, 3)])
def test_what_a_window_still_holds_waits_no_longer_than_half_of_it(
    make_bench: MakeBench, window: int, wait: int
) -> None:
    groups = (GroupShape(4), GroupShape(4, window=window))
    bench = make_bench(num_slots=600, prompt_only=False, groups=groups)
    request = bench.add(4 * 192)
    bench.run(request, 4 * 192, *[list(range(1, 193))] * 2)
    steps = decode(bench, request, 4 * 204, num_groups=2)
    assert steps == list(range(4 * (192 + wait), 4 * 205, 4 * wait))[: len(steps)]
    num_stored = bench.manager.num_resident
    assert num_stored == 2 * steps[-1] // 4


@pytest.mark.parametrize(("cap", "expected"), [(0, ()), (7, (1,)), (99, (1, 2, 3))])
def test_cap_bounds_what_is_stored(
    bench: Bench, cap: int, expected: tuple[int, ...]
) -> None:
    request = bench.add(12, kv_transfer_params={"max_offload_tokens": cap})
    plan = bench.run(request, 12, [1, 2, 3])
    assert tuple(b for job in plan.stores for b in job.block_ids) == expected


def test_request_that_wants_no_store_gets_none(bench: Bench) -> None:
    request = bench.add(12, kv_transfer_params={"ctx": {"store": False}})
    assert bench.run(request, 12, [1, 2, 3]) == TransferPlan()


def test_no_more_is_stored_than_the_table_holds(bench: Bench) -> None:
    request = bench.add(12)
    (store,) = bench.run(request, 12, [1, 2]).stores
    assert store.block_ids == (1, 2)


def test_full_pool_rejects_the_tail_and_counts_it(make_bench: MakeBench) -> None:
    bench = make_bench(num_slots=2)
    request = bench.add(
        16, kv_transfer_params={"ctx": {"receipt": True}}, num_prompt_tokens=16
    )
    (store,) = bench.run(request, 16, [1, 2, 3, 4]).stores
    assert store.block_ids == (1, 2)
    assert bench.stats.take()['["rejected_stores", "default", "full"]'] == 2
    receipt = bench.planner.on_finished(request, [[1, 2, 3, 4]])
    assert receipt == {
        "ctx": {
            "tenant": "default",
            "priority": 35,
            "lookup_tokens": 0,
            "loaded_tokens": 0,
            "stored_tokens": 8,
            "rejected_tokens": 8,
            "rejected_reason": "full",
        }
    }


def test_pool_that_is_full_of_pins_stores_nothing(make_bench: MakeBench) -> None:
    bench = make_bench(num_slots=2)
    bench.run(bench.add(8, "storing"), 8, [8, 9])
    other = bench.add(8, block_hashes=[b"other-0", b"other-1"])
    assert bench.run(other, 8, [1, 2]).stores == ()


class TestLateStores:
    """Of what the last step computed, when the request ends."""

    @staticmethod
    def ended(bench: Bench, **fields: Any) -> FakeRequest:
        """1. Async scheduling computes token 8; 2. it gets known, and is the end."""
        request = bench.add(7, **fields)
        bench.run(request, 7, [1, 2])
        bench.run(request, 1)
        request.num_tokens = request.num_prompt_tokens = 8
        request.grow_hashes("prefix")
        bench.planner.on_finished(request, [[1, 2]])
        return request

    def test_it_is_first_in_the_next_plan(self, bench: Bench) -> None:
        self.ended(bench)
        assert bench.planner.has_work
        assert bench.idle() == TransferPlan(
            late_stores=(TransferJob(1, "r", (2,), (1,)),), idle=True
        )
        assert bench.idle() == TransferPlan(idle=True)

    def test_its_blocks_are_fenced_when_the_same_step_reuses_them(
        self, bench: Bench
    ) -> None:
        """CASES 1."""
        self.ended(bench)
        request = bench.add(4, "next", block_hashes=[b"else"])
        plan = bench.run(request, 4, [2])
        assert plan.fences == (1,)
        assert [job.job_id for job in plan.late_stores] == [1]

    def test_nothing_is_late_without_blocks(self, bench: Bench) -> None:
        request = bench.add(7)
        bench.run(request, 7, [1, 2])
        request.num_computed_tokens = request.num_tokens = 8
        request.grow_hashes("prefix")
        bench.planner.on_finished(request, [[]])
        assert bench.idle() == TransferPlan(idle=True)

    def test_nothing_is_late_for_a_request_that_never_ran(self, bench: Bench) -> None:
        """CASES 3 and CONTRACT 13."""
        request = bench.add(8)
        bench.planner.on_finished(request, [[]])
        bench.planner.on_finished(request, [[]])
        assert bench.idle() == TransferPlan(idle=True)
