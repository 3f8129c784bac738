"""Weights that change under a running engine, and what has to be called then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine.conftest import EngineShelf
from engine.harness import Engine, Result, assert_same_answer, random_prompt
from engine.models import make_draft_model
from engine.spec import BLOCK, EngineSpec

PROMPT = random_prompt(1, 200)
NUM_FULL = 200 // BLOCK * BLOCK


@pytest.fixture(scope="module")
def new_weights(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_draft_model(llama, tmp_path_factory.mktemp("new_weights"))


@pytest.fixture(scope="module")
def new_answer(shelf: EngineShelf, new_weights: Path) -> Result:
    """Of an engine that has never known other weights."""
    return shelf.get(EngineSpec.make(new_weights, transfer=None)).ask(PROMPT)


def reload(engine: Engine, weights: Path) -> None:
    """Changes the weights in place, as training loops do."""
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(weights)})


@pytest.fixture
def reloaded(
    shelf: EngineShelf, llama: Path, new_weights: Path, request: pytest.FixtureRequest
) -> Iterator[Engine]:
    """An engine that has answered PROMPT, and then got other weights."""
    engine = shelf.get(EngineSpec.make(llama, **request.param))
    engine.ask(PROMPT)
    reload(engine, new_weights)
    yield engine
    reload(engine, llama)


PLAIN: dict[str, bool] = {}
FOLLOW = {"reset_with_device_cache": True}


@pytest.mark.parametrize("reloaded", [PLAIN], indirect=True)
def test_vllms_plain_reset_leaves_the_host_old(
    new_answer: Result, reloaded: Engine
) -> None:
    """`reset_prefix_cache()` is `reset_connector=False`: what the docs warn of."""
    assert reloaded.llm.reset_prefix_cache()
    old = reloaded.ask(PROMPT)

    assert old.num_loaded == NUM_FULL
    with pytest.raises(AssertionError):
        assert_same_answer(old, new_answer)


@pytest.mark.parametrize("reloaded", [PLAIN, FOLLOW], indirect=True)
def test_a_reset_of_the_connector_too_leaves_nothing_old(
    new_answer: Result, reloaded: Engine
) -> None:
    """CASES 32."""
    assert reloaded.llm.reset_prefix_cache(reset_connector=True)
    new = reloaded.ask(PROMPT)

    assert new.num_loaded == new.num_cached == 0
    assert_same_answer(new, new_answer)


@pytest.mark.parametrize("reloaded", [FOLLOW], indirect=True)
def test_with_the_key_the_plain_reset_leaves_nothing_old(
    new_answer: Result, reloaded: Engine
) -> None:
    """CASES 32. And what is stored from then on is found."""
    assert reloaded.llm.reset_prefix_cache()
    new = reloaded.ask(PROMPT)
    reloaded.run(random_prompt(101, 900))
    reloaded.run(random_prompt(102, 900))
    again = reloaded.ask(PROMPT)

    assert new.num_loaded == new.num_cached == 0
    assert_same_answer(new, new_answer)
    assert again.num_loaded == NUM_FULL
    assert_same_answer(again, new_answer)


@pytest.mark.parametrize("reloaded", [FOLLOW], indirect=True)
def test_other_prompts_between_the_reset_and_the_old_one_hide_nothing(
    new_answer: Result, reloaded: Engine
) -> None:
    assert reloaded.llm.reset_prefix_cache()
    reloaded.run(random_prompt(103, 900))
    assert reloaded.ask(PROMPT).num_loaded == 0
    assert_same_answer(reloaded.ask(PROMPT), new_answer)
