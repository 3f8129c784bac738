"""What a tenant may ask for: its account caps the hints of its requests."""

from __future__ import annotations

import pytest
from helpers import make_req_context

from vllm_ctx_offload.config import parse_config
from vllm_ctx_offload.context import Hints, ReqContext, RetentionDirective


def rejected(context: ReqContext) -> list[tuple[str, str]]:
    return [tuple(hint) for hint in context.rejected]


CAPPED = parse_config({"tenants": {"acme": {"max_priority": 50, "max_ttl_s": 60}}})


def test_what_a_tenant_may_ask_for_is_capped_by_its_account() -> None:
    context = make_req_context(
        config=CAPPED,
        tenant="acme",
        priority=80,
        decode_priority=51,
        ttl_s=600,
        retention_directives=[{"priority": 80, "duration": 61}, {"priority": 50}],
    )
    assert context.hints == Hints(
        priority=50,
        decode_priority=50,
        ttl_s=60.0,
        retention_directives=(
            RetentionDirective(0, None, 50, 60.0),
            RetentionDirective(0, None, 50, 60.0),
        ),
    )
    assert sorted(rejected(context)) == [
        ("decode_priority", "clamped"),
        ("priority", "clamped"),
        ("retention_directives", "clamped"),
        ("retention_directives", "clamped"),
        ("ttl_s", "clamped"),
    ]


@pytest.mark.parametrize("field", ["priority", "decode_priority"])
@pytest.mark.parametrize(
    ("value", "ttl_s"), [(0, None), (35, None), (35.9, None), (36, 60.0), (50, 60.0)]
)
def test_a_raised_priority_without_a_ttl_holds_as_long_as_the_account_lets_it(
    field: str, value: float, ttl_s: float | None
) -> None:
    context = make_req_context(config=CAPPED, tenant="acme", **{field: value})
    assert context.hints == Hints(**{field: int(value)}, ttl_s=ttl_s)
    assert context.rejected == ()


@pytest.mark.parametrize(
    ("priority", "duration_s"), [(0, None), (35, None), (36, 60.0), (50, 60.0)]
)
def test_a_raised_directive_without_a_duration_holds_as_long_as_the_account_lets_it(
    priority: int, duration_s: float | None
) -> None:
    directives = [{"priority": priority}, {"priority": priority, "duration": 5}]
    context = make_req_context(
        config=CAPPED, tenant="acme", retention_directives=directives
    )
    assert context.hints.retention_directives == (
        RetentionDirective(0, None, priority, duration_s),
        RetentionDirective(0, None, priority, 5.0),
    )
    assert (context.hints.ttl_s, context.rejected) == (None, ())


def test_a_priority_that_the_account_lowers_to_the_default_is_not_raised() -> None:
    config = parse_config({"tenants": {"acme": {"max_priority": 35}}})
    context = make_req_context(config=config, tenant="acme", priority=80)
    assert context.hints == Hints(priority=35, ttl_s=None)


def test_a_ttl_or_a_duration_without_end_is_the_longest_one() -> None:
    context = make_req_context(
        config=CAPPED,
        tenant="acme",
        priority=40,
        ttl_s=float("inf"),
        retention_directives=[{"priority": 40, "duration": float("inf")}],
    )
    assert context.hints.ttl_s == 60.0
    assert context.hints.retention_directives[0].duration_s == 60.0
    assert sorted(rejected(context)) == [
        ("retention_directives", "clamped"),
        ("ttl_s", "clamped"),
    ]


def test_what_is_within_the_account_is_granted_as_it_is() -> None:
    context = make_req_context(config=CAPPED, tenant="acme", priority=50, ttl_s=60)
    assert context.hints == Hints(priority=50, ttl_s=60.0)
    assert context.rejected == ()


@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("asked", [True, False, None])
def test_a_tenant_can_not_switch_on_what_its_account_switches_off(
    direction: str, asked: bool | None
) -> None:
    config = parse_config({"tenants": {"acme": {direction: False}}})
    context = make_req_context(config=config, tenant="acme", **{direction: asked})
    assert context.hints == Hints(**{direction: False})
