"""More than one engine in a process: beside each other, and one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine.conftest import EngineShelf
from engine.harness import Engine, assert_same_answer, random_prompt
from engine.spec import BLOCK, EngineSpec, engine_environment

from vllm_ctx_offload.errors import ConfigError

NUM_BLOCKS = 23
FULL = 300 // BLOCK * BLOCK


def assert_hits_are_right(engine: Engine, seed: int) -> None:
    """What comes from the host answers like the device's own cache, with its bytes."""
    prompt = random_prompt(seed, 300)
    engine.ask(prompt)
    local, expected = engine.ask_and_read(prompt)
    engine.forget_device()
    host, contents = engine.ask_and_read(prompt)
    assert (local.num_loaded, host.num_loaded) == (0, FULL)
    assert contents == expected
    assert_same_answer(host, local)


@pytest.mark.parametrize("other", ["equal", "of another size", "without a connector"])
def test_a_second_engine_is_refused_and_the_first_goes_on(
    shelf: EngineShelf, llama: Path, other: str
) -> None:
    """vLLM would give its caches to the worker side of the first."""
    first = shelf.get(EngineSpec.make(llama, num_blocks=NUM_BLOCKS))
    options: dict[str, dict[str, Any]] = {
        "equal": {},
        "of another size": {"num_blocks": 29},
        "without a connector": {"transfer": None},
    }
    first.ask(random_prompt(1, 300))
    spec = EngineSpec.make(llama, **{"num_blocks": NUM_BLOCKS, **options[other]})
    with pytest.raises(ConfigError, match="another engine of this process uses"):
        Engine(spec)
    first.forget_device()
    # It was stored before the second one came.
    assert first.ask(random_prompt(1, 300)).num_loaded == FULL
    assert_hits_are_right(first, 2)
    first.assert_idle()


class DoesNotStart:
    """A scheduler of the caller's own; the worker has its caches when it is made."""

    def __init__(self, **_: Any) -> None:
        raise RuntimeError("not today")


def test_after_a_start_that_failed_the_next_but_one_works(
    shelf: EngineShelf, llama: Path
) -> None:
    """The first leaves its worker side; the second closes it; the third has its own."""
    shelf.clear()
    options = {"scheduler_cls": f"{__name__}.{DoesNotStart.__name__}"}
    with pytest.raises(RuntimeError, match="not today"):
        Engine(EngineSpec.make(llama, num_blocks=NUM_BLOCKS, options=options))
    spec = EngineSpec.make(llama, num_blocks=29)
    with pytest.raises(ConfigError, match="it is closed now, so start this engine"):
        Engine(spec)
    assert_hits_are_right(shelf.get(spec), 3)


@pytest.fixture
def two(shelf: EngineShelf, llama: Path) -> Iterator[list[Any]]:
    """Two engines as a user starts them, each in a process of its own."""
    from vllm import LLM

    shelf.clear()
    arguments = EngineSpec.make(llama, num_blocks=NUM_BLOCKS).arguments()
    with engine_environment(
        VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_WORKER_MULTIPROC_METHOD="spawn"
    ):
        engines = [LLM(**arguments) for _ in range(2)]
        yield engines
        for engine in engines:
            engine.llm_engine.engine_core.shutdown()


def answer(engine: Any, prompt: list[int]) -> tuple[list[int], int]:
    """Returns the tokens, and how many of the prompt's came from the host."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    (output,) = engine.generate(
        [TokensPrompt(prompt_token_ids=prompt)],
        SamplingParams(
            max_tokens=8,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": {"ctx": {"receipt": True}}},
        ),
        use_tqdm=False,
    )
    receipt = output.kv_transfer_params["ctx"]
    return list(output.outputs[0].token_ids), int(receipt["loaded_tokens"])


@pytest.mark.slow
# vLLM's, of its client in this process.
@pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning")
def test_in_vllms_default_mode_two_engines_load_each_its_own(two: list[Any]) -> None:
    """Prompts of the other engine are computed, and answered like there."""
    prompts = [random_prompt(seed, 300) for seed in (4, 5)]
    cold = [answer(engine, own) for engine, own in zip(two, prompts, strict=True)]
    for engine in two:  # takes all blocks of the device
        answer(engine, random_prompt(6, 690))
    warm = [answer(engine, own) for engine, own in zip(two, prompts, strict=True)]
    crossed = [
        answer(engine, other) for engine, other in zip(two[::-1], prompts, strict=True)
    ]
    tokens = [tokens for tokens, _ in cold]
    assert cold == crossed == [(t, 0) for t in tokens]
    assert warm == [(t, FULL) for t in tokens]
