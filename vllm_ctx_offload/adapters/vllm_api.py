"""All that is known of vLLM's interfaces. The only file that imports vLLM.

Facts were read off vLLM 0.32's `kv_connector/v1/base.py`, `v1/core/sched/scheduler.py`
and `v1/kv_cache_interface.py`; what differs between releases is handled here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import vllm
from packaging.version import Version
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import base as kv_connector_base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from vllm_ctx_offload.adapters.metrics import PrometheusCounters, summarize
from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.messages import TransferPlan, WorkerReport
from vllm_ctx_offload.plan import GroupShape, ModelShape
from vllm_ctx_offload.scheduler import StepEvents, TableUpdate
from vllm_ctx_offload.stats import merge_stats

__all__ = [
    "CtxOffloadMetadata",
    "CtxOffloadPromMetrics",
    "CtxOffloadStats",
    "CtxOffloadWorkerMetadata",
    "KVCacheBlocks",
    "KVCacheConfig",
    "KVConnectorBase_V1",
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
    "load_failures_recompute",
    "model_shape",
    "runs_on_cuda",
    "step_events",
    "transfer_config",
]

logger = logging.getLogger(__name__)

# Newer releases only: what a worker reports at the end of a step.
KVConnectorTransferResults: Any = getattr(
    kv_connector_base, "KVConnectorTransferResults", None
)
_SUPPORTED_SPECS: Final = (
    FullAttentionSpec,  # MLA as well
    SlidingWindowSpec,
    ChunkedLocalAttentionSpec,
)
# Kinds of full attention in name: their tables have holes in the middle, blocks that
# belong to no token, or no KV at all. By name, because older releases lack them.
_UNSUPPORTED_SPECS: Final = (
    "RSWASpec",
    "SinkFullAttentionSpec",
    "HiddenStateCacheSpec",
)
SUPPORTED: Final = (Version("0.27.1"), Version("0.34.dev0"))


@dataclass
class CtxOffloadMetadata(KVConnectorMetadata):
    """Scheduler side to worker side, once a step."""

    plan: TransferPlan


@dataclass
class CtxOffloadWorkerMetadata(KVConnectorWorkerMetadata):
    """Worker side to scheduler side, summed over the workers by vLLM."""

    report: WorkerReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, CtxOffloadWorkerMetadata)
        return CtxOffloadWorkerMetadata(self.report.merge(other.report))


@dataclass
class CtxOffloadStats(KVConnectorStats):
    """Increments of counters; see `stats.OffloadStats` for the keys of `data`."""

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
    """Feeds the increments into counters on vLLM's /metrics."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._counters = PrometheusCounters(
            self._counter_cls, self._labelnames, self.per_engine_labelvalues
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._counters.observe(transfer_stats_data, engine_idx)


def adopt_vllm_logging() -> None:
    """Makes this package's loggers use vLLM's handlers, format and level."""
    # The parent decides both; without it INFO lines of other packages are dropped.
    logging.getLogger("vllm_ctx_offload").parent = logging.getLogger("vllm")


def transfer_config(vllm_config: VllmConfig) -> KVTransferConfig:
    """Returns the part of the configuration that made vLLM create a connector."""
    assert vllm_config.kv_transfer_config is not None
    return vllm_config.kv_transfer_config


