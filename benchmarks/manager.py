"""What the offloading manager costs per key, beside vLLM's own in the same process.

Pools of 10^4, 10^5 and 10^6 resident chunks, used by 32 tenants in chains of 512 keys;
a third of the requests gives hints (priority with a ttl, a session, an estimate). For
vLLM's managers the same calls are made with the same keys. Measured per key, medians
over many calls: a lookup that hits, touch, loads, and the store cycle with eviction
(prepare_store and complete_store of a chain that is new). Also the longest call, with
the garbage collector on, and the memory per resident chunk.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
from rich.console import Console
from rich.table import Table

from vllm_ctx_offload.context import Hints, ReqContext
from vllm_ctx_offload.core import AccountTerms, HostMemoryManager, PolicyConfig
from vllm_ctx_offload.stats import OffloadStats

NUM_TENANTS = 32
KEYS_PER_CALL = 512
MAX_STORE_TO_LRU, MAX_STORE_TO_ARC, MAX_LOOKUP_RATIO = 0.2, 0.7, 0.4
MAX_CALL_MS = 5.0

Chain = Sequence[bytes]


class Candidate(Protocol):
    """One manager under test; `index` numbers the requests."""

    def lookup(self, keys: Chain, index: int) -> bool: ...
    def touch(self, keys: Chain, index: int) -> None: ...
    def load(self, keys: Chain, index: int) -> None: ...
    def store(self, keys: Chain, index: int) -> None: ...


class Ours:
    """`HostMemoryManager` with 32 accounts, half of the pool reserved."""

    def __init__(self, num_chunks: int) -> None:
        reserved = num_chunks // (2 * NUM_TENANTS)
        terms = {f"tenant{n}": AccountTerms(reserved) for n in range(NUM_TENANTS)}
        terms["default"] = AccountTerms()
        policy = PolicyConfig(terms, max_protected=int(0.3 * num_chunks))
        self.manager = HostMemoryManager(
            num_chunks, OffloadStats(), policy, time.monotonic
        )

    @staticmethod
    def _context(index: int) -> ReqContext:
        hints = Hints()
        if index % 3 == 0:
            hints = Hints(
                session=f"session{index // 30}",
                priority=(20, 35, 80)[index // 3 % 3],
                ttl_s=600.0,
                expected_reuse_s=(None, 30.0)[index // 3 % 2],
            )
        return ReqContext(
            str(index), tenant=f"tenant{index % NUM_TENANTS}", hints=hints
        )

    def lookup(self, keys: Chain, index: int) -> bool:
        return self.manager.lookup(keys, self._context(index)).num_ready == len(keys)

    def touch(self, keys: Chain, index: int) -> None:
        self.manager.touch(keys, self._context(index))

    def load(self, keys: Chain, index: int) -> None:
        context = self._context(index)
        self.manager.prepare_load(keys, context)
        self.manager.complete_load(keys, context)

    def store(self, keys: Chain, index: int) -> None:
        context = self._context(index)
        grant = self.manager.prepare_store(keys, context)
        granted = [keys[n] for n in grant.indices]
        self.manager.complete_store(granted, context)
        self.manager.on_request_finished(context)


class Vllms:
    """vLLM's `CPUOffloadingManager` with one of its policies."""

    def __init__(self, num_chunks: int, policy: str) -> None:
        from vllm.v1.kv_offload.base import LookupResult
        from vllm.v1.kv_offload.base import ReqContext as VllmContext
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        self._hit, self._make_context = LookupResult.HIT, VllmContext
        self._manager: Any = CPUOffloadingManager(num_chunks, cache_policy=policy)

    def lookup(self, keys: Chain, index: int) -> bool:
        return self.num_leading(keys, index) == len(keys)

    def num_leading(self, keys: Chain, index: int) -> int:
        """Returns the length of the leading run that hits."""
        context = self._make_context(str(index))
        lookup, hit = self._manager.lookup, self._hit
        num_hits = 0
        for key in keys:
            if lookup(key, context) is not hit:
                break
            num_hits += 1
        return num_hits

    def touch(self, keys: Chain, index: int) -> None:
        self._manager.touch(keys, self._make_context(str(index)))

    def load(self, keys: Chain, index: int) -> None:
        context = self._make_context(str(index))
        self._manager.prepare_load(keys, context)
        self._manager.complete_load(keys, context)

    def store(self, keys: Chain, index: int) -> None:
        context = self._make_context(str(index))
        self._manager.on_new_request(context)
        if (output := self._manager.prepare_store(keys, context)) is not None:
            self._manager.complete_store(output.keys_to_store, context)
        self._manager.on_request_finished(context)


class Measured(NamedTuple):
    """One manager at one size; times per key in ns."""

    manager: str
    num_chunks: int
    lookup_ns: float
    touch_ns: float
    load_ns: float
    store_ns: float
    longest_ms: float  # processor time of the longest call
    bytes_per_chunk: float


