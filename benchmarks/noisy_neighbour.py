"""How much of its cache a quiet tenant keeps beside a noisy one, on real engines.

A tiny model with random weights. The quiet tenant's prompts take 20 % of the host
tier and are sent in turn; between two of them a noisy tenant sends `ratio` prompts
that nobody sends again. The hit rate is the share of the quiet prompts' full blocks
that came from the cache, after the rounds in which they are stored. An engine each, in
a process of its own, for this connector as it is, with every option that changes what
is stored, and with its `lru` policy. Beside them vLLM's own manager is given the same
sequence without an engine, because its connector has no CPU backend.
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
NUM_ROUNDS = 4  # that count
# 3 layers of K and V, 2 heads of 32 channels, in float32; see tests/engine/models.py.
BLOCK_BYTES = 3 * 2 * BLOCK * 2 * 32 * 4
POOL_BLOCKS = 5 * NUM_QUIET * BLOCKS_PER_PROMPT
MIN_SHARE = 0.97


class Variant(NamedTuple):
    """A configuration of this connector, and how it is used."""

    extra_config: dict[str, Any]
    rounds_to_store: int = 1  # in which quiet prompts are not stored yet
    max_tokens: int = 1  # of an answer
    noisy_hints: dict[str, Any] = {}  # noqa: RUF012 - is only read
    keeps: bool = True  # whether the quiet tenant has to keep its hits


# Tokens of a prompt past its full blocks, and of an answer that fills another block.
TAIL_TOKENS, ANSWER_TOKENS = BLOCK - 2, 4
VARIANTS: dict[str, Variant] = {
    "ours": Variant({}),
    # Of as many keys as the pool has chunks: the least that can fill a reservation.
    "ours, store_threshold 2": Variant(
        {"store_threshold": 2, "max_tracker_size": POOL_BLOCKS}, rounds_to_store=2
    ),
    "ours, decoded blocks too": Variant(
        {"offload_prompt_only": False}, max_tokens=ANSWER_TOKENS
    ),
    "ours, 4 blocks a chunk": Variant({"blocks_per_chunk": 4}),
    "ours, all three": Variant(
        {
            "store_threshold": 2,
            "max_tracker_size": POOL_BLOCKS // 2,
            "offload_prompt_only": False,
            "blocks_per_chunk": 2,
        },
        rounds_to_store=2,
        max_tokens=ANSWER_TOKENS,
    ),
    "ours, against hints": Variant(
        {"max_protected": "100%"},
        noisy_hints={"priority": 100, "ttl_s": 3600, "expected_reuse_s": 0.001},
    ),
    "ours, lru": Variant({"eviction_policy": "lru"}, keeps=False),
}


def transfer_config(variant: Variant) -> dict[str, Any]:
    """Returns the ``kv_transfer_config`` of an engine."""
    return {
        "kv_connector": "CtxOffloadConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": POOL_BLOCKS * BLOCK_BYTES,
            "tenants": {"quiet": {"reserved": "25%"}, "noisy": {}},
            **variant.extra_config,
        },
    }


class Row(NamedTuple):
    """The quiet tenant's hit rate with one connector."""

    connector: str
    rates: dict[int, float]  # noisy requests for each quiet one -> share of blocks


def hit_rate(
    ratio: int,
    new_prompt: Callable[[], Prompt],
    ask: Callable[[Prompt, str], int],
    rounds_to_store: int = 1,
) -> float:
    """Sends the sequence; returns the share of the quiet tenant's blocks that hit.

    Args:
        ratio: noisy requests after each quiet one.
        new_prompt: returns a prompt that shares nothing with those before it.
        ask: sends a prompt for a tenant; returns how many of its blocks hit.
        rounds_to_store: at the begin, which do not count.
    """
    prompts = [new_prompt() for _ in range(NUM_QUIET)]
    num_hits = 0
    for turn in range(rounds_to_store + NUM_ROUNDS):
        for prompt in prompts:
            num_blocks = ask(prompt, "quiet")
            num_hits += num_blocks if turn >= rounds_to_store else 0
            for _ in range(ratio):
                ask(new_prompt(), "noisy")
    return num_hits / (NUM_ROUNDS * NUM_QUIET * BLOCKS_PER_PROMPT)


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

    rates = {ratio: hit_rate(ratio, new_chain, ask) for ratio in ratios}
    return Row(f"vLLM {policy}", rates)


def serve(model: str, variant: Variant, ratios: list[int], to: Connection) -> None:
    """Runs one engine; sends the hit rate at each ratio, then ends."""
    prepare_process(multiprocess=False)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype="float32",
        skip_tokenizer_init=True,
        block_size=BLOCK,
        max_model_len=(BLOCKS_PER_PROMPT + 2) * BLOCK,
        num_gpu_blocks_override=BLOCKS_PER_PROMPT + 3,
        gpu_memory_utilization=0.3,
        enforce_eager=True,
        kv_transfer_config=transfer_config(variant),
    )
    seeds = itertools.count()

    def ask(prompt: list[int], tenant: str) -> int:
        """Returns the number of cached blocks."""
        hints = variant.noisy_hints if tenant == "noisy" else {}
        params = SamplingParams(
            max_tokens=variant.max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": {"ctx": {"tenant": tenant, **hints}}},
        )
        inputs: Any = {"prompt_token_ids": prompt}
        (output,) = llm.generate(inputs, params, use_tqdm=False)
        return (output.num_cached_tokens or 0) // BLOCK

    def new_prompt() -> list[int]:
        tokens = random_prompt(next(seeds), BLOCKS_PER_PROMPT * BLOCK + TAIL_TOKENS)
        return [token % 500 for token in tokens]

    for ratio in ratios:
        to.send((ratio, hit_rate(ratio, new_prompt, ask, variant.rounds_to_store)))
    llm.llm_engine.engine_core.shutdown()


def measure(name: str, model: str, ratios: list[int]) -> Row:
    """Returns the hit rates with one variant of this connector."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=serve, args=(model, VARIANTS[name], ratios, sender)
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


def keeps_its_hits(rates: dict[int, float]) -> bool:
    """Whether there are hits alone, and about as many beside the noisy tenant."""
    alone = rates[0]
    return alone > 0 and min(rates.values()) >= MIN_SHARE * alone


def main() -> int:
    """Runs the benchmark; with --check returns 1 if the goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ratios", type=int, nargs="+", default=[1, 5, 50])
    parser.add_argument(
        "--only", choices=VARIANTS, nargs="+", default=[*VARIANTS], metavar="NAME"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 on a miss")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rates there")
    args = parser.parse_args()
    ratios = [0, *args.ratios]
    from tests.engine.models import make_llama

    with tempfile.TemporaryDirectory() as folder:
        model = str(make_llama(Path(folder) / "llama"))
        rows = [measure(name, model, ratios) for name in args.only]
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
    missed = [
        name
        for name, rates in rows
        if name in VARIANTS and VARIANTS[name].keeps and not keeps_its_hits(rates)
    ]
    verdict = f"NO: {'; '.join(missed)}" if missed else "yes"
    say(f"At least {MIN_SHARE:.0%} of the rate alone, and hits at all: {verdict}")
    return 1 if missed and args.check else 0


if __name__ == "__main__":
    sys.exit(main())
