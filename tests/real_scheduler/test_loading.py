"""What is loaded, and what happens when it can't be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from real_scheduler.harness import Engine
from real_scheduler.invariants import host_manager, is_parked

MakeEngine = Callable[..., Engine]
PROMPT = list(range(1, 201))  # six blocks and 8 tokens


def stored(engine: Engine, prompt: list[int], **options: object) -> None:
    """Leaves the prompt's chunks in the host and nothing on the device."""
    engine.run(prompt, **options)
    assert engine.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("length", [64, 96, 192])
def test_prompt_of_whole_blocks_leaves_its_last_one_to_compute(
    make_engine: MakeEngine, async_scheduling: bool, length: int
) -> None:
    """CASES 9: a hit of the whole prompt would leave no token to compute."""
    engine = make_engine(async_scheduling=async_scheduling)
    stored(engine, PROMPT)
    request = engine.run(PROMPT[:length], ctx={"receipt": True}, max_tokens=2)
    receipt = engine.receipts[request.request_id]["ctx"]
    assert receipt["loaded_tokens"] == length - 32
    engine.run(PROMPT[: length + 1], ctx={"receipt": True}, request_id="next")


@pytest.mark.parametrize("num_local", [0, 32, 64, 96, 128, 160])
def test_load_that_starts_inside_a_chunk_spares_the_local_hit(
    make_engine: MakeEngine, async_scheduling: bool, num_local: int
) -> None:
    """CASES 10: block 32, chunk 128.

    1. Chunks of the prompt are in the host, its first blocks on the device too.
    2. The load starts at the local hit, inside the first chunk.
    3. Blocks of the local hit are no target: a running request reads them.
    """
    prompt = list(range(1, 301))
    engine = make_engine(
        async_scheduling=async_scheduling, extra={"blocks_per_chunk": 4}
    )
    stored(engine, prompt)
    if num_local:
        engine.add([*prompt[:num_local], 7], max_tokens=30, ctx={"load": False})
        engine.step()
    request = engine.add(prompt, ctx={"receipt": True}, max_tokens=3)
    engine.step_until(lambda: request.request_id in engine.finished)
    receipt = engine.receipts[request.request_id]["ctx"]
    assert receipt["loaded_tokens"] == 256 - num_local
    assert receipt["lookup_tokens"] == 300 - num_local


@pytest.mark.parametrize(
    "sampling", [{"skip_reading_prefix_cache": True}, {"prompt_logprobs": 1}]
)
def test_skipping_the_prefix_cache_reads_nothing(
    make_engine: MakeEngine, async_scheduling: bool, sampling: dict[str, Any]
) -> None:
    """CASES 6 and 28: neither a load nor a pin."""
    engine = make_engine(async_scheduling=async_scheduling)
    stored(engine, PROMPT)
    request = engine.run(PROMPT, **sampling)
    assert engine.num_scheduled[request.request_id] == 200
    assert engine.count("loaded_bytes") == 0
    assert engine.count("skipped_tokens") == 200


