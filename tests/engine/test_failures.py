"""Copies that fail, requests that end early, and resets."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from engine.conftest import CopyFaults, EngineShelf
from engine.harness import Engine, assert_same_answer, manager_of, random_prompt
from engine.spec import BLOCK, EngineSpec

PROMPT = random_prompt(1, 600)
NUM_FULL = 600 // BLOCK * BLOCK


@pytest.fixture
def engine(shelf: EngineShelf, llama: Path) -> Engine:
    return shelf.get(EngineSpec.make(llama))


def test_a_failed_load_is_recomputed_and_its_keys_are_gone(
    engine: Engine, faults: CopyFaults
) -> None:
    """Nothing else runs: the failed load alone has to wake the engine."""
    cold = engine.ask(PROMPT)
    engine.forget_device()
    faults.fail = lambda to_host: not to_host
    returned = engine.ask(PROMPT)

    assert faults.num_failed == 1, "the same bad chunks were tried again"
    assert_same_answer(returned, cold)
    assert returned.num_cached == 0

    faults.fail = lambda to_host: False
    engine.forget_device()
    again = engine.ask(PROMPT)
    assert again.num_loaded == NUM_FULL, "the recomputed request stored it anew"
    assert_same_answer(again, cold)
    engine.assert_idle()


def test_a_failed_load_behind_a_local_hit_keeps_the_local_hit(
    engine: Engine, faults: CopyFaults
) -> None:
    cold = engine.ask(PROMPT)
    engine.forget_device()
    engine.ask(PROMPT[:200], ctx={"load": False})
    faults.fail = lambda to_host: not to_host
    returned = engine.ask(PROMPT)

    assert faults.num_failed == 1
    assert_same_answer(returned, cold)


def test_a_failed_store_leaves_nothing_to_find(
    engine: Engine, faults: CopyFaults
) -> None:
    faults.fail = lambda to_host: to_host
    cold = engine.ask(PROMPT)
    faults.fail = lambda to_host: False
    engine.forget_device()
    returned = engine.ask(PROMPT)

    assert faults.num_failed
    assert returned.num_loaded == 0
    assert_same_answer(returned, cold)
    engine.assert_idle()


def test_half_of_all_copies_fail_and_no_token_is_wrong(
    engine: Engine, faults: CopyFaults
) -> None:
    prompts = [PROMPT[: 64 * n] + random_prompt(n, 50) for n in range(1, 8)]
    cold = [engine.ask(prompt) for prompt in prompts]
    rng = random.Random(1)
    faults.fail = lambda to_host: rng.random() < 0.5
    for _ in range(3):
        engine.forget_device()
        for one, other in zip(engine.run(*prompts), cold, strict=True):
            assert_same_answer(one, other)
    assert faults.num_failed
    engine.assert_idle()


@pytest.mark.parametrize("num_steps", range(5))
def test_an_abort_at_any_step_leaves_nothing_behind(
    engine: Engine, num_steps: int
) -> None:
    cold = engine.ask(PROMPT)
    for _ in range(2):  # the first time it computes and stores, then it loads
        engine.forget_device()
        request_id = engine.add(PROMPT)
        for _ in range(num_steps):
            engine.step()
        engine.abort(request_id)
        engine.drain()
        engine.assert_idle()
        assert engine.llm.reset_prefix_cache(), "a block was never freed"
    assert_same_answer(engine.ask(PROMPT), cold)


def test_a_connector_reset_clears_everything(engine: Engine) -> None:
    engine.ask(PROMPT)
    assert manager_of(engine.side).num_resident == NUM_FULL // BLOCK
    assert engine.llm.reset_prefix_cache(reset_connector=True)

    assert manager_of(engine.side).num_resident == 0
    assert engine.ask(PROMPT).num_cached == 0


def test_kv_from_before_a_reset_is_never_served_after_it(engine: Engine) -> None:
    """A reset, as after a weight update, in every step of a store and a load."""
    for num_steps in range(1, 6):
        engine.forget()
        engine.ask(PROMPT)
        engine.forget_device()
        engine.add(PROMPT, max_tokens=8)
        for _ in range(num_steps):
            engine.step()
        engine.core.scheduler.reset_connector_cache()
        engine.drain()
        engine.forget_device()

        assert engine.ask(PROMPT).num_loaded == 0, f"after {num_steps} steps"


@pytest.mark.parametrize("reset_connector", [True, False])
def test_a_reset_with_running_requests_lets_them_finish(
    engine: Engine, reset_connector: bool
) -> None:
    """vLLM preempts them all and looks them up again in the very next step."""
    prompts = [random_prompt(n, 300) for n in range(3)]
    cold = engine.run(*prompts, max_tokens=8)
    engine.forget()
    ids = [engine.add(prompt, max_tokens=8) for prompt in prompts]
    results: dict[str, Any] = {}
    for _ in range(4):
        results.update(engine.step())
    assert not results
    engine.llm.reset_prefix_cache(
        reset_running_requests=True, reset_connector=reset_connector
    )
    while len(results) < len(ids):
        results.update(engine.step())
    engine.drain()

    for request_id, other in zip(ids, cold, strict=True):
        assert_same_answer(results[request_id], other)
    engine.assert_idle()
