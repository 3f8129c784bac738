"""What tests of several parts build requests and contexts with."""

from __future__ import annotations

from typing import Any

from vllm_ctx_offload.config import OffloadConfig
from vllm_ctx_offload.context import ReqContext, build_req_context

EMPTY_CONTEXT = ReqContext(request_id="")


def make_req_context(
    request_id: str = "req",
    *,
    config: OffloadConfig | None = None,
    params: dict[str, Any] | None = None,
    **ctx: Any,
) -> ReqContext:
    """Returns the context of a request that sent `ctx` and the other `params`."""
    kv_transfer_params = {**(params or {}), **({"ctx": ctx} if ctx else {})}
    return build_req_context(
        config or OffloadConfig(), request_id, kv_transfer_params or None
    )
