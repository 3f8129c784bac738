"""A scheduler side and requests of vLLM's own kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from vllm_ctx_offload.adapters.scheduler_side import SchedulerSide
from vllm_ctx_offload.config import parse_config
from vllm_ctx_offload.plan import GroupShape, OffloadPlan

PLAN = OffloadPlan(
    groups=(GroupShape(4),),
    blocks_per_chunk=1,
    tokens_per_hash=4,
    bytes_per_block=10,
    num_workers=1,
    num_slots=16,
)


@pytest.fixture
def make_side() -> Callable[..., SchedulerSide]:
    return lambda **extra: SchedulerSide(parse_config(extra), PLAN)


@pytest.fixture
def make_request() -> Callable[..., Request]:
    init_none_hash(sha256)
    hasher = get_request_block_hasher(4, sha256)

    def make(
        num_tokens: int, request_id: str = "r", params: Any = None, **fields: Any
    ) -> Request:
        return Request(
            request_id,
            list(range(num_tokens)),
            SamplingParams(extra_args={"kv_transfer_params": params}),
            None,
            block_hasher=hasher,
            **fields,
        )

    return make
