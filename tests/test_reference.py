"""The generated reference says what the code says."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tools import reference
from vllm_ctx_offload.config import OffloadConfig, TenantConfig
from vllm_ctx_offload.context import Hints, build_req_context

PAGE = reference.page()


def test_the_page_is_not_stale() -> None:
    written = reference.PAGE.read_text(encoding="utf-8")
    assert written == PAGE, "run 'make format'"


@pytest.mark.parametrize("model", [OffloadConfig, TenantConfig])
def test_every_key_has_a_row(model: type[OffloadConfig] | type[TenantConfig]) -> None:
    for name in model.model_fields:
        assert f"\n| `{name}` | " in PAGE


def test_every_field_of_a_request_has_a_row() -> None:
    for name in ("tenant", *(field.name for field in dataclasses.fields(Hints))):
        assert re.search(rf"\n\| `(ctx\.)?{name}` \| ", PAGE), name


def test_bounds_and_defaults_are_those_of_the_code() -> None:
    assert "| `load_wait_ms` | number ≥ 0 and ≤ 60000 | `50` |" in PAGE
    assert '| `max_protected` | share | `"30%"` |' in PAGE
    assert "| `limit` | size or share | the whole pool |" in PAGE
    assert '| `eviction_policy` | `"ctx"` or `"lru"` | `"ctx"` |' in PAGE
    assert "| `ctx.session` | text of 1 to 128 characters |" in PAGE


def test_a_field_without_a_meaning_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(reference._CONFIG, "block_size")
    with pytest.raises(KeyError, match="block_size"):
        reference.page()


@pytest.mark.parametrize(
    "ctx",
    [
        {"priority": "high"},
        {"priority": float("nan")},
        {"priority": 101},
        {"session": ""},
        {"ttl_s": 0},
        {"ttl_s": -1},
        {"retention_directives": [{"start": 1, "end": 1, "priority": 1}] * 65},
        {"colour": "red"},
    ],
)
def test_every_reason_that_occurs_is_explained(ctx: dict[str, object]) -> None:
    rejected = build_req_context(OffloadConfig(), "r", {"ctx": ctx}).rejected
    assert rejected
    for hint in rejected:
        assert f"\n| `{hint.reason}` | " in PAGE


@pytest.mark.parametrize(("same", "code"), [(True, 0), (False, 1)])
def test_check_tells_a_stale_page(
    same: bool,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["reference.py", "--check"])
    if not same:
        monkeypatch.setattr(reference, "page", lambda: "new")
    assert reference.main() == code
    assert ("is stale" in capsys.readouterr().err) == (not same)
