"""`ReuseFilter`: what is stored only from its n-th offer on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from core.counted import count_operations
from helpers import EMPTY_CONTEXT, make_chain
from hypothesis import given, settings
from hypothesis import strategies as st
from manager_probe import make_filter, make_manager, resident_keys, tracked

from vllm_ctx_offload.context import Hints, ReqContext
from vllm_ctx_offload.core import AccountTerms, PolicyConfig, ReuseFilter, StoreGrant
from vllm_ctx_offload.core.reuse import tracker_policy

CHAIN = make_chain(3)
NOTHING = StoreGrant((), (), 0)
PLAIN = PolicyConfig({"default": AccountTerms()}, max_protected=0)


def request(name: object) -> ReqContext:
    return ReqContext(request_id=str(name))


def filter_of(threshold: int = 2, max_tracker_size: int = 100) -> ReuseFilter:
    return make_filter(make_manager(8), threshold, max_tracker_size)


def test_a_chunk_is_stored_from_the_threshold_on() -> None:
    manager = filter_of(threshold=3)
    grants = [manager.prepare_store(CHAIN, request(name)) for name in range(4)]
    assert grants == [NOTHING, NOTHING, StoreGrant((0, 1, 2), (0, 1, 2), 0), NOTHING]


def test_only_the_leading_run_that_is_due_is_stored() -> None:
    manager = filter_of()
    manager.prepare_store(make_chain(4, "x", shared=2), request(1))
    grant = manager.prepare_store(make_chain(4, "y", shared=2), request(2))
    assert grant == StoreGrant((0, 1), (0, 1), 0)


def test_a_chunk_behind_one_that_is_not_due_is_not_stored() -> None:
    manager = filter_of(max_tracker_size=100)
    manager.prepare_store([b"other", CHAIN[1]], request(1))
    assert manager.prepare_store(CHAIN[:2], request(2)) == NOTHING
    assert resident_keys(manager._inner) == []


def test_a_request_counts_once_however_often_it_offers() -> None:
    manager = filter_of()
    grants = [
        manager.prepare_store(CHAIN[:length], request(1)) for length in (1, 2, 3, 3)
    ]
    assert grants == [NOTHING] * 4
    assert manager.prepare_store(CHAIN, request(2)).indices == (0, 1, 2)


def test_a_request_counts_once_though_it_starts_over_after_a_preemption() -> None:
    """1. offers three chunks; 2. is preempted; 3. offers one; 4. offers three."""
    manager = filter_of()
    grants = [manager.prepare_store(CHAIN[:length], request(1)) for length in (3, 1, 3)]
    assert grants == [NOTHING] * 3


def test_a_replaced_chain_counts_from_where_it_differs() -> None:
    """A streaming-input session replaces tokens that were hashed already."""
    manager = filter_of()
    manager.prepare_store(make_chain(3, "x", shared=1), request(1))
    replaced = make_chain(3, "y", shared=1)
    assert manager.prepare_store(replaced, request(1)) == NOTHING
    assert tracked(manager) == dict.fromkeys(
        [*make_chain(3, "x", shared=1), *replaced], 1
    )


def test_a_finished_request_leaves_no_record() -> None:
    manager = filter_of()
    manager.prepare_store(CHAIN, request(1))
    manager.on_request_finished(request(1))
    manager.on_request_finished(request("never seen"))
    assert manager._counted == {}


def test_the_id_of_a_finished_request_counts_anew() -> None:
    manager = filter_of()
    manager.prepare_store(CHAIN, request(1))
    manager.on_request_finished(request(1))
    assert manager.prepare_store(CHAIN, request(1)).indices == (0, 1, 2)


def test_reset_forgets_the_counts() -> None:
    manager = filter_of()
    manager.prepare_store(CHAIN, request(1))
    manager.reset()
    assert manager.prepare_store(CHAIN, request(2)) == NOTHING


def test_a_live_request_counts_again_after_a_reset() -> None:
    manager = filter_of()
    manager.prepare_store(CHAIN, request(1))
    manager.reset()
    assert manager.prepare_store(CHAIN, request(1)) == NOTHING
    assert manager.prepare_store(CHAIN, request(2)).indices == (0, 1, 2)


def test_the_tracker_forgets_what_was_offered_longest_ago() -> None:
    manager = filter_of(max_tracker_size=2)
    for name, key in enumerate([b"a", b"b", b"c"]):
        manager.prepare_store([key], request(name))
    assert {*tracked(manager)} == {b"b", b"c"}
    assert manager.prepare_store([b"a"], request("again")) == NOTHING
    assert manager.prepare_store([b"c"], request("again, too")).indices == (0,)


def test_of_a_chain_longer_than_the_tracker_the_head_is_remembered() -> None:
    """CASES 23: a tail whose head is forgotten could never be stored."""
    manager = filter_of(max_tracker_size=2)
    manager.prepare_store(CHAIN, request(1))
    assert manager.prepare_store(CHAIN, request(2)).indices == (0, 1)


def test_of_a_chain_offered_bit_by_bit_the_head_is_remembered() -> None:
    """CASES 23, as chunked prefill offers it."""
    manager = filter_of(max_tracker_size=2)
    for length in (1, 2, 3):
        manager.prepare_store(CHAIN[:length], request(1))
    assert {*tracked(manager)} == {*CHAIN[:2]}


def offer(manager: ReuseFilter, tenant: str, keys: list[bytes]) -> StoreGrant:
    """One request of a tenant, which ends after its offer."""
    context = ReqContext(request_id=tenant, tenant=tenant)
    grant = manager.prepare_store(keys, context)
    manager.complete_store([keys[index] for index in grant.indices], context)
    manager.on_request_finished(context)
    return grant


def filter_for(
    size: int, *, plain_lru: bool = False, **accounts: AccountTerms
) -> ReuseFilter:
    """Returns a filter before a pool of ten chunks."""
    inner = make_manager(10, accounts=accounts, plain_lru=plain_lru)
    return make_filter(inner, 2, size)


@given(
    size=st.integers(1, 50),
    num_slots=st.integers(1, 50),
    shares=st.lists(st.integers(0, 50), max_size=4),
    limit=st.none() | st.integers(0, 50),
)
def test_a_share_of_the_tracker_follows_that_of_the_pool(
    size: int, num_slots: int, shares: list[int], limit: int | None
) -> None:
    """Shares fit together; each can fill its reservation if the tracker is no smaller
    than the pool.
    """
    unreserved, accounts = num_slots, {}
    for number, share in enumerate(shares):
        reserved = min(share, unreserved)
        unreserved -= reserved
        most = None if limit is None else max(limit, reserved)
        accounts[str(number)] = AccountTerms(reserved, most, 2.0)
    policy = PolicyConfig(accounts, max_protected=0)
    tracked = tracker_policy(policy, num_slots, size).accounts
    assert sum(terms.reserved for terms in tracked.values()) <= size
    for name, terms in tracked.items():
        asked = accounts[name]
        share = asked.reserved * size / num_slots
        assert share - 1 < terms.reserved <= share
        assert size < num_slots or terms.reserved >= asked.reserved
        assert terms.weight == asked.weight
        if asked.limit is None:
            assert terms.limit is None
        else:
            assert terms.limit is not None
            assert terms.reserved <= terms.limit
            assert bool(terms.limit) == bool(asked.limit)
            assert size < num_slots or terms.limit >= asked.limit


def test_what_nobody_reserved_is_borrowed_until_its_owner_offers() -> None:
    """The oldest offers of who borrowed go, not those of who is within its share."""
    manager = filter_for(20, acme=AccountTerms(reserved=5))
    offer(manager, "noisy", make_chain(20, "n"))
    offer(manager, "acme", make_chain(8, "a"))
    offer(manager, "noisy", make_chain(12, "m"))
    assert {*tracked(manager)} == {*make_chain(8, "a"), *make_chain(12, "m")}
    assert offer(manager, "acme", make_chain(8, "a")).indices == tuple(range(8))


def test_above_the_shares_weights_decide_whose_counts_are_forgotten() -> None:
    accounts = {"light": AccountTerms(), "heavy": AccountTerms(weight=3.0)}
    manager = filter_for(40, **accounts)
    for number in range(40):
        for tenant in accounts:
            offer(manager, tenant, make_chain(2, f"{tenant}{number}"))
    held = manager._tracker.resident_by_tenant()
    assert (held["light"], held["heavy"]) == (10, 30)


def test_a_limit_holds_for_the_tracker_too() -> None:
    manager = filter_for(20, acme=AccountTerms(limit=3))
    for number in range(5):
        offer(manager, "acme", make_chain(4, str(number)))
    assert manager._tracker.resident_by_tenant() == {"default": 0, "acme": 6}


def test_a_shared_key_counts_for_all_on_the_account_of_who_offered_it_first() -> None:
    accounts = dict.fromkeys(("acme", "zeta"), AccountTerms(reserved=2))
    manager = filter_for(10, **accounts)
    assert offer(manager, "acme", CHAIN) == NOTHING
    assert offer(manager, "zeta", CHAIN).indices == (0, 1, 2)
    expected = {"default": 0, "acme": 3, "zeta": 0}
    assert manager._tracker.resident_by_tenant() == expected


def test_plain_lru_has_one_tracker_for_all() -> None:
    manager = filter_for(4, plain_lru=True, acme=AccountTerms(reserved=10))
    offer(manager, "acme", make_chain(4, "a"))
    offer(manager, "noisy", make_chain(4, "n"))
    assert {*tracked(manager)} == {*make_chain(4, "n")}


def test_hints_do_not_change_what_is_remembered() -> None:
    """No priority, session or estimate holds on to a place in the tracker."""
    manager = filter_of(max_tracker_size=3)
    hints = Hints(
        session="s", priority=100, ttl_s=9.0, expected_reuse_s=5.0, release=True
    )
    context = ReqContext("1", hints=hints)
    manager.prepare_store(CHAIN, context)
    manager.on_request_finished(context)
    others = make_chain(3, "y")
    manager.prepare_store(others, request(2))
    assert tracked(manager) == dict.fromkeys(others, 1)


def test_a_count_that_was_forgotten_begins_with_the_request_that_offers_again() -> None:
    """1. offers; others make it forgotten; 1. grows; 2. is the second to offer."""
    manager = filter_of(max_tracker_size=3)
    manager.prepare_store(CHAIN[:2], request(1))
    manager.prepare_store(make_chain(3, "y"), request("other"))
    manager.prepare_store(CHAIN, request(1))
    assert tracked(manager) == dict.fromkeys(CHAIN, 1)
    assert manager.prepare_store(CHAIN, request(2)).indices == (0, 1, 2)


@pytest.mark.parametrize("num_tenants", [2, 64])
def test_an_offer_costs_no_more_in_a_larger_tracker(
    num_tenants: int,
) -> None:
    """P8, where every offer makes the tracker forget."""
    works = []
    for size in (200, 20_000):
        terms = AccountTerms(reserved=10 // num_tenants)
        accounts = {str(number): terms for number in range(num_tenants)}
        manager = make_filter(make_manager(10, accounts=accounts), 2, size)
        for number in range(size // 10):
            tenant = str(number % num_tenants)
            offer(manager, tenant, make_chain(10, f"t{number}"))
        new = make_chain(10, "new")
        works.append(count_operations(lambda m=manager, n=new: offer(m, "0", n)))
    assert works[1] <= 1.2 * works[0] + 5


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
    result = getattr(ReuseFilter(inner, 2, 10, PLAIN), name)(*args)
    assert inner.calls == [(name, *args)]
    assert result in (None, f"result of {name}")
    assert (result is None) == (name not in {"lookup", "prepare_load"})


def test_a_store_passes_with_its_context() -> None:
    inner = Recorder()
    manager = ReuseFilter(inner, 1, 10, PLAIN)
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
    manager = ReuseFilter(inner, threshold, 1_000, PLAIN)
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
