"""Cache tensors of which only a part has memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_ctx_offload.adapters.cache_tensors import committed_part
from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.worker.kv_layout import derive_layout

RESERVED, COMMITTED = 12, 7
HEADS, TOKENS, CONTENT = 2, 16, 8


def config(extensible: bool = True) -> Any:
    return SimpleNamespace(
        cache_config=SimpleNamespace(enable_extensible_kv_cache=extensible)
    )


def placed(block_stride: int, *layers: str) -> Any:
    tensor = SimpleNamespace(layers=list(layers), block_stride=block_stride)
    return SimpleNamespace(num_blocks=COMMITTED, kv_cache_tensors=[tensor])


def heads_outside(kernel_blocks: int = 1) -> torch.Tensor:
    """Returns a cache [blocks, heads, tokens, content] whose heads are outermost."""
    tokens = TOKENS // kernel_blocks
    blocks = RESERVED * kernel_blocks
    cache = torch.arange(HEADS * blocks * tokens * CONTENT, dtype=torch.float32)
    return cache.view(HEADS, blocks, tokens, CONTENT).transpose(0, 1)


@pytest.mark.parametrize("kernel_blocks", [1, 2])
def test_a_block_is_found_where_it_is_in_all_that_is_reserved(
    kernel_blocks: int,
) -> None:
    cache = heads_outside(kernel_blocks)
    kv_cache_config = placed(TOKENS * CONTENT * 4, "layer")
    with pytest.raises(ConfigError, match="no dimension counts its blocks"):
        derive_layout({"layer": cache}, COMMITTED)
    found: Any = committed_part({"layer": cache}, config(), kv_cache_config)
    layout = derive_layout(found, COMMITTED)
    assert layout.bytes_per_block == HEADS * TOKENS * CONTENT * 4
    part = cache[3 * kernel_blocks : 4 * kernel_blocks]
    for head, segment in enumerate(layout.segments):
        block = segment.view[3].view(torch.float32)
        assert torch.equal(block, part[:, head].flatten())


def test_states_of_a_layer_are_cut_each() -> None:
    page = torch.zeros(RESERVED, 64)
    states = [page[:, :16], page[:, 16:48]]
    found = committed_part({"layer": states}, config(), placed(64 * 4, "layer"))
    assert [state.shape[0] for state in found["layer"]] == [COMMITTED, COMMITTED]


def test_a_cache_that_another_layer_has_is_left_out() -> None:
    cache = heads_outside()
    shared = {"layer": cache, "sharing": cache}
    found = committed_part(shared, config(), placed(TOKENS * CONTENT * 4, "layer"))
    assert list(found) == ["layer"]


@pytest.mark.parametrize("vllm_config", [config(extensible=False)])
def test_elsewhere_nothing_is_cut(vllm_config: Any) -> None:
    caches = {"layer": heads_outside(), "sharing": heads_outside()}
    assert committed_part(caches, vllm_config, placed(1, "layer")) is caches
    vllm_config.cache_config = SimpleNamespace()  # up to 0.33 it can't be switched on
    assert committed_part(caches, vllm_config, placed(1, "layer")) is caches
