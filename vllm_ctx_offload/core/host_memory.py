"""The host-memory manager: which chunks are in the pool, and which have to go."""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_left
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from typing import Final, NamedTuple

from vllm_ctx_offload.context import ReqContext
from vllm_ctx_offload.core.manager import LookupResult, OffloadingManager, StoreGrant
from vllm_ctx_offload.core.policy import PolicyConfig, RetentionPolicy, Use
from vllm_ctx_offload.core.slots import SlotAllocator
from vllm_ctx_offload.core.tenants import check_terms
from vllm_ctx_offload.core.victims import Room, RoomMaker
from vllm_ctx_offload.stats import OffloadStats

__all__ = ["ChunkState", "HostMemoryManager"]


_NUM_SHARDS: Final = 256  # values of a byte
# (keys, whether they can be hit)
OnChange = Callable[[Sequence[bytes], bool], None]


class ChunkState(NamedTuple):
    """All there is to one resident chunk."""

    key: bytes
    slot: int
    tenant: str  # who is accounted for it
    pins: int
    ready: bool
    doomed: bool  # removed while pinned; its last unpin drops it


class HostMemoryManager(OffloadingManager):
    """Chunks in a host pool of fixed size, kept as `RetentionPolicy` says.

    A chunk that is being stored is pinned by its store and not ready. One that was
    removed while pinned is doomed: it can't be hit, nor stored again under its key,
    until its last unpin drops it.

    Everything is decided before anything changes. Cost: O(1) per key; to choose a
    victim O(log tenants), plus O(runs that are pinned). No call waits for what time,
    releases or a reset do to many chunks at once: each use does a part of it, no more
    than in proportion to its own length.
    """

    def __init__(
        self,
        num_slots: int,
        stats: OffloadStats,
        policy: PolicyConfig,
        clock: Callable[[], float],
        on_change: OnChange | None = None,
    ) -> None:
        """Makes an empty pool.

        Args:
            num_slots: chunks that it holds.
            stats: counts evictions.
            policy: accounts and limits.
            clock: returns the time in seconds, never less than before.
            on_change: is told of keys that can be hit from now on, and of keys that
                can't any more; each key in turn, since both alternate.
        """
        self._slots = SlotAllocator(num_slots)
        self._stats = stats
        self._clock = clock
        self._on_change = on_change
        self._policy = RetentionPolicy(num_slots, policy)
        self._table = self._policy.table
        self._pins = self._table.pins
        # Last byte of a key -> key -> slot, of the chunks that can be loaded. In 256
        # parts, because a dict is copied as a whole when it has to grow: one of a
        # million entries would stop the scheduler for tens of milliseconds.
        self._ready: list[dict[bytes, int]] = [{} for _ in range(_NUM_SHARDS)]
        self._storing: dict[bytes, int] = {}  # doomed ones too
        self._doomed: dict[bytes, int] = {}
        # Parts of the index before a reset, which are freed one by one.
        self._forgotten: list[dict[bytes, int]] = []

    @property
    def num_resident(self) -> int:
        """Chunks that hold a slot, those being stored included."""
        return self._slots.num_slots - self._slots.num_free

    @property
    def num_pinned(self) -> int:
        return len(self._pins)

    @property
    def num_protected(self) -> int:
        """Chunks that a raised priority protects."""
        return self._table.num_protected

    def resident_by_tenant(self) -> dict[str, int]:
        return {account.name: account.resident for account in self._table.accounts}

    def take_changed(self) -> dict[str, int]:
        """Returns, of `resident_by_tenant`, what changed since the last call."""
        changed = self._table.accounts.take_changed()
        return {account.name: account.resident for account in changed}

    # ---- hits

    def lookup(self, keys: Sequence[bytes], req_context: ReqContext) -> LookupResult:
        num_ready = self._num_in_runs(keys)
        for key in itertools.islice(keys, num_ready, None):
            if key not in self._ready[key[-1]]:
                pending = key in self._storing and key not in self._doomed
                return LookupResult(num_ready, pending)
            num_ready += 1
        return LookupResult(num_ready, pending=False)

    def _num_in_runs(self, keys: Sequence[bytes]) -> int:
        """Returns the length of a leading run of ready keys, not always all of it.

        Compares with whole runs, at a fraction of the cost of finding key by key. Stops
        where a run is pinned, because its chunks may not be ready, or does not begin
        where it is met.
        """
        num_ready = 0
        rest = iter(keys)
        key = next(rest, None)
        while key is not None:
            slot = self._ready[key[-1]].get(key)
            if slot is None or (run := self._table.run(slot)).num_pinned:
                break
            chunks = iter(run.chunks)
            if next(chunks) != key:
                break
            try:
                num_ready += 1 + operator.indexOf(map(operator.eq, chunks, rest), False)
                key = keys[num_ready]  # `rest` is past it
            except ValueError:  # alike to the end, of the run or of the keys
                num_ready = min(num_ready + len(run.chunks), len(keys))
                key = next(rest, None)
        return num_ready

    def touch(self, keys: Sequence[bytes], req_context: ReqContext) -> None:
        use = self._begin_use(keys, req_context)
        self._policy.move(use, keys, self.find(keys))
        self._end_use(use)

    def prepare_load(
        self, keys: Sequence[bytes], req_context: ReqContext
    ) -> tuple[int, ...]:
        slots = tuple([self._ready[key[-1]][key] for key in keys])
        self._table.pin(slots)
        return slots

    def complete_load(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        # A chunk that is not ready has only the pin of its store, which stays.
        assert not any(key in self._storing for key in keys)
        slots = [self._slot_of(key) for key in keys]
        assert all(slot in self._pins for slot in slots)
        self._unpin(keys, slots)

    # ---- stores

    def prepare_store(
        self,
        keys: Sequence[bytes],
        req_context: ReqContext,
        *,
        holes: Container[int] = (),
    ) -> StoreGrant:
        slots = self.find(keys)
        absent = [index for index, slot in enumerate(slots) if slot is None]
        absent = [index for index in absent if index not in holes]
        if self._doomed:
            absent = [index for index in absent if keys[index] not in self._doomed]
        use = self._begin_use(keys, req_context)
        self._policy.move(use, keys, slots)
        room = self._make_room(use, absent, len(keys)) if absent else Room(0, None)
        granted = absent[: room.num_granted]
        new = self._slots.take(len(granted))
        self._policy.add(use, keys, granted, new)
        self._storing.update(zip(map(keys.__getitem__, granted), new, strict=True))
        self._end_use(use)
        if granted and any(slot is not None for slot in slots[granted[0] :]):
            # They fill a hole: once more in the chain's order, so that its tail goes
            # first.
            self.touch(keys, req_context)
        return StoreGrant(
            tuple(granted), tuple(new), len(absent) - len(granted), room.reason
        )

    def _make_room(self, use: Use, absent: Sequence[int], num_keys: int) -> Room:
        """Grants room from the first absent chunk on; evicts what gives way to it."""
        maker = RoomMaker(
            self._table, use.account, self._slots.num_free, use.now, use.expected_at
        )
        num_granted, reason = 0, None
        for start, end, wish in use.stretches(num_keys):
            wanted = bisect_left(absent, end) - bisect_left(absent, start)
            priority = use.account.base_priority if wish is None else wish.priority
            granted, reason = maker.make(wanted, priority)
            num_granted += granted
            if reason is not None:
                break
        maker.finish()
        for key, _ in maker.victims:
            del self._ready[key[-1]][key]
        self._slots.free([slot for _, slot in maker.victims])
        self._tell([key for key, _ in maker.victims], can_be_hit=False)
        for tenant, count in maker.evicted.items():
            pair = (tenant, use.account.name)
            self._stats.count_pair("evicted_chunks", *pair, by=count)
        for tenant, count in maker.breached.items():
            self._stats.count("reservation_breaches", tenant, by=count)
        return Room(num_granted, reason)

    def complete_store(
        self,
        keys: Collection[bytes],
        req_context: ReqContext,
        success: bool = True,
    ) -> None:
        storing, doomed, ready = self._storing, self._doomed, self._ready
        slots = [storing[key] for key in keys]
        for key, slot in zip(keys, slots, strict=True):
            del storing[key]
            if success and key not in doomed:
                ready[key[-1]][key] = slot
            else:
                doomed[key] = slot
        if success:
            self._table.became_readable(slots, self._clock())
            self._tell([key for key in keys if key not in doomed], can_be_hit=True)
        self._unpin(keys, slots)

    # ---- removals

    def remove(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        for key in keys:
            self._remove(key)

    def reset(self) -> None:
        if self._on_change is not None:
            for shard in self._ready:
                self._tell(list(shard), can_be_hit=False)
        self._forgotten.extend(filter(None, self._ready))
        self._ready = [{} for _ in range(_NUM_SHARDS)]
        self._doomed = self._table.reset()
        self._slots.reset(self._doomed.values())

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._policy.finish(req_context)

    def _remove(self, key: bytes) -> None:
        slot = self._ready[key[-1]].pop(key, None)
        if slot is not None:
            self._tell([key], can_be_hit=False)
        if slot is not None and slot not in self._pins:
            self._drop(key, slot)
        elif slot is not None or (slot := self._storing.get(key)) is not None:
            self._doomed[key] = slot

    def _drop(self, key: bytes, slot: int) -> None:
        self._table.drop(key, slot)
        self._slots.free([slot])

    def _unpin(self, keys: Collection[bytes], slots: Sequence[int]) -> None:
        self._table.unpin(slots)
        if self._doomed:
            for key, slot in zip(keys, slots, strict=True):
                if key in self._doomed and slot not in self._pins:
                    del self._doomed[key]
                    self._drop(key, slot)

    def _tell(self, keys: Sequence[bytes], *, can_be_hit: bool) -> None:
        if self._on_change is not None and keys:
            self._on_change(keys, can_be_hit)

    # ---- where keys are

    def find(self, keys: Sequence[bytes]) -> list[int | None]:
        """Returns the slots of the keys that can be found now or soon, else None."""
        ready = self._ready
        slots = [ready[key[-1]].get(key) for key in keys]
        if self._storing:
            for index, slot in enumerate(slots):
                if slot is None and keys[index] not in self._doomed:
                    slots[index] = self._storing.get(keys[index])
        return slots

    def _slot_of(self, key: bytes) -> int:
        slot = self._ready[key[-1]].get(key)
        return self._doomed[key] if slot is None else slot

    def _begin_use(self, keys: Sequence[bytes], req_context: ReqContext) -> Use:
        if self._forgotten:
            self._forgotten.pop()
        return self._policy.begin_use(req_context, self._clock(), len(keys))

    def _end_use(self, use: Use) -> None:
        if self._policy.end_use(use):
            self._stats.count("hints_rejected", "priority", "budget")

    # ---- for tests and tools

    def chunks(self) -> Iterator[ChunkState]:
        """Iterates over all chunks; those of one tenant and priority in LRU order."""
        table = sorted(self._table, key=lambda r: (r.account.place, r.priority, r.rank))
        for run in table:
            for key, slot in reversed(run.chunks.items()):
                pins = self._pins.get(slot, 0)
                ready, doomed = key not in self._storing, key in self._doomed
                yield ChunkState(key, slot, run.account.name, pins, ready, doomed)

    def check_invariants(self) -> None:
        """Raises AssertionError unless slots, pins, runs and states agree."""
        self._slots.check_invariants()
        self._table.check_invariants()
        check_terms(self._table.accounts, self._slots.num_slots)
        states = list(self.chunks())
        slots = {state.slot for state in states}
        assert len(slots) == len(states) == self.num_resident, "two chunks share a slot"
        assert set(self._pins) <= slots
        for run in self._table:
            assert all((key in self._storing) == run.being_stored for key in run.chunks)
        for shard in self._ready:
            assert not shard.keys() & self._storing.keys()
            assert not shard.keys() & self._doomed.keys()
        for state in states:
            findable = self._ready[state.key[-1]].get(state.key)
            if state.ready and not state.doomed:
                assert findable == state.slot, state
            else:
                assert findable is None, state
                assert state.pins, state
                where = self._doomed if state.ready else self._storing
                assert where[state.key] == state.slot, state
