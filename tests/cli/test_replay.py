"""Replays of traces that are small enough to follow by hand."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ctx_offload.cli.replay import (
    Pool,
    PreparedRequest,
    Rates,
    next_uses,
    offline_bound,
    prepare,
    rates_by_tenant,
    replay,
    replay_vllm,
)
from vllm_ctx_offload.cli.traces import Trace, TraceRequest
from vllm_ctx_offload.config import parse_config

TOKENS = 10


def trace_of(*requests: tuple[Sequence[int], dict[str, Any]]) -> Trace:
    """Returns a trace of one request a second, each with half a chunk at its end."""
    return Trace(
        [
            TraceRequest(float(second), TOKENS * len(ids) + 5, list(ids), ctx)
            for second, (ids, ctx) in enumerate(requests)
        ],
        TOKENS,
    )


def hits_of(
    trace: Trace, num_chunks: int, *, plain_lru: bool = False, **extra_config: Any
) -> list[int]:
    config = parse_config(extra_config)
    pool = Pool(num_chunks, TOKENS)
    return replay(prepare(trace, config), config, pool, plain_lru=plain_lru)


def test_only_the_leading_run_is_a_hit() -> None:
    # The third request pushes the tail out; what is behind the gap does not count.
    trace = trace_of(([1, 2, 3], {}), ([1, 2, 3], {}), ([8], {}), ([1, 2, 3], {}))
    assert hits_of(trace, 3) == [0, 3, 0, 2]


def test_private_tenants_do_not_hit_each_others_chunks() -> None:
    a, b = {"tenant": "a"}, {"tenant": "b"}
    trace = trace_of(([1, 2], a), ([1, 2], b), ([1, 2], a), ([1, 2], {}), ([1, 2], b))
    private = {"a": {}, "b": {}}
    shared = {name: {"isolation": "shared"} for name in private}
    assert hits_of(trace, 10, tenants=private) == [0, 0, 2, 0, 2]
    assert hits_of(trace, 10, tenants=shared) == [0, 2, 2, 2, 2]


def test_a_reservation_keeps_what_lru_loses() -> None:
    quiet, noisy = {"tenant": "quiet"}, {"tenant": "noisy"}
    trace = trace_of(
        ([1, 2], quiet), ([11, 12, 13, 14], noisy), ([1, 2, 3], quiet), ([11], noisy)
    )
    tenants = {"quiet": {"reserved": "50%"}, "noisy": {}}
    assert hits_of(trace, 4, tenants=tenants) == [0, 0, 2, 1]
    assert hits_of(trace, 4, tenants=tenants, plain_lru=True) == [0, 0, 0, 1]
    assert hits_of(trace, 4, tenants=tenants, eviction_policy="lru") == [0, 0, 0, 1]


def test_a_released_session_goes_first() -> None:
    over, later = {"session": "a", "release": True}, {"session": "b"}
    trace = trace_of(([1, 2], later), ([5, 6], over), ([7, 8], {}), ([1, 2], later))
    assert hits_of(trace, 4) == [0, 0, 0, 2]
    assert hits_of(trace, 4, plain_lru=True) == [0, 0, 0, 0]


def test_the_managers_clock_is_the_traces_time() -> None:
    hint = {"priority": 80, "ttl_s": 2.5}
    others = [([number], {}) for number in range(10, 14)]
    kept = trace_of(([1], hint), *others[:2], ([1], {}))
    expired = trace_of(([1], hint), *others, ([1], {}))
    share = {"max_protected": "100%"}
    assert hits_of(kept, 2, **share)[-1] == 1
    assert hits_of(expired, 2, **share)[-1] == 0


def test_store_and_load_are_minded() -> None:
    trace = trace_of(
        ([1], {"store": False}), ([1], {}), ([1], {"load": False}), ([1], {})
    )
    assert hits_of(trace, 4) == [0, 0, 0, 1]


def test_the_reuse_filter_stores_at_the_second_offer() -> None:
    trace = trace_of(([1], {}), ([1], {}), ([1], {}))
    assert hits_of(trace, 4, store_threshold=2) == [0, 0, 1]
    assert hits_of(trace, 4, store_threshold=2, plain_lru=True) == [0, 1, 1]


@pytest.mark.parametrize("num_noisy", [0, 40])
def test_behind_the_reuse_filter_a_reservation_holds(num_noisy: int) -> None:
    """Prompts of 50 chunks that come once, beside a tenant with a fifth of the pool."""
    ids = itertools.count(1_000)
    requests: list[tuple[Sequence[int], dict[str, Any]]] = []
    for _turn in range(10):
        for prompt in range(4):
            quiet = [100 * prompt + depth for depth in range(5)]
            requests.append((quiet, {"tenant": "quiet"}))
            for _ in range(num_noisy):
                one_shot = list(itertools.islice(ids, 50))
                requests.append((one_shot, {"tenant": "noisy"}))
    hits = hits_of(
        trace_of(*requests),
        100,
        tenants={"quiet": {"reserved": "20%"}, "noisy": {}},
        store_threshold=2,
        max_tracker_size=400,
    )
    assert hits[:: num_noisy + 1] == [0] * 8 + [5] * 32


def test_the_name_counts_wherever_the_configuration_takes_it_from() -> None:
    trace = trace_of(([1], {"tenant": "a"}), ([1], {"tenant": "b"}))
    tenants = {"a": {}, "b": {}}
    for source in ("kv_transfer_params", "cache_salt", "lora"):
        config = parse_config({"tenants": tenants, "tenant_from": [source]})
        names = [request.req_context.tenant for request in prepare(trace, config)]
        assert names == ["a", "b"]


def test_rates_are_those_of_each_tenant() -> None:
    a, b = {"tenant": "a"}, {"tenant": "b"}
    config = parse_config({"tenants": {"a": {}, "b": {}}})
    requests = prepare(trace_of(([1, 2], b), ([1], a), ([1, 2, 3], b)), config)
    total, tenants = rates_by_tenant(requests, [0, 1, 2], TOKENS)
    assert list(tenants) == ["a", "b"]
    assert tenants["a"] == Rates(1, 1, 15, 1, 10)
    assert tenants["b"] == Rates(2, 5, 60, 2, 20)
    assert tenants["b"].block_percent == pytest.approx(40)
    assert tenants["b"].token_percent == pytest.approx(100 / 3)
    assert total == Rates(3, 6, 75, 3, 30)
    assert Rates().block_percent == Rates().token_percent == 0


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_vllms_managers_replay_the_same_chains(policy: str) -> None:
    trace = trace_of(([1, 2, 3], {}), ([1, 2, 3], {}), ([8], {}), ([1, 2, 3], {}))
    requests = prepare(trace, parse_config({}))
    hits = replay_vllm(requests, policy, 3)
    # Some releases evict a chain's head first.
    assert hits in ([0, 3, 0, 2], [0, 3, 0, 0])
    # A chain that does not fit as a whole is not stored at all.
    assert replay_vllm(requests, policy, 2) == [0, 0, 0, 0]


# ---- the offline bound


def prepared(chains: Sequence[Sequence[int]]) -> list[PreparedRequest]:
    return prepare(trace_of(*((ids, {}) for ids in chains)), parse_config({}))


def bound_of(chains: Sequence[Sequence[int]], num_chunks: int) -> list[int]:
    return offline_bound(next_uses(prepared(chains)), num_chunks)


def test_the_bound_keeps_what_comes_back_first_and_the_heads_of_the_rest() -> None:
    chains = [[1, 2, 3], [7, 8], [9], [7, 8], [1, 2, 3]]
    assert bound_of(chains, 5) == [0, 0, 0, 2, 3]
    assert bound_of(chains, 3) == [0, 0, 0, 2, 1]
    assert bound_of(chains, 1) == [0, 0, 0, 1, 0]


def test_the_bound_is_by_namespace() -> None:
    a, b = {"tenant": "a"}, {"tenant": "b"}
    config = parse_config({"tenants": {"a": {}, "b": {}}})
    requests = prepare(trace_of(([1], a), ([1], b), ([1], a), ([1], b)), config)
    assert offline_bound(next_uses(requests), 1) == [0, 0, 1, 0]


# A tree of prefixes: node n's parent is (n - 1) // 2, so ids stand for prefixes.
NODES = st.integers(0, 12)


def chain_to(node: int) -> list[int]:
    return [node] if node == 0 else [*chain_to((node - 1) // 2), node]


def best_by_trying_all(chains: Sequence[Sequence[int]], num_chunks: int) -> int:
    """Returns the most hits that any choice of what to keep could have had."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for chain in chains:
        after: dict[frozenset[int], int] = {}
        for resident, hits in best.items():
            leading = 0
            while leading < len(chain) and chain[leading] in resident:
                leading += 1
            could = resident | set(chain)
            size = min(num_chunks, len(could))
            for kept in map(frozenset, combinations(sorted(could), size)):
                after[kept] = max(after.get(kept, 0), hits + leading)
        best = after
    return max(best.values())


@given(st.lists(NODES.map(chain_to), min_size=1, max_size=6), st.integers(1, 4))
def test_no_choice_beats_the_bound_and_one_reaches_it(
    chains: list[list[int]], num_chunks: int
) -> None:
    assert sum(bound_of(chains, num_chunks)) == best_by_trying_all(chains, num_chunks)


@given(st.lists(NODES.map(chain_to), min_size=1, max_size=12), st.integers(1, 6))
def test_lru_never_beats_the_bound(chains: list[list[int]], num_chunks: int) -> None:
    config = parse_config({})
    hits = replay(prepared(chains), config, Pool(num_chunks, TOKENS))
    assert sum(hits) <= sum(bound_of(chains, num_chunks))
