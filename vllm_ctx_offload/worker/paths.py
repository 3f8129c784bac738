"""Which way a job takes between the device and the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Final

import torch

from vllm_ctx_offload.worker.kv_layout import BlockLayout
from vllm_ctx_offload.worker.runs import Run, runs_of

__all__ = ["Pages", "Path", "choose_path", "copy_all", "runs_within"]


class Path(Enum):
    """The ways there are."""

    # Gathered or scattered through the scratch, a copy for each run of rows. Always
    # right, whatever the layout, and the fallback.
    STAGED = "staged"
    # A copy for each page, between the cache and pinned memory.
    DIRECT = "direct"


# Pages from here on are copied directly. The figure is reckoned, not measured
# (`benchmarks/transfer.py --path` measures both ways on a GPU). A copy through torch
# costs about 5 us of its thread. A PCIe 5 link, the fastest that these copies meet,
# moves 512 KiB in 10 us: from there on the link is the limit and not the launches, and
# DIRECT saves the pass over device memory and the kernels beside the model's. Below,
# many launches wait for one another and STAGED is the faster one.
_MIN_DIRECT_BYTES: Final = 512 * 1024


class Pages:
    """The pages of cache and pool: what is contiguous in both.

    Args:
        layout: of the cache.
        pool: uint8 [num_rows, bytes_per_row].
        rows_per_pin: see `runs_within`.
    """

    def __init__(
        self, layout: BlockLayout, pool: torch.Tensor, rows_per_pin: int
    ) -> None:
        self._rows_per_pin = rows_per_pin
        self._device = [segment.view for segment in layout.segments]
        self._host = [
            pool[:, s.offset : s.offset + s.num_bytes].view(layout.word)
            for s in layout.segments
        ]
        # Only with one segment are neighbouring rows one range on the host.
        self._in_runs = len(self._device) == 1 and self._device[0].is_contiguous()
        self.min_bytes = min(segment.num_bytes for segment in layout.segments)
        self.per_block = len(self._device)

    def pairs(
        self, block_ids: Sequence[int], rows: Sequence[int]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns the pages on the device and those on the host, in one order."""
        on_device: list[torch.Tensor] = []
        on_host: list[torch.Tensor] = []
        if self._in_runs:
            for block, row, length in runs_within(block_ids, rows, self._rows_per_pin):
                on_device.append(self._device[0][block : block + length])
                on_host.append(self._host[0][row : row + length])
            return on_device, on_host
        for device, host in zip(self._device, self._host, strict=True):
            on_device += [device[block] for block in block_ids]
            on_host += [host[row] for row in rows]
        return on_device, on_host


def runs_within(
    block_ids: Sequence[int], rows: Sequence[int], rows_per_pin: int
) -> Iterator[Run]:
    """Yields the runs of (block, row) pairs, none over rows of two pieces of the pool.

    CUDA refuses a copy whose host memory was not pinned by one call ("invalid
    argument"), also where the pieces are neighbours.
    """
    for block, first, length in runs_of(block_ids, rows):
        row, end = first, first + length
        while row < end:
            part = min(end - row, rows_per_pin - row % rows_per_pin)
            yield Run(block + row - first, row, part)
            row += part


def choose_path(pages: Pages, *, pinned: bool) -> Path:
    """Returns the way for all jobs over these pages."""
    # A copy from or to pageable memory holds up its thread: the fewer the better.
    large = pages.min_bytes >= _MIN_DIRECT_BYTES
    return Path.DIRECT if pinned and large else Path.STAGED


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Enqueues a copy of each source to its target, in one call where torch has it.

    The caller keeps both alive and unchanged until an event after it has passed.
    """
    batched = getattr(torch, "_foreach_copy_", None)
    if batched is not None:
        # non_blocking: rows and blocks belong to the job until its event has passed.
        batched(targets, sources, non_blocking=True)
        return
    for target, source in zip(targets, sources, strict=True):
        # non_blocking: as above.
        target.copy_(source, non_blocking=True)
