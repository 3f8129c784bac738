"""How to start vLLM on this machine: which build it is and what suits it."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from pathlib import Path

# x86 and ARM flags of processors on which bfloat16 is not slower than float32.
FAST_BFLOAT16_FLAGS = frozenset({"avx512bw", "amx_bf16", "avx512_bf16", "bf16"})

# Harmless on CUDA. No usage reports and no model hub: nothing here needs a network.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def has_distribution(name: str) -> bool:
    """Returns whether a distribution called `name` is installed."""
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def is_cpu_build() -> bool:
    """Returns whether the vLLM that is installed is the build for CPUs."""
    return has_distribution("vllm-cpu") and not has_distribution("vllm")


def server_command(model: Path) -> list[str]:
    """Returns the command that serves `model`, to be followed by the options.

    The console script of the CPU build asks for the metadata of a distribution called
    ``vllm``, which that build is not, and dies; its server module works.
    """
    script = Path(sys.executable).parent / "vllm"
    found = str(script) if script.exists() else shutil.which("vllm")
    if found and has_distribution("vllm"):
        return [found, "serve", str(model)]
    module = "vllm.entrypoints.openai.api_server"
    return [sys.executable, "-m", module, "--model", str(model)]


def best_dtype() -> str:
    """Returns the data type to run a small bfloat16 model in.

    A processor without fast bfloat16 takes six times as long as in float32.
    """
    if is_cpu_build() and not processor_flags() & FAST_BFLOAT16_FLAGS:
        return "float32"
    return "bfloat16"


def processor_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Returns the features of the processor; none where the file does not exist."""
    try:
        text = cpuinfo.read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            return frozenset(value.split())
    return frozenset()
