"""The memory plan: chunk sizes and slots for one model."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ctx_offload import __version__, memory
from vllm_ctx_offload.config import parse_config
from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.plan import (
    GroupShape,
    ModelShape,
    OffloadPlan,
    check_workers,
    resolve_plan,
)

WHERE = "kv_connector_extra_config"
SHAPE = ModelShape(
    groups=(GroupShape(16),),
    tokens_per_hash=16,
    bytes_per_block=1_000,
    num_device_blocks=500,
    num_workers=2,
)


def plan_for(shape: ModelShape = SHAPE, **extra_config: Any) -> OffloadPlan:
    return resolve_plan(parse_config(extra_config), shape)


def test_a_plan_divides_the_pool_into_chunks_over_all_workers() -> None:
    plan = plan_for(cpu_bytes_to_use=99_999, blocks_per_chunk=4)
    assert plan == OffloadPlan(
        groups=(GroupShape(16),),
        blocks_per_chunk=4,
        tokens_per_hash=16,
        bytes_per_block=1_000,
        num_workers=2,
        num_slots=12,
    )
    assert (plan.tokens_per_chunk(0), plan.bytes_per_chunk) == (64, 8_000)
    assert (plan.num_rows, plan.bytes_per_worker, plan.total_bytes) == (
        48,
        48_000,
        96_000,
    )


@pytest.mark.parametrize(
    ("extra_config", "blocks_per_chunk"),
    [
        ({}, 1),
        ({"blocks_per_chunk": 3}, 3),
        ({"block_size": 16}, 1),
        ({"block_size": 64}, 4),
    ],
)
def test_a_chunk_is_one_block_or_as_many_as_configured(
    extra_config: dict[str, int], blocks_per_chunk: int
) -> None:
    plan = plan_for(cpu_bytes_to_use=10**6, **extra_config)
    assert plan.blocks_per_chunk == blocks_per_chunk


def test_chunks_of_all_groups_end_where_the_largest_do() -> None:
    shape = dataclasses.replace(
        SHAPE, groups=(GroupShape(16), GroupShape(64, window=100), GroupShape(32))
    )
    plan = plan_for(shape, cpu_bytes_to_use=140_000, block_size=128)
    assert (plan.blocks_per_chunk, plan.tokens_per_span) == (2, 128)
    assert [plan.tokens_per_chunk(group) for group in range(3)] == [32, 128, 64]
    assert plan.chunks_per_span == (4, 1, 2)
    assert plan.num_slots == 35
    assert plan.worth_in_tokens(35) == 5 * 128
    assert plan.describe(pin=False).startswith(
        "chunks of 32 or 64 or 128 tokens in 3 groups (3.91 KiB), 35 slots for 640 t"
    )
    with pytest.raises(
        ConfigError, match=r"no multiple .* block of 64 tokens; use 128"
    ):
        plan_for(shape, cpu_bytes_to_use=10**6, block_size=96)


@pytest.mark.parametrize(("block_size", "nearest"), [(24, 32), (8, 16), (63, 64)])
def test_a_chunk_that_is_no_multiple_of_a_block_is_told(
    block_size: int, nearest: int
) -> None:
    with pytest.raises(ConfigError) as raised:
        plan_for(cpu_bytes_to_use=10**6, block_size=block_size)
    assert str(raised.value) == (
        f"{WHERE}: block_size = {block_size} tokens is no multiple of the device's "
        f"block of 16 tokens; use {nearest}, or blocks_per_chunk."
    )


@pytest.mark.parametrize("key", ["block_size", "blocks_per_chunk"])
def test_a_chunk_longer_than_any_request_is_told(key: str) -> None:
    """It would never be whole, and nothing ever stored."""
    shape = dataclasses.replace(SHAPE, max_request_tokens=100)
    plan_for(shape, cpu_bytes_to_use=10**6, blocks_per_chunk=6)
    value = {"block_size": 112, "blocks_per_chunk": 7}[key]
    with pytest.raises(ConfigError) as raised:
        plan_for(shape, cpu_bytes_to_use=10**6, **{key: value})
    assert str(raised.value) == (
        f"{WHERE}: {key} = {value} makes chunks of 112 tokens, but no request is "
        "longer than 100 (--max-model-len), so none would ever be stored; lower it."
    )


def test_a_block_longer_than_any_request_is_the_devices_own_business() -> None:
    plan_for(dataclasses.replace(SHAPE, max_request_tokens=8), cpu_bytes_to_use=10**6)


@pytest.mark.parametrize("pool_bytes", [0, 3_999])
def test_a_pool_that_holds_no_chunk_is_told(pool_bytes: int) -> None:
    assert plan_for(cpu_bytes_to_use=4_000, blocks_per_chunk=2).num_slots == 1
    with pytest.raises(ConfigError) as raised:
        plan_for(cpu_bytes_to_use=pool_bytes, blocks_per_chunk=2)
    assert str(raised.value) == (
        f"{WHERE}: cpu_bytes_to_use = {memory.format_bytes(pool_bytes)} holds no "
        "chunk, because one of 2 block(s) takes 3.91 KiB over 2 worker(s); give at "
        "least 4000 bytes, and many times that to be of use."
    )


def test_accounts_are_checked_against_the_pool_and_the_chunk() -> None:
    """A reservation of all that was given fits, also where a rest holds no chunk."""
    plan_for(cpu_bytes_to_use=5_999, tenants={"acme": {"reserved": 5_999}})
    with pytest.raises(ConfigError, match=r"1 B more than the pool's 5\.86 KiB"):
        plan_for(cpu_bytes_to_use=5_999, tenants={"acme": {"reserved": 6_000}})
    plan_for(cpu_bytes_to_use=5_999, tenants={"acme": {"limit": 2_000}})
    with pytest.raises(ConfigError, match=r"limit = 1\.95 KiB, 1 B below one chunk"):
        plan_for(cpu_bytes_to_use=5_999, tenants={"acme": {"limit": 1_999}})


def test_accounts_are_checked_against_the_default_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(memory.DEFAULT_ENV, "40000")
    shape = dataclasses.replace(SHAPE, num_engines=2)
    plan_for(shape, tenants={"acme": {"reserved": 20_000}})
    with pytest.raises(ConfigError, match=r"1 B more than the pool's 19\.53"):
        plan_for(shape, tenants={"acme": {"reserved": 20_001}})


def test_a_pool_without_a_size_takes_the_published_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(memory.DEFAULT_ENV, "20000")
    assert plan_for().num_slots == 10


def test_engines_on_one_host_share_the_default_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(memory.DEFAULT_ENV, "400000")
    shape = dataclasses.replace(SHAPE, num_engines=4)
    assert plan_for(shape).total_bytes == 100_000
    assert plan_for(shape, cpu_bytes_to_use=400_000).total_bytes == 400_000


def test_workers_that_came_to_the_same_plan_are_taken() -> None:
    plan = plan_for(cpu_bytes_to_use=8_000)
    terms = pickle.loads(pickle.dumps(plan.terms))
    check_workers(plan, {0: terms, 1: plan_for(cpu_bytes_to_use=8_001).terms})
    check_workers(plan, {})


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("num_slots", 3, "num_slots is 3 on the worker and 4 on"),
        ("bytes_per_block", 999, "bytes_per_block is 999 on the worker and 1000 on"),
        ("blocks_per_chunk", 2, "blocks_per_chunk is 2 on the worker and 1 on"),
        ("num_workers", 1, "num_workers is 1 on the worker and 2 on"),
        ("groups", "all 32", "groups is all 32 on the worker and all 16 on"),
        ("release", "0.0.1", f"release is 0.0.1 on the worker and {__version__} on"),
        ("new", 1, "new is 1 on the worker and None on"),
    ],
)
def test_a_worker_with_another_plan_stops_the_start_with_both_values(
    name: str, changed: int | str, said: str
) -> None:
    plan = plan_for(cpu_bytes_to_use=8_000)
    terms = {**plan.terms, name: changed}
    with pytest.raises(ConfigError) as raised:
        check_workers(plan, {1: terms, 0: plan.terms})
    assert str(raised.value) == (
        f"CtxOffloadConnector: worker 1 has another plan ({said} the scheduler side); "
        "set cpu_bytes_to_use, whose default is a share of each host's memory, and "
        "give all hosts the same configuration and the same release of "
        "vllm-ctx-offload."
    )


def test_terms_tell_what_kind_of_blocks_each_group_has() -> None:
    """Not how far layers look: the scheduler's own copy may tell less of that."""
    groups = (
        GroupShape(16),
        GroupShape(16, window=100),
        GroupShape(32, stretch=64),
        GroupShape(64, recurrent=True),
    )
    shape = dataclasses.replace(SHAPE, groups=groups)
    assert plan_for(shape, cpu_bytes_to_use=10**6).terms["groups"] == (
        "all 16, windowed 16, windowed 32, recurrent 64"
    )


