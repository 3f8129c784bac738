"""What the demo prints: a table row for each request, the summary, the comparison."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# The label values of vllm:prompt_tokens_by_source_total, vLLM's own account of where
# the tokens of prompts came from.
DEVICE, HOST, COMPUTED = "local_cache_hit", "external_kv_transfer", "local_compute"
SOURCES = (DEVICE, HOST, COMPUTED)
_SAMPLE = re.compile(
    r'^vllm:prompt_tokens_by_source_total\{[^}]*\bsource="(\w+)"[^}]*\} (\S+)$',
    re.MULTILINE,
)
# Chunks of `tenant` that were evicted to make room for `by`.
_EVICTED = re.compile(
    r"^vllm:ctx_offload_evicted_chunks_total\{([^}]*)\} (\S+)$", re.MULTILINE
)
_LABEL = re.compile(r'(\w+)="([^"]*)"')

COLD, LOCAL_HIT, HOST_HIT, PARTIAL = "cold", "local hit", "host hit", "partial"

HEADER = (
    "conversation  tenant   turn  prompt  device    host  computed   first token  kind"
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


class Outcome(NamedTuple):
    """How the quiet tenants' conversations came back after the noisy one's prompts."""

    rows: Sequence[Served]
    evicted: Mapping[str, int]  # by tenant: its chunks that made room for the noisy one

    def kept(self, tenant: str | None = None) -> float:
        """Returns the share of prompt tokens from the cache, of one tenant or all."""
        rows = [row for row in self.rows if tenant in (None, row.tenant)]
        return sum(row.device + row.host for row in rows) / sum(
            row.prompt for row in rows
        )


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


def evicted_for(by: str, metrics: str) -> dict[str, int]:
    """Returns how many chunks of each tenant were evicted to make room for `by`.

    Args:
        by: The tenant that stored something.
        metrics: The text that the server's ``/metrics`` returns.
    """
    totals: dict[str, int] = {}
    for label_text, value in _EVICTED.findall(metrics):
        labels = dict(_LABEL.findall(label_text))
        if labels.get("by") == by:
            tenant = labels["tenant"]
            totals[tenant] = totals.get(tenant, 0) + int(float(value))
    return totals


def row_start(conversation: str, tenant: str, turn: int) -> str:
    """Returns the part of a row that is known before the request is sent."""
    return f"{conversation:<12}  {tenant:<7}  {turn:>4}  "


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


def comparison(noisy: str, ctx: Outcome, lru: Outcome) -> str:
    """Returns a table of what `noisy` did to the others under either policy."""
    quiet = sorted({row.tenant for row in ctx.rows})
    lines = [("eviction_policy", "ctx", "lru")]
    lines += [
        (
            f"{tenant}: prompt tokens that came back from the cache",
            f"{ctx.kept(tenant):.1%}",
            f"{lru.kept(tenant):.1%}",
        )
        for tenant in quiet
    ]
    lines += [
        (
            f"{tenant}: chunks evicted to make room for {noisy}"
            if tenant != noisy
            else f"{tenant}: its own chunks evicted for newer ones",
            f"{ctx.evicted.get(tenant, 0):,}",
            f"{lru.evicted.get(tenant, 0):,}",
        )
        for tenant in (*quiet, noisy)
    ]
    return "\n".join(f"{what:<56}{one:>8}{other:>8}" for what, one, other in lines)
