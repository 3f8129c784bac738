"""What an engine is started with."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

__all__ = [
    "BLOCK",
    "CTX",
    "MLA_BLOCK",
    "EngineSpec",
    "engine_environment",
    "force_async_scheduling",
]

BLOCK: Final = 32  # tokens of a device block
MLA_BLOCK: Final = 16  # vLLM's MLA on the CPU takes no other
CTX: Final = {"kv_connector": "CtxOffloadConnector", "kv_role": "kv_both"}


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine is started with; equal specs can share one engine."""

    model: Path
    # A prime, so that no other dimension of a cache tensor can be taken for it.
    num_blocks: int = 41
    tokens_per_block: int = BLOCK
    # By itself vLLM makes bfloat16 of a float32 model.
    dtype: str = "float32"
    # vLLM turns it off on the CPU, though its scheduler and runner can do it there.
    async_scheduling: bool = False
    extra: str = "{}"  # kv_connector_extra_config as JSON, to be hashable
    transfer: str = json.dumps(CTX)  # kv_transfer_config as JSON; "" for none
    options: str = "{}"  # more arguments of vLLM's, as JSON

    @classmethod
    def make(
        cls,
        model: Path,
        *,
        num_blocks: int = 41,
        tokens_per_block: int = BLOCK,
        dtype: str = "float32",
        async_scheduling: bool = False,
        transfer: Mapping[str, Any] | None = CTX,
        options: Mapping[str, Any] | None = None,
        **extra: Any,
    ) -> EngineSpec:
        extra.setdefault("cpu_bytes_to_use", "32MiB")
        return cls(
            model,
            num_blocks,
            tokens_per_block,
            dtype,
            async_scheduling,
            json.dumps(extra),
            "" if transfer is None else json.dumps(transfer),
            json.dumps(options or {}),
        )

    def arguments(self) -> dict[str, Any]:
        arguments = {
            "model": str(self.model),
            "dtype": self.dtype,
            "skip_tokenizer_init": True,
            "max_model_len": min((self.num_blocks - 1) * self.tokens_per_block, 1024),
            "block_size": self.tokens_per_block,
            "num_gpu_blocks_override": self.num_blocks,
            "max_num_batched_tokens": 512,
            "max_num_seqs": 16,
            "gpu_memory_utilization": 0.3,
            "enforce_eager": True,
            "disable_log_stats": False,
            **json.loads(self.options),
        }
        if self.transfer:
            transfer = json.loads(self.transfer)
            transfer.setdefault("kv_connector_extra_config", json.loads(self.extra))
            arguments["kv_transfer_config"] = transfer
        return arguments


@contextlib.contextmanager
def force_async_scheduling() -> Iterator[None]:
    """Keeps vLLM's CPU platform from turning async scheduling off.

    It hides nothing: there users can't have it. On GPUs it is the default, and vLLM's
    scheduler and runner do it here as they do there.
    """
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_set(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    replacement = staticmethod(check_and_set)
    with mock.patch.object(CpuPlatform, "check_and_update_config", replacement):
        yield


@contextlib.contextmanager
def engine_environment(**more: str) -> Iterator[None]:
    """Sets what engines on the CPU need, and undoes what vLLM does to the process."""
    wanted = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **more,
    }
    saved = dict(os.environ)
    cores = os.sched_getaffinity(0)
    os.environ.update(wanted)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)
        # vLLM binds the model's thread to a core; what starts next must not inherit it.
        os.sched_setaffinity(0, cores)
