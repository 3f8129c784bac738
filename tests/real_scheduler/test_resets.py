"""Resets of vLLM's cache and of ours, with requests and transfers under way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from real_scheduler.harness import Engine, ours
from real_scheduler.invariants import host_manager, is_parked
from vllm.v1.core.sched.interface import PauseState

PROMPT = list(range(1, 201))  # six blocks and 8 tokens

MakeEngine = Callable[..., Engine]


def test_preemption_by_a_reset_is_followed_by_a_load_in_the_same_step(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """CASES 21, with `reset_running_requests`.

    1. The request runs; its chunks are stored.
    2. vLLM's own cache is reset, ours is not: the request loses its blocks between
       two steps.
    3. The next step looks it up and starts a load, and reports the preemption too.
    """
    engine = make_engine(async_scheduling=async_scheduling)
    request = engine.add(PROMPT, max_tokens=8)
    engine.step(3)
    engine.flush()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.step()
    assert is_parked(request)
    engine.settle()
    assert engine.tokens["r0"] == engine.answer(PROMPT, 8)
    assert engine.count("loaded_bytes") > 0


def test_reset_during_a_load_says_no_and_keeps_old_kv_out(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """CASES 21 and 32.

    1. A request's load is under way.
    2. The weights change and both caches are reset: the answer is False.
    3. The load ends, the request runs to its end: none of its chunks, loaded before
       the reset or computed on top of them, is stored.
    """
    engine = make_engine(
        async_scheduling=async_scheduling, extra={"offload_prompt_only": False}
    )
    engine.run(PROMPT)
    engine.scheduler.reset_prefix_cache()
    engine.controls.hold_loads = True
    request = engine.add(PROMPT, max_tokens=40)
    engine.step(3)
    assert is_parked(request)
    engine.model.generation += 1
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.controls.hold_loads = False
    engine.settle()
    assert host_manager(engine.side).num_resident == 0
    assert engine.tokens["r1"] == engine.answer(PROMPT, 40)


def test_reset_after_a_load_and_before_its_request_runs_keeps_old_kv_out(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """CASES 32.

    1. A load has ended; its request has not been scheduled yet.
    2. Both caches are reset.
    3. The request runs on loaded KV of the old weights: not stored.
    """
    engine = make_engine(async_scheduling=async_scheduling)
    engine.run(PROMPT)
    engine.scheduler.reset_prefix_cache()
    request = engine.add(PROMPT, max_tokens=4)
    engine.step_until(
        lambda: request.request_id in engine.scheduler.finished_recving_kv_req_ids
    )
    engine.model.generation += 1
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.settle()
    assert host_manager(engine.side).num_resident == 0


def test_barrier_of_a_reset_outlives_the_resumption_after_a_load(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """CASES 32, for a request that vLLM reports as resumed.

    1. A running request is preempted by a reset of vLLM's cache, and loads.
    2. During the load both caches are reset.
    3. It resumes: a resumed request is named as one that left its blocks.
    """
    engine = make_engine(async_scheduling=async_scheduling)
    request = engine.add(PROMPT, max_tokens=8)
    engine.step(3)
    engine.flush()
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.controls.hold_loads = True
    engine.step(2)
    assert is_parked(request)
    engine.model.generation += 1
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.controls.hold_loads = False
    engine.settle()
    assert host_manager(engine.side).num_resident == 0


def test_reset_during_a_store_drops_the_late_chunk(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """CASES 21.

    1. A store is held back; its request ends.
    2. Both caches are reset: True, no load of old KV is under way.
    3. A new request with the same prompt stores under the same keys.
    4. The old store ends: nothing of the new one is touched.
    """
    engine = make_engine(async_scheduling=async_scheduling)
    engine.controls.hold_stores = True
    request = engine.add(PROMPT)
    engine.step_until(lambda: request.request_id in engine.finished)
    engine.step(2)
    engine.model.generation += 1
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    again = engine.add(PROMPT)
    engine.step_until(lambda: again.request_id in engine.finished)
    engine.controls.hold_stores = False
    engine.settle()
    assert host_manager(engine.side).num_resident == 0
    engine.run(PROMPT[:-1])
    assert host_manager(engine.side).num_resident == 6


def test_running_request_stores_nothing_of_before_a_reset(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """CASES 32: vLLM's own reset is refused while the request runs; ours is done."""
    engine = make_engine(
        async_scheduling=async_scheduling, extra={"offload_prompt_only": False}
    )
    engine.add(PROMPT, max_tokens=70)
    engine.step(3)
    engine.model.generation += 1
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert host_manager(engine.side).num_resident == 0
    engine.settle()
    assert host_manager(engine.side).num_resident == 0


