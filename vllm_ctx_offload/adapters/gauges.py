"""What the pool holds, in bytes, as gauges; read once a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from vllm_ctx_offload.core import HostMemoryManager, PolicyConfig
from vllm_ctx_offload.plan import OffloadPlan
from vllm_ctx_offload.stats import OffloadStats

__all__ = ["PoolGauges"]

_PER_TENANT: Final = (
    *("lookup_tokens", "hit_tokens", "missed_tokens"),
    *("stored_bytes", "loaded_bytes"),
)


class PoolGauges:
    """Passes on what changed: of the tenants, only who did costs a step anything."""

    def __init__(
        self,
        plan: OffloadPlan,
        policy: PolicyConfig,
        memory: HostMemoryManager,
        stats: OffloadStats,
    ) -> None:
        self._bytes_per_chunk = plan.bytes_per_chunk
        self._memory = memory
        self._stats = stats
        # The gauges of what is counted in chunks, by their last figures.
        self._last: dict[tuple[str, ...], int] = {}
        self._set_all(memory.resident_by_tenant())
        self._declare(plan, policy)

    def _declare(self, plan: OffloadPlan, policy: PolicyConfig) -> None:
        """Sets what never changes, and has every known series begin at zero."""
        stats, size = self._stats, plan.bytes_per_chunk
        stats.set("capacity_bytes", to=plan.total_bytes)
        for tenant, terms in policy.accounts.items():
            reserved, limit = terms.reserved, terms.limit
            if policy.plain_lru:  # there every account is as good as none
                reserved, limit = 0, None
            num_chunks = plan.num_slots if limit is None else limit
            stats.set("reserved_bytes", tenant, to=reserved * size)
            stats.set("limit_bytes", tenant, to=min(num_chunks, plan.num_slots) * size)
            for name in _PER_TENANT:
                stats.declare(name, tenant)
        for direction in ("load", "store"):
            stats.declare("transfer_failures", direction)
            stats.declare("transfer_seconds", direction)
        stats.declare("load_wait_seconds")

    def measure(self) -> None:
        """Brings the gauges up to date."""
        self._set_all(self._memory.take_changed())

    def _set_all(self, resident: Mapping[str, int]) -> None:
        memory = self._memory
        self._set("pinned_bytes", num_chunks=memory.num_pinned)
        self._set("protected_bytes", num_chunks=memory.num_protected)
        for tenant, num_chunks in resident.items():
            self._set("resident_bytes", tenant, num_chunks=num_chunks)

    def _set(self, *key: str, num_chunks: int) -> None:
        if self._last.get(key) != num_chunks:
            self._last[key] = num_chunks
            self._stats.set(*key, to=num_chunks * self._bytes_per_chunk)
