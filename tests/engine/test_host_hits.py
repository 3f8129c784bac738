"""What comes back from host memory is what was there before, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine.conftest import EngineShelf
from engine.harness import Engine, assert_same_answer, random_prompt
from engine.spec import BLOCK, MLA_BLOCK, EngineSpec

# Full blocks and a partial one, computed in two pieces of at most 512 tokens.
PROMPT = random_prompt(1, 600)
NUM_FULL = 600 // BLOCK * BLOCK


def _num_full(engine: Engine) -> int:
    """Tokens in the full blocks of PROMPT."""
    return len(PROMPT) // engine.spec.tokens_per_block * engine.spec.tokens_per_block


@pytest.fixture(scope="module", params=["llama", "mla"])
def spec(request: pytest.FixtureRequest, llama: Path, mla: Path) -> EngineSpec:
    if request.param == "llama":
        return EngineSpec.make(llama)
    return EngineSpec.make(
        mla, num_blocks=83, tokens_per_block=MLA_BLOCK, dtype="bfloat16"
    )


@pytest.fixture
def engine(shelf: EngineShelf, spec: EngineSpec) -> Engine:
    return shelf.get(spec)


@pytest.fixture
def llama_engine(shelf: EngineShelf, llama: Path) -> Engine:
    return shelf.get(EngineSpec.make(llama))


def _evict_from_device(engine: Engine) -> None:
    """Other prompts need all blocks of the device."""
    engine.run(random_prompt(101, 900))
    engine.run(random_prompt(102, 900))


def test_loaded_blocks_hold_the_bytes_that_were_stored(engine: Engine) -> None:
    num_full = _num_full(engine)
    cold, stored = engine.ask_and_read(PROMPT)
    _evict_from_device(engine)

    returned, loaded = engine.ask_and_read(PROMPT)

    assert cold.num_cached == 0
    assert returned.num_loaded == returned.num_cached == num_full
    assert len(set(stored.values())) == num_full // engine.spec.tokens_per_block
    assert loaded == stored
    engine.assert_idle()


def test_a_host_hit_answers_like_a_local_hit(llama_engine: Engine) -> None:
    engine = llama_engine
    cold = engine.ask(PROMPT, max_tokens=8)
    local = engine.ask(PROMPT, max_tokens=8)
    engine.forget_device()
    host = engine.ask(PROMPT, max_tokens=8)

    assert [r.num_cached for r in (cold, local, host)] == [0, NUM_FULL, NUM_FULL]
    assert [r.num_loaded for r in (cold, local, host)] == [0, 0, NUM_FULL]
    assert_same_answer(host, local)
    assert_same_answer(host, cold)


def test_wrong_bytes_in_the_pool_change_the_answer(llama_engine: Engine) -> None:
    """The negative control: none of the comparisons above is blind."""
    engine = llama_engine
    cold = engine.ask(PROMPT)
    engine.forget_device()
    pool = engine.worker._pool
    assert pool is not None
    saved = pool.rows.clone()
    pool.rows.copy_(saved.roll(1, dims=0))  # every block in its neighbour's place

    wrong = engine.ask(PROMPT)

    pool.rows.copy_(saved)
    assert wrong.num_loaded == NUM_FULL
    assert wrong.tokens != cold.tokens
    engine.forget_device()
    assert_same_answer(engine.ask(PROMPT), cold)


@pytest.mark.parametrize("num_blocks", [1, 2, 9])
def test_a_prompt_of_whole_blocks_leaves_one_token_to_compute(
    engine: Engine, num_blocks: int
) -> None:
    block = engine.spec.tokens_per_block
    prompt = random_prompt(2, num_blocks * block)
    engine.ask(prompt)
    engine.forget_device()
    host = engine.ask(prompt)

    assert host.num_loaded == host.num_cached == (num_blocks - 1) * block


def test_prompt_logprobs_never_read_the_host(llama_engine: Engine) -> None:
    engine = llama_engine
    cold = engine.ask(PROMPT, prompt_logprobs=0)
    engine.forget_device()
    warm = engine.ask(PROMPT, prompt_logprobs=0)

    assert len(cold.prompt_logprobs) == len(PROMPT) - 1
    assert warm.num_loaded == warm.num_cached == 0
    assert warm.prompt_logprobs == pytest.approx(cold.prompt_logprobs, abs=2e-5)
    assert_same_answer(warm, cold)


def test_skip_reading_prefix_cache_is_obeyed(llama_engine: Engine) -> None:
    engine = llama_engine
    cold = engine.ask(PROMPT)
    engine.forget_device()
    warm = engine.ask(PROMPT, skip_reading_prefix_cache=True)

    assert warm.num_loaded == warm.num_cached == 0
    assert_same_answer(warm, cold)


def test_hints_turn_loads_and_stores_off(llama_engine: Engine) -> None:
    engine = llama_engine
    unstored = engine.ask(PROMPT, ctx={"store": False})
    engine.forget_device()
    stored = engine.ask(PROMPT)
    engine.forget_device()
    unread = engine.ask(PROMPT, ctx={"load": False})

    assert unstored.receipt["stored_tokens"] == 0
    assert stored.num_loaded == 0
    assert stored.receipt["stored_tokens"] == NUM_FULL
    assert unread.num_loaded == 0


def test_caps_are_rounded_down_to_chunks(llama_engine: Engine) -> None:
    engine = llama_engine
    params = {"ctx": {"receipt": True}, "max_offload_tokens": 5 * BLOCK + 31}
    stored = engine.ask(PROMPT, params=params)
    engine.forget_device()
    params = {"ctx": {"receipt": True}, "max_load_tokens": 3 * BLOCK + 31}
    capped = engine.ask(PROMPT, params=params)

    assert stored.receipt["stored_tokens"] == 5 * BLOCK
    assert capped.num_loaded == 3 * BLOCK
    assert_same_answer(capped, stored)
