"""What differs between releases: named once, and safe where nothing is said."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
from vllm.config import CacheConfig

from vllm_ctx_offload.adapters import releases, vllm_api

PACKAGE = Path(vllm_api.__file__).parents[1]
# Where an attribute is read that may be missing, and why it is safe then. All that
# PRESENT_SINCE has is there but on releases that never had it.
SAFE: Final = {
    "resumed_req_ids": "the self-test has proof that they come as new requests",
    "skip_reading_external_kv": "the older name is read, which then has to be there",
    "use_v2_model_runner": "writes count as early: stores are fenced, or given up",
    "num_hash_lookahead_tokens": "the end of a hit is dropped",
    "enable_extensible_kv_cache": "tensors of more blocks are refused as unknown",
    "kv_cache_specs": "a wrapper of specs is no supported kind, so it is refused",
    "KVConnectorTransferResults": "what needs them is refused",
    "bind_gpu_block_pool": "the start is refused where it was asked for",
    "collect": "what stands in for a class of prometheus_client is left as it is",
}
# Of other libraries, or our own.
ELSEWHERE: Final = {"cli", "worker"}


def reads_with_default() -> list[tuple[str, str]]:
    """Returns (file, attribute) of each read that gets along without it."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE)
        if place.parts[0] in ELSEWHERE:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                name = node.func.id
                if name == "hasattr" or (name == "getattr" and len(node.args) == 3):
                    found.append(
                        (place.as_posix(), ast.unparse(node.args[1]).strip("'"))
                    )
    return found


def test_the_search_finds_reads() -> None:
    found = reads_with_default()
    assert ("adapters/releases.py", "use_v2_model_runner") in found
    assert len(found) > 10


@pytest.mark.parametrize(("place", "attribute"), reads_with_default())
def test_what_may_be_missing_is_safe_where_it_is(place: str, attribute: str) -> None:
    """A default that is not would turn the next release into wrong tokens."""
    if place == "adapters/self_test.py":
        return  # it is looking for them
    known = {field for _, field, _ in releases.PRESENT_SINCE}
    assert attribute in known | SAFE.keys(), "say why its absence is safe"
    assert place.startswith("adapters/"), "facts of a release belong there"


def test_no_reason_outlives_what_it_is_for() -> None:
    assert SAFE.keys() <= {attribute for _, attribute in reads_with_default()}


def test_who_does_not_say_when_it_writes_counts_as_early() -> None:
    """From 0.34 on vLLM has one model runner, which zeroes before the first hook."""
    writes = releases.writes_before_hooks
    assert writes(SimpleNamespace())
    assert writes(SimpleNamespace(use_v2_model_runner=True))
    assert not writes(SimpleNamespace(use_v2_model_runner=False))


def test_requests_that_take_no_loads_are_known_by_both_names() -> None:
    older: Any = SimpleNamespace(skip_reading_prefix_cache=True)
    assert releases.skips_offloaded_kv(older)
    newer: Any = SimpleNamespace(skip_reading_external_kv=False)
    assert not releases.skips_offloaded_kv(newer)
    newer.skip_reading_external_kv = True
    assert releases.skips_offloaded_kv(newer)
    with pytest.raises(AttributeError, match="skip_reading_prefix_cache"):
        releases.skips_offloaded_kv(SimpleNamespace())


def test_the_range_is_said_as_it_is() -> None:
    first, end = releases.SUPPORTED
    newest = f"{end.major}.{end.minor - 1}"
    assert f"{first} to {newest}" == releases.SUPPORTED_TEXT
    assert releases.is_supported(f"{newest}.1")
    assert not releases.is_supported(f"{end.major}.{end.minor}.0rc1")


def test_the_default_block_is_vllms() -> None:
    assert vllm_api.default_block_size() == CacheConfig.DEFAULT_BLOCK_SIZE
