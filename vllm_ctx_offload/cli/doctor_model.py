"""Sizes of a model's KV cache, from its Hugging Face configuration alone."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.plan import GroupShape

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
_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"
_CHUNKED: Final = "chunked_attention"
# Keys of state-space and linear-attention layers. How large a state is, and so a block
# of the others, only the model's code knows.
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
# Sizes that hold for some layers only.
_SPECIAL_PREFIXES: Final = ("global_head", "num_global", "swa_")
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
    layer_bytes_per_token: int
    # A block holds the tokens of one group; the last group of a kind may be padded.
    layers_per_group: int
    groups: tuple[GroupShape, ...]  # as of blocks of one token

    @property
    def group_bytes_per_token(self) -> int:
        return self.layers_per_group * self.layer_bytes_per_token

    @property
    def bytes_per_token(self) -> int:
        """Of one token in all groups, on one worker."""
        return len(self.groups) * self.group_bytes_per_token


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
    text = _completed(model)
    _refuse_special(text)
    num_layers = _needed(text, _LAYERS)
    layers_per_group, groups = _groups(text, num_layers, options.hybrid_manager)
    kind, channels = _channels(text, options.tensor_parallel_size)
    layer_bytes = channels * _element_bytes(text, options)
    return KvShape(kind, num_layers, layer_bytes, layers_per_group, groups)


def _channels(text: Mapping[str, Any], num_workers: int) -> tuple[str, int]:
    """Returns (kind of attention, numbers that a layer keeps of a token)."""
    if text.get("kv_lora_rank") is not None:
        rank = _needed(text, ("kv_lora_rank",))
        return "MLA", rank + _needed(text, ("qk_rope_head_dim",))
    heads = _needed(text, _HEADS)
    # Where there are fewer heads than workers, each worker has one.
    kv_heads = max((_number(text, _KV_HEADS) or heads) // num_workers, 1)
    head_dim = _number(text, ("head_dim", "hidden_size_per_head"))
    head_dim = head_dim or _needed(text, _WIDTH) // heads
    if text.get("v_head_dim") not in (None, head_dim):
        raise _unknown("'v_head_dim'")
    return "attention", 2 * kv_heads * head_dim


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


def _completed(model: Mapping[str, Any]) -> dict[str, Any]:
    """Adds what the file leaves out and the model's class in transformers knows."""
    text = dict(model)
    has_sizes = _number(text, _LAYERS) is not None and _number(text, _HEADS) is not None
    if has_sizes and (text.get("layer_types") or not _is_local(text)):
        return text
    try:
        transformers: Any = importlib.import_module("transformers")
        config_class = transformers.CONFIG_MAPPING[text.get("model_type")]
        defaults = config_class.from_dict(text).to_dict()
    except Exception:  # noqa: BLE001 - not installed, or a file its class can't take
        return text
    return {**defaults, **text}


def _is_local(text: Mapping[str, Any]) -> bool:
    """Tells whether some layers look back only so far."""
    slides = text.get("sliding_window") and text.get("use_sliding_window", True)
    return bool(slides or text.get("attention_chunk_size"))


def _refuse_special(text: Mapping[str, Any]) -> None:
    for key, value in text.items():
        if value and (key in _SPECIAL_KEYS or key.startswith(_SPECIAL_PREFIXES)):
            raise _unknown(f"'{key}'")
    if text.get("model_type") in _SPECIAL_MODELS:
        raise _unknown(f"'model_type' = '{text['model_type']}'")


def _groups(
    text: Mapping[str, Any], num_layers: int, hybrid_manager: bool
) -> tuple[int, tuple[GroupShape, ...]]:
    """Returns (layers in a group, the groups), as vLLM makes them.

    Layers of a kind are cut into groups of as many layers as the rarest kind has. Where
    the kinds are about as frequent, it is the most frequent one, and others are padded
    (`_get_kv_cache_groups_uniform_page_size` in vLLM 0.32).
    """
    layers = _layer_kinds(text, num_layers)
    refused = sorted(layers.keys() - {_FULL, _SLIDING, _CHUNKED})
    if refused:
        raise ConfigError(
            f"CtxOffloadConnector: this model has layers of {', '.join(refused)}, but "
            "only full, sliding-window and chunked-local attention, MLA and recurrent "
            "layers are supported yet; serve it without the connector."
        )
    if len(layers) > 1 and not hybrid_manager:
        return num_layers, (GroupShape(1),)  # then vLLM keeps the KV of all in full
    fewest, most = min(layers.values()), max(layers.values())
    size = most if most < 1.5 * fewest else fewest
    groups = []
    for kind, count in layers.items():
        groups += [_group(kind, text)] * -(-count // size)
    return size, tuple(groups)


def _layer_kinds(text: Mapping[str, Any], num_layers: int) -> Counter[str]:
    """Returns how many layers are of which kind, in the order of the layers."""
    if text.get("is_encoder_decoder"):
        return Counter({"cross-attention": num_layers})
    if any(key in _RECURRENT_KEYS or key.startswith(_RECURRENT) for key in text):
        raise _unknown("recurrent layers")
    types = text.get("layer_types")
    if isinstance(types, list) and types:
        return Counter(_FULL if kind == "attention" else str(kind) for kind in types)
    if text.get("attention_chunk_size"):
        raise _unknown("'attention_chunk_size' but no 'layer_types'")
    return Counter({_SLIDING if _is_local(text) else _FULL: num_layers})


def _group(kind: str, text: Mapping[str, Any]) -> GroupShape:
    if kind == _SLIDING:
        return GroupShape(1, window=_needed(text, ("sliding_window",)))
    if kind == _CHUNKED:
        return GroupShape(1, stretch=_needed(text, ("attention_chunk_size",)))
    return GroupShape(1)


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
