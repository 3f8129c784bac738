"""Two workers that hold half of every block each."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine.conftest import EngineShelf
from engine.harness import Engine, assert_same_answer, manager_of, random_prompt
from engine.spec import BLOCK, EngineSpec, engine_environment

PROMPTS = [random_prompt(seed, 300) for seed in range(2)]
NUM_FULL = 300 // BLOCK * BLOCK
# 3 layers of K and V, 2 heads of 32 channels, in float32, over both ranks.
CHUNK = 3 * 2 * BLOCK * 2 * 32 * 4
POOL = 40


@pytest.fixture
def engine(shelf: EngineShelf, llama: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    shelf.clear()
    with engine_environment(
        VLLM_CPU_OMP_THREADS_BIND="0|1", VLLM_WORKER_MULTIPROC_METHOD="spawn"
    ):
        return shelf.get(
            EngineSpec.make(
                llama,
                cpu_bytes_to_use=POOL * CHUNK,
                options={"tensor_parallel_size": 2},
            )
        )


def test_host_hits_of_two_ranks_answer_like_local_hits(engine: Engine) -> None:
    """CASES 34."""
    cold = engine.run(*PROMPTS)
    local = engine.run(*PROMPTS)
    engine.forget_device()
    for seed in (9, 10):  # writes over every block of the device
        engine.run(random_prompt(seed, 1000), ctx={"store": False})
    host = engine.run(*PROMPTS)

    assert [r.num_loaded for r in cold + local] == [0] * 4
    assert [r.num_cached for r in local] == [NUM_FULL] * 2
    assert [r.num_loaded for r in host] == [NUM_FULL] * 2
    for one, two in zip(host, local, strict=True):
        assert_same_answer(one, two)
    engine.assert_idle()
    assert engine.side.planner._plan.num_workers == 2


def test_ranks_agree_while_the_pool_evicts(engine: Engine) -> None:
    """CASES 34: three prompts of 18 chunks each in a pool of 40."""
    prompts = [random_prompt(seed, 600) for seed in (11, 12, 13)]
    cold = [engine.ask(prompt) for prompt in prompts]
    loaded = []
    for _ in range(2):
        for prompt, expected in zip(prompts, cold, strict=True):
            engine.run(random_prompt(14, 1000), ctx={"store": False})
            answer = engine.ask(prompt)
            assert_same_answer(answer, expected)
            loaded.append(answer.num_loaded)

    assert manager_of(engine.side).num_resident == POOL
    assert 0 < sum(loaded) < len(loaded) * 18 * BLOCK, "nothing hit, or all was there"
    engine.assert_idle()
