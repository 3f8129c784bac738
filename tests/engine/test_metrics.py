"""/metrics and receipts of a real server, against what was sent to it."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from engine.conftest import EngineShelf
from engine.harness import random_prompt
from engine.server import Server
from engine.spec import BLOCK

from vllm_ctx_offload.cli import main

# 3 layers of K and V, 2 heads of 32 channels, in float32.
CHUNK: Final = 3 * 2 * BLOCK * 2 * 32 * 4
PROMPT: Final = 300  # tokens
FULL: Final = 9  # whole chunks of it
POOL: Final = 24
RESERVED: Final = 12
# The device holds one prompt: what comes back must come from the host.
DEVICE_BLOCKS: Final = 11
PROTECT: Final = {"priority": 80, "ttl_s": 600}


def scale_out_flags() -> list[str]:
    """Returns what opens /inference/v1/generate, where a release has it closed."""
    try:
        from vllm.entrypoints.launchers.cli_args import FrontendArgs
    except ImportError:
        return []
    return ["--enable-scale-out"] if hasattr(FrontendArgs, "enable_scale_out") else []


@pytest.fixture(scope="module")
def server(llama: Path, shelf: EngineShelf) -> Iterator[Server]:
    shelf.clear()
    server = Server(
        llama,
        num_blocks=DEVICE_BLOCKS,
        flags=scale_out_flags(),
        cpu_bytes_to_use=POOL * CHUNK,
        max_protected="50%",
        tenants={
            "quiet": {"reserved": RESERVED * CHUNK, "limit": 20 * CHUNK},
            "noisy": {},
        },
    )
    server.wait_ready()
    yield server
    server.close()


def test_before_the_first_request_top_says_that_there_are_no_figures_yet(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first test of this file: nobody has sent a request yet."""
    arguments = ["top", f"127.0.0.1:{server.port}", "--once", "--interval", "0"]
    assert main(arguments) == 1
    assert "no figures yet" in capsys.readouterr().err


@pytest.fixture(scope="module")
def after_script(server: Server) -> dict[str, dict[tuple[str, ...], float]]:
    """Returns the metrics, ours and vLLM's, after a few requests of two tenants."""
    own = random_prompt(1, PROMPT)
    send(server, own, "quiet", **PROTECT)
    for seed in (2, 3, 4):
        send(server, random_prompt(seed, PROMPT), "noisy")
    back = send(server, own, "quiet")
    assert back["usage"]["prompt_tokens_details"]["cached_tokens"] == FULL * BLOCK
    send(server, random_prompt(5, PROMPT), "noisy", load=False, store=7)
    send(server, random_prompt(6, PROMPT), "noisy", priority=10)
    # The last copies end after the last answer.
    while server.metrics()["store_seconds_count",] < 5:
        pass
    return {"ours": server.metrics(), "vllm": server.metrics("vllm:")}


def send(server: Server, prompt: list[int], tenant: str, **hints: Any) -> Any:
    return server.complete(prompt, {"tenant": tenant, **hints})


def test_every_counter_and_gauge_has_the_expected_value(
    after_script: dict[str, dict[tuple[str, ...], float]],
) -> None:
    hit = FULL * BLOCK
    expected: dict[tuple[str, ...], float] = {
        ("lookup_tokens_total", "quiet"): 2 * PROMPT,
        ("hit_tokens_total", "quiet"): hit,
        ("missed_tokens_total", "quiet"): 2 * PROMPT - hit,
        ("lookup_tokens_total", "noisy"): 5 * PROMPT,
        ("hit_tokens_total", "noisy"): 0,
        ("missed_tokens_total", "noisy"): 4 * PROMPT,
        ("skipped_tokens_total", "noisy", "load_off"): PROMPT,
        ("stored_bytes_total", "quiet"): FULL * CHUNK,
        ("loaded_bytes_total", "quiet"): FULL * CHUNK,
        ("stored_bytes_total", "noisy"): 4 * FULL * CHUNK,
        ("loaded_bytes_total", "noisy"): 0,
        # 36 chunks went through the 15 that the quiet tenant left.
        ("evicted_chunks_total", "noisy", "noisy"): 4 * FULL - (POOL - FULL),
        ("rejected_stores_total", "noisy", "priority"): FULL,
        ("hints_rejected_total", "store", "type"): 1,
        ("transfer_failures_total", "load"): 0,
        ("transfer_failures_total", "store"): 0,
        ("resident_bytes", "quiet"): FULL * CHUNK,
        ("reserved_bytes", "quiet"): RESERVED * CHUNK,
        ("limit_bytes", "quiet"): 20 * CHUNK,
        ("resident_bytes", "noisy"): (POOL - FULL) * CHUNK,
        ("reserved_bytes", "noisy"): 0,
        ("limit_bytes", "noisy"): POOL * CHUNK,
        ("resident_bytes", "default"): 0,
        ("reserved_bytes", "default"): 0,
        ("limit_bytes", "default"): POOL * CHUNK,
        ("capacity_bytes",): POOL * CHUNK,
        ("pinned_bytes",): 0,
        ("protected_bytes",): FULL * CHUNK,
        ("disabled",): 0,
        ("load_seconds_count",): 1,
        ("store_seconds_count",): 5,
        ("load_wait_seconds_count",): 0,
        ("load_wait_seconds_sum",): 0,
    }
    for name in ("lookup_tokens", "hit_tokens", "missed_tokens"):
        expected[f"{name}_total", "default"] = 0
    for name in ("stored_bytes", "loaded_bytes"):
        expected[f"{name}_total", "default"] = 0
    found = {
        key: value
        for key, value in after_script["ours"].items()
        if not key[0].endswith("_bucket")
    }
    seconds = [found.pop((f"{way}_seconds_sum",)) for way in ("load", "store")]
    assert found == expected
    assert all(0 < value < 60 for value in seconds)


