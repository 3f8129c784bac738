"""How much of its cache a quiet tenant keeps beside a noisy one, on real engines.

A tiny model with random weights. The quiet tenant's prompts take 20 % of the host
tier and are sent in turn; between two of them a noisy tenant sends `ratio` prompts
that nobody sends again. The hit rate is the share of the quiet prompts' full blocks
that came from the cache, after the first round. With this connector, and with its
`lru` policy; an engine each, in a process of its own. Beside them vLLM's own manager
is given the same sequence without an engine, because its connector has no CPU backend.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks.engine import prepare_process, random_prompt, say
from benchmarks.manager import Vllms

Prompt = TypeVar("Prompt")

BLOCK = 32
NUM_QUIET, BLOCKS_PER_PROMPT = 4, 9
ROUNDS = 5
# 3 layers of K and V, 2 heads of 32 channels, in float32; see tests/engine/models.py.
BLOCK_BYTES = 3 * 2 * BLOCK * 2 * 32 * 4
POOL_BLOCKS = 5 * NUM_QUIET * BLOCKS_PER_PROMPT
MOST_HITS = (ROUNDS - 1) * NUM_QUIET * BLOCKS_PER_PROMPT
MIN_SHARE = 0.97

OURS: dict[str, Any] = {
    "kv_connector": "CtxOffloadConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": POOL_BLOCKS * BLOCK_BYTES,
        "tenants": {"quiet": {"reserved": "25%"}, "noisy": {}},
    },
}
OURS_LRU: dict[str, Any] = {
    **OURS,
    "kv_connector_extra_config": {
        **OURS["kv_connector_extra_config"],
        "eviction_policy": "lru",
    },
}
CONNECTORS = {"ours": OURS, "ours, lru": OURS_LRU}


class Row(NamedTuple):
    """The quiet tenant's hit rate with one connector."""

    connector: str
    rates: dict[int, float]  # noisy requests for each quiet one -> share of blocks


def hit_blocks(
    ratio: int, new_prompt: Callable[[], Prompt], ask: Callable[[Prompt, str], int]
) -> int:
    """Sends the sequence; returns the quiet tenant's hits in blocks.

    Args:
        ratio: noisy requests after each quiet one.
        new_prompt: returns a prompt that shares nothing with those before it.
        ask: sends a prompt for a tenant; returns how many of its blocks hit.
    """
    prompts = [new_prompt() for _ in range(NUM_QUIET)]
    num_hits = 0
    for turn in range(ROUNDS):
        for prompt in prompts:
            num_blocks = ask(prompt, "quiet")
            num_hits += num_blocks if turn else 0
            for _ in range(ratio):
                ask(new_prompt(), "noisy")
    return num_hits


def replay(policy: str, ratios: list[int]) -> Row:
    """Gives the sequence to vLLM's own manager."""
    manager = Vllms(POOL_BLOCKS, policy)
    numbers = itertools.count()

    def new_chain() -> list[bytes]:
        number = next(numbers)
        return [b"%d/%d" % (number, depth) for depth in range(BLOCKS_PER_PROMPT)]

    def ask(chain: list[bytes], _tenant: str) -> int:
        index = next(numbers)
        num_hits = manager.num_leading(chain, index)
        manager.touch(chain, index)
        manager.load(chain[:num_hits], index)
        manager.store(chain, index)
        return num_hits

    rates = {ratio: hit_blocks(ratio, new_chain, ask) / MOST_HITS for ratio in ratios}
    return Row(f"vLLM {policy}", rates)


def serve(
    model: str, transfer: dict[str, Any], ratios: list[int], to: Connection
) -> None:
    """Runs one engine; sends the hit rate at each ratio, then ends."""
    prepare_process(multiprocess=False)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype="float32",
        skip_tokenizer_init=True,
        block_size=BLOCK,
        max_model_len=(BLOCKS_PER_PROMPT + 1) * BLOCK,
        num_gpu_blocks_override=BLOCKS_PER_PROMPT + 2,
        gpu_memory_utilization=0.3,
        enforce_eager=True,
        kv_transfer_config=transfer,
    )
    seeds = itertools.count()

    def ask(prompt: list[int], tenant: str) -> int:
        """Returns the number of cached tokens."""
        params = SamplingParams(
            max_tokens=1,
            detokenize=False,
            extra_args={"kv_transfer_params": {"ctx": {"tenant": tenant}}},
        )
        inputs: Any = {"prompt_token_ids": prompt}
        (output,) = llm.generate(inputs, params, use_tqdm=False)
        return output.num_cached_tokens or 0

    def new_prompt() -> list[int]:
        tokens = random_prompt(next(seeds), BLOCKS_PER_PROMPT * BLOCK + 8)
        return [token % 500 for token in tokens]

    for ratio in ratios:
        num_blocks = hit_blocks(ratio, new_prompt, lambda *args: ask(*args) // BLOCK)
        to.send((ratio, num_blocks / MOST_HITS))
    llm.llm_engine.engine_core.shutdown()


def measure(name: str, model: str, ratios: list[int]) -> Row:
    """Returns the hit rates with one connector."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=serve, args=(model, CONNECTORS[name], ratios, sender)
    )
    process.start()
    sender.close()
    rates = {}
    for _ in ratios:
        ratio, rate = receiver.recv()
        rates[ratio] = rate
        say(f"{name}: {ratio} noisy for each quiet request: {rate:.1%}")
    process.join()
    return Row(name, rates)


def main() -> int:
    """Runs the benchmark; with --check returns 1 if the goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ratios", type=int, nargs="+", default=[1, 5, 50])
    parser.add_argument("--check", action="store_true", help="exit with 1 on a miss")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rates there")
    args = parser.parse_args()
    ratios = [0, *args.ratios]
    from tests.engine.models import make_llama

    with tempfile.TemporaryDirectory() as folder:
        model = str(make_llama(Path(folder) / "llama"))
        rows = [measure(name, model, ratios) for name in CONNECTORS]
    rows += [replay(policy, ratios) for policy in ("lru", "arc")]
    table = Table(title="hit rate of the quiet tenant")
    for column in (
        "connector",
        *(f"{ratio}:1" if ratio else "alone" for ratio in ratios),
    ):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(row.connector, *(f"{row.rates[ratio]:.1%}" for ratio in ratios))
    Console().print(table)
    if args.json is not None:
        args.json.write_text(json.dumps([row._asdict() for row in rows]))
    alone = rows[0].rates[0]
    met = all(rate >= MIN_SHARE * alone for rate in rows[0].rates.values())
    say(f"At least {MIN_SHARE:.0%} of the rate alone: {'yes' if met else 'NO'}")
    return 0 if met or not args.check else 1


if __name__ == "__main__":
    sys.exit(main())
