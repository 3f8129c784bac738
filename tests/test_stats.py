"""Figures on their way from the scheduler and the workers."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ctx_offload.stats import (
    GAUGES,
    HISTOGRAMS,
    MAX_PAIRS,
    OTHERS,
    OffloadStats,
    merge_stats,
    of_connector,
    parse_key,
)


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


def test_beyond_many_pairs_of_tenants_others_are_one_but_never_oneself() -> None:
    """However many tenants there are, what is kept grows with them and no faster."""
    num_tenants = 3 * int(MAX_PAIRS**0.5)
    stats = OffloadStats()
    tenants = [f"tenant{number}" for number in range(num_tenants)]
    taken: set[str] = set()
    for _ in range(2):
        for tenant in tenants:
            for other in tenants:
                stats.count_pair("evicted_chunks", tenant, other, by=2)
        figures = stats.take()
        assert sum(figures.values()) == 2 * num_tenants**2
        taken |= figures.keys()
    labels = [parse_key(key).labels for key in taken]
    assert {(tenant, tenant) for tenant in tenants} <= {*labels}
    pairs = [(a, b) for a, b in labels if b not in (a, OTHERS)]
    assert len(pairs) == MAX_PAIRS
    assert len(stats._texts) == len(taken) <= MAX_PAIRS + 2 * num_tenants


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


def test_each_observation_is_taken_once_and_in_order() -> None:
    stats = OffloadStats()
    for seconds in (0.2, 0.1, 0.2):
        stats.observe("transfer_seconds", "load", value=seconds)
    key = '["transfer_seconds", "load"]'
    assert [stats.take(), stats.take()] == [{key: [0.2, 0.1, 0.2]}, {}]


def test_a_gauge_is_taken_once_with_its_last_value() -> None:
    stats = OffloadStats()
    stats.set("resident_bytes", "acme", to=5)
    stats.set("resident_bytes", "acme", to=3)
    assert [stats.take(), stats.take()] == [{'["resident_bytes", "acme"]': 3}, {}]


def test_what_is_declared_is_there_once_without_a_value() -> None:
    stats = OffloadStats()
    stats.declare("hit_tokens", "acme")
    stats.declare("load_wait_seconds")
    expected = {'["hit_tokens", "acme"]': 0, '["load_wait_seconds"]': []}
    assert [stats.take(), stats.take()] == [expected, {}]


def test_a_key_names_its_connector() -> None:
    stats = OffloadStats()
    stats.count("evicted_chunks", "acme", "zeta", by=2)
    first = stats.take()
    (key,) = first
    assert parse_key(key) == (0, "evicted_chunks", ("acme", "zeta"))
    assert of_connector(0, first) == first
    (key,) = of_connector(12, first)
    assert parse_key(key) == (12, "evicted_chunks", ("acme", "zeta"))
    assert json.loads(key) == [12, "evicted_chunks", "acme", "zeta"]


def keys(names: Any) -> Any:
    return st.builds(
        lambda connector, name: next(
            iter(of_connector(connector, {json.dumps([name]): 0}))
        ),
        st.integers(0, 2),
        st.sampled_from(sorted(names)),
    )


FIGURES = st.builds(
    lambda *parts: parts[0] | parts[1] | parts[2],
    st.dictionaries(keys({"a", "b"}), st.integers(0, 99)),
    st.dictionaries(keys(GAUGES), st.integers(0, 99)),
    st.dictionaries(keys(HISTOGRAMS), st.lists(st.integers(0, 9), max_size=3)),
)


def merged_by_hand(steps: list[dict[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {}
    for step in steps:
        for key, value in step.items():
            name = json.loads(key)[-1]
            if name in GAUGES or key not in total:
                total[key] = value
            else:
                total[key] = (
                    [*total[key], *value]
                    if name in HISTOGRAMS
                    else (total[key] + value)
                )
    return total


@settings(deadline=None)
@given(steps=st.lists(FIGURES, max_size=4), split=st.integers(0, 4))
def test_merging_is_the_same_in_whatever_groups_and_changes_neither(
    steps: list[dict[str, Any]], split: int
) -> None:
    """Counters add up, observations follow each other, the last gauge stands."""
    before = json.loads(json.dumps(steps))
    left: dict[str, Any] = {}
    for step in steps[:split]:
        left = merge_stats(left, step)
    right: dict[str, Any] = {}
    for step in steps[split:]:
        right = merge_stats(right, step)
    assert merge_stats(left, right) == merged_by_hand(steps)
    assert steps == before
    # As they cross a process border.
    assert json.loads(json.dumps(merge_stats(left, right))) == merged_by_hand(steps)
