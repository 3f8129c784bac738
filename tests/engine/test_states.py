"""A hybrid of attention and recurrent layers: it starts, but a CPU can't compute it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine.conftest import EngineShelf
from engine.harness import Engine
from engine.models import make_falcon_h1
from engine.spec import EngineSpec

from vllm_ctx_offload.adapters import vllm_api
from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.plan import GroupShape

BLOCK = 128  # a state fits in one


@pytest.fixture(scope="module")
def falcon(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_falcon_h1(tmp_path_factory.mktemp("falcon"))


def make_spec(model: Path, *, prefix_caching: bool) -> EngineSpec:
    return EngineSpec.make(
        model,
        tokens_per_block=BLOCK,
        options={"load_format": "dummy", "enable_prefix_caching": prefix_caching},
    )


def test_states_share_the_pages_of_attention(shelf: EngineShelf, falcon: Path) -> None:
    """The start has proven that blocks of both come back as they left."""
    if vllm_api.KVConnectorTransferResults is None:
        pytest.skip("this vLLM can't recompute a failed load of several groups")
    engine = shelf.get(make_spec(falcon, prefix_caching=True))
    plan = engine.side.planner._plan
    assert plan.groups == (GroupShape(BLOCK), GroupShape(BLOCK, recurrent=True))
    pool = engine.worker._pool
    assert pool is not None
    layers, keys_and_values, heads, head_size = 2, 2, 2, 32
    page = BLOCK * keys_and_values * heads * head_size * torch.float32.itemsize
    assert pool.rows.shape[1] == plan.bytes_per_block == layers * page


def test_without_prefix_caching_the_start_is_refused(
    shelf: EngineShelf, falcon: Path
) -> None:
    shelf.clear()
    try:
        with pytest.raises(ConfigError, match=r"layers are kept in mode 'none'"):
            Engine(make_spec(falcon, prefix_caching=False))
    except NotImplementedError as error:  # 0.30 tries the model first
        pytest.skip(f"this vLLM: {error}")
