"""What speculative decoding means for the KV that is kept."""

from __future__ import annotations

from typing import Any

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
    if speculative is None:
        return 0
    # Up to 0.29 vLLM always drops the block.
    drops = getattr(speculative, "use_eagle_block_drop", speculative.use_eagle)
    if not drops():
        return 0
    if speculative.use_multi_module_mtp():
        return int(speculative.num_speculative_tokens)
    return 1
