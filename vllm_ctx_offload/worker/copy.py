"""Batched copies between the blocks of a cache on the CPU and host rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from vllm_ctx_offload.worker.kv_layout import BlockLayout

__all__ = ["CpuCopy", "Run", "runs_of"]


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


# Arrays of numpy that lie alike: [blocks, ..., words] and [rows, ..., words].
_Ends = tuple[Any, Any]


class CpuCopy:
    """Copies blocks to rows and back, on the calling thread alone.

    [Note: few calls]
    The keys and values of a layer, and the layers themselves, lie evenly spaced in
    memory for most models: they are one dimension each of an array, so that one call
    copies all of a block. A call takes about as long as a copy of 4 KiB.
    The arrays are numpy's: assigning one to another is a memcpy a page on this thread.
    PyTorch shares large copies out to the model's threads, takes twice as long for
    small ones, and has no negative strides, as for layers that lie below one another.

    Args:
        layout: of the cache, on the CPU.
        pool: uint8 [num_rows, bytes_per_row], on the CPU.
    """

    def __init__(self, layout: BlockLayout, pool: torch.Tensor) -> None:
        self._tensors = layout, pool  # keeps alive what the arrays point to
        ends = []
        for segment in layout.segments:
            end = segment.offset + segment.num_bytes
            host = pool[:, segment.offset : end].view(layout.word)
            ends.append((segment.view.numpy(), host.numpy()))
        self._ends = _stacked(_stacked(ends))  # keys and values, then layers

    def __call__(
        self, block_ids: Sequence[int], rows: Sequence[int], *, to_host: bool
    ) -> None:
        """Returns when the i-th block is in the i-th row (`to_host`), or vice versa."""
        for block, row, length in runs_of(block_ids, rows):
            # A single index makes a view of one dimension less, which is quicker.
            blocks = block if length == 1 else slice(block, block + length)
            places = row if length == 1 else slice(row, row + length)
            for cache, host in self._ends:
                if to_host:
                    host[places] = cache[blocks]
                else:
                    cache[blocks] = host[places]


def _stacked(ends: Sequence[_Ends]) -> list[_Ends]:
    """Returns what follows one another evenly spaced as one with one dimension more.

    The new dimension is the second, also where its size is 1.
    """
    stacks: list[list[_Ends]] = []
    for pair in ends:
        if stacks and all(map(_continues, zip(*stacks[-1], strict=True), pair)):
            stacks[-1].append(pair)
        else:
            stacks.append([pair])
    return [
        (_stack([cache for cache, _ in stack]), _stack([host for _, host in stack]))
        for stack in stacks
    ]


def _continues(stack: Sequence[Any], array: Any) -> bool:
    """Returns whether an array is like those before and as far from the last one."""
    last = stack[-1]
    if (array.shape, array.strides) != (last.shape, last.strides):
        return False
    return len(stack) == 1 or _step(last, array) == _step(stack[-2], last)


def _stack(arrays: Sequence[Any]) -> Any:
    from numpy.lib.stride_tricks import as_strided  # a GPU is served without numpy

    first = arrays[0]
    step = _step(first, arrays[1]) if len(arrays) > 1 else 0
    shape = (first.shape[0], len(arrays), *first.shape[1:])
    return as_strided(first, shape, (first.strides[0], step, *first.strides[1:]))


def _step(first: Any, second: Any) -> int:
    addresses = [one.__array_interface__["data"][0] for one in (first, second)]
    return int(addresses[1] - addresses[0])
