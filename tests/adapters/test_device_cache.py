"""`reset_with_device_cache`: no reset of vLLM's own cache is missed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

from vllm_ctx_offload.adapters.device_cache import check_hook, watch_resets
from vllm_ctx_offload.adapters.scheduler_side import SchedulerSide
from vllm_ctx_offload.errors import ConfigError

REFUSAL = "this vLLM does not let a connector see that the device's prefix cache was"


def make_pool(enable_caching: bool = True) -> BlockPool:
    return BlockPool(8, enable_caching, 4)


def fill(pool: BlockPool, request: Request) -> list[Any]:
    """Computes a request's full blocks, as the table of cached blocks sees it."""
    num_full = request.num_prompt_tokens // 4
    blocks = pool.get_new_blocks(num_full)
    pool.cache_full_blocks(request, blocks, 0, num_full, 4, 0)
    return blocks


@pytest.mark.parametrize("enable_caching", [True, False])
def test_a_reset_is_seen_once(enable_caching: bool) -> None:
    pool = make_pool(enable_caching)
    watch = watch_resets(pool)
    assert not watch.saw_reset()
    for _ in range(3):
        assert pool.reset_prefix_cache()
        assert watch.saw_reset()
        assert not watch.saw_reset()


def test_a_cache_that_filled_again_does_not_hide_its_reset(
    make_request: Callable[..., Request],
) -> None:
    """1. Filled; 2. reset; 3. filled with the same; 4. only then somebody looks."""
    pool, request = make_pool(), make_request(20)
    watch = watch_resets(pool)
    pool.free_blocks(fill(pool, request))
    assert not watch.saw_reset()
    assert pool.reset_prefix_cache()
    pool.free_blocks(fill(pool, request))
    assert watch.saw_reset()


def test_a_reset_that_vllm_refuses_is_none(
    make_request: Callable[..., Request],
) -> None:
    pool = make_pool()
    watch = watch_resets(pool)
    blocks = fill(pool, make_request(20))
    assert not pool.reset_prefix_cache()
    assert not watch.saw_reset()
    pool.free_blocks(blocks)


def test_no_work_of_a_cache_looks_like_a_reset(
    make_request: Callable[..., Request],
) -> None:
    """Blocks are filled, hit, evicted one by one and all at once."""
    pool, rng = make_pool(), random.Random(1)
    watch = watch_resets(pool)
    held: list[list[Any]] = []
    for step in range(500):
        if held and rng.random() < 0.5:
            pool.free_blocks(held.pop(rng.randrange(len(held))))
        elif pool.get_num_free_blocks() >= 3:
            held.append(fill(pool, make_request(rng.randrange(4, 13), f"r{step}")))
        if rng.random() < 0.2:
            pool.evict_blocks(set(range(1, 8)))
        assert not watch.saw_reset()


def test_two_connectors_on_one_pool_see_each_reset() -> None:
    """Whoever looks first puts its own mark back, not the other's."""
    pool = make_pool()
    one = watch_resets(pool)
    other = watch_resets(pool)
    one.saw_reset()
    assert pool.reset_prefix_cache()
    assert (one.saw_reset(), other.saw_reset()) == (True, True)
    assert (one.saw_reset(), other.saw_reset()) == (False, False)


def test_the_mark_is_no_block_that_could_be_hit(
    make_request: Callable[..., Request],
) -> None:
    pool, request = make_pool(), make_request(20)
    num_free = pool.get_num_free_blocks()
    watch_resets(pool)
    assert pool.get_num_free_blocks() == num_free
    for block_hash in request.block_hashes:
        assert pool.get_cached_block(block_hash, [0]) is None


class OtherPool:
    """The pool of a release that nobody has seen yet."""

    def __init__(self) -> None:
        self.null_block = object()


class ForgetfulPool(OtherPool):
    """It resets, but not by what is watched."""

    def __init__(self) -> None:
        super().__init__()
        self.cached_block_hash_to_block = self
        self._table: dict[Any, Any] = {}

    def insert(self, key: Any, block: Any) -> None:
        self._table[key] = block

    def get_one_block(self, key: Any) -> Any:
        return self._table.get(key)

    def reset_prefix_cache(self) -> bool:
        return True


class BusyPool(ForgetfulPool):
    def reset_prefix_cache(self) -> bool:
        self._table.clear()
        return False


class LossyPool(ForgetfulPool):
    """Every look would find a reset."""

    def insert(self, key: Any, block: Any) -> None:
        """Keeps nothing that is no block of its own."""


@pytest.mark.parametrize("pool", [OtherPool, ForgetfulPool, BusyPool, LossyPool])
def test_a_pool_whose_resets_would_not_be_seen_stops_the_start(pool: Any) -> None:
    with pytest.raises(ConfigError, match=REFUSAL):
        watch_resets(pool())


def test_a_release_that_hands_no_pool_over_stops_the_start() -> None:
    check_hook(KVConnectorBase_V1)
    with pytest.raises(ConfigError, match=REFUSAL):
        check_hook(object)


def test_without_a_pool_to_watch_nothing_is_served(
    make_side: Callable[..., SchedulerSide], caplog: pytest.LogCaptureFixture
) -> None:
    """An outer connector that keeps the pool to itself: better no cache than an old."""
    side = make_side(reset_with_device_cache=True)
    assert side.lookup(None, 0) == (0, False)
    assert side._disabled
    assert "internal error in get_num_new_matched_tokens" in caplog.text
