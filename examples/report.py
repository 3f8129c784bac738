"""What the demo prints: a table row for each request, and the summary."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import NamedTuple

# The label values of vllm:prompt_tokens_by_source_total, vLLM's own account of where
# the tokens of prompts came from.
DEVICE, HOST, COMPUTED = "local_cache_hit", "external_kv_transfer", "local_compute"
SOURCES = (DEVICE, HOST, COMPUTED)
_SAMPLE = re.compile(
    r'^vllm:prompt_tokens_by_source_total\{[^}]*\bsource="(\w+)"[^}]*\} (\S+)$',
    re.MULTILINE,
)

COLD, LOCAL_HIT, HOST_HIT, PARTIAL = "cold", "local hit", "host hit", "partial"

HEADER = (
    "conversation  tenant  turn  prompt  device    host  computed   first token  kind"
)


class Served(NamedTuple):
    """One request: who asked, where its tokens came from, how long it took."""

    conversation: str
    tenant: str
    turn: int
    prompt: int
    device: int
    host: int
    computed: int
    seconds: float  # from sending the request to the first token of the answer

    @property
    def kind(self) -> str:
        """What the request is an example of: whatever most of its tokens are."""
        if self.computed == self.prompt:
            return COLD
        if max(self.device, self.host) < self.computed:
            return PARTIAL
        return HOST_HIT if self.host > self.device else LOCAL_HIT


def tokens_by_source(metrics: str) -> dict[str, int]:
    """Returns how many prompt tokens came from where, over all requests so far.

    Args:
        metrics: The text that the server's ``/metrics`` returns.
    """
    totals = dict.fromkeys(SOURCES, 0)
    for source, value in _SAMPLE.findall(metrics):
        if source in totals:
            totals[source] += int(float(value))
    return totals


def row_start(conversation: str, tenant: str, turn: int) -> str:
    """Returns the part of a row that is known before the request is sent."""
    return f"{conversation:<12}  {tenant:<6}  {turn:>4}  "


def row_end(served: Served) -> str:
    """Returns the rest of the row."""
    return (
        f"{served.prompt:>6,}  {served.device:>6,}  {served.host:>6,}  "
        f"{served.computed:>8,}  {served.seconds:>10.2f} s  {served.kind}"
    )


def summary(rows: Sequence[Served]) -> str:
    """Returns a line with the median time to the first token of each kind.

    What the requests computed stands beside it: it differs, and takes its time.
    """
    parts = []
    for kind in (COLD, LOCAL_HIT, HOST_HIT):
        chosen = [row for row in rows if row.kind == kind]
        if not chosen:
            parts.append(f"{kind} none")
            continue
        seconds = statistics.median(row.seconds for row in chosen)
        computed = statistics.median(row.computed for row in chosen)
        parts.append(f"{kind} {seconds:.2f} s ({computed:,.0f} computed)")
    return "Median first token: " + ", ".join(parts)


def speedup(rows: Sequence[Served]) -> float | None:
    """Returns cold over host hit, in median time; None where either is missing."""
    cold = [row.seconds for row in rows if row.kind == COLD]
    host = [row.seconds for row in rows if row.kind == HOST_HIT]
    if not cold or not host:
        return None
    return statistics.median(cold) / statistics.median(host)
