"""Replays a trace: through our manager, through vLLM's, and as the offline bound.

Every request looks up its chain, loads what it hits, stores the rest and ends, all at
the trace's time of its arrival. A replay returns how many leading chunks each request
hit.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from vllm_ctx_offload.adapters.vllm_managers import VllmManager
from vllm_ctx_offload.cli.traces import Trace
from vllm_ctx_offload.config import OffloadConfig
from vllm_ctx_offload.context import ReqContext, build_req_context
from vllm_ctx_offload.core import (
    HostMemoryManager,
    OffloadingManager,
    filtered,
    policy_of,
)
from vllm_ctx_offload.scheduler.request_state import make_key_prefix
from vllm_ctx_offload.stats import OffloadStats

__all__ = [
    "Pool",
    "PreparedRequest",
    "Rates",
    "next_uses",
    "offline_bound",
    "prepare",
    "rates_by_tenant",
    "replay",
    "replay_vllm",
]


class PreparedRequest(NamedTuple):
    """A request as the manager sees it."""

    arrived_at: float
    num_tokens: int
    keys: list[bytes]  # of its full chunks
    req_context: ReqContext


class Pool(NamedTuple):
    """The size of a pool."""

    num_chunks: int
    tokens_per_chunk: int
    # Only sizes in bytes need it. Shares are as well resolved at one byte a chunk.
    bytes_per_chunk: int = 1


class _Keys(dict[int, bytes]):
    """Chunk id to key, in one namespace."""

    def __init__(self, namespace: bytes) -> None:
        super().__init__()
        self._prefix = make_key_prefix(namespace, 0)

    def __missing__(self, chunk_id: int) -> bytes:
        key = self[chunk_id] = self._prefix + chunk_id.to_bytes(8, "big")
        return key


def prepare(trace: Trace, config: OffloadConfig) -> list[PreparedRequest]:
    """Returns the requests with their tenants, hints and keys under `config`."""
    keys_of: dict[bytes, _Keys] = {}
    prepared = []
    for number, request in enumerate(trace.requests):
        tenant = request.ctx.get("tenant")
        req_context = build_req_context(
            config,
            str(number),
            {"ctx": request.ctx} if request.ctx else None,
            # A trace has one name, wherever the configuration takes it from.
            cache_salt=tenant,
            lora_name=tenant,
            num_prompt_tokens=request.num_tokens,
        )
        namespace = req_context.namespace
        keys = keys_of.get(namespace)
        if keys is None:
            keys = keys_of[namespace] = _Keys(namespace)
        chain = [keys[chunk_id] for chunk_id in request.chunk_ids]
        prepared.append(
            PreparedRequest(request.arrived_at, request.num_tokens, chain, req_context)
        )
    return prepared


def replay(
    requests: Iterable[PreparedRequest],
    config: OffloadConfig,
    pool: Pool,
    *,
    plain_lru: bool = False,
) -> list[int]:
    """Replays through `HostMemoryManager` as `config` sets it up.

    Args:
        requests: in the order of arrival.
        config: the configuration.
        pool: size of the pool.
        plain_lru: as with `eviction_policy` "lru" and without a reuse filter.
    """
    now = 0.0
    manager = _make_manager(config, pool, plain_lru, clock=lambda: now)
    hits = []
    for request in requests:
        now = request.arrived_at
        hits.append(_serve(manager, request))
    return hits


def _make_manager(
    config: OffloadConfig, pool: Pool, plain_lru: bool, clock: Callable[[], float]
) -> OffloadingManager:
    policy = policy_of(
        config,
        pool.num_chunks,
        pool.bytes_per_chunk,
        columns=((0, pool.tokens_per_chunk),),
    )
    if plain_lru:
        policy = policy._replace(plain_lru=True)
    manager = HostMemoryManager(pool.num_chunks, OffloadStats(), policy, clock)
    return manager if plain_lru else filtered(manager, config, policy, pool.num_chunks)


def _serve(manager: OffloadingManager, request: PreparedRequest) -> int:
    """Does what the scheduler side does for one request that runs all at once."""
    keys, req_context = request.keys, request.req_context
    hints = req_context.hints
    num_hits = 0
    manager.on_new_request(req_context)
    if hints.load:
        num_hits = manager.lookup(keys, req_context).num_ready
        manager.touch(keys, req_context)
        loaded = keys[:num_hits]
        manager.prepare_load(loaded, req_context)
        manager.complete_load(loaded, req_context)
    if hints.store:
        grant = manager.prepare_store(keys, req_context)
        stored = [keys[index] for index in grant.indices]
        manager.complete_store(stored, req_context)
    manager.on_request_finished(req_context)
    return num_hits


def replay_vllm(
    requests: Iterable[PreparedRequest], policy: str, num_chunks: int
) -> list[int]:
    """Replays through vLLM's manager, which knows neither tenants nor hints.

    The keys are the same, so private tenants do not share chunks here either: as with
    a `cache_salt` for each of them.
    """
    manager = VllmManager(policy, num_chunks)
    return [
        manager.serve(request.req_context.request_id, request.keys)
        for request in requests
    ]


# ---- the offline bound


def next_uses(requests: Sequence[PreparedRequest]) -> list[dict[int, int]]:
    """Returns by request which later ones use its chunks next: index to chunks.

    Chunks that are never used again are left out.
    """
    seen: dict[bytes, int] = {}
    found: list[dict[int, int]] = []
    for index in reversed(range(len(requests))):
        keys = requests[index].keys
        uses = Counter(map(seen.get, keys))
        found.append({use: count for use, count in uses.items() if use is not None})
        seen.update(dict.fromkeys(keys, index))
    found.reverse()
    return found


def offline_bound(uses: Sequence[dict[int, int]], num_chunks: int) -> list[int]:
    """Returns the hits of a cache that knows the future: no policy has more in all.

    It gives up the chunk whose next use is furthest (Belady's MIN), at once where that
    is a new one (bypass), and of one chain the tail first. A chain's chunks are used
    no later than those behind them, so what is kept of it is always a leading run. All
    chunks that one request uses next stand together, and it hits as many as are left:
    their number is all there is to know of them.

    Args:
        uses: what `next_uses` returned.
        num_chunks: that the cache holds.
    """
    kept = [0] * len(uses)  # resident chunks, by the request that uses them next
    furthest: list[int] = []  # heap of the negated indices of those that are not 0
    resident = 0
    for index, later in enumerate(uses):
        resident -= kept[index]
        for use, count in later.items():
            if not kept[use]:
                heapq.heappush(furthest, -use)
            kept[use] += count
            resident += count
        while resident > num_chunks:
            use = -furthest[0]
            given_up = min(kept[use], resident - num_chunks)
            kept[use] -= given_up
            resident -= given_up
            if not kept[use]:
                heapq.heappop(furthest)
    return kept


# ---- hit rates


class Rates(NamedTuple):
    """What the requests of a tenant came to."""

    num_requests: int = 0
    num_chunks: int = 0
    num_tokens: int = 0
    hit_chunks: int = 0
    hit_tokens: int = 0

    def plus(self, request: PreparedRequest, hits: int, tokens_per_chunk: int) -> Rates:
        """Returns the rates with one request more."""
        return Rates(
            self.num_requests + 1,
            self.num_chunks + len(request.keys),
            self.num_tokens + request.num_tokens,
            self.hit_chunks + hits,
            self.hit_tokens + hits * tokens_per_chunk,
        )

    @property
    def block_percent(self) -> float:
        return 100 * self.hit_chunks / self.num_chunks if self.num_chunks else 0.0

    @property
    def token_percent(self) -> float:
        return 100 * self.hit_tokens / self.num_tokens if self.num_tokens else 0.0


def rates_by_tenant(
    requests: Sequence[PreparedRequest], hits: Sequence[int], tokens_per_chunk: int
) -> tuple[Rates, dict[str, Rates]]:
    """Returns (all together, by the tenant they are accounted to)."""
    total = Rates()
    tenants: dict[str, Rates] = {}
    for request, num_hits in zip(requests, hits, strict=True):
        tenant = request.req_context.tenant
        before = tenants.get(tenant, Rates())
        tenants[tenant] = before.plus(request, num_hits, tokens_per_chunk)
        total = total.plus(request, num_hits, tokens_per_chunk)
    return total, dict(sorted(tenants.items()))
