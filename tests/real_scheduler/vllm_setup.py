"""Configurations for a real vLLM scheduler without a model."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)

import vllm_ctx_offload

MAX_MODEL_LEN = 2048
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 512,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-5,
    "dtype": "float32",
}


@functools.cache
def _model_config() -> ModelConfig:
    # The file is only read here, while the configuration is made.
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_LLAMA))
        return ModelConfig(
            model=folder,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
        )


def make_kv_cache_config(
    num_blocks: int, block_size: int, windows: Sequence[int | None] = (None,)
) -> KVCacheConfig:
    """Returns groups of one layer each, of sliding or, where None, full attention.

    As in vLLM the layers of different groups share a tensor, and blocks one pool.
    """
    shape: dict[str, Any] = {
        "block_size": block_size,
        "num_kv_heads": 2,
        "head_size": 32,
        "dtype": torch.float32,
    }
    specs: list[AttentionSpec] = [
        FullAttentionSpec(**shape)
        if window is None
        else SlidingWindowSpec(**shape, sliding_window=window)
        for window in windows
    ]
    names = ["layer", *(f"layer{index}" for index in range(1, len(specs)))]
    page_bytes = specs[0].page_size_bytes
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[
            KVCacheTensor(
                size=page_bytes * num_blocks,
                layers=names,
                layer_stride=page_bytes * num_blocks,
                block_stride=page_bytes,
            )
        ],
        kv_cache_groups=[
            KVCacheGroupSpec([name], spec)
            for name, spec in zip(names, specs, strict=True)
        ],
    )


def make_vllm_config(
    *,
    kv_transfer: dict[str, Any],
    block_size: int = 32,
    num_blocks: int = 64,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 512,
    async_scheduling: bool = False,
    num_workers: int = 1,
    num_drafts: int = 0,
    prefix_caching: bool = True,
) -> VllmConfig:
    vllm_ctx_offload.register()
    speculative = None
    if num_drafts:
        speculative = SpeculativeConfig(
            method="ngram", num_speculative_tokens=num_drafts, prompt_lookup_max=2
        )
    vllm_config = VllmConfig(
        model_config=_model_config(),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
        ),
        cache_config=CacheConfig(
            block_size=block_size,
            gpu_memory_utilization=0.3,
            enable_prefix_caching=prefix_caching,
        ),
        kv_transfer_config=KVTransferConfig(**kv_transfer),
        device_config=DeviceConfig("cpu"),
        parallel_config=ParallelConfig(tensor_parallel_size=num_workers),
        speculative_config=speculative,
    )
    # Set last: the CPU platform turns it off for the executor it would pick.
    vllm_config.scheduler_config.async_scheduling = async_scheduling
    vllm_config.cache_config.num_gpu_blocks = num_blocks
    return vllm_config
