"""A device far too small for its requests: preemption, with the same answers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from engine.conftest import EngineShelf
from engine.harness import Engine, Result, assert_same_answer, random_prompt
from engine.spec import BLOCK, EngineSpec

# Each grows from 4 blocks to 6; the small device holds 13.
PROMPTS = [random_prompt(seed, 3 * BLOCK + 20) for seed in range(8)]
MAX_TOKENS = 60
LARGE = 67
SMALL = 13


@pytest.fixture(scope="module")
def right(shelf: EngineShelf, llama: Path) -> list[Result]:
    """The answers of an engine with room for all, and without a connector."""
    engine = shelf.get(EngineSpec.make(llama, num_blocks=LARGE, transfer=None))
    return engine.run(*PROMPTS, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def spec(request: pytest.FixtureRequest, llama: Path) -> EngineSpec:
    return EngineSpec.make(
        llama,
        num_blocks=SMALL,
        async_scheduling=request.param,
        offload_prompt_only=not request.param,
        load_wait_ms=5,
    )


@pytest.fixture
def small(right: list[Result], shelf: EngineShelf, spec: EngineSpec) -> Engine:
    return shelf.get(spec)


def _num_preemptions(engine: Engine) -> int:
    values = {m.name: m for m in engine.llm.get_metrics()}
    return int(getattr(values["vllm:num_preemptions"], "value", 0))


def test_preempted_requests_come_back_with_the_right_tokens(
    small: Engine, right: list[Result]
) -> None:
    before = _num_preemptions(small)
    answers = small.run(*PROMPTS, max_tokens=MAX_TOKENS)

    assert _num_preemptions(small) > before
    assert sum(answer.num_loaded for answer in answers) > 0
    for answer, expected in zip(answers, right, strict=True):
        assert_same_answer(answer, expected)
    small.assert_idle()


def test_random_aborts_under_preemption_disturb_nobody(
    small: Engine, right: list[Result]
) -> None:
    rng = random.Random(7)
    for _ in range(3):
        expected = {
            small.add(prompt, max_tokens=MAX_TOKENS): answer
            for prompt, answer in zip(PROMPTS, right, strict=True)
        }
        doomed = rng.sample(list(expected), 4)
        results: dict[str, Result] = {}
        while small.llm.llm_engine.has_unfinished_requests():
            results.update(small.step())
            if doomed and rng.random() < 0.1:
                small.abort(doomed.pop())
        small.drain()
        assert len(results) >= len(expected) - 4
        for request_id, answer in results.items():
            assert_same_answer(answer, expected[request_id])
        small.assert_idle()
        assert small.llm.reset_prefix_cache(), "a block was never freed"
