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


def make_chain(num_chunks: int, tail: str = "", *, shared: int = 0) -> list[bytes]:
    """Returns keys of one prefix chain, head first.

    The first `shared` chunks are those of every other chain that shares as many; from
    there on the chain is that of `tail`. As in vLLM, a key stands for all before it.
    """
    names = [str(index) for index in range(num_chunks)]
    if tail:
        names[shared:] = [f"{name}{tail}{shared}" for name in names[shared:]]
    return [name.encode() for name in names]
