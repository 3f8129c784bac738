"""The round trip at the start finds layouts that were misunderstood."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from worker.conftest import MakeTransfer
from worker.layouts import CASE_IDS, CASES, NUM_BLOCKS, Case, build, storages_of

from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.messages import TransferJob
from vllm_ctx_offload.worker.cpu_transfer import CpuTransfer
from vllm_ctx_offload.worker.kv_layout import BlockLayout, Segment, derive_layout
from vllm_ctx_offload.worker.proof import prove_layout


def prove(case: Case, layout: BlockLayout, make_transfer: MakeTransfer) -> None:
    pool = torch.zeros((2, layout.bytes_per_block), dtype=torch.uint8)
    prove_layout(make_transfer(layout, pool), case.caches, case.num_blocks)


@pytest.mark.parametrize(("layout", "dtype"), CASES, ids=CASE_IDS)
def test_a_layout_that_is_understood_passes_and_the_cache_is_as_it_was(
    layout: str, dtype: torch.dtype, make_transfer: MakeTransfer
) -> None:
    case = build(layout, dtype)
    before = {key: one.clone() for key, one in storages_of(case).items()}
    prove(case, derive_layout(case.caches, case.num_blocks), make_transfer)
    for key, storage in storages_of(case).items():
        assert torch.equal(storage, before[key])


Mutation = Callable[[torch.Tensor], torch.Tensor]


def strided(size: int, step: int, start: int) -> Mutation:
    """Changes the words of a block, the stride between blocks, and the beginning."""

    def mutate(view: torch.Tensor) -> torch.Tensor:
        # The first part of several in one storage: it stays in bounds.
        return view.as_strided(
            (NUM_BLOCKS, view.shape[1] + size),
            (view.stride(0) + step, 1),
            view.storage_offset() + start,
        )

    return mutate


MISTAKES: dict[str, Mutation] = {
    "too short": strided(-1, 0, 0),
    "too long": strided(1, 0, 0),
    "stride too small": strided(0, -1, 0),
    "stride too large": strided(0, 1, 0),
    "begins late": strided(0, 0, 1),
    "in another order": lambda view: view.roll(1, 0),
    "another memory": torch.clone,
}


def misunderstood(case: Case, mistake: Mutation) -> BlockLayout:
    layout = derive_layout(case.caches, case.num_blocks)
    first, *others = layout.segments
    wrong = replace(first, view=mistake(first.view))
    shift = wrong.num_bytes - first.num_bytes
    moved = [replace(other, offset=other.offset + shift) for other in others]
    return replace(layout, segments=(wrong, *moved))


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("name", ["key_and_value_first", "layer_outermost"])
def test_a_misunderstood_layout_is_refused_by_the_layers_name(
    name: str, mistake: str, make_transfer: MakeTransfer
) -> None:
    case = build(name, torch.uint8)
    with pytest.raises(ConfigError, match=r"'l\d' did not survive"):
        prove(case, misunderstood(case, MISTAKES[mistake]), make_transfer)


def swapped(segments: list[Segment]) -> list[Segment]:
    """Takes one layer twice, and another never."""
    segments[1] = replace(segments[1], view=segments[0].view)
    return segments


def left_out(segments: list[Segment]) -> list[Segment]:
    return segments[:-1]


def overlapping(segments: list[Segment]) -> list[Segment]:
    """Lets two layers have the same bytes of a row."""
    segments[1] = replace(segments[1], offset=segments[0].offset)
    return segments


@pytest.mark.parametrize("mistake", [swapped, left_out, overlapping])
def test_a_layer_that_is_mixed_up_is_refused(
    mistake: Callable[[list[Segment]], list[Segment]], make_transfer: MakeTransfer
) -> None:
    case = build("block_first", torch.bfloat16)
    layout = derive_layout(case.caches, case.num_blocks)
    segments = tuple(mistake(list(layout.segments)))
    with pytest.raises(ConfigError, match="did not survive"):
        prove(case, replace(layout, segments=segments), make_transfer)


def test_the_blocks_used_are_restored_when_the_proof_fails(
    make_transfer: MakeTransfer,
) -> None:
    case = build("block_first", torch.bfloat16)
    before = {key: one.clone() for key, one in storages_of(case).items()}
    layout = misunderstood(case, MISTAKES["another memory"])
    with pytest.raises(ConfigError):
        prove(case, layout, make_transfer)
    for key, storage in storages_of(case).items():
        assert torch.equal(storage, before[key])


def test_a_copy_that_fails_stops_the_start_in_one_sentence() -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no copy today")

    case = build("latent", torch.bfloat16)
    layout = derive_layout(case.caches, NUM_BLOCKS)
    transfer = CpuTransfer(layout, torch.zeros(2, 2, dtype=torch.uint8), broken)
    with pytest.raises(ConfigError, match="first copy between the KV cache and host"):
        prove_layout(transfer, case.caches, NUM_BLOCKS)
    transfer.close()


def test_a_cache_too_small_to_prove_is_left_alone() -> None:
    class Untouched:
        def submit(self, job: TransferJob, *, to_host: bool) -> None:
            raise AssertionError("no copy was to be made")

    cache = torch.zeros((3, 5, 7))
    prove_layout(Untouched(), {"l": cache}, 3)  # type: ignore[arg-type]
