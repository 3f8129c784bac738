"""What calls cost, counted in chunks looked at, and a long run at full occupancy."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from helpers import EMPTY_CONTEXT

from vllm_ctx_offload.context import ReqContext
from vllm_ctx_offload.core import HostMemoryManager, StoreGrant
from vllm_ctx_offload.core.policy import ChainLru, Chunk
from vllm_ctx_offload.stats import OffloadStats

MILLION = 1_000_000


class CountingLru(ChainLru):
    """Counts the chunks that anybody walks over."""

    num_walked = 0

    def items(self) -> Iterator[tuple[bytes, Chunk]]:
        for item in super().items():
            self.num_walked += 1
            yield item


def make_manager(num_slots: int) -> tuple[HostMemoryManager, CountingLru, list[bytes]]:
    """Returns a full manager of single-chunk chains, all still being stored."""
    manager = HostMemoryManager(num_slots, OffloadStats())
    lru = manager._chunks = CountingLru()
    keys = [index.to_bytes(4, "big") for index in range(num_slots)]
    manager.prepare_store([*reversed(keys)], EMPTY_CONTEXT)
    return manager, lru, keys


@pytest.mark.parametrize("num_slots", [100, 100_000])
def test_a_store_walks_over_nothing_when_all_chunks_are_pinned(num_slots: int) -> None:
    """CASES 26: counted, so it holds for any size."""
    manager, lru, _ = make_manager(num_slots)
    assert manager.prepare_store([b"x", b"y"], EMPTY_CONTEXT) == StoreGrant((), (), 2)
    assert lru.num_walked == 0


@pytest.mark.parametrize("num_slots", [100, 100_000])
@pytest.mark.parametrize("num_pinned", [0, 10])
def test_eviction_walks_over_its_victims_and_the_pinned_only(
    num_slots: int, num_pinned: int
) -> None:
    """CASES 26, P8: the walk is as long in a pool a thousand times the size."""
    manager, lru, keys = make_manager(num_slots)
    manager.complete_store(keys[num_pinned:], EMPTY_CONTEXT)
    assert manager.prepare_store([b"x", b"y"], EMPTY_CONTEXT).num_rejected == 0
    assert lru.num_walked == num_pinned + 2
    assert keys[num_pinned + 1] not in lru
    assert keys[num_pinned + 2] in lru


def test_calls_that_evict_nothing_walk_over_nothing() -> None:
    """P8."""
    manager, lru, keys = make_manager(1_000)
    manager.complete_store(keys, EMPTY_CONTEXT)
    manager.lookup(keys[:5], EMPTY_CONTEXT)
    manager.touch(keys[:5], EMPTY_CONTEXT)
    manager.prepare_load(keys[:5], EMPTY_CONTEXT)
    manager.complete_load(keys[:5], EMPTY_CONTEXT)
    manager.remove(keys[:5], EMPTY_CONTEXT)
    manager.prepare_store([b"x", b"y"], EMPTY_CONTEXT)
    assert lru.num_walked == 0


class RandomLoad:
    """Random calls that keep a small pool full."""

    def __init__(self, seed: int, num_slots: int) -> None:
        self.random = random.Random(seed)
        self.manager = HostMemoryManager(num_slots, OffloadStats())
        self.contexts = [
            ReqContext(request_id=str(index), tenant=f"tenant{index}")
            for index in range(4)
        ]
        self.chains = [
            [f"{index // 2 ** (6 - depth)}/{depth}".encode() for depth in range(6)]
            for index in range(64)
        ]
        self.stores: list[list[bytes]] = []
        self.loads: list[list[bytes]] = []
        self.num_operations = 0  # one for each chunk of each call

    def step(self) -> None:
        rand, manager = self.random, self.manager
        context = rand.choice(self.contexts)
        keys = rand.choice(self.chains)[: rand.randrange(1, 7)]
        op = rand.randrange(60)
        if op < 25:
            grant = manager.prepare_store(keys, context)
            if grant.indices:
                self.stores.append([keys[index] for index in grant.indices])
        elif op < 45:
            num_ready = manager.lookup(keys, context).num_ready
            self.num_operations += num_ready
            if manager.prepare_load(keys[:num_ready], context):
                self.loads.append(keys[:num_ready])
        elif op < 58:
            manager.touch(keys, context)
        else:
            manager.remove(keys, context)
        self.num_operations += len(keys)
        self._complete_some(context)

    def _complete_some(self, context: ReqContext) -> None:
        rand = self.random
        if len(self.stores) > rand.randrange(5):
            done = self.stores.pop(rand.randrange(len(self.stores)))
            self.manager.complete_store(done, context, success=rand.random() > 0.1)
            self.num_operations += len(done)
        if len(self.loads) > rand.randrange(5):
            done = self.loads.pop(rand.randrange(len(self.loads)))
            self.manager.complete_load(done, context)
            self.num_operations += len(done)


@pytest.mark.slow
def test_a_million_random_operations_at_full_occupancy_stay_sound() -> None:
    """CASES 24."""
    load = RandomLoad(seed=24, num_slots=40)
    num_steps = num_full_steps = 0
    while load.num_operations < MILLION:
        load.step()
        num_steps += 1
        num_full_steps += not load.manager._slots.num_free
        if num_steps % 5_000 == 0:
            load.manager.check_invariants()
    assert num_full_steps > 0.5 * num_steps
    for keys in load.stores:
        load.manager.complete_store(keys, EMPTY_CONTEXT)
    for keys in load.loads:
        load.manager.complete_load(keys, EMPTY_CONTEXT)
    load.manager.check_invariants()
    assert load.manager.num_pinned == 0
