"""How much memory this process may still use, and what says so."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final, NamedTuple

import psutil

__all__ = [
    "MemoryLimit",
    "available_memory",
    "default_pool_bytes",
    "format_bytes",
    "publish_default_pool_bytes",
]

# The share of the available memory that the pool takes when nothing is configured.
DEFAULT_SHARE: Final = 0.25
# Scheduler and workers are different processes and have to arrive at the same pool
# size. The first process of a deployment publishes the default to its children.
DEFAULT_ENV: Final = "VLLM_CTX_OFFLOAD_DEFAULT_BYTES"
_CGROUP_ROOT: Final = Path("/sys/fs/cgroup")
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


class MemoryLimit(NamedTuple):
    """Memory still to be had, in bytes, and the name of the limit that binds."""

    available_bytes: int
    source: str


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max": no limit


def _reclaimable_bytes(stat_path: Path) -> int:
    """Page cache that the kernel gives back before it refuses memory."""
    try:
        text = stat_path.read_text(encoding="ascii")
    except OSError:
        return 0
    # Version 1 lists a group's own pages too, but its usage has those of its children.
    for name in ("total_inactive_file", "inactive_file"):
        if match := re.search(rf"^{name} (\d+)$", text, re.MULTILINE):
            return int(match.group(1))
    return 0


def _cgroup_limit(root: Path) -> MemoryLimit | None:
    # Inside a container the process's own group is mounted at the root, in version 2
    # directly, in version 1 below the controller's name.
    for folder, limit_name, usage_name in (
        (root, "memory.max", "memory.current"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit = _read_int(folder / limit_name)
        usage = _read_int(folder / usage_name)
        if limit is None or usage is None:
            continue
        used = max(usage - _reclaimable_bytes(folder / "memory.stat"), 0)
        return MemoryLimit(max(limit - used, 0), f"cgroup {limit_name}")
    return None


def available_memory(cgroup_root: Path = _CGROUP_ROOT) -> MemoryLimit:
    """Returns the tighter of the machine's available memory and the cgroup's rest."""
    machine = MemoryLimit(psutil.virtual_memory().available, "the machine's memory")
    cgroup = _cgroup_limit(cgroup_root)
    return min(machine, cgroup) if cgroup else machine


def publish_default_pool_bytes() -> None:
    """Fixes the default pool size for this process and the ones it starts.

    May be called any number of times; only the first call of a deployment counts.
    """
    if not os.environ.get(DEFAULT_ENV, "").isdecimal():
        size = int(available_memory().available_bytes * DEFAULT_SHARE)
        os.environ[DEFAULT_ENV] = str(size)


def default_pool_bytes() -> int:
    """Returns the pool size, in bytes, for a configuration that names none."""
    publish_default_pool_bytes()
    return int(os.environ[DEFAULT_ENV])


def format_bytes(num_bytes: int) -> str:
    """Returns `num_bytes` as short text, such as "1.50 GiB"."""
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    if power == 0:
        return f"{num_bytes} B"
    return f"{num_bytes / 1024**power:.2f} {_UNITS[power]}"
