"""Without vLLM's own prefix cache the host is the only one."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine.conftest import EngineShelf
from engine.harness import Engine, assert_same_answer, random_prompt
from engine.spec import BLOCK, EngineSpec

PROMPT = random_prompt(41, 300)
NUM_FULL = 300 // BLOCK * BLOCK


@pytest.fixture
def engine(shelf: EngineShelf, llama: Path) -> Engine:
    """vLLM hashes blocks for a connector, whether or not it caches them itself."""
    options = {"enable_prefix_caching": False}
    return shelf.get(EngineSpec.make(llama, options=options))


def test_the_host_hits_where_the_device_never_does(engine: Engine) -> None:
    assert not engine.core.scheduler.kv_cache_manager.enable_caching
    cold = engine.ask(PROMPT, max_tokens=8)
    again = engine.ask(PROMPT, max_tokens=8)
    unread = engine.ask(PROMPT, max_tokens=8, ctx={"load": False})

    assert [r.num_cached for r in (cold, again, unread)] == [0, NUM_FULL, 0]
    assert again.num_loaded == NUM_FULL
    assert_same_answer(again, cold)
    assert_same_answer(unread, cold)
    engine.assert_idle()


def test_loaded_blocks_hold_the_bytes_that_were_stored(engine: Engine) -> None:
    _, stored = engine.ask_and_read(PROMPT)
    for tensor in engine.kv_tensors:
        tensor.fill_(7.0)
    returned, loaded = engine.ask_and_read(PROMPT)

    assert returned.num_loaded == NUM_FULL
    assert loaded == stored


def test_requests_that_share_a_prefix_load_it_into_blocks_of_their_own(
    engine: Engine,
) -> None:
    prompts = [[*PROMPT[:200], *random_prompt(seed, 60)] for seed in range(42, 46)]
    alone = [engine.ask(prompt, ctx={"load": False}) for prompt in prompts]
    together = engine.run(*prompts)

    assert [r.num_loaded for r in together] == [260 // BLOCK * BLOCK] * 4
    for one, other in zip(together, alone, strict=True):
        assert_same_answer(one, other)
    engine.assert_idle()
