"""Where the bytes of one block lie in the cache tensors, read off shape and stride."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from vllm_ctx_offload.errors import ConfigError

__all__ = ["BlockLayout", "Segment", "block_axis", "derive_layout", "named_tensors"]

# The widest dtype first: copies of wide elements are several times faster.
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of every block that is contiguous in device memory.

    Attributes:
        view: shape [num_blocks, words], any stride between blocks, on the device; the
            segment of block b is view[b].
        offset: where the segment begins in a row of the host pool, in bytes.
    """

    view: torch.Tensor
    offset: int

    @property
    def num_bytes(self) -> int:
        return self.view.shape[1] * self.view.element_size()


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """All segments of a block over all layers; a host row holds them in this order."""

    segments: tuple[Segment, ...]
    num_blocks: int
    word: torch.dtype  # the element type of every view

    @property
    def bytes_per_block(self) -> int:
        return sum(segment.num_bytes for segment in self.segments)

    @property
    def device(self) -> torch.device:
        return self.segments[0].view.device


def derive_layout(
    kv_caches: Mapping[str, torch.Tensor], num_blocks: int
) -> BlockLayout:
    """Returns the layout of all cache tensors.

    Memory that layers share is taken once, also where groups cut their blocks up
    differently. Padding between blocks is left out.

    Args:
        kv_caches: layer name -> cache tensor of any shape and stride, of which one
            dimension counts blocks, or kernel blocks that divide a block evenly.
        num_blocks: vLLM's number of blocks.

    Raises:
        ConfigError: a tensor's layout is not understood; names the layer.
    """
    views = _united(
        itertools.chain.from_iterable(
            _byte_views(name, tensor, num_blocks) for name, tensor in kv_caches.items()
        )
    )
    if not views:
        raise ConfigError(
            "CtxOffloadConnector: vLLM registered no KV cache tensor, so there is "
            "nothing to offload; use a model with attention layers."
        )
    word = _widest_word(views)
    segments = []
    offset = 0
    for view in views:
        segments.append(Segment(view.view(word), offset))
        offset += view.shape[1]
    return BlockLayout(tuple(segments), num_blocks, word)


def _united(views: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns views of the same bytes, of which no two overlap within a block."""
    alike: dict[tuple[int, int], list[torch.Tensor]] = {}
    for view in views:
        place = view.untyped_storage().data_ptr(), view.stride(0)
        alike.setdefault(place, []).append(view)
    united: list[torch.Tensor] = []
    for (_, stride), parts in alike.items():
        end = -1
        for part in sorted(parts, key=lambda part: int(part.storage_offset())):
            start = int(part.storage_offset())
            part_end = start + part.shape[1]
            if start < end:
                start = int(united.pop().storage_offset())
                part_end = max(end, part_end)
            size = (part.shape[0], part_end - start)
            united.append(part.as_strided(size, (stride, 1), start))
            end = part_end
    return united


def named_tensors(
    kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """Returns the caches with one name for each tensor of layers that have several."""
    named: dict[str, torch.Tensor] = {}
    for name, cache in kv_caches.items():
        if isinstance(cache, torch.Tensor):
            named[name] = cache
        else:
            named |= {f"{name}[{index}]": state for index, state in enumerate(cache)}
    return named


def _byte_views(name: str, tensor: torch.Tensor, num_blocks: int) -> list[torch.Tensor]:
    """Returns uint8 views [num_blocks, bytes], one for each contiguous part."""
    axis = block_axis(name, tensor, num_blocks)
    item = tensor.element_size()
    per_block = tensor.shape[axis] // num_blocks  # kernel blocks in one block
    axis_stride = tensor.stride(axis)
    dims = [
        (tensor.stride(dim), size)
        for dim, size in enumerate(tensor.shape)
        if dim != axis and size > 1
    ]
    inner = sorted(dim for dim in dims if dim[0] < axis_stride)
    outer = [dim for dim in dims if dim[0] >= axis_stride]
    length = _dense_length(name, tensor, inner)
    if length > axis_stride and tensor.shape[axis] > 1:
        raise _unknown(name, tensor, num_blocks, "its blocks overlap")
    if per_block > 1:
        if length != axis_stride:
            raise _unknown(name, tensor, num_blocks, "its kernel blocks are padded")
        length *= per_block
    storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        tensor.untyped_storage()
    )
    stride = axis_stride * per_block
    return [
        storage.as_strided(
            (num_blocks, length * item),
            (stride * item, 1),
            (tensor.storage_offset() + start) * item,
        )
        for start in _starts(outer)
    ]


def _starts(outer: Sequence[tuple[int, int]]) -> list[int]:
    """Returns the element offset of each part, such as of K and of V."""
    ranges = (range(0, stride * size, stride) for stride, size in outer)
    return sorted(sum(steps) for steps in itertools.product(*ranges))


def _dense_length(
    name: str, tensor: torch.Tensor, inner: Sequence[tuple[int, int]]
) -> int:
    """Returns the elements of a block's part, which must lie without a gap."""
    length = 1
    for stride, size in inner:
        if stride != length:
            raise _unknown(name, tensor, 0, "the inside of a block has gaps")
        length *= size
    return length


def block_axis(name: str, tensor: torch.Tensor, num_blocks: int) -> int:
    """Returns the dimension that counts blocks.

    Of several of a fitting size it is the first, which also has to be the outermost in
    memory: what lies inside a block (heads, tokens, channels) always has smaller
    strides. Keys and values or heads can lie outside; where their number could be
    one of blocks, or a number inside is that of the blocks while this one is not, a
    wrong guess would serve wrong data, so it is refused.
    """
    fitting = [
        dim for dim, size in enumerate(tensor.shape) if size and size % num_blocks == 0
    ]
    if not fitting:
        raise _unknown(name, tensor, num_blocks, "no dimension counts its blocks")
    first, *others = fitting
    if others and (
        num_blocks <= 2
        or max(fitting, key=tensor.stride) != first
        or (
            tensor.shape[first] != num_blocks
            and num_blocks in (tensor.shape[dim] for dim in others)
        )
    ):
        raise _unknown(name, tensor, num_blocks, "its dimensions are ambiguous")
    return first


def _unknown(name: str, tensor: torch.Tensor, num_blocks: int, why: str) -> ConfigError:
    blocks = f" for {num_blocks} blocks" if num_blocks else ""
    return ConfigError(
        f"CtxOffloadConnector: the KV cache of layer '{name}' has the unknown layout "
        f"shape {tuple(tensor.shape)}, stride {tensor.stride()}{blocks}: {why}; "
        "please report it, and serve this model without the connector until then."
    )


def _widest_word(views: Sequence[torch.Tensor]) -> torch.dtype:
    numbers: list[int] = []
    for view in views:
        numbers.extend((view.shape[1], view.stride(0), view.data_ptr()))
        # A storage can begin at an odd address; torch wants both to be aligned.
        numbers.append(int(view.storage_offset()))
    unit = math.gcd(*numbers)
    return next(word for word in _WORDS if unit % word.itemsize == 0)
