"""Counters on their way from the scheduler and the workers."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ctx_offload.stats import OffloadStats, merge_stats


def test_counts_add_up_for_each_set_of_labels() -> None:
    stats = OffloadStats()
    stats.count("evicted_chunks", "acme", "zeta")
    stats.count("evicted_chunks", "acme", "zeta")
    stats.count("evicted_chunks", "zeta", "acme")
    stats.count("stored_bytes", "acme", by=4_096)
    stats.count("alone")
    assert stats.take() == {
        '["evicted_chunks", "acme", "zeta"]': 2,
        '["evicted_chunks", "zeta", "acme"]': 1,
        '["stored_bytes", "acme"]': 4_096,
        '["alone"]': 1,
    }


def test_each_increment_is_taken_once() -> None:
    """CASES 38, 39."""
    stats = OffloadStats()
    stats.count("hit_tokens", "acme", by=5)
    taken = [stats.take(), stats.take()]
    stats.count("hit_tokens", "acme", by=3)
    taken.append(stats.take())
    key = '["hit_tokens", "acme"]'
    assert taken == [{key: 5}, {}, {key: 3}]


def test_what_was_taken_does_not_change_any_more() -> None:
    stats = OffloadStats()
    stats.count("hit_tokens", "acme")
    taken = stats.take()
    stats.count("hit_tokens", "acme")
    assert taken == {'["hit_tokens", "acme"]': 1}


def test_names_of_any_kind_survive_as_plain_json() -> None:
    stats = OffloadStats()
    labels = ['a"b', "a, b", "ümlaut", "\ud800", ""]
    stats.count("lookup_tokens", *labels)
    (key,) = json.loads(json.dumps(stats.take()))
    assert json.loads(key) == ["lookup_tokens", *labels]


INCREMENTS = st.dictionaries(st.sampled_from("abc"), st.integers(0, 99))


@settings(deadline=None)
@given(one=INCREMENTS, other=INCREMENTS)
def test_merging_adds_and_leaves_both_as_they_were(
    one: dict[str, int], other: dict[str, int]
) -> None:
    before = (dict(one), dict(other))
    expected = {key: one.get(key, 0) + other.get(key, 0) for key in {*one, *other}}
    assert merge_stats(one, other) == merge_stats(other, one) == expected
    assert (one, other) == before
