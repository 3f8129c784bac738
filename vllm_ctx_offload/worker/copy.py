"""Copies between the blocks of a cache on the CPU and host rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vllm_ctx_offload.worker.kv_layout import BlockLayout
from vllm_ctx_offload.worker.streaming import page_copier

__all__ = ["CpuCopy"]


class CpuCopy:
    """Copies blocks to rows and back, on the calling thread alone, in one call.

    Torch would share a large copy out to the model's threads, and every call to it or
    to numpy would compete with the model's thread for Python's lock.

    Args:
        layout: of the cache, on the CPU.
        pool: uint8 [num_rows, bytes_per_row], on the CPU.

    Raises:
        ConfigError: numba can't be imported.
    """

    def __init__(self, layout: BlockLayout, pool: torch.Tensor) -> None:
        self._tensors = layout, pool  # keeps alive what the addresses point to
        self._copy = page_copier()
        segments = layout.segments
        self._sizes = _numbers([segment.num_bytes for segment in segments])
        # Of each segment: the address of number 0, and the bytes to the next number.
        self._cache = _numbers(
            [
                (view.data_ptr(), _step(view))
                for view in (segment.view for segment in segments)
            ]
        )
        self._host = _numbers(
            [(pool.data_ptr() + segment.offset, _step(pool)) for segment in segments]
        )

    def __call__(
        self, block_ids: Sequence[int], rows: Sequence[int], *, to_host: bool
    ) -> None:
        """Returns when the i-th block is in the i-th row (`to_host`), or vice versa."""
        cache, host = _numbers(block_ids), _numbers(rows)
        if to_host:
            self._copy(self._host, self._cache, self._sizes, host, cache)
        else:
            self._copy(self._cache, self._host, self._sizes, cache, host)


def _step(rows: torch.Tensor) -> int:
    return rows.stride(0) * rows.element_size()


def _numbers(values: Sequence[Any]) -> Any:
    import numpy as np  # a GPU is served without

    return np.array(values, dtype=np.int64)
