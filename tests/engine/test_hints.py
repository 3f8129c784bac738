"""What tenants and hints do, sent over the OpenAI API and seen in cached tokens.

Every tenant here has a limit of 20 chunks in a pool that is large enough for all of
them, so each test fills its own tenant's account and nobody else's. The device holds
one prompt: what comes back must come from the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine.conftest import EngineShelf
from engine.harness import random_prompt
from engine.server import Server
from engine.spec import BLOCK

# 3 layers of K and V, 2 heads of 32 channels, in float32.
BLOCK_BYTES = 3 * 2 * BLOCK * 2 * 32 * 4
LIMIT = 20
NAMES = ("quiet", "priority", "directive", "session", "reuse", "lower", "off", "capped")
SEEDS = itertools.count(1_000)
PROMPT = 300  # tokens; 9 full blocks
FULL = 9 * BLOCK


@pytest.fixture(scope="module")
def server(llama: Path, shelf: EngineShelf) -> Iterator[Server]:
    shelf.clear()
    tenants: dict[str, Any] = {name: {"limit": LIMIT * BLOCK_BYTES} for name in NAMES}
    tenants["capped"]["max_priority"] = 20
    tenants["quiet"]["reserved"] = LIMIT * BLOCK_BYTES
    pool = (len(NAMES) * LIMIT + 40) * BLOCK_BYTES
    server = Server(llama, num_blocks=11, cpu_bytes_to_use=pool, tenants=tenants)
    server.wait_ready()
    yield server
    server.close()


def new_prompt() -> list[int]:
    return random_prompt(next(SEEDS), PROMPT)


def send(
    server: Server, prompt: list[int], tenant: str, **hints: Any
) -> dict[str, Any]:
    """Returns the receipt; checks it against vLLM's own count of cached tokens."""
    answer = server.complete(prompt, {"tenant": tenant, **hints})
    receipt = answer["kv_transfer_params"]["ctx"]
    assert isinstance(receipt, dict)
    details = answer["usage"]["prompt_tokens_details"]
    assert receipt["loaded_tokens"] == (details or {}).get("cached_tokens", 0)
    return receipt


def loaded(server: Server, prompt: list[int], tenant: str, **hints: Any) -> int:
    return int(send(server, prompt, tenant, **hints)["loaded_tokens"])


def fill(server: Server, tenant: str, num_prompts: int, **hints: Any) -> None:
    for _ in range(num_prompts):
        send(server, new_prompt(), tenant, **hints)


def test_a_noisy_tenant_does_not_touch_a_quiet_ones_cache(server: Server) -> None:
    prompts = [new_prompt(), new_prompt()]
    for prompt in prompts:
        assert send(server, prompt, "quiet")["stored_tokens"] == FULL
    fill(server, "somebody", 40)  # undeclared, 360 chunks
    assert [loaded(server, prompt, "quiet") for prompt in prompts] == [FULL, FULL]
    assert ("evicted_chunks_total", "quiet", "default") not in server.metrics()


def test_at_its_limit_a_tenants_own_oldest_chunks_go_tail_first(server: Server) -> None:
    first, second, third = new_prompt(), new_prompt(), new_prompt()
    for prompt in (first, second, third):
        send(server, prompt, "off")
    # 27 chunks in 20: of the first the tail went, and its head is still there.
    assert loaded(server, first, "off", store=False) == 2 * BLOCK
    assert loaded(server, third, "off", store=False) == FULL


def test_a_higher_priority_is_kept_longer(server: Server) -> None:
    kept, other = new_prompt(), new_prompt()
    send(server, kept, "priority", priority=80, ttl_s=600)
    send(server, other, "priority")
    fill(server, "priority", 4)
    assert loaded(server, other, "priority", store=False) == 0
    assert loaded(server, kept, "priority", store=False) == FULL


def test_a_retention_directive_keeps_its_range(server: Server) -> None:
    prompt = new_prompt()
    first_two = {"start": 0, "end": 2 * BLOCK, "priority": 90, "duration": 600}
    send(server, prompt, "directive", retention_directives=[first_two])
    fill(server, "directive", 4)
    assert loaded(server, prompt, "directive", store=False) == 2 * BLOCK


def test_a_released_session_goes_first(server: Server) -> None:
    over, going_on = new_prompt(), new_prompt()
    send(server, going_on, "session", session="going on")
    send(server, over, "session", session="over", release=True)
    fill(server, "session", 1)
    # The released one is the more recent, and went nevertheless.
    assert loaded(server, going_on, "session", store=False) == FULL
    assert loaded(server, over, "session", store=False) < FULL


def test_who_is_expected_back_late_goes_first(server: Server) -> None:
    soon, late = new_prompt(), new_prompt()
    send(server, soon, "reuse", session="soon", expected_reuse_s=600)
    send(server, late, "reuse", session="late", expected_reuse_s=3000)
    fill(server, "reuse", 1)
    assert loaded(server, soon, "reuse", store=False) == FULL
    assert loaded(server, late, "reuse", store=False) < FULL


def test_a_store_of_lower_priority_evicts_nothing_and_says_why(server: Server) -> None:
    first, second = new_prompt(), new_prompt()
    for prompt in (first, second):
        send(server, prompt, "lower")
    receipt = send(server, new_prompt(), "lower", priority=10)
    # Two of the limit's slots were free.
    assert receipt["stored_tokens"] == 2 * BLOCK
    assert receipt["rejected_tokens"] == 7 * BLOCK
    assert receipt["rejected_reason"] == "priority"
    assert loaded(server, first, "lower", store=False) == FULL


def test_a_tenants_caps_bound_what_its_requests_ask_for(server: Server) -> None:
    receipt = send(server, new_prompt(), "capped", priority=100)
    assert receipt["priority"] == 20
    assert server.metrics()["hints_rejected_total", "priority", "clamped"] >= 1


def test_store_and_load_switches(server: Server) -> None:
    prompt = new_prompt()
    assert send(server, prompt, "capped", store=False)["stored_tokens"] == 0
    fill(server, "capped", 1)
    assert send(server, prompt, "capped")["loaded_tokens"] == 0
    fill(server, "capped", 1)
    assert loaded(server, prompt, "capped", load=False) == 0
    fill(server, "capped", 1, store=False)
    assert loaded(server, prompt, "capped") == FULL
