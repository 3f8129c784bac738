"""`ReqContext`: what a client sends, made harmless."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import EMPTY_CONTEXT, make_req_context

from vllm_ctx_offload.config import OffloadConfig
from vllm_ctx_offload.context import (
    EMPTY_HINTS,
    Hints,
    RejectedHint,
    ReqContext,
    RetentionDirective,
    build_req_context,
)

ALL_FIELDS = {
    "session": "conv-42",
    "priority": 80,
    "ttl_s": 600,
    "decode_priority": 35,
    "expected_reuse_s": 20,
    "store": False,
    "load": False,
    "release": True,
    "receipt": True,
}


def name_of(value: object) -> str | None:
    """Python refuses to print numbers of thousands of digits, as in a test's name."""
    return "huge" if isinstance(value, int) and value.bit_length() > 9_000 else None


def rejected(context: ReqContext) -> list[tuple[str, str]]:
    return [tuple(hint) for hint in context.rejected]


@pytest.mark.parametrize("params", [None, {}, {"ctx": None}, {"ctx": {}}, {"other": 1}])
def test_no_hints_give_the_defaults(params: Any) -> None:
    context = build_req_context(OffloadConfig(), "req", params)
    assert context == ReqContext(request_id="req", kv_transfer_params=params)
    assert context.rejected == ()
    assert context.hints == EMPTY_HINTS == Hints(priority=35, store=True, load=True)
    assert (context.tenant, context.namespace) == ("default", b"")


def test_the_empty_context_is_that_of_a_request_without_hints() -> None:
    assert build_req_context(OffloadConfig(), "", None) == EMPTY_CONTEXT


def test_every_field_is_read() -> None:
    directives = [
        {"start": 0, "end": 2048, "priority": 90, "duration": 3600},
        {"start": 2048, "end": None, "priority": 10, "duration": None},
        {"priority": 0},
    ]
    caps = {"max_load_tokens": 4096, "max_offload_tokens": 0}
    context = make_req_context(
        params=caps, retention_directives=directives, **ALL_FIELDS
    )
    assert context.hints == Hints(
        **ALL_FIELDS,
        **caps,
        retention_directives=(
            RetentionDirective(0, 2048, 90, 3600.0),
            RetentionDirective(2048, None, 10, None),
            RetentionDirective(0, None, 0, None),
        ),
    )
    assert context.rejected == ()


@pytest.mark.parametrize("name", [*ALL_FIELDS, "retention_directives", "tenant"])
def test_null_is_the_same_as_absent(name: str) -> None:
    context = make_req_context(**{name: None})
    assert (context.hints, context.rejected) == (EMPTY_HINTS, ())


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        *[("priority", value, "type") for value in ("80", [80], {}, True)],
        *[("decode_priority", value, "type") for value in ("80", False)],
        ("priority", float("nan"), "not_a_number"),
        *[("ttl_s", value, "type") for value in ("600", True, [])],
        ("ttl_s", float("nan"), "not_a_number"),
        *[("ttl_s", value, "not_positive") for value in (0, 0.0, -0.0)],
        *[("ttl_s", value, "negative") for value in (-1, float("-inf"), -(2**20000))],
        ("expected_reuse_s", -0.5, "negative"),
        ("expected_reuse_s", "soon", "type"),
        *[
            (name, value, "type")
            for name in ("store", "load", "release", "receipt")
            for value in (0, 1, "false", [])
        ],
        *[("session", value, "type") for value in (1, ["a"], b"a")],
        *[("session", value, "length") for value in ("", "x" * 129)],
        *[("tenant", value, "type") for value in (1, ["a"], {}, True)],
        *[("tenant", value, "length") for value in ("", "x" * 129)],
        *[("retention_directives", value, "type") for value in ({}, "", 1, [1], [[]])],
        ("unheard_of", 1, "unknown_field"),
    ],
    ids=name_of,
)
def test_a_bad_field_is_ignored_on_its_own(
    field: str, value: object, reason: str
) -> None:
    """CASES 31."""
    fields = {**ALL_FIELDS, field: value}
    good = {name: ALL_FIELDS[name] for name in ALL_FIELDS if name != field}
    if field == "ttl_s":
        good["ttl_s"] = 3_600.0  # the longest, because the priority is raised
    context = make_req_context(**fields)
    assert context.hints == Hints(**good)
    assert context.tenant == "default"
    label = "unknown" if field == "unheard_of" else field
    assert rejected(context) == [(label, reason)]


@pytest.mark.parametrize("name", ["x", "x" * 128, "💾" * 128, "\ud800", " "])
def test_names_of_1_to_128_characters_are_taken(name: str) -> None:
    """CASES 31."""
    context = make_req_context(session=name, tenant=name)
    assert (context.hints, context.rejected) == (Hints(session=name), ())


@pytest.mark.parametrize("name", ["max_load_tokens", "max_offload_tokens"])
@pytest.mark.parametrize(
    ("value", "reason"),
    [(-1, "negative"), (1.5, "type"), ("8", "type"), (True, "type"), ([], "type")],
)
def test_a_bad_cap_is_ignored(name: str, value: object, reason: str) -> None:
    context = make_req_context(params={name: value})
    assert (context.hints, rejected(context)) == (EMPTY_HINTS, [(name, reason)])


@pytest.mark.parametrize("params", [[], "ctx", 5, True, b"x"])
def test_params_that_are_no_mapping_are_ignored(params: Any) -> None:
    context = build_req_context(OffloadConfig(), "req", params)
    assert context == ReqContext(request_id="req", kv_transfer_params=params)
    assert rejected(context) == [("kv_transfer_params", "type")]


