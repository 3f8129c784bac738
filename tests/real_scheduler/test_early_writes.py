"""Blocks that the model runner zeroes or copies to before a step's first hook.

It does so for models with recurrent layers: the second model runner, and from vLLM 0.34
on the only one. A store that still has to read such a block then comes too late, and
would keep zeros or somebody else's KV under the old key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from real_scheduler.harness import Engine
from real_scheduler.invariants import host_manager
from real_scheduler.vllm_setup import STATE
from vllm.config import VllmConfig

MakeEngine = Callable[..., Engine]


@pytest.fixture(params=[False, True], ids=["first", "second"])
def second_runner(request: pytest.FixtureRequest) -> bool:
    """Whether the user asks for the second model runner."""
    if not request.param and not hasattr(VllmConfig, "use_v2_model_runner"):
        pytest.skip("this vLLM has one model runner")
    return bool(request.param)


def prompts() -> Iterator[list[int]]:
    """Yields prompts of other tokens each, that end in other places of a block."""
    for index, length in enumerate(range(50, 98, 4)):
        yield [1 + (7 * index + token) % 500 for token in range(length)]


@pytest.mark.parametrize("steps_per_copy", [1, 4])
def test_no_store_reads_a_block_that_was_written_again(
    make_engine: MakeEngine,
    async_scheduling: bool,
    second_runner: bool,
    steps_per_copy: int,
) -> None:
    """1. The device has room for two requests; what one gives up, the next one gets.
    2. Copies take several steps, so some end after their request. With asynchronous
       scheduling each request ends with a block whose hash comes with its last token.
    3. After each step all that can be hit holds what its key says.
    """
    engine = make_engine(
        groups=(None, STATE),
        num_blocks=12,
        async_scheduling=async_scheduling,
        second_runner=second_runner,
        extra={"offload_prompt_only": False},
    )
    assert engine.writes_early == second_runner
    engine.controls.may_end = lambda job, to_host: (
        not to_host or engine.num_steps % steps_per_copy == 0
    )
    for prompt in prompts():
        engine.add(prompt, max_tokens=-len(prompt) % 32 + 33)
    zeroed = 0
    while engine.scheduler.has_requests():
        zeroed += len(engine.step().new_block_ids_to_zero or ())
    assert zeroed > 20
    assert host_manager(engine.side).num_resident > 10


def test_a_model_without_states_keeps_its_late_stores(
    make_engine: MakeEngine, second_runner: bool
) -> None:
    """Nothing is zeroed there, so nothing is given up."""
    engine = make_engine(
        second_runner=second_runner, extra={"offload_prompt_only": False}
    )
    assert not engine.side.planner._plan.writes_early
    engine.run(next(prompts()), max_tokens=20)
    assert engine.last_output.new_block_ids_to_zero is None
