"""How long a request takes cold, after a local prefix hit and after a host hit.

Four conversations share a device cache that holds one. Each is first computed. Then
they take turns, round after round: what a conversation left on the device is gone
when it comes back, so its KV cache is loaded from the host, and sending the same
prompt at once again hits vLLM's own prefix cache. The two differ in the load alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.engine import (
    BLOCK_SIZE,
    Engine,
    EngineSettings,
    add_common_options,
    blocks_for,
    find_model,
    random_prompt,
    say,
)
from tools.smollm2 import ModelError

# Blocks beside those of one conversation: the null block and a little room.
SPARE_BLOCKS = 8
WARM_UP_SEEDS = (1_000_001, 1_000_002)  # not those of the conversations
MAX_HOST_TO_LOCAL = 1.15
MIN_COLD_TO_HOST = 6.0


class Samples(NamedTuple):
    """Seconds a request took, by what it found."""

    cold: list[float]
    local: list[float]
    host: list[float]

    @property
    def host_to_local(self) -> float:
        """Median host hit over median local hit."""
        return statistics.median(self.host) / statistics.median(self.local)

    @property
    def cold_to_host(self) -> float:
        """Median cold request over median host hit."""
        return statistics.median(self.cold) / statistics.median(self.host)


class WrongSourceError(RuntimeError):
    """A request was not served from where the benchmark says it is."""


class Probe:
    """Sends single requests and insists on where their tokens come from."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loaded = engine.num_loaded_tokens()

    def send(self, prompt: list[int], *, cached: int, loaded: int) -> float:
        """Returns the seconds to the first token.

        Raises:
            WrongSourceError: Other than `cached` tokens were not computed, or other
                than `loaded` of them came from the host.
        """
        answer = self._engine.run([prompt], max_tokens=1)
        total = self._engine.num_loaded_tokens()
        found = (answer.num_cached_tokens, total - self._loaded)
        self._loaded = total
        if found != (cached, loaded):
            raise WrongSourceError(
                f"A prompt of {len(prompt)} tokens should have {cached} in a cache, "
                f"{loaded} of them on the host, but had {found[0]} and {found[1]}."
            )
        return answer.seconds


def measure(
    engine: Engine, prompts: list[list[int]], *, rounds: int, warm_up_tokens: int
) -> Samples:
    """Returns the times of all requests, as the module's docstring describes."""
    probe = Probe(engine)
    # The first requests of a process are slow whatever they find.
    for seed in WARM_UP_SEEDS:
        probe.send(random_prompt(seed, warm_up_tokens), cached=0, loaded=0)
    samples = Samples([], [], [])
    for number, prompt in enumerate(prompts, 1):
        samples.cold.append(probe.send(prompt, cached=0, loaded=0))
        say(f"cold {number}/{len(prompts)}: {samples.cold[-1]:.3f} s")
    # The prompt's last token is always computed.
    full = (len(prompts[0]) - 1) // BLOCK_SIZE * BLOCK_SIZE
    for number in range(1, rounds + 1):
        for prompt in prompts:
            samples.host.append(probe.send(prompt, cached=full, loaded=full))
            samples.local.append(probe.send(prompt, cached=full, loaded=0))
        hosts, locals_ = samples.host[-len(prompts) :], samples.local[-len(prompts) :]
        say(
            f"round {number}/{rounds}: host hit {statistics.median(hosts):.3f} s, "
            f"local hit {statistics.median(locals_):.3f} s"
        )
    return samples


def report(samples: Samples) -> bool:
    """Prints the result; returns whether the goals are met."""
    say()
    say(f"{'':10} {'median':>9} {'fastest':>9} {'slowest':>9} {'requests':>9}")
    for name, seconds in samples._asdict().items():
        say(
            f"{name:10} {statistics.median(seconds):8.3f}s {min(seconds):8.3f}s "
            f"{max(seconds):8.3f}s {len(seconds):9}"
        )
    goals = (
        samples.host_to_local <= MAX_HOST_TO_LOCAL,
        samples.cold_to_host >= MIN_COLD_TO_HOST,
    )
    words = ["met" if goal else "missed" for goal in goals]
    say()
    say("Every request that came back loaded all its full blocks.")
    say(
        f"host / local {samples.host_to_local:.3f} "
        f"(goal: at most {MAX_HOST_TO_LOCAL}, {words[0]})"
    )
    say(
        f"cold / host {samples.cold_to_host:.1f} "
        f"(goal: at least {MIN_COLD_TO_HOST}, {words[1]})"
    )
    return all(goals)


def parse_arguments() -> argparse.Namespace:
    """Returns the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompt-tokens", type=int, default=2800)
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    add_common_options(parser)
    return parser.parse_args()


def settings_for(arguments: argparse.Namespace) -> EngineSettings:
    """Returns an engine whose device cache holds one of the conversations."""
    blocks = blocks_for(arguments.prompt_tokens + 1)
    return EngineSettings(
        model=find_model(arguments.model),
        connector=arguments.connector,
        dtype=arguments.dtype,
        max_model_len=blocks * BLOCK_SIZE,
        device_blocks=blocks + SPARE_BLOCKS,
        host_bytes=1 << 30,
        max_batched_tokens=4096,
        multiprocess=arguments.multiprocess,
    )


def main() -> int:
    """Runs the benchmark; returns the exit status."""
    arguments = parse_arguments()
    try:
        settings = settings_for(arguments)
        say(f"starting vLLM with {arguments.connector} in {arguments.dtype} ...")
        engine = Engine(settings)
        prompts = [
            random_prompt(seed, arguments.prompt_tokens)
            for seed in range(arguments.conversations)
        ]
        samples = measure(engine, prompts, rounds=arguments.rounds, warm_up_tokens=256)
        engine.close()
    except (ModelError, WrongSourceError) as error:
        print(f"hit_latency: {error}", file=sys.stderr)
        return 1
    goals_met = report(samples)
    if arguments.json:
        result = {
            "settings": settings._asdict(),
            "prompt_tokens": arguments.prompt_tokens,
            "host_to_local": samples.host_to_local,
            "cold_to_host": samples.cold_to_host,
            "seconds": samples._asdict(),
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return int(arguments.check and not goals_met)


if __name__ == "__main__":
    sys.exit(main())
