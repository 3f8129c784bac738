"""Writes docs/reference.md: every setting and request field, as the code has them.

With `--check` it only tells whether the page is up to date. Names, types, bounds and
defaults come from the code; what a field means is said here, and a field without a
meaning is an error.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
import sys
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from vllm_ctx_offload import context
from vllm_ctx_offload.config import (
    Bytes,
    OffloadConfig,
    Share,
    Size,
    SizeOrShare,
    TenantConfig,
)
from vllm_ctx_offload.context import (
    _CAPS,
    _FIELDS,
    MAX_DIRECTIVES,
    MAX_NAME_LENGTH,
    Hints,
)
from vllm_ctx_offload.memory import DEFAULT_ENV, RAY_COPIES_ENV
from vllm_ctx_offload.policy_file import POLICY_KEYS

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "reference.md"

_CONFIG: Final = {
    "cpu_bytes_to_use": "host memory of the whole engine, all its workers together",
    "block_size": "size of a chunk in tokens, a multiple of the device's block (of "
    "the largest, where groups of layers have several); or give `blocks_per_chunk`, "
    "not both",
    "blocks_per_chunk": "size of a chunk in device blocks",
    "offload_prompt_only": "`false` also stores blocks that decoding fills",
    "store_threshold": "from 2 on, a chunk is stored once that many requests offered "
    "it (reuse filter)",
    "max_tracker_size": "keys that the reuse filter remembers, at 200 bytes each; with "
    "fewer than the pool has chunks, a tenant may not come to fill its reservation",
    "eviction_policy": '`"lru"` ignores accounts and retention hints; namespaces and '
    "switches stay",
    "tenants": "name (1 to 128 printable characters) → account, see below; "
    '`"*"` sets what undeclared tenants get',
    "policy_file": "YAML or JSON file with some of the keys below; each wins over its "
    "inline value. Every vLLM process reads it once, at the start",
    "tenant_from": "where the tenant's name comes from; sources are asked in order",
    "max_protected": "most of the pool that priorities above 35 may protect, over all "
    'tenants; `"0%"`, or at least a chunk',
    "reset_with_device_cache": "`true` forgets the host's chunks too when vLLM resets "
    "its prefix cache, whatever for; see [new weights](troubleshooting.md#new-weights)",
    "load_wait_ms": "longest wait for a chunk that is just being stored, before it is "
    "recomputed",
}
_TENANT: Final = {
    "reserved": "what no other tenant can take; `0`, or at least a chunk; together "
    "they have to fit the pool",
    "limit": "the most it may hold; at least a chunk, unless `store` is `false`",
    "weight": "its part of what nobody reserved, against the others'",
    "max_priority": "highest priority it may ask for; below 35 also its default",
    "max_ttl_s": "longest time it may ask for, in seconds; raised priorities that give "
    "none get this one",
    "isolation": '`"private"`: only its own chunks can hit; `"shared"`: the common '
    "namespace",
    "store": "`false`: never store, whatever its requests say",
    "load": "`false`: never read, whatever its requests say",
}
# Where the default is None: what that comes to.
_NONE: Final = {
    "cpu_bytes_to_use": "25 % of the memory available",
    "block_size": "1 block",
    "blocks_per_chunk": "1",
    "policy_file": "none",
    "limit": "the whole pool",
    "session": "vLLM's `session_id`",
    "ttl_s": "the tenant's `max_ttl_s` if raised above 35, else for good",
    "decode_priority": "as `priority`",
}
_HINTS: Final = {
    "session": "whose estimate and release hold for the chunks",
    "priority": "higher is kept longer; fractions are cut. vLLM's scheduling "
    "`priority` is never read",
    "ttl_s": "how long the priorities hold",
    "retention_directives": "priorities of token ranges, see below; replace `priority` "
    "there",
    "decode_priority": "priority of chunks past the prompt",
    "expected_reuse_s": "estimate of when the session comes back; orders chunks of "
    "equal priority",
    "store": "`false`: store nothing of this request",
    "load": "`false`: read no offloaded KV for it",
    "release": "when the request ends, what only its session used goes first",
    "receipt": "the response's `kv_transfer_params` say what happened",
    "max_load_tokens": "most tokens to load, rounded down to chunks",
    "max_offload_tokens": "most tokens to store, rounded down to chunks",
}
# The parsers of `context` in words.
_PARSED: Final = {
    "_name": f"text of 1 to {MAX_NAME_LENGTH} characters",
    "_flag": "`true` or `false`",
    "_priority": "number, 0 to 100",
    "_seconds": "number ≥ 0",
    "_positive_seconds": "number > 0",
    "_count": "whole number ≥ 0",
}
_REASONS: Final = {
    "type": "the value has another type",
    "length": f"a name is empty or longer than {MAX_NAME_LENGTH} characters",
    "not_a_number": "a number is NaN",
    "negative": "a number is below 0",
    "not_positive": "a time is 0",
    "empty_range": "a directive's `end` is not past its `start`",
    "too_many": f"more than {MAX_DIRECTIVES} directives; the rest is ignored",
    "clamped": "above what the tenant may ask for, or out of range; the nearest "
    "allowed value holds",
    "unknown_field": "`ctx` has a field of another name (field `unknown`), or a "
    "directive has (field `retention_directives`); the rest of it holds",
}


# ---- types, bounds and defaults


def _type(annotation: Any, field: FieldInfo) -> str:
    """Returns what may be written there, in words."""
    if typing.get_origin(annotation) in (typing.Union, UnionType):
        annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
    words = {Bytes: "size", Share: "share", SizeOrShare: "size or share"}
    for known, word in words.items():
        if annotation == known:
            return word
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(f'`"{value}"`' for value in typing.get_args(annotation))
    if typing.get_origin(annotation) is tuple:
        (item, _) = typing.get_args(annotation)
        return "list of " + ", ".join(f'`"{v}"`' for v in typing.get_args(item))
    if typing.get_origin(annotation) is dict:
        return "mapping"
    plain = {bool: "`true` or `false`", str: "text"}
    if annotation in plain:
        return plain[annotation]
    number = {int: "whole number", float: "number"}[annotation]
    return f"{number}{_bounds(field)}"


def _bounds(field: FieldInfo) -> str:
    signs = {"gt": ">", "ge": "≥", "le": "≤"}
    found = [
        f"{sign} {_plain(getattr(bound, name))}"
        for bound in field.metadata
        for name, sign in signs.items()
        if hasattr(bound, name)
    ]
    return " " + " and ".join(found) if found else ""


def _plain(value: float) -> str:
    return f"{value:.9f}".rstrip("0").rstrip(".")


def _default(name: str, value: object) -> str:
    if value is None:
        return _NONE.get(name, "none")
    if isinstance(value, Size):
        is_share = value.share is not None
        return f'`"{value.share:.0%}"`' if is_share else f"`{value.num_bytes}`"
    if isinstance(value, float):
        return f"`{_plain(value)}`"
    return f"`{json.dumps(value)}`"


# ---- tables


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _model_rows(
    model: type[BaseModel], meanings: Mapping[str, str]
) -> Iterator[tuple[str, ...]]:
    annotations = typing.get_type_hints(model, include_extras=True)
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        kind = _type(annotations[name], field)
        yield f"`{name}`", kind, _default(name, default), meanings[name]


def _hint_rows() -> Iterator[tuple[str, ...]]:
    name = _PARSED["_name"]
    yield (
        "`ctx.tenant`",
        name,
        "`default`",
        "whose cache this is; declared tenants are private to themselves",
    )
    for field in dataclasses.fields(Hints):
        default = _default(field.name, field.default)
        where, kind = f"ctx.{field.name}", f"list, up to {MAX_DIRECTIVES}"
        if field.name in _FIELDS:
            kind = _PARSED[_FIELDS[field.name].__name__]
        elif field.name in _CAPS:
            where, kind = field.name, _PARSED["_count"]
        else:
            default = "none"
        yield f"`{where}`", kind, default, _HINTS[field.name]


def reasons() -> list[str]:
    """Returns the reasons for which `context` refuses or clamps a field."""
    found = []
    for node in ast.walk(ast.parse(inspect.getsource(context))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id in ("_Invalid", "RejectedHint") and node.args:
            last = node.args[-1]
            if isinstance(last, ast.Constant) and last.value not in found:
                found.append(last.value)
    return found


def _reason_rows() -> Iterator[tuple[str, ...]]:
    for reason in reasons():
        yield f"`{reason}`", _REASONS[reason]
    yield "`budget`", "more would be protected than `max_protected` (field `priority`)"


_INTRODUCTION: Final = """\
# Reference