@pytest.mark.parametrize("ctx", [[], "acme", 5, True, [{"priority": 3}]])
def test_a_ctx_that_is_no_mapping_is_ignored_alone(ctx: Any) -> None:
    params = {"ctx": ctx, "max_load_tokens": 7}
    context = build_req_context(OffloadConfig(), "req", params)
    assert context.hints == Hints(max_load_tokens=7)
    assert rejected(context) == [("ctx", "type")]


@pytest.mark.parametrize("field", ["priority", "decode_priority"])
@pytest.mark.parametrize(
    ("value", "granted"),
    [
        *[(value, 100) for value in (101, 1e308, 2**127, 2**20000, float("inf"))],
        *[(value, 0) for value in (-1, -1e308, -(2**20000), float("-inf"))],
    ],
    ids=name_of,
)
def test_a_priority_out_of_range_is_clamped_and_counted(
    field: str, value: float, granted: int
) -> None:
    context = make_req_context(**{field: value}, ttl_s=7)
    assert context.hints == Hints(**{field: granted}, ttl_s=7.0)
    assert rejected(context) == [(field, "clamped")]


@pytest.mark.parametrize("value", [0, 35, 100, 99.5])
def test_a_priority_in_range_is_granted_as_a_whole_number(value: float) -> None:
    context = make_req_context(priority=value)
    assert (context.hints.priority, context.rejected) == (int(value), ())
    assert type(context.hints.priority) is int


@pytest.mark.parametrize("num_prompt_tokens", [None, 0, 17])
def test_the_end_of_the_prompt_is_handed_on(num_prompt_tokens: int | None) -> None:
    context = build_req_context(
        OffloadConfig(), "req", None, num_prompt_tokens=num_prompt_tokens
    )
    assert context == ReqContext("req", num_prompt_tokens=num_prompt_tokens)


@pytest.mark.parametrize(
    ("directive", "reason"),
    [
        ({}, "type"),
        ({"start": -1, "priority": 1}, "negative"),
        ({"start": 1.5, "priority": 1}, "type"),
        ({"start": None, "priority": 1}, "type"),
        ({"start": 5, "end": 5, "priority": 1}, "empty_range"),
        ({"start": 5, "end": 4, "priority": 1}, "empty_range"),
        ({"end": -1, "priority": 1}, "negative"),
        ({"priority": None}, "type"),
        ({"priority": 1, "duration": 0}, "not_positive"),
        ({"priority": 1, "duration": -1}, "negative"),
        ({"priority": 1, "duration": float("nan")}, "not_a_number"),
    ],
)
def test_a_bad_directive_is_ignored_and_its_neighbours_are_not(
    directive: dict[str, Any], reason: str
) -> None:
    good = {"start": 1, "end": 2, "priority": 3}
    context = make_req_context(retention_directives=[good, directive, good])
    kept = RetentionDirective(1, 2, 3, None)
    assert context.hints == Hints(retention_directives=(kept, kept))
    assert rejected(context) == [("retention_directives", reason)]


def test_an_unknown_field_of_a_directive_is_counted_and_the_rest_holds() -> None:
    """As in `ctx`: once for each directive, without names."""
    misspelt = {"start": 1, "end": 2, "priority": 3, "durationn": 60, "x": 1}
    good = {"priority": 5, "duration": 60}
    context = make_req_context(retention_directives=[misspelt, good, misspelt])
    kept = RetentionDirective(1, 2, 3, None)
    assert context.hints.retention_directives == (
        kept,
        RetentionDirective(0, None, 5, 60.0),
        kept,
    )
    assert rejected(context) == [("retention_directives", "unknown_field")] * 2


def test_unknown_fields_of_directives_cost_no_more_than_their_number() -> None:
    huge = {"priority": 1, **{f"field{index}": index for index in range(100_000)}}
    context = make_req_context(retention_directives=[huge] * 1_000)
    assert len(context.hints.retention_directives) == 64
    assert rejected(context) == [
        ("retention_directives", "too_many"),
        *[("retention_directives", "unknown_field")] * 64,
    ]


def test_directives_past_the_sixty_fourth_are_ignored() -> None:
    given = [{"start": index, "priority": 1} for index in range(1_000)]
    context = make_req_context(retention_directives=given)
    assert context.hints.retention_directives == tuple(
        RetentionDirective(index, None, 1, None) for index in range(64)
    )
    assert rejected(context) == [("retention_directives", "too_many")]


def test_unknown_fields_are_counted_once_and_leave_nothing() -> None:
    """CASES 31: neither the record nor the metrics grow with what a client sends."""
    unknown = {f"field{index}": index for index in range(100_000)}
    context = make_req_context(priority=3, **unknown)
    assert context.hints == Hints(priority=3)
    assert context.rejected == (RejectedHint("unknown", "unknown_field"),)


def test_unknown_params_beside_ctx_belong_to_others() -> None:
    assert make_req_context(params={"do_remote_prefill": True}).rejected == ()


def test_the_session_falls_back_to_that_of_vllm() -> None:
    def session_of(ctx: dict[str, Any], session_id: Any) -> str | None:
        params = {"ctx": ctx}
        context = build_req_context(
            OffloadConfig(), "req", params, session_id=session_id
        )
        return context.hints.session

    assert session_of({}, "vllm") == "vllm"
    assert session_of({"session": "own"}, "vllm") == "own"
    assert session_of({"session": 5}, "vllm") == "vllm"
    assert session_of({}, "x" * 129) is None
    assert session_of({}, 7) is None


def test_a_context_keeps_what_the_client_sent_and_can_not_be_changed() -> None:
    params = {"ctx": {"priority": 1}}
    context = build_req_context(OffloadConfig(), "req", params)
    assert context.kv_transfer_params is params
    with pytest.raises(AttributeError):
        context.tenant = "other"
    assert context == make_req_context(priority=1)
