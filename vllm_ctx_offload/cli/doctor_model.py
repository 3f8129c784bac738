"""Sizes of a model's KV cache, from its Hugging Face configuration alone."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from vllm_ctx_offload.errors import ConfigError

__all__ = ["KvOptions", "KvShape", "UnknownShapeError", "kv_shape", "read_model"]

# Names that models give these figures, as vLLM reads them.
_LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS: Final = (
    "n_head_kv",
    "num_kv_heads",
    "num_key_value_heads",
    "multi_query_group_num",
    "num_attention_groups",
)
_WIDTH: Final = ("hidden_size", "n_embd", "d_model")
_TEXT: Final = ("text_config", "llm_config", "language_config")
_FULL: Final = {"full_attention", "attention"}
_LOCAL: Final = {"sliding_attention", "chunked_attention"}
# Keys of state-space and linear-attention layers, whose caches are no blocks of tokens.
_RECURRENT: Final = ("mamba_", "ssm_", "linear_num_", "linear_attn", "rwkv")
_RECURRENT_KEYS: Final = ("hybrid_override_pattern", "layers_block_type", "state_size")
# Keys that make the caches of layers differ in ways that only vLLM's model code knows.
_SPECIAL_KEYS: Final = (
    "attn_config",
    "block_configs",
    "compress_ratios",
    "cross_attention_layers",
    "index_topk",
    "multi_query",
    "num_kv_shared_layers",
    "per_layer_config",
)
_SPECIAL_MODELS: Final = ("minicpm3",)
_ELEMENT_BYTES: Final = {
    **dict.fromkeys(("float32", "float"), 4),
    **dict.fromkeys(("float16", "half", "bfloat16"), 2),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc"), 1),
}


class UnknownShapeError(Exception):
    """The sizes can't be told from the file; the text says why and what to do."""


class KvOptions(NamedTuple):
    """What of vLLM's command line decides the sizes."""

    tensor_parallel_size: int = 1
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    hybrid_manager: bool = True  # False: --disable-hybrid-kv-cache-manager


class KvShape(NamedTuple):
    """The KV cache of one worker."""

    kind: str
    num_layers: int
    bytes_per_token: int  # all layers, on one worker


def read_model(path: Path) -> dict[str, Any]:
    """Returns the configuration of the text model in a folder or a `config.json`.

    Raises:
        ConfigError: there is none.
    """
    if path.is_dir():
        path /= "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"--model: {path} can't be read ({error}); give a local folder with a "
            "config.json of Hugging Face, or that file."
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(
            f"--model: {path} holds no JSON object; give a config.json of Hugging Face."
        )
    # Models of several media have one for text inside, with the rest around it.
    inner = [config[key] for key in _TEXT if isinstance(config.get(key), dict)]
    return {**config, **inner[0]} if inner else config


def kv_shape(model: Mapping[str, Any], options: KvOptions) -> KvShape:
    """Returns the sizes that vLLM will arrive at.

    Raises:
        ConfigError: the connector refuses such a model.
        UnknownShapeError: the sizes can't be told from the configuration.
    """
    text = dict(model)
    if _number(text, _LAYERS) is None or _number(text, _HEADS) is None:
        text = _with_class_defaults(text)
    _refuse_special(text)
    _refuse_groups(text, options.hybrid_manager)
    num_layers = _needed(text, _LAYERS)
    element_bytes = _element_bytes(text, options)
    if text.get("kv_lora_rank") is not None:
        channels = _needed(text, ("kv_lora_rank",))
        channels += _needed(text, ("qk_rope_head_dim",))
        return KvShape("MLA", num_layers, num_layers * channels * element_bytes)
    heads = _needed(text, _HEADS)
    # Where there are fewer heads than workers, each worker has one.
    kv_heads = (_number(text, _KV_HEADS) or heads) // options.tensor_parallel_size
    head_dim = _number(text, ("head_dim", "hidden_size_per_head"))
    head_dim = head_dim or _needed(text, _WIDTH) // heads
    if text.get("v_head_dim") not in (None, head_dim):
        raise _unknown("'v_head_dim'")
    channels = 2 * max(kv_heads, 1) * head_dim
    return KvShape("full attention", num_layers, num_layers * channels * element_bytes)


