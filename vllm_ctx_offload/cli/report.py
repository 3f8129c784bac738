"""What `simulate` found: tables, JSON and a plot."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_ctx_offload.cli.replay import Pool, PreparedRequest, Rates
from vllm_ctx_offload.cli.traces import Trace
from vllm_ctx_offload.config import OffloadConfig
from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.memory import format_bytes

__all__ = ["Result", "as_json", "check_plot", "draw", "notes", "print_tables"]

# Of a table that goes to a file or a pipe, which has no width of its own.
_PIPE_WIDTH: Final = 132
_LABELS: Final = {
    "config": "configured",
    "lru": "lru",
    "vllm_lru": "vLLM lru",
    "vllm_arc": "vLLM arc",
    "bound": "bound",
}


class Result(NamedTuple):
    """Rates at one capacity, by policy."""

    pool: Pool
    total: dict[str, Rates]
    tenants: dict[str, dict[str, Rates]]  # tenant, then policy


def print_tables(results: Sequence[Result]) -> None:
    """Prints one table for each capacity."""
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    for result in results:
        title = _title(result.pool)
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0)
        table.add_column("tenant", overflow="fold", min_width=8)
        table.add_column("requests", justify="right", no_wrap=True)
        for policy in result.total:
            table.add_column(_LABELS[policy], justify="right", no_wrap=True)
        for tenant, by_policy in result.tenants.items():
            table.add_row(*_row(tenant, by_policy))
        if len(result.tenants) > 1:
            table.add_section()
            table.add_row(*_row("all", result.total))
        console.print(table)
    console.print("Hit rates in percent: blocks/tokens.", highlight=False)


def _title(pool: Pool) -> str:
    size = ""
    if pool.bytes_per_chunk > 1:
        size = f" ({format_bytes(pool.num_chunks * pool.bytes_per_chunk)})"
    tokens = pool.num_chunks * pool.tokens_per_chunk
    return f"{pool.num_chunks:,} chunks{size}, {tokens:,} tokens"


def _row(name: str, by_policy: dict[str, Rates]) -> list[str | Text]:
    cells = [f"{r.block_percent:.1f}/{r.token_percent:.1f}" for r in by_policy.values()]
    return [Text(name), f"{by_policy['config'].num_requests:,}", *cells]


def _rejected(requests: Sequence[PreparedRequest]) -> Counter[str]:
    return Counter(
        f"{hint.field} ({hint.reason})"
        for request in requests
        for hint in request.req_context.rejected
    )


def _undeclared(trace: Trace, config: OffloadConfig) -> list[str]:
    named = {request.ctx.get("tenant") for request in trace.requests}
    return sorted(
        name for name in named if isinstance(name, str) and name not in config.tenants
    )


def notes(
    trace: Trace, config: OffloadConfig, requests: Sequence[PreparedRequest]
) -> Iterator[str]:
    """Yields what the reader of the tables should know, one sentence each."""
    if names := _undeclared(trace, config):
        shown = ", ".join(f"{name!r:.60}" for name in names[:5]) + (
            ", ..." if len(names) > 5 else ""
        )
        yield f"Not declared, so counted as 'default': {len(names)} tenant(s): {shown}"
    if rejected := _rejected(requests):
        shown = ", ".join(f"{what}: {count}" for what, count in rejected.most_common(5))
        yield f"Hints ignored or clamped: {shown}"


def as_json(
    path: Path,
    trace: Trace,
    config: OffloadConfig,
    requests: Sequence[PreparedRequest],
    results: Sequence[Result],
) -> dict[str, Any]:
    """Returns all that the tables hold, and more exactly."""
    return {
        "trace": str(path),
        "requests": len(requests),
        "tokens_per_chunk": trace.tokens_per_chunk,
        "undeclared_tenants": _undeclared(trace, config),
        "rejected_hints": dict(_rejected(requests)),
        "results": [
            {
                "capacity_chunks": result.pool.num_chunks,
                "total": _rates_as_json(result.total),
                "tenants": {
                    tenant: _rates_as_json(by_policy)
                    for tenant, by_policy in result.tenants.items()
                },
            }
            for result in results
        ],
    }


def _rates_as_json(by_policy: dict[str, Rates]) -> dict[str, Any]:
    some = by_policy["config"]
    return {
        "requests": some.num_requests,
        "chunks": some.num_chunks,
        "tokens": some.num_tokens,
        "block_hit_percent": {p: r.block_percent for p, r in by_policy.items()},
        "token_hit_percent": {p: r.token_percent for p, r in by_policy.items()},
    }


# ---- plot


def check_plot(path: Path) -> None:
    """Raises ConfigError unless a plot can be drawn; before an hour of replaying."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot needs matplotlib; install vllm-ctx-offload[plot], or leave it out."
        )
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}.")


def draw(path: Path, results: Sequence[Result]) -> None:
    """Writes a PNG: block hit rate against capacity, a line for each policy.

    All requests together, and beside them each tenant where there are 2 to 8.
    """
    # By name: an optional package that the type checker does not have either.
    figure_class = importlib.import_module("matplotlib.figure").Figure
    results = sorted(results, key=lambda result: result.pool.num_chunks)
    panels = {"all requests": [result.total for result in results]}
    names = list(results[0].tenants)
    if 2 <= len(names) <= 8:
        for name in names:
            panels[name] = [result.tenants[name] for result in results]
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure = figure_class(figsize=(2 + 4.5 * columns, 1 + 3.5 * rows))
    capacities = [result.pool.num_chunks for result in results]
    for place, (name, rates) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(rows, columns, place)
        for policy in rates[0]:
            percent = [by_policy[policy].block_percent for by_policy in rates]
            # Without tenants and hints it lies under the line of LRU: let it show.
            width = 5 if policy == "config" else 1.5
            axes.plot(capacities, percent, marker="o", lw=width, label=_LABELS[policy])
        axes.set_title(name, parse_math=False)
        axes.set_xlabel("capacity in chunks")
        axes.set_ylabel("block hit rate in %")
        axes.set_ylim(0, 100)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, format="png", dpi=120)
