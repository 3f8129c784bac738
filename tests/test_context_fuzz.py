"""CASES 31: 100,000 malformed `kv_transfer_params`, and nothing raises."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from vllm_ctx_offload.config import OffloadConfig, parse_config
from vllm_ctx_offload.context import (
    Hints,
    ReqContext,
    RetentionDirective,
    build_req_context,
)

NUM_CASES = 100_000
TENANTS = {"acme": {}, "small": {"max_priority": 20, "max_ttl_s": 5, "store": False}}
CONFIGS = [
    OffloadConfig(),
    parse_config({"tenants": TENANTS}),
    parse_config({"tenants": {**TENANTS, "*": {"max_priority": 60}}}),
    parse_config({"tenants": TENANTS, "tenant_from": ["lora", "kv_transfer_params"]}),
]
REASONS = {
    "type",
    "length",
    "not_a_number",
    "negative",
    "not_positive",
    "empty_range",
    "too_many",
    "clamped",
    "unknown_field",
}
FIELDS = [
    "tenant",
    "session",
    "priority",
    "ttl_s",
    "decode_priority",
    "expected_reuse_s",
    "store",
    "load",
    "release",
    "receipt",
    "retention_directives",
]
CAPS = ["max_load_tokens", "max_offload_tokens"]
LABELS = {"kv_transfer_params", "ctx", "unknown", *FIELDS, *CAPS}


def nested(depth: int, as_list: bool) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if as_list else {"ctx": value}
    return value


VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 35, 100, 101, 4096, 0.0, -0.0, 0.5, 99.9, 5e-324),
    *(float("nan"), float("inf"), float("-inf"), 1e308, -1e308, 2**63, 2**127),
    *(-(2**127), 2**20000, -(2**20000)),
    *("", "acme", "small", "default", "*", "x" * 128, "x" * 129, "x" * 10_000_000),
    *("\ud800", "\udfff" * 128, "\0", "35", "true", "null", "NaN", "💾" * 128),
    *(b"", b"acme", (), [], {}, [[]], [{}], {"": {}}, {"a": [1]}, [None] * 100),
    *(nested(1_000, as_list=True), nested(1_000, as_list=False), object(), 1j),
    *({1: 2, None: 3, b"x": 4}, {"tenant": ["acme"]}, ["acme"], {*"ab"}),
]
KEYS: list[Any] = [*FIELDS, "tenants", "", 7, None, "priority ", "\ud800", "x" * 1_000]
DIRECTIVE_KEYS = ["start", "end", "priority", "duration", "extra"]


def random_params(rand: random.Random) -> Any:
    """Returns mappings of the right shape more often than not, or nothing would
    reach the parsers of single fields."""
    if rand.random() < 0.05:
        return rand.choice(VALUES)
    ctx: Any = rand.choice(VALUES)
    if rand.random() < 0.9:
        ctx = {rand.choice(KEYS): rand.choice(VALUES) for _ in range(rand.randrange(8))}
        if rand.random() < 0.3:
            ctx["retention_directives"] = [
                {key: rand.choice(VALUES) for key in DIRECTIVE_KEYS}
                for _ in range(rand.choice([1, 2, 70]) if rand.random() < 0.1 else 1)
            ]
    params = {cap: rand.choice(VALUES) for cap in CAPS if rand.random() < 0.3}
    return {**params, "ctx": ctx, "another_connectors": rand.choice(VALUES)}


def assert_optional(value: Any, kinds: Any, least: float, most: float) -> None:
    """None, or a number of that type and range; NaN is in no range."""
    if value is not None:
        assert isinstance(value, kinds)
        assert not isinstance(value, bool)
        assert least <= value <= most


def check_directive(directive: RetentionDirective) -> None:
    assert_optional(directive.start, int, 0, math.inf)
    assert_optional(directive.end, int, directive.start + 1, math.inf)
    assert_optional(directive.priority, int, 0, 100)
    assert_optional(directive.duration_s, float, 5e-324, math.inf)
    assert directive.priority <= 35 or directive.duration_s is not None


def check_hints(hints: Hints, config: OffloadConfig, tenant: str) -> None:
    account = config.tenant(tenant)
    if hints.session is not None:
        assert isinstance(hints.session, str)
        assert 1 <= len(hints.session) <= 128
    assert hints.priority == 35 or hints.priority <= account.max_priority
    assert type(hints.priority) is int
    assert hints.priority >= 0
    assert_optional(hints.decode_priority, int, 0, account.max_priority)
    assert_optional(hints.ttl_s, float, 5e-324, account.max_ttl_s)
    raised = max(hints.priority, hints.decode_priority or 0) > 35
    assert not raised or hints.ttl_s is not None
    assert_optional(hints.expected_reuse_s, float, 0, math.inf)
    for flag in (hints.store, hints.load, hints.release, hints.receipt):
        assert type(flag) is bool
    assert not (hints.store and not account.store)
    assert_optional(hints.max_load_tokens, int, 0, math.inf)
    assert_optional(hints.max_offload_tokens, int, 0, math.inf)
    assert isinstance(hints.retention_directives, tuple)
    assert len(hints.retention_directives) <= 64
    for directive in hints.retention_directives:
        check_directive(directive)
        assert directive.priority <= account.max_priority
        assert (directive.duration_s or 0) <= account.max_ttl_s


def check_context(context: ReqContext, config: OffloadConfig) -> None:
    assert context.tenant in {"default", *config.tenants} - {"*"}
    assert isinstance(context.namespace, bytes)
    assert len(context.namespace) <= 512
    for hint in context.rejected:
        assert hint.field in LABELS
        assert hint.reason in REASONS
    assert len(context.rejected) < 200
    check_hints(context.hints, config, context.tenant)


@pytest.mark.slow
def test_nothing_a_client_sends_raises_or_leaves_the_documented_ranges() -> None:
    rand = random.Random(31)
    seen_reasons: set[str] = set()
    for index in range(NUM_CASES):
        config = CONFIGS[index % len(CONFIGS)]
        context = build_req_context(
            config,
            "req",
            random_params(rand),
            cache_salt=rand.choice(VALUES),
            lora_name=rand.choice(VALUES),
            session_id=rand.choice(VALUES),
        )
        check_context(context, config)
        seen_reasons.update(hint.reason for hint in context.rejected)
    assert seen_reasons == REASONS
