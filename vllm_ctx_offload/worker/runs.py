"""Runs of neighbours among the blocks and rows of a job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["Run", "runs_of"]


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
