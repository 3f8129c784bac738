"""All that the connector knows of vLLM's interfaces.

The only file of the connector that imports vLLM; for `simulate` alone
`vllm_managers.py` imports vLLM's own managers, and `register` its factory.
Facts were read off vLLM 0.32's `kv_connector/v1/base.py`, `v1/core/sched/scheduler.py`
and `v1/kv_cache_interface.py`; what differs between releases is handled here.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import vllm
from vllm.config import CacheConfig, KVTransferConfig, SpeculativeConfig, VllmConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer import (
    ensure_kv_transfer_shutdown,
    get_kv_transfer_group,
    has_kv_transfer_group,
)
from vllm.distributed.kv_transfer.kv_connector.v1 import base as kv_connector_base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.sampling_params import SamplingParams
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.core.sched import output as scheduler_output
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from vllm_ctx_offload.adapters.kv_events import ChunkEvent
from vllm_ctx_offload.adapters.kv_groups import check_groups, model_shape
from vllm_ctx_offload.adapters.metrics import (
    MetricClasses,
    PrometheusMetrics,
    summarize,
)
from vllm_ctx_offload.adapters.releases import SUPPORTED_TEXT, is_supported
from vllm_ctx_offload.adapters.self_test import examine_release
from vllm_ctx_offload.config import check_kv_role
from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.messages import Terms, TransferPlan, WorkerReport
from vllm_ctx_offload.stats import merge_stats

__all__ = [
    "HIT_SOURCE",
    "CtxOffloadMetadata",
    "CtxOffloadPromMetrics",
    "CtxOffloadStats",
    "CtxOffloadTerms",
    "CtxOffloadWorkerMetadata",
    "KVCacheBlocks",
    "KVCacheConfig",
    "KVCacheEvent",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorOutput",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "Request",
    "SchedulerOutput",
    "SupportsHMA",
    "VllmConfig",
    "adopt_vllm_logging",
    "check_environment",
    "check_release",
    "default_block_size",
    "end_worker_side",
    "is_whole_worker_side",
    "kv_event",
    "load_failures_recompute",
    "model_shape",
    "runs_on_cuda",
    "transfer_config",
    "wants_kv_events",
    "warn_of_other_engines",
]

logger = logging.getLogger(__name__)

# What vLLM's metrics call the place that our hits come from; older releases
# do not ask.
try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:
    HIT_SOURCE: Any = None
else:
    HIT_SOURCE = CacheHitSource.HOST

# Newer releases only: what a worker reports at the end of a step.
KVConnectorTransferResults: Any = getattr(
    kv_connector_base, "KVConnectorTransferResults", None
)

# What the hooks receive, and what is read before the first of them, by name.
CLASSES: Final[Mapping[str, type]] = {
    cls.__name__: cls
    for cls in (
        *vars(scheduler_output).values(),
        *vars(kv_cache_interface).values(),
        *vars(kv_cache_utils).values(),
        *(KVCacheBlocks, KVConnectorBase_V1, KVConnectorOutput, Request),
        *(SamplingParams, SpeculativeConfig, VllmConfig),
    )
    if isinstance(cls, type)
}


@dataclass
class CtxOffloadMetadata(KVConnectorMetadata):
    """Scheduler side to worker side, once a step."""

    plan: TransferPlan
    terms: Terms  # what the plan goes by


@dataclass
class CtxOffloadTerms(KVConnectorHandshakeMetadata):
    """Worker side to scheduler side, once at the start."""

    terms: Terms


@dataclass
class CtxOffloadWorkerMetadata(KVConnectorWorkerMetadata):
    """Worker side to scheduler side, summed over the workers by vLLM."""

    report: WorkerReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, CtxOffloadWorkerMetadata)
        return CtxOffloadWorkerMetadata(self.report.merge(other.report))


@dataclass
class CtxOffloadStats(KVConnectorStats):
    """What happened in some steps; see the module `stats` for `data`."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return CtxOffloadStats(merge_stats(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        return summarize(self.data)

    def is_empty(self) -> bool:
        return not self.data


