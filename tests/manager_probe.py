"""Makes managers and sees and checks the whole state of one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_ctx_offload.context import ReqContext
from vllm_ctx_offload.core import (
    AccountTerms,
    ChunkState,
    HostMemoryManager,
    LookupResult,
    OffloadingManager,
    PolicyConfig,
    ReuseFilter,
)
from vllm_ctx_offload.core.reuse import tracker_policy
from vllm_ctx_offload.stats import OffloadStats

LOOKUP_MISS = LookupResult(0, pending=False)


@dataclass
class FakeClock:
    """A time that passes when it is told to."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def make_manager(
    num_slots: int,
    *,
    accounts: dict[str, AccountTerms] | None = None,
    max_protected: int = 0,
    tokens_per_chunk: int = 1,
    plain_lru: bool = False,
    clock: Callable[[], float] | None = None,
) -> HostMemoryManager:
    """Returns an empty manager; there is always an account `default`."""
    policy = PolicyConfig(
        accounts={"default": AccountTerms(), **(accounts or {})},
        max_protected=max_protected,
        columns=((0, tokens_per_chunk),),
        plain_lru=plain_lru,
    )
    return HostMemoryManager(num_slots, OffloadStats(), policy, clock or FakeClock())


def chunk_states(manager: HostMemoryManager) -> list[ChunkState]:
    """Returns the resident chunks, those of one tenant least recently used first."""
    return list(manager.chunks())


def resident_keys(manager: HostMemoryManager) -> list[bytes]:
    """Returns the resident keys, those of one tenant least recently used first."""
    return [state.key for state in manager.chunks()]


def counted(manager: HostMemoryManager) -> dict[str, float]:
    """Returns what was counted so far, without what was only declared."""
    counts = manager._stats.counts.items()
    return {json.dumps(key): value for key, value in counts if value}


def snapshot(manager: HostMemoryManager) -> object:
    """Returns everything that a failed call must leave as it was."""
    slots = manager._slots
    runs = [
        (run.rank, run.priority, run.expires_at, run.expected_at, run.used_at)
        for run in manager._table
    ]
    return (
        chunk_states(manager),
        runs,
        (list(slots._freed), slots._next_unused, bytes(slots._in_use)),
        (manager.num_pinned, manager.num_protected, manager.resident_by_tenant()),
        counted(manager),
    )


def store(
    manager: OffloadingManager, keys: Sequence[bytes], context: ReqContext
) -> list[bytes]:
    """Stores a chain with success; returns the keys that were granted."""
    grant = manager.prepare_store(keys, context)
    granted = [keys[index] for index in grant.indices]
    manager.complete_store(granted, context)
    return granted


class Checked:
    """A manager whose invariants are checked after every call, failed ones included."""

    def __init__(self, outer: OffloadingManager, inner: HostMemoryManager) -> None:
        self._outer = outer
        self.inner = inner

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._outer, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            finally:
                self.inner.check_invariants()

        return call

    def store(self, keys: Sequence[bytes], context: ReqContext) -> list[bytes]:
        manager: Any = self
        return store(manager, keys, context)


KINDS = ("bare", "filter0", "filter1", "plain")


def make_checked(kind: str, num_slots: int) -> Checked:
    """Returns an empty manager of two tenants: bare, in a filter, or as plain LRU."""
    accounts = {"default": AccountTerms(), "zeta": AccountTerms()}
    accounts["acme"] = AccountTerms()
    inner = make_manager(num_slots, accounts=accounts, plain_lru=kind == "plain")
    outer: OffloadingManager = inner
    if kind.startswith("filter"):
        outer = make_filter(inner, int(kind.removeprefix("filter")), 1_000)
    return Checked(outer, inner)


def make_filter(
    inner: HostMemoryManager, threshold: int = 2, max_tracker_size: int = 100
) -> ReuseFilter:
    """Returns a manager behind a reuse filter, on the same accounts."""
    num_slots = inner._slots.num_slots
    policy = tracker_policy(inner._policy._config, num_slots, max_tracker_size)
    return ReuseFilter(inner, threshold, max_tracker_size, policy)


def tracked(manager: ReuseFilter) -> dict[bytes, int]:
    """Returns the keys that a filter remembers, and by how many each was offered."""
    states = manager._tracker.chunks()
    return {state.key: manager._counts[state.slot] for state in states}
