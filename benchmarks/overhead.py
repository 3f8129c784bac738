"""What the connector costs a workload that never gets anything back from it.

An engine answers batches with the connector and with the connector taken out, in turn,
so that whatever else the machine does falls on both. No prompt shares a prefix with
another: all is computed, and with the connector all is stored as well.

With ``--two-engines`` an engine that has a connector and one that never had one take
turns instead. That leaves nothing out, but two processes with the same model differ by
several percent of their own, from start to start: take the median of many runs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.engine import (
    BLOCK_SIZE,
    Answer,
    Engine,
    EngineSettings,
    add_common_options,
    blocks_for,
    find_model,
    random_prompt,
    say,
)
from tools.smollm2 import ModelError, cache_folder

MIN_RATIO = 0.97
# Thrown away: the first batches of a process are slow whatever it does.
WARM_UP_BATCHES = 1


class EngineFailedError(RuntimeError):
    """An engine's process ended or cached what it should have computed."""


class Workload(NamedTuple):
    """One batch: so many requests at once, so many tokens each."""

    requests: int
    prompt_tokens: int
    output_tokens: int

    def prompts(self, batch: int) -> list[list[int]]:
        """Returns the prompts of a batch, which no other batch has."""
        first = batch * self.requests
        return [
            random_prompt(seed, self.prompt_tokens)
            for seed in range(first, first + self.requests)
        ]


class Side(Protocol):
    """One of the two that are compared."""

    name: str

    def run(self, prompts: list[list[int]], output_tokens: int) -> Answer:
        """Returns what a batch took."""

    def close(self) -> None:
        """Ends what the side started. May be called twice."""


class ToggledSide:
    """An engine in this process, with its connector in place or taken out."""

    def __init__(self, name: str, engine: Engine, *, use_connector: bool) -> None:
        self.name = name
        self._engine = engine
        self._use_connector = use_connector

    def run(self, prompts: list[list[int]], output_tokens: int) -> Answer:
        self._engine.use_connector(self._use_connector)
        return self._engine.run(prompts, output_tokens)

    def close(self) -> None:
        if self._use_connector:
            self._engine.close()


def serve(connection: Connection, settings: EngineSettings, log_file: Path) -> None:
    """Runs an engine that answers one batch for each message; None ends it."""
    with log_file.open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    engine = Engine(settings)
    connection.send("ready")
    while (message := connection.recv()) is not None:
        prompts, output_tokens = message
        connection.send(engine.run(prompts, output_tokens))
    engine.close()


class EngineProcess:
    """An engine in a process of its own."""

    def __init__(self, name: str, settings: EngineSettings) -> None:
        self.name = name
        self._log_file = cache_folder() / f"overhead-{name}.log"
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, settings, self._log_file)
        )
        self._process.start()
        self._ready = False
        # Ours must be the only open end, or a dead engine is waited for for ever.
        theirs.close()

    def run(self, prompts: list[list[int]], output_tokens: int) -> Answer:
        if not self._ready:
            self._receive()
            self._ready = True
        self._connection.send((prompts, output_tokens))
        answer = self._receive()
        assert isinstance(answer, Answer)
        return answer

    def _receive(self) -> object:
        try:
            return self._connection.recv()
        except EOFError:
            raise EngineFailedError(
                f"The engine {self.name} ended: see {self._log_file}."
            ) from None

    def close(self) -> None:
        """Ends the process, by force where it does not end by itself."""
        if self._process.is_alive():
            self._connection.send(None)
            self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class Pair(NamedTuple):
    """The same batch without and with the connector."""

    off: Answer
    on: Answer


def measure(
    sides: tuple[Side, Side],
    workload: Workload,
    *,
    pairs: int,
    seconds: float,
) -> list[Pair]:
    """Returns what the batches took, without and with the connector.

    The first of `sides` is the one without. Which goes first in time changes from pair
    to pair. Ends after `pairs`, or with the first pair after `seconds`.
    """
    measured: list[Pair] = []
    deadline = time.monotonic() + seconds
    for batch in range(pairs + WARM_UP_BATCHES):
        took = {}
        for turn, side in enumerate(sides if batch % 2 == 0 else sides[::-1]):
            # New ones for each: in one engine the second would find the first's.
            prompts = workload.prompts(2 * batch + turn)
            took[side.name] = side.run(prompts, workload.output_tokens)
            if cached := took[side.name].num_cached_tokens:
                raise EngineFailedError(f"{cached} tokens of new prompts were cached.")
        if batch < WARM_UP_BATCHES:
            continue
        pair = Pair(*(took[side.name] for side in sides))
        measured.append(pair)
        say(
            f"pair {len(measured)}/{pairs}: off {pair.off.seconds:.3f} s, on "
            f"{pair.on.seconds:.3f} s, ratio {throughput_ratio([pair]):.3f}"
        )
        if time.monotonic() > deadline:
            break
    return measured


