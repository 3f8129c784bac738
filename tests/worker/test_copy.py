"""A compiled copy on the CPU does what a copy a block does, on the calling thread."""

from __future__ import annotations

import platform
import random
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.worker.copy import CpuCopy
from vllm_ctx_offload.worker.kv_layout import BlockLayout, derive_layout
from vllm_ctx_offload.worker.streaming import page_copier


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


@st.composite
def sizes_of_layers(draw: st.DrawFn) -> list[int]:
    """Sizes of pages, of which neighbours are often alike."""
    sizes = st.sampled_from([1, 8, 24, 100, 4096, 40_001])
    runs = draw(st.lists(st.tuples(sizes, st.integers(1, 4)), min_size=1, max_size=3))
    return [size for size, count in runs for _ in range(count)]


@settings(deadline=None, max_examples=100)
@given(
    sizes=sizes_of_layers(),
    num_parts=st.sampled_from([1, 2]),
    order=st.sampled_from(["up", "down", "shuffled"]),
    gap=st.sampled_from([0, 8]),
    count=st.integers(0, 12),
    neighbours=st.sampled_from([0.0, 0.5, 1.0]),
    to_host=st.booleans(),
    rng=st.randoms(use_true_random=False),
)
def test_a_batched_copy_equals_a_copy_a_block(
    *,
    sizes: list[int],
    num_parts: int,
    order: str,
    gap: int,
    count: int,
    neighbours: float,
    to_host: bool,
    rng: random.Random,
) -> None:
    """Wherever the layers lie in memory, and whatever lies between them stays."""
    num_blocks, num_rows = 13, 15
    lengths = [num_parts * num_blocks * size + gap for size in sizes]
    places = list(range(len(sizes)))
    if order == "shuffled":
        rng.shuffle(places)
    memory = noise(sum(lengths))
    mirror = memory.clone()

    def layout_on(flat: torch.Tensor) -> BlockLayout:
        caches, start = {}, 0
        for layer in places[::-1] if order == "down" else places:
            end = start + lengths[layer] - gap
            view = flat[start:end].view(num_parts, num_blocks, sizes[layer])
            caches[layer] = view
            start += lengths[layer]
        return derive_layout({f"l{i}": caches[i] for i in sorted(caches)}, num_blocks)

    layout = layout_on(memory)
    pool = noise(num_rows, layout.bytes_per_block)
    mirror_pool = pool.clone()
    block_ids = scattered(rng, count, num_blocks, neighbours)
    rows = scattered(rng, count, num_rows, neighbours)

    CpuCopy(layout, pool)(block_ids, rows, to_host=to_host)

    naive(layout_on(mirror), mirror_pool, block_ids, rows, to_host=to_host)
    assert torch.equal(pool, mirror_pool)
    assert torch.equal(memory, mirror)


class Recorder(TorchDispatchMode):
    """Notes the operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("to_host", [True, False])
def test_nothing_is_asked_of_torch_which_has_the_models_threads(
    *, to_host: bool
) -> None:
    filled = torch.full((20, 300_000), int(to_host), dtype=torch.uint8)
    pool = torch.ones_like(filled) - filled
    copy = CpuCopy(derive_layout({"l": filled}, 20), pool)
    with Recorder() as recorder:
        copy(range(20), range(20), to_host=to_host)
    assert recorder.names == []
    assert torch.equal(pool, filled)
    assert pool.all()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="has other instructions")
def test_pages_are_written_past_the_caches() -> None:
    (assembly,) = page_copier().inspect_asm().values()
    assert "movnt" in assembly
    assert "fence" in assembly


def test_what_is_loaded_does_not_keep_the_next_engine_from_starting() -> None:
    """vLLM before 0.34 takes what all objects of all modules have for a dictionary."""
    code = (
        "import sys\n"
        "from vllm_ctx_offload.worker.streaming import page_copier\n"
        "page_copier()\n"
        "for module in list(sys.modules.values()):\n"
        "    for value in list(getattr(module, '__dict__', {}).values()):\n"
        "        if hasattr(value, '__dict__'):\n"
        "            vars(value).get('kernel')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_numba_the_start_ends_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(ConfigError, match="run 'pip install numba'"):
        page_copier.__wrapped__()
