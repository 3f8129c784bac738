"""The connector in the scheduler's process: vLLM's hooks to planner events."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_ctx_offload.config import OffloadConfig
from vllm_ctx_offload.context import ReqContext, build_req_context
from vllm_ctx_offload.core import HostMemoryManager, OffloadingManager, ReuseFilter
from vllm_ctx_offload.messages import TransferJob, TransferPlan, WorkerReport
from vllm_ctx_offload.plan import OffloadPlan
from vllm_ctx_offload.scheduler import Planner, StepEvents
from vllm_ctx_offload.stats import OffloadStats

__all__ = ["SchedulerSide"]

logger = logging.getLogger(__name__)


class SchedulerSide:
    """Owns the planner and keeps its errors away from vLLM's scheduler.

    An exception in a hook would end the engine. After one, which is a bug of ours, the
    connector is disabled: it answers every lookup with 0 and plans nothing more. Loads
    that vLLM already waits for are reported as failed, so it recomputes them.
    """

    def __init__(self, config: OffloadConfig, plan: OffloadPlan) -> None:
        self._config = config
        self._stats = OffloadStats()
        self._warned: set[tuple[str, str]] = set()
        self._disabled = False
        # Promised loads that the planner did not take, as (request id, block ids).
        self._broken_loads: list[TransferJob] = []
        self.manager = _make_manager(config, plan, self._stats)
        self.planner = Planner(
            plan,
            self.manager,
            self._make_context,
            self._stats,
            prompt_only=config.offload_prompt_only,
            load_wait_s=config.load_wait_ms / 1000,
        )

    def _make_context(self, request: Any) -> ReqContext:
        lora = getattr(request, "lora_request", None)
        req_context = build_req_context(
            self._config,
            request.request_id,
            request.kv_transfer_params,
            cache_salt=getattr(request, "cache_salt", None),
            lora_name=getattr(lora, "lora_name", None),
            session_id=getattr(request, "session_id", None),
        )
        for hint in req_context.rejected:
            if hint not in self._warned:
                self._warned.add(hint)
                logger.warning(
                    "A request's kv_transfer_params field '%s' was ignored or clamped "
                    "(%s). Said once; vllm:ctx_offload_hints_rejected_total counts.",
                    hint.field,
                    hint.reason,
                )
        return req_context

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params
        if params is not None and not isinstance(params, Mapping):
            # vLLM itself reads fields of it right after this call and would raise.
            request.kv_transfer_params = None
        if self._disabled:
            return
        try:
            self.planner.on_new_request(request)
        except Exception:
            self._disable("on_new_request")

    def lookup(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._disabled:
            return 0, False
        try:
            return self.planner.lookup(request, num_computed_tokens, time.monotonic())
        except Exception:
            self._disable("get_num_new_matched_tokens")
            return 0, False

    def on_allocated(
        self, request: Any, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        if not self._disabled:
            try:
                self.planner.on_allocated(request, block_ids, num_external_tokens)
                return
            except Exception:
                self._disable("update_state_after_alloc")
        if num_external_tokens > 0:
            self._broken_loads.append(
                TransferJob(-1, request.request_id, tuple(block_ids), ())
            )

    def plan_step(self, events: StepEvents) -> TransferPlan:
        if not self._disabled:
            try:
                return self.planner.plan_step(events)
            except Exception:
                self._disable("build_connector_meta")
        loads = (*self.planner.abandon(), *self._broken_loads)
        self._broken_loads.clear()
        return TransferPlan(loads=loads, idle=not events.num_scheduled_tokens)

    def on_worker_report(self, report: WorkerReport) -> None:
        if self._disabled:
            return
        try:
            self.planner.on_worker_report(report)
        except Exception:
            self._disable("update_connector_output")

    def on_finished(
        self, request: Any, block_ids: Sequence[int]
    ) -> dict[str, Any] | None:
        if self._disabled:
            return None
        try:
            return self.planner.on_finished(request, block_ids)
        except Exception:
            self._disable("request_finished")
            return None

    def reset(self) -> bool:
        if self._disabled:
            return True  # nothing that is stored will ever be read
        try:
            return self.planner.reset()
        except Exception:
            self._disable("reset_cache")
            return False

    @property
    def has_work(self) -> bool:
        return not self._disabled and self.planner.has_work

    def take_stats(self) -> dict[str, float]:
        return self._stats.take()

    def _disable(self, hook: str) -> None:
        self._disabled = True
        logger.exception(
            "CtxOffloadConnector disabled itself after an internal error in %s. vLLM "
            "goes on without offloading; please report this with the lines below.",
            hook,
        )


def _make_manager(
    config: OffloadConfig, plan: OffloadPlan, stats: OffloadStats
) -> OffloadingManager:
    manager: OffloadingManager = HostMemoryManager(plan.num_slots, stats)
    if config.store_threshold >= 2:
        manager = ReuseFilter(manager, config.store_threshold, config.max_tracker_size)
    return manager
