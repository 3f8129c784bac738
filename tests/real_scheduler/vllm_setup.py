"""Configurations for a real vLLM scheduler without a model."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
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
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import (
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.structured_output import StructuredOutputManager

import vllm_ctx_offload

MAX_MODEL_LEN = 2048
HEAD_SIZE = 32
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


class Group(NamedTuple):
    """A group of one layer, the block of which holds some times as many tokens."""

    window: int | None = None  # None: full attention, or a state
    times: int = 1
    recurrent: bool = False

    def spec(self, block_size: int, num_drafts: int) -> KVCacheSpec:
        if self.recurrent:
            return MambaSpec(
                block_size=block_size * self.times,
                shapes=((3, 16), (2, 32, 8)),
                dtypes=(torch.bfloat16, torch.float32),
                page_size_padded=page_size(block_size),
                mamba_cache_mode="align",
                num_speculative_blocks=num_drafts,
            )
        shape: dict[str, Any] = {
            "block_size": block_size * self.times,
            "num_kv_heads": 2,
            "head_size": HEAD_SIZE // self.times,
            "page_size_padded": page_size(block_size),
            "dtype": torch.float32,
        }
        if self.window is None:
            return FullAttentionSpec(**shape)
        return SlidingWindowSpec(**shape, sliding_window=self.window)


STATE = Group(recurrent=True)
Groups = Sequence[int | Group | None]  # windows, or None


def page_size(block_size: int) -> int:
    return block_size * 2 * 2 * HEAD_SIZE * 4  # K and V, heads, float32


def make_kv_cache_config(
    num_blocks: int,
    block_size: int,
    groups: Groups = (None,),
    num_drafts: int = 0,
) -> KVCacheConfig:
    """Returns groups of one layer each.

    As in vLLM the layers of different groups share a tensor, and blocks one pool.
    """
    specs = [
        (g if isinstance(g, Group) else Group(g)).spec(block_size, num_drafts)
        for g in groups
    ]
    names = ["layer", *(f"layer{index}" for index in range(1, len(specs)))]
    page_bytes = page_size(block_size)
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
    tokens_per_hash: int | None = None,
    drafts_in_hash: bool = False,
    max_inflight_loads: int | None = None,
) -> VllmConfig:
    vllm_ctx_offload.register()
    speculative = None
    if num_drafts:
        speculative = SpeculativeConfig(
            method="ngram", num_speculative_tokens=num_drafts, prompt_lookup_max=2
        )
        # From 0.34 on, for EAGLE and its like.
        speculative.disable_lookahead_block_hashes = not drafts_in_hash
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
            prefix_match_unit=tokens_per_hash,
        ),
        kv_transfer_config=KVTransferConfig(**kv_transfer),
        device_config=DeviceConfig("cpu"),
        parallel_config=ParallelConfig(tensor_parallel_size=num_workers),
        speculative_config=speculative,
    )
    # Set last: the CPU platform turns it off for the executor it would pick.
    vllm_config.scheduler_config.async_scheduling = async_scheduling
    vllm_config.cache_config.num_gpu_blocks = num_blocks
    # From 0.34 on.
    vllm_config.scheduler_config.max_num_inflight_kv_loads = max_inflight_loads
    # Set by models that have states; of no meaning to others.
    vllm_config.cache_config.mamba_cache_mode = "align"
    return vllm_config


def make_scheduler(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> Scheduler:
    scheduler_block, hash_size = resolve_kv_cache_block_sizes(
        kv_cache_config, vllm_config
    )
    is_async = vllm_config.scheduler_config.async_scheduling
    return (AsyncScheduler if is_async else Scheduler)(
        vllm_config=vllm_config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=scheduler_block,
        hash_block_size=hash_size,
        log_stats=True,
    )


# ---- what differs between the releases that these tests run on


def index_of(request_ids: Iterable[str]) -> dict[str, Any]:
    """Returns the arguments that tell a ModelRunnerOutput where each request is."""
    if "req_id_to_index" not in ModelRunnerOutput.__dataclass_fields__:
        return {}  # from 0.34 on the order says so
    return {"req_id_to_index": {name: i for i, name in enumerate(request_ids)}}


def resumed_in(output: SchedulerOutput) -> set[str]:
    """Returns the known requests that come back; from 0.34 on they come as new."""
    return getattr(output.scheduled_cached_reqs, "resumed_req_ids", set())


def new_request(request_id: str, block_ids: list[int], computed: int) -> NewRequestData:
    tokens = [1, 2, 3]
    prefill: dict[str, Any] = {"prefill_token_ids": tokens}  # needed from 0.34 on
    return NewRequestData(
        req_id=request_id,
        prompt_token_ids=tokens,
        mm_features=[],
        sampling_params=None,
        pooling_params=None,
        block_ids=(block_ids,),
        num_computed_tokens=computed,
        lora_request=None,
        **prefill,
    )


def known_requests(
    resumed: Collection[str] = (), **requests: tuple[list[int] | None, int]
) -> CachedRequestData:
    """Takes request id -> (new block ids, computed tokens)."""
    known = CachedRequestData.make_empty()
    known.req_ids = list(requests)
    known.new_block_ids = [None if b is None else (b,) for b, _ in requests.values()]
    known.num_computed_tokens = [computed for _, computed in requests.values()]
    if NAMES_RESUMED:
        known.resumed_req_ids = set(resumed)
    return known


# Up to 0.33 the first model runner is told which known requests come back.
NAMES_RESUMED = hasattr(CachedRequestData.make_empty(), "resumed_req_ids")


def as_eagle(monkeypatch: pytest.MonkeyPatch, lookahead: int = 1) -> None:
    """Makes n-grams pass for a drafter of the kind of EAGLE, which needs a model."""
    monkeypatch.setattr(SpeculativeConfig, "use_eagle", lambda self: True)
    name = "num_prefill_lookahead_tokens"  # told from 0.31 on
    if hasattr(VllmConfig, name):
        monkeypatch.setattr(VllmConfig, name, property(lambda self: lookahead))
