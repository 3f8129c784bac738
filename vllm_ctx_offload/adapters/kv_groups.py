"""What vLLM's description of a model's KV cache means for us.

Its specs are told by the names of their classes, so that one file less imports vLLM
and a class that a release lacks needs no special case.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

from vllm_ctx_offload.adapters.drafts import draft_lookahead
from vllm_ctx_offload.adapters.releases import (
    added_window_tokens,
    hashes_cover_drafts,
    is_cached,
    lies_elsewhere,
    looks_ahead,
    places_tensors,
    writes_before_hooks,
)
from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.plan import GroupShape, ModelShape, loads_fail_whole

__all__ = ["check_groups", "model_shape"]

# MLA is a kind of full attention.
_SUPPORTED: Final = (
    "FullAttentionSpec",
    "SlidingWindowSpec",
    "ChunkedLocalAttentionSpec",
    "MambaSpec",
)
# Kinds of full attention in name: their tables have holes in the middle, blocks that
# belong to no token, or no KV at all.
_UNSUPPORTED: Final = ("RSWASpec", "SinkFullAttentionSpec", "HiddenStateCacheSpec")


def check_groups(
    model_config: Any, kv_cache_config: Any, *, version: str, recomputes: bool
) -> None:
    """Refuses models whose KV cache can't be offloaded.

    Args:
        model_config: vLLM's.
        kv_cache_config: vLLM's.
        version: of vLLM, for the message.
        recomputes: whether it can recompute a failed load as a whole; then it also
            hands over the states of recurrent layers.

    Raises:
        ConfigError: with the reason and what to do instead.
    """
    groups = kv_cache_config.kv_cache_groups
    specs = [spec for group in groups for spec in _layer_specs(group)]
    kinds = ", ".join(sorted({type(spec).__name__ for spec in specs}))
    # vLLM keeps blocks of some groups in a pool of their own.
    in_one_pool = not any(map(lies_elsewhere, groups))
    if not specs or not all(map(_is_supported, specs)) or not in_one_pool:
        raise ConfigError(
            f"CtxOffloadConnector: this model has {len(groups)} KV cache group(s) of "
            f"{kinds}, but only full, sliding-window and chunked-local attention, MLA "
            "and recurrent layers are supported yet; serve it without the connector."
        )
    if not _has_prefixes(model_config, specs):
        raise ConfigError(
            "CtxOffloadConnector: vLLM caches no prefixes of this model, because its "
            "attention is not causal or its pooling reads all tokens of a prompt, so "
            "nothing can be loaded for it; serve it without the connector."
        )
    recurrent = [spec for spec in specs if _is_a(spec, "MambaSpec")]
    modes = sorted({spec.mamba_cache_mode for spec in recurrent} - {"align"})
    if modes:
        raise ConfigError(
            "CtxOffloadConnector: the states of this model's recurrent layers are kept "
            f"in mode '{modes[0]}', but can be offloaded only where blocks end, in "
            "mode 'align'; set --enable-prefix-caching, and --mamba-cache-mode align "
            "if vLLM knows that option."
        )
    if not recomputes and loads_fail_whole([_group_shape(group) for group in groups]):
        raise ConfigError(
            f"CtxOffloadConnector: this model has {len(groups)} KV cache group(s) of "
            f"{kinds}, and vLLM {version} can recompute a failed load only of one "
            "group of full attention; use a newer vLLM, or try "
            "--disable-hybrid-kv-cache-manager."
        )


def _has_prefixes(model_config: Any, specs: list[Any]) -> bool:
    """Whether the end of a prompt alone may be computed after what was kept.

    Where not, vLLM switches its own prefix caching off, and asks us nevertheless.
    """
    if any(map(looks_ahead, specs)):
        return False
    pooling = model_config.runner_type == "pooling"
    return not pooling or model_config.is_prefix_caching_supported


def _is_a(spec: Any, *names: str) -> bool:
    return any(cls.__name__ in names for cls in type(spec).__mro__)


def _is_supported(spec: Any) -> bool:
    return (
        is_cached(spec) and _is_a(spec, *_SUPPORTED) and not _is_a(spec, *_UNSUPPORTED)
    )


def _layer_specs(group: Any) -> Iterator[Any]:
    """Yields the specs of a group's layers, which may be wrapped in one."""
    per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    if per_layer is None:
        yield group.kv_cache_spec
    else:
        yield from per_layer.values()


def model_shape(vllm_config: Any, kv_cache_config: Any) -> ModelShape:
    """Returns the sizes that vLLM settled on for the model's KV cache."""
    parallel = vllm_config.parallel_config
    groups = tuple(map(_group_shape, kv_cache_config.kv_cache_groups))
    return ModelShape(
        groups=groups,
        # vLLM hashes as many tokens as divide the blocks of all groups, unless it is
        # told to hash less (`resolve_kv_cache_block_sizes`).
        tokens_per_hash=(
            vllm_config.cache_config.prefix_match_unit
            or math.gcd(*(group.tokens_per_block for group in groups))
        ),
        bytes_per_block=_bytes_per_block(kv_cache_config),
        num_device_blocks=kv_cache_config.num_blocks,
        num_workers=parallel.world_size,
        num_engines=max(parallel.data_parallel_size_local, 1),
        # Only for such models vLLM zeroes new blocks, or copies to them; nothing else
        # is written before the hooks.
        writes_early=(
            kv_cache_config.needs_kv_cache_zeroing and writes_before_hooks(vllm_config)
        ),
        draft_lookahead=draft_lookahead(vllm_config),
        max_request_tokens=vllm_config.model_config.max_model_len,
        drafts_in_hash=hashes_cover_drafts(vllm_config),
    )


def _group_shape(group: Any) -> GroupShape:
    """Returns the group's blocks, and the widest view of its layers."""
    specs = list(_layer_specs(group))
    size = specs[0].block_size
    if all(_is_a(spec, "MambaSpec") for spec in specs):
        return GroupShape(size, recurrent=True)
    if all(_is_a(spec, "SlidingWindowSpec") for spec in specs):
        # Speculative decoding may keep some tokens more.
        windows = [spec.sliding_window + added_window_tokens(spec) for spec in specs]
        return GroupShape(size, window=max(windows))
    if all(_is_a(spec, "ChunkedLocalAttentionSpec") for spec in specs):
        stretches = {spec.attention_chunk_size for spec in specs}
        if len(stretches) == 1:
            return GroupShape(size, stretch=stretches.pop())
    return GroupShape(size)


def _bytes_per_block(kv_cache_config: Any) -> int:
    tensors: list[Any] = kv_cache_config.kv_cache_tensors
    if places_tensors(tensors[0]):
        return int(tensors[0].size // kv_cache_config.num_blocks)
    packed = max(tensor.block_stride for tensor in tensors)
    separate = sum(tensor.size for tensor in tensors if not tensor.block_stride)
    return int(separate // kv_cache_config.num_blocks + packed)
