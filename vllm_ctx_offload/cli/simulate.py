"""`vllm-ctx-offload simulate`: what a configuration would have hit on a trace."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from vllm_ctx_offload.adapters.vllm_managers import VLLM_POLICIES, vllm_has_managers
from vllm_ctx_offload.cli.doctor_plan import read_json
from vllm_ctx_offload.cli.replay import (
    Pool,
    PreparedRequest,
    next_uses,
    offline_bound,
    prepare,
    rates_by_tenant,
    replay,
    replay_vllm,
)
from vllm_ctx_offload.cli.report import (
    Result,
    as_json,
    check_plot,
    draw,
    notes,
    print_tables,
)
from vllm_ctx_offload.cli.traces import TraceError, read_trace
from vllm_ctx_offload.config import Bytes, OffloadConfig, parse_config
from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.plan import check_accounts
from vllm_ctx_offload.text import printable

__all__ = ["add_simulate", "run_simulate"]

_FORMATS: Final = """\
trace formats:
  JSONL   one request a line: {"timestamp": ms, "input_length": tokens,
          "hash_ids": [id of each chunk of --tokens-per-chunk tokens]}, as in
          Mooncake's traces. Equal ids mean equal prompts up to there. Optional:
          "ctx", the object that clients send in kv_transfer_params, and
          "tenant" and "session" as short forms of its fields.
  *.npz   agent sessions: off, blk, t, tin, sess, B.

Each request looks up, loads and stores its whole prompt at its time stamp; only its
leading run of chunks can hit. "lru" ignores tenants' terms and hints, "bound" knows
the future. Private tenants keep their own keys in every column.
"""

Watch = Callable[[str, Sequence[PreparedRequest]], Iterator[PreparedRequest]]


def add_simulate(commands: Any) -> None:
    """Adds the command and its arguments to the subparsers `commands`."""
    parser = commands.add_parser(
        "simulate",
        help="replay a request trace: hit rates per tenant under a configuration",
        description="Replays a trace through the offloading manager and prints what "
        "each tenant hits,\nbeside LRU, vLLM's own managers where vLLM is installed, "
        "and the offline bound.",
        epilog=_FORMATS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "trace", type=Path, help="JSONL (Mooncake's fields, or our own) or agents' NPZ"
    )
    parser.add_argument(
        "--capacity",
        action="append",
        default=[],
        metavar="SIZE",
        help="of the pool: chunks, or a size such as 64GiB; may be given again",
    )
    parser.add_argument(
        "--extra-config",
        default="{}",
        metavar="JSON|@FILE",
        help="the value of kv_connector_extra_config",
    )
    parser.add_argument(
        "--bytes-per-token", metavar="SIZE", help="KV cache of one token, all layers"
    )
    parser.add_argument(
        "--tokens-per-chunk",
        type=int,
        metavar="N",
        help="tokens that an id of the trace stands for (default: 512)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw hit rate against capacity"
    )
    parser.set_defaults(run=run_simulate)


def run_simulate(args: argparse.Namespace) -> int:
    """Prints the hit rates; returns 0, or 2 where an argument or the trace is wrong."""
    try:
        if args.plot is not None:
            check_plot(args.plot)
        if args.tokens_per_chunk is not None and args.tokens_per_chunk < 1:
            raise ConfigError("--tokens-per-chunk has to be 1 or more.")
        config = _read_config(args.extra_config)
        trace = read_trace(args.trace, args.tokens_per_chunk)
        pools = _pools(args, config, trace.tokens_per_chunk)
    except (TraceError, ConfigError) as error:
        print(printable(str(error)), file=sys.stderr)
        return 2
    requests = prepare(trace, config)
    results = _simulate(requests, config, pools)
    if args.json:
        print(json.dumps(as_json(args.trace, trace, config, requests, results)))
    else:
        print_tables(results)
        for note in notes(trace, config, requests):
            print(note)
    if args.plot is not None:
        try:
            draw(args.plot, results)
        except OSError as error:
            text = f"--plot {args.plot}: can't be written ({error})."
            print(printable(text), file=sys.stderr)
            return 2
    return 0


# ---- arguments


def _read_config(text: str) -> OffloadConfig:
    values = read_json(text)
    if not isinstance(values, dict):
        raise ConfigError("--extra-config is no JSON object; write '{...}'.")
    return parse_config(values)


def _parse_bytes(option: str, text: str) -> int:
    try:
        size: int = TypeAdapter(Bytes).validate_python(text)
    except ValidationError:
        raise ConfigError(
            f"{option} {text} is no size; use a number of bytes or text such as 8GiB."
        ) from None
    return size


def _pools(
    args: argparse.Namespace, config: OffloadConfig, tokens_per_chunk: int
) -> list[Pool]:
    """Returns the pools to simulate, and checks the tenants' accounts against each."""
    bytes_per_chunk = None
    if args.bytes_per_token is not None:
        per_token = _parse_bytes("--bytes-per-token", args.bytes_per_token)
        bytes_per_chunk = per_token * tokens_per_chunk
        if not bytes_per_chunk:
            raise ConfigError("--bytes-per-token has to be 1 or more.")
    elif _has_sizes(config):
        raise ConfigError(
            "--extra-config gives a tenant's reserved or limit in bytes; add "
            "--bytes-per-token, or give them as shares such as 25%."
        )
    capacities = list(args.capacity)
    if not capacities and config.cpu_bytes_to_use is not None:
        capacities = [f"{config.cpu_bytes_to_use}B"]
    if not capacities:
        raise ConfigError(
            "--capacity is missing; give chunks such as 10000, or a size such as 64GiB "
            "together with --bytes-per-token."
        )
    pools = []
    for text in capacities:
        num_chunks = _num_chunks(text, bytes_per_chunk)
        pool = Pool(num_chunks, tokens_per_chunk, bytes_per_chunk or 1)
        pool_bytes = pool.num_chunks * pool.bytes_per_chunk
        check_accounts(config, pool_bytes, pool.bytes_per_chunk)
        pools.append(pool)
    return pools


