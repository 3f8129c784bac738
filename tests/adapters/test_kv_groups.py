"""What vLLM's description of a KV cache means, and which models are refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from real_scheduler.harness import ours
from real_scheduler.vllm_setup import (
    STATE,
    Group,
    make_kv_cache_config,
    make_vllm_config,
    page_size,
)
from vllm.config import PoolerConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_ctx_offload.adapters import vllm_api
from vllm_ctx_offload.adapters.kv_groups import model_shape
from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.plan import GroupShape, ModelShape

PAGE_BYTES = page_size(32)
FULL: dict[str, Any] = {
    "block_size": 32,
    "num_kv_heads": 2,
    "head_size": 32,
    "dtype": torch.float32,
}


def make_config(**options: Any) -> Any:
    return make_vllm_config(kv_transfer=ours(cpu_bytes_to_use="1MiB"), **options)


class TestRefusals:
    """One sentence: what is wrong, and what to do instead."""

    @pytest.mark.parametrize("name", ["RSWASpec", "SinkFullAttentionSpec"])
    def test_attention_whose_tables_are_of_another_kind(self, name: str) -> None:
        kv_cache_config = make_kv_cache_config(8, 32)
        spec = type(name, (FullAttentionSpec,), {})(**FULL)
        kv_cache_config.kv_cache_groups = [KVCacheGroupSpec(["layer"], spec)]
        with pytest.raises(ConfigError, match=rf"1 KV cache group.*{name}"):
            vllm_api.check_environment(make_config(), kv_cache_config)

    def test_attention_that_looks_ahead(self) -> None:
        kv_cache_config = make_kv_cache_config(8, 32)
        spec = FullAttentionSpec(**FULL, non_causal=True)
        kv_cache_config.kv_cache_groups = [KVCacheGroupSpec(["layer"], spec)]
        with pytest.raises(ConfigError, match="caches no prefixes of this model"):
            vllm_api.check_environment(make_config(), kv_cache_config)

    @pytest.mark.parametrize("pooling", ["MEAN", "CLS"])
    def test_pooling_that_reads_the_whole_prompt(self, pooling: str) -> None:
        """After a hit vLLM would pool over the last tokens alone, or end the engine."""
        config = make_config()
        config.model_config = copy.copy(config.model_config)
        config.model_config.runner_type = "pooling"
        config.model_config.pooler_config = PoolerConfig(seq_pooling_type="LAST")
        vllm_api.check_environment(config, make_kv_cache_config(8, 32))
        config.model_config.pooler_config = PoolerConfig(seq_pooling_type=pooling)
        with pytest.raises(ConfigError, match="pooling reads all tokens of a prompt"):
            vllm_api.check_environment(config, make_kv_cache_config(8, 32))

    def test_groups_whose_blocks_lie_elsewhere(self) -> None:
        kv_cache_config = make_kv_cache_config(8, 32)
        kv_cache_config.kv_cache_groups[0].host_resident = True
        with pytest.raises(ConfigError, match="serve it without the connector"):
            vllm_api.check_environment(make_config(), kv_cache_config)

    @pytest.mark.parametrize("mode", ["none", "all"])
    def test_states_that_are_not_kept_where_blocks_end(self, mode: str) -> None:
        kv_cache_config = make_kv_cache_config(8, 32, (None, STATE))
        group = kv_cache_config.kv_cache_groups[1]
        group.kv_cache_spec = replace(group.kv_cache_spec, mamba_cache_mode=mode)
        with pytest.raises(
            ConfigError, match=rf"layers are kept in mode '{mode}'.*enable-prefix-c"
        ):
            vllm_api.check_environment(make_config(), kv_cache_config)

    def test_states_on_a_release_that_does_not_hand_them_over(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(vllm_api, "KVConnectorTransferResults", None)
        kv_cache_config = make_kv_cache_config(8, 32, (STATE,))
        with pytest.raises(ConfigError, match=r"1 KV cache group\(s\) of MambaSpec"):
            vllm_api.check_environment(make_config(), kv_cache_config)

    def test_groups_on_a_release_that_can_not_recompute_them(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(vllm_api, "KVConnectorTransferResults", None)
        kv_cache_config = make_kv_cache_config(8, 32)
        vllm_api.check_environment(make_config(), kv_cache_config)
        kv_cache_config.kv_cache_groups *= 2
        with pytest.raises(
            ConfigError, match=r"2 KV cache group\(s\) of Full.*, and vLLM"
        ):
            vllm_api.check_environment(make_config(), kv_cache_config)


class TestShape:
    def test_shape_is_what_vllm_settled_on(self) -> None:
        config = make_config(num_workers=2)
        assert model_shape(config, make_kv_cache_config(8, 32)) == ModelShape(
            groups=(GroupShape(32),),
            tokens_per_hash=32,
            bytes_per_block=PAGE_BYTES,
            num_device_blocks=8,
            num_workers=2,
            max_request_tokens=2048,
        )

    @pytest.mark.parametrize(
        ("block_stride", "expected"), [(0, 3 * PAGE_BYTES), (64, 64)]
    )
    def test_tensors_of_older_releases_are_added_up_or_packed(
        self, block_stride: int, expected: int
    ) -> None:
        """Before placements: one tensor a layer, or the stride of all together."""
        kv_cache_config = make_kv_cache_config(8, 32)
        tensors = [
            SimpleNamespace(size=8 * PAGE_BYTES, block_stride=block_stride)
            for _ in range(3)
        ]
        kv_cache_config.kv_cache_tensors = tensors  # type: ignore[assignment]
        shape = model_shape(make_config(), kv_cache_config)
        assert shape.bytes_per_block == expected

    def test_mla_and_wrapped_full_attention_are_one_group(self) -> None:
        full = FullAttentionSpec(
            block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32
        )
        wide = FullAttentionSpec(
            block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32
        )
        mla = MLAAttentionSpec(
            block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16
        )
        wrapped = UniformTypeKVCacheSpecs(
            block_size=16, kv_cache_specs={"a": full, "b": wide}
        )
        for spec in (mla, wrapped):
            kv_cache_config = make_kv_cache_config(8, 16)
            kv_cache_config.kv_cache_groups = [KVCacheGroupSpec(["a", "b"], spec)]
            config = make_config(block_size=32)
            vllm_api.check_environment(config, kv_cache_config)
            shape = model_shape(config, kv_cache_config)
            assert shape.groups == (GroupShape(16),)

    def test_of_several_block_sizes_the_divisor_is_hashed(self) -> None:
        groups = (Group(times=2), Group(70, times=3), STATE)
        kv_cache_config = make_kv_cache_config(8, 32, groups)
        config = make_config()
        vllm_api.check_environment(config, kv_cache_config)
        shape = model_shape(config, kv_cache_config)
        assert shape.groups == (
            GroupShape(64),
            GroupShape(96, window=70),
            GroupShape(32, recurrent=True),
        )
        assert shape.tokens_per_hash == 32
        config.cache_config.prefix_match_unit = 16
        assert model_shape(config, kv_cache_config).tokens_per_hash == 16

    def test_the_second_model_runner_zeroes_blocks_before_it_calls_us(self) -> None:
        for groups, writes in (((None,), False), ((None, STATE), True)):
            kv_cache_config = make_kv_cache_config(8, 32, groups)
            config = SimpleNamespace(**vars(make_config()), use_v2_model_runner=True)
            shape = model_shape(config, kv_cache_config)
            assert shape.writes_early == writes
            config.use_v2_model_runner = False
            assert not model_shape(config, kv_cache_config).writes_early
