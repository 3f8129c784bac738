"""Tiny models with random weights that are not blind.

Weights drawn with a spread of 0.12 make every output depend on every KV block; the
dummy weights that vLLM can draw itself are so flat that a wrong block changes nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    FalconH1Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    LlamaConfig,
    PreTrainedConfig,
)

__all__ = [
    "GEMMA_WINDOW",
    "VOCAB_SIZE",
    "make_draft_model",
    "make_eagle",
    "make_falcon_h1",
    "make_gemma3",
    "make_gemma4",
    "make_llama",
    "make_mla",
]

VOCAB_SIZE: Final = 512
GEMMA_WINDOW: Final = 128
_SPREAD: Final = 0.12
_GEMMA: Final[dict[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "sliding_window": GEMMA_WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "initializer_range": _SPREAD,
}
_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "<{{ message['role'] }}>{{ message['content'] }}"
    "{% endfor %}<assistant>"
)


def make_llama(folder: Path) -> Path:
    """Writes a Llama in float32 with a tokenizer and a chat template."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=_SPREAD,
        tie_word_embeddings=False,
    )
    _write(folder, config, torch.float32)
    _write_tokenizer(folder)
    return folder


def make_draft_model(llama: Path, folder: Path) -> Path:
    """Writes a drafter for `make_llama`'s model: the same with noise on its weights."""
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * _SPREAD / 20)
    model.save_pretrained(folder)
    return folder


def make_eagle(llama: Path, folder: Path) -> Path:
    """Writes an EAGLE head for `make_llama`'s model, which drafts at random."""
    config = LlamaConfig.from_pretrained(llama)
    config.num_hidden_layers = 1
    torch.manual_seed(2)
    layers = AutoModelForCausalLM.from_config(config, dtype=torch.float32).state_dict()
    # Its first layer has no norm of its own; embeddings and head are the model's.
    weights = {
        name.removeprefix("model."): weight.contiguous()
        for name, weight in layers.items()
        if name.startswith("model.layers.") and "input_layernorm" not in name
    }
    size = config.hidden_size
    weights["fc.weight"] = torch.randn(size, 2 * size) * _SPREAD
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config.save_pretrained(folder)
    return folder


def make_gemma3(folder: Path) -> Path:
    """Writes a Gemma 3 in float32: two groups that slide, one that looks at all."""
    config = Gemma3TextConfig(
        **_GEMMA,
        query_pre_attn_scalar=32,
    )
    _write(folder, config, torch.float32)
    return folder


def make_gemma4(folder: Path) -> Path:
    """Writes a Gemma 4 in float32, whose sliding layers have half the head size.

    So vLLM puts twice as many tokens in their blocks.
    """
    config = Gemma4TextConfig(
        **_GEMMA,
        global_head_dim=64,
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size_per_layer_input=0,
    )
    _write(folder, config, torch.float32)
    return folder


def make_falcon_h1(folder: Path) -> Path:
    """Writes the configuration of a Falcon-H1: attention and Mamba in every layer."""
    config = FalconH1Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        mamba_d_ssm=128,
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_expand=1,
        mamba_chunk_size=64,
    )
    config.architectures = ["FalconH1ForCausalLM"]
    config.save_pretrained(folder)
    return folder


def make_mla(folder: Path) -> Path:
    """Writes a DeepSeek-V2, whose attention is MLA, in the bfloat16 it needs."""
    config = DeepseekV2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        max_position_embeddings=4096,
        initializer_range=_SPREAD,
        tie_word_embeddings=False,
    )
    _write(folder, config, torch.bfloat16)
    return folder


def _write(folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)


def _write_tokenizer(folder: Path) -> None:
    """One token a byte: token ids below 256 are the bytes of the text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "<|end|>"]
    tokenizer = Tokenizer(
        models.BPE({token: index for index, token in enumerate(tokens)}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|end|>",
                "model_max_length": 4096,
                "chat_template": _CHAT_TEMPLATE,
            }
        )
    )
