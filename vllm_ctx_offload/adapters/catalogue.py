"""Every metric on /metrics: its type, labels and meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

__all__ = ["CONNECTOR_LABEL", "METRICS", "PREFIX", "SECONDS_BUCKETS", "Metric"]

PREFIX: Final = "vllm:ctx_offload_"
# On every metric, after vLLM's own (`model_name`, `engine`): "0", or the number of the
# connector where a MultiConnector holds several of ours.
CONNECTOR_LABEL: Final = "connector"
# A copy of one chunk takes a millisecond, one of a long prompt beside others seconds.
SECONDS_BUCKETS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)


class Metric(NamedTuple):
    """One metric; a counter's name gets `_total` when it is shown."""

    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str  # ends with what a high value means


METRICS: Final[Mapping[str, Metric]] = {
    # Of each admitted request, the tokens past the device's own hit. They are the sum
    # of the three below.
    "lookup_tokens": Metric(
        "counter",
        ("tenant",),
        "Tokens of admitted requests that the device cache did not hold: the sum of "
        "hit, missed and skipped tokens. High: the device cache alone misses much.",
    ),
    "hit_tokens": Metric(
        "counter",
        ("tenant",),
        "Of lookup_tokens, those found in host memory. High is good.",
    ),
    "missed_tokens": Metric(
        "counter",
        ("tenant",),
        "Of lookup_tokens, those that host memory did not hold. High: prompts are new, "
        "or their chunks were evicted; see evicted_chunks and rejected_stores.",
    ),
    "skipped_tokens": Metric(
        "counter",
        ("tenant", "reason"),
        "Of lookup_tokens, those that were not looked up. High: requests or their "
        "tenant's account say load = false, or (load_failed) copies fail.",
    ),
    "stored_bytes": Metric(
        "counter",
        ("tenant",),
        "Bytes copied from the device to host memory. High against loaded_bytes: what "
        "is stored is rarely used again; a store_threshold of 2 would save the copies.",
    ),
    "loaded_bytes": Metric(
        "counter",
        ("tenant",),
        "Bytes copied from host memory to the device. High is good: they were not "
        "computed again.",
    ),
    "evicted_chunks": Metric(
        "counter",
        ("tenant", "by"),
        "Chunks of `tenant` evicted to make room for chunks of `by`. High: the pool is "
        "small for the traffic; by another tenant: what exceeds its reservation goes.",
    ),
    "reservation_breaches": Metric(
        "counter",
        ("tenant",),
        "Chunks that others took of a tenant that was within its reservation and had "
        "not released them. Never shown but after a fault. High: report it.",
    ),
    "rejected_stores": Metric(
        "counter",
        ("tenant", "reason"),
        "Chunks that found no place, each time they were offered. High for full or "
        "limit: what could go is in use or reserved, enlarge the pool or the limit; "
        "for priority or expected_reuse: all that could go is worth more.",
    ),
    "hints_rejected": Metric(
        "counter",
        ("field", "reason"),
        "Fields of kv_transfer_params that were ignored or clamped. High: a client "
        "sends what this server does not accept; reason budget: more is protected by "
        "raised priorities than max_protected allows.",
    ),
    "transfer_failures": Metric(
        "counter",
        ("direction",),
        "Copies that failed, on each worker. Anything above 0 deserves a look at the "
        "log: what was to be loaded is computed, what was to be stored is lost.",
    ),
    "resident_bytes": Metric(
        "gauge",
        ("tenant",),
        "Host memory that chunks of the tenant hold, those in flight included. High: "
        "near limit_bytes its own chunks give way to each other; above reserved_bytes "
        "other tenants may take the difference.",
    ),
    "reserved_bytes": Metric(
        "gauge",
        ("tenant",),
        "Host memory that no other tenant can take from this one. High: in sum near "
        "capacity_bytes, little is left to share.",
    ),
    "limit_bytes": Metric(
        "gauge",
        ("tenant",),
        "The most host memory that chunks of the tenant may hold; capacity_bytes where "
        "it has no limit. High: one tenant alone can fill the pool.",
    ),
    "capacity_bytes": Metric(
        "gauge",
        (),
        "Host memory of the pool, over all workers of the engine. High: more context "
        "is kept, and less memory is left for all else on the machine.",
    ),
    "pinned_bytes": Metric(
        "gauge",
        (),
        "Host memory that can't be evicted now, because a transfer or a waiting "
        "request uses it. High, near capacity_bytes: stores are rejected as full.",
    ),
    "protected_bytes": Metric(
        "gauge",
        (),
        "Host memory that priorities above 35 protect. High, near max_protected: "
        "raised priorities are treated as 35 and counted in hints_rejected.",
    ),
    "disabled": Metric(
        "gauge",
        (),
        "1 after an internal error, from when on nothing is offloaded until the engine "
        "is started again. High, that is 1: read the log and report it.",
    ),
    "load_seconds": Metric(
        "histogram",
        (),
        "Time from the submission of a load to the end of its copy, on each worker. "
        "High: requests wait for copies; the link is slow or busy.",
    ),
    "store_seconds": Metric(
        "histogram",
        (),
        "Time from the submission of a store to the end of its copy, on each worker, "
        "the wait for the forward pass included. High: chunks are pinned for longer "
        "and can be hit later.",
    ),
    "load_wait_seconds": Metric(
        "histogram",
        (),
        "Time that admitted requests waited for chunks that others were storing. High, "
        "near load_wait_ms: the wait was given up and the tokens were computed.",
    ),
}
