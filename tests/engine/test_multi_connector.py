"""Inside vLLM's MultiConnector: one connector loads, all of them store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine.conftest import EngineShelf
from engine.harness import (
    BLOCK,
    CTX,
    Engine,
    EngineSpec,
    assert_same_answer,
    random_prompt,
)

PROMPT = random_prompt(1, 600)
NUM_FULL = 600 // BLOCK * BLOCK
POOL = {"cpu_bytes_to_use": "32MiB"}
OURS = {**CTX, "kv_connector_extra_config": POOL}
OURS_BY_CHUNKS = {
    **CTX,
    "kv_connector_extra_config": {**POOL, "blocks_per_chunk": 4},
}
VLLMS = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 32 * 1024**2},
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
    def start(*connectors: dict[str, Any]) -> Engine:
        return shelf.get(EngineSpec.make(llama, transfer=_multi(*connectors)))

    return start


@pytest.mark.parametrize("num_local", [0, 64])
def test_of_two_of_ours_only_the_winner_loads(start: Any, num_local: int) -> None:
    engine = start(OURS, OURS_BY_CHUNKS)
    cold = engine.ask(PROMPT)
    engine.forget_device()
    if num_local:
        engine.ask(PROMPT[: num_local + 1], ctx={"load": False, "store": False})
    returned = engine.ask(PROMPT)

    winner, loser = engine.sides
    assert returned.num_cached == NUM_FULL
    assert_same_answer(returned, cold)
    assert _loaded_bytes(winner) > 0
    assert _loaded_bytes(loser) == 0
    engine.assert_idle()


def test_the_second_serves_what_the_first_does_not_hold(start: Any) -> None:
    engine = start(OURS, OURS_BY_CHUNKS)
    cold = engine.ask(PROMPT)
    engine.forget_device()
    first, second = engine.sides
    first.reset()
    returned = engine.ask(PROMPT)

    assert returned.num_cached == NUM_FULL // (4 * BLOCK) * 4 * BLOCK
    assert_same_answer(returned, cold)
    engine.forget_device()
    # What the second had loaded was stored by the first.
    again = engine.ask(PROMPT)
    assert again.num_cached == NUM_FULL
    assert_same_answer(again, cold)


@pytest.mark.parametrize("order", [(OURS, VLLMS), (VLLMS, OURS)], ids=["1st", "2nd"])
def test_beside_vllms_own_connector(start: Any, order: tuple[dict[str, Any]]) -> None:
    engine = start(*order)
    cold = engine.ask(PROMPT)
    engine.forget_device()
    returned = engine.ask(PROMPT)

    (ours,) = engine.sides
    assert returned.num_cached == NUM_FULL
    assert_same_answer(returned, cold)
    assert (_loaded_bytes(ours) > 0) == (order[0] is OURS)
    engine.assert_idle()


def _loaded_bytes(side: Any) -> float:
    counts = side._stats._counts
    taken = sum(v for k, v in counts.items() if k[0] == "loaded_bytes")
    return float(taken)
