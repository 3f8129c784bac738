"""`ReuseFilter`: what is stored only from its n-th offer on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from helpers import EMPTY_CONTEXT, make_chain
from hypothesis import given, settings
from hypothesis import strategies as st
from manager_probe import make_manager, resident_keys

from vllm_ctx_offload.context import ReqContext
from vllm_ctx_offload.core import ReuseFilter, StoreGrant

CHAIN = make_chain(3)
NOTHING = StoreGrant((), (), 0)


def request(name: object) -> ReqContext:
    return ReqContext(request_id=str(name))


def make_filter(threshold: int = 2, max_tracker_size: int = 100) -> ReuseFilter:
    return ReuseFilter(make_manager(8), threshold, max_tracker_size)


def test_a_chunk_is_stored_from_the_threshold_on() -> None:
    manager = make_filter(threshold=3)
    grants = [manager.prepare_store(CHAIN, request(name)) for name in range(4)]
    assert grants == [NOTHING, NOTHING, StoreGrant((0, 1, 2), (0, 1, 2), 0), NOTHING]


def test_only_the_leading_run_that_is_due_is_stored() -> None:
    manager = make_filter()
    manager.prepare_store(make_chain(4, "x", shared=2), request(1))
    grant = manager.prepare_store(make_chain(4, "y", shared=2), request(2))
    assert grant == StoreGrant((0, 1), (0, 1), 0)


def test_a_chunk_behind_one_that_is_not_due_is_not_stored() -> None:
    manager = make_filter(max_tracker_size=100)
    manager.prepare_store([b"other", CHAIN[1]], request(1))
    assert manager.prepare_store(CHAIN[:2], request(2)) == NOTHING
    assert resident_keys(manager._inner) == []


def test_a_request_counts_once_however_often_it_offers() -> None:
    manager = make_filter()
    grants = [
        manager.prepare_store(CHAIN[:length], request(1)) for length in (1, 2, 3, 3)
    ]
    assert grants == [NOTHING] * 4
    assert manager.prepare_store(CHAIN, request(2)).indices == (0, 1, 2)


def test_a_request_counts_once_though_it_starts_over_after_a_preemption() -> None:
    """1. offers three chunks; 2. is preempted; 3. offers one; 4. offers three."""
    manager = make_filter()
    grants = [manager.prepare_store(CHAIN[:length], request(1)) for length in (3, 1, 3)]
    assert grants == [NOTHING] * 3


def test_a_replaced_chain_counts_from_where_it_differs() -> None:
    """A streaming-input session replaces tokens that were hashed already."""
    manager = make_filter()
    manager.prepare_store(make_chain(3, "x", shared=1), request(1))
    replaced = make_chain(3, "y", shared=1)
    assert manager.prepare_store(replaced, request(1)) == NOTHING
    assert manager._offers == dict.fromkeys(
        [*make_chain(3, "x", shared=1), *replaced], 1
    )


def test_a_finished_request_leaves_no_record() -> None:
    manager = make_filter()
    manager.prepare_store(CHAIN, request(1))
    manager.on_request_finished(request(1))
    manager.on_request_finished(request("never seen"))
    assert manager._counted == {}


def test_the_id_of_a_finished_request_counts_anew() -> None:
    manager = make_filter()
    manager.prepare_store(CHAIN, request(1))
    manager.on_request_finished(request(1))
    assert manager.prepare_store(CHAIN, request(1)).indices == (0, 1, 2)


def test_reset_forgets_the_counts() -> None:
    manager = make_filter()
    manager.prepare_store(CHAIN, request(1))
    manager.reset()
    assert manager.prepare_store(CHAIN, request(2)) == NOTHING


def test_a_live_request_counts_again_after_a_reset() -> None:
    manager = make_filter()
    manager.prepare_store(CHAIN, request(1))
    manager.reset()
    assert manager.prepare_store(CHAIN, request(1)) == NOTHING
    assert manager.prepare_store(CHAIN, request(2)).indices == (0, 1, 2)


def test_the_tracker_forgets_what_was_offered_longest_ago() -> None:
    manager = make_filter(max_tracker_size=2)
    for name, key in enumerate([b"a", b"b", b"c"]):
        manager.prepare_store([key], request(name))
    assert {*manager._offers} == {b"b", b"c"}
    assert manager.prepare_store([b"a"], request("again")) == NOTHING
    assert manager.prepare_store([b"c"], request("again, too")).indices == (0,)


def test_of_a_chain_longer_than_the_tracker_the_head_is_remembered() -> None:
    """CASES 23: a tail whose head is forgotten could never be stored."""
    manager = make_filter(max_tracker_size=2)
    manager.prepare_store(CHAIN, request(1))
    assert manager.prepare_store(CHAIN, request(2)).indices == (0, 1)


def test_of_a_chain_offered_bit_by_bit_the_head_is_remembered() -> None:
    """CASES 23, as chunked prefill offers it."""
    manager = make_filter(max_tracker_size=2)
    for length in (1, 2, 3):
        manager.prepare_store(CHAIN[:length], request(1))
    assert {*manager._offers} == {*CHAIN[:2]}


@dataclass
class Recorder:
    """Stands for the inner manager: the filter must only pass on."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **named: Any) -> str:
            self.calls.append((name, *args, *named.values()))
            return f"result of {name}"

        return call


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("lookup", (CHAIN, EMPTY_CONTEXT)),
        ("touch", (CHAIN, EMPTY_CONTEXT)),
        ("prepare_load", (CHAIN, EMPTY_CONTEXT)),
        ("complete_load", (CHAIN, EMPTY_CONTEXT)),
        ("complete_store", (CHAIN, EMPTY_CONTEXT, False)),
        ("remove", (CHAIN, EMPTY_CONTEXT)),
        ("reset", ()),
        ("on_new_request", (EMPTY_CONTEXT,)),
        ("on_request_finished", (EMPTY_CONTEXT,)),
    ],
)
def test_all_other_calls_pass_with_their_context(
    name: str, args: tuple[Any, ...]
) -> None:
    inner = Recorder()
    result = getattr(ReuseFilter(inner, 2, 10), name)(*args)
    assert inner.calls == [(name, *args)]
    assert result in (None, f"result of {name}")
    assert (result is None) == (name not in {"lookup", "prepare_load"})


def test_a_store_passes_with_its_context() -> None:
    inner = Recorder()
    manager = ReuseFilter(inner, 1, 10)
    result = manager.prepare_store(CHAIN, EMPTY_CONTEXT, holes={1})
    assert result == "result of prepare_store"
    assert inner.calls == [("prepare_store", CHAIN, EMPTY_CONTEXT, {1})]


@settings(deadline=None)
@given(
    threshold=st.integers(0, 3),
    offers=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 4), st.sampled_from("xy")),
        max_size=30,
    ),
)
def test_the_run_passed_on_is_what_enough_requests_offered(
    threshold: int, offers: list[tuple[int, int, str]]
) -> None:
    """Against a set of requests for each key; each request keeps to one chain."""
    inner = Recorder()
    manager = ReuseFilter(inner, threshold, 1_000)
    seen: dict[bytes, set[int]] = {}
    tails: dict[int, str] = {}
    expected = []
    for name, length, tail in offers:
        keys = make_chain(length, tails.setdefault(name, tail), shared=2)
        for key in keys:
            seen.setdefault(key, set()).add(name)
        due = 0
        while due < len(keys) and len(seen[keys[due]]) >= threshold:
            due += 1
        manager.prepare_store(keys, request(name))
        expected.append(("prepare_store", keys[:due], request(name), ()))
    assert inner.calls == expected
