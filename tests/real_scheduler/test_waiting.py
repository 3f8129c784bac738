"""Waiting for chunks that another request is still storing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from real_scheduler.harness import Engine

MakeEngine = Callable[..., Engine]
PROMPT = list(range(1, 201))  # six blocks and 8 tokens


def storing(engine: Engine) -> None:
    """Leaves the prompt's chunks being stored and nothing on the device."""
    engine.controls.hold_stores = True
    request = engine.add(PROMPT)
    engine.step_until(lambda: request.request_id in engine.finished)
    engine.flush()
    assert engine.scheduler.reset_prefix_cache()


def test_wait_for_a_store_that_never_ends_has_an_end(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """CASES 19.

    1. A chunk is being stored, and never gets ready.
    2. A request that wants it waits for `load_wait_ms` and is recomputed.
    """
    engine = make_engine(async_scheduling=async_scheduling, extra={"load_wait_ms": 200})
    engine.seconds_per_step = 0.01
    storing(engine)
    began = engine.now
    request = engine.add(PROMPT)
    engine.step_until(lambda: request.request_id in engine.num_scheduled)
    assert 0.2 <= engine.now - began <= 0.23
    assert engine.num_scheduled[request.request_id] == 200


def test_wait_that_ends_in_time_becomes_a_load(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    engine = make_engine(async_scheduling=async_scheduling)
    storing(engine)
    request = engine.add(PROMPT)
    engine.step(5)
    assert request.request_id not in engine.num_scheduled
    engine.controls.hold_stores = False
    engine.settle()
    assert engine.num_scheduled[request.request_id] == 8


def test_no_wait_when_it_is_set_to_zero(make_engine: MakeEngine) -> None:
    engine = make_engine(extra={"load_wait_ms": 0})
    storing(engine)
    request = engine.add(PROMPT)
    engine.step()
    assert engine.num_scheduled[request.request_id] == 200


def test_fifty_requests_with_one_prefix_wait_together(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """CASES 20: no convoy; all waits together take one `load_wait_ms`.

    1. Fifty requests want chunks whose store never ends.
    2. Their waits run side by side: the last one starts when the first one does.
    3. Those that come after pay their own wait at most, never a queue of waits.
    """
    engine = make_engine(
        async_scheduling=async_scheduling,
        num_blocks=512,
        max_num_batched_tokens=16384,
        extra={"load_wait_ms": 50},
    )
    engine.seconds_per_step = 0.005
    storing(engine)
    began = engine.now
    requests = [engine.add([*PROMPT, index]) for index in range(50)]
    engine.step_until(
        lambda: all(r.request_id in engine.num_scheduled for r in requests)
    )
    assert engine.now - began <= 0.07


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["device too", "host"])
def test_fifty_requests_with_a_new_prefix_start_as_without_a_connector(
    make_engine: MakeEngine, async_scheduling: bool, prefix_caching: bool
) -> None:
    """CASES 20: nobody has the prefix yet, and its stores take for ever.

    1. The first request computes it; those of the same step hit on the device.
    2. Without a device cache each computes it, after one `load_wait_ms` at most, and
       as many a step as there is room for.
    """
    engine = make_engine(
        async_scheduling=async_scheduling,
        num_blocks=512,
        max_num_batched_tokens=2048,
        prefix_caching=prefix_caching,
        extra={"load_wait_ms": 50},
    )
    engine.seconds_per_step = 0.005
    engine.controls.hold_stores = True
    requests = [engine.add([*PROMPT, index]) for index in range(50)]
    engine.step_until(
        lambda: all(r.request_id in engine.num_scheduled for r in requests)
    )
    num_computed = 50 * 201 if not prefix_caching else 201 + 49 * 9
    num_steps = -(-num_computed // 2048)
    assert sum(engine.num_scheduled.values()) == num_computed
    assert engine.now <= 0.05 + (num_steps + 1) * engine.seconds_per_step


def test_fifty_requests_with_one_prefix_load_it_at_once(
    make_engine: MakeEngine, async_scheduling: bool
) -> None:
    """CASES 20: chunks may be read by any number of loads at a time."""
    engine = make_engine(
        async_scheduling=async_scheduling,
        num_blocks=512,
        max_num_batched_tokens=16384,
    )
    engine.run(PROMPT)
    engine.scheduler.reset_prefix_cache()
    requests = [engine.add([*PROMPT, index]) for index in range(50)]
    engine.step()
    loads = engine.last_output.kv_connector_metadata.plan.loads
    assert len(loads) == 50
    engine.settle()
    assert all(engine.num_scheduled[r.request_id] == 9 for r in requests)


def test_wait_starts_anew_after_an_admission(make_engine: MakeEngine) -> None:
    """A deadline that has passed once is not the end of all waiting."""
    engine = make_engine(num_blocks=24)
    engine.seconds_per_step = 0.02
    storing(engine)
    request = engine.add(PROMPT, max_tokens=30)
    engine.step_until(lambda: request.request_id in engine.num_scheduled)
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.step()
    assert request.num_computed_tokens == 0
    engine.step(5)
    assert request.num_computed_tokens >= 200
