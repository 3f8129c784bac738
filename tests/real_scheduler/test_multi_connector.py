"""Inside vLLM's MultiConnector: CASES 33."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from real_scheduler.harness import Engine, ours
from real_scheduler.invariants import host_manager

MakeEngine = Callable[..., Engine]
PROMPT = list(range(1, 201))  # six blocks and 8 tokens
PAGE_BYTES = 32 * 2 * 2 * 32 * 4
OTHER = {
    "kv_connector": "OtherConnector",
    "kv_connector_module_path": "real_scheduler.other_connector",
    "kv_role": "kv_both",
}


def our_part(num_slots: int, **extra: Any) -> dict[str, Any]:
    return ours(cpu_bytes_to_use=num_slots * PAGE_BYTES, **extra)


def multi(*connectors: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        # Read from the outer configuration: ours can't set it from inside.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


def beside_other(make_engine: MakeEngine, first: bool, asynchronous: bool) -> Engine:
    parts = [our_part(16), OTHER]
    return make_engine(
        kv_transfer=multi(*(parts if first else reversed(parts))),
        async_scheduling=asynchronous,
    )


def other_of(engine: Engine) -> Any:
    return next(c for c in engine.connectors if hasattr(c, "has_tokens"))


@pytest.mark.parametrize("first", [True, False], ids=["ours first", "ours last"])
def test_loser_loads_nothing_and_gives_its_lease_back(
    make_engine: MakeEngine, async_scheduling: bool, first: bool
) -> None:
    """CASES 33.

    1. Both connectors have the prompt; the first one in the list wins.
    2. The other is told of an admission with the request's blocks and 0 tokens.
    """
    engine = beside_other(make_engine, first, async_scheduling)
    engine.run(PROMPT)
    engine.scheduler.reset_prefix_cache()
    other = other_of(engine)
    other.has_tokens = 96
    request = engine.run(PROMPT, max_tokens=4)
    assert other.num_admitted == (not first)
    assert engine.num_scheduled[request.request_id] == (8 if first else 104) + 3
    assert engine.count("loaded_bytes") == (6 * PAGE_BYTES if first else 0)
    assert host_manager(engine.side).num_pinned == 0


@pytest.mark.parametrize("first", [True, False], ids=["ours first", "ours last"])
def test_what_another_one_loaded_is_stored_once_it_is_there(
    make_engine: MakeEngine, async_scheduling: bool, first: bool
) -> None:
    """CASES 33: "stores what it has not got".

    1. The other connector loads; we are told of blocks whose content is still to come.
    2. The request runs: its chunks are stored, with the right content.
    """
    engine = beside_other(make_engine, first, async_scheduling)
    other_of(engine).has_tokens = 128
    engine.run(PROMPT)
    assert host_manager(engine.side).num_resident == 6
    other_of(engine).has_tokens = 0
    engine.scheduler.reset_prefix_cache()
    request = engine.run(PROMPT)
    assert engine.num_scheduled[request.request_id] == 8


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_nothing_is_kept_that_was_computed_from_a_failed_load_of_another_one(
    make_engine: MakeEngine, async_scheduling: bool, policy: str
) -> None:
    """
    1. The other one loads before the forward pass that goes on from there. It fails,
       but that is known only after the step, of which all chunks are being stored.
    2. vLLM computes the request again, or ends it, with chunks left to store late.
    """
    engine = make_engine(
        kv_transfer={
            **multi(our_part(16), OTHER),
            "kv_load_failure_policy": policy,
        },
        async_scheduling=async_scheduling,
    )
    other = other_of(engine)
    other.has_tokens, other.synchronous, other.fails = 128, True, True
    engine.run(PROMPT)
    assert host_manager(engine.side).num_resident == 0
    other.has_tokens = 0
    engine.scheduler.reset_prefix_cache()
    engine.run(PROMPT)
    assert host_manager(engine.side).num_resident == 6


@pytest.mark.parametrize("sizes", [(3, 64), (64, 3)], ids=["small first", "small last"])
def test_two_of_ours_keep_their_jobs_apart(
    make_engine: MakeEngine, async_scheduling: bool, sizes: tuple[int, int]
) -> None:
    """CASES 33: two of one kind, a small pool and a large one, in both orders.

    1. Both store everything; the small pool soon holds a part only.
    2. The first with a hit loads, the other gives its lease back.
    3. Job ids overlap: each gets the reports of its own.
    """
    engine = make_engine(
        kv_transfer=multi(*map(our_part, sizes)),
        async_scheduling=async_scheduling,
        num_blocks=12,
    )
    prompts = [[base + i for i in range(200)] for base in (1, 211, 1, 211, 1)]
    for prompt in prompts:
        engine.add(prompt, max_tokens=3)
        engine.step(3)
    engine.settle()
    resident = [host_manager(side).num_resident for side in engine.sides]
    assert resident == [min(size, 12) for size in sizes]
    # Pushed out of both the device and the small pool: the large one has it.
    engine.run([500] * 320, ctx={"store": False})
    engine.scheduler.reset_prefix_cache()
    request = engine.run(prompts[1])
    assert engine.num_scheduled[request.request_id] < 200


def test_failed_load_of_one_of_two_is_recomputed(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """CASES 16 and 33: block ids of the failed load, and the other pool unharmed."""
    engine = make_engine(
        kv_transfer=multi(our_part(16), our_part(16)),
        async_scheduling=async_scheduling,
    )
    engine.run(PROMPT)
    engine.scheduler.reset_prefix_cache()
    engine.controls.fails = lambda job, to_host, rank: not to_host
    engine.add(PROMPT, max_tokens=2)
    engine.step(2)
    engine.controls.fails = lambda job, to_host, rank: False
    engine.settle()
    assert engine.tokens["r1"] == engine.answer(PROMPT, 2)
    first, second = (host_manager(side) for side in engine.sides)
    assert first.num_resident == second.num_resident == 6


def test_reset_reaches_both(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_transfer=multi(our_part(16), our_part(16)))
    engine.run(PROMPT)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert [host_manager(side).num_resident for side in engine.sides] == [0, 0]


def test_wait_of_one_ends_by_its_deadline_inside_both(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """CASES 19 and 33: vLLM asks the second only once the first has stopped waiting.

    So the waits of two connectors add up, each bounded by its own `load_wait_ms`.
    """
    engine = make_engine(
        kv_transfer=multi(our_part(16), our_part(16)),
        async_scheduling=async_scheduling,
    )
    engine.seconds_per_step = 0.01
    engine.controls.hold_stores = True
    engine.add(PROMPT)
    engine.step(4)
    engine.flush()
    engine.scheduler.reset_prefix_cache()
    request = engine.add(PROMPT)
    began = engine.now
    engine.step_until(lambda: request.request_id in engine.num_scheduled)
    assert engine.now - began <= 0.13
