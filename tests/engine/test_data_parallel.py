"""Two engines of one deployment, each with a pool of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine.conftest import EngineShelf
from engine.harness import random_prompt
from engine.server import Server
from engine.spec import BLOCK

# 3 layers of K and V, 2 heads of 32 channels, in float32.
CHUNK = 3 * 2 * BLOCK * 2 * 32 * 4
FULL = 9  # whole blocks of a prompt of 300 tokens
HIT = FULL * BLOCK


@pytest.mark.slow
def test_each_engine_hits_in_a_pool_of_its_own(
    llama: Path, shelf: EngineShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Each engine is sent a prompt of its own, then one that takes the device.

    2. Sent the first one again it loads it; sent the other engine's, it computes.

    The model is dense, so each takes the default of the whole pool, and says so.
    """
    shelf.clear()
    # What the first process of a deployment works out and hands on.
    monkeypatch.setenv("CTX_OFFLOAD_DEFAULT_BYTES", str(50 * CHUNK + 1))
    server = Server(llama, num_blocks=12, flags=["--data-parallel-size", "2"])
    prompts = [random_prompt(seed, 300) for seed in (1, 2)]
    loaded, texts = {}, {}
    try:
        server.wait_ready()
        for step in ("first", "evict", "own", "other's"):
            for rank in (0, 1):
                prompt = {
                    "evict": random_prompt(3, 320),
                    "other's": prompts[1 - rank],
                }.get(step, prompts[rank])
                answer = server.complete(prompt, {}, max_tokens=4, rank=rank)
                receipt = answer["kv_transfer_params"]["ctx"]
                loaded[step, rank] = receipt["loaded_tokens"]
                texts[step, rank] = answer["choices"][0]["text"]
        found = server.metrics(left_out=("model_name", "connector"))
    finally:
        server.close()

    assert server.log.count("one of several data-parallel engines") == 2
    expected = {"first": 0, "evict": 0, "own": HIT, "other's": 0}
    assert loaded == {(s, rank): n for s, n in expected.items() for rank in (0, 1)}
    for rank in (0, 1):
        assert texts["own", rank] == texts["first", rank] == texts["other's", 1 - rank]
        assert found["capacity_bytes", str(rank)] == 50 * CHUNK
        assert found["hit_tokens_total", "default", str(rank)] == HIT
        assert found["loaded_bytes_total", "default", str(rank)] == FULL * CHUNK
