"""Chain-aware least-recently-used order of the resident chunks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

__all__ = ["ChainLru", "Chunk"]


class Chunk:
    """One resident chunk: where it lives and who holds it.

    A chunk that is being stored is pinned by its store and not yet `ready`. A chunk
    that was removed while pinned is `doomed`: it can't be hit and can't be stored
    again under its key; its last unpin drops it.
    """

    __slots__ = ("doomed", "pins", "ready", "slot", "tenant")

    def __init__(self, slot: int, tenant: str) -> None:
        self.slot: Final = slot
        self.tenant: Final = tenant  # who is accounted for it
        self.pins = 1  # by the store that is filling it
        self.ready = False
        self.doomed = False


class ChainLru:
    """The resident chunks by key, least recently used first.

    A prefix chain is used as a whole and stamped from its tail to its head, so of one
    chain the tail is always the older part and goes first, and no lookup is left with
    a tail that it can't reach. Pins do not move a chunk; whoever chooses victims skips
    the pinned ones.
    """

    def __init__(self) -> None:
        self._chunks: OrderedDict[bytes, Chunk] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._chunks

    def __getitem__(self, key: bytes) -> Chunk:
        return self._chunks[key]

    def get(self, key: bytes) -> Chunk | None:
        return self._chunks.get(key)

    def items(self) -> Iterator[tuple[bytes, Chunk]]:
        """Iterates from the least to the most recently used chunk."""
        return iter(self._chunks.items())

    def touch(self, chain: Sequence[bytes]) -> None:
        """Makes the resident keys of `chain`, given head first, the most recent."""
        chunks = self._chunks
        for key in reversed(chain):
            if key in chunks:
                chunks.move_to_end(key)

    def add(self, key: bytes, chunk: Chunk) -> None:
        """Adds an absent key as the most recent one."""
        assert key not in self._chunks
        self._chunks[key] = chunk

    def remove(self, key: bytes) -> Chunk:
        return self._chunks.pop(key)
