"""How much memory this process may still use, and what says so."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Final, NamedTuple

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
DEFAULT_ENV: Final = "CTX_OFFLOAD_DEFAULT_BYTES"
# Names, parted by commas, of what vLLM copies to workers under Ray too.
RAY_COPIES_ENV: Final = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP_ROOT: Final = Path("/sys/fs/cgroup")
_PROC_CGROUP: Final = Path("/proc/self/cgroup")
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


class _Controller(NamedTuple):
    """The memory controller of one cgroup version."""

    folder: str  # of its hierarchy, below the mount point
    limit: str
    usage: str


_CONTROLLERS: Final = (
    _Controller("", "memory.max", "memory.current"),
    _Controller("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def _own_groups(proc_cgroup: Path, controller: _Controller) -> list[str]:
    """Returns the path of this process's group and of all that contain it.

    Each line of the file is "hierarchy:controllers:path"; version 2 has no controllers.
    """
    try:
        lines = proc_cgroup.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    paths = {""}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller.folder in controllers.split(","):
            parts = [part for part in path.split("/") if part not in ("", "..")]
            paths.update("/".join(parts[:n]) for n in range(1, len(parts) + 1))
    return sorted(paths)


def _group_limit(folder: Path, controller: _Controller) -> MemoryLimit | None:
    limit = _read_int(folder / controller.limit)
    usage = _read_int(folder / controller.usage)
    if limit is None or usage is None:
        return None
    used = max(usage - _reclaimable_bytes(folder / "memory.stat"), 0)
    return MemoryLimit(max(limit - used, 0), f"cgroup {controller.limit}")


def _machine_bytes() -> int:
    """What the kernel reckons to be available; all there is where it does not say."""
    with contextlib.suppress(OSError):
        text = _MEMINFO.read_text(encoding="ascii")
        if match := re.search(r"^MemAvailable: +(\d+) kB$", text, re.MULTILINE):
            return 1024 * int(match.group(1))
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_memory(
    cgroup_root: Path = _CGROUP_ROOT, proc_cgroup: Path = _PROC_CGROUP
) -> MemoryLimit:
    """Returns the tightest of the machine's available memory and the cgroups' rest.

    A container sees its own group at the root; a service sees the machine's root, and
    its own group and the ones around it below.
    """
    limits = [MemoryLimit(_machine_bytes(), "the machine's memory")]
    for controller in _CONTROLLERS:
        for group in _own_groups(proc_cgroup, controller):
            folder = cgroup_root / controller.folder / group
            if limit := _group_limit(folder, controller):
                limits.append(limit)
    return min(limits)


def publish_default_pool_bytes() -> None:
    """Fixes the default pool size for this process and the ones it starts, Ray's too.

    May be called any number of times; only the first call of a deployment counts.
    """
    if not os.environ.get(DEFAULT_ENV, "").isdecimal():
        size = int(available_memory().available_bytes * DEFAULT_SHARE)
        os.environ[DEFAULT_ENV] = str(size)
    names = os.environ.get(RAY_COPIES_ENV, "")
    if DEFAULT_ENV not in names.split(","):
        os.environ[RAY_COPIES_ENV] = f"{names},{DEFAULT_ENV}".lstrip(",")


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
