"""A real engine in this process, driven step by step and open for inspection."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from engine.models import VOCAB_SIZE
from engine.spec import EngineSpec, engine_environment, force_async_scheduling

from vllm_ctx_offload.adapters.scheduler_side import SchedulerSide
from vllm_ctx_offload.worker import OffloadWorker

__all__ = [
    "Engine",
    "Result",
    "assert_same_answer",
    "assert_same_prefix",
    "check_invariants",
    "manager_of",
    "random_prompt",
]

# In float32 answers differ by the order of additions at most.
_TOLERANCE: Final = 2e-5
_GARBAGE: Final = 7.0
# Far more than any test needs: steps without tokens take a millisecond.
_MAX_STEPS: Final = 20_000

Prompt = Sequence[int]


class Result(NamedTuple):
    """The answer to one request."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_cached: int  # prompt tokens from the device's cache or the host
    receipt: dict[str, Any]  # empty where none was asked for
    prompt_logprobs: tuple[float, ...] = ()

    @property
    def num_loaded(self) -> int:
        return int(self.receipt["loaded_tokens"])


class Engine:
    """One engine. Invariants of the scheduler side are checked after every step."""

    def __init__(self, spec: EngineSpec, **more: Any) -> None:
        """Starts it; `more` are arguments of vLLM's that JSON can't hold."""
        self.spec = spec
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(engine_environment())
        from vllm import LLM

        try:
            with contextlib.ExitStack() as stack:
                if spec.async_scheduling:
                    stack.enter_context(force_async_scheduling())
                self.llm = LLM(**spec.arguments(), **more)
        except BaseException:
            self._stack.close()
            raise
        assert (self.core.batch_queue_size > 1) == spec.async_scheduling
        self._next_id = 0
        self.broken = False

    # ---- what is inside

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def connector(self) -> Any:
        return self.core.scheduler.connector

    @property
    def sides(self) -> list[SchedulerSide]:
        """The scheduler side of each of our connectors."""
        connector = self.connector
        found = getattr(connector, "_connectors", [connector])
        return [c._scheduler for c in found if c is not None]

    @property
    def side(self) -> SchedulerSide:
        (side,) = self.sides
        return side

    @property
    def workers(self) -> list[OffloadWorker]:
        """The worker side of each of our connectors, of this process."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        group: Any = get_kv_transfer_group()
        found = getattr(group, "_connectors", [group])
        return [c._worker for c in found]

    @property
    def worker(self) -> OffloadWorker:
        (worker,) = self.workers
        return worker

    @property
    def transfer(self) -> Any:
        assert self.worker._transfer is not None
        return self.worker._transfer

    @property
    def kv_tensors(self) -> list[torch.Tensor]:
        """The cache of all layers; empty where other processes hold it."""
        driver = getattr(self.core.model_executor, "driver_worker", None)
        return [] if driver is None else list(driver.worker.model_runner.kv_caches)

    # ---- requests

    def add(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 4,
        ctx: Mapping[str, Any] | None = None,
        params: Any = None,
        **sampling: Any,
    ) -> str:
        """Adds a request that asks for a receipt; returns its id."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        if params is None:
            params = {"ctx": {"receipt": True, **(ctx or {})}}
        request_id = f"r{self._next_id}"
        self._next_id += 1
        self.llm.llm_engine.add_request(
            request_id,
            TokensPrompt(prompt_token_ids=list(prompt)),
            SamplingParams(
                max_tokens=max_tokens,
                temperature=0,
                logprobs=0,
                ignore_eos=True,
                detokenize=False,
                extra_args={"kv_transfer_params": params},
                **sampling,
            ),
        )
        return request_id

    def abort(self, request_id: str) -> None:
        self.llm.llm_engine.abort_request([request_id])

    def step(self) -> dict[str, Result]:
        """Runs one step; returns the requests that it ended."""
        self.broken = True  # unless this step ends well
        outputs = self.llm.llm_engine.step()
        for side in self.sides:
            check_invariants(side)
        self.broken = False
        return {out.request_id: _result(out) for out in outputs if out.finished}

    def run(self, *prompts: Prompt, **arguments: Any) -> list[Result]:
        """Runs requests together, and the transfers that they leave to their end."""
        ids = [self.add(prompt, **arguments) for prompt in prompts]
        results: dict[str, Result] = {}
        while len(results) < len(ids):
            results.update(self.step())
        self.drain()
        return [results[request_id] for request_id in ids]

    def ask(self, prompt: Prompt, **arguments: Any) -> Result:
        (result,) = self.run(prompt, **arguments)
        return result

    def drain(self) -> None:
        """Steps until every request and every transfer has ended."""
        for _ in range(_MAX_STEPS):
            if not self.core.scheduler.has_requests():
                return
            self.step()
        self.broken = True
        raise AssertionError("the engine never comes to rest")

    # ---- caches

    def forget_device(self) -> None:
        """Empties the device's prefix cache and writes garbage over every block."""
        assert self.llm.reset_prefix_cache()
        for tensor in self.kv_tensors:
            tensor.fill_(_GARBAGE)

    def forget(self) -> None:
        """Brings the engine back to how it started, both caches empty."""
        self.drain()
        assert self.llm.reset_prefix_cache(reset_connector=True)
        for tensor in self.kv_tensors:
            tensor.fill_(_GARBAGE)

    def ask_and_read(self, prompt: Prompt) -> tuple[Result, dict[Any, bytes]]:
        """Returns the answer and the bytes of the prompt's full blocks, all layers.

        By (group, place in the table); holes of a table are left out.
        """
        request_id = self.add(prompt, max_tokens=2)
        request = self._newest_request()
        while not request.num_output_tokens:
            self.step()
        tables = self.core.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        groups = self.core.scheduler.kv_cache_config.kv_cache_groups
        contents = {
            (group, place): self._bytes_of_block(block)
            for group, table in enumerate(tables)
            for place, block in enumerate(
                table[: len(prompt) // groups[group].kv_cache_spec.block_size]
            )
            if block
        }
        results: dict[str, Result] = {}
        while request_id not in results:
            results.update(self.step())
        self.drain()
        return results[request_id], contents

    def _newest_request(self) -> Any:
        requests = self.core.scheduler.requests
        return requests[next(reversed(requests))]

    def _bytes_of_block(self, block_id: int) -> bytes:
        parts = []
        # Layers of different groups share a tensor.
        for tensor in {
            tensor.data_ptr(): tensor for tensor in self.kv_tensors
        }.values():
            axis = tensor.shape.index(self.spec.num_blocks)
            block = tensor.select(axis, block_id).contiguous().flatten()
            parts.append(block.view(torch.uint8).numpy().tobytes())
        return b"".join(parts)

    def assert_idle(self) -> None:
        """No request, transfer or pin is left in any table."""
        for side in self.sides:
            assert not side._disabled
            assert side.planner.num_requests == 0
            assert not side.planner.has_work
            assert manager_of(side).num_pinned == 0

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        cleanup_dist_env_and_memory()
        gc.collect()
        self._stack.close()


def manager_of(side: SchedulerSide) -> Any:
    """The host-memory manager, behind the reuse filter if there is one."""
    return getattr(side.manager, "_inner", side.manager)


def check_invariants(side: SchedulerSide) -> None:
    assert not side._disabled, "the connector disabled itself; its log says why"
    side.planner.check_invariants()
    manager_of(side).check_invariants()


def _result(output: Any) -> Result:
    (completion,) = output.outputs
    params = output.kv_transfer_params or {}
    return Result(
        tokens=tuple(completion.token_ids),
        logprobs=_logprobs(completion.token_ids, completion.logprobs or ()),
        num_cached=output.num_cached_tokens or 0,
        receipt=params.get("ctx", {}),
        prompt_logprobs=_logprobs(
            output.prompt_token_ids[1:], (output.prompt_logprobs or ())[1:]
        ),
    )


def _logprobs(tokens: Sequence[int], per_token: Sequence[Any]) -> tuple[float, ...]:
    pairs = zip(tokens, per_token, strict=False)
    return tuple(candidates[token].logprob for token, candidates in pairs)


def assert_same_answer(one: Result, other: Result) -> None:
    """Same tokens, and log-probabilities within what float32 sums can differ by."""
    assert one.tokens == other.tokens
    for a, b in zip(one.logprobs, other.logprobs, strict=True):
        assert abs(a - b) <= _TOLERANCE, (one.logprobs, other.logprobs)


def assert_same_prefix(one: Result, other: Result, num_tokens: int) -> None:
    """`one` is the beginning of `other`, `num_tokens` long."""
    expected = other._replace(
        tokens=other.tokens[:num_tokens], logprobs=other.logprobs[:num_tokens]
    )
    assert_same_answer(one, expected)


def random_prompt(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]
