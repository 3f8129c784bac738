"""Cache tensors in every layout that the worker claims to understand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

NUM_BLOCKS: Final = 12
BLOCK_SIZE: Final = 4
NUM_HEADS: Final = 3
HEAD_SIZE: Final = 8


@dataclass(frozen=True)
class Case:
    """Cache tensors, and what the layout code has to find out about them."""

    caches: dict[str, torch.Tensor]
    axis: int  # the dimension that counts blocks, in every tensor
    num_blocks: int = NUM_BLOCKS
    kernel_blocks: int = 1  # in one block
    united_bytes: int | None = None  # of a block, where tensors overlap

    def block(self, name: str, index: int) -> torch.Tensor:
        """Returns a block as the model sees it, without the code under test."""
        tensor = self.caches[name]
        return tensor.narrow(self.axis, index * self.kernel_blocks, self.kernel_blocks)

    def on(self, storages: dict[int, torch.Tensor]) -> Case:
        """Returns the same views on other storages, keyed by `storages_of`."""
        return Case(
            {
                name: _view(storages[_key(tensor)], tensor)
                for name, tensor in self.caches.items()
            },
            self.axis,
            self.num_blocks,
            self.kernel_blocks,
            self.united_bytes,
        )

    def bytes_per_block(self) -> int:
        """Returns the bytes of one block, tensors that share memory taken once."""
        if self.united_bytes is not None:
            return self.united_bytes
        seen = {
            (tensor.data_ptr(), tensor.stride()): self.block(name, 0).nbytes
            for name, tensor in self.caches.items()
        }
        return sum(seen.values())


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _view(storage: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return storage.view(like.dtype).as_strided(
        like.shape, like.stride(), like.storage_offset()
    )


def storages_of(case: Case) -> dict[int, torch.Tensor]:
    """Returns all memory below the caches as uint8 tensors, padding included."""
    return {
        _key(tensor): torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
            tensor.untyped_storage()
        )
        for tensor in case.caches.values()
    }


def fill_with_noise(case: Case, seed: int = 0) -> None:
    """Fills all memory below the caches with random bytes."""
    generator = torch.Generator().manual_seed(seed)
    for storage in storages_of(case).values():
        noise = torch.randint(
            0, 256, storage.shape, dtype=torch.uint8, generator=generator
        )
        storage.copy_(noise)


def copied(case: Case, pairs: list[tuple[int, int]]) -> dict[int, torch.Tensor]:
    """Returns the storages as they are once blocks were copied, source to target."""
    storages = {key: one.clone() for key, one in storages_of(case).items()}
    result = case.on(storages)
    for name in case.caches:
        for source, target in pairs:
            result.block(name, target).copy_(case.block(name, source))
    return storages


def _block_first(dtype: torch.dtype, device: str) -> Case:
    shape = (NUM_BLOCKS, 2, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE)
    return Case({f"l{i}": _zeros(shape, dtype, device) for i in range(3)}, axis=0)


def _key_and_value_first(dtype: torch.dtype, device: str) -> Case:
    shape = (2, NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE)
    return Case({f"l{i}": _zeros(shape, dtype, device) for i in range(3)}, axis=1)


def _layer_outermost(dtype: torch.dtype, device: str) -> Case:
    shape = (3, NUM_BLOCKS, 2, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE)
    layers = _zeros(shape, dtype, device)
    return Case({f"l{i}": layers[i] for i in range(3)}, axis=0)


def _block_outermost(dtype: torch.dtype, device: str) -> Case:
    shape = (NUM_BLOCKS, 3, 2, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE)
    layers = _zeros(shape, dtype, device)
    return Case({f"l{i}": layers[:, i] for i in range(3)}, axis=0)


def _all_layers_in_one_tensor(dtype: torch.dtype, device: str) -> Case:
    shape = (3, NUM_BLOCKS, 2, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE)
    return Case({"all": _zeros(shape, dtype, device)}, axis=1)


def _heads_before_tokens(dtype: torch.dtype, device: str) -> Case:
    shape = (2, NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, HEAD_SIZE)
    return Case(
        {f"l{i}": _zeros(shape, dtype, device).transpose(2, 3) for i in range(2)},
        axis=1,
    )


def _tokens_before_heads(dtype: torch.dtype, device: str) -> Case:
    shape = (NUM_BLOCKS, 2, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE)
    return Case(
        {
            f"l{i}": _zeros(shape, dtype, device).permute(1, 0, 3, 2, 4)
            for i in range(2)
        },
        axis=1,
    )


def _heads_outermost(dtype: torch.dtype, device: str) -> Case:
    shape = (NUM_HEADS, NUM_BLOCKS, BLOCK_SIZE, 2 * HEAD_SIZE)
    return Case(
        {f"l{i}": _zeros(shape, dtype, device).transpose(0, 1) for i in range(2)},
        axis=0,
    )


def _latent(dtype: torch.dtype, device: str) -> Case:
    shape = (NUM_BLOCKS, BLOCK_SIZE, 5 * HEAD_SIZE)
    return Case({f"l{i}": _zeros(shape, dtype, device) for i in range(2)}, axis=0)


def _latent_and_small_indexer(dtype: torch.dtype, device: str) -> Case:
    indexer = _zeros((NUM_BLOCKS, BLOCK_SIZE, 33), torch.uint8, device)
    latent = _zeros((NUM_BLOCKS, BLOCK_SIZE, HEAD_SIZE), dtype, device)
    return Case({"latent": latent, "indexer": indexer}, axis=0)


def _padded_pages(dtype: torch.dtype, device: str) -> Case:
    inside = 2 * BLOCK_SIZE * NUM_HEADS * HEAD_SIZE
    pages = {f"l{i}": _zeros((NUM_BLOCKS, inside + 40), dtype, device) for i in (0, 1)}
    shape = (NUM_BLOCKS, 2, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE)
    inner = (inside // 2, NUM_HEADS * HEAD_SIZE, HEAD_SIZE, 1)
    return Case(
        {
            name: page.as_strided(shape, (page.stride(0), *inner))
            for name, page in pages.items()
        },
        axis=0,
    )


def _kernel_blocks(dtype: torch.dtype, device: str) -> Case:
    shape = (NUM_BLOCKS * 4, 2, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE)
    caches = {f"l{i}": _zeros(shape, dtype, device) for i in range(2)}
    return Case(caches, axis=0, kernel_blocks=4)


def _kernel_blocks_behind_keys(dtype: torch.dtype, device: str) -> Case:
    shape = (2, NUM_BLOCKS * 2, NUM_HEADS, BLOCK_SIZE, HEAD_SIZE)
    caches = {f"l{i}": _zeros(shape, dtype, device).transpose(2, 3) for i in (0, 1)}
    return Case(caches, axis=1, kernel_blocks=2)


def _shared(dtype: torch.dtype, device: str) -> Case:
    case = _block_first(dtype, device)
    return Case(
        case.caches | {"l0 again": case.caches["l0"].view_as(case.caches["l0"])}, 0
    )


def _blocks_as_many_as_tokens_and_heads(dtype: torch.dtype, device: str) -> Case:
    shape = (2, NUM_BLOCKS, NUM_BLOCKS, NUM_BLOCKS, HEAD_SIZE)
    return Case({f"l{i}": _zeros(shape, dtype, device) for i in range(2)}, axis=1)


def _beginning_at_an_odd_byte(dtype: torch.dtype, device: str) -> Case:
    item = dtype.itemsize
    row = BLOCK_SIZE * 3 * HEAD_SIZE
    flat = _zeros((NUM_BLOCKS * row + 1,), dtype, device)
    # One element into the storage: no wider word than the cache's own is aligned.
    view = flat[1:].view(NUM_BLOCKS, BLOCK_SIZE, 3 * HEAD_SIZE)
    assert view.data_ptr() % (2 * item)
    return Case({"odd": view}, axis=0)


def _states_beside_attention(dtype: torch.dtype, device: str) -> Case:
    """States of two types share a page and its padding, and the page attention's."""
    shape = (2, NUM_BLOCKS, 2, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE)
    layers = _zeros(shape, dtype, device)
    page = layers[0, 0].nbytes
    caches = {"attention": layers[0]}  # a layer of the other group is all there is
    for index in range(2):
        caches |= _states(f"mamba{index}", layers, page, index * NUM_BLOCKS * page)
    return Case(caches, axis=0, united_bytes=page + 176)