def _number(text: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = text.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _needed(text: Mapping[str, Any], names: tuple[str, ...]) -> int:
    value = _number(text, names)
    if value is None:
        raise UnknownShapeError(
            f"the model's configuration has no usable '{names[0]}', so the size of its "
            "KV cache can't be told; read it off vLLM's log at the start."
        )
    return value


def _unknown(what: str) -> UnknownShapeError:
    return UnknownShapeError(
        f"the model's configuration has {what}, so only vLLM itself knows the size of "
        "its KV cache; read the plan off vLLM's log at the start."
    )


def _with_class_defaults(text: dict[str, Any]) -> dict[str, Any]:
    """Adds what the file leaves out and the model's class in transformers knows."""
    try:
        transformers: Any = importlib.import_module("transformers")
        config_class = transformers.CONFIG_MAPPING[text.get("model_type")]
        defaults = config_class.from_dict(text).to_dict()
    except Exception:  # noqa: BLE001 - not installed, or a file its class can't take
        return text
    return {**defaults, **text}


def _refuse_special(text: Mapping[str, Any]) -> None:
    for key in _SPECIAL_KEYS:
        if text.get(key):
            raise _unknown(f"'{key}'")
    if text.get("model_type") in _SPECIAL_MODELS:
        raise _unknown(f"'model_type' = '{text['model_type']}'")


def _refuse_groups(text: Mapping[str, Any], hybrid_manager: bool) -> None:
    """Refuses what `check_environment` will: all but one group of full attention."""
    kinds = _layer_kinds(text)
    if kinds <= _FULL:
        return
    local = kinds <= _FULL | _LOCAL
    if local and kinds & _FULL and not hybrid_manager:
        return  # then vLLM keeps the KV of all layers in full
    fix = "serve without the connector."
    if local and kinds & _FULL:
        fix = "try --disable-hybrid-kv-cache-manager, or " + fix
    raise ConfigError(
        f"CtxOffloadConnector: this model has layers of {', '.join(sorted(kinds))}, "
        f"but only one group of full attention or MLA is supported yet; {fix}"
    )


def _layer_kinds(text: Mapping[str, Any]) -> set[str]:
    kinds = set()
    if text.get("is_encoder_decoder"):
        kinds.add("cross_attention")
    if any(key in _RECURRENT_KEYS or key.startswith(_RECURRENT) for key in text):
        kinds.add("recurrent state")
    types = text.get("layer_types")
    if isinstance(types, list) and types:
        return kinds | {str(kind) for kind in types}
    if text.get("sliding_window") and text.get("use_sliding_window", True):
        return kinds | {"sliding_attention"}
    if text.get("attention_chunk_size"):
        return kinds | {"chunked_attention", "full_attention"}
    return kinds | {"full_attention"}


def _element_bytes(text: Mapping[str, Any], options: KvOptions) -> int:
    name = options.kv_cache_dtype
    if name == "auto" and (scheme := _quantized_cache(text)):
        name = scheme
    if name == "auto":
        # By itself vLLM computes in 16 bits, also where the weights are in float32.
        name = "bfloat16" if options.dtype == "auto" else options.dtype
    if name not in _ELEMENT_BYTES:
        raise UnknownShapeError(
            f"the doctor does not know the layout of a KV cache of '{name}'; read the "
            f"plan off vLLM's log at the start, or give one of "
            f"{', '.join(_ELEMENT_BYTES)}."
        )
    return _ELEMENT_BYTES[name]


def _quantized_cache(text: Mapping[str, Any]) -> str | None:
    """Returns the type that a quantized checkpoint asks for, if it does."""
    quantization = text.get("quantization_config")
    if not isinstance(quantization, dict):
        return None
    for where in (quantization.get("quantization"), quantization):
        if isinstance(where, dict):
            for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
                if scheme := where.get(key):
                    return _scheme_name(scheme)
    return None


def _scheme_name(scheme: object) -> str:
    if isinstance(scheme, dict):
        is_fp8 = (scheme.get("num_bits"), scheme.get("type")) == (8, "float")
        return "fp8" if is_fp8 else f"{scheme.get('num_bits')} bits"
    return str(scheme).lower()
