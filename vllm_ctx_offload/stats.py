"""Figures that travel from the scheduler and the workers to the metrics.

They cross process borders as plain data: a flat mapping whose keys are JSON lists of
a name and its label values. A counter's value is its increment, a gauge's is its last
value, a histogram's is the list of what was observed.
"""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

__all__ = [
    "GAUGES",
    "HISTOGRAMS",
    "MAX_PAIRS",
    "OTHERS",
    "Key",
    "OffloadStats",
    "merge_stats",
    "of_connector",
    "parse_key",
]

# What is neither is a counter. The metrics' table, `adapters.metrics.METRICS`, has to
# agree, which a test checks.
GAUGES: Final = frozenset(
    {
        "capacity_bytes",
        "disabled",
        "limit_bytes",
        "pinned_bytes",
        "protected_bytes",
        "reserved_bytes",
        "resident_bytes",
    }
)
# `transfer_seconds` has the label `direction`; it is shown as two.
HISTOGRAMS: Final = frozenset({"load_wait_seconds", "transfer_seconds"})
# Pairs of two tenants that a counter tells apart. Of 200 tenants there are 40,000, with
# which a scrape would take a second; from here on the second one is OTHERS.
MAX_PAIRS: Final = 1_000
OTHERS: Final = "(others)"


class OffloadStats:
    """What happened since the last `take`.

    Increments only ever add up, so no counter can fall. A gauge is taken once each time
    it was set. Labels are bounded by their callers: declared tenants and fixed words.
    """

    def __init__(self) -> None:
        # Counters, by name and label values. What is counted several times a step is
        # added here without a call, which would cost more than the adding.
        self.counts: defaultdict[tuple[str, ...], float] = defaultdict(float)
        self._observed: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
        self._gauges: dict[tuple[str, ...], float] = {}
        # The text of each key, made once: that costs more than all the rest.
        self._texts: dict[tuple[str, ...], str] = {}
        self._pairs: set[tuple[str, str, str]] = set()

    def count(self, *key: str, by: float = 1) -> None:
        """Adds `by` to a counter: its name and its label values, in their order."""
        self.counts[key] += by

    def count_pair(self, name: str, tenant: str, other: str, *, by: float) -> None:
        """Adds to a counter of pairs of tenants; of two different ones to MAX_PAIRS."""
        pair = (name, tenant, other)
        if tenant != other and pair not in self._pairs:
            if len(self._pairs) < MAX_PAIRS:
                self._pairs.add(pair)
            else:
                pair = (name, tenant, OTHERS)
        self.counts[pair] += by

    def observe(self, *key: str, value: float) -> None:
        """Adds an observation to a histogram: its name, and its label values."""
        self._observed[key].append(value)

    def declare(self, *key: str) -> None:
        """Has a counter or histogram shown before there is anything to show.

        Without its zero, the first increment of a series is no increase to Prometheus.
        """
        if key[0] in HISTOGRAMS:
            self._observed[key].extend(())
        else:
            self.counts[key] += 0

    def set(self, *key: str, to: float) -> None:
        """Sets a gauge: its name, and its label values in their fixed order."""
        self._gauges[key] = to

    def take(self) -> dict[str, Any]:
        """Returns what happened since the last call and starts anew."""
        texts, taken = self._texts, {}
        for figures in (self.counts, self._observed, self._gauges):
            if figures:
                for key, value in figures.items():
                    taken[texts.get(key) or self._make_text(key)] = value
                figures.clear()
        return taken

    def _make_text(self, key: tuple[str, ...]) -> str:
        text = self._texts[key] = json.dumps(key)
        return text


class Key(NamedTuple):
    """What the text of a key says."""

    connector: int  # which of several of ours in a MultiConnector; 0: the first
    name: str
    labels: tuple[str, ...]


# Bounded as the labels are, and parsing costs more than all that is done with a value.
@functools.cache
def parse_key(text: str) -> Key:
    """Returns what a key of a result of `OffloadStats.take` stands for."""
    parts = json.loads(text)
    connector = parts.pop(0) if isinstance(parts[0], int) else 0
    return Key(connector, parts[0], tuple(parts[1:]))


def of_connector(connector: int, figures: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures under keys that name the connector they are of.

    vLLM's MultiConnector adds up the figures of all connectors of one class, so only
    their keys can keep them apart. Those of the first need no number.
    """
    if not connector:
        return figures
    return {f"[{connector}, {key[1:]}": value for key, value in figures.items()}


def merge_stats(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Returns both of two results of `take`, of which `other` is the later one."""
    merged = {**one, **other}
    for key in one.keys() & other.keys():
        if parse_key(key).name not in GAUGES:
            merged[key] = one[key] + other[key]  # `+=` would change the list of `one`
    return merged