class CtxOffloadPromMetrics(KVConnectorPromMetrics):
    """Brings the metrics on vLLM's /metrics up to date."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._failed = False
        self._metrics = PrometheusMetrics(
            MetricClasses(self._counter_cls, self._gauge_cls, self._histogram_cls),
            self._labelnames,
            self.per_engine_labelvalues,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        try:
            self._metrics.observe(transfer_stats_data, engine_idx)
        except Exception:
            # vLLM calls this where it hands out tokens, and would end with it.
            if not self._failed:
                logger.exception(
                    "The vllm:ctx_offload_ metrics could not be updated. Said once; "
                    "please report it with the lines below."
                )
            self._failed = True


def is_whole_worker_side(connector: KVConnectorBase_V1) -> bool:
    """Returns whether vLLM talks to this connector, not to one that contains it."""
    return has_kv_transfer_group() and get_kv_transfer_group() is connector


def end_worker_side() -> None:
    """Closes the worker side of this process, so that the next engine makes one."""
    ensure_kv_transfer_shutdown()


def adopt_vllm_logging() -> None:
    """Makes this package's loggers use vLLM's handlers, format and level."""
    # The parent decides both; without it INFO lines of other packages are dropped.
    logging.getLogger("vllm_ctx_offload").parent = logging.getLogger("vllm")


def transfer_config(vllm_config: VllmConfig) -> KVTransferConfig:
    """Returns the part of the configuration that made vLLM create a connector."""
    assert vllm_config.kv_transfer_config is not None
    return vllm_config.kv_transfer_config


@functools.cache
def check_release() -> None:
    """Refuses a release whose objects can't be read, in a few milliseconds.

    Raises:
        ConfigError: naming the class, the field and the supported releases.
    """
    examine_release(CLASSES, CtxOffloadWorkerMetadata, vllm.__version__)


def default_block_size() -> int:
    """Returns the tokens of a device block where nothing says otherwise."""
    return int(CacheConfig.DEFAULT_BLOCK_SIZE)


def check_environment(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuses what is not supported.

    Raises:
        ConfigError: with the reason and what to do instead.
    """
    check_release()
    if not is_supported(vllm.__version__):
        logger.warning(
            "vLLM %s is outside of the range that vllm-ctx-offload was tested with "
            "(%s).",
            vllm.__version__,
            SUPPORTED_TEXT,
        )
    check_kv_role(transfer_config(vllm_config).kv_role)
    parallel = vllm_config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if (size := getattr(parallel, name)) != 1:
            raise ConfigError(
                f"CtxOffloadConnector: {name} = {size} is not supported yet; use "
                "tensor or data parallelism, or serve without the connector."
            )
    check_groups(
        vllm_config.model_config,
        kv_cache_config,
        version=vllm.__version__,
        recomputes=KVConnectorTransferResults is not None,
    )


def wants_kv_events(vllm_config: VllmConfig) -> bool:
    """Returns whether vLLM publishes what enters and leaves its caches."""
    events = vllm_config.kv_events_config
    return events is not None and events.enable_kv_cache_events


def kv_event(event: ChunkEvent, tokens_per_chunk: int) -> KVCacheEvent:
    """Returns an event of ours as one of vLLM's, by the hash at the chunk's end.

    Like vLLM's own offloading it says neither tokens nor parents: whoever follows the
    events knows the block by its hash from when the device stored it.
    """
    hashes = [maybe_convert_block_hash(BlockHash(h)) for h in event.hashes]
    if not event.stored:
        return BlockRemoved(hashes, medium="CPU", group_idx=event.group)
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=None,
        token_ids=[],
        block_size=tokens_per_chunk,
        lora_id=None,
        medium="CPU",
        lora_name=None,
        group_idx=event.group,
    )


def runs_on_cuda(vllm_config: VllmConfig) -> bool:
    """Returns whether the model's device can copy from pinned host memory."""
    return str(vllm_config.device_config.device_type) == "cuda"


def load_failures_recompute(vllm_config: VllmConfig) -> None:
    """Makes vLLM recompute what could not be loaded, instead of failing the request.

    vLLM reads the policy after it has made the connector. Inside a MultiConnector it
    reads the outer configuration, which can't be reached from here.
    """
    transfer = transfer_config(vllm_config)
    if transfer.kv_load_failure_policy != "recompute":
        logger.info(
            "kv_load_failure_policy is set to 'recompute': what can't be loaded from "
            "host memory is computed. Inside a MultiConnector set it there."
        )
        transfer.kv_load_failure_policy = "recompute"


def warn_of_other_engines(vllm_config: VllmConfig) -> None:
    """Says that engines beside this one may each take the default of the pool.

    vLLM makes data-parallel engines of a dense model forget how many they are; only
    the name of each says that there are others.
    """
    engine_id = transfer_config(vllm_config).engine_id or ""
    alone = vllm_config.parallel_config.data_parallel_size_local <= 1
    if alone and re.search(r"_dp\d+$", engine_id):
        logger.warning(
            "This is one of several data-parallel engines, and vLLM does not tell it "
            "of the others: each on this host takes the default of the whole pool. "
            "Set cpu_bytes_to_use to what one engine may have."
        )
