"""What is stored, when, and that a later request finds it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from real_scheduler.harness import Engine
from real_scheduler.invariants import host_manager
from real_scheduler.sim_worker import Controls

MakeEngine = Callable[..., Engine]
PROMPT = list(range(1, 201))  # six blocks and 8 tokens


def loaded_by(engine: Engine, prompt: list[int]) -> int:
    """Returns how many tokens a fresh request gets from the host."""
    assert engine.scheduler.reset_prefix_cache()
    before = engine.count("hit_tokens")
    engine.run(prompt)
    return int(engine.count("hit_tokens") - before)


@pytest.mark.parametrize("max_tokens", [31, 32, 33, 130])
def test_every_block_that_decoding_fills_is_found_by_a_fresh_request(
    make_engine: MakeEngine, async_scheduling: bool, max_tokens: int
) -> None:
    """CASES 12: the count of computed tokens runs ahead of the hashes.

    1. The prompt ends one token before a block's edge; decoding crosses the edges.
    2. The request ends by length: the last token is never computed.
    3. A fresh request asks for all of it: every full block comes from the host.
    """
    engine = make_engine(
        async_scheduling=async_scheduling, extra={"offload_prompt_only": False}
    )
    prompt = PROMPT[:63]
    engine.run(prompt, max_tokens=max_tokens)
    full = prompt + engine.tokens["r0"]
    computed = len(full) - 1
    assert loaded_by(engine, [*full, 500, 501]) == computed // 32 * 32


def test_stop_token_leaves_its_last_full_block_to_a_late_store(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """CASES 12: an end that nobody could foresee.

    1. The stop token fills a block. Under async scheduling the step that computes it
       has been scheduled when the request ends.
    2. The block is stored late where it was computed, and only there.
    """
    engine = make_engine(
        async_scheduling=async_scheduling, extra={"offload_prompt_only": False}
    )
    prompt = PROMPT[:60]
    stop = engine.answer(prompt, 36)[-1]
    engine.run(prompt, max_tokens=100, stop_token_ids=[stop])
    full = prompt + engine.tokens["r0"]
    assert len(full) == 96
    expected = 96 if async_scheduling else 64
    assert loaded_by(engine, [*full, 500, 501]) == expected


def test_blocks_of_a_late_store_are_fenced_when_the_next_step_reuses_them(
    make_engine: MakeEngine,
) -> None:
    """CASES 1, for a request that ended.

    1. Under async scheduling a request ends; its last block is stored late.
    2. The copy is held back; a waiting request gets the blocks.
    3. The plan fences the late store: it keeps the old bytes.
    """
    engine = make_engine(
        async_scheduling=True, num_blocks=5, extra={"offload_prompt_only": False}
    )
    prompt = PROMPT[:60]
    stop = engine.answer(prompt, 36)[-1]
    engine.controls.hold_stores = True
    engine.add(prompt, max_tokens=100, stop_token_ids=[stop])
    engine.add([9] * 100, max_tokens=2)
    engine.step_until(lambda: "r1" in engine.finished)
    engine.controls.hold_stores = False
    engine.settle()
    full = prompt + engine.tokens["r0"]
    assert engine.tiers[0][0].num_fences > 0
    assert loaded_by(engine, [*full, 500]) == 96


def test_prompt_only_leaves_decoded_blocks_out(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    engine = make_engine(async_scheduling=async_scheduling)
    engine.run(PROMPT[:63], max_tokens=70)
    assert host_manager(engine.side).num_resident == 1
    # A prompt that holds what was decoded is stored as a prompt.
    engine.run(PROMPT[:63] + engine.tokens["r0"])
    assert host_manager(engine.side).num_resident == 4


def test_chunked_prefill_stores_each_part_in_its_step(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    engine = make_engine(async_scheduling=async_scheduling, max_num_batched_tokens=80)
    engine.add(PROMPT, max_tokens=3)
    stored = [
        len(engine.step().kv_connector_metadata.plan.stores[0].block_ids)
        for _ in range(3)
    ]
    assert stored == [2, 3, 1]
    engine.settle()
    assert loaded_by(engine, PROMPT) == 192


def test_cap_of_the_request_bounds_what_is_stored(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    engine = make_engine(async_scheduling=async_scheduling)
    engine.run(PROMPT, params={"max_offload_tokens": 100})
    assert host_manager(engine.side).num_resident == 3
    engine.run([8] * 100, params={"max_offload_tokens": 0})
    assert host_manager(engine.side).num_resident == 3


def test_store_off_stores_nothing_and_still_loads(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    engine = make_engine(async_scheduling=async_scheduling)
    engine.run(PROMPT[:100])
    engine.scheduler.reset_prefix_cache()
    engine.run(PROMPT, ctx={"store": False, "receipt": True})
    assert host_manager(engine.side).num_resident == 3
    assert engine.receipts["r1"]["ctx"]["loaded_tokens"] == 96
    assert engine.receipts["r1"]["ctx"]["stored_tokens"] == 0


def test_failed_store_is_forgotten_and_tried_again_by_the_next_request(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    engine = make_engine(async_scheduling=async_scheduling)
    engine.controls.fails = lambda job, to_host, rank: to_host
    engine.run(PROMPT)
    assert host_manager(engine.side).num_resident == 0
    engine.controls.fails = lambda job, to_host, rank: False
    engine.run(PROMPT)
    assert host_manager(engine.side).num_resident == 6


@pytest.mark.parametrize("failing", [0, 1])
def test_store_that_one_worker_failed_is_absent_on_all(
    make_engine: MakeEngine, failing: int
) -> None:
    """CASES 34: the chunk of one rank is no chunk."""
    engine = make_engine(num_workers=2)
    engine.controls.fails = lambda job, to_host, rank: to_host and rank == failing
    engine.run(PROMPT)
    assert host_manager(engine.side).num_resident == 0


def test_store_is_ready_when_the_last_worker_has_ended_it(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """CASES 34: ranks end at different times."""
    engine = make_engine(num_workers=2, async_scheduling=async_scheduling)
    slow = engine.tiers[1][0]
    slow.controls = Controls(hold_stores=True)
    engine.add(PROMPT)
    engine.step(5)
    manager = host_manager(engine.side)
    assert [chunk.ready for chunk in manager.chunks()] == [False] * 6
    slow.controls = engine.controls
    engine.settle()
    assert [chunk.ready for chunk in manager.chunks()] == [True] * 6


def test_speculation_stores_confirmed_tokens_only(make_engine: MakeEngine) -> None:
    """Drafts are right, partly right and wrong in turn; the content check sees all."""
    engine = make_engine(num_drafts=3, extra={"offload_prompt_only": False})
    engine.model.make_drafts = lambda view: [
        token if len(view.tokens) % 3 and index < 2 else 3
        for index, token in enumerate(engine.answer(view.tokens, 3))
    ]
    engine.run(PROMPT[:60], max_tokens=100)
    assert engine.tokens["r0"] == engine.answer(PROMPT[:60], 100)
    engine.model.make_drafts = None
    full = PROMPT[:60] + engine.tokens["r0"]
    assert loaded_by(engine, full) >= 128


def test_threshold_stores_what_a_second_request_offers(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    engine = make_engine(
        async_scheduling=async_scheduling, extra={"store_threshold": 2}
    )
    engine.run(PROMPT)
    assert host_manager(engine.side).num_resident == 0
    engine.run(PROMPT)
    assert host_manager(engine.side).num_resident == 6
