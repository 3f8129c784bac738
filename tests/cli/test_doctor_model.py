"""Sizes of the KV cache as the doctor reads them off a model's configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_ctx_offload.cli.doctor_model import (
    KvOptions,
    UnknownShapeError,
    kv_shape,
    read_model,
)
from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.plan import GroupShape

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
MLA = {
    "model_type": "deepseek_v2",
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def bytes_per_token(model: dict[str, Any], **options: Any) -> int:
    return kv_shape(model, KvOptions(**options)).bytes_per_token


def test_full_attention_has_keys_and_values_of_every_head() -> None:
    assert bytes_per_token(LLAMA) == 4 * 2 * 2 * 64 * 2


def test_mla_has_one_latent_vector() -> None:
    assert kv_shape(MLA, KvOptions()).kind == "MLA"
    assert bytes_per_token(MLA) == 3 * (512 + 64) * 2


@pytest.mark.parametrize(("size", "heads"), [(1, 2), (2, 1), (4, 1)])
def test_workers_share_heads_until_each_has_one(size: int, heads: int) -> None:
    expected = 4 * 2 * heads * 64 * 2
    assert bytes_per_token(LLAMA, tensor_parallel_size=size) == expected


def test_every_worker_has_the_whole_latent_vector() -> None:
    assert bytes_per_token(MLA, tensor_parallel_size=8) == bytes_per_token(MLA)


@pytest.mark.parametrize(
    ("options", "quantized", "element_bytes"),
    [
        ({}, {}, 2),
        ({"dtype": "float32"}, {}, 4),
        ({"dtype": "half"}, {}, 2),
        ({"dtype": "float32", "kv_cache_dtype": "fp8"}, {}, 1),
        ({}, {"kv_cache_quant_algo": "FP8"}, 1),
        ({}, {"quantization": {"kv_cache_quant_algo": "FP8"}}, 1),
        ({}, {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, 1),
        ({"kv_cache_dtype": "bfloat16"}, {"kv_cache_quant_algo": "FP8"}, 2),
    ],
)
def test_elements_have_the_size_of_their_type(
    options: dict[str, str], quantized: dict[str, Any], element_bytes: int
) -> None:
    model = {**LLAMA, "quantization_config": quantized}
    assert bytes_per_token(model, **options) == 4 * 2 * 2 * 64 * element_bytes


def test_the_head_size_is_the_width_over_the_heads_where_it_is_not_said() -> None:
    model = {**LLAMA, "head_dim": None, "hidden_size": 256}
    assert bytes_per_token(model) == 4 * 2 * 2 * 32 * 2


def test_without_a_number_of_kv_heads_every_head_has_its_own() -> None:
    model = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    assert bytes_per_token(model) == 4 * 2 * 8 * 64 * 2


def test_what_the_file_leaves_out_comes_from_the_models_class() -> None:
    pytest.importorskip("transformers")
    model = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 4096}
    assert bytes_per_token(model) == 2 * 2 * 32 * 128 * 2


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({"is_encoder_decoder": True}, "cross-attention"),
        ({"layer_types": ["full_attention", "conv"]}, "conv"),
    ],
)
def test_models_that_the_engine_refuses_are_refused(
    more: dict[str, Any], kind: str
) -> None:
    with pytest.raises(ConfigError, match=f"layers of {kind}, but only full, sliding"):
        kv_shape({**LLAMA, **more}, KvOptions())


WINDOW = GroupShape(1, window=512)
STRETCH = GroupShape(1, stretch=8192)
FULL = GroupShape(1)


@pytest.mark.parametrize(
    ("layer_types", "layers_per_group", "groups"),
    [
        ("ffff", 4, (FULL,)),
        ("ssss", 4, (WINDOW,)),
        ("sfsf", 2, (WINDOW, FULL)),
        ("fsss", 1, (FULL, WINDOW, WINDOW, WINDOW)),
        ("sssfsssf", 2, (WINDOW, WINDOW, WINDOW, FULL)),
        ("sssfsssfs", 2, (WINDOW, WINDOW, WINDOW, WINDOW, FULL)),  # one padded
        ("ffssfsfsf", 5, (FULL, WINDOW)),  # padded to the larger
        ("cccf", 1, (STRETCH, STRETCH, STRETCH, FULL)),
    ],
)
def test_layers_are_in_groups_of_one_kind_and_size(
    layer_types: str, layers_per_group: int, groups: tuple[GroupShape, ...]
) -> None:
    names = {"f": "full_attention", "s": "sliding_attention", "c": "chunked_attention"}
    model = {
        **LLAMA,
        "num_hidden_layers": len(layer_types),
        "sliding_window": 512,
        "attention_chunk_size": 8192,
        "layer_types": [names[letter] for letter in layer_types],
    }
    shape = kv_shape(model, KvOptions())
    assert (shape.layers_per_group, shape.groups) == (layers_per_group, groups)
    per_layer = 2 * 2 * 64 * 2
    assert shape.group_bytes_per_token == layers_per_group * per_layer
    assert shape.bytes_per_token == len(groups) * layers_per_group * per_layer


def test_a_window_without_kinds_is_that_of_all_layers_or_as_the_class_says() -> None:
    pytest.importorskip("transformers")
    mistral = {**LLAMA, "model_type": "mistral", "sliding_window": 4096}
    assert kv_shape(mistral, KvOptions()).groups == (GroupShape(1, window=4096),)
    gemma2 = {**LLAMA, "model_type": "gemma2", "sliding_window": 4096}
    kinds = set(kv_shape(gemma2, KvOptions()).groups)
    assert kinds == {GroupShape(1, window=4096), FULL}


@pytest.mark.parametrize(
    "more",
    [
        {"sliding_window": 4096, "use_sliding_window": False},
        {"sliding_window": None},
        {"sliding_window": 0},
        {"layer_types": ["full_attention"] * 4},
    ],
)
def test_a_window_that_is_not_used_is_none(more: dict[str, Any]) -> None:
    assert bytes_per_token({**LLAMA, **more}) == bytes_per_token(LLAMA)


def test_without_the_hybrid_manager_windows_keep_all_their_kv() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    mixed = {**LLAMA, "layer_types": kinds, "sliding_window": 512}
    shape = kv_shape(mixed, KvOptions(hybrid_manager=False))
    assert (shape.layers_per_group, shape.groups) == (4, (FULL,))
    only = {**mixed, "layer_types": ["sliding_attention"] * 4}
    shape = kv_shape(only, KvOptions(hybrid_manager=False))
    assert shape.groups == (WINDOW,)


@pytest.mark.parametrize(
    ("model", "what"),
    [
        ({**LLAMA, "block_configs": [{}]}, "'block_configs'"),
        ({**LLAMA, "mamba_d_state": 16}, "recurrent layers"),
        ({**LLAMA, "linear_num_key_heads": 16}, "recurrent layers"),
        ({**MLA, "index_topk": 2048}, "'index_topk'"),
        ({**LLAMA, "v_head_dim": 32}, "'v_head_dim'"),
        ({**LLAMA, "swa_head_dim": 32}, "'swa_head_dim'"),
        ({**LLAMA, "attention_chunk_size": 8}, "'attention_chunk_size' but no"),
        ({**LLAMA, "layer_types": ["sliding_attention"]}, "usable 'sliding_window'"),
        ({**LLAMA, "model_type": "minicpm3"}, "'model_type' = 'minicpm3'"),
        ({"num_attention_heads": 8}, "no usable 'num_hidden_layers'"),
        ({**LLAMA, "num_attention_heads": "8"}, "no usable"),
        (
            {**LLAMA, "quantization_config": {"kv_cache_quant_algo": "NVFP4"}},
            "KV cache of 'nvfp4'",
        ),
    ],
)
def test_what_can_not_be_told_is_said(model: dict[str, Any], what: str) -> None:
    with pytest.raises(UnknownShapeError, match=what) as raised:
        kv_shape(model, KvOptions())
    assert "vLLM's log at the start" in str(raised.value)


def test_a_folder_and_its_file_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": LLAMA}))
    read = read_model(tmp_path)
    assert read == read_model(tmp_path / "config.json")
    assert bytes_per_token(read) == bytes_per_token(LLAMA)


@pytest.mark.parametrize("text", ["{", "[]", None])
def test_no_configuration_is_said(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"--model: .*config\.json"):
        read_model(tmp_path)
