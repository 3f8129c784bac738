"""The connector's counters as vLLM's log line and as Prometheus metrics."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

__all__ = ["PrometheusCounters", "summarize"]


class _Counter(NamedTuple):
    labels: tuple[str, ...]
    help: str


# Counter of `OffloadStats` -> its Prometheus name without prefix is the same.
_COUNTERS: Final[Mapping[str, _Counter]] = {
    "lookup_tokens": _Counter(
        ("tenant",),
        "Tokens of admitted requests that the device cache did not hold. High against "
        "hit_tokens: prompts are new, or were evicted from host memory.",
    ),
    "hit_tokens": _Counter(
        ("tenant",), "Of lookup_tokens, those found in host memory; high is good."
    ),
    "missed_tokens": _Counter(
        ("tenant",), "Of lookup_tokens, those that host memory did not hold."
    ),
    "skipped_tokens": _Counter(
        ("tenant", "reason"), "Of lookup_tokens, those that were not looked up."
    ),
    "stored_bytes": _Counter(("tenant",), "Bytes copied from the device to the host."),
    "loaded_bytes": _Counter(("tenant",), "Bytes copied from the host to the device."),
    "evicted_chunks": _Counter(
        ("tenant", "by"),
        "Chunks of `tenant` evicted to make room for `by`. High: the pool is small "
        "for the traffic.",
    ),
    "rejected_stores": _Counter(
        ("tenant", "reason"),
        "Chunks that found no place. Reason full: transfers pin what could go, make "
        "the pool larger; limit: the same of a tenant at its limit; priority or "
        "expected_reuse: all that could go is worth more to its tenant.",
    ),
    "hints_rejected": _Counter(
        ("field", "reason"),
        "Fields of kv_transfer_params that were ignored or clamped. High: a client "
        "sends what this server does not accept.",
    ),
    "transfer_failures": _Counter(
        ("direction",), "Copies that failed; anything above 0 deserves a look."
    ),
}
_MIB: Final = 1024**2


class PrometheusCounters:
    """Registers the counters and adds increments to them, per engine."""

    def __init__(
        self,
        counter_cls: Any,
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> None:
        self._engines = per_engine_labelvalues
        self._counters = {
            name: counter_cls(
                name=f"vllm:ctx_offload_{name}",
                documentation=counter.help,
                labelnames=[*labelnames, *counter.labels],
            )
            for name, counter in _COUNTERS.items()
        }

    def observe(self, increments: Mapping[str, float], engine: int) -> None:
        """Adds the result of `OffloadStats.take`."""
        for key, value in increments.items():
            name, *labels = json.loads(key)
            if (counter := self._counters.get(name)) is not None:
                counter.labels(*self._engines[engine], *labels).inc(value)


def summarize(increments: Mapping[str, float]) -> dict[str, int | float]:
    """Returns the figures of one logging interval, for vLLM's log line."""
    totals: defaultdict[str, float] = defaultdict(float)
    for key, value in increments.items():
        totals[json.loads(key)[0]] += value
    return {
        "lookup tokens": int(totals["lookup_tokens"]),
        "host hit tokens": int(totals["hit_tokens"]),
        "stored MiB": round(totals["stored_bytes"] / _MIB, 1),
        "loaded MiB": round(totals["loaded_bytes"] / _MIB, 1),
        "evicted chunks": int(totals["evicted_chunks"]),
        "failed transfers": int(totals["transfer_failures"]),
    }
