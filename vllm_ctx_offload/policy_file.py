"""The file that `policy_file` names: read once, and its keys checked."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Final

import yaml

from vllm_ctx_offload.errors import ConfigError

__all__ = ["POLICY_KEYS", "read_policy_file", "unknown_key"]

POLICY_KEYS: Final = (
    *("tenants", "tenant_from", "max_protected"),
    *("reset_with_device_cache", "load_wait_ms"),
)


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML, and so JSON; of a name that is declared twice YAML would take the last."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key.value, str)]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"the key '{name:.128}' occurs twice in one mapping")
        return super().construct_mapping(node, deep)


def read_policy_file(path: Path) -> dict[str, Any]:
    """Returns what the file says, by key; the values are as yet unchecked.

    Raises:
        ConfigError: it can't be read, or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
        policy = yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506 - a SafeLoader
    # ValueError: bytes that are no UTF-8, a path with a NUL, a date that is none.
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        why = str(error).replace("\n", " ")
        fix = "give the path of a YAML or JSON file that every vLLM process can read"
        if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark):
            why = f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
            fix = 'mend that line, or the one before; names such as "*" need quotes'
        raise ConfigError(
            f"policy_file '{path}' can't be read ({why}); {fix}."
        ) from None
    if not isinstance(policy, dict):
        raise ConfigError(
            f"policy_file '{path}' holds no mapping; start it with 'tenants:'."
        )
    for key in policy:
        if key not in POLICY_KEYS:
            raise ConfigError(unknown_key(str(path), str(key), POLICY_KEYS))
    return policy


def unknown_key(where: str, key: str, known: tuple[str, ...]) -> str:
    """Returns the sentence on a key that does not exist, with the nearest that does."""
    hint = f"remove it, or use {', '.join(known)}."
    if nearest := difflib.get_close_matches(key, known, n=1, cutoff=0.5):
        hint = f"did you mean '{nearest[0]}'?"
    return f"{where}: unknown key '{key}'; {hint}"