def check_environment(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuses what is not supported.

    Raises:
        ConfigError: with the reason and what to do instead.
    """
    version = Version(vllm.__version__)
    if not SUPPORTED[0] <= version < SUPPORTED[1]:
        logger.warning(
            "vLLM %s is outside of the range that vllm-ctx-offload was tested with "
            "(0.27.1 to 0.33).",
            version,
        )
    transfer = transfer_config(vllm_config)
    if transfer.kv_role != "kv_both":
        raise ConfigError(
            f"kv_transfer_config: kv_role = '{transfer.kv_role}', but this connector "
            "both stores and loads; set it to 'kv_both'."
        )
    parallel = vllm_config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if (size := getattr(parallel, name, 1)) != 1:
            raise ConfigError(
                f"CtxOffloadConnector: {name} = {size} is not supported yet; use "
                "tensor or data parallelism, or serve without the connector."
            )
    _check_groups(kv_cache_config)


def _check_groups(kv_cache_config: KVCacheConfig) -> None:
    groups = kv_cache_config.kv_cache_groups
    specs = [spec for group in groups for spec in _layer_specs(group)]
    kinds = ", ".join(sorted({type(spec).__name__ for spec in specs}))
    if not specs or not all(map(_is_supported, specs)):
        raise ConfigError(
            f"CtxOffloadConnector: this model has {len(groups)} KV cache group(s) of "
            f"{kinds}, but only full, sliding-window and chunked-local attention and "
            "MLA are supported yet; serve it without the connector."
        )
    sizes = sorted({spec.block_size for spec in specs})
    if len(sizes) > 1:
        raise ConfigError(
            f"CtxOffloadConnector: the model's KV cache groups have blocks of {sizes} "
            "tokens, but only one block size is supported yet; try "
            "--disable-hybrid-kv-cache-manager, or serve without the connector."
        )
    if len(groups) > 1 and KVConnectorTransferResults is None:
        raise ConfigError(
            f"CtxOffloadConnector: this model has {len(groups)} KV cache groups, and "
            f"vLLM {vllm.__version__} can't recompute a failed load of more than one; "
            "use a newer vLLM, or --disable-hybrid-kv-cache-manager."
        )


def _is_supported(spec: Any) -> bool:
    return (
        isinstance(spec, _SUPPORTED_SPECS)
        and type(spec).__name__ not in _UNSUPPORTED_SPECS
    )


def _layer_specs(group: Any) -> Iterator[Any]:
    """Yields the specs of a group's layers, which may be wrapped in one."""
    per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    if per_layer is None:
        yield group.kv_cache_spec
    else:
        yield from per_layer.values()


def model_shape(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> ModelShape:
    """Returns the sizes that vLLM settled on for the model's KV cache."""
    parallel = vllm_config.parallel_config
    groups = kv_cache_config.kv_cache_groups
    tokens_per_block = next(_layer_specs(groups[0])).block_size
    return ModelShape(
        tokens_per_block=tokens_per_block,
        # Of groups of one block size vLLM hashes whole blocks, unless it is told to
        # hash less (`resolve_kv_cache_block_sizes`).
        tokens_per_hash=(
            getattr(vllm_config.cache_config, "prefix_match_unit", None)
            or tokens_per_block
        ),
        bytes_per_block=_bytes_per_block(kv_cache_config),
        num_device_blocks=kv_cache_config.num_blocks,
        num_workers=parallel.world_size,
        num_engines=max(parallel.data_parallel_size_local, 1),
        groups=tuple(_group_shape(group) for group in groups),
    )


def _group_shape(group: Any) -> GroupShape:
    """Returns how far back a group's layers look, the widest view of them."""
    specs = list(_layer_specs(group))
    if all(isinstance(spec, SlidingWindowSpec) for spec in specs):
        # Speculative decoding may keep some tokens more.
        windows = [
            spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
            for spec in specs
        ]
        return GroupShape(window=max(windows))
    if all(isinstance(spec, ChunkedLocalAttentionSpec) for spec in specs):
        stretches = {spec.attention_chunk_size for spec in specs}
        if len(stretches) == 1:
            return GroupShape(stretch=stretches.pop())
    return GroupShape()


def _bytes_per_block(kv_cache_config: KVCacheConfig) -> int:
    tensors: list[Any] = kv_cache_config.kv_cache_tensors
    if hasattr(tensors[0], "layer_stride"):
        # From 0.29 on, placements in one allocation: each names the size of the whole.
        return int(tensors[0].size // kv_cache_config.num_blocks)
    # Before, one tensor a layer; packed ones name the stride of all of them together.
    packed = max(tensor.block_stride for tensor in tensors)
    separate = sum(tensor.size for tensor in tensors if not tensor.block_stride)
    return int(separate // kv_cache_config.num_blocks + packed)


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


def one_receipt(
    request: Request, receipt: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Returns the receipt, or None where another connector of ours has given one.

    Two of ours can stand in one MultiConnector, which raises, and so ends the engine,
    when two connectors return the same key. The first receipt then stands for all, and
    the tokens that later ones have loaded are added to it.
    """
    if receipt is None:
        return None
    given = vars(request).setdefault("_ctx_offload_receipt", receipt)
    if given is receipt:
        return receipt
    given["ctx"]["loaded_tokens"] += receipt["ctx"]["loaded_tokens"]
    return None


def step_events(output: SchedulerOutput) -> StepEvents:
    """Translates what vLLM's scheduler decided for a step."""
    cached = output.scheduled_cached_reqs
    tables = [
        TableUpdate(new.req_id, new.block_ids, new.num_computed_tokens, replace=True)
        for new in output.scheduled_new_reqs
    ]
    for request_id, block_ids, num_computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        resumed = request_id in cached.resumed_req_ids
        if block_ids is not None:
            tables.append(
                TableUpdate(request_id, block_ids, num_computed, replace=resumed)
            )
    return StepEvents(
        num_scheduled_tokens=output.num_scheduled_tokens,
        tables=tables,
        # A resumed request was preempted, whether or not this release says so too.
        preempted=(output.preempted_req_ids or set()) | cached.resumed_req_ids,
    )
