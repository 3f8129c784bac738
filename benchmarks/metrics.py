"""What the metrics cost: per step in the engine, and per scrape in the API server.

Step: the scheduler side of a pool with 32 tenants, of which all, or 4, were looked up,
stored, loaded and evicted since the last step; measured is all that the step spends on
statistics: counting, the gauges, taking the figures and making vLLM's object of them.

Scrape: 200 declared tenants, all of which have been at work, every one's chunks evicted
by itself, by four others, and by all others. Measured is the text of our metrics as
vLLM's /metrics makes it, in processor time. On a machine that is busy with other things
all figures are too high, up to twice; of a step's, the lower quartile is shown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from prometheus_client import (
    REGISTRY,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from rich.console import Console
from rich.table import Table

from vllm_ctx_offload.adapters.degraded import DegradationLog
from vllm_ctx_offload.adapters.gauges import PoolGauges
from vllm_ctx_offload.adapters.metrics import MetricClasses, PrometheusMetrics
from vllm_ctx_offload.context import ReqContext
from vllm_ctx_offload.core import AccountTerms, HostMemoryManager, PolicyConfig
from vllm_ctx_offload.plan import GroupShape, OffloadPlan
from vllm_ctx_offload.stats import OffloadStats

MAX_STEP_US, MAX_SCRAPE_MS = 20.0, 50.0
STEP_TENANTS, SCRAPE_TENANTS = 32, 200
NUM_SLOTS = 4_096
# Others that evict chunks of a tenant.
PAIRS = {"evicted by itself": 0, "by 4 others too": 4, "by all (the cap holds)": 199}


class Step:
    """What one engine step does about statistics, over a pool that changes."""

    def __init__(self, num_tenants: int) -> None:
        self.tenants = [f"tenant-{index}" for index in range(num_tenants)]
        self.stats = OffloadStats()
        accounts = {name: AccountTerms() for name in [*self.tenants, "default"]}
        policy = PolicyConfig(accounts, max_protected=NUM_SLOTS // 3)
        plan = OffloadPlan((GroupShape(16),), 1, 16, 2**16, 1, NUM_SLOTS)
        self.memory = HostMemoryManager(
            NUM_SLOTS, self.stats, policy, clock=time.monotonic
        )
        self.gauges = PoolGauges(plan, policy, self.memory, self.stats)
        self.degraded = DegradationLog()
        self._next_key = 0

    def change_pool(self, num_active: int) -> None:
        """Stores a new chunk for each active tenant; not part of what is measured."""
        for name in self.tenants[:num_active]:
            self._next_key += 1
            keys = [self._next_key.to_bytes(8, "big")]
            context = ReqContext(str(self._next_key), tenant=name)
            self.memory.prepare_store(keys, context)
            self.memory.complete_store(keys, context)

    def count(self, num_active: int) -> None:
        count = self.stats.count
        for name in self.tenants[:num_active]:
            count("lookup_tokens", name, by=1_000)
            count("hit_tokens", name, by=900)
            count("missed_tokens", name, by=100)
            count("stored_bytes", name, by=65_536)
            count("loaded_bytes", name, by=65_536)

    def take(self) -> dict[str, Any]:
        self.gauges.measure()
        self.stats.set("disabled", to=0)
        figures = self.stats.take()
        self.degraded.look_at(figures)
        return figures


def low(seconds: list[float]) -> float:
    """Returns the lower quartile."""
    return statistics.quantiles(seconds, n=4)[0]


def step_cost(num_active: int, repeats: int) -> dict[str, float]:
    """Returns microseconds over `repeats` steps."""
    step = Step(STEP_TENANTS)
    counting, taking = [], []
    for _ in range(repeats):
        step.change_pool(num_active)
        begin = time.perf_counter()
        step.count(num_active)
        counted = time.perf_counter()
        step.take()
        taking.append(time.perf_counter() - counted)
        counting.append(counted - begin)
    return {
        "active tenants": num_active,
        "counting us": low(counting) * 1e6,
        "taking us": low(taking) * 1e6,
    }


class Scrape:
    """The API server's side: all tenants at work, and more and more pairs of them."""

    def __init__(self) -> None:
        self.step = Step(SCRAPE_TENANTS)
        classes: tuple[Any, ...] = (Counter, Gauge, Histogram)
        self.metrics = PrometheusMetrics(
            MetricClasses(*classes),
            ["model_name", "engine"],
            {0: ["meta-llama/Llama-3.1-8B-Instruct", "0"]},
        )
        self.step.change_pool(SCRAPE_TENANTS)
        self.step.count(SCRAPE_TENANTS)
        for name in self.step.tenants:
            self.step.stats.count("rejected_stores", name, "priority")

    def evict(self, num_others: int) -> None:
        """Has the chunks of each tenant evicted by itself and by some others."""
        names = self.step.tenants
        for index, name in enumerate(names):
            for other in range(num_others + 1):
                by = names[(index + other) % len(names)]
                self.step.stats.count("evicted_chunks", name, by)
        self.metrics.observe(self.step.take(), engine=0)

    def cost(self, repeats: int) -> dict[str, float]:
        """Returns medians of a scrape and of the update after a step."""
        observing, scraping, text = [], [], b""
        for _ in range(repeats):
            self.step.change_pool(STEP_TENANTS)
            self.step.count(STEP_TENANTS)
            figures = self.step.take()
            begin = time.thread_time()
            self.metrics.observe(figures, engine=0)
            observed = time.thread_time()
            text = generate_latest(REGISTRY)
            scraping.append(time.thread_time() - observed)
            observing.append(observed - begin)
        return {
            "samples": sum(not line.startswith(b"#") for line in text.splitlines()),
            "scrape ms": statistics.median(scraping) * 1e3,
            "update us": statistics.median(observing) * 1e6,
        }


def show(title: str, rows: dict[str, dict[str, float]], console: Console) -> None:
    """Prints a table."""
    table = Table("", *next(iter(rows.values())), title=title)
    for name, row in rows.items():
        table.add_row(name, *(f"{value:,.1f}" for value in row.values()))
    console.print(table)


def main() -> int:
    """Returns 1 where `--check` is given and a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--check", action="store_true", help="fail above the limits")
    args = parser.parse_args()
    steps = {
        "nothing happened": step_cost(0, args.repeats),
        "4 tenants at work": step_cost(4, args.repeats),
        "all tenants at work": step_cost(STEP_TENANTS, args.repeats),
    }
    repeats = max(args.repeats // 10, 5)
    scrape, scrapes = Scrape(), {}
    for title, num_others in PAIRS.items():
        scrape.evict(num_others)
        scrapes[title] = scrape.cost(repeats)
    console = Console()
    show(f"Statistics of a step, {STEP_TENANTS} tenants", steps, console)
    show(f"A scrape, {SCRAPE_TENANTS} tenants", scrapes, console)
    if args.json:
        args.json.write_text(json.dumps({"steps": steps, "scrapes": scrapes}, indent=1))
    slow = max(row["taking us"] for row in steps.values()) > MAX_STEP_US
    slow |= max(row["scrape ms"] for row in scrapes.values()) > MAX_SCRAPE_MS
    if slow:
        console.print(f"Above {MAX_STEP_US} us a step or {MAX_SCRAPE_MS} ms a scrape.")
    return int(args.check and slow)


if __name__ == "__main__":
    sys.exit(main())
