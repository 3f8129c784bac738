"""KV events of a real engine, as vLLM's publisher gets them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine.conftest import EngineShelf
from engine.harness import Engine, random_prompt
from engine.spec import BLOCK, EngineSpec

PROMPT = random_prompt(1, 10 * BLOCK + 7)
EVENTS = {"enable_kv_cache_events": True, "publisher": "null"}


@pytest.fixture
def engine(shelf: EngineShelf, llama: Path) -> Engine:
    from vllm.config import KVEventsConfig

    options = {"kv_events_config": EVENTS}
    engine = shelf.get(EngineSpec.make(llama, options=options))
    config = engine.llm.llm_engine.vllm_config.kv_events_config
    assert config == KVEventsConfig(**EVENTS)
    return engine


def test_what_enters_and_leaves_the_host_is_published(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[Any] = []
    publisher = engine.core.scheduler.kv_event_publisher
    monkeypatch.setattr(publisher, "publish", batches.append)

    def published(kind: str, medium: str) -> list[bytes]:
        found = []
        for batch in batches:
            for event in batch.events:
                if type(event).__name__ == kind and event.medium == medium:
                    found.extend(event.block_hashes)
        return found

    engine.ask(PROMPT)
    engine.ask(random_prompt(2, 3))  # the last step of a request reports its stores
    on_host = published("BlockStored", "CPU")
    assert on_host == published("BlockStored", "GPU")[:10]
    assert not published("BlockRemoved", "CPU")

    assert engine.llm.reset_prefix_cache(reset_connector=True)
    engine.ask(random_prompt(3, 3))
    assert sorted(published("BlockRemoved", "CPU")) == sorted(on_host)
