"""The cache tensors that vLLM hands to a worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_ctx_offload.adapters.releases import reserves_blocks

if TYPE_CHECKING:
    import torch

    Caches = Mapping[str, torch.Tensor | Sequence[torch.Tensor]]

__all__ = ["committed_part"]


def committed_part(kv_caches: Caches, vllm_config: Any, kv_cache_config: Any) -> Caches:
    """Returns the caches up to the last block that there is memory for.

    The extensible KV cache reserves addresses for more blocks than it gets memory for
    in the end. In layouts of which a block is not in one piece, such as with heads
    outside of blocks, tensors keep the shape of all that was reserved. Their first
    dimension counts blocks, or kernel blocks that divide one evenly. Layers that share
    the cache of another have no place of their own, and are left out.
    """
    if not reserves_blocks(vllm_config):
        return kv_caches
    strides = {
        layer: tensor.block_stride
        for tensor in kv_cache_config.kv_cache_tensors
        for layer in tensor.layers
    }
    num_blocks = kv_cache_config.num_blocks

    def cut(tensor: torch.Tensor, stride_bytes: int) -> torch.Tensor:
        kernel_bytes = tensor.stride(0) * tensor.element_size()
        return tensor[: num_blocks * (stride_bytes // kernel_bytes)]

    return {
        layer: [cut(tensor, strides[layer]) for tensor in cache]
        if isinstance(cache, Sequence)
        else cut(cache, strides[layer])
        for layer, cache in kv_caches.items()
        if layer in strides
    }
