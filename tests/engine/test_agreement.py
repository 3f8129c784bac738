"""Workers that are given another environment than the scheduler side."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from engine.conftest import EngineShelf
from engine.harness import Engine, assert_same_answer, random_prompt
from engine.spec import BLOCK, CTX, EngineSpec, engine_environment

from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.memory import DEFAULT_ENV

# 3 layers of K and V, 2 heads of 32 channels, in float32.
CHUNK = 3 * 2 * BLOCK * 2 * 32 * 4
PROMPT = random_prompt(1, 300)
MULTI = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"connectors": [CTX]},
}


def make_executor(size: int) -> type:
    """Returns an executor whose workers come to a pool of that size."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    class OnAnotherHost(MultiprocExecutor):
        def _init_executor(self) -> None:
            with mock.patch.dict(os.environ, {DEFAULT_ENV: str(size)}):
                super()._init_executor()

    return OnAnotherHost


@pytest.fixture
def start(shelf: EngineShelf, llama: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    shelf.clear()
    monkeypatch.setenv(DEFAULT_ENV, str(40 * CHUNK))
    engines = []

    def start(transfer: Any, size: int) -> Engine:
        spec = EngineSpec.make(llama, num_blocks=23, transfer=transfer)
        with engine_environment(VLLM_WORKER_MULTIPROC_METHOD="spawn"):
            engines.append(
                Engine(spec, distributed_executor_backend=make_executor(size))
            )
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


@pytest.mark.slow
def test_the_start_is_refused_with_both_values(start: Any) -> None:
    alone = {**CTX, "kv_connector_extra_config": {}}
    with pytest.raises(
        ConfigError,
        match=r"worker 0 has another plan \(num_slots is 30 on the worker and 40 on the "
        r"scheduler side\); set cpu_bytes_to_use",
    ):
        start(alone, 30 * CHUNK)


@pytest.mark.slow
def test_inside_a_multi_connector_nothing_is_copied_and_all_is_computed(
    start: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """It passes nothing on at the start, so the worker finds out at the first step."""
    engine = start(MULTI, 30 * CHUNK)
    cold = engine.ask(PROMPT)
    assert engine.llm.reset_prefix_cache()
    again = engine.ask(PROMPT)
    assert again.num_loaded == again.num_cached == 0
    assert_same_answer(again, cold)
    assert "num_slots is 30 on the worker and 40 on the" in "".join(capfd.readouterr())
