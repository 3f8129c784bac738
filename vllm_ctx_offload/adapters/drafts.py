"""What speculative decoding means for the KV that is kept."""

from __future__ import annotations

from typing import Any

from vllm_ctx_offload.adapters.releases import drops_a_block, prefill_lookahead

__all__ = ["draft_lookahead"]


def draft_lookahead(vllm_config: Any) -> int:
    """Returns how many tokens past its own the KV of a token depends on.

    0 without a drafter, and with one that reads tokens alone (n-grams, a draft model
    of its own). EAGLE and its like read hidden states of the model too: what their
    layers keep for a token is made from the token after it, or with several MTP
    modules from one more each. For those vLLM drops the last block of its own hits,
    unless it is told not to. Whether it marks a group of theirs (`is_eagle_group`)
    makes no difference: all groups hit together.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or not drops_a_block(speculative):
        return 0
    return max(prefill_lookahead(vllm_config), 1)  # a drop is of one at least
