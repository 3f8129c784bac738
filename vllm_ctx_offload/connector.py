"""CtxOffloadConnector: what vLLM calls, one delegation per hook."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import TYPE_CHECKING, Any, Final

from vllm_ctx_offload.adapters import vllm_api
from vllm_ctx_offload.adapters.cache_tensors import committed_part
from vllm_ctx_offload.adapters.degraded import DegradationLog
from vllm_ctx_offload.adapters.device_cache import check_hook
from vllm_ctx_offload.adapters.scheduler_side import SchedulerSide
from vllm_ctx_offload.adapters.siblings import one_receipt, position_among_ours
from vllm_ctx_offload.adapters.step_events import step_events, step_results
from vllm_ctx_offload.config import parse_config
from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.messages import WorkerReport
from vllm_ctx_offload.plan import check_workers, resolve_plan
from vllm_ctx_offload.stats import of_connector
from vllm_ctx_offload.worker import OffloadWorker

if TYPE_CHECKING:
    import torch

__all__ = ["CtxOffloadConnector"]

logger = logging.getLogger(__name__)

# Of engines that run in this process and have not been shut down.
_scheduler_sides: Final[weakref.WeakSet[SchedulerSide]] = weakref.WeakSet()


class CtxOffloadConnector(vllm_api.KVConnectorBase_V1, vllm_api.SupportsHMA):
    """Keeps the KV cache of finished and paused requests in host memory.

    vLLM makes one in the scheduler's process and one in each worker; only the half of
    its role exists. The hooks below are in the order in which one step calls them.
    """

    # vLLM counts cached tokens by where they come from.
    _cache_hit_source = vllm_api.HIT_SOURCE

    def __init__(
        self,
        vllm_config: vllm_api.VllmConfig,
        role: vllm_api.KVConnectorRole,
        kv_cache_config: vllm_api.KVCacheConfig,
    ) -> None:
        """Validates everything; see `kv_connector_extra_config` in the README.

        Raises:
            ConfigError: the configuration or the model is not supported.
        """
        vllm_api.adopt_vllm_logging()
        super().__init__(vllm_config, role, kv_cache_config)
        vllm_api.check_environment(vllm_config, kv_cache_config)
        transfer = vllm_api.transfer_config(vllm_config)
        config = parse_config(transfer.kv_connector_extra_config)
        shape = vllm_api.model_shape(vllm_config, kv_cache_config)
        plan = resolve_plan(config, shape)
        self._position = position_among_ours(vllm_config, role, kv_cache_config)
        self._degraded = DegradationLog()
        self._num_device_blocks = shape.num_device_blocks
        self._scheduler: SchedulerSide | None = None
        self._worker: OffloadWorker | None = None
        self._report = WorkerReport()
        # Request id -> blocks that a failed load should have filled.
        self._failed_loads: dict[str, set[int]] = {}
        self._plan = plan
        if role is vllm_api.KVConnectorRole.WORKER:
            # Of a model with experts; those of others do not know of each other.
            num_engines = vllm_config.parallel_config.data_parallel_size
            self._worker = OffloadWorker(plan, in_lockstep=num_engines > 1)
            return
        if config.reset_with_device_cache:
            check_hook(vllm_api.KVConnectorBase_V1)
        self._scheduler = SchedulerSide(
            config, plan, kv_events=vllm_api.wants_kv_events(vllm_config)
        )
        _scheduler_sides.add(self._scheduler)
        vllm_api.load_failures_recompute(vllm_config)
        if config.cpu_bytes_to_use is None:
            vllm_api.warn_of_other_engines(vllm_config)
        pin = vllm_api.runs_on_cuda(vllm_config)
        logger.info("CtxOffloadConnector plan: %s.", plan.describe(pin))

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Validates the settings early, because vLLM asks this before all else.

        With CUDA graphs, that is: in the API server, minutes before it has loaded the
        model and makes a connector, so the fault is at the end of the log.

        Raises:
            ConfigError: a setting is wrong by itself.
        """
        vllm_api.check_release()
        parse_config(extra_config)
        return False  # loads and stores are outside of the graphs

    @classmethod
    def supports_lookahead_block_hashes(
        cls,
        kv_transfer_config: Any,  # noqa: ARG003 - the hook's
    ) -> bool:
        return True  # the plan then drops nothing at the end of a hit

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a lost store is a later cache miss

    # ---- scheduler side

    @property
    def _scheduler_side(self) -> SchedulerSide:
        assert self._scheduler is not None, "a scheduler hook was called on a worker"
        return self._scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduler_side.on_block_pool(gpu_block_pool)

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, vllm_api.KVConnectorHandshakeMetadata]
    ) -> None:
        # At the end of the start: what the workers gave in `get_handshake_metadata`.
        check_workers(
            self._plan,
            {
                rank: found.terms
                for rank, found in metadata.items()
                if isinstance(found, vllm_api.CtxOffloadTerms)
            },
        )

    def on_new_request(self, request: vllm_api.Request) -> None:
        self._scheduler_side.on_new_request(request)

    def may_load_async(self, request: vllm_api.Request) -> bool:
        # vLLM 0.34 and newer, with --max-num-inflight-kv-loads.
        return self._scheduler_side.may_load(request)

    def get_num_new_matched_tokens(
        self, request: vllm_api.Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler_side.lookup(request, num_computed_tokens)

    def update_state_after_alloc(
        self,
        request: vllm_api.Request,
        blocks: vllm_api.KVCacheBlocks,
        num_external_tokens: int,
    ) -> None:
        self._scheduler_side.on_allocated(
            request, blocks.get_block_ids(), num_external_tokens
        )

    def build_connector_meta(
        self, scheduler_output: vllm_api.SchedulerOutput
    ) -> vllm_api.KVConnectorMetadata:
        plan = self._scheduler_side.plan_step(lambda: step_events(scheduler_output))
        return vllm_api.CtxOffloadMetadata(plan, self._plan.terms)

    def update_connector_output(
        self, connector_output: vllm_api.KVConnectorOutput
    ) -> None:
        report, bad_blocks = step_results(
            connector_output, vllm_api.CtxOffloadWorkerMetadata
        )
        self._scheduler_side.on_worker_report(report, bad_blocks)

    def request_finished(
        self, request: vllm_api.Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: vllm_api.Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        # False: the blocks are not held back; a store that still reads them is fenced.
        receipt = self._scheduler_side.on_finished(request, block_ids)
        return False, one_receipt(request, receipt)

    def has_pending_push_work(self) -> bool:
        # Keeps the engine stepping until the transfers of the last request have ended.
        return self._scheduler_side.has_work

    def take_events(self) -> list[vllm_api.KVCacheEvent]:
        return [
            vllm_api.kv_event(event, self._plan.tokens_per_chunk(event.group))
            for event in self._scheduler_side.take_events()
        ]

    def reset_cache(self) -> bool | None:
        return self._scheduler_side.reset()

    # ---- worker side

    @property
    def _worker_side(self) -> OffloadWorker:
        assert self._worker is not None, "a worker hook was called on the scheduler"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker_side.is_registered:
            raise _second_engine()
        committed = committed_part(kv_caches, self._vllm_config, self._kv_cache_config)
        self._worker_side.register(committed, self._num_device_blocks)

    def get_handshake_metadata(self) -> vllm_api.KVConnectorHandshakeMetadata | None:
        # A MultiConnector passes on one answer, and others can't do without theirs.
        if not vllm_api.is_whole_worker_side(self):
            return None
        return vllm_api.CtxOffloadTerms(self._plan.terms)

    def unregister_kv_caches(self) -> None:
        # vLLM 0.33 and newer, before sleep mode takes the memory of the caches away.
        # They come back at the same addresses, so there is nothing to restore.
        self._worker_side.wait_until_idle()

    def handle_preemptions(
        self, kv_connector_metadata: vllm_api.KVConnectorMetadata
    ) -> None:
        assert isinstance(kv_connector_metadata, vllm_api.CtxOffloadMetadata)
        self._worker_side.heed(kv_connector_metadata.terms)
        self._worker_side.before_forward(kv_connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, vllm_api.CtxOffloadMetadata)
        self._worker_side.start_loads(metadata.plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: a request runs only after all its layers came."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Stores start after the whole forward pass, in `wait_for_save`."""

    def wait_for_save(self) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, vllm_api.CtxOffloadMetadata)
        self._worker_side.start_stores(metadata.plan)

    def get_finished(
        self, finished_req_ids: set[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        finished = self._worker_side.finish_step()
        # One snapshot: the next two hooks report the same jobs in the same step.
        self._report = finished.report
        self._failed_loads = finished.failed_loads
        return None, finished.loaded_requests or None

    def get_transfer_results(
        self, finished_req_ids: set[str]
    ) -> vllm_api.KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        if self._plan.loads_fail_whole:
            failed, self._failed_loads = self._failed_loads, {}
            results.failed_recving.update(failed)
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        if self._plan.loads_fail_whole:
            return set()  # vLLM wants requests instead, see above
        failed, self._failed_loads = self._failed_loads, {}
        return set().union(*failed.values())

    def build_connector_worker_meta(self) -> vllm_api.CtxOffloadWorkerMetadata | None:
        report, self._report = self._report, WorkerReport()
        return vllm_api.CtxOffloadWorkerMetadata(report) if report else None

    # ---- both sides

    def get_kv_connector_stats(self) -> vllm_api.KVConnectorStats | None:
        if self._scheduler is not None:
            figures = self._scheduler.take_stats()
        else:
            figures = self._worker_side.stats.take()
        self._degraded.look_at(figures)
        figures = of_connector(self._position, figures)
        return vllm_api.CtxOffloadStats(figures) if figures else None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> vllm_api.KVConnectorStats | None:
        return vllm_api.CtxOffloadStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> Any:
        return vllm_api.CtxOffloadPromMetrics(*args, **kwargs)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            _scheduler_sides.discard(self._scheduler)


def _second_engine() -> ConfigError:
    """Returns why another engine of this process can't have caches of its own.

    vLLM makes one worker side for all engines of a process, gives it the caches of
    each without a word whose they are, and closes it when the first of them ends.
    """
    # vLLM hides what a start has made from the collector.
    gc.unfreeze()
    gc.collect()
    if _scheduler_sides:
        return ConfigError(
            "CtxOffloadConnector: another engine of this process uses the connector, "
            "and vLLM has one for all engines of a process; let each have a process "
            "of its own (VLLM_ENABLE_V1_MULTIPROCESSING=1, vLLM's default), or shut "
            "the other one down before."
        )
    vllm_api.end_worker_side()
    return ConfigError(
        "CtxOffloadConnector: an engine that is gone, or did not start, had left its "
        "connector in this process, and vLLM gave it to this one; it is closed now, "
        "so start this engine again."
    )
