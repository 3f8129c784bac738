"""The OpenAI server as users run it, and how it starts and stops."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
from engine.conftest import EngineShelf
from engine.harness import random_prompt
from engine.server import Server
from engine.spec import BLOCK

# The device holds 12 blocks: either prompt evicts the other one whole, or nearly.
FIRST = random_prompt(1, 320)
SECOND = random_prompt(2, 370)
# 3 layers of K and V, 2 heads of 32 channels, in float32.
BLOCK_BYTES = 3 * 2 * BLOCK * 2 * 32 * 4


@pytest.fixture(scope="module", autouse=True)
def no_engine_here(shelf: EngineShelf) -> None:
    """The servers need the memory and the cores."""
    shelf.clear()


@pytest.fixture(scope="module")
def server(llama: Path, no_engine_here: None) -> Iterator[Server]:
    # With the endpoints that reset caches and change weights.
    with mock.patch.dict(os.environ, VLLM_SERVER_DEV_MODE="1"):
        server = Server(
            llama,
            num_blocks=13,
            cpu_bytes_to_use="64MiB",
            tenants={"acme": {}, "zeta": {}},
        )
    server.wait_ready()
    yield server
    server.close()


def _receipt(answer: dict[str, Any]) -> dict[str, Any]:
    receipt = answer["kv_transfer_params"]["ctx"]
    assert isinstance(receipt, dict)
    return receipt


def test_two_tenants_are_served_and_counted(server: Server) -> None:
    first = server.complete(FIRST, {"tenant": "acme", "priority": 80})
    server.complete(SECOND, {"tenant": "zeta"})
    again = server.complete(FIRST, {"tenant": "acme"})
    stranger = server.complete(SECOND, {"tenant": "nobody"})

    assert _receipt(first) == {
        "tenant": "acme",
        "priority": 80,
        "lookup_tokens": 320,
        "loaded_tokens": 0,
        "stored_tokens": 320,
        "rejected_tokens": 0,
        "rejected_reason": None,
    }
    assert _receipt(again)["loaded_tokens"] == 288
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert _receipt(stranger)["tenant"] == "default"
    assert _receipt(stranger)["loaded_tokens"] == 0, "another tenant's cache was read"

    chat = server.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "Is this seat taken? " * 4}],
        max_tokens=1,
        kv_transfer_params={"ctx": {"tenant": "acme", "receipt": True, "store": 7}},
    )
    assert _receipt(chat)["tenant"] == "acme"
    num_chat = chat["usage"]["prompt_tokens"]

    # Of `stranger`, the two blocks that `again` left of SECOND's were a local hit.
    num_looked_up = 370 - 2 * BLOCK
    expected = {
        ("lookup_tokens_total", "acme"): 320 + 320 + num_chat,
        ("lookup_tokens_total", "zeta"): 370,
        ("lookup_tokens_total", "default"): num_looked_up,
        ("hit_tokens_total", "acme"): 288,
        ("hit_tokens_total", "zeta"): 0,
        ("hit_tokens_total", "default"): 0,
        ("loaded_bytes_total", "acme"): 9 * BLOCK_BYTES,
        ("stored_bytes_total", "acme"): (10 + num_chat // BLOCK) * BLOCK_BYTES,
        ("stored_bytes_total", "zeta"): 11 * BLOCK_BYTES,
        ("stored_bytes_total", "default"): 11 * BLOCK_BYTES,
        ("hints_rejected_total", "store", "type"): 1,
    }
    found = server.metrics()
    assert {key: found.get(key) for key in expected} == expected
    assert not [key for key in found if "nobody" in key]


@pytest.mark.parametrize(
    ("calls", "num_loaded"),
    [
        (["/reset_prefix_cache"], 288),
        (["/reset_prefix_cache?reset_external=true"], 0),
        (["/pause?mode=wait", "/resume"], 0),
        (["/pause?mode=keep", "/resume"], 0),
        (["/pause?mode=abort&clear_cache=false", "/resume"], 288),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_calls_that_forget_the_host_are_those_the_docs_name(
    server: Server, calls: list[str], num_loaded: int
) -> None:
    server.complete(FIRST, {"tenant": "acme"})
    server.complete(SECOND, {"tenant": "zeta"})
    for call in calls:
        answer = server.post(call)
        assert answer.get("success", True), answer
    again = server.complete(FIRST, {"tenant": "acme"})
    assert _receipt(again)["loaded_tokens"] == num_loaded


def test_sigterm_stops_the_server_while_stores_are_under_way(server: Server) -> None:
    looked_up = ("lookup_tokens_total", "default")
    before = server.metrics().get(looked_up, 0)
    connections = [
        server.begin_completion(random_prompt(seed, 300), max_tokens=80)
        for seed in range(4)
    ]
    while server.metrics().get(looked_up, 0) == before:
        pass  # until the first of them is computed, and so stored
    children = psutil.Process(server.process.pid).children(recursive=True)
    server.process.send_signal(signal.SIGTERM)
    # vLLM's HTTP server waits for its clients, also where their engine is gone.
    for connection in connections:
        connection.close()
    code = server.process.wait(timeout=60)
    _, alive = psutil.wait_procs(children, timeout=60)

    assert code == 0, server.log[-3000:]
    assert children
    assert not alive, "a process outlives the server"


def test_a_bad_configuration_stops_the_start_with_a_sentence(llama: Path) -> None:
    server = Server(llama, num_blocks=13, cpu_byte_to_use="1GiB")
    code = server.process.wait(timeout=300)
    server.close()

    assert code != 0
    wanted = "unknown key 'cpu_byte_to_use'; did you mean 'cpu_bytes_to_use'?"
    assert wanted in server.log
