"""The offloading manager: which chunks are in host memory, and which have to go."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import NamedTuple

from vllm_ctx_offload.context import ReqContext
from vllm_ctx_offload.core.policy import ChainLru, Chunk
from vllm_ctx_offload.core.slots import SlotAllocator
from vllm_ctx_offload.stats import OffloadStats

__all__ = ["HostMemoryManager", "LookupResult", "OffloadingManager", "StoreGrant"]


class LookupResult(NamedTuple):
    """What a lookup found, from the first key on."""

    num_ready: int  # length of the leading run that can be loaded now
    pending: bool  # the run ends at a chunk that is being stored right now


class StoreGrant(NamedTuple):
    """The chunks of a chain that the caller now has to copy to the host."""

    indices: tuple[int, ...]  # into the keys that were offered, ascending
    slots: tuple[int, ...]  # where each of them goes
    num_rejected: int = 0  # absent keys that found no place


class OffloadingManager(ABC):
    """Life cycle of the offloaded chunks; every method takes the request's context.

    A chunk is absent, being stored, or ready. `prepare_store` makes it "being stored"
    and pinned, `complete_store` ready (or absent again). `prepare_load` pins ready
    chunks until `complete_load`. A pinned chunk is never evicted. Keys are opaque and
    unique per namespace; a list of keys is always one prefix chain, head first.

    Calls come from one thread. A failed call changes nothing. Completions may come
    after `on_request_finished`, and after `reset` or `remove` of their keys.
    """

    @abstractmethod
    def lookup(self, keys: Sequence[bytes], req_context: ReqContext) -> LookupResult:
        """Returns the leading run of `keys` that is ready. Changes nothing."""

    @abstractmethod
    def touch(self, keys: Sequence[bytes], req_context: ReqContext) -> None:
        """Marks the resident ones of `keys`, a chain from its head, as used now."""

    @abstractmethod
    def prepare_load(
        self, keys: Sequence[bytes], req_context: ReqContext
    ) -> tuple[int, ...]:
        """Pins `keys`, which the last lookup found ready; returns their slots.

        Raises:
            KeyError: one of them is not ready; none is pinned then.
        """

    @abstractmethod
    def complete_load(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        """Unpins keys that `prepare_load` pinned, once for each time."""

    @abstractmethod
    def prepare_store(
        self, keys: Sequence[bytes], req_context: ReqContext
    ) -> StoreGrant:
        """Makes room for the absent ones of `keys`, a chain from its head.

        What finds no place is cut from the chain's tail. Counts as a use of the
        chain, whose own chunks are never evicted for it.
        """

    @abstractmethod
    def complete_store(
        self,
        keys: Collection[bytes],
        req_context: ReqContext,
        success: bool = True,
    ) -> None:
        """Ends a store: the granted `keys` become ready, or absent if it failed."""

    @abstractmethod
    def remove(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        """Makes `keys` unfindable at once; pinned ones keep their slot until unpinned.

        For chunks whose content can't be trusted, such as after a failed load.
        """

    @abstractmethod
    def reset(self) -> None:
        """Removes every chunk, in the way of `remove`."""

    def on_new_request(self, req_context: ReqContext) -> None:
        """A request was added to the scheduler."""

    def on_request_finished(self, req_context: ReqContext) -> None:
        """A request ended; its stores and loads may still be under way."""


class HostMemoryManager(OffloadingManager):
    """Chunks in a host pool of fixed size, evicted in chain-aware LRU order.

    Everything is decided before anything changes. Cost: O(1) per key, plus O(pinned)
    for a store that has to evict.
    """

    def __init__(self, num_slots: int, stats: OffloadStats) -> None:
        self._slots = SlotAllocator(num_slots)
        self._chunks = ChainLru()
        self._num_pinned = 0  # chunks with at least one pin
        self._stats = stats

    @property
    def num_resident(self) -> int:
        """Chunks that hold a slot, those being stored included."""
        return len(self._chunks)

    @property
    def num_pinned(self) -> int:
        return self._num_pinned

    def lookup(self, keys: Sequence[bytes], req_context: ReqContext) -> LookupResult:
        num_ready = 0
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is None or chunk.doomed:
                return LookupResult(num_ready, pending=False)
            if not chunk.ready:
                return LookupResult(num_ready, pending=True)
            num_ready += 1
        return LookupResult(num_ready, pending=False)

    def touch(self, keys: Sequence[bytes], req_context: ReqContext) -> None:
        self._chunks.touch(keys)

    def prepare_load(
        self, keys: Sequence[bytes], req_context: ReqContext
    ) -> tuple[int, ...]:
        chunks = [self._chunks[key] for key in keys]
        for key, chunk in zip(keys, chunks, strict=True):
            if not chunk.ready or chunk.doomed:
                raise KeyError(key)
        for chunk in chunks:
            self._pin(chunk)
        return tuple(chunk.slot for chunk in chunks)

    def complete_load(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        # A chunk that is not ready has only the pin of its store, which stays.
        assert all(self._chunks[key].ready and self._chunks[key].pins for key in keys)
        for key in keys:
            self._unpin(key)

    def prepare_store(
        self, keys: Sequence[bytes], req_context: ReqContext
    ) -> StoreGrant:
        chunks = [self._chunks.get(key) for key in keys]
        absent = [index for index, chunk in enumerate(chunks) if chunk is None]
        own_evictable = sum(chunk is not None and not chunk.pins for chunk in chunks)
        evictable = len(self._chunks) - self._num_pinned - own_evictable
        granted = absent[: self._slots.num_free + evictable]
        if len(granted) > self._slots.num_free:
            # The chain's own chunks become the last ones that eviction would reach.
            self._chunks.touch(keys)
            self._evict(len(granted) - self._slots.num_free, req_context.tenant)

        slots = [self._slots.allocate() for _ in granted]
        for index, slot in zip(granted, slots, strict=True):
            self._chunks.add(keys[index], Chunk(slot, req_context.tenant))
        self._num_pinned += len(granted)
        self._chunks.touch(keys)
        return StoreGrant(tuple(granted), tuple(slots), len(absent) - len(granted))

    def complete_store(
        self,
        keys: Collection[bytes],
        req_context: ReqContext,
        success: bool = True,
    ) -> None:
        chunks = [self._chunks[key] for key in keys]
        assert not any(chunk.ready for chunk in chunks)
        for key, chunk in zip(keys, chunks, strict=True):
            if success:
                chunk.ready = True
            else:
                chunk.doomed = True
            self._unpin(key)

    def remove(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        for key in keys:
            self._remove(key)

    def reset(self) -> None:
        for key in [key for key, _ in self._chunks.items()]:
            self._remove(key)

    def _remove(self, key: bytes) -> None:
        chunk = self._chunks.get(key)
        if chunk is None:
            return
        chunk.doomed = True
        if not chunk.pins:
            self._drop(key)

    def _drop(self, key: bytes) -> None:
        self._slots.free(self._chunks.remove(key).slot)

    def _pin(self, chunk: Chunk) -> None:
        self._num_pinned += not chunk.pins
        chunk.pins += 1

    def _unpin(self, key: bytes) -> None:
        chunk = self._chunks[key]
        chunk.pins -= 1
        if not chunk.pins:
            self._num_pinned -= 1
            if chunk.doomed:
                self._drop(key)

    def _evict(self, count: int, by_tenant: str) -> None:
        """Evicts the `count` least recently used chunks that nobody has pinned."""
        unpinned = (
            (key, chunk.tenant) for key, chunk in self._chunks.items() if not chunk.pins
        )
        victims = list(itertools.islice(unpinned, count))
        assert len(victims) == count
        for key, tenant in victims:
            self._drop(key)
            self._stats.count("evicted_chunks", tenant, by_tenant)

    def check_invariants(self) -> None:
        """Raises AssertionError unless slots, pins and states agree."""
        self._slots.check_invariants()
        slots = [chunk.slot for _, chunk in self._chunks.items()]
        assert len(set(slots)) == len(slots), "two chunks share a slot"
        assert len(slots) + self._slots.num_free == self._slots.num_slots
        pinned = 0
        for key, chunk in self._chunks.items():
            assert chunk.pins >= 0, key
            assert chunk.ready or chunk.pins, f"{key!r} is neither stored nor ready"
            assert not chunk.doomed or chunk.pins, f"{key!r} outlived its last pin"
            pinned += bool(chunk.pins)
        assert pinned == self._num_pinned
