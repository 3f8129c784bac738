"""Readers of request traces: what came when, and which prefixes it shared.

`simulate --help` describes the formats.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

__all__ = ["Trace", "TraceError", "TraceRequest", "read_trace"]

DEFAULT_TOKENS_PER_CHUNK: Final = 512
_MAX_ID: Final = 2**63 - 1
_ARRAYS: Final = ("off", "blk", "t", "tin", "sess", "B")


class TraceError(ValueError):
    """A trace can't be read; the text is one sentence: file, line, what is wrong."""


class TraceRequest(NamedTuple):
    """One request of a trace."""

    arrived_at: float  # seconds
    num_tokens: int  # of the prompt
    chunk_ids: list[int]  # of its full chunks, head first; an id stands for a prefix
    ctx: Mapping[str, Any]  # `ctx` of its kv_transfer_params, as a client sends it


class Trace(NamedTuple):
    """A trace in the order of arrival."""

    requests: list[TraceRequest]
    tokens_per_chunk: int


def read_trace(path: Path, tokens_per_chunk: int | None = None) -> Trace:
    """Returns the trace in `path`: `.npz` as agent sessions, all else as JSONL.

    Args:
        path: the file.
        tokens_per_chunk: that an id stands for; None: 512, or what an NPZ file says.

    Raises:
        TraceError: the file can't be read, or a line of it is wrong.
    """
    try:
        if path.suffix == ".npz":
            trace = _read_npz(path, tokens_per_chunk)
        else:
            per_chunk = tokens_per_chunk or DEFAULT_TOKENS_PER_CHUNK
            trace = Trace(list(_read_jsonl(path, per_chunk)), per_chunk)
    except OSError as error:
        reason = error.strerror or error
        raise TraceError(f"{path}: can't be read ({reason}).") from None
    if not trace.requests:
        raise TraceError(f"{path}: holds no requests.")
    trace.requests.sort(key=lambda request: request.arrived_at)
    return trace


# ---- JSONL: Mooncake's fields, and those of our own


def _read_jsonl(path: Path, tokens_per_chunk: int) -> Iterator[TraceRequest]:
    # Id -> (the id before it in the chain, or -1; the line that said so).
    parents: dict[int, tuple[int, int]] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                request = _parse_line(line, tokens_per_chunk)
                _check_prefixes(request.chunk_ids, parents, number)
            except TraceError as error:
                raise TraceError(f"{path}, line {number}: {error}.") from None
            yield request


def _parse_line(line: bytes, tokens_per_chunk: int) -> TraceRequest:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"is no JSON ({error})") from None
    if not isinstance(record, dict):
        raise TraceError('is no JSON object; write one as {"timestamp": 0, ...}')
    for name in ("timestamp", "input_length", "hash_ids"):
        if name not in record:
            raise TraceError(f"'{name}' is missing")
    time_ms = record["timestamp"]
    if not _is_number(time_ms) or time_ms < 0:
        raise TraceError(
            f"'timestamp' = {_shown(time_ms)} is no number of milliseconds from 0 on"
        )
    num_tokens = record["input_length"]
    if not _is_count(num_tokens):
        raise TraceError(f"'input_length' = {_shown(num_tokens)} is no count of tokens")
    ids = _full_chunks(record["hash_ids"], num_tokens, tokens_per_chunk)
    return TraceRequest(time_ms / 1000, num_tokens, ids, _ctx(record))