def _has_sizes(config: OffloadConfig) -> bool:
    sizes = [
        size
        for tenant in config.tenants.values()
        for size in (tenant.reserved, tenant.limit)
        if size is not None
    ]
    return any(size.share is None and size.num_bytes for size in sizes)


def _num_chunks(text: str, bytes_per_chunk: int | None) -> int:
    if text.isdecimal():
        num_chunks = int(text)
    else:
        num_bytes = _parse_bytes("--capacity", text)
        if bytes_per_chunk is None:
            raise ConfigError(
                f"--capacity {text} is a size; add --bytes-per-token, or give chunks."
            )
        num_chunks = num_bytes // bytes_per_chunk
    if num_chunks < 1:
        raise ConfigError(f"--capacity {text} holds no chunk; give more.")
    return num_chunks


# ---- the simulation


def _simulate(
    requests: Sequence[PreparedRequest], config: OffloadConfig, pools: Sequence[Pool]
) -> list[Result]:
    vllm_policies = VLLM_POLICIES if vllm_has_managers() else ()
    with _progress(len(pools) * (2 + len(vllm_policies)) * len(requests)) as watch:
        uses = next_uses(requests)
        results = []
        for pool in pools:
            at = f"{pool.num_chunks} chunks"
            hits = {
                "config": replay(watch(f"{at}, configured", requests), config, pool),
                "lru": replay(
                    watch(f"{at}, lru", requests), config, pool, plain_lru=True
                ),
            }
            for policy in vllm_policies:
                hits[f"vllm_{policy}"] = replay_vllm(
                    watch(f"{at}, vLLM {policy}", requests), policy, pool.num_chunks
                )
            hits["bound"] = offline_bound(uses, pool.num_chunks)
            results.append(_rates(pool, requests, hits))
    return results


def _rates(
    pool: Pool, requests: Sequence[PreparedRequest], hits: dict[str, list[int]]
) -> Result:
    result = Result(pool, {}, {})
    for policy, found in hits.items():
        total, tenants = rates_by_tenant(requests, found, pool.tokens_per_chunk)
        result.total[policy] = total
        for tenant, rates in tenants.items():
            result.tenants.setdefault(tenant, {})[policy] = rates
    return result


@contextmanager
def _progress(num_steps: int) -> Iterator[Watch]:
    """Shows a bar on a terminal; hands out what passes requests on and counts them."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    hidden = not sys.stderr.isatty()
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("preparing", total=num_steps)

        def watch(
            what: str, requests: Sequence[PreparedRequest]
        ) -> Iterator[PreparedRequest]:
            bar.update(task, description=what)
            for request in requests:
                yield request
                bar.advance(task)

        yield watch
