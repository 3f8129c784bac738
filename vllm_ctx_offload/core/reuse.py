"""A decorator that stores only what was offered often enough."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Container, Sequence
from dataclasses import replace

from vllm_ctx_offload.config import OffloadConfig
from vllm_ctx_offload.context import ReqContext
from vllm_ctx_offload.core.host_memory import HostMemoryManager
from vllm_ctx_offload.core.manager import (
    LookupResult,
    OffloadingManager,
    StoreGrant,
)
from vllm_ctx_offload.core.policy import PolicyConfig
from vllm_ctx_offload.stats import OffloadStats

__all__ = ["ReuseFilter", "filtered"]


def filtered(
    memory: HostMemoryManager,
    config: OffloadConfig,
    policy: PolicyConfig,
    num_slots: int,
) -> OffloadingManager:
    """Returns the manager behind a reuse filter, if the configuration wants one."""
    if config.store_threshold < 2:
        return memory
    size = config.max_tracker_size
    tracker = tracker_policy(policy, num_slots, size)
    return ReuseFilter(memory, config.store_threshold, size, tracker)


def tracker_policy(policy: PolicyConfig, num_slots: int, size: int) -> PolicyConfig:
    """Returns the policy of a tracker of `size` keys beside a pool of `num_slots`.

    An account has the share of the tracker that it has of the pool, rounded down, so a
    tracker of at least as many keys as the pool has chunks can fill any reservation.
    """

    def share(num_chunks: int) -> int:
        return num_chunks * size // max(num_slots, 1)

    accounts = {
        tenant: replace(
            terms,
            reserved=share(terms.reserved),
            # Whoever may hold a chunk may have a key that leads to it.
            limit=terms.limit and max(share(terms.limit), 1),
        )
        for tenant, terms in policy.accounts.items()
    }
    return policy._replace(accounts=accounts)


class ReuseFilter(OffloadingManager):
    """Passes a chunk on to `inner` from the `threshold`-th request that offers it.

    A request counts once for a chunk, however often it offers it. All other calls, and
    the context with every call, go through unchanged.

    The counts are kept in a tracker, which is a pool of keys without chunks: whose key
    is forgotten for a new one is decided just as whose chunk is evicted for one, on
    accounts of its own. So a tenant within its share of the tracker loses no count to
    others; what nobody reserved is borrowed; a key stays on the account of the tenant
    that offered it first; and of a tenant's keys those offered longest ago are
    forgotten first, tails before heads. Hints have no effect there.
    """

    def __init__(
        self,
        inner: OffloadingManager,
        threshold: int,
        max_tracker_size: int,
        tracker_policy: PolicyConfig,
    ) -> None:
        self._inner = inner
        self._threshold = threshold
        self._max_tracker_size = max_tracker_size
        self._tracker_policy = tracker_policy
        self._tracker = self._make_tracker()
        # By slot of the tracker: how many requests offered the key in it.
        self._counts = array("q", bytes(8 * max_tracker_size))
        # The chain that a live request has been counted for.
        self._counted: dict[str, tuple[bytes, ...]] = {}

    def _make_tracker(self) -> HostMemoryManager:
        # Order is by use, so time may stand still; nobody reads the counters.
        return HostMemoryManager(
            self._max_tracker_size, OffloadStats(), self._tracker_policy, lambda: 0.0
        )

    def prepare_store(
        self,
        keys: Sequence[bytes],
        req_context: ReqContext,
        *,
        holes: Container[int] = (),
    ) -> StoreGrant:
        length, threshold = 0, self._threshold
        # A chunk behind a gap could not be hit: the leading run is all that counts.
        for count in self._count(keys, req_context):
            if count < threshold:
                break
            length += 1
        return self._inner.prepare_store(keys[:length], req_context, holes=holes)

    def _count(self, keys: Sequence[bytes], req_context: ReqContext) -> list[int]:
        """Returns how many requests offered each of `keys`, as far as it is known."""
        tracker, counts = self._tracker, self._counts
        offer = ReqContext(req_context.request_id, tenant=req_context.tenant)
        slots = tracker.find(keys)
        num_counted = self._num_counted(keys, req_context.request_id)
        for slot in slots[num_counted:]:
            if slot is not None:
                counts[slot] += 1
        new = tracker.prepare_store(keys, offer)
        tracker.complete_store([keys[index] for index in new.indices], offer)
        for index, slot in zip(new.indices, new.slots, strict=True):
            slots[index] = slot
            counts[slot] = 1
        return [0 if slot is None else counts[slot] for slot in slots]

    def _num_counted(self, keys: Sequence[bytes], request_id: str) -> int:
        """Returns for how many leading `keys` the request was counted before this."""
        counted = self._counted.get(request_id, ())
        num_shared = 0
        for key, counted_key in zip(keys, counted, strict=False):
            if key != counted_key:
                break
            num_shared += 1
        # Shorter than before: offered again after a preemption. Different: a
        # streaming-input session replaced tokens.
        if num_shared < len(keys):
            self._counted[request_id] = tuple(keys)
        return num_shared

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._counted.pop(req_context.request_id, None)
        self._inner.on_request_finished(req_context)

    def reset(self) -> None:
        self._tracker = self._make_tracker()
        self._counted.clear()
        self._inner.reset()

    def lookup(self, keys: Sequence[bytes], req_context: ReqContext) -> LookupResult:
        return self._inner.lookup(keys, req_context)

    def touch(self, keys: Sequence[bytes], req_context: ReqContext) -> None:
        self._inner.touch(keys, req_context)

    def prepare_load(
        self, keys: Sequence[bytes], req_context: ReqContext
    ) -> tuple[int, ...]:
        return self._inner.prepare_load(keys, req_context)

    def complete_load(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        self._inner.complete_load(keys, req_context)

    def complete_store(
        self,
        keys: Collection[bytes],
        req_context: ReqContext,
        success: bool = True,
    ) -> None:
        self._inner.complete_store(keys, req_context, success)

    def remove(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        self._inner.remove(keys, req_context)

    def on_new_request(self, req_context: ReqContext) -> None:
        self._inner.on_new_request(req_context)
