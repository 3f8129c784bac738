"""Inside vLLM's MultiConnector: one connector loads, all of them store.

vLLM's own OffloadingConnector can't stand beside ours here: its host tier refuses to
start on the CPU platform.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from engine.conftest import EngineShelf
from engine.harness import Engine, assert_same_answer, random_prompt
from engine.spec import BLOCK, CTX, EngineSpec

PROMPT = random_prompt(1, 600)
NUM_FULL = 600 // BLOCK * BLOCK
POOL = {"cpu_bytes_to_use": "32MiB"}
OURS = {**CTX, "kv_connector_extra_config": POOL}
OURS_BY_CHUNKS = {
    **CTX,
    "kv_connector_extra_config": {**POOL, "blocks_per_chunk": 4},
}


def _multi(*connectors: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


@pytest.fixture
def start(shelf: EngineShelf, llama: Path) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector

    # Up to 0.29 it takes statistics for what a process border makes of them, and an
    # engine in this process sends them as they are.
    in_process = 'stats_data["data"]' not in inspect.getsource(multi_connector)

    def start(*connectors: dict[str, Any]) -> Engine:
        spec = EngineSpec.make(
            llama,
            transfer=_multi(*connectors),
            options={"disable_log_stats": not in_process},
        )
        return shelf.get(spec)

    return start


class LoadCounter:
    """Counts the loads that a worker is given."""

    def __init__(self, worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_loads = 0
        self._submit = worker._transfer.submit
        monkeypatch.setattr(worker._transfer, "submit", self)

    def __call__(self, job: Any, *, to_host: bool) -> None:
        self.num_loads += not to_host
        self._submit(job, to_host=to_host)


@pytest.mark.parametrize("num_local", [0, 64])
def test_of_two_of_ours_only_the_winner_loads(
    start: Any, num_local: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(OURS, OURS_BY_CHUNKS)
    winner, loser = (LoadCounter(worker, monkeypatch) for worker in engine.workers)
    cold = engine.ask(PROMPT)
    engine.forget_device()
    if num_local:
        engine.ask(PROMPT[: num_local + 1], ctx={"load": False, "store": False})
    returned = engine.ask(PROMPT)

    assert returned.num_cached == NUM_FULL
    assert returned.num_loaded == NUM_FULL - num_local
    assert_same_answer(returned, cold)
    assert (winner.num_loads, loser.num_loads) == (1, 0)
    engine.assert_idle()


def test_the_second_serves_what_the_first_does_not_hold(start: Any) -> None:
    engine = start(OURS, OURS_BY_CHUNKS)
    cold = engine.ask(PROMPT)
    engine.forget_device()
    engine.sides[0].reset()
    returned = engine.ask(PROMPT)

    assert returned.num_cached == NUM_FULL // (4 * BLOCK) * 4 * BLOCK
    assert returned.num_loaded == returned.num_cached, "its load is in the receipt"
    assert_same_answer(returned, cold)
    engine.forget_device()
    # What the second had loaded was stored by the first.
    again = engine.ask(PROMPT)
    assert again.num_cached == NUM_FULL
    assert_same_answer(again, cold)
