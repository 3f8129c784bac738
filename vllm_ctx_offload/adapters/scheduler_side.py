"""The connector in the scheduler's process: vLLM's hooks to planner events."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeVar

from vllm_ctx_offload.adapters.device_cache import DeviceCacheWatch, watch_resets
from vllm_ctx_offload.adapters.gauges import PoolGauges
from vllm_ctx_offload.adapters.kv_events import ChunkEvent, ChunkEvents
from vllm_ctx_offload.adapters.releases import session_of, skips_offloaded_kv
from vllm_ctx_offload.config import OffloadConfig
from vllm_ctx_offload.context import ReqContext, build_req_context
from vllm_ctx_offload.core import (
    HostMemoryManager,
    filtered,
    policy_of,
)
from vllm_ctx_offload.messages import TransferJob, TransferPlan, WorkerReport
from vllm_ctx_offload.plan import OffloadPlan
from vllm_ctx_offload.scheduler import Planner, RequestReading, StepEvents
from vllm_ctx_offload.scheduler.chain import ChainShape
from vllm_ctx_offload.scheduler.loads import promised_blocks
from vllm_ctx_offload.stats import OffloadStats

__all__ = ["SchedulerSide"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class SchedulerSide:
    """Owns the planner and keeps its errors away from vLLM's scheduler.

    An exception in a hook would end the engine. After one, which is a bug of ours, the
    connector is disabled: it answers every lookup with 0 and plans nothing more. Loads
    that vLLM already waits for are reported as failed, so it recomputes them.
    """

    def __init__(
        self, config: OffloadConfig, plan: OffloadPlan, *, kv_events: bool = False
    ) -> None:
        """Makes an empty pool; with `kv_events` its changes are collected."""
        self._config = config
        self._plan = plan
        self._has_states = any(group.recurrent for group in plan.groups)
        self._stats = OffloadStats()
        self._stats.set("disabled", to=0)
        self._warned: set[tuple[str, str]] = set()
        self._disabled = False
        self._device_cache: DeviceCacheWatch | None = None
        # Promised loads that the planner did not take; without rows they fail.
        self._broken_loads: list[TransferJob] = []
        policy = policy_of(
            config,
            plan.num_slots,
            plan.bytes_per_chunk,
            ChainShape(plan).token_columns,
        )
        self._events = ChunkEvents() if kv_events else None
        memory = HostMemoryManager(
            plan.num_slots, self._stats, policy, time.monotonic, self._events
        )
        self._gauges = PoolGauges(plan, policy, memory, self._stats)
        self.manager = filtered(memory, config, policy, plan.num_slots)
        self.planner = Planner(
            plan,
            self.manager,
            RequestReading(self._make_context, skips_offloaded_kv),
            self._stats,
            prompt_only=config.offload_prompt_only,
            load_wait_s=config.load_wait_ms / 1000,
        )

    def on_block_pool(self, block_pool: Any) -> None:
        """Takes the pool of the device's blocks, at the start.

        Raises:
            ConfigError: its resets are to be followed, but would not be seen.
        """
        if self._config.reset_with_device_cache:
            self._device_cache = watch_resets(block_pool)

    def _catch_up(self) -> None:
        """Makes up for a reset of the device's cache, before anything is read.

        Where it succeeds no request holds a block, so none is being loaded, and what a
        request computed before it is lost to that request as well.
        """
        if not self._config.reset_with_device_cache:
            return
        assert self._device_cache is not None, "vLLM handed over no block pool"
        if self._device_cache.saw_reset():
            logger.info("vLLM has reset its prefix cache; host memory is reset too.")
            self.planner.reset()

    def _make_context(self, request: Any) -> ReqContext:
        lora = request.lora_request
        req_context = build_req_context(
            self._config,
            request.request_id,
            request.kv_transfer_params,
            cache_salt=request.cache_salt,
            lora_name=None if lora is None else lora.lora_name,
            session_id=session_of(request),
            num_prompt_tokens=request.num_prompt_tokens,
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
        self._attempt(
            "on_new_request", lambda: self.planner.on_new_request(request), None
        )

    def lookup(self, request: Any, num_local_tokens: int) -> tuple[int | None, bool]:
        def look_up() -> tuple[int | None, bool]:
            self._catch_up()
            answer = self.planner.lookup(request, num_local_tokens, time.monotonic())
            if self._has_states:
                # vLLM ends a piece of the prompt there, and so keeps a state. It knows
                # of what is on the device alone.
                request.shared_prefix_boundary = max(
                    request.shared_prefix_boundary,
                    self.planner.shared_tokens(request.request_id),
                )
            return answer

        nothing: tuple[int | None, bool] = (0, False)
        return self._attempt("get_num_new_matched_tokens", look_up, nothing)

    def may_load(self, request: Any) -> bool:
        """Returns whether a lookup is likely to find something; see the planner."""
        return self._attempt(
            "may_load_async", lambda: self.planner.may_load(request), False
        )

    def on_allocated(
        self,
        request: Any,
        block_ids: Sequence[Sequence[int]],
        num_external_tokens: int,
    ) -> None:
        def take() -> bool:
            self._catch_up()
            self.planner.on_allocated(request, block_ids, num_external_tokens)
            return True

        taken = self._attempt("update_state_after_alloc", take, False)
        if not taken and num_external_tokens > 0:
            targets = promised_blocks(self._plan, block_ids, num_external_tokens)
            self._broken_loads.append(TransferJob(-1, request.request_id, targets, ()))

    def plan_step(self, read_events: Callable[[], StepEvents]) -> TransferPlan:
        def make_plan() -> TransferPlan | None:
            self._catch_up()
            return self.planner.plan_step(read_events())

        plan = self._attempt("build_connector_meta", make_plan, None)
        if plan is None:
            loads = (*self.planner.abandon(), *self._broken_loads)
            self._broken_loads.clear()
            plan = TransferPlan(loads=loads)
        return plan

    def on_worker_report(
        self, report: WorkerReport, bad_blocks: Set[int] = frozenset()
    ) -> None:
        self._attempt(
            "update_connector_output",
            lambda: self.planner.on_worker_report(report, bad_blocks),
            None,
        )

    def on_finished(
        self, request: Any, block_ids: Sequence[Sequence[int]]
    ) -> dict[str, Any] | None:
        return self._attempt(
            "request_finished",
            lambda: self.planner.on_finished(request, block_ids),
            None,
        )

    def reset(self) -> bool:
        # Once disabled, nothing that is stored will ever be read: that is a reset too.
        return self._attempt("reset_cache", self.planner.reset, True)

    def take_events(self) -> list[ChunkEvent]:
        """Returns what entered and left host memory since the last call."""
        return [] if self._events is None else self._events.take()

    @property
    def has_work(self) -> bool:
        return not self._disabled and self.planner.has_work

    def take_stats(self) -> dict[str, Any]:
        """Returns what happened since the last call; see the module `stats`."""
        self._attempt("get_kv_connector_stats", self._gauges.measure, None)
        return self._stats.take()

    def _attempt(self, hook: str, call: Callable[[], _T], fallback: _T) -> _T:
        """Returns what `call` returns, or `fallback` once anything has gone wrong."""
        if self._disabled:
            return fallback
        try:
            return call()
        except Exception:
            self._disabled = True
            self._stats.set("disabled", to=1)
            logger.exception(
                "CtxOffloadConnector disabled itself after an internal error in %s. "
                "vLLM goes on without offloading; please report this with the lines "
                "below.",
                hook,
            )
            return fallback
