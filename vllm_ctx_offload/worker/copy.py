"""Batched copies between device blocks and host rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from vllm_ctx_offload.worker.kv_layout import BlockLayout

__all__ = ["Run", "copy_on_cpu", "runs_of"]

# PyTorch splits a copy over the OpenMP threads from this many elements on. Those
# threads belong to the model: a copy that stays below runs on the calling thread.
_GRAIN_ELEMENTS = 32_768
# Below this many bytes for one run, a call a run costs more than an indexed copy.
_MIN_RUN_BYTES = 4096


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
    runs = list(runs_of(block_ids, rows))
    indices = torch.tensor((block_ids, rows), dtype=torch.int64)
    for segment in layout.segments:
        end = segment.offset + segment.num_bytes
        host = pool[:, segment.offset : end].view(layout.word)
        device = segment.view
        if segment.num_bytes * len(block_ids) < _MIN_RUN_BYTES * len(runs):
            for blocks, places in torch.split(indices, _blocks_at_once(device), dim=1):
                if to_host:
                    host.index_copy_(0, places, device.index_select(0, blocks))
                else:
                    device.index_copy_(0, blocks, host.index_select(0, places))
            continue
        # Through numpy a run is one memcpy on this thread; PyTorch would share longer
        # ones out to the model's threads, and takes twice as long for short ones.
        on_host, on_device = host.numpy(), device.numpy()
        for block, row, length in runs:
            if to_host:
                on_host[row : row + length] = on_device[block : block + length]
            else:
                on_device[block : block + length] = on_host[row : row + length]


def _blocks_at_once(segment: torch.Tensor) -> int:
    """Returns how many blocks a copy may take that stays off the OpenMP threads."""
    return max((_GRAIN_ELEMENTS - 1) // segment.shape[1], 1)
