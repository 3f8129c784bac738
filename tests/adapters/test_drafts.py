"""What is read of vLLM's configuration of a drafter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from real_scheduler.harness import ours
from real_scheduler.vllm_setup import as_eagle, make_vllm_config
from vllm.config import SpeculativeConfig, VllmConfig

from vllm_ctx_offload.adapters.drafts import draft_lookahead
from vllm_ctx_offload.adapters.releases import hashes_cover_drafts


@pytest.fixture
def config() -> Any:
    return make_vllm_config(kv_transfer=ours(), num_drafts=3)


def say(monkeypatch: pytest.MonkeyPatch, **answers: bool) -> None:
    for name, answer in answers.items():
        monkeypatch.setattr(SpeculativeConfig, name, lambda self, say=answer: say)


def test_without_a_drafter_or_with_ngrams_nothing_looks_ahead(config: Any) -> None:
    assert draft_lookahead(make_vllm_config(kv_transfer=ours())) == 0
    assert draft_lookahead(config) == 0


@pytest.mark.parametrize("lookahead", [1, 3])
def test_vllm_says_how_far_a_drafter_of_the_kind_of_eagle_looks(
    config: Any, monkeypatch: pytest.MonkeyPatch, lookahead: int
) -> None:
    as_eagle(monkeypatch, lookahead)
    assert draft_lookahead(config) == lookahead


@pytest.mark.parametrize(("several", "lookahead"), [(False, 1), (True, 3)])
def test_on_releases_that_do_not_say_it_follows_from_the_modules(
    config: Any, monkeypatch: pytest.MonkeyPatch, several: bool, lookahead: int
) -> None:
    monkeypatch.delattr(VllmConfig, "num_prefill_lookahead_tokens", raising=False)
    say(monkeypatch, use_eagle=True, use_multi_module_mtp=several)
    assert draft_lookahead(config) == lookahead


def test_whoever_switches_vllms_drop_off_switches_ours_off(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_eagle(monkeypatch)
    config.speculative_config.disable_eagle_block_drop = True
    assert draft_lookahead(config) == 0


def test_releases_without_that_switch_always_drop(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(SpeculativeConfig, "use_eagle_block_drop", raising=False)
    assert draft_lookahead(config) == 0
    as_eagle(monkeypatch)
    assert draft_lookahead(config) == 1


def test_hashes_cover_drafts_only_where_vllm_says_so() -> None:
    assert not hashes_cover_drafts(SimpleNamespace())
    assert not hashes_cover_drafts(SimpleNamespace(num_hash_lookahead_tokens=0))
    assert hashes_cover_drafts(SimpleNamespace(num_hash_lookahead_tokens=1))
