"""`vllm-ctx-offload top`: who holds what in host memory, live."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vllm_ctx_offload.cli.scrape import (
    PoolFigures,
    TenantFigures,
    fetch,
    metrics_url,
    parse_page,
)
from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.memory import format_bytes

__all__ = ["Snapshot", "Surroundings", "add_top", "as_json", "draw", "watch"]

# Of a table that goes to a file or a pipe, which has no width of its own.
_PIPE_WIDTH: Final = 150
_MOST_EVICTORS: Final = 3
_NOTHING_YET: Final = "no figures yet: they come with the server's first request."
_LETTERS: Final = ("", "K", "M", "G", "T", "P")
_COLUMNS: Final = (
    *("resident", "reserved", "limit", "hits", "now", "evicted by", "rejected"),
    *("load/s", "store/s"),
)


class Surroundings(NamedTuple):
    """All that is not a decision; replaced in tests."""

    fetch: Callable[[str], str] = fetch
    wait: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic


class Snapshot(NamedTuple):
    """One reading of the page; `seconds` since the one before, 0: the first."""

    pools: dict[str, PoolFigures]
    before: dict[str, PoolFigures]
    seconds: float

    def old(self, connector: str, tenant: str) -> TenantFigures:
        """Returns the figures of the reading before."""
        pool = self.before.get(connector)
        return (pool.tenants.get(tenant) if pool else None) or TenantFigures()


def add_top(commands: Any) -> None:
    """Adds the command to the `add_subparsers` of the command line."""
    top = commands.add_parser(
        "top",
        help="show what each tenant holds, hits and loses, from a server's /metrics",
        description="A live table of tenants from the /metrics of a vLLM server, added "
        "up over its engines. Counts and `hits` are since the start of the server, "
        "`now` (hits) and rates are of the last interval; sizes are in bytes, K, M, G "
        "and T are powers of 1024. Ctrl-C ends it.",
    )
    top.add_argument("url", metavar="URL", help="as http://localhost:8000")
    top.add_argument(
        "--interval",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="between two readings (default 2)",
    )
    top.add_argument(
        "--once",
        action="store_true",
        help="print one table and end; with --interval 0 of a single reading, which "
        "has no rates",
    )
    top.add_argument(
        "--json", action="store_true", help="print a line of JSON for each reading"
    )
    top.set_defaults(run=run_top)


def run_top(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    try:
        if not 0 <= args.interval <= 3600 or not (args.interval or args.once):
            raise ConfigError(
                f"--interval {args.interval:g} is no time to wait between readings; "
                "give 0.1 to 3600 seconds, or 0 together with --once."
            )
        with contextlib.suppress(KeyboardInterrupt):
            _show(watch(args.url, args.interval, Surroundings()), args)
    except ConfigError as error:
        print(f"vllm-ctx-offload top: {error}", file=sys.stderr)
        return 1
    return 0


def _show(readings: Iterator[Snapshot | str], args: argparse.Namespace) -> None:
    if args.once:
        reading = next(readings)
        if args.interval:
            reading = next(readings)
        if isinstance(reading, str):
            raise ConfigError(reading)
        if args.json:
            print(json.dumps(as_json(reading)))
        else:
            console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
            console.print(draw(reading))
        return
    if args.json:
        for reading in readings:
            plain = {"error": reading} if isinstance(reading, str) else as_json(reading)
            print(json.dumps(plain))
            sys.stdout.flush()
        return
    if sys.stdout.isatty():
        _draw_in_place(readings)
        return
    console = Console(width=_PIPE_WIDTH)
    for reading in readings:
        console.print(Text(reading) if isinstance(reading, str) else draw(reading))


def _draw_in_place(readings: Iterator[Snapshot | str]) -> None:
    last: RenderableType = ""
    with Live(console=Console(), auto_refresh=False) as live:
        for reading in readings:
            if isinstance(reading, str):
                live.update(Group(last, Text(reading, "red")), refresh=True)
            else:
                last = draw(reading)
                live.update(last, refresh=True)


def watch(
    address: str, interval: float, surroundings: Surroundings
) -> Iterator[Snapshot | str]:
    """Yields readings for ever, and a sentence where there is nothing to show.

    Raises:
        ConfigError: the first one fails.
    """
    url = metrics_url(address)
    read_at = surroundings.clock()
    pools = parse_page(surroundings.fetch(url))
    yield Snapshot(pools, {}, 0.0) if pools else _NOTHING_YET
    while True:
        surroundings.wait(interval)
        now = surroundings.clock()
        try:
            before, pools = pools, parse_page(surroundings.fetch(url))
        except ConfigError as error:
            yield str(error)
            continue
        yield Snapshot(pools, before, now - read_at) if pools else _NOTHING_YET
        read_at = now


def _since(new: float, old: float) -> float:
    """Returns an increment; a server that was started again counts from 0."""
    return new - old if new >= old else new


def _rate(new: float, old: float, seconds: float) -> float | None:
    return _since(new, old) / seconds if seconds > 0 else None


def _hit_rate(tenant: TenantFigures, old: TenantFigures) -> float | None:
    lookups = _since(tenant.lookup_tokens, old.lookup_tokens)
    return _since(tenant.hit_tokens, old.hit_tokens) / lookups if lookups else None


def as_json(snapshot: Snapshot) -> dict[str, Any]:
    """Returns a reading as plain data; a rate that is not known is null."""
    pools = []
    for connector, pool in sorted(snapshot.pools.items()):
        plain = {name: getattr(pool, name) for name in PoolFigures.__slots__}
        plain["engines"] = sorted(pool.engines)
        plain["tenants"] = {
            name: _tenant_as_json(
                tenant, snapshot.old(connector, name), snapshot.seconds
            )
            for name, tenant in pool.tenants.items()
        }
        pools.append({"connector": connector, **plain})
    return {"seconds": snapshot.seconds, "pools": pools}


def _tenant_as_json(
    tenant: TenantFigures, old: TenantFigures, seconds: float
) -> dict[str, Any]:
    loaded = _rate(tenant.loaded_bytes, old.loaded_bytes, seconds)
    stored = _rate(tenant.stored_bytes, old.stored_bytes, seconds)
    return {
        **{name: getattr(tenant, name) for name in TenantFigures.__slots__},
        "hit_rate": _hit_rate(tenant, TenantFigures()),
        "hit_rate_now": _hit_rate(tenant, old) if seconds else None,
        "load_bytes_per_s": loaded,
        "store_bytes_per_s": stored,
    }


def draw(snapshot: Snapshot) -> RenderableType:
    """Returns a table for each connector, who holds the most first."""
    parts: list[RenderableType] = []
    for connector, pool in sorted(snapshot.pools.items()):
        parts.append(_title(connector, pool, len(snapshot.pools)))
        parts.append(_table(snapshot, connector, pool))
    return Group(*parts)


def _table(snapshot: Snapshot, connector: str, pool: PoolFigures) -> Table:
    # Fits a terminal of 80 columns; in a wider one, names stay on their line.
    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    table.add_column("tenant", overflow="fold", min_width=8)
    for column in _COLUMNS:
        listed = column in ("evicted by", "rejected")
        table.add_column(
            column,
            justify="left" if listed else "right",
            overflow="fold",
            no_wrap=not listed,
            min_width=8 if listed else len(column),
        )
    by_size = sorted(
        pool.tenants.items(), key=lambda item: (-item[1].resident_bytes, item[0])
    )
    for name, tenant in by_size:
        old = snapshot.old(connector, name)
        now = _hit_rate(tenant, old) if snapshot.seconds else None
        table.add_row(
            Text(name),
            *(_size(size) for size in _sizes(tenant)),
            _percent(_hit_rate(tenant, TenantFigures())),
            _percent(now),
            Text(_counts(tenant.evicted_by)),
            Text(_counts(tenant.rejected_stores)),
            _bandwidth(tenant.loaded_bytes, old.loaded_bytes, snapshot.seconds),
            _bandwidth(tenant.stored_bytes, old.stored_bytes, snapshot.seconds),
        )
    return table


def _sizes(tenant: TenantFigures) -> tuple[float, float, float]:
    return tenant.resident_bytes, tenant.reserved_bytes, tenant.limit_bytes


def _title(connector: str, pool: PoolFigures, num_connectors: int) -> Text:
    resident = sum(tenant.resident_bytes for tenant in pool.tenants.values())
    parts = [
        f"pool {format_bytes(int(pool.capacity_bytes))}",
        f"resident {format_bytes(int(resident))}",
        f"pinned {format_bytes(int(pool.pinned_bytes))}",
        f"protected {format_bytes(int(pool.protected_bytes))}",
        f"{len(pool.engines)} engine(s)",
    ]
    if num_connectors > 1:
        parts.insert(0, f"connector {connector}")
    text = Text(", ".join(parts))
    if pool.transfer_failures:
        text.append(f", {int(pool.transfer_failures)} copies failed", "red")
    if pool.disabled:
        text.append(f", disabled by an error in {int(pool.disabled)} engine(s)", "red")
    return text


def _percent(share: float | None) -> str:
    if share is None:
        return "-"
    return "100%" if share == 1 else f"{100 * share:.1f}%"


def _bandwidth(new: float, old: float, seconds: float) -> str:
    rate = _rate(new, old, seconds)
    return "-" if rate is None else _size(rate)


def _size(num_bytes: float) -> str:
    """Returns bytes with three digits and a letter for the power of 1024."""
    power = 0
    while num_bytes >= 999.5 and power < len(_LETTERS) - 1:
        num_bytes /= 1024
        power += 1
    digits = 0 if not power or num_bytes >= 99.95 else 1 if num_bytes >= 9.995 else 2
    return f"{num_bytes:.{digits}f}{_LETTERS[power]}"


def _counts(counts: Counter[str]) -> str:
    """Returns the largest counts by name, and what the others are together."""
    shown = [(name, count) for name, count in counts.most_common() if count]
    rest = sum(count for _, count in shown[_MOST_EVICTORS:])
    parts = [f"{name} {count:,}" for name, count in shown[:_MOST_EVICTORS]]
    return ", ".join([*parts, f"others {rest:,}"] if rest else parts) or "-"
