"""The connector's figures as vLLM's log line and as Prometheus metrics."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from vllm_ctx_offload.adapters.catalogue import (
    CONNECTOR_LABEL,
    METRICS,
    PREFIX,
    SECONDS_BUCKETS,
)
from vllm_ctx_offload.stats import Key, parse_key

__all__ = ["MetricClasses", "PrometheusMetrics", "summarize"]

_MIB: Final = 1024**2


class MetricClasses(NamedTuple):
    """Those of prometheus_client, or what stands for them, as under Ray."""

    counter: Any
    gauge: Any
    histogram: Any


class PrometheusMetrics:
    """Registers the metrics and brings them up to date, per engine."""

    def __init__(
        self,
        classes: MetricClasses,
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> None:
        self._engines = per_engine_labelvalues
        # What to call with a value, by engine and key: found once.
        self._sinks: dict[tuple[int, str], Callable[[Any], None]] = {}
        self._metrics: dict[str, Any] = {}
        classes = classes._replace(counter=_without_created(classes.counter))
        for name, metric in METRICS.items():
            options: dict[str, Any] = {}
            if metric.kind == "gauge":
                # Of several API servers each hears of some steps only.
                options["multiprocess_mode"] = "mostrecent"
            elif metric.kind == "histogram":
                options["buckets"] = list(SECONDS_BUCKETS)
            self._metrics[name] = getattr(classes, metric.kind)(
                name=PREFIX + name,
                documentation=metric.help,
                labelnames=[*labelnames, CONNECTOR_LABEL, *metric.labels],
                **options,
            )

    def observe(self, figures: Mapping[str, Any], engine: int) -> None:
        """Takes in a result of `OffloadStats.take`; unknown names change nothing."""
        sinks = self._sinks
        for text, value in figures.items():
            sink = sinks.get((engine, text))
            if sink is None:
                sink = sinks[engine, text] = self._make_sink(engine, parse_key(text))
            sink(value)

    def _make_sink(self, engine: int, key: Key) -> Callable[[Any], None]:
        name, labels = key.name, key.labels
        if name == "transfer_seconds":
            name, labels = f"{labels[0]}_seconds", labels[1:]
        if (metric := METRICS.get(name)) is None:
            return _ignore
        child = self._metrics[name].labels(
            *self._engines[engine], str(key.connector), *labels
        )
        if metric.kind == "histogram":
            return lambda values: _observe_all(child, values)
        sink: Callable[[Any], None] = (
            child.inc if metric.kind == "counter" else child.set
        )
        return sink


def _without_created(counter_cls: Any) -> Any:
    """Returns a class of counters that show no `_created` samples.

    prometheus_client adds one to every counter, which nearly doubles a scrape with many
    tenants. What stands for its classes elsewhere is left as it is.
    """
    if not hasattr(counter_cls, "collect"):
        return counter_cls

    def collect(counter: Any) -> Iterable[Any]:
        families = [*counter_cls.collect(counter)]
        for family in families:
            created = f"{family.name}_created"
            family.samples = [s for s in family.samples if s.name != created]
        return families

    return type(counter_cls.__name__, (counter_cls,), {"collect": collect})


def _ignore(value: object) -> None:
    """Takes figures that are not shown."""


def _observe_all(histogram: Any, values: Iterable[float]) -> None:
    for value in values:
        histogram.observe(value)


def summarize(figures: Mapping[str, Any]) -> dict[str, int | float]:
    """Returns the figures of one logging interval, for vLLM's log line.

    Those of a second connector of ours stand apart from those of the first: the same
    tokens were looked up in both.
    """
    totals: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for text, value in figures.items():
        key = parse_key(text)
        if not isinstance(value, list):
            totals[key.connector][key.name] += value
    summary: dict[str, int | float] = {}
    for connector in sorted(totals.keys() | {0}):
        suffix = f" ({connector})" if connector else ""
        for name, value in _summary(totals[connector]).items():
            summary[name + suffix] = value
    return summary


def _summary(totals: Mapping[str, float]) -> dict[str, int | float]:
    return {
        "lookup tokens": int(totals["lookup_tokens"]),
        "host hit tokens": int(totals["hit_tokens"]),
        "stored MiB": round(totals["stored_bytes"] / _MIB, 1),
        "loaded MiB": round(totals["loaded_bytes"] / _MIB, 1),
        "evicted chunks": int(totals["evicted_chunks"]),
        "failed transfers": int(totals["transfer_failures"]),
    }
