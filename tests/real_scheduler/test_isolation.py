"""CASES 29 and 30: hits on the diagonal of tenant, salt, adapter and content only."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import real_scheduler.harness  # noqa: F401 - prepares vLLM's hashing
import torch
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
    content: str  # what stands in the place of the tokens, or beside them

    def request(self, request_id: str) -> Request:
        features = []
        if self.content.startswith("image"):
            place = PlaceholderRange(offset=2, length=4)
            features = [MultiModalFeatureSpec(None, "image", self.content, place)]
        tokens: list[int] | None = PROMPT
        embeddings = None
        if self.content == "zeros":
            tokens = [0] * len(PROMPT)
        if self.content.startswith("embeddings"):
            # To the scheduler the tokens of such a prompt are zeros.
            tokens = None
            embeddings = torch.full((len(PROMPT), 8), float(self.content[-1]))
        adapter = None
        if self.adapter:
            adapter = LoRARequest(f"adapter{self.adapter}", self.adapter, "nowhere")
        ctx: dict[str, Any] = {} if self.tenant is None else {"tenant": self.tenant}
        params = SamplingParams(
            max_tokens=1, extra_args={"kv_transfer_params": {"ctx": ctx}}
        )
        return Request(
            request_id,
            tokens,
            params,
            None,
            lora_request=adapter,
            cache_salt=self.salt,
            mm_features=features,
            prompt_embeds=embeddings,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )


CONTENTS = ("text", "zeros", "image a", "image b", "embeddings 1", "embeddings 2")
ORIGINS = [
    Origin(*parts)
    for parts in itertools.product(
        (None, "acme", "zeta"), (None, "acme", "zeta"), (0, 1, 2), CONTENTS
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
