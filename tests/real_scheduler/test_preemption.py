"""Preemption, resumption and aborts with transfers under way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from real_scheduler.harness import Engine
from real_scheduler.invariants import host_manager, is_parked
from vllm.v1.request import Request, RequestStatus

MakeEngine = Callable[..., Engine]
PROMPT = list(range(1, 201))  # six blocks and 8 tokens
OTHER = list(range(301, 501))


def stored(engine: Engine, prompt: list[int]) -> None:
    """Leaves the prompt's chunks in the host and nothing on the device."""
    engine.run(prompt)
    assert engine.scheduler.reset_prefix_cache()


def preempted(engine: Engine, request: Request, max_steps: int = 100) -> None:
    """Steps until vLLM has preempted the request once more."""
    before = request.num_preemptions
    for _ in range(max_steps):
        engine.step()
        if request.num_preemptions > before:
            return
    raise AssertionError("never preempted")


def test_store_of_a_preempted_request_is_fenced(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """CASES 1.

    1. Two requests fill the device; their stores are held back.
    2. The first one grows: the second is preempted, its blocks go to the first.
    3. The plan fences the stores that read them; what they stored is right, which
       the content check of every step sees.
    """
    engine = make_engine(
        num_blocks=15,
        async_scheduling=async_scheduling,
        extra={"offload_prompt_only": False},
    )
    engine.controls.hold_stores = True
    engine.add(PROMPT, max_tokens=120)
    second = engine.add(OTHER, max_tokens=120)
    preempted(engine, second)
    engine.step(70)
    assert engine.tiers[0][0].num_fences > 0
    engine.controls.hold_stores = False
    engine.settle()
    assert engine.tokens[second.request_id] == engine.answer(OTHER, 120)


def test_resumed_request_meets_its_own_unfinished_stores(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """CASES 2.

    1. A request's stores are held back; it is preempted.
    2. It is looked up again while its own chunks are being stored: it waits.
    3. The wait ends after `load_wait_ms`, though no store ever ended; it runs.
    """
    engine = make_engine(num_blocks=15, async_scheduling=async_scheduling)
    engine.seconds_per_step = 0.02
    engine.controls.hold_stores = True
    first = engine.add(PROMPT, max_tokens=120)
    second = engine.add(OTHER, max_tokens=120)
    preempted(engine, second)
    engine.abort(first)
    for _ in range(8):
        engine.step()
    assert second.status is RequestStatus.RUNNING
    engine.step_until(lambda: second.request_id in engine.finished)
    assert engine.tokens[second.request_id] == engine.answer(OTHER, 120)


def test_resumed_request_waits_for_its_own_stores_and_loads_them(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """CASES 2, the good end: the stores end within `load_wait_ms`."""
    engine = make_engine(num_blocks=15, async_scheduling=async_scheduling)
    engine.controls.hold_stores = True
    first = engine.add(PROMPT, max_tokens=120)
    second = engine.add(OTHER, max_tokens=120)
    preempted(engine, second)
    engine.abort(first)
    # Somebody else takes the device, so that nothing of it is left there.
    engine.scheduler.reset_prefix_cache()
    engine.controls.hold_stores = False
    engine.settle()
    assert engine.tokens[second.request_id] == engine.answer(OTHER, 120)


@pytest.mark.parametrize("times", [3])
def test_same_request_preempted_again_and_again_leaves_nothing(
    make_engine: MakeEngine, async_scheduling: bool, times: int
) -> None:
    """CASES 7 and 8.

    1. A request is preempted three times; completions of earlier rounds come late.
    2. After every step our table is vLLM's (checked by the harness).
    3. At the end nothing is left in any table, and no counter has fallen (CASES 38).
    """
    engine = make_engine(
        num_blocks=24,
        async_scheduling=async_scheduling,
        extra={"offload_prompt_only": False},
    )
    victim = engine.add(OTHER, max_tokens=200)
    engine.step(3)
    for _ in range(times):
        engine.controls.hold_stores = True
        engine.flush()
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.step(3)
        engine.controls.hold_stores = False
        engine.step(40)
    engine.settle()
    assert victim.num_preemptions == times
    assert engine.tokens[victim.request_id] == engine.answer(OTHER, 200)


def test_abort_of_a_request_that_never_ran(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """CASES 3: the device is full; the queued one is aborted."""
    engine = make_engine(num_blocks=9, async_scheduling=async_scheduling)
    engine.add(PROMPT, max_tokens=30)
    engine.step()
    queued = engine.add(OTHER)
    engine.abort(engine.add(OTHER, request_id="never looked up"))
    engine.step(2)
    assert queued.status is RequestStatus.WAITING
    engine.abort(queued)
    engine.settle()


def test_abort_of_a_preempted_request(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """CASES 3: preempted, then aborted while it waits."""
    engine = make_engine(num_blocks=15, async_scheduling=async_scheduling)
    engine.add(PROMPT, max_tokens=120)
    second = engine.add(OTHER, max_tokens=120)
    preempted(engine, second)
    engine.abort(second)
    engine.settle()


@pytest.mark.parametrize("when", ["before", "while", "received", "after"])
def test_abort_around_the_end_of_a_load_frees_its_blocks_once(
    make_engine: MakeEngine, async_scheduling: bool, when: str
) -> None:
    """CASES 4: `finished_recving` comes once, whatever became of the request.

    before: in the step that sent the load. while: it is held back. received: the
    worker has reported it, the request has not been scheduled. after: it runs.
    """
    engine = make_engine(async_scheduling=async_scheduling)
    stored(engine, PROMPT)
    engine.controls.hold_loads = when in ("before", "while")
    request = engine.add(PROMPT, max_tokens=30)
    engine.step()
    if when == "while":
        engine.step(4)
    elif when == "received":
        engine.step_until(
            lambda: request.request_id in engine.scheduler.finished_recving_kv_req_ids
        )
    elif when == "after":
        engine.step_until(lambda: request.status is RequestStatus.RUNNING)
    pool = engine.scheduler.kv_cache_manager.block_pool
    engine.abort(request)
    if when in ("before", "while"):
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1 - 6
        engine.step(3)
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1 - 6
        assert host_manager(engine.side).num_pinned == 6
    engine.controls.hold_loads = False
    engine.settle()


def test_abort_during_a_load_that_fails(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """CASES 4 and 16: aborted and failed: freed once, the keys gone."""
    engine = make_engine(async_scheduling=async_scheduling)
    stored(engine, PROMPT)
    engine.controls.hold_loads = True
    engine.controls.fails = lambda job, to_host, rank: not to_host
    request = engine.add(PROMPT)
    engine.step(2)
    assert is_parked(request)
    engine.abort(request)
    engine.controls.hold_loads = False
    engine.settle()
    assert host_manager(engine.side).num_resident == 0


def test_abort_right_after_a_positive_answer_gives_the_lease_back(
    make_engine: MakeEngine,
) -> None:
    """CASES 6: told of a hit, no room on the device, aborted."""
    engine = make_engine(num_blocks=9)
    stored(engine, PROMPT)
    engine.add([7] * 60, max_tokens=60)
    engine.step()
    waiting = engine.add(PROMPT)
    engine.step()
    assert host_manager(engine.side).num_pinned == 6
    engine.abort(waiting)
    assert host_manager(engine.side).num_pinned == 0


def test_load_into_blocks_that_a_store_still_reads_is_fenced(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """CASES 1, with a load as the writer.

    1. A request ends; its stores are held back.
    2. Another one loads into the blocks of the first.
    """
    engine = make_engine(num_blocks=9, async_scheduling=async_scheduling)
    stored(engine, OTHER)
    engine.controls.hold_stores = True
    first = engine.add(PROMPT)
    engine.step_until(lambda: first.request_id in engine.finished)
    loader = engine.add(OTHER, max_tokens=2)
    engine.step_until(lambda: loader.request_id in engine.finished)
    assert engine.tiers[0][0].num_fences > 0
    engine.controls.hold_stores = False
    engine.settle()
    assert engine.scheduler.reset_prefix_cache()
    again = engine.run(PROMPT)
    assert engine.num_scheduled[again.request_id] == 8


@pytest.mark.parametrize("v2", [False, True], ids=["v1 runner", "v2 runner"])
def test_table_is_replaced_when_a_request_resumes(
    make_engine: MakeEngine, async_scheduling: bool, v2: bool
) -> None:
    """CASES 8: a resumed request is named as resumed, or as new, by release."""
    engine = make_engine(
        num_blocks=15,
        async_scheduling=async_scheduling,
        extra={"offload_prompt_only": False},
    )
    engine.scheduler.use_v2_model_runner = v2
    first = engine.add(PROMPT, max_tokens=120)
    second = engine.add(OTHER, max_tokens=120)
    preempted(engine, second)
    engine.settle()
    for request, prompt in ((first, PROMPT), (second, OTHER)):
        assert engine.tokens[request.request_id] == engine.answer(prompt, 120)
