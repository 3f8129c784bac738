"""What holds after every step of the harness."""

from __future__ import annotations

from typing import Any

from real_scheduler.sim_worker import SimTier, in_group
from vllm.v1.request import RequestStatus

from vllm_ctx_offload.adapters.scheduler_side import SchedulerSide
from vllm_ctx_offload.core import HostMemoryManager
from vllm_ctx_offload.scheduler.request_state import Status


def host_manager(side: SchedulerSide) -> HostMemoryManager:
    manager: Any = side.manager
    manager = getattr(manager, "_inner", manager)
    assert isinstance(manager, HostMemoryManager)
    return manager


def check_requests(engine: Any) -> None:
    """Tables and contents of the running requests, right after scheduling."""
    scheduler = engine.scheduler
    for request in scheduler.running:
        request_id = request.request_id
        tables = scheduler.kv_cache_manager.get_block_ids(request_id)
        for side in engine.sides:
            state = side.planner._states[request_id]
            assert state.status is Status.RUNNING, (request_id, state.status)
            for ours, theirs in zip(state.block_ids, tables, strict=True):
                assert len(ours) == len(theirs), request_id
                if request_id not in engine.last_output.num_scheduled_tokens:
                    continue  # ours follow when they are used next
                # Holes of ours may come before vLLM frees the block, never after.
                known = [t if o else 0 for o, t in zip(ours, theirs, strict=True)]
                assert ours == known, request_id


def check_connector(engine: Any, side: SchedulerSide, tiers: list[SimTier]) -> None:
    assert not side._disabled
    side.planner.check_invariants()
    manager = host_manager(side)
    manager.check_invariants()
    _check_pins(engine, side, manager)
    plan = side.planner._plan
    for chunk in manager.chunks():
        if not chunk.ready or chunk.doomed:
            continue
        prefix = engine.chunk_symbols[chunk.key[-32:]]
        group = chunk.key[-33]
        shape, size = plan.groups[group], plan.groups[group].tokens_per_block
        expected = [
            (engine.model.generation, in_group(group, value))
            for value in prefix[-plan.tokens_per_chunk(group) :]
        ]
        # What is looked at from the chunk's end on; the rest was not stored then.
        start = max(shape.first_needed(len(prefix)) // size * size, 0)
        start = max(start - len(prefix) + len(expected), 0)
        if shape.recurrent:
            expected = expected[-1:] * len(expected)
        first = chunk.slot * plan.blocks_per_chunk
        for tier in tiers:
            rows = tier.host[first : first + plan.blocks_per_chunk]
            found = [symbol for row in rows for symbol in row[:size]]
            assert found[start - len(expected) :] == expected[start:], (
                chunk,
                found,
                expected,
            )


def _check_pins(engine: Any, side: SchedulerSide, manager: HostMemoryManager) -> None:
    """Every pin belongs to an open job or to the lease of a live request."""
    holders: dict[bytes, int] = {}
    planner = side.planner
    for job in planner._jobs._jobs.values():
        for key in job.keys:
            holders[key] = holders.get(key, 0) + 1
    for request_id, state in planner._states.items():
        assert request_id in engine.scheduler.requests, "a finished request is known"
        for key in state.lease.keys if state.lease else ():
            holders[key] = holders.get(key, 0) + 1
    pins = {chunk.key: chunk.pins for chunk in manager.chunks() if chunk.pins}
    assert pins == holders


def check_idle(engine: Any) -> None:
    """Nothing is left once all requests and transfers have ended."""
    scheduler = engine.scheduler
    assert not scheduler.requests
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # the null block
    assert all(tier.idle for tiers in engine.tiers for tier in tiers)
    for side in engine.sides:
        planner = side.planner
        assert not planner._states
        assert not planner._jobs
        assert not planner._jobs._readers
        assert not planner._jobs.num_loads
        assert not planner._new_loads
        assert not planner._new_late_stores
        assert not side._broken_loads
        assert not planner.has_work
        assert host_manager(side).num_pinned == 0
        assert not getattr(side.manager, "_counted", {})
        assert all(chunk.ready for chunk in host_manager(side).chunks())


def is_parked(request: Any) -> bool:
    return bool(request.status == RequestStatus.WAITING_FOR_REMOTE_KVS)