<!-- Written by tools/reference.py from the code. Do not edit. -->

## Configuration

In `kv_connector_extra_config` of `--kv-transfer-config`. A wrong value or an unknown
key stops the start with one sentence that says what to write instead;
[`vllm-ctx-offload doctor`](sizing.md#ask-the-doctor) says all of them at once.

A *size* is a number of bytes or text such as `"8GiB"` or `"500MB"`; a *share* is text
such as `"25%"`, of the pool.
"""
_ACCOUNTS: Final = """\
A `policy_file` may hold {keys}, and nothing else.

### Accounts

Each value of `tenants`. Requests without a tenant and undeclared names share the
account `default`; [policy](policy.md#the-model) says on which terms.
"""
_ENVIRONMENT: Final = f"""\
### Environment

`{DEFAULT_ENV}`: the pool's size in bytes where `cpu_bytes_to_use` is not set. The first
process of a deployment sets it for those that it starts, under Ray too, for which it
adds the name to vLLM's `{RAY_COPIES_ENV}`. So all have one figure, and there is no need
to set it by hand. Nodes that are started by hand (`--headless`) come to another one:
there set `cpu_bytes_to_use`, or the start is refused.

vLLM's own `VLLM_PLUGINS`, if set, has to hold `ctx_offload`, and `VLLM_LOGGING_LEVEL`
holds for this package's log lines too.

## Requests

In `kv_transfer_params`, on every vLLM entry point that has it; offline in
`SamplingParams(extra_args={{"kv_transfer_params": ...}})`. All fields are optional, and
`null` is the same as absent.
"""
_RANGES: Final = """\
One item of `ctx.retention_directives`, for the tokens from `start` to before `end`:
"""
_WRONG: Final = """\
### What is wrong is ignored

A bad value is ignored on its own, and its field has its default; numbers out of range
are clamped. Each is counted in
`vllm:ctx_offload_hints_rejected_total{field, reason}` and logged once per field and
reason. Nothing that a client sends stops the engine, and no field fails a request;
`kv_transfer_params` that are no object are refused by vLLM itself, with 400.
"""
_RECEIPTS: Final = """\
### Receipts

With `ctx.receipt` the response's `kv_transfer_params` say what happened:

```json
{"ctx": {"tenant": "acme", "priority": 35, "lookup_tokens": 4096, "loaded_tokens": 2048,
         "stored_tokens": 2048, "rejected_tokens": 0, "rejected_reason": null}}
```

The tenant is the account's name, and the priority is what was granted. A reason is
`full`, `limit`, `priority` or `expected_reuse`.

Of a request with several answers (`n`) or prompts one receipt comes back:
[which one, and where](metrics.md#receipts).
"""


def _range_rows() -> Iterator[tuple[str, ...]]:
    yield "`start`", _PARSED["_count"], "`0`", "the first token"
    yield (
        "`end`",
        _PARSED["_count"],
        "the end of the request",
        "the token after the last",
    )
    yield "`priority`", _PARSED["_priority"], "must be given", "as `ctx.priority`"
    yield "`duration`", _PARSED["_positive_seconds"], "none", "as `ctx.ttl_s`"


def page() -> str:
    """Returns the text of docs/reference.md."""
    head = ("key", "value", "default", "meaning")
    keys = ", ".join(f"`{key}`" for key in POLICY_KEYS)
    parts = [
        _INTRODUCTION,
        _table(head, _model_rows(OffloadConfig, _CONFIG)),
        _ACCOUNTS.format(keys=keys),
        _table(head, _model_rows(TenantConfig, _TENANT)),
        _ENVIRONMENT,
        _table(("field", "value", "default", "effect"), _hint_rows()),
        _RANGES,
        _table(head, _range_rows()),
        _WRONG,
        _table(("reason", "meaning"), _reason_rows()),
        _RECEIPTS,
    ]
    return "\n".join(parts)


def main() -> int:
    """Writes or checks the page; returns the exit code."""
    parser = argparse.ArgumentParser(description="Writes docs/reference.md.")
    parser.add_argument("--check", action="store_true", help="only compare")
    args = parser.parse_args()
    text = page()
    if args.check:
        is_fresh = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        if not is_fresh:
            print(f"{PAGE.name} is stale; run 'make format'.", file=sys.stderr)
        return int(not is_fresh)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
