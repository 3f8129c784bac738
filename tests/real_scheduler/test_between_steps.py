"""Requests that come and go while a step's output is awaited; loads in a full batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from real_scheduler.harness import Engine
from real_scheduler.invariants import host_manager, is_parked
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

MakeEngine = Callable[..., Engine]
PROMPT = list(range(1, 201))  # six blocks and 8 tokens

since_0_34 = pytest.mark.skipif(
    not hasattr(KVConnectorBase_V1, "may_load_async"), reason="from vLLM 0.34 on"
)


@pytest.mark.parametrize("steps_before", [0, 1, 5])
def test_adds_and_aborts_while_an_output_is_awaited(
    make_engine: MakeEngine, async_scheduling: bool, steps_before: int
) -> None:
    """From 0.34 on they are handled between the schedule of a step and its output.

    1. A step is scheduled: one request prefills or decodes in it.
    2. Before its output comes, the request is aborted, and two are added, one of which
       is aborted too. The next step hands the blocks on.
    3. What the first one computed is stored, and right, and nothing is left.
    """
    engine = make_engine(
        async_scheduling=async_scheduling,
        num_blocks=10,
        extra={"offload_prompt_only": False},
    )
    first = engine.add(PROMPT, max_tokens=60)
    engine.step(steps_before)
    engine.schedule()
    engine.abort(first)
    taker = engine.add(list(range(300, 500)), max_tokens=3)
    engine.abort(engine.add([9, *PROMPT]))
    engine.schedule()
    engine.flush()
    engine.drain()
    assert len(engine.tokens[taker.request_id]) == 3
    assert host_manager(engine.side).num_resident == 12
    assert engine.scheduler.reset_prefix_cache()
    request = engine.run(PROMPT, ctx={"receipt": True})
    assert engine.receipts[request.request_id]["ctx"]["loaded_tokens"] == 192


@since_0_34
def test_loads_start_while_the_batch_is_full(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """With --max-num-inflight-kv-loads, for those that the host has something of."""
    engine = make_engine(
        async_scheduling=async_scheduling, max_num_seqs=1, max_inflight_loads=1
    )
    engine.run(PROMPT)
    engine.run([7, *PROMPT])
    assert engine.scheduler.reset_prefix_cache()
    runs = engine.add(list(range(300, 340)), max_tokens=50)
    engine.step(2)
    unknown = engine.add([8, *PROMPT])
    engine.controls.hold_loads = True
    loads, waits = engine.add(PROMPT), engine.add([7, *PROMPT])
    engine.step(3)
    assert is_parked(loads)
    assert not is_parked(waits)
    engine.controls.hold_loads = False
    engine.step(3)
    assert engine.count("loaded_bytes") > 0
    assert runs.request_id not in engine.finished
    engine.drain()
    for request, prompt in ((loads, PROMPT), (waits, [7, *PROMPT])):
        assert engine.tokens[request.request_id] == engine.answer(prompt, 1)
        assert engine.num_scheduled[request.request_id] < 40
    assert engine.num_scheduled[unknown.request_id] == 201


@since_0_34
def test_a_limit_of_loads_starves_nobody(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """1. More requests hit than may load, beside others that hit nothing.
    2. The first load fails, so its request waits among those that compute.
    """
    engine = make_engine(
        async_scheduling=async_scheduling,
        num_blocks=40,
        max_num_seqs=2,
        max_inflight_loads=1,
    )
    prompts = [[first, *PROMPT] for first in range(300, 304)]
    for prompt in prompts:
        engine.run(prompt)
    assert engine.scheduler.reset_prefix_cache()
    failures = iter([True])
    engine.controls.fails = lambda job, to_host, rank: (
        not to_host and next(failures, False)
    )
    for prompt in prompts:
        engine.add(prompt, max_tokens=5)
        engine.add([9, *prompt], max_tokens=5)
    engine.drain(max_steps=200)
    assert len(engine.finished) == len(prompts) * 3
    assert engine.count("hit_tokens") >= 3 * 192
