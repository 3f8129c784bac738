"""Where recurrent layers keep their states, as vLLM's `mamba_utils` moves them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from real_scheduler.sim_worker import StateForward, TokenView, in_group
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import MambaManager


@dataclass
class _Running:
    """Of a request, the place in its table and what of its drafts was right there."""

    place: int
    num_accepted: int = 1


class SimStates:
    """The states of all requests; one is copied on from block to block."""

    def __init__(self) -> None:
        self._running: dict[str, _Running] = {}

    def forget(self, request_id: str) -> None:
        """The request begins anew, with other blocks."""
        self._running.pop(request_id, None)

    def advance(
        self,
        request_id: str,
        manager: KVCacheManager,
        view: TokenView,
        *,
        first: int,
        hashes: Sequence[int],
        num_drafts: int,
        num_sampled: int,
        generation: int,
    ) -> Iterator[StateForward]:
        """Yields a step's part of each group; `hashes` are of what it computes."""
        tables = manager.get_block_ids(request_id)
        kinds = manager.coordinator.single_type_managers
        groups = [g for g, kind in enumerate(kinds) if isinstance(kind, MambaManager)]
        if not groups:
            return
        size = kinds[groups[0]].block_size
        before = self._running.get(request_id, _Running((first - 1) // size))
        now = _Running((first + len(hashes) - 1) // size, max(num_sampled, 1))
        self._running[request_id] = now
        # With drafts each token's state is kept, in a block of its own; else the last.
        written = [
            (now.place + index, prefix_hash)
            for index, prefix_hash in enumerate(hashes[len(hashes) - num_drafts - 1 :])
        ]
        written += self._settle(now, first + len(hashes) - num_drafts, size, written)
        for group in groups:
            table = tables[group]
            yield StateForward(
                table[before.place + before.num_accepted - 1] if first else None,
                in_group(group, view.prefix_hashes[first - 1]),
                [
                    (table[place], (generation, in_group(group, prefix_hash)))
                    for place, prefix_hash in written
                ],
            )

    def _settle(
        self, now: _Running, num_sure: int, size: int, written: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Copies the state at the end of a block that drafts ran past to that block."""
        end = (num_sure + now.num_accepted - 1) // size * size
        if end < num_sure:
            return []
        target = end // size - 1
        if target == now.place:
            now.num_accepted = 1
        return [(target, written[end - num_sure][1])]
