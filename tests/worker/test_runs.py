"""Runs of neighbours are as long as they can be."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from vllm_ctx_offload.worker.runs import runs_of

ids = st.integers(0, 40)


@given(st.lists(st.tuples(ids, ids), max_size=60))
def test_runs_are_the_pairs_in_order_and_as_long_as_possible(
    pairs: list[tuple[int, int]],
) -> None:
    blocks, rows = [p[0] for p in pairs], [p[1] for p in pairs]
    runs = list(runs_of(blocks, rows))
    unrolled = [
        (block + i, row + i) for block, row, length in runs for i in range(length)
    ]
    assert unrolled == pairs
    for one, other in itertools.pairwise(runs):
        assert (one.block + one.length, one.row + one.length) != other[:2]


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 50))
def test_neighbours_are_one_run(block: int, row: int, length: int) -> None:
    blocks, rows = range(block, block + length), range(row, row + length)
    assert list(runs_of(blocks, rows)) == [(block, row, length)]
