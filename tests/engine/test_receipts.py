"""Receipts of requests with several answers: what docs/reference.md says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine.conftest import EngineShelf
from engine.harness import Engine, random_prompt
from engine.spec import BLOCK, EngineSpec

PROMPT = random_prompt(1, 600)
NUM_FULL = 600 // BLOCK * BLOCK
NUM_ANSWERS = 3


@pytest.fixture
def engine(shelf: EngineShelf, llama: Path) -> Engine:
    return shelf.get(EngineSpec.make(llama))


def ask_for_several(engine: Engine, output_kind: str) -> list[Any]:
    """Returns the outputs of one request with several answers."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    engine.llm.llm_engine.add_request(
        "several",
        TokensPrompt(prompt_token_ids=PROMPT),
        SamplingParams(
            n=NUM_ANSWERS,
            max_tokens=4,
            output_kind=RequestOutputKind[output_kind],
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": {"ctx": {"receipt": True}}},
        ),
    )
    outputs = []
    while engine.core.scheduler.has_requests():
        outputs += engine.llm.llm_engine.step()
    return outputs


def figures(output: Any) -> tuple[int, int]:
    receipt = output.kv_transfer_params["ctx"]
    return receipt["lookup_tokens"], receipt["stored_tokens"]


def test_of_several_answers_the_receipt_is_that_of_the_last_to_end(
    engine: Engine,
) -> None:
    """The others' are lost in vLLM: the first answer's here has all that was stored."""
    (output,) = ask_for_several(engine, "FINAL_ONLY")
    assert len(output.outputs) == NUM_ANSWERS
    # Behind the first one, all that it has computed is a local hit.
    assert figures(output) == (600 - NUM_FULL, 0)


def test_in_a_stream_each_answer_has_its_own_receipt(engine: Engine) -> None:
    outputs = ask_for_several(engine, "DELTA")
    receipts = {
        output.outputs[0].index: figures(output)
        for output in outputs
        if output.kv_transfer_params
    }
    rest = (600 - NUM_FULL, 0)
    assert receipts == {0: (600, NUM_FULL), 1: rest, 2: rest}
