"""The engine that the benchmarks measure: vLLM with a small device cache."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools import local_vllm, smollm2

BLOCK_SIZE = 32
# Ids below this are control tokens.
FIRST_TOKEN, LAST_TOKEN = 100, 49_000

# vLLM's name for prompt tokens that came through a connector.
_LOADED = "vllm:prompt_tokens_by_source"
_LOADED_SOURCE = "external_kv_transfer"


class EngineSettings(NamedTuple):
    """Everything that decides how fast an engine is."""

    model: str
    connector: str | None  # None: without a connector
    dtype: str
    max_model_len: int
    device_blocks: int
    host_bytes: int
    max_batched_tokens: int
    multiprocess: bool  # the engine in processes of its own, as in a server


class Answer(NamedTuple):
    """What a batch of requests took, and how much of it was cached."""

    seconds: float
    cpu_seconds: float  # of all threads of this process
    num_cached_tokens: int
    num_output_tokens: int


class Engine:
    """A vLLM engine of its own; one a process, since vLLM keeps global state."""

    def __init__(self, settings: EngineSettings) -> None:
        prepare_process(multiprocess=settings.multiprocess)
        # Only now: vLLM reads its environment when it is imported.
        from vllm import LLM

        # What `use_connector` took out: the scheduler's half, the worker's half.
        self._connector: tuple[Any, Any] | None = None
        self._llm: Any = LLM(
            model=settings.model,
            dtype=cast("Any", settings.dtype),
            block_size=BLOCK_SIZE,
            max_model_len=settings.max_model_len,
            max_num_batched_tokens=settings.max_batched_tokens,
            num_gpu_blocks_override=settings.device_blocks,
            gpu_memory_utilization=0.3,
            enforce_eager=True,
            disable_log_stats=False,  # get_metrics() needs them
            kv_transfer_config=transfer_config(settings),
        )

    def run(self, prompts: list[list[int]], max_tokens: int) -> Answer:
        """Sends `prompts` at once; returns when all are answered."""
        from vllm import SamplingParams

        inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        began, cpu_began = time.perf_counter(), time.process_time()
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        return Answer(
            time.perf_counter() - began,
            time.process_time() - cpu_began,
            sum(output.num_cached_tokens or 0 for output in outputs),
            sum(len(output.outputs[0].token_ids) for output in outputs),
        )

    def num_loaded_tokens(self) -> int:
        """Returns the prompt tokens that a connector brought, since the start."""
        return sum(
            metric.value
            for metric in self._llm.get_metrics()
            if metric.name == _LOADED and metric.labels["source"] == _LOADED_SOURCE
        )

    def use_connector(self, use: bool) -> None:
        """Takes the connector out of an engine in this process, or puts it back.

        vLLM has no switch for it, so this reaches into what asks for the connector,
        once in the scheduler and once in the worker. Only between requests.
        """
        from vllm.distributed.kv_transfer import kv_transfer_state as worker

        core = self._llm.llm_engine.engine_core.engine_core
        while core.scheduler.has_requests():
            core.step_fn()  # a transfer is still under way
        state = vars(worker)
        if self._connector is None:
            self._connector = (core.scheduler.connector, state["_KV_CONNECTOR_AGENT"])
        pair = self._connector if use else (None, None)
        core.scheduler.connector, state["_KV_CONNECTOR_AGENT"] = pair

    def close(self) -> None:
        """Ends the engine and its processes."""
        if self._connector is not None:
            self.use_connector(True)  # it has a thread to end
        self._llm.llm_engine.engine_core.shutdown()


def prepare_process(*, multiprocess: bool) -> None:
    """Sets the environment that vLLM reads when it is imported."""
    os.environ.update(local_vllm.ENVIRONMENT)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(multiprocess))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not multiprocess:
        # A server gives the model all cores; an engine in this process would take one.
        os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))


def transfer_config(settings: EngineSettings) -> Any:
    """Returns the ``kv_transfer_config`` for an engine, None without a connector."""
    if settings.connector is None:
        return None
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector=settings.connector,
        kv_role="kv_both",
        kv_connector_extra_config={"cpu_bytes_to_use": settings.host_bytes},
    )


def random_prompt(seed: int, num_tokens: int) -> list[int]:
    """Returns token ids that no other seed shares a prefix with."""
    rng = random.Random(seed)
    return [rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(num_tokens)]


def blocks_for(num_tokens: int) -> int:
    """Returns the number of blocks that hold `num_tokens`."""
    return -(-num_tokens // BLOCK_SIZE)


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that all benchmarks have."""
    parser.add_argument(
        "--connector",
        default="CtxOffloadConnector",
        metavar="NAME",
        help="connector to measure, such as vLLM's OffloadingConnector (default: ours)",
    )
    parser.add_argument(
        "--model", type=Path, help="model folder (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument(
        "--dtype",
        default=local_vllm.best_dtype(),
        help="data type of the model and its KV cache (default here: %(default)s)",
    )
    parser.add_argument(
        "--multiprocess",
        action="store_true",
        help="run the engine in processes of its own, as a server does",
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 where a goal is missed"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write settings and samples there"
    )


def find_model(folder: Path | None) -> str:
    """Returns the model to measure with, made first where it is not there."""
    return str(folder or smollm2.prepare(report=say))


def say(text: str = "") -> None:
    """Prints a line at once, also into a pipe."""
    print(text, flush=True)
