"""Pauses and resets while a load is open: what docs/troubleshooting.md says of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine.conftest import EngineShelf
from engine.harness import Engine, assert_same_answer, manager_of, random_prompt
from engine.spec import EngineSpec

PROMPT = random_prompt(1, 600)
FAILED = "Failed to reset KV cache even when all the running requests are preempted"


@pytest.fixture
def engine(shelf: EngineShelf, llama: Path) -> Engine:
    return shelf.get(EngineSpec.make(llama))


class OpenLoad:
    """A request that waits for its load, which ends when it is told to."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.cold = engine.ask(PROMPT)
        engine.forget_device()
        self.end = threading.Event()
        self._copy = engine.transfer._copy
        engine.transfer._copy = self._held
        self.request_id = engine.add(PROMPT)
        while not self.is_open:
            engine.step()

    def _held(self, *arguments: Any, to_host: bool) -> None:
        if not to_host:
            self.end.wait()
        self._copy(*arguments, to_host=to_host)

    @property
    def is_open(self) -> bool:
        return bool(self._engine.side.planner._jobs.num_loads)

    def close(self) -> None:
        self.end.set()
        self._engine.drain()
        self._engine.transfer._copy = self._copy


@pytest.fixture
def load(engine: Engine) -> Iterator[OpenLoad]:
    load = OpenLoad(engine)
    yield load
    engine.core.resume_scheduler()
    load.close()
    engine.assert_idle()


def test_vllm_raises_where_it_can_not_preempt_a_request_that_loads(
    engine: Engine, load: OpenLoad
) -> None:
    """And goes on as before: nothing was forgotten."""
    with pytest.raises(RuntimeError, match=FAILED):
        engine.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert load.is_open
    assert manager_of(engine.side).num_resident > 0


def test_the_plain_reset_says_no_until_the_load_has_ended_and_its_request_too(
    engine: Engine, load: OpenLoad
) -> None:
    """What to do in an engine of one's own process: step until it says yes."""
    assert not engine.llm.reset_prefix_cache(reset_connector=True)
    assert load.is_open
    load.end.set()
    results = {}
    while not engine.llm.reset_prefix_cache(reset_connector=True):
        results.update(engine.step())
    assert_same_answer(results[load.request_id], load.cold)
    assert manager_of(engine.side).num_resident == 0


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_a_pause_raises_in_ones_own_process_and_succeeds_when_asked_again(
    engine: Engine, load: OpenLoad, mode: str
) -> None:
    """After an abort once the load has ended; with `keep` the request has to run."""
    with pytest.raises(RuntimeError, match=FAILED):
        engine.core.pause_scheduler(mode)
    load.end.set()
    while load.is_open:
        engine.step()
    if mode == "keep":
        # Paused, it does not run, and so keeps the blocks that were loaded for it.
        for _ in range(3):
            engine.step()
        with pytest.raises(RuntimeError, match=FAILED):
            engine.core.pause_scheduler(mode)
        engine.core.resume_scheduler()
        engine.step()
    engine.core.pause_scheduler(mode)
    assert manager_of(engine.side).num_resident == 0
