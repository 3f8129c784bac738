"""Batched copies between device blocks and host rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from vllm_ctx_offload.worker.kv_layout import BlockLayout, Segment

__all__ = ["Run", "copy_on_cpu", "runs_of"]

# PyTorch splits a copy over the OpenMP threads from this many elements on. Those
# threads belong to the model: a copy that stays below runs on the calling thread.
_GRAIN_ELEMENTS = 32_768
# Below this many bytes for one run, a call a run costs more than an indexed copy.
_MIN_RUN_BYTES = 4096
# From this many neighbours on, one operation a run is worth its call.
_LONG_RUN = 8
# What an indexed copy through a temporary takes at once, to stay in the caches.
_COPY_BYTES = 256 * 1024


class Run(NamedTuple):
    """`length` neighbouring blocks that go to as many neighbouring rows."""

    block: int
    row: int
    length: int


def runs_of(block_ids: Sequence[int], rows: Sequence[int]) -> Iterator[Run]:
    """Yields the longest runs of (block, row) pairs, in the order given."""
    start = 0
    for index in range(1, len(block_ids) + 1):
        length = index - start
        if (
            index < len(block_ids)
            and block_ids[index] == block_ids[start] + length
            and rows[index] == rows[start] + length
        ):
            continue
        yield Run(block_ids[start], rows[start], length)
        start = index


def copy_on_cpu(
    layout: BlockLayout,
    pool: torch.Tensor,
    block_ids: Sequence[int],
    rows: Sequence[int],
    *,
    to_host: bool,
) -> None:
    """Copies blocks to rows (`to_host`) or rows to blocks, and returns when done.

    Args:
        layout: of the cache, on the CPU.
        pool: uint8 [num_rows, bytes_per_row], on the CPU.
        block_ids: blocks of the cache.
        rows: as many rows of the pool; the i-th block and the i-th row.
        to_host: the direction.
    """
    if not rows:
        return
    job = _Pairs(block_ids, rows) if to_host else _Pairs(rows, block_ids)
    for segment in layout.segments:
        end = segment.offset + segment.num_bytes
        host = pool[:, segment.offset : end].view(layout.word)
        source, target = (segment.view, host) if to_host else (host, segment.view)
        _way(job, segment)(source, target, job)


class _Pairs:
    """What one job reads and writes, and what of it are neighbours."""

    def __init__(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._sources = sources
        self._targets = targets
        self.runs = list(runs_of(sources, targets))  # neighbours on both sides

    @cached_property
    def sources(self) -> torch.Tensor:
        return torch.tensor(self._sources, dtype=torch.int64)

    @cached_property
    def targets(self) -> torch.Tensor:
        return torch.tensor(self._targets, dtype=torch.int64)

    @cached_property
    def source_runs(self) -> list[Run]:
        """Neighbours to read; `row` counts the pairs."""
        return list(runs_of(self._sources, range(len(self._sources))))

    @cached_property
    def target_runs(self) -> list[Run]:
        """Neighbours to write; `row` counts the pairs."""
        return list(runs_of(self._targets, range(len(self._targets))))

    def mean(self, runs: list[Run]) -> float:
        return len(self._sources) / len(runs)


_Way = Callable[[torch.Tensor, torch.Tensor, _Pairs], None]


def _way(job: _Pairs, segment: Segment) -> _Way:
    """Returns the quickest way for blocks of this size, as benchmarks/transfer.py saw.

    Both sides in runs: slices. One side in runs, as when slots are neighbours and
    blocks are not: one indexed operation a run, straight from source to target.
    Neither: slices where blocks are large enough for a call each.
    A block so large that torch would share it out is always a slice.
    """
    run_bytes = segment.num_bytes * job.mean(job.runs)
    if len(job.runs) == 1 or segment.view.shape[1] >= _GRAIN_ELEMENTS:
        return _slices
    if job.mean(job.runs) >= _LONG_RUN and run_bytes >= _MIN_RUN_BYTES:
        return _slices
    if job.mean(job.target_runs) >= _LONG_RUN:
        return _gather
    if job.mean(job.source_runs) >= _LONG_RUN:
        return _scatter
    return _slices if run_bytes >= _MIN_RUN_BYTES else _through_a_copy


# Through numpy a slice is one memcpy on this thread; PyTorch would share longer ones
# out to the model's threads, and takes twice as long for short ones.
def _slices(source: torch.Tensor, target: torch.Tensor, job: _Pairs) -> None:
    read, written = source.numpy(), target.numpy()
    for first, second, length in job.runs:
        if length == 1:
            written[second] = read[first]
        else:
            written[second : second + length] = read[first : first + length]


def _gather(source: torch.Tensor, target: torch.Tensor, job: _Pairs) -> None:
    at_once = _blocks_at_once(source)
    for first, pair, length in job.target_runs:
        for start in range(0, length, at_once):
            count = min(at_once, length - start)
            index = job.sources[pair + start : pair + start + count]
            out = target[first + start : first + start + count]
            torch.index_select(source, 0, index, out=out)


# `index_copy_` copies element by element and takes half as long again.
def _scatter(source: torch.Tensor, target: torch.Tensor, job: _Pairs) -> None:
    read, written, index = source.numpy(), target.numpy(), job.targets.numpy()
    for first, pair, length in job.source_runs:
        written[index[pair : pair + length]] = read[first : first + length]


def _through_a_copy(source: torch.Tensor, target: torch.Tensor, job: _Pairs) -> None:
    at_once = min(_blocks_at_once(source), _COPY_BYTES // source[0].nbytes + 1)
    pairs = torch.stack((job.sources, job.targets))
    for sources, targets in torch.split(pairs, at_once, dim=1):
        target.index_copy_(0, targets, source.index_select(0, sources))


def _blocks_at_once(segment: torch.Tensor) -> int:
    """Returns how many blocks a copy may take that stays off the OpenMP threads."""
    if torch.get_num_threads() == 1:  # of the calling thread, see copy_thread.py
        return segment.shape[0]
    return max((_GRAIN_ELEMENTS - 1) // segment.shape[1], 1)
