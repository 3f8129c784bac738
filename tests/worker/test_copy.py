"""Batched copies on the CPU do what a copy a block does, on the calling thread."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_ctx_offload.worker.copy import copy_on_cpu, runs_of
from vllm_ctx_offload.worker.kv_layout import BlockLayout, derive_layout

# From ATen/TensorIterator.h: a loop over fewer elements is not split over threads.
GRAIN_ELEMENTS = 32_768

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


def naive(
    layout: BlockLayout,
    pool: torch.Tensor,
    block_ids: Sequence[int],
    rows: Sequence[int],
    *,
    to_host: bool,
) -> None:
    for block, row in zip(block_ids, rows, strict=True):
        for segment in layout.segments:
            end = segment.offset + segment.num_bytes
            on_host = pool[row, segment.offset : end].view(layout.word)
            on_device = segment.view[block]
            if to_host:
                on_host.copy_(on_device)
            else:
                on_device.copy_(on_host)


def noise(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8).random_()


def scattered(
    rng: random.Random, count: int, size: int, neighbours: float
) -> list[int]:
    """Returns distinct numbers below `size`, some of them in runs."""
    free = set(range(size))
    taken: list[int] = []
    while len(taken) < count:
        following = taken[-1] + 1 if taken else -1
        if following not in free or rng.random() > neighbours:
            following = rng.choice(sorted(free))
        taken.append(following)
        free.remove(following)
    return taken


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(
        st.sampled_from([1, 8, 24, 100, 4095, 4096, 40_001, 300_000]),
        min_size=1,
        max_size=3,
    ),
    count=st.integers(0, 12),
    neighbours=st.sampled_from([0.0, 0.5, 1.0]),
    to_host=st.booleans(),
    rng=st.randoms(use_true_random=False),
)
def test_a_batched_copy_equals_a_copy_a_block(
    sizes: list[int],
    count: int,
    neighbours: float,
    to_host: bool,
    rng: random.Random,
) -> None:
    num_blocks, num_rows = 13, 15
    caches = {f"l{i}": noise(num_blocks, 1, size) for i, size in enumerate(sizes)}
    mirrors = {name: cache.clone() for name, cache in caches.items()}
    layout = derive_layout(caches, num_blocks)
    pool = noise(num_rows, layout.bytes_per_block)
    mirror_pool = pool.clone()
    block_ids = scattered(rng, count, num_blocks, neighbours)
    rows = scattered(rng, count, num_rows, neighbours)

    copy_on_cpu(layout, pool, block_ids, rows, to_host=to_host)

    naive(
        derive_layout(mirrors, num_blocks),
        mirror_pool,
        block_ids,
        rows,
        to_host=to_host,
    )
    assert torch.equal(pool, mirror_pool)
    for name, cache in caches.items():
        assert torch.equal(cache, mirrors[name])


class Recorder(TorchDispatchMode):
    """Notes the largest tensor that each operation writes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[str, int] = {}

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in {"copy_", "index_select", "index_copy_"}:
            # Of `index_copy_` the source counts, not the whole tensor it goes into.
            moved = args[3] if name == "index_copy_" else result
            assert isinstance(moved, torch.Tensor)
            self.sizes[name] = max(self.sizes.get(name, 0), moved.numel())
        return result


BACKWARDS, SHUFFLED, RUNS = "backwards", "shuffled", "runs"
INDEXED = {"index_select", "index_copy_"}


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize(
    ("block_bytes", "blocks_are", "rows_are", "stored_by", "loaded_by"),
    [
        (64, SHUFFLED, SHUFFLED, INDEXED, INDEXED),
        (2048, SHUFFLED, SHUFFLED, INDEXED, INDEXED),
        (4096, SHUFFLED, SHUFFLED, set(), set()),
        # Slots are neighbours, blocks are not: straight, without a temporary.
        (64, BACKWARDS, RUNS, {"index_select"}, set()),
        (65_536, BACKWARDS, RUNS, {"index_select"}, set()),
        (2048, RUNS, BACKWARDS, set(), {"index_select"}),
        (64, RUNS, RUNS, set(), set()),
        (96 * 1024, RUNS, RUNS, set(), set()),
        (32_768 * 8, RUNS, RUNS, set(), set()),
        (32_767 * 8, BACKWARDS, RUNS, {"index_select"}, set()),
        (32_768 * 8, BACKWARDS, RUNS, set(), set()),
        (32_768 * 24 + 8, SHUFFLED, SHUFFLED, set(), set()),
    ],
)
def test_no_operation_is_large_enough_for_the_models_threads(
    *,
    block_bytes: int,
    blocks_are: str,
    rows_are: str,
    stored_by: set[str],
    loaded_by: set[str],
    to_host: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    num_blocks = 600 if block_bytes < 100_000 else 20
    filled = torch.full((num_blocks, block_bytes), int(to_host), dtype=torch.uint8)
    caches = {"l": filled}
    layout = derive_layout(caches, num_blocks)
    pool = torch.ones_like(filled) - filled
    order = {RUNS: list(range(num_blocks)), BACKWARDS: list(range(num_blocks))[::-1]}
    order[SHUFFLED] = [*order[RUNS][1::2], *order[RUNS][::2]]
    block_ids = order[blocks_are]
    rows = order[rows_are]
    if blocks_are == rows_are == SHUFFLED:
        rows = rows[::-1]
    with Recorder() as recorder:
        copy_on_cpu(layout, pool, block_ids, rows, to_host=to_host)
    assert set(recorder.sizes) == (stored_by if to_host else loaded_by)
    assert max(recorder.sizes.values(), default=0) < GRAIN_ELEMENTS
    stored = pool if to_host else caches["l"]
    assert torch.equal(stored, torch.ones_like(stored))