def _full_chunks(ids: object, num_tokens: int, tokens_per_chunk: int) -> list[int]:
    """Returns the ids of the full chunks; nothing is kept of a partial last one."""
    if not isinstance(ids, list) or not all(map(_is_count, ids)):
        raise TraceError("'hash_ids' is no list of whole numbers from 0 on")
    num_full = num_tokens // tokens_per_chunk
    if not num_full <= len(ids) <= -(-num_tokens // tokens_per_chunk):
        raise TraceError(
            f"'hash_ids' has {len(ids)} ids, but 'input_length' = {num_tokens} is "
            f"{num_full} full chunks of {tokens_per_chunk} tokens; check "
            "--tokens-per-chunk"
        )
    return ids[:num_full]


def _check_prefixes(
    ids: list[int], parents: dict[int, tuple[int, int]], number: int
) -> None:
    """Raises unless an id always follows the same ids, so it can stand for a prefix."""
    for parent, chunk in pairwise([-1, *ids]):
        known, where = parents.setdefault(chunk, (parent, number))
        if known != parent:
            raise TraceError(
                f"'hash_ids' has {chunk} {_after(parent)}, but line {where} has it "
                f"{_after(known)}; an id stands for all that comes before it, too"
            )


def _after(parent: int) -> str:
    return f"after {parent}" if parent >= 0 else "at the start"


def _ctx(record: Mapping[str, Any]) -> dict[str, Any]:
    ctx = record.get("ctx")
    if ctx is None:
        ctx = {}
    elif not isinstance(ctx, dict):
        raise TraceError(f"'ctx' = {_shown(ctx)} is no object of hints")
    merged = dict(ctx)
    for name in ("tenant", "session"):
        if (value := record.get(name)) is None:
            continue
        if not isinstance(value, str):
            raise TraceError(f"'{name}' = {_shown(value)} is no text")
        if merged.setdefault(name, value) != value:
            raise TraceError(f"'{name}' and 'ctx.{name}' differ; give one of them")
    return merged


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -_MAX_ID <= value <= _MAX_ID  # neither infinite nor NaN


def _is_count(value: object) -> bool:
    return (
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_ID
    )


def _shown(value: object) -> str:
    return f"{json.dumps(value):.60}"


# ---- NPZ: agent sessions


def _read_npz(path: Path, tokens_per_chunk: int | None) -> Trace:
    arrays = _load_arrays(path)
    per_chunk = int(arrays["B"])
    if tokens_per_chunk not in (None, per_chunk):
        raise TraceError(
            f"{path}: its chunks have {per_chunk} tokens, not {tokens_per_chunk}; "
            "leave --tokens-per-chunk out."
        )
    names = ("t", "tin", "sess")
    times, tokens, sessions = (arrays[name].tolist() for name in names)
    offsets, blocks = arrays["off"].tolist(), arrays["blk"]
    lengths = [end - start for start, end in pairwise(offsets)]
    if (
        per_chunk < 1
        or not len(lengths) == len(times) == len(tokens) == len(sessions)
        or (offsets[0], offsets[-1]) != (0, len(blocks))
        or any(tin < 0 for tin in tokens)
        or any(n < tin // per_chunk for n, tin in zip(lengths, tokens, strict=True))
    ):
        raise TraceError(f"{path}: the arrays do not fit together.")
    # One int object per id: the ids of all chains are many times the distinct ones.
    known: dict[int, int] = {}
    parents: dict[int, tuple[int, int]] = {}
    requests = []
    for index, (time, num_tokens) in enumerate(zip(times, tokens, strict=True)):
        end = offsets[index] + num_tokens // per_chunk
        ids = [known.setdefault(i, i) for i in blocks[offsets[index] : end].tolist()]
        try:
            _check_prefixes(ids, parents, index)
        except TraceError as error:
            raise TraceError(f"{path}, request {index}: {error}.") from None
        ctx = {"session": str(sessions[index])}
        requests.append(TraceRequest(time, num_tokens, ids, ctx))
    return Trace(requests, per_chunk)


def _load_arrays(path: Path) -> dict[str, Any]:
    try:
        import numpy as np
    except ImportError:
        raise TraceError(f"{path}: NPZ files need numpy; install it.") from None
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in _ARRAYS if name in file}
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise TraceError(f"{path}: is no NPZ file ({error}).") from None
    for name in _ARRAYS:
        if name not in arrays:
            raise TraceError(f"{path}: the array '{name}' is missing.")
    return arrays
