"""A warning, once for each kind, when offloading does less than it should."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from vllm_ctx_offload.adapters.catalogue import PREFIX
from vllm_ctx_offload.stats import parse_key

__all__ = ["DegradationLog"]

logger = logging.getLogger(__name__)

# (counter, the label value that matters) -> what to say, before the metric to look at.
# Hints that a client got wrong are told of where the request is known.
_KINDS: Final[Mapping[tuple[str, str], str]] = {
    ("rejected_stores", "full"): (
        "Chunks could not be stored, because transfers, waiting requests and the "
        "reservations of others use all of the pool that could be evicted; raise "
        "cpu_bytes_to_use, or lower reservations"
    ),
    ("rejected_stores", "limit"): (
        "Chunks could not be stored, because transfers, waiting requests and the rest "
        "of their prompt use all that their tenant may hold; raise its limit"
    ),
    ("transfer_failures", "load"): (
        "A copy from host memory to the device failed; vLLM computes the tokens instead"
    ),
    ("transfer_failures", "store"): (
        "A copy from the device to host memory failed; its chunks are not stored"
    ),
    ("hints_rejected", "budget"): (
        "Raised priorities ask for more than max_protected; what exceeds it is treated "
        "as priority 35"
    ),
}


class DegradationLog:
    """Looks through what is counted anyway; the cost is a set comparison per step."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._warned: set[tuple[str, str]] = set()

    def look_at(self, figures: Mapping[str, Any]) -> None:
        """Warns of each kind of trouble in a result of `OffloadStats.take`, once."""
        if self._seen.issuperset(figures):
            return
        for text in figures.keys() - self._seen:
            key = parse_key(text)
            kind = (key.name, key.labels[-1] if key.labels else "")
            # A declared counter is 0 until there is something to tell.
            if kind not in _KINDS or figures[text]:
                self._seen.add(text)
                self._warn(kind)

    def _warn(self, kind: tuple[str, str]) -> None:
        message = _KINDS.get(kind)
        if message is not None and kind not in self._warned:
            self._warned.add(kind)
            logger.warning(
                "%s. Said once; %s%s_total counts.", message, PREFIX, kind[0]
            )
