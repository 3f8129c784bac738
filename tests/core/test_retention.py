"""`segments_of`: what hints ask for along a chain."""

from __future__ import annotations

import pytest
from core.counted import count_operations
from core.naive_manager import NaiveManager
from core.strategies import COLUMNS, HINTS
from hypothesis import given, settings
from hypothesis import strategies as st
from manager_probe import FakeClock

from vllm_ctx_offload.context import (
    MAX_DIRECTIVES,
    Hints,
    ReqContext,
    RetentionDirective,
)
from vllm_ctx_offload.core import AccountTerms, PolicyConfig
from vllm_ctx_offload.core.retention import Columns, Segment, Wish, segments_of

NOTHING_SAID = (Segment(None, None),)


def segments(
    *directives: RetentionDirective,
    num_prompt_tokens: int | None = None,
    tokens_per_chunk: int = 16,
    **hints: object,
) -> tuple[Segment, ...]:
    values = Hints(retention_directives=directives, **hints)  # type: ignore[arg-type]
    context = ReqContext("r", hints=values, num_prompt_tokens=num_prompt_tokens)
    return segments_of(context, ((0, tokens_per_chunk),))


def directive(
    start: int, end: int | None, priority: int, duration_s: float | None = None
) -> RetentionDirective:
    return RetentionDirective(start, end, priority, duration_s)


@pytest.mark.parametrize(
    "hints",
    [
        {},
        {"priority": 35, "ttl_s": 10},
        {"session": "s", "expected_reuse_s": 3, "release": True},
        {"decode_priority": 90},  # but nobody knows where the prompt ends
    ],
)
def test_no_priority_is_one_segment_that_says_nothing(hints: dict[str, object]) -> None:
    assert segments(**hints) == NOTHING_SAID


def test_a_priority_holds_for_the_whole_chain() -> None:
    assert segments(priority=80, ttl_s=10) == (Segment(None, Wish(80, 10)),)
    assert segments(priority=0) == (Segment(None, Wish(0, None)),)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "first_decoded"), [(32, 2), (33, 3), (47, 3), (48, 3)]
)
def test_decode_priority_begins_with_the_first_chunk_past_the_prompt(
    num_prompt_tokens: int, first_decoded: int
) -> None:
    found = segments(
        priority=80, decode_priority=20, ttl_s=5, num_prompt_tokens=num_prompt_tokens
    )
    assert found == (
        Segment(first_decoded, Wish(80, 5)),
        Segment(None, Wish(20, 5)),
    )


def test_a_decode_priority_of_the_default_says_nothing_there() -> None:
    found = segments(priority=80, ttl_s=5, decode_priority=35, num_prompt_tokens=16)
    assert found == (Segment(1, Wish(80, 5)), Segment(None, None))


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 16, (Segment(1, Wish(90, 5)), Segment(None, None))),
        (0, 17, (Segment(2, Wish(90, 5)), Segment(None, None))),
        (15, 17, (Segment(2, Wish(90, 5)), Segment(None, None))),
        (16, 17, (Segment(1, None), Segment(2, Wish(90, 5)), Segment(None, None))),
        (31, None, (Segment(1, None), Segment(None, Wish(90, 5)))),
    ],
)
def test_a_chunk_that_a_range_touches_gets_its_priority(
    start: int, end: int | None, expected: tuple[Segment, ...]
) -> None:
    assert segments(directive(start, end, 90, 5)) == expected


def test_where_ranges_overlap_the_highest_priority_wins() -> None:
    found = segments(directive(0, None, 50, 9), directive(16, 32, 90, 1))
    assert found == (
        Segment(1, Wish(50, 9)),
        Segment(2, Wish(90, 1)),
        Segment(None, Wish(50, 9)),
    )


@pytest.mark.parametrize("durations", [(3, 9, 9), (9, 3, 9), (9, None, None)])
def test_of_equal_priorities_the_one_that_holds_longer_wins(
    durations: tuple[float | None, float | None, float | None],
) -> None:
    one, other, winner = durations
    found = segments(directive(0, None, 30, one), directive(0, None, 30, other))
    assert found == (Segment(None, Wish(30, winner)),)


def test_a_directive_replaces_the_priority_where_it_applies_though_it_is_lower() -> (
    None
):
    found = segments(directive(0, 16, 35), priority=80, ttl_s=5)
    assert found == (Segment(1, Wish(35, None)), Segment(None, Wish(80, 5)))


def test_where_chunks_are_of_several_sizes_each_is_touched_or_not_by_itself() -> None:
    """Spans of one chunk of 64 tokens and two of 32."""
    columns = ((0, 64), (0, 32), (32, 64))
    asked = (directive(0, 32, 90, 5), directive(130, 131, 80, 5))
    context = ReqContext("r", hints=Hints(retention_directives=asked))
    assert segments_of(context, columns) == (
        Segment(2, Wish(90, 5)),
        Segment(6, None),
        Segment(8, Wish(80, 5)),
        Segment(None, None),
    )


def test_in_the_span_where_the_prompt_ends_only_chunks_past_it_are_decoded() -> None:
    """The larger chunk holds its last token, the smaller one behind it does not."""
    columns = ((0, 64), (0, 32), (32, 64))
    hints = Hints(decode_priority=20)
    context = ReqContext("r", hints=hints, num_prompt_tokens=80)
    assert segments_of(context, columns) == (
        Segment(5, None),
        Segment(None, Wish(20, None)),
    )


def test_numbers_beyond_all_chains_are_numbers() -> None:
    far = 2**2_000
    assert segments(directive(far, far + 1, 90, 5)) == (
        Segment(far // 16, None),
        Segment(far // 16 + 1, Wish(90, 5)),
        Segment(None, None),
    )


def test_the_most_directives_in_many_columns_cost_by_their_product() -> None:
    """All of them overlap in every chunk, and end in the midst of spans."""
    works = []
    columns = ((0, 8), (0, 4), (4, 8), (0, 2), (2, 4), (4, 6), (6, 8))
    for num in (MAX_DIRECTIVES // 4, MAX_DIRECTIVES):
        asked = [directive(n, 100_000 + 7 * n, 40 + n % 50, 5) for n in range(num)]
        context = ReqContext("r", hints=Hints(retention_directives=tuple(asked)))
        works.append(count_operations(lambda c=context: segments_of(c, columns)))
    assert works[1] < 5 * works[0]


@settings(deadline=None, max_examples=400)
@given(
    hints=HINTS,
    columns=COLUMNS,
    num_prompt_tokens=st.sampled_from([None, 0, 3, 4, 9]),
)
def test_each_chunk_gets_what_its_own_tokens_ask_for(
    hints: Hints, columns: Columns, num_prompt_tokens: int | None
) -> None:
    """Against the naive model, chunk by chunk; segments are ascending, without gaps."""
    policy = PolicyConfig({"default": AccountTerms()}, 0, columns)
    naive = NaiveManager(0, policy, FakeClock())
    context = ReqContext("r", hints=hints, num_prompt_tokens=num_prompt_tokens)
    found = segments_of(context, columns)
    ends = [segment.end for segment in found]
    assert ends[-1] is None
    assert ends[:-1] == sorted({*ends[:-1]})
    for index in range(12 * len(columns)):
        wish = next(s.wish for s in found if s.end is None or index < s.end)
        expected = naive.wish_for(context, index)
        if wish is not None and wish.ttl_s is None:
            wish = Wish(wish.priority, float("inf"))
        assert wish == expected