@pytest.mark.parametrize(("pin", "ending"), [(True, "pinned"), (False, "not pinned")])
def test_the_plan_is_told_in_one_line(pin: bool, ending: str) -> None:
    plan = plan_for(cpu_bytes_to_use=96_000, blocks_per_chunk=4)
    assert plan.describe(pin) == (
        "chunks of 64 tokens (7.81 KiB), 12 slots for 768 tokens, 46.88 KiB of host "
        f"memory on each of 2 worker(s), 93.75 KiB in all, {ending}"
    )


@settings(deadline=None)
@given(
    pool_bytes=st.integers(1, 10**9),
    blocks_per_chunk=st.integers(1, 32),
    bytes_per_block=st.integers(1, 10**6),
    num_workers=st.integers(1, 8),
)
def test_a_plan_never_takes_more_than_was_given_nor_wastes_a_chunk(
    pool_bytes: int, blocks_per_chunk: int, bytes_per_block: int, num_workers: int
) -> None:
    """CASES 35, as far as the plan goes."""
    shape = ModelShape((GroupShape(16),), 16, bytes_per_block, 500, num_workers)
    try:
        plan = plan_for(
            shape, cpu_bytes_to_use=pool_bytes, blocks_per_chunk=blocks_per_chunk
        )
    except ConfigError:
        assert pool_bytes < bytes_per_block * blocks_per_chunk * num_workers
    else:
        assert 0 <= pool_bytes - plan.total_bytes < plan.bytes_per_chunk
        assert plan.total_bytes == plan.num_slots * plan.bytes_per_chunk
