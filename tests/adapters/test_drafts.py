"""What is read of vLLM's configuration of a drafter."""

from __future__ import annotations

from typing import Any

import pytest
from real_scheduler.harness import ours
from real_scheduler.vllm_setup import make_vllm_config
from vllm.config import SpeculativeConfig

from vllm_ctx_offload.adapters.drafts import draft_lookahead


@pytest.fixture
def config() -> Any:
    return make_vllm_config(kv_transfer=ours(), num_drafts=3)


def say(monkeypatch: pytest.MonkeyPatch, **answers: bool) -> None:
    for name, answer in answers.items():
        monkeypatch.setattr(SpeculativeConfig, name, lambda self, say=answer: say)


def test_without_a_drafter_or_with_ngrams_nothing_looks_ahead(config: Any) -> None:
    assert draft_lookahead(make_vllm_config(kv_transfer=ours())) == 0
    assert draft_lookahead(config) == 0


def test_eagle_looks_at_the_next_token(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, use_eagle_block_drop=True)
    assert draft_lookahead(config) == 1


def test_several_mtp_modules_look_at_one_token_more_each(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, use_eagle_block_drop=True, use_multi_module_mtp=True)
    assert draft_lookahead(config) == 3


def test_whoever_switches_vllms_drop_off_switches_ours_off(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, use_eagle=True)
    config.speculative_config.disable_eagle_block_drop = True
    assert draft_lookahead(config) == 0


def test_releases_without_that_switch_always_drop(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(SpeculativeConfig, "use_eagle_block_drop", raising=False)
    assert draft_lookahead(config) == 0
    say(monkeypatch, use_eagle=True)
    assert draft_lookahead(config) == 1
