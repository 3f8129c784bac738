"""Workers that are given another environment than the scheduler side."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
from engine.conftest import EngineShelf
from engine.harness import Engine, assert_same_answer, random_prompt
from engine.spec import BLOCK, CTX, EngineSpec, engine_environment
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

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


class OnAnotherHost(MultiprocExecutor):
    """Gives its workers an environment with another default, as another host has it."""

    started: ClassVar[list[MultiprocExecutor]] = []

    def _init_executor(self) -> None:
        self.started.append(self)
        with mock.patch.dict(os.environ, {DEFAULT_ENV: str(30 * CHUNK)}):
            super()._init_executor()


@pytest.fixture
def start(
    shelf: EngineShelf, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Engine]]:
    shelf.clear()
    monkeypatch.setenv(DEFAULT_ENV, str(40 * CHUNK))
    engines = []

    def start(transfer: dict[str, Any]) -> Engine:
        spec = EngineSpec.make(llama, num_blocks=23, transfer=transfer)
        with engine_environment(VLLM_WORKER_MULTIPROC_METHOD="spawn"):
            engine = Engine(spec, distributed_executor_backend=OnAnotherHost)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.close()
    while OnAnotherHost.started:  # also of starts that failed
        OnAnotherHost.started.pop().shutdown()


@pytest.mark.slow
def test_the_start_is_refused_with_both_values(start: Callable[..., Engine]) -> None:
    said = "num_slots is 30 on the worker and 40 on the scheduler side"
    with pytest.raises(
        ConfigError, match=rf"worker 0 has another plan \({said}\); set"
    ):
        start({**CTX, "kv_connector_extra_config": {}})


@pytest.mark.slow
def test_inside_a_multi_connector_nothing_is_copied_and_all_is_computed(
    start: Callable[..., Engine], capfd: pytest.CaptureFixture[str]
) -> None:
    """It passes nothing on at the start, so the worker finds out at the first step."""
    engine = start(MULTI)
    cold = engine.ask(PROMPT)
    assert engine.llm.reset_prefix_cache()
    again = engine.ask(PROMPT)
    assert again.num_loaded == again.num_cached == 0
    assert_same_answer(again, cold)
    assert "num_slots is 30 on the worker and 40 on the" in "".join(capfd.readouterr())
