"""The doctor's plan is the engine's, to the byte."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine.conftest import EngineShelf
from engine.harness import Engine, manager_of
from engine.spec import BLOCK, MLA_BLOCK, EngineSpec

from vllm_ctx_offload.cli import main
from vllm_ctx_offload.cli.doctor_model import KvOptions, kv_shape, read_model

EXTRA = {
    "cpu_bytes_to_use": 20_000_001,
    "blocks_per_chunk": 2,
    "max_protected": "10%",
    "tenants": {
        "acme": {"reserved": "25%", "limit": "8MiB"},
        "zeta": {"reserved": 1_000_000, "weight": 3},
        "*": {"limit": "50%"},
    },
}


def doctors_plan(
    capsys: pytest.CaptureFixture[str], spec: EngineSpec, *options: str
) -> dict[str, Any]:
    capsys.readouterr()  # what vLLM has printed
    arguments = ["--model", str(spec.model), "--extra-config", spec.extra, *options]
    assert main(["doctor", "--json", *arguments]) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)["plan"]
    return plan


def assert_is_the_engines(plan: dict[str, Any], engine: Engine) -> None:
    resolved = engine.side.planner._plan
    assert plan["bytes_per_token_per_worker"] * resolved.groups[0].tokens_per_block == (
        resolved.bytes_per_block * len(resolved.groups)
    )
    assert plan["num_groups"] == len(resolved.groups)
    assert plan["tokens_per_block"] == resolved.groups[0].tokens_per_block
    assert plan["tokens_per_chunk"] == resolved.tokens_per_span
    for name in (
        "num_workers",
        "blocks_per_chunk",
        "bytes_per_chunk",
        "num_slots",
        "bytes_per_worker",
        "total_bytes",
    ):
        assert plan[name] == getattr(resolved, name), name
    pool = engine.worker._pool
    assert pool is not None
    assert plan["bytes_per_worker"] == pool.rows.numel()
    manager = manager_of(engine.side)
    assert plan["max_protected_chunks"] == manager._table._max_protected
    accounts = list(manager._table.accounts)
    assert list(plan["tenants"]) == [account.name for account in accounts]
    for account in accounts:
        said = plan["tenants"][account.name]
        assert said["reserved_chunks"] == account.reserved
        assert said["limit_chunks"] == account.limit
        assert said["weight"] == account.weight


def test_of_full_attention(
    shelf: EngineShelf, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = EngineSpec.make(llama, **EXTRA)
    engine = shelf.get(spec)
    plan = doctors_plan(capsys, spec, "--dtype", "float32", "--block-size", str(BLOCK))
    assert plan["attention"] == "attention"
    assert plan["bytes_per_token"] == 3 * 2 * 2 * 32 * 4
    assert_is_the_engines(plan, engine)


def test_of_mla(
    shelf: EngineShelf, mla: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = EngineSpec.make(mla, tokens_per_block=MLA_BLOCK, dtype="bfloat16", **EXTRA)
    engine = shelf.get(spec)
    plan = doctors_plan(capsys, spec, "--block-size", str(MLA_BLOCK))
    assert plan["attention"] == "MLA"
    assert plan["bytes_per_token"] == 3 * (512 + 64) * 2
    assert_is_the_engines(plan, engine)


def test_of_several_groups(
    shelf: EngineShelf, gemma3: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = EngineSpec.make(gemma3, num_blocks=331, **EXTRA)
    engine = shelf.get(spec)
    plan = doctors_plan(capsys, spec, "--dtype", "float32", "--block-size", str(BLOCK))
    assert plan["num_groups"] == 3
    assert plan["bytes_per_token"] == 6 * 2 * 2 * 32 * 4
    assert_is_the_engines(plan, engine)
    shape = kv_shape(read_model(gemma3), KvOptions(dtype="float32"))
    groups = engine.side.planner._plan.groups
    assert {group.tokens_per_block for group in groups} == {BLOCK}
    assert sorted(shape.groups, key=repr) == sorted(
        [replace(group, tokens_per_block=1) for group in groups], key=repr
    )
