"""What enters and leaves host memory, for vLLM's KV events."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from vllm_ctx_offload.scheduler.request_state import split_key

__all__ = ["ChunkEvent", "ChunkEvents"]


class ChunkEvent(NamedTuple):
    """Chunks of one group that can be hit from now on, or can't any more."""

    stored: bool  # or removed
    group: int
    hashes: tuple[bytes, ...]  # of the blocks at the chunks' ends


class ChunkEvents:
    """Collects the changes of a manager in their order; see its `on_change`."""

    def __init__(self) -> None:
        self._changes: list[tuple[bool, int, bytes]] = []

    def __call__(self, keys: Sequence[bytes], can_be_hit: bool) -> None:
        for key in keys:
            group, block_hash = split_key(key)
            self._changes.append((can_be_hit, group, block_hash))

    def take(self) -> list[ChunkEvent]:
        """Returns the events since the last call; neighbours alike are one."""
        changes, self._changes = self._changes, []
        return [
            ChunkEvent(stored, group, tuple(block_hash for _, _, block_hash in alike))
            for (stored, group), alike in groupby(changes, key=lambda c: c[:2])
        ]
