"""What differs between releases of vLLM, one named function for each fact.

What a release lacks is told from what it renamed by `PRESENT_SINCE`, which the
self-test checks at the start: an attribute is missing only where it never was. What no
such list can tell has the safe answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any, Final

from packaging.version import Version

__all__ = [
    "PRESENT_SINCE",
    "SUPPORTED",
    "SUPPORTED_TEXT",
    "added_window_tokens",
    "copied_blocks",
    "drops_a_block",
    "final_states",
    "hashes_cover_drafts",
    "is_cached",
    "is_supported",
    "lies_elsewhere",
    "looks_ahead",
    "places_tensors",
    "prefill_lookahead",
    "reserves_blocks",
    "resumed_requests",
    "session_of",
    "skips_offloaded_kv",
    "writes_before_hooks",
]

SUPPORTED: Final = (Version("0.27.1"), Version("0.35.dev0"))
SUPPORTED_TEXT: Final = "0.27.1 to 0.34"

# (class of vLLM, attribute, the first of the supported releases that has it). On these
# and later ones it has to be there; before, what it says did not exist.
PRESENT_SINCE: Final = (
    ("SchedulerOutput", "kv_cache_block_copies", "0.27.1"),
    ("SchedulerOutput", "new_block_ids_to_zero", "0.27.1"),
    ("SchedulerOutput", "kv_connector_block_state", "0.29.0"),
    ("KVConnectorBlockState", "boundary_state_offloads", "0.29.0"),
    ("Request", "shared_prefix_boundary", "0.27.1"),
    ("Request", "session_id", "0.28.0"),
    ("KVCacheConfig", "needs_kv_cache_zeroing", "0.27.1"),
    ("KVCacheGroupSpec", "host_resident", "0.30.0"),
    ("KVCacheTensor", "layer_stride", "0.29.0"),
    ("FullAttentionSpec", "non_causal", "0.27.1"),
    ("FullAttentionSpec", "prefix_cacheable", "0.29.0"),
    ("SlidingWindowSpec", "extra_retained_tokens", "0.28.0"),
    ("SpeculativeConfig", "use_eagle_block_drop", "0.30.0"),
    ("VllmConfig", "num_prefill_lookahead_tokens", "0.31.0"),
    ("KVConnectorBase_V1", "get_transfer_results", "0.30.0"),
)


def is_supported(version: str) -> bool:
    """Returns whether this package was tested with a release."""
    return SUPPORTED[0] <= Version(version) < SUPPORTED[1]


def skips_offloaded_kv(request: Any) -> bool:
    """Returns whether vLLM would not take KV that was loaded for a request.

    Up to 0.33 because the request reads no prefix cache at all. From 0.34 on such a
    request may have local hits, up to the first token whose log-probability it wants.
    """
    skips = getattr(request, "skip_reading_external_kv", None)
    return bool(request.skip_reading_prefix_cache if skips is None else skips)


def resumed_requests(cached: Any) -> Set[str]:
    """Returns which of a step's known requests were preempted and come back.

    Their block ids replace the table. From 0.34 on they come as new ones, as they do
    before with the second model runner. The self-test looks for proof of that where
    nobody is named here.
    """
    resumed: Set[str] = getattr(cached, "resumed_req_ids", frozenset())
    return resumed


def copied_blocks(output: Any) -> Iterable[int]:
    """Returns the blocks that others are copied to in a step."""
    return (copy.dst_block_id for copy in output.kv_cache_block_copies or ())


def final_states(output: Any) -> dict[str, list[tuple[int, int, int]]]:
    """Returns (group, block, tokens) of states that are handed over, by request.

    0.27 and 0.28 hand over none; models with states are refused up to 0.29.
    """
    offered = getattr(output, "kv_connector_block_state", None)
    return {} if offered is None else offered.boundary_state_offloads


def session_of(request: Any) -> str | None:
    """Returns vLLM's own name of a request's session; 0.27 has none."""
    session: str | None = getattr(request, "session_id", None)
    return session


def writes_before_hooks(vllm_config: Any) -> bool:
    """Returns whether new blocks are written to before a step's first worker hook.

    Zeroed, that is, or copied to. The second model runner does so, the first one after
    `handle_preemptions`. From 0.34 on there is only one, which has no name any more:
    who does not say that it is the first is taken for the second.
    """
    return bool(getattr(vllm_config, "use_v2_model_runner", True))


def hashes_cover_drafts(vllm_config: Any) -> bool:
    """Returns whether a block's hash covers the tokens after it that its drafts read.

    From 0.34 on, with EAGLE and its like; `supports_lookahead_block_hashes` agrees to
    it. Elsewhere the end of a hit is dropped, which is right in any case.
    """
    return getattr(vllm_config, "num_hash_lookahead_tokens", 0) > 0


def reserves_blocks(vllm_config: Any) -> bool:
    """Returns whether cache tensors may have more blocks than there is memory for.

    From 0.34 on, with the extensible KV cache. Tensors that have without saying so here
    are refused, because none of their dimensions counts the blocks.
    """
    config = vllm_config.cache_config
    return bool(getattr(config, "enable_extensible_kv_cache", False))


def lies_elsewhere(group: Any) -> bool:
    """Returns whether the blocks of a group are in a pool of their own."""
    return bool(getattr(group, "host_resident", False))


def is_cached(spec: Any) -> bool:
    """Returns whether layers have prefixes at all; vLLM's own scratch has none."""
    return bool(getattr(spec, "prefix_cacheable", True))


def added_window_tokens(spec: Any) -> int:
    """Returns the tokens that a window keeps on top for speculative decoding."""
    return int(getattr(spec, "extra_retained_tokens", 0))


def looks_ahead(spec: Any) -> bool:
    """Returns whether the attention is not causal; only full attention may be."""
    return bool(getattr(spec, "non_causal", False))


def places_tensors(tensor: Any) -> bool:
    """Returns whether cache tensors are placements in one allocation of their size.

    From 0.29 on; before, each is an allocation, or names the stride of all together.
    """
    return hasattr(tensor, "layer_stride")


def drops_a_block(speculative: Any) -> bool:
    """Returns whether vLLM drops the last block of its own hits for a drafter's sake.

    Up to 0.29 always with EAGLE and its like, then unless it is told not to.
    """
    if hasattr(speculative, "use_eagle_block_drop"):
        return bool(speculative.use_eagle_block_drop())
    return bool(speculative.use_eagle())


def prefill_lookahead(vllm_config: Any) -> int:
    """Returns how many tokens past its own a drafter's KV of a token depends on.

    vLLM says so itself from 0.31 on. Before it was one, or with several MTP modules
    as many as it drafts.
    """
    if hasattr(vllm_config, "num_prefill_lookahead_tokens"):
        return int(vllm_config.num_prefill_lookahead_tokens)
    speculative = vllm_config.speculative_config
    several = speculative.use_multi_module_mtp()
    return int(speculative.num_speculative_tokens) if several else 1
