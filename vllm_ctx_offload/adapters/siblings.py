"""Several of our connectors in one engine, which a MultiConnector makes."""

from __future__ import annotations

from typing import Any

__all__ = ["one_receipt", "position_among_ours"]


def position_among_ours(vllm_config: Any, role: Any, kv_cache_config: Any) -> int:
    """Returns which of our connectors in one engine this is; 0: the first or only one.

    A MultiConnector makes its connectors in the order of its list, with one and the
    same `kv_cache_config` and a configuration for each. It does not say which is which.
    """
    name = f"_ctx_offload_{role.name.lower()}_configs"
    ours: list[Any] = vars(kv_cache_config).setdefault(name, [])
    mine = vllm_config.kv_transfer_config
    for position, known in enumerate(ours):
        if known is mine:
            return position
    ours.append(mine)
    return len(ours) - 1


def one_receipt(request: Any, receipt: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns the receipt, or None where another connector of ours has given one.

    A MultiConnector raises, and so ends the engine, if two return the same key. The
    first receipt stands for all; the tokens that later ones have loaded are added.
    """
    if receipt is None:
        return None
    given: dict[str, Any] = vars(request).setdefault("_ctx_offload_receipt", receipt)
    if given is receipt:
        return receipt
    given["ctx"]["loaded_tokens"] += receipt["ctx"]["loaded_tokens"]
    return None