def throughput_ratio(measured: list[Pair]) -> float:
    """Returns throughput with the connector over without: the median of the pairs."""
    return statistics.median(pair.off.seconds / pair.on.seconds for pair in measured)


def cpu_ratio(measured: list[Pair]) -> float:
    """Returns CPU time with the connector over without: the median of the pairs."""
    return statistics.median(
        pair.on.cpu_seconds / pair.off.cpu_seconds for pair in measured
    )


def report(measured: list[Pair], workload: Workload) -> bool:
    """Prints the result; returns whether the goal is met."""
    tokens = workload.requests * (workload.prompt_tokens + workload.output_tokens)
    ratios = sorted(throughput_ratio([pair]) for pair in measured)
    ratio = throughput_ratio(measured)
    goal_met = ratio >= MIN_RATIO
    say()
    for name in Pair._fields:
        seconds = statistics.median(getattr(pair, name).seconds for pair in measured)
        say(f"connector {name:3}: {tokens / seconds:8.0f} tokens/s (median)")
    say(f"CPU time on / off {cpu_ratio(measured):.3f}, the copies included")
    say(
        f"throughput on / off {ratio:.3f} (goal: at least {MIN_RATIO}, "
        f"{'met' if goal_met else 'missed'}); "
        f"{len(ratios)} pairs from {ratios[0]:.3f} to {ratios[-1]:.3f}"
    )
    return goal_met


def parse_arguments() -> argparse.Namespace:
    """Returns the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=2, help="at once, a batch")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=60, help="most pairs of batches")
    parser.add_argument(
        "--seconds", type=float, default=180, help="no new pair after that long"
    )
    parser.add_argument(
        "--two-engines",
        action="store_true",
        help="compare with an engine that never had a connector",
    )
    add_common_options(parser)
    return parser.parse_args()


def start(arguments: argparse.Namespace, workload: Workload) -> tuple[Side, Side]:
    """Returns what to compare: without the connector, with it."""
    blocks = blocks_for(workload.prompt_tokens + workload.output_tokens + 1)
    settings = EngineSettings(
        model=find_model(arguments.model),
        connector=arguments.connector,
        dtype=arguments.dtype,
        max_model_len=blocks * BLOCK_SIZE,
        device_blocks=blocks * (workload.requests + 1),
        # Far fewer than are offered: evicting is part of the cost.
        host_bytes=256 << 20,
        max_batched_tokens=2048,
        multiprocess=arguments.two_engines and arguments.multiprocess,
    )
    if not arguments.two_engines:
        say(f"starting vLLM with {arguments.connector} in {arguments.dtype} ...")
        engine = Engine(settings)
        return (
            ToggledSide("off", engine, use_connector=False),
            ToggledSide("on", engine, use_connector=True),
        )
    say(f"starting vLLM twice, without and with {arguments.connector} ...")
    return (
        EngineProcess("off", settings._replace(connector=None)),
        EngineProcess("on", settings),
    )


def main() -> int:
    """Runs the benchmark; returns the exit status."""
    arguments = parse_arguments()
    workload = Workload(
        arguments.requests, arguments.prompt_tokens, arguments.output_tokens
    )
    sides: tuple[Side, ...] = ()
    try:
        sides = off, on = start(arguments, workload)
        measured = measure(
            (off, on), workload, pairs=arguments.pairs, seconds=arguments.seconds
        )
    except (ModelError, EngineFailedError) as error:
        print(f"overhead: {error}", file=sys.stderr)
        return 1
    finally:
        for side in sides:
            side.close()
    goal_met = report(measured, workload)
    if arguments.json:
        result = {
            "connector": arguments.connector,
            "dtype": arguments.dtype,
            "workload": workload._asdict(),
            "throughput_ratio": throughput_ratio(measured),
            "cpu_ratio": cpu_ratio(measured),
            "pairs": [
                {name: answer._asdict() for name, answer in pair._asdict().items()}
                for pair in measured
            ],
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return int(arguments.check and not goal_met)


if __name__ == "__main__":
    sys.exit(main())
