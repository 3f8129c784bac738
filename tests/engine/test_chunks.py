"""Chunks of four blocks and KV that decoding fills, async scheduling off and on."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine.conftest import EngineShelf
from engine.harness import Engine, assert_same_answer, random_prompt
from engine.spec import BLOCK, EngineSpec

CHUNK = 4 * BLOCK
# 4 chunks and 88 tokens.
PROMPT = random_prompt(3, 600)


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def spec(request: pytest.FixtureRequest, llama: Path) -> EngineSpec:
    return EngineSpec.make(
        llama,
        async_scheduling=request.param,
        blocks_per_chunk=4,
        offload_prompt_only=False,
    )


@pytest.fixture
def engine(shelf: EngineShelf, spec: EngineSpec) -> Engine:
    return shelf.get(spec)


@pytest.mark.parametrize("num_local", [0, 32, 64, 96, 128, 160, 512])
def test_a_local_hit_may_end_inside_a_chunk(engine: Engine, num_local: int) -> None:
    """CASES 10: block 32, chunk 128."""
    cold, stored = engine.ask_and_read(PROMPT)
    engine.forget_device()
    if num_local:
        engine.ask(PROMPT[: num_local + 1], ctx={"load": False, "store": False})

    returned, found = engine.ask_and_read(PROMPT)

    assert returned.num_loaded == 4 * CHUNK - num_local
    assert returned.num_cached == 4 * CHUNK
    loaded = [(0, i) for i in range(num_local // BLOCK, 4 * CHUNK // BLOCK)]
    assert [found[place] for place in loaded] == [stored[place] for place in loaded]
    assert_same_answer(returned, cold)


@pytest.mark.parametrize("num_chunks", [1, 2, 4])
def test_a_prompt_of_whole_chunks_loads_all_but_the_last(
    engine: Engine, num_chunks: int
) -> None:
    prompt = random_prompt(4, num_chunks * CHUNK)
    cold = engine.ask(prompt)
    engine.forget_device()
    returned = engine.ask(prompt)

    assert returned.num_loaded == (num_chunks - 1) * CHUNK
    assert_same_answer(returned, cold)


def test_the_next_turn_finds_what_decoding_computed(engine: Engine) -> None:
    """No chunk of the first turn's prompt is whole; decoding completes one."""
    first_turn = random_prompt(5, CHUNK - 20)
    first = engine.ask(first_turn, max_tokens=40)
    second_turn = [*first_turn, *first.tokens, *random_prompt(6, 40)]
    engine.forget_device()
    host = engine.ask(second_turn)
    engine.forget()
    cold = engine.ask(second_turn)

    assert first.receipt["stored_tokens"] == CHUNK
    assert host.num_loaded == CHUNK
    assert_same_answer(host, cold)


@pytest.mark.parametrize(("max_tokens", "num_stored"), [(20, 0), (21, CHUNK)])
def test_the_last_generated_token_has_no_kv(
    engine: Engine, max_tokens: int, num_stored: int
) -> None:
    result = engine.ask(random_prompt(7, CHUNK - 20), max_tokens=max_tokens)

    assert result.receipt["stored_tokens"] == num_stored


def test_requests_with_a_shared_prefix_run_together(engine: Engine) -> None:
    prompts = [PROMPT[:300] + random_prompt(seed, 80) for seed in range(6, 10)]
    cold = [engine.ask(prompt) for prompt in prompts]
    engine.forget()
    together = engine.run(*prompts)
    engine.forget_device()
    returned = engine.run(*prompts)

    for one, two, three in zip(cold, together, returned, strict=True):
        assert_same_answer(two, one)
        assert_same_answer(three, one)
    assert max(result.num_loaded for result in returned) == 2 * CHUNK
    engine.assert_idle()
