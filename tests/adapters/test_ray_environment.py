"""What reaches the workers that vLLM starts under Ray, by vLLM's own rule."""

from __future__ import annotations

import os

import pytest
from vllm.ray.ray_env import get_env_vars_to_copy

import vllm_ctx_offload
from vllm_ctx_offload.memory import DEFAULT_ENV, RAY_COPIES_ENV


def test_the_default_of_the_pool_reaches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEFAULT_ENV, "")
    monkeypatch.setenv(RAY_COPIES_ENV, "MINE")
    vllm_ctx_offload.register()
    copied = get_env_vars_to_copy()
    assert {DEFAULT_ENV, "MINE"} <= copied
    assert os.environ[DEFAULT_ENV].isdecimal()
    # They may start workers in turn.
    assert RAY_COPIES_ENV in copied