def test_reset_of_everything_lets_a_preempted_request_store_anew(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """CASES 32: preempted by the reset, the request computes all with new weights."""
    engine = make_engine(async_scheduling=async_scheduling)
    engine.add(PROMPT, max_tokens=4)
    engine.step(3)
    engine.flush()
    engine.model.generation += 1
    assert engine.scheduler.reset_prefix_cache(
        reset_running_requests=True, reset_connector=True
    )
    engine.settle()
    assert host_manager(engine.side).num_resident == 6
    assert engine.tokens["r0"] == engine.answer(PROMPT, 4)


def test_reset_gives_back_a_lease(make_engine: MakeEngine) -> None:
    """CASES 6 and 21: a positive answer without an admission, then a reset.

    1. A request is told of a hit; the device has no room for it.
    2. Reset: the chunks are gone, and so is the pin.
    """
    engine = make_engine(num_blocks=9)
    engine.run(PROMPT)
    engine.scheduler.reset_prefix_cache()
    blocker = engine.add([7] * 60, max_tokens=100)
    engine.step()
    engine.add(PROMPT)
    engine.step()
    state = engine.side.planner._states["r2"]
    assert state.lease is not None
    engine.side.reset()
    assert state.lease is None
    assert host_manager(engine.side).num_resident == 0
    engine.abort(blocker)
    engine.settle()


def test_a_request_that_loaded_while_kept_paused_holds_its_blocks(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """Why a pause that keeps requests can fail on a server too: what the docs say.

    1. A load is under way; vLLM is paused with `keep`.
    2. vLLM steps on until no transfer is open; the request does not run.
    3. Its reset of all caches raises; after a resume and a step it does not.
    """
    engine = make_engine(async_scheduling=async_scheduling)
    engine.run(PROMPT)
    engine.scheduler.reset_prefix_cache()
    engine.controls.hold_loads = True
    request = engine.add(PROMPT, max_tokens=4)
    engine.step(3)
    assert is_parked(request)
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.controls.hold_loads = False
    engine.drain()
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        engine.scheduler.reset_prefix_cache(
            reset_running_requests=True, reset_connector=True
        )
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.step()
    engine.flush()
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert engine.scheduler.reset_prefix_cache(
        reset_running_requests=True, reset_connector=True
    )
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.settle()
    assert engine.tokens["r1"] == engine.answer(PROMPT, 4)


# ---- reset_with_device_cache: vLLM's own reset is a reset of the host

FOLLOW = {"reset_with_device_cache": True}


def test_without_the_key_old_kv_outlives_a_reset_of_the_device(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """vLLM's default (`reset_connector=False`): after new weights that is wrong."""
    engine = make_engine(async_scheduling=async_scheduling)
    engine.run(PROMPT)
    assert engine.scheduler.reset_prefix_cache()
    engine.run(PROMPT)
    assert engine.count("loaded_bytes") > 0


@pytest.mark.parametrize("refilled", [True, False])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_after_a_reset_of_the_device_nothing_old_is_read(
    make_engine: MakeEngine,
    async_scheduling: bool,
    prefix_caching: bool,
    refilled: bool,
) -> None:
    """CASES 32: new weights, then `reset_prefix_cache()` and nothing else.

    With `refilled` another prompt has filled the device's cache before the old one is
    asked for again.
    """
    engine = make_engine(
        async_scheduling=async_scheduling, prefix_caching=prefix_caching, extra=FOLLOW
    )
    engine.run(PROMPT)
    assert host_manager(engine.side).num_resident == 6
    engine.flush()
    engine.model.generation += 1
    assert engine.scheduler.reset_prefix_cache()
    if refilled:
        engine.run([9] * 200)
    engine.run(PROMPT)
    engine.settle()
    assert engine.count("loaded_bytes") == 0
    assert host_manager(engine.side).num_resident == 6 + 6 * refilled


def test_a_store_under_way_at_a_reset_of_the_device_is_not_kept(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """CASES 32.

    1. A store is held back; its request ends.
    2. New weights; vLLM's cache is reset.
    3. The store ends, with no request and so no lookup in between.
    4. The prompt is asked for again: computed.
    """
    engine = make_engine(async_scheduling=async_scheduling, extra=FOLLOW)
    engine.controls.hold_stores = True
    request = engine.add(PROMPT)
    engine.step_until(lambda: request.request_id in engine.finished)
    engine.flush()
    engine.model.generation += 1
    assert engine.scheduler.reset_prefix_cache()
    engine.controls.hold_stores = False
    engine.settle()
    assert host_manager(engine.side).num_resident == 0
    engine.run(PROMPT)
    assert engine.count("loaded_bytes") == 0


def test_a_running_request_that_a_reset_preempts_reads_nothing_old(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """CASES 32, with `reset_running_requests`: it would load its own old chunks."""
    engine = make_engine(async_scheduling=async_scheduling, extra=FOLLOW)
    engine.add(PROMPT, max_tokens=8)
    engine.step(3)
    engine.flush()
    engine.model.generation += 1
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.settle()
    assert engine.count("loaded_bytes") == 0
    assert engine.tokens["r0"] == engine.answer(PROMPT, 8)
    assert host_manager(engine.side).num_resident == 6


def test_a_reset_takes_back_an_answer_that_was_not_admitted_yet(
    make_engine: MakeEngine,
) -> None:
    """CASES 6 and 32: the lease of a request that waits for room.

    1. A request is told of a hit; the device has no room for it.
    2. The blocker is aborted; new weights; vLLM's cache is reset.
    3. The request is admitted: computed.
    """
    engine = make_engine(num_blocks=9, extra=FOLLOW)
    engine.run(PROMPT)
    blocker = engine.add([7] * 60, max_tokens=100)
    engine.step()
    engine.scheduler.kv_cache_manager.evict_blocks(set(range(1, 9)))
    engine.add(PROMPT)
    engine.step()
    assert engine.side.planner._states["r2"].lease is not None
    engine.abort(blocker)
    engine.model.generation += 1
    assert engine.scheduler.reset_prefix_cache()
    engine.settle()
    assert engine.count("loaded_bytes") == 0


def test_a_reset_that_vllm_refuses_forgets_nothing(make_engine: MakeEngine) -> None:
    """The device's cache is as it was, and the answer is False."""
    engine = make_engine(extra=FOLLOW)
    engine.add(PROMPT, max_tokens=30)
    engine.step(3)
    assert not engine.scheduler.reset_prefix_cache()
    engine.settle()
    assert host_manager(engine.side).num_resident == 6


def test_each_of_two_connectors_follows_the_device(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    part = ours(cpu_bytes_to_use="1MiB", **FOLLOW)
    engine = make_engine(
        async_scheduling=async_scheduling,
        kv_transfer={
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": [part, part]},
        },
    )
    engine.run(PROMPT)
    engine.flush()
    engine.model.generation += 1
    assert engine.scheduler.reset_prefix_cache()
    engine.run(PROMPT)
    engine.settle()
    assert engine.count("loaded_bytes") == 0


@pytest.mark.parametrize("reset_connector", [False, True])
def test_contents_survive_sleep_where_vllm_asks_for_it(
    make_engine: MakeEngine, async_scheduling: bool, reset_connector: bool
) -> None:
    """As `sleep(mode="keep", reset_connector=...)`: the memory of the cache is lost.

    1. One request is stored, one runs, and one is aborted with its stores to come.
    2. vLLM pauses, steps until no transfer is open, resets its own cache, and lets the
       workers wait for copies that are under way nevertheless.
    3. Awake, the requests go on from what the host has, or compute all again.
    """
    engine = make_engine(
        async_scheduling=async_scheduling, extra={"offload_prompt_only": False}
    )
    engine.run(PROMPT)
    others = [[7, *PROMPT], [8, *PROMPT]]
    runs, ends = (engine.add(prompt, max_tokens=40) for prompt in others)
    engine.step(30)
    engine.flush()
    engine.abort(ends)

    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.drain()
    assert not engine.side.has_work
    assert engine.scheduler.reset_prefix_cache(
        reset_running_requests=True, reset_connector=reset_connector
    )
    for device, tiers in zip(engine.devices, engine.tiers, strict=True):
        for tier in tiers:
            tier.wait_until_idle()
        device.lose_contents()
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)

    before = engine.count("hit_tokens")
    engine.drain()
    assert engine.tokens[runs.request_id] == engine.answer(others[0], 40)
    for prompt in (PROMPT, others[1]):
        engine.run(prompt)
    hit_tokens = engine.count("hit_tokens") - before
    assert hit_tokens == (0 if reset_connector else 7 * 32 + 6 * 32 + 6 * 32)
