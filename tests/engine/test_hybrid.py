"""Several KV cache groups: two that slide over the prompt, one that looks at all.

Gemma 4's sliding layers have blocks of twice as many tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine.conftest import CopyFaults, EngineShelf
from engine.harness import Engine, assert_same_answer, random_prompt
from engine.models import GEMMA_WINDOW
from engine.spec import BLOCK, EngineSpec

from vllm_ctx_offload.errors import ConfigError

# Several windows, computed in pieces of at most 512 tokens, and a partial block.
PROMPT = random_prompt(11, 900)
NUM_FULL = 900 // (2 * BLOCK) * 2 * BLOCK
SLIDING_BLOCK = {"gemma3": BLOCK, "gemma4": 2 * BLOCK}


def _can_recompute_groups() -> bool:
    from vllm_ctx_offload.adapters.vllm_api import KVConnectorTransferResults

    return KVConnectorTransferResults is not None


def _make_spec(model: Path, *, async_scheduling: bool = False) -> EngineSpec:
    from vllm.config import CacheConfig

    options: dict[str, Any] = {}
    if hasattr(CacheConfig, "prefix_cache_retention_interval"):
        # vLLM's own prefix cache keeps all windows, so that it can be compared with.
        options["prefix_cache_retention_interval"] = None
    return EngineSpec.make(
        model, num_blocks=331, async_scheduling=async_scheduling, options=options
    )


@pytest.fixture(scope="module", params=["gemma3", "gemma4"])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def block(model: str) -> int:
    """Tokens of the largest block, after which blocks of all groups end."""
    return SLIDING_BLOCK[model]


@pytest.fixture(scope="module", params=["sync", "async"])
def spec(request: pytest.FixtureRequest, model: str) -> EngineSpec:
    if not _can_recompute_groups():
        pytest.skip("this vLLM can't recompute a failed load of several groups")
    folder = request.getfixturevalue(model)
    return _make_spec(folder, async_scheduling=request.param == "async")


@pytest.fixture
def engine(shelf: EngineShelf, spec: EngineSpec) -> Engine:
    return shelf.get(spec)


def test_there_are_three_groups_of_two_kinds(engine: Engine, block: int) -> None:
    groups = engine.side.planner._plan.groups
    kinds = sorted((group.window or 0, group.tokens_per_block) for group in groups)
    assert kinds == [(0, BLOCK), *[(GEMMA_WINDOW, block)] * 2]


def test_loaded_blocks_of_every_group_hold_what_was_stored(
    engine: Engine, block: int
) -> None:
    cold, stored = engine.ask_and_read(PROMPT)
    engine.forget_device()
    host, loaded = engine.ask_and_read(PROMPT)

    assert (cold.num_cached, host.num_cached) == (0, NUM_FULL)
    assert host.num_loaded == NUM_FULL
    per_group = [sum(group == g for g, _ in loaded) for group in range(3)]
    window_blocks = GEMMA_WINDOW // block
    assert sorted(per_group) == [window_blocks, window_blocks, NUM_FULL // BLOCK]
    # Pieces of the cold prompt were longer than the window.
    assert loaded == {place: stored[place] for place in loaded}
    engine.assert_idle()


def test_a_host_hit_answers_like_a_local_hit(engine: Engine) -> None:
    cold = engine.ask(PROMPT, max_tokens=8)
    local = engine.ask(PROMPT, max_tokens=8)
    engine.forget_device()
    host = engine.ask(PROMPT, max_tokens=8)

    assert [r.num_cached for r in (cold, local, host)] == [0, NUM_FULL, NUM_FULL]
    assert [r.num_loaded for r in (cold, local, host)] == [0, 0, NUM_FULL]
    assert_same_answer(host, local)
    assert_same_answer(host, cold)


@pytest.mark.parametrize("num_shared", [40, 64, 200, 456, 700])
def test_a_shared_prefix_hits_as_in_an_unlimited_device_cache(
    engine: Engine, block: int, num_shared: int
) -> None:
    """Whatever vLLM's own prefix cache hits while all is still on the device."""
    first = random_prompt(12, 800)
    second = [*first[:num_shared], *random_prompt(13, 800 - num_shared)]
    engine.ask(first)
    local = engine.ask(second, ctx={"load": False})
    engine.forget()
    engine.ask(first)
    engine.forget_device()
    host = engine.ask(second)

    assert (local.num_loaded, host.num_cached) == (0, host.num_loaded)
    assert host.num_loaded == local.num_cached == num_shared // block * block
    assert_same_answer(host, local)
    engine.assert_idle()


def test_a_failed_load_is_computed_and_stored_anew(
    engine: Engine, faults: CopyFaults
) -> None:
    cold = engine.ask(PROMPT)
    engine.forget_device()
    faults.fail = lambda to_host: not to_host
    failed = engine.ask(PROMPT)

    assert faults.num_failed == 1
    assert failed.num_cached == 0
    assert_same_answer(failed, cold)

    faults.fail = lambda to_host: False
    engine.forget_device()
    assert engine.ask(PROMPT).num_loaded == NUM_FULL
    engine.assert_idle()


def test_many_requests_under_pressure_answer_as_alone(engine: Engine) -> None:
    prompts = [
        [*PROMPT[: 100 + 90 * index], *random_prompt(20 + index, 90)]
        for index in range(8)
    ]
    alone = []
    for prompt in prompts:
        engine.forget()
        alone.append(engine.ask(prompt, max_tokens=40))
    engine.forget()
    for _ in range(3):
        together = engine.run(*prompts, max_tokens=40)
        for one, other in zip(together, alone, strict=True):
            assert_same_answer(one, other)
        engine.forget_device()
    engine.assert_idle()


def test_without_the_hybrid_manager_one_group_serves_on_every_release(
    shelf: EngineShelf, gemma3: Path
) -> None:
    """What the refusal below advises: all layers keep all tokens, in one group."""
    engine = shelf.get(
        EngineSpec.make(
            gemma3, num_blocks=83, options={"disable_hybrid_kv_cache_manager": True}
        )
    )
    assert len(engine.side.planner._plan.groups) == 1
    cold, stored = engine.ask_and_read(PROMPT)
    local = engine.ask(PROMPT, max_tokens=8)
    engine.forget_device()
    host = engine.ask(PROMPT, max_tokens=8)
    engine.forget_device()
    returned, loaded = engine.ask_and_read(PROMPT)

    assert [r.num_cached for r in (cold, local, host)] == [0, NUM_FULL, NUM_FULL]
    assert [r.num_loaded for r in (local, host, returned)] == [0, NUM_FULL, NUM_FULL]
    assert loaded == stored
    assert_same_answer(host, local)
    engine.assert_idle()


def test_where_vllm_can_not_recompute_groups_the_start_is_refused(
    shelf: EngineShelf, gemma3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.clear()
    vllm_api = "vllm_ctx_offload.adapters.vllm_api"
    monkeypatch.setattr(f"{vllm_api}.KVConnectorTransferResults", None)
    with pytest.raises(ConfigError, match=r"3 KV cache group\(s\) of .*, and vLLM"):
        Engine(_make_spec(gemma3))
