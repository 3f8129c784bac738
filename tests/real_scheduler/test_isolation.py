"""CASES 29 and 30: hits on the diagonal of tenant, salt, adapter and image only."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import real_scheduler.harness  # noqa: F401 - prepares vLLM's hashing
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from vllm_ctx_offload.adapters.scheduler_side import SchedulerSide
from vllm_ctx_offload.config import parse_config
from vllm_ctx_offload.plan import GroupShape, OffloadPlan
from vllm_ctx_offload.scheduler.chain import ChainShape

BLOCK = 16
PROMPT = list(range(4 * BLOCK))
# The last token is never loaded.
HIT = 3 * BLOCK
PLAN = OffloadPlan((GroupShape(BLOCK),), 1, BLOCK, 1, 1, 64)


class Origin(NamedTuple):
    """Whatever has to keep two requests with the same tokens apart."""

    tenant: str | None
    salt: str | None
    adapter: int  # 0: none
    image: str | None

    def request(self, request_id: str) -> Request:
        features = []
        if self.image is not None:
            place = PlaceholderRange(offset=2, length=4)
            features = [MultiModalFeatureSpec(None, "image", self.image, place)]
        adapter = None
        if self.adapter:
            adapter = LoRARequest(f"adapter{self.adapter}", self.adapter, "nowhere")
        ctx: dict[str, Any] = {} if self.tenant is None else {"tenant": self.tenant}
        params = SamplingParams(
            max_tokens=1, extra_args={"kv_transfer_params": {"ctx": ctx}}
        )
        return Request(
            request_id,
            PROMPT,
            params,
            None,
            lora_request=adapter,
            cache_salt=self.salt,
            mm_features=features,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )


ORIGINS = [
    Origin(*parts)
    for parts in itertools.product(
        (None, "acme", "zeta"), (None, "acme", "zeta"), (0, 1, 2), (None, "a", "b")
    )
]


def make_side(tenant_from: str) -> SchedulerSide:
    tenants = {"acme": {}, "zeta": {}, "adapter1": {}, "adapter2": {}}
    extra = {"tenants": tenants, "tenant_from": [tenant_from]}
    return SchedulerSide(parse_config(extra), PLAN)


@pytest.mark.parametrize("tenant_from", ["kv_transfer_params", "cache_salt", "lora"])
def test_only_requests_of_the_same_origin_hit(tenant_from: str) -> None:
    stored = {origin: origin.request("stored") for origin in ORIGINS}
    asking = {origin: origin.request(f"asking {origin}") for origin in ORIGINS}
    for origin, request in stored.items():
        side = make_side(tenant_from)
        state = side.planner.on_new_request(request)
        keys = state.chain(len(PROMPT) // BLOCK, ChainShape(PLAN))
        side.manager.prepare_store(keys, state.req_context)
        side.manager.complete_store(keys, state.req_context)
        hits = {
            other
            for other, asked in asking.items()
            if side.lookup(asked, 0) == (HIT, True)
        }
        # Where the tenant comes from elsewhere, what the client calls itself is moot.
        expected = {
            other
            for other in ORIGINS
            if other == origin
            or (tenant_from != "kv_transfer_params" and other[1:] == origin[1:])
        }
        assert hits == expected
