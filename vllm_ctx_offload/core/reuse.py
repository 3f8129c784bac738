"""A decorator that stores only what was offered often enough."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Container, Sequence

from vllm_ctx_offload.context import ReqContext
from vllm_ctx_offload.core.manager import (
    LookupResult,
    OffloadingManager,
    StoreGrant,
)

__all__ = ["ReuseFilter"]


class ReuseFilter(OffloadingManager):
    """Passes a chunk on to `inner` from the `threshold`-th request that offers it.

    A request counts once for a chunk, however often it offers it. The counts of the
    `max_tracker_size` keys offered last are remembered. All other calls, and the
    context with every call, go through unchanged.
    """

    def __init__(
        self, inner: OffloadingManager, threshold: int, max_tracker_size: int
    ) -> None:
        self._inner = inner
        self._threshold = threshold
        self._max_tracker_size = max_tracker_size
        self._offers: OrderedDict[bytes, int] = OrderedDict()
        # The chain that a live request has been counted for.
        self._counted: dict[str, tuple[bytes, ...]] = {}

    def prepare_store(
        self,
        keys: Sequence[bytes],
        req_context: ReqContext,
        *,
        holes: Container[int] = (),
    ) -> StoreGrant:
        self._count(keys, req_context.request_id)
        offers, threshold = self._offers, self._threshold
        length = 0
        # A chunk behind a gap could not be hit: the leading run is all that counts.
        while length < len(keys) and offers.get(keys[length], 0) >= threshold:
            length += 1
        return self._inner.prepare_store(keys[:length], req_context, holes=holes)

    def _count(self, keys: Sequence[bytes], request_id: str) -> None:
        offers = self._offers
        num_counted = self._num_counted(keys, request_id)
        # From the tail to the head, as chunks are evicted: a tail is no use without its
        # head, so it is forgotten first.
        for index in reversed(range(len(keys))):
            key = keys[index]
            offers[key] = offers.pop(key, 0) + (index >= num_counted)
        while len(offers) > self._max_tracker_size:
            offers.popitem(last=False)

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
        self._offers.clear()
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
