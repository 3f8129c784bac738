"""Where blocks lie, and that they survive the way to the host and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worker.conftest import MakeTransfer
from worker.layouts import (
    CASE_IDS,
    CASES,
    NUM_BLOCKS,
    Case,
    build,
    copied,
    fill_with_noise,
    storages_of,
)

from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.messages import TransferJob
from vllm_ctx_offload.worker.kv_layout import derive_layout
from vllm_ctx_offload.worker.transfer import Transfer

all_cases = pytest.mark.parametrize(("layout", "dtype"), CASES, ids=CASE_IDS)


def run(transfer: Transfer, job: TransferJob, *, to_host: bool) -> None:
    transfer.submit(job, to_host=to_host)
    (result,) = transfer.poll(60)
    assert result.ok


@all_cases
def test_blocks_come_back_and_nothing_else_changes(
    layout: str, dtype: torch.dtype, make_transfer: MakeTransfer
) -> None:
    case = build(layout, dtype)
    found = derive_layout(case.caches, case.num_blocks)
    pool = torch.zeros((9, found.bytes_per_block), dtype=torch.uint8)
    transfer = make_transfer(found, pool)
    sources, targets = (11, 3, 4, 5, 0), (1, 6, 7, 8, 10)
    rows = (8, 2, 3, 4, 6)
    expected = copied(case, list(zip(sources, targets, strict=True)))
    before = {key: one.clone() for key, one in storages_of(case).items()}

    run(transfer, TransferJob(0, "r", sources, rows), to_host=True)

    unused = [row for row in range(9) if row not in rows]
    assert not pool[unused].any()
    for key, storage in storages_of(case).items():
        assert torch.equal(storage, before[key]), "a store changed the cache"
    kept = pool.clone()

    run(transfer, TransferJob(1, "r", targets, rows), to_host=False)

    for key, storage in storages_of(case).items():
        assert torch.equal(storage, expected[key])
    assert torch.equal(pool, kept)


@all_cases
def test_a_row_holds_the_bytes_of_one_block_and_no_more(
    layout: str, dtype: torch.dtype
) -> None:
    case = build(layout, dtype)
    found = derive_layout(case.caches, case.num_blocks)
    assert found.bytes_per_block == case.bytes_per_block()
    offsets = [segment.offset for segment in found.segments]
    ends = [segment.offset + segment.num_bytes for segment in found.segments]
    assert [*offsets, found.bytes_per_block] == [0, *ends]


def test_neighbouring_layers_and_keys_are_parts_of_their_own() -> None:
    found = derive_layout(build("key_and_value_first", torch.bfloat16).caches, 12)
    assert len(found.segments) == 2 * 3
    found = derive_layout(build("block_first", torch.bfloat16).caches, 12)
    assert len(found.segments) == 3


def test_layers_that_share_a_tensor_are_copied_once() -> None:
    alone = derive_layout(build("block_first", torch.uint8).caches, NUM_BLOCKS)
    shared = derive_layout(build("shared", torch.uint8).caches, NUM_BLOCKS)
    assert shared.bytes_per_block == alone.bytes_per_block


@pytest.mark.parametrize(
    ("words", "dtype"),
    [(8, torch.int64), (12, torch.int32), (6, torch.int16), (7, torch.uint8)],
)
def test_the_widest_word_that_fits_is_taken(words: int, dtype: torch.dtype) -> None:
    cache = torch.zeros((8, words), dtype=torch.uint8)
    assert derive_layout({"l": cache}, 8).word is dtype


def test_a_storage_that_itself_begins_at_an_odd_place_is_understood() -> None:
    # The address is a multiple of eight, the offset into the storage is not.
    memory = bytearray(8 * 64 + 16)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % 8
    base = torch.frombuffer(memory, dtype=torch.uint8, offset=start + 4)
    cache = base[4 : 4 + 8 * 64].view(8, 64)
    assert cache.data_ptr() % 8 == 0
    assert cache.storage_offset() % 8 == 4
    found = derive_layout({"l": cache}, 8)
    assert found.bytes_per_block == 64


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


UNKNOWN = {
    "no dimension counts blocks": (zeros(7, 16, 3, 8), 12),
    "fewer blocks than vLLM has": (zeros(6, 16, 5, 8), 12),
    "a gap inside a block": (zeros(12, 16, 3, 16)[..., :8], 12),
    "kernel blocks of padded pages": (zeros(24, 70)[:, :64], 12),
    "keys and values, or two blocks": (zeros(2, 2, 16, 3, 8), 2),
    "kernel blocks, or as many heads as blocks": (zeros(16, 2, 4, 8, 24), 8),
    "kernel blocks, or two heads": (zeros(4, 2, 3, 5), 2),
    "as many layers as blocks": (zeros(24, 12, 2, 4, 8), 12),
    "one row for all tokens": (zeros(12, 1, 8).expand(12, 4, 8), 12),
    "blocks that overlap": (
        zeros(4096).as_strided((12, 4, 16), (32, 16, 1)),
        12,
    ),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_an_unknown_layout_is_refused_by_the_layers_name(what: str) -> None:
    tensor, num_blocks = UNKNOWN[what]
    known = zeros(num_blocks, 5, 7)
    with pytest.raises(ConfigError) as caught:
        derive_layout({"known": known, "model.layers.7.attn": tensor}, num_blocks)
    message = str(caught.value)
    assert "'model.layers.7.attn'" in message
    assert str(tuple(tensor.shape)) in message
    assert message.endswith(".")
    assert ". " not in message


def test_no_tensors_at_all_are_refused() -> None:
    with pytest.raises(ConfigError, match="registered no KV cache tensor"):
        derive_layout({}, NUM_BLOCKS)


@st.composite
def permuted_caches(draw: st.DrawFn) -> Case:
    """Any order in memory of blocks, keys and values, tokens, heads and channels.

    What lies outside the blocks is keys and values or heads, as in the layouts that
    exist, and there are more blocks than either.
    """
    sizes = {
        "kv": 2,
        "block": draw(st.integers(7, 20)),
        "head": draw(st.integers(1, 5)),
    }
    sizes |= {"token": draw(st.integers(1, 21)), "channel": draw(st.integers(1, 21))}
    outside = draw(st.sets(st.sampled_from(["kv", "head"])))
    inside = sorted(set(sizes) - outside - {"block"})
    order = [*sorted(outside), "block", *draw(st.permutations(inside))]
    seen = draw(st.permutations(order))
    kernel_blocks = draw(st.integers(1, 3))
    physical = [
        size * kernel_blocks if name == "block" else size
        for name, size in ((name, sizes[name]) for name in order)
    ]
    dtype = draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]))
    tensor = torch.zeros(physical, dtype=dtype).permute([order.index(d) for d in seen])
    return Case({"l": tensor}, seen.index("block"), sizes["block"], kernel_blocks)


@settings(deadline=None)
@given(permuted_caches())
def test_any_order_in_memory_survives_or_is_refused(case: Case) -> None:
    fill_with_noise(case)
    try:
        found = derive_layout(case.caches, case.num_blocks)
    except ConfigError:
        # Only where another dimension could be the one that counts the blocks.
        tensor = case.caches["l"]
        sizes = [s for d, s in enumerate(tensor.shape) if d != case.axis]
        assert any(size % case.num_blocks == 0 for size in sizes)
        return
    blocks = torch.tensor([case.num_blocks - 1, 0])
    expected = copied(case, [(case.num_blocks - 1, 0)])
    for segment in found.segments:
        segment.view[blocks[1]] = segment.view[blocks[0]].clone()
    for key, storage in storages_of(case).items():
        assert torch.equal(storage, expected[key])
