"""Counters that travel from the scheduler and the workers to the metrics."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

__all__ = ["OffloadStats", "merge_stats"]


class OffloadStats:
    """Increments since the last `take`; they only ever add up, so none can fall."""

    def __init__(self) -> None:
        self._counts: defaultdict[tuple[str, ...], float] = defaultdict(float)

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        """Adds `by` to counter `name` for its label values, in their fixed order."""
        self._counts[(name, *labels)] += by

    def take(self) -> dict[str, float]:
        """Returns the increments since the last call and starts anew."""
        # Text keys, because the data crosses process borders as plain JSON types.
        taken = {json.dumps(key): value for key, value in self._counts.items()}
        self._counts.clear()
        return taken


def merge_stats(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Returns the sum of two results of `take`."""
    merged = dict(one)
    for key, value in other.items():
        merged[key] = merged.get(key, 0) + value
    return merged
