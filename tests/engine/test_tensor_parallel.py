"""Two workers that hold half of every block each."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine.conftest import EngineShelf
from engine.harness import Engine, assert_same_answer, random_prompt
from engine.spec import BLOCK, EngineSpec, engine_environment

PROMPTS = [random_prompt(seed, 300) for seed in range(2)]
NUM_FULL = 300 // BLOCK * BLOCK


@pytest.fixture
def engine(shelf: EngineShelf, llama: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    shelf.clear()
    with engine_environment(
        VLLM_CPU_OMP_THREADS_BIND="0|1", VLLM_WORKER_MULTIPROC_METHOD="spawn"
    ):
        return shelf.get(EngineSpec.make(llama, options={"tensor_parallel_size": 2}))


def test_host_hits_of_two_ranks_answer_like_local_hits(engine: Engine) -> None:
    cold = engine.run(*PROMPTS)
    local = engine.run(*PROMPTS)
    engine.forget_device()
    engine.run(random_prompt(9, 1000))  # writes over every block of the device
    engine.run(random_prompt(10, 1000))
    host = engine.run(*PROMPTS)

    assert [r.num_loaded for r in cold + local] == [0] * 4
    assert [r.num_cached for r in local] == [NUM_FULL] * 2
    assert [r.num_loaded for r in host] == [NUM_FULL] * 2
    for one, two in zip(host, local, strict=True):
        assert_same_answer(one, two)
    engine.assert_idle()
    assert engine.side.planner._plan.num_workers == 2