def test_load_off_reads_nothing_from_the_host(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    engine = make_engine(async_scheduling=async_scheduling)
    stored(engine, PROMPT)
    engine.run(PROMPT, ctx={"load": False})
    assert engine.count("loaded_bytes") == 0
    assert engine.count("skipped_tokens") == 200


@pytest.mark.parametrize(("cap", "expected"), [(0, 0), (31, 0), (100, 96), (999, 192)])
def test_cap_of_the_request_bounds_what_is_loaded(
    make_engine: MakeEngine, cap: int, expected: int
) -> None:
    engine = make_engine()
    stored(engine, PROMPT)
    request = engine.run(PROMPT, params={"max_load_tokens": cap}, ctx={"receipt": True})
    assert engine.receipts[request.request_id]["ctx"]["loaded_tokens"] == expected


def test_failed_load_is_recomputed_once_and_its_key_is_gone(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """CASES 16.

    1. The load fails: its blocks are reported invalid, the request as received.
    2. The keys are removed: the request is looked up again and finds nothing.
    3. It computes all, and stores it again; the next one loads.
    """
    engine = make_engine(async_scheduling=async_scheduling)
    stored(engine, PROMPT)
    engine.controls.fails = lambda job, to_host, rank: not to_host
    failed = engine.run(PROMPT, max_tokens=2)
    assert engine.num_scheduled[failed.request_id] == 201
    assert engine.tokens[failed.request_id] == engine.answer(PROMPT, 2)
    engine.controls.fails = lambda job, to_host, rank: False
    assert engine.scheduler.reset_prefix_cache()
    again = engine.run(PROMPT)
    assert engine.num_scheduled[again.request_id] == 8


def test_failed_load_behind_a_local_hit_keeps_the_local_hit(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """CASES 16: only what came from the host is computed again.

    1. A running request shares two blocks on the device.
    2. The load of the rest fails; the shared blocks are not among the invalid ones.
    """
    engine = make_engine(async_scheduling=async_scheduling)
    stored(engine, PROMPT)
    engine.controls.fails = lambda job, to_host, rank: not to_host
    engine.add([*PROMPT[:64], 7], max_tokens=30, ctx={"load": False})
    engine.step(2)
    request = engine.add(PROMPT, max_tokens=2)
    engine.settle()
    assert engine.num_scheduled[request.request_id] == 200 - 64 + 1
    assert engine.num_scheduled["r1"] == 65 + 29


@pytest.mark.parametrize("failing", [0, 1])
def test_load_that_one_worker_failed_is_recomputed_on_all(
    make_engine: MakeEngine, async_scheduling: bool, failing: int
) -> None:
    """CASES 34: received only when both ranks have reported; invalid when one has."""
    engine = make_engine(num_workers=2, async_scheduling=async_scheduling)
    stored(engine, PROMPT)
    engine.controls.fails = lambda job, to_host, rank: not to_host and rank == failing
    request = engine.run(PROMPT)
    assert engine.num_scheduled[request.request_id] == 200


def test_two_workers_load_what_two_workers_stored(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    engine = make_engine(num_workers=2, async_scheduling=async_scheduling)
    stored(engine, PROMPT)
    request = engine.run(PROMPT)
    assert engine.num_scheduled[request.request_id] == 8


def test_parked_loads_do_not_stop_the_head_of_the_queue(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """CASES 18: three requests with hits, a device that fits two."""
    engine = make_engine(async_scheduling=async_scheduling, num_blocks=17)
    prompts = [[base + i for i in range(200)] for base in (1, 211, 421)]
    for prompt in prompts:
        stored(engine, prompt)
    for prompt in prompts:
        engine.add(prompt, max_tokens=20)
    assert engine.drain() < 200


def test_host_hit_needs_no_prefix_cache_of_vllm(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """Without local caching there are no hashes to find anything by."""
    engine = make_engine(async_scheduling=async_scheduling, prefix_caching=False)
    engine.run(PROMPT)
    request = engine.run(PROMPT)
    assert engine.num_scheduled[request.request_id] == 8


def test_evicted_between_answer_and_admission_is_impossible(
    make_engine: MakeEngine,
) -> None:
    """CASES 5.

    1. A request is told of a hit in a pool that the hit fills; the device is full.
    2. Another request's store wants room: the leased chunks are no victims.
    3. The device has room: the request loads all it was promised.
    """
    engine = make_engine(
        num_blocks=8, num_slots=6, extra={"offload_prompt_only": False}
    )
    stored(engine, PROMPT)
    blocker = engine.add([7] * 28, max_tokens=60)
    engine.step()
    waiting = engine.add(PROMPT, ctx={"receipt": True})
    engine.step(8)
    assert engine.side.planner._states[waiting.request_id].lease is not None
    assert engine.count("rejected_stores") > 0
    engine.abort(blocker)
    engine.settle()
    assert engine.receipts[waiting.request_id]["ctx"]["loaded_tokens"] == 192


def test_allocation_that_fails_keeps_one_lease_however_often_it_is_asked(
    make_engine: MakeEngine,
) -> None:
    """CASES 6: allocation fails step after step; then the request is aborted."""
    engine = make_engine(num_blocks=9)
    stored(engine, PROMPT)
    engine.add([7] * 60, max_tokens=60)
    engine.step()
    waiting = engine.add(PROMPT)
    engine.step(5)
    assert host_manager(engine.side).num_pinned == 6
    assert not is_parked(waiting)
    engine.abort(waiting)
    assert host_manager(engine.side).num_pinned == 0
    assert engine.count("lookup_tokens") == 200 + 60


def test_figures_of_lookups_add_up(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """CASES 39: lookups = hits + misses + skipped, each request counted once."""
    engine = make_engine(async_scheduling=async_scheduling, num_blocks=13)
    stored(engine, PROMPT)
    for index in range(6):
        engine.add([*PROMPT[: 40 * index], 9, 8, 7, 6], max_tokens=40)
    engine.add(PROMPT, ctx={"load": False})
    engine.settle()
    parts = ("hit_tokens", "missed_tokens", "skipped_tokens")
    assert engine.count("lookup_tokens") == sum(map(engine.count, parts))
    assert engine.count("hit_tokens") > 0
