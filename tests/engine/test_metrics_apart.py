"""Figures of several engines and of several connectors are shown apart."""

from __future__ import annotations

from pathlib import Path

from engine.conftest import EngineShelf
from engine.harness import random_prompt
from engine.server import Server
from engine.spec import BLOCK, CTX, EngineSpec

# 3 layers of K and V, 2 heads of 32 channels, in float32.
CHUNK = 3 * 2 * BLOCK * 2 * 32 * 4
PROMPT = 300  # tokens
FULL = 9  # whole chunks of it
POOLS = {"0": 4, "1": 24}  # chunks, by connector


def test_two_connectors_of_one_engine(llama: Path, shelf: EngineShelf) -> None:
    parts = [
        {**CTX, "kv_connector_extra_config": {"cpu_bytes_to_use": num * CHUNK}}
        for num in POOLS.values()
    ]
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": parts},
    }
    engine = shelf.get(EngineSpec.make(llama, transfer=transfer))
    prefix = "vllm:ctx_offload_"

    def shown(name: str) -> dict[str, float]:
        return {
            metric.labels["connector"]: metric.value
            for metric in engine.llm.get_metrics()
            if metric.name == prefix + name
        }

    engine.ask(random_prompt(1, PROMPT))
    engine.assert_idle()
    stored = {key: min(num, FULL) * CHUNK for key, num in POOLS.items()}
    assert shown("capacity_bytes") == {k: num * CHUNK for k, num in POOLS.items()}
    assert shown("resident_bytes") == shown("stored_bytes") == stored
    assert shown("lookup_tokens") == dict.fromkeys(POOLS, PROMPT)


def test_two_engines_behind_two_api_servers(llama: Path, shelf: EngineShelf) -> None:
    """vLLM tells each server of some steps, and adds their figures up in files."""
    shelf.clear()
    server = Server(
        llama,
        num_blocks=11,
        flags=["--data-parallel-size", "2", "--api-server-count", "2"],
        cpu_bytes_to_use=24 * CHUNK,
        tenants={"acme": {}},
    )
    try:
        server.wait_ready()
        for seed in range(6):
            server.complete(random_prompt(seed, PROMPT), {"tenant": "acme"})
        apart = ("model_name", "connector")
        while True:  # the last copies end after the last answer
            found = server.metrics(left_out=apart)
            engines = [key[1] for key in found if key[0] == "capacity_bytes"]
            counts = [found["store_seconds_count", engine] for engine in engines]
            if sum(counts) == 6:
                break
        found = server.metrics(left_out=apart)
    finally:
        server.close()
    assert sorted(engines) == ["0", "1"]
    assert min(counts) > 0, "one engine got all requests"
    for engine, count in zip(engines, counts, strict=True):
        assert found["lookup_tokens_total", "acme", engine] == count * PROMPT
        assert found["stored_bytes_total", "acme", engine] == count * FULL * CHUNK
        resident = found["resident_bytes", "acme", engine]
        assert resident == min(count * FULL, 24) * CHUNK
        assert found["capacity_bytes", engine] == 24 * CHUNK
        evicted = found.get(("evicted_chunks_total", "acme", "acme", engine), 0)
        assert evicted == max(count * FULL - 24, 0)
