"""What the pool holds, in bytes, as gauges; read once a step."""

from __future__ import annotations

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
    """Compares the manager's figures with the last ones and passes on what changed."""

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
        # The gauges of what is counted in chunks, and their last figures.
        tenants = [("resident_bytes", tenant) for tenant in memory.resident_by_tenant()]
        self._keys = [("pinned_bytes",), ("protected_bytes",), *tenants]
        self._last = [-1] * len(self._keys)
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
        memory, last = self._memory, self._last
        figures = [memory.num_pinned, memory.num_protected, *memory.residents()]
        if figures == last:
            return
        for key, num_chunks, before in zip(self._keys, figures, last, strict=True):
            if num_chunks != before:
                self._stats.set(*key, to=num_chunks * self._bytes_per_chunk)
        self._last = figures