def _states(
    name: str, memory: torch.Tensor, page: int, start: int
) -> dict[str, torch.Tensor]:
    raw = memory.view(torch.uint8).flatten()
    conv = raw.view(torch.bfloat16).as_strided(
        (NUM_BLOCKS, 3, 16), (page // 2, 16, 1), start // 2
    )
    ssm = raw.view(torch.float32).as_strided(
        (NUM_BLOCKS, 2, 5, 2), (page // 4, 10, 2, 1), (start + 96) // 4
    )
    return {f"{name}[0]": conv, f"{name}[1]": ssm}


def _groups_that_cut_a_block_up_differently(dtype: torch.dtype, device: str) -> Case:
    blocks = _zeros((NUM_BLOCKS, 4, BLOCK_SIZE, NUM_HEADS * HEAD_SIZE), dtype, device)
    halves = {"a": blocks[:, :2], "b": blocks[:, 2:]}
    others = {"c": blocks[:, :3], "d": blocks[:, 3:, 1:]}
    return Case(halves | others, axis=0, united_bytes=blocks[0].nbytes)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


LAYOUTS: Final[dict[str, Callable[[torch.dtype, str], Case]]] = {
    build.__name__.strip("_"): build
    for build in (
        _block_first,
        _key_and_value_first,
        _layer_outermost,
        _block_outermost,
        _all_layers_in_one_tensor,
        _heads_before_tokens,
        _tokens_before_heads,
        _heads_outermost,
        _latent,
        _latent_and_small_indexer,
        _padded_pages,
        _kernel_blocks,
        _kernel_blocks_behind_keys,
        _shared,
        _blocks_as_many_as_tokens_and_heads,
        _beginning_at_an_odd_byte,
        _states_beside_attention,
        _groups_that_cut_a_block_up_differently,
    )
}
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float8_e5m2, torch.uint8)
CASES: Final = [(layout, dtype) for layout, dtype in itertools.product(LAYOUTS, DTYPES)]
CASE_IDS: Final = [f"{layout}-{str(dtype)[6:]}" for layout, dtype in CASES]


def build(layout: str, dtype: torch.dtype, device: str = "cpu") -> Case:
    """Returns a layout full of random bytes."""
    case = LAYOUTS[layout](dtype, device)
    fill_with_noise(case)
    return case
