"""A connector of somebody else, to stand beside ours in a MultiConnector."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from real_scheduler.sim_worker import SimDevice, TierResult, TokenView
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class Fill(NamedTuple):
    """A load of tokens [first, end) into a request's table."""

    request_id: str
    block_ids: list[int]
    first: int
    end: int
    view: TokenView
    fails: bool = False


@dataclass
class OtherMetadata(KVConnectorMetadata):
    plan: list[Fill] = field(default_factory=list)


class OtherConnector(KVConnectorBase_V1, SupportsHMA):
    """Has the KV of every request's first `has_tokens` tokens; loads them in a step.

    Or, if `synchronous`, before the forward pass of the step that admits the request.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.has_tokens = 0
        self.synchronous = False
        self.fails = False
        self.num_admitted = 0
        self._plan: list[Fill] = []
        self._generation = 0

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        num_tokens = min(self.has_tokens, request.num_tokens - 1) - num_computed_tokens
        return max(num_tokens, 0), num_tokens > 0 and not self.synchronous

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        if num_external_tokens > 0:
            self.num_admitted += 1
            end = min(self.has_tokens, request.num_tokens - 1)
            fill = Fill(
                request.request_id,
                list(blocks.get_block_ids()[0]),
                end - num_external_tokens,
                end,
                TokenView(request.all_token_ids),
                self.fails,
            )
            self._plan.append(fill)

    def build_connector_meta(self, scheduler_output: Any) -> OtherMetadata:
        plan, self._plan = self._plan, []
        return OtherMetadata(plan)

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise NotImplementedError

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_save(self) -> None:
        raise NotImplementedError

    def make_sim_tier(self, device: SimDevice) -> OtherTier:
        return OtherTier(device, self)


class OtherTier:
    """Writes what it has as soon as it may, or KV of other weights if it fails."""

    idle = True

    def __init__(self, device: SimDevice, connector: OtherConnector) -> None:
        self._device = device
        self._connector = connector
        self._loaded: set[str] = set()
        self._failed: dict[str, set[int]] = {}

    def before_forward(self, plan: list[Fill]) -> None:
        """It has no stores to fence."""

    def start_loads(self, plan: list[Fill]) -> None:
        size = self._device.block_size
        for fill in plan:
            for position in range(fill.first, fill.end):
                block = self._device.blocks[fill.block_ids[position // size]]
                weights = -3 if fill.fails else 0
                block[position % size] = (weights, fill.view.prefix_hashes[position])
            if fill.fails:
                blocks = fill.block_ids[fill.first // size : -(-fill.end // size)]
                self._failed[fill.request_id] = set(blocks)
            if not self._connector.synchronous:
                self._loaded.add(fill.request_id)

    def start_stores(self, plan: list[Fill]) -> None:
        """It stores nothing."""

    def finish_step(self) -> TierResult:
        loaded, self._loaded = self._loaded, set()
        failed, self._failed = self._failed, {}
        return TierResult(loaded_requests=loaded, failed_loads=failed)