def test_lookups_are_hits_misses_and_skipped_and_vllms_own_figures_agree(
    after_script: dict[str, dict[tuple[str, ...], float]],
) -> None:
    ours, vllms = after_script["ours"], after_script["vllm"]

    def total(name: str) -> float:
        return sum(v for key, v in ours.items() if key[0] == f"{name}_tokens_total")

    assert total("lookup") == total("hit") + total("missed") + total("skipped")
    assert vllms["external_prefix_cache_queries_total",] == total("lookup")
    assert vllms["external_prefix_cache_hits_total",] == total("hit")
    by_source = {
        key[1]: value
        for key, value in vllms.items()
        if key[0] == "prompt_tokens_cached_by_source_total"
    }
    if by_source:  # this release tells sources apart
        assert by_source["host"] == total("hit")
        assert by_source["external_unspecified"] == 0


def test_nobody_evicts_a_tenant_within_its_reservation(
    server: Server, after_script: object
) -> None:
    for seed in range(100, 120):
        send(server, random_prompt(seed, PROMPT), ("noisy", "undeclared")[seed % 2])
    metrics = server.metrics()
    evicted = {
        key[1:]: value
        for key, value in metrics.items()
        if key[0] == "evicted_chunks_total"
    }
    assert sum(evicted.values()) > 100
    assert metrics["resident_bytes", "quiet"] <= metrics["reserved_bytes", "quiet"]
    assert not [pair for pair in evicted if pair[0] == "quiet"]
    back = send(server, random_prompt(1, PROMPT), "quiet")
    assert back["kv_transfer_params"]["ctx"]["loaded_tokens"] == FULL * BLOCK


MESSAGES: Final = [{"role": "user", "content": "Is this seat taken? " * 4}]
CTX: Final = {"ctx": {"tenant": "quiet", "receipt": True}}
ENTRY_POINTS: Final[dict[str, dict[str, Any]]] = {
    "/v1/completions": {"prompt": [7] * 40, "max_tokens": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/responses": {"input": MESSAGES, "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/inference/v1/generate": {
        "token_ids": [7] * 40,
        "sampling_params": {"max_tokens": 2},
    },
}
# vLLM puts kv_transfer_params in no other stream: their chunks have no such field.
STREAMS_WITH_RECEIPT: Final = {"/v1/responses"}


def stream(server: Server, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the events of a streamed answer."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}{path}",
        json.dumps({"model": "tiny", **body, "stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        lines = [line.decode().strip() for line in response]
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(text) for text in data if text != "[DONE]"]


def is_receipt(receipt: Mapping[str, Any]) -> bool:
    return receipt["tenant"] == "quiet" and receipt["lookup_tokens"] > 0


@pytest.mark.parametrize("path", ENTRY_POINTS)
def test_an_entry_point_returns_the_receipt(server: Server, path: str) -> None:
    body = dict(ENTRY_POINTS[path])
    answer = server.post(path, kv_transfer_params=CTX, **body)
    if answer["kv_transfer_params"] is None and "sampling_params" in body:
        # Older releases, such as 0.27, read them from here only.
        extra_args = {"kv_transfer_params": CTX}
        body["sampling_params"] = {**body["sampling_params"], "extra_args": extra_args}
        answer = server.post(path, **body)
    assert is_receipt(answer["kv_transfer_params"]["ctx"])


@pytest.mark.parametrize("path", ENTRY_POINTS)
def test_a_stream_returns_the_receipt_where_vllm_has_a_place_for_it(
    server: Server, path: str
) -> None:
    events = stream(server, path, {"kv_transfer_params": CTX, **ENTRY_POINTS[path]})
    assert events  # a slow server sends several tokens in one
    text = json.dumps(events)
    if path in STREAMS_WITH_RECEIPT:
        assert is_receipt(events[-1]["response"]["kv_transfer_params"]["ctx"])
    else:
        assert "rejected_reason" not in text


def test_top_reads_the_same_page(
    server: Server, after_script: object, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"127.0.0.1:{server.port}"
    assert main(["top", address, "--once", "--json", "--interval", "0"]) == 0
    (pool,) = json.loads(capsys.readouterr().out)["pools"]
    assert pool["capacity_bytes"] == POOL * CHUNK
    metrics = server.metrics()
    for tenant in ("quiet", "noisy", "default"):
        figures = pool["tenants"][tenant]
        for name in ("resident_bytes", "reserved_bytes", "limit_bytes"):
            assert figures[name] == metrics[name, tenant]
        assert figures["lookup_tokens"] == metrics["lookup_tokens_total", tenant]
    assert pool["tenants"]["noisy"]["evicted_by"]["noisy"] > 0