class Clock:
    """Times calls; the longest by processor time, so others' work does not count."""

    def __init__(self) -> None:
        self.per_key: dict[str, list[float]] = {}
        self.longest_ms = 0.0

    def time(self, name: str, call: Callable[[Chain, int], Any], *args: Any) -> bool:
        """Returns False, and leaves the call out, if the call did."""
        cpu, wall = time.thread_time(), time.perf_counter()
        result = call(*args)
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        if result is False:
            return False
        self.per_key.setdefault(name, []).append(1e9 * wall / KEYS_PER_CALL)
        self.longest_ms = max(self.longest_ms, 1e3 * cpu)
        return True

    def median(self, name: str) -> float:
        return statistics.median(self.per_key[name])


def measure(
    name: str, make: Callable[[int], Candidate], num_chunks: int, num_calls: int
) -> Measured:
    """Fills a pool, then times each kind of call on it."""
    rand = random.Random(1)
    suffix = b"" if name == "ours" else b"\0\0\0\0"
    prefix = b"\0\0\0" if name == "ours" else b""

    # Tuples: the collector would follow the benchmark's own lists of keys, and longer
    # than it takes for all that the manager has.
    def make_chain() -> Chain:
        return tuple(
            [prefix + rand.randbytes(32) + suffix for _ in range(KEYS_PER_CALL)]
        )

    num_chains = num_chunks // KEYS_PER_CALL
    chains: deque[tuple[int, Chain]] = deque(maxlen=num_chains // 4 + 1)
    gc.collect()
    before = resident_bytes()
    candidate, clock = make(num_chunks), Clock()
    for index in range(num_chains + num_chains // 4):
        chain = make_chain()
        chains.append((index, chain))
        clock.time("fill", candidate.store, chain, index)
    used = resident_bytes() - before
    for call in range(num_calls):
        index, chain = num_chains * 2 + call, make_chain()
        clock.time("store", candidate.store, chain, index)
        chains.append((index, chain))
        # Of the recent chains, whose keys are in no processor cache any more.
        old_index, old = chains[rand.randrange(len(chains) // 2, len(chains))]
        if clock.time("lookup", candidate.lookup, old, old_index):
            clock.time("touch", candidate.touch, old, old_index)
            clock.time("load", candidate.load, old, old_index)
    return Measured(
        name,
        num_chunks,
        *(clock.median(kind) for kind in ("lookup", "touch", "load", "store")),
        clock.longest_ms,
        used / (num_chains * KEYS_PER_CALL),
    )


def resident_bytes() -> int:
    """Returns the memory of this process."""
    return psutil.Process().memory_info().rss


def show(results: Sequence[Measured]) -> None:
    """Prints one line for each manager and size."""
    table = Table(title="ns per key, medians; longest call in ms; bytes per chunk")
    for column in Measured._fields:
        table.add_column(column, justify="right")
    for row in results:
        table.add_row(*(f"{v:,.1f}" if isinstance(v, float) else f"{v}" for v in row))
    Console(width=120).print(table)


def verdict(results: Sequence[Measured]) -> bool:
    """Prints the goals at the largest size; returns whether all are met."""
    largest = max(row.num_chunks for row in results)
    by_name = {row.manager: row for row in results if row.num_chunks == largest}
    ours = by_name["ours"]
    longest = max(row.longest_ms for row in results if row.manager == "ours")
    goals = [("longest call in ms", longest, MAX_CALL_MS)]
    for name, store_goal in (("lru", MAX_STORE_TO_LRU), ("arc", MAX_STORE_TO_ARC)):
        if (other := by_name.get(name)) is None:
            print(f"vLLM's {name}: not measured, vLLM is not installed")
            continue
        store, lookup = ours.store_ns / other.store_ns, ours.lookup_ns / other.lookup_ns
        goals.append((f"store cycle / vLLM {name}", store, store_goal))
        goals.append((f"lookup / vLLM {name}", lookup, MAX_LOOKUP_RATIO))
    for text, value, goal in goals:
        print(f"{'ok  ' if value <= goal else 'MISS'} {text}: {value:.2f} ({goal})")
    return all(value <= goal for _, value, goal in goals)


def main() -> int:
    """Runs the benchmark; returns 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--chunks", type=int, nargs="+", default=[10_000, 100_000, 1_000_000]
    )
    parser.add_argument("--calls", type=int, default=150, help="of each kind")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    makers: dict[str, Callable[[int], Candidate]] = {"ours": Ours}
    if importlib.util.find_spec("vllm") is not None:
        makers["lru"] = lambda num_chunks: Vllms(num_chunks, "lru")
        makers["arc"] = lambda num_chunks: Vllms(num_chunks, "arc")
    results = []
    for num_chunks in args.chunks:
        for name, make in makers.items():
            print(f"{name}, {num_chunks:,} chunks ...", file=sys.stderr, flush=True)
            results.append(measure(name, make, num_chunks, args.calls))
            gc.collect()
    if args.json:
        print(json.dumps([row._asdict() for row in results]))
        return 0
    show(results)
    return 0 if verdict(results) else 1


if __name__ == "__main__":
    sys.exit(main())
