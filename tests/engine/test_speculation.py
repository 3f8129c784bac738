"""Speculative decoding: what was confirmed is stored, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import vllm
from engine.conftest import EngineShelf
from engine.harness import Engine, assert_same_answer, random_prompt
from engine.models import make_draft_model, make_eagle
from engine.spec import BLOCK, EngineSpec

# There vLLM's own warm-up of kernels ends with a TypeError.
pytestmark = pytest.mark.skipif(
    vllm.__version__.startswith("0.30."),
    reason="the CPU build of vLLM 0.30 can't speculate",
)
NUM_DRAFTS = 3
PROMPT = random_prompt(31, 250)
MAX_TOKENS = 80
# So few that n-grams come again, and so many that not all guesses are right.
WORDS = [7, 8, 9]


def make_spec(
    llama: Path, config: dict[str, Any], *, asynchronous: bool, **more: Any
) -> EngineSpec:
    speculative = {**config, "num_speculative_tokens": NUM_DRAFTS}
    return EngineSpec.make(
        llama,
        num_blocks=43,
        async_scheduling=asynchronous,
        offload_prompt_only=False,
        options={"speculative_config": speculative},
        **more,
    )


@pytest.fixture(scope="module", params=["ngram", "draft model"])
def spec(
    request: pytest.FixtureRequest,
    llama: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> EngineSpec:
    """N-grams without async scheduling, which vLLM lacks for them on the CPU."""
    if request.param == "ngram":
        ngrams = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
        return make_spec(llama, ngrams, asynchronous=False)
    drafter = make_draft_model(llama, tmp_path_factory.mktemp("drafter"))
    config = {"method": "draft_model", "model": str(drafter)}
    return make_spec(llama, config, asynchronous=True)


@pytest.fixture
def engine(shelf: EngineShelf, spec: EngineSpec) -> Engine:
    return shelf.get(spec)


def drafts(engine: Engine) -> tuple[int, int]:
    """Returns how many drafts were accepted and rejected since the engine started."""
    counts = {
        name: sum(
            metric.value
            for metric in engine.llm.get_metrics()
            if metric.name == f"vllm:spec_decode_num_{name}_tokens"
        )
        for name in ("accepted", "draft")
    }
    return counts["accepted"], counts["draft"] - counts["accepted"]


def test_every_confirmed_block_is_found_and_no_other(
    shelf: EngineShelf, spec: EngineSpec, llama: Path
) -> None:
    """Tokens and KV are those without a connector and those of a local hit."""
    few = {"max_tokens": MAX_TOKENS, "allowed_token_ids": WORDS}
    if "ngram" not in spec.options:
        del few["allowed_token_ids"]  # the drafter does not know of it
    plain = shelf.get(EngineSpec.make(llama, num_blocks=43, transfer=None))
    alone = plain.ask(PROMPT, **few)
    engine = shelf.get(spec)
    before = drafts(engine)
    first = engine.ask(PROMPT, **few)
    accepted, rejected = (
        now - then for now, then in zip(drafts(engine), before, strict=True)
    )
    assert accepted > 0 < rejected
    assert_same_answer(first, alone)

    text = [*PROMPT, *first.tokens, *random_prompt(32, 40)]
    # The last token that came out was never computed.
    num_confirmed = (len(PROMPT) + MAX_TOKENS - 1) // BLOCK * BLOCK
    assert first.receipt["stored_tokens"] == num_confirmed
    local, kept = engine.ask_and_read(text)
    engine.forget_device()
    host, loaded = engine.ask_and_read(text)

    assert (local.num_cached, local.num_loaded) == (num_confirmed, 0)
    assert host.num_cached >= num_confirmed
    assert host.num_loaded == len(text) // BLOCK * BLOCK
    assert loaded == kept
    assert_same_answer(host, local)
    engine.assert_idle()


def test_after_only_the_first_request_its_confirmed_blocks_are_loaded(
    engine: Engine,
) -> None:
    first = engine.ask(PROMPT, max_tokens=MAX_TOKENS)
    engine.forget_device()
    host = engine.ask([*PROMPT, *first.tokens, *random_prompt(33, 40)])
    computed = len(PROMPT) + MAX_TOKENS - 1
    assert host.num_loaded == host.num_cached == computed // BLOCK * BLOCK


def test_a_hit_of_an_eagle_drafter_ends_where_vllms_own_does(
    shelf: EngineShelf,
    llama: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """vLLM drops the last block of a hit, and the host must not bring it back."""
    eagle = make_eagle(llama, tmp_path_factory.mktemp("eagle"))
    config = {"method": "eagle", "model": str(eagle)}
    engine = shelf.get(make_spec(llama, config, asynchronous=True))
    cold = engine.ask(PROMPT)
    local, kept = engine.ask_and_read(PROMPT)
    engine.forget_device()
    host, loaded = engine.ask_and_read(PROMPT)

    num_full = len(PROMPT) // BLOCK * BLOCK
    assert cold.receipt["stored_tokens"] == num_full
    assert (local.num_cached, local.num_loaded) == (num_full - BLOCK, 0)
    assert (host.num_cached, host.num_loaded) == (num_full - BLOCK, num_full - BLOCK)
    whole = range((num_full - BLOCK) // BLOCK)
    assert [loaded[0, i] for i in whole] == [kept[0, i] for i in whole]
    assert_same_answer(
        host, cold._replace(tokens=cold.tokens[:2], logprobs=cold.logprobs[:2])
    )
    engine.assert_idle()
