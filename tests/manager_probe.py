"""Sees and checks the whole state of a `HostMemoryManager`, and a naive model of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_ctx_offload.context import ReqContext
from vllm_ctx_offload.core import (
    HostMemoryManager,
    LookupResult,
    OffloadingManager,
    ReuseFilter,
    StoreGrant,
)
from vllm_ctx_offload.stats import OffloadStats

LOOKUP_MISS = LookupResult(0, pending=False)


class ChunkState(NamedTuple):
    """All there is to a chunk but its slot."""

    key: bytes
    tenant: str
    pins: int
    ready: bool
    doomed: bool


def chunk_states(manager: HostMemoryManager) -> list[ChunkState]:
    """Returns the resident chunks, least recently used first."""
    return [
        ChunkState(key, chunk.tenant, chunk.pins, chunk.ready, chunk.doomed)
        for key, chunk in manager._chunks.items()
    ]


def resident_keys(manager: HostMemoryManager) -> list[bytes]:
    """Returns the resident keys, least recently used first."""
    return [key for key, _ in manager._chunks.items()]


def snapshot(manager: HostMemoryManager) -> object:
    """Returns everything that a failed call must leave as it was."""
    slots = manager._slots
    return (
        chunk_states(manager),
        [chunk.slot for _, chunk in manager._chunks.items()],
        (list(slots._freed), slots._next_unused, bytes(slots._in_use)),
        manager.num_pinned,
        dict(manager._stats._counts),
    )


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
        """Stores a chain with success; returns the keys that were granted."""
        grant = self.prepare_store(keys, context)
        granted = [keys[index] for index in grant.indices]
        self.complete_store(granted, context)
        return granted


def make_checked(kind: str, num_slots: int) -> Checked:
    """Returns an empty manager, bare or inside a reuse filter."""
    inner = HostMemoryManager(num_slots, OffloadStats())
    outer: OffloadingManager = inner
    if kind != "bare":
        outer = ReuseFilter(inner, int(kind.removeprefix("filter")), 1_000)
    return Checked(outer, inner)


@dataclass
class _Record:
    key: bytes
    tenant: str
    slot: int | None = None  # learnt from the manager under test
    stores: int = 1
    loads: int = 0
    ready: bool = False
    doomed: bool = False

    @property
    def pins(self) -> int:
        return self.stores + self.loads


class NaiveManager:
    """The same life cycle, as plainly as it can be said: a list in order of use."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.records: list[_Record] = []  # least recently used first
        self.victims: list[tuple[bytes, str, str]] = []  # key, whose, for whom

    def find(self, key: bytes) -> _Record | None:
        return next((r for r in self.records if r.key == key), None)

    def states(self) -> list[ChunkState]:
        return [
            ChunkState(r.key, r.tenant, r.pins, r.ready, r.doomed) for r in self.records
        ]

    def lookup(self, keys: Sequence[bytes]) -> LookupResult:
        for length, key in enumerate(keys):
            record = self.find(key)
            if record is None or record.doomed or not record.ready:
                pending = record is not None and not record.doomed
                return LookupResult(length, pending)
        return LookupResult(len(keys), pending=False)

    def touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if record := self.find(key):
                self.records.remove(record)
                self.records.append(record)

    def prepare_load(self, keys: Sequence[bytes]) -> tuple[int | None, ...]:
        records = [self.find(key) for key in keys]
        for record in records:
            record.loads += 1
        return tuple(record.slot for record in records)

    def complete_load(self, keys: Collection[bytes]) -> None:
        for key in keys:
            self.find(key).loads -= 1
        self._drop_dead()

    def prepare_store(self, keys: Sequence[bytes], tenant: str) -> StoreGrant:
        self.touch(keys)
        absent = [i for i, key in enumerate(keys) if self.find(key) is None]
        granted = []
        for index in absent:
            if not self._make_room(keys, tenant):
                break
            self.records.append(_Record(keys[index], tenant))
            granted.append(index)
        self.touch(keys)
        return StoreGrant(tuple(granted), (), len(absent) - len(granted))

    def _make_room(self, own: Sequence[bytes], tenant: str) -> bool:
        if len(self.records) < self.num_slots:
            return True
        for record in self.records:
            if not record.pins and record.key not in own:
                self.victims.append((record.key, record.tenant, tenant))
                self.records.remove(record)
                return True
        return False

    def complete_store(self, keys: Collection[bytes], success: bool) -> None:
        for key in keys:
            record = self.find(key)
            record.stores -= 1
            record.ready = record.ready or success
            record.doomed = record.doomed or not success
        self._drop_dead()

    def remove(self, keys: Collection[bytes]) -> None:
        for record in self.records:
            record.doomed = record.doomed or record.key in keys
        self._drop_dead()

    def _drop_dead(self) -> None:
        self.records = [r for r in self.records if r.pins or not r.doomed]
