"""Whatever a client sends as kv_transfer_params, the engine answers and lives on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from engine.conftest import EngineShelf
from engine.harness import Engine, assert_same_answer, random_prompt
from engine.spec import EngineSpec

_FIELDS = (
    "ctx",
    "tenant",
    "session",
    "priority",
    "ttl_s",
    "retention_directives",
    "decode_priority",
    "expected_reuse_s",
    "store",
    "load",
    "release",
    "receipt",
    "max_load_tokens",
    "max_offload_tokens",
    "do_remote_prefill",
    "do_remote_decode",
    "remote_block_ids",
    "start",
    "end",
    "duration",
    "\x00",
)
_RUNNING_AT_ONCE = 10


def _deep(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"ctx": value}
    return value


_ODD_VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    2**127,
    -(2**127),
    1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    "x" * 129,
    "x" * 10_000_000,
    "\udc00",
    b"\xff",
    [],
    [[]] * 100,
    {},
    {"a": {"b": [1, {"c": None}]}},
    [{"start": -1, "end": 2, "priority": "x"}] * 100,
    [{"start": 0, "end": None, "priority": 50, "duration": 1e308}],
    (1, 2),
    object(),
]


def _malformed(rng: random.Random, depth: int = 3) -> Any:
    if depth == 0 or rng.random() < 0.4:
        return rng.choice(_ODD_VALUES)
    if rng.random() < 0.1:
        return [_malformed(rng, depth - 1) for _ in range(3)]
    names = rng.choices(_FIELDS, k=rng.randrange(6))
    return {name: _malformed(rng, depth - 1) for name in names}


def _smuggle(engine: Engine) -> list[Any]:
    """Gives the next request the element of the list as its parameters.

    vLLM's front end copies them and reads a field; some of ours would end there.
    """
    waiting: list[Any] = []
    scheduler = engine.core.scheduler
    add_request = scheduler.add_request

    def add(request: Any) -> None:
        if waiting:
            request.kv_transfer_params = waiting.pop()
        add_request(request)

    scheduler.add_request = add
    return waiting


def test_500_malformed_parameters_do_no_harm(shelf: EngineShelf, llama: Path) -> None:
    engine = shelf.get(EngineSpec.make(llama))
    prompts = [random_prompt(seed, 70) for seed in range(4)]
    cold = [engine.ask(prompt, max_tokens=2) for prompt in prompts]
    rng = random.Random(31)
    fixed = [_deep(1000), *_ODD_VALUES, *({"ctx": value} for value in _ODD_VALUES)]
    malformed = [*fixed, *(_malformed(rng) for _ in range(500 - len(fixed)))]
    running = {}
    smuggled = _smuggle(engine)
    for index, params in enumerate(malformed):
        which = index % len(prompts)
        smuggled[:] = [params]
        request_id = engine.add(prompts[which], max_tokens=2, params={})
        running[request_id] = which
        while len(running) >= _RUNNING_AT_ONCE:
            for done, result in engine.step().items():
                assert_same_answer(result, cold[running.pop(done)])
    while running:
        for done, result in engine.step().items():
            assert_same_answer(result, cold[running.pop(done)])
    engine.drain()

    engine.forget_device()
    answer = engine.ask(prompts[0], max_tokens=2)
    assert answer.num_loaded == 64
    assert_same_answer(answer, cold[0])
    engine.assert_idle()
