"""KV events: what enters and leaves host memory, as vLLM publishes it."""

from __future__ import annotations

import random

import pytest
from helpers import make_req_context
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from vllm_ctx_offload.adapters import vllm_api
from vllm_ctx_offload.adapters.kv_events import ChunkEvent, ChunkEvents
from vllm_ctx_offload.core import AccountTerms, HostMemoryManager, PolicyConfig
from vllm_ctx_offload.scheduler.request_state import make_key_prefix, split_key
from vllm_ctx_offload.stats import OffloadStats

HASHES = [bytes([index]) * 32 for index in range(24)]


@pytest.mark.parametrize("namespace", [b"", b"acme", b"\0\1", b"x" * 512])
@pytest.mark.parametrize("group", [0, 7])
def test_a_key_says_its_group_and_hash(namespace: bytes, group: int) -> None:
    key = make_key_prefix(namespace, group) + HASHES[3]
    assert split_key(key) == (group, HASHES[3])


def test_neighbours_alike_are_one_event_and_the_order_stays() -> None:
    events = ChunkEvents()
    keys = [make_key_prefix(b"", group) + HASHES[group] for group in (0, 0, 1)]
    events(keys, True)
    events(keys[:1], False)
    assert events.take() == [
        ChunkEvent(True, 0, (HASHES[0], HASHES[0])),
        ChunkEvent(True, 1, (HASHES[1],)),
        ChunkEvent(False, 0, (HASHES[0],)),
    ]
    assert events.take() == []


def test_stored_and_removed_balance_whatever_happens() -> None:
    """Stores that fail or are removed under way, evictions, removals and resets."""
    events = ChunkEvents()
    policy = PolicyConfig({"default": AccountTerms()}, max_protected=0)
    manager = HostMemoryManager(9, OffloadStats(), policy, lambda: 0.0, events)
    prefix, context = make_key_prefix(b"", 0), make_req_context()
    rand, findable, open_stores = random.Random(1), set[bytes](), list[list[bytes]]()
    for _ in range(3_000):
        start = rand.randrange(20)
        keys = [prefix + value for value in HASHES[start : start + 4]]
        grant = manager.prepare_store(keys, context)
        open_stores.append([keys[index] for index in grant.indices])
        if rand.random() < 0.1:
            manager.remove(keys[:2], context)
        if rand.random() < 0.01:
            manager.reset()
        while len(open_stores) > 2:
            done = open_stores.pop(0)
            manager.complete_store(done, context, success=rand.random() > 0.1)
        for event in events.take():
            for block_hash in event.hashes:
                assert (block_hash in findable) != event.stored
            (findable.update if event.stored else findable.difference_update)(
                event.hashes
            )
        ready = {c.key[-32:] for c in manager.chunks() if c.ready and not c.doomed}
        assert findable == ready


def test_vllm_gets_its_own_events_with_the_medium() -> None:
    stored = vllm_api.kv_event(ChunkEvent(True, 1, (HASHES[0],)), 64)
    removed = vllm_api.kv_event(ChunkEvent(False, 1, (HASHES[0],)), 64)
    assert isinstance(stored, BlockStored)
    assert isinstance(removed, BlockRemoved)
    assert stored.block_size == 64
    for event in (stored, removed):
        assert event.block_hashes == [maybe_convert_block_hash(BlockHash(HASHES[0]))]
        assert (event.medium, event.group_idx) == ("CPU", 1)
