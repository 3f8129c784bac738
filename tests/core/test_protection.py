"""P4: how much priorities protect, for how long, and what happens to the rest."""

from __future__ import annotations

from typing import Any

import pytest
from core.chain_lru import StampLru
from core.strategies import CHAINS
from helpers import EMPTY_CONTEXT, make_chain
from hypothesis import given, settings
from hypothesis import strategies as st
from manager_probe import FakeClock, counted, make_manager, resident_keys, store

from vllm_ctx_offload.context import Hints, ReqContext, RetentionDirective
from vllm_ctx_offload.core import AccountTerms, HostMemoryManager, StoreGrant
from vllm_ctx_offload.core.order import RELEASED

OVER_BUDGET = '["hints_rejected", "priority", "budget"]'
RAISED = ReqContext(request_id="raised", hints=Hints(priority=90, ttl_s=100))


def priorities(manager: HostMemoryManager) -> dict[bytes, int]:
    return {key: run.priority for run in manager._table for key in run.chunks}


def fill(manager: HostMemoryManager, num_chunks: int) -> None:
    for index in range(num_chunks):
        store(manager, [f"fill{index}".encode()], EMPTY_CONTEXT)


@settings(deadline=None, max_examples=200)
@given(
    num_slots=st.integers(0, 12),
    max_protected=st.integers(0, 12),
    uses=st.lists(
        st.tuples(CHAINS, st.sampled_from([None, "s", "t"]), st.integers(0, 12)),
        max_size=30,
    ),
)
def test_if_all_ask_for_the_most_it_is_exactly_lru(
    num_slots: int, max_protected: int, uses: list[tuple[Any, ...]]
) -> None:
    """CASES 41: nothing is refused that an LRU stores, and its victims go."""
    clock = FakeClock()
    manager = make_manager(num_slots, max_protected=max_protected, clock=clock)
    lru = StampLru(num_slots)
    for index, (chain, session, seconds) in enumerate(uses):
        clock.now += seconds
        hints = Hints(session=session, priority=100, ttl_s=20)
        store(manager, chain, ReqContext(request_id=str(index), hints=hints))
        lru.store(chain)
        manager.check_invariants()
        assert manager.num_protected <= max_protected
        assert {*resident_keys(manager)} == {*lru.stamps}


def test_protected_chunks_stay_while_others_come_and_go() -> None:
    manager = make_manager(8, max_protected=3)
    chain = make_chain(3)
    store(manager, chain, RAISED)
    fill(manager, 20)
    assert manager.lookup(chain, EMPTY_CONTEXT).num_ready == 3


def test_what_exceeds_the_budget_is_demoted_from_the_tail_and_counted() -> None:
    """The parts split off one chain keep its order: its tail goes first."""
    manager = make_manager(8, max_protected=3)
    first, second = make_chain(4, "x"), make_chain(2, "y")
    store(manager, first, RAISED)
    assert priorities(manager) == dict(zip(first, [90, 90, 90, 35], strict=True))
    store(manager, second, RAISED)
    assert priorities(manager) == {
        **dict(zip(first, [90, 35, 35, 35], strict=True)),
        **dict.fromkeys(second, 90),
    }
    assert counted(manager) == {OVER_BUDGET: 2}
    fill(manager, 4)
    assert {*first, *second} - {*resident_keys(manager)} == {first[2], first[3]}
    manager.check_invariants()


def test_parts_split_off_while_an_estimate_lies_ahead_keep_their_order() -> None:
    manager = make_manager(6, max_protected=6)
    chain = make_chain(4, "x")
    hints = Hints(session="s", priority=90, ttl_s=100, expected_reuse_s=50)
    store(manager, chain, ReqContext(request_id="1", hints=hints))
    for index in range(3):  # each takes a chunk of the budget away
        manager._table._max_protected = 3 - index
        store(manager, [b"%d" % index], EMPTY_CONTEXT)
        manager.check_invariants()
    fill(manager, 1)
    assert manager.lookup(chain, EMPTY_CONTEXT).num_ready == 2


def test_a_budget_of_nothing_protects_nothing() -> None:
    manager = make_manager(4, max_protected=0)
    store(manager, make_chain(3), RAISED)
    assert manager.num_protected == 0
    fill(manager, 4)
    assert not {*make_chain(3)} & {*resident_keys(manager)}


def test_the_account_that_protects_most_for_its_weight_pays() -> None:
    """Chunk by chunk: at weights 1 and 3 the budget of 8 is shared 2 to 6."""
    accounts = {"light": AccountTerms(), "heavy": AccountTerms(weight=3.0)}
    manager = make_manager(40, accounts=accounts, max_protected=8)
    for tenant in ("light", "heavy", "light"):
        hints = Hints(priority=90, ttl_s=100)
        context = ReqContext(request_id=tenant, tenant=tenant, hints=hints)
        store(manager, make_chain(10, tenant), context)
    protected = {a.name: a.protected for a in manager._table.accounts}
    assert protected == {"default": 0, "light": 2, "heavy": 6}
    manager.check_invariants()


def test_the_lowest_priority_is_given_up_first() -> None:
    manager = make_manager(20, max_protected=4)
    low = ReqContext(request_id="low", hints=Hints(priority=50, ttl_s=100))
    store(manager, make_chain(3, "old"), RAISED)
    store(manager, make_chain(3, "low"), low)
    kept = {key for key, priority in priorities(manager).items() if priority > 35}
    assert kept == {*make_chain(3, "old"), make_chain(3, "low")[0]}


def test_an_estimate_that_has_passed_does_not_spare_a_chunk_from_the_budget() -> None:
    clock = FakeClock()
    manager = make_manager(20, max_protected=2, clock=clock)
    hints = Hints(session="s", priority=90, ttl_s=100, expected_reuse_s=5)
    store(manager, [b"old"], ReqContext(request_id="1", hints=hints))
    clock.now = 6.0
    store(manager, [b"new"], RAISED)
    store(manager, [b"newer"], RAISED)
    assert priorities(manager) == {b"old": 35, b"new": 90, b"newer": 90}


def test_the_time_counts_from_when_the_chunk_became_readable() -> None:
    clock = FakeClock()
    manager = make_manager(4, max_protected=4, clock=clock)
    context = ReqContext(request_id="1", hints=Hints(priority=90, ttl_s=10))
    manager.prepare_store([b"a"], context)
    clock.now = 8.0
    manager.complete_store([b"a"], context)
    clock.now = 17.9
    manager.touch([b"x"], EMPTY_CONTEXT)
    assert manager.num_protected == 1
    clock.now = 18.0
    manager.touch([b"x"], EMPTY_CONTEXT)
    assert manager.num_protected == 0


def ends_at(manager: HostMemoryManager) -> dict[bytes, float | None]:
    return {key: run.expires_at for run in manager._table for key in run.chunks}


def asks(name: str, priority: int, ttl_s: float | None, **hints: Any) -> ReqContext:
    return ReqContext(name, hints=Hints(priority=priority, ttl_s=ttl_s, **hints))


def test_a_store_that_takes_longer_than_the_priority_holds_does_not_end_it() -> None:
    clock = FakeClock()
    manager = make_manager(4, max_protected=4, clock=clock)
    context = asks("1", 90, 10)
    manager.prepare_store([b"a"], context)
    clock.now = 50.0
    manager.touch([b"x"], EMPTY_CONTEXT)
    assert manager.num_protected == 1
    manager.complete_store([b"a"], context)
    manager.touch([b"x"], EMPTY_CONTEXT)
    assert (priorities(manager), ends_at(manager)) == ({b"a": 90}, {b"a": 60.0})


@pytest.mark.parametrize(
    ("other", "priority", "ends"),
    [
        (EMPTY_CONTEXT, 80, 110.0),  # it asks for nothing
        (asks("2", 50, 99), 80, 110.0),
        (asks("2", 80, 5), 80, 110.0),
        (asks("2", 80, 30), 80, 130.0),
        (asks("2", 90, 5), 90, 105.0),
        (asks("2", 90, None), 90, None),
        (asks("2", 35, 99, session="t"), 80, 110.0),
    ],
)
def test_a_use_while_the_store_is_under_way_keeps_the_time_from_starting(
    other: ReqContext, priority: int, ends: float | None
) -> None:
    """What holds longer wins by what was asked for: neither's time has begun."""
    clock = FakeClock()
    manager = make_manager(4, max_protected=4, clock=clock)
    first = asks("1", 80, 10, session="s")
    manager.prepare_store([b"a"], first)
    clock.now = 40.0
    manager.prepare_store([b"a"], other)
    manager.touch([b"a"], other)
    clock.now = 100.0
    manager.complete_store([b"a"], first)
    manager.touch([b"x"], EMPTY_CONTEXT)
    assert (priorities(manager), ends_at(manager)) == ({b"a": priority}, {b"a": ends})


def test_what_is_asked_for_a_chunk_that_is_being_stored_counts_from_its_end() -> None:
    """Though the request that stores it asked for nothing."""
    clock = FakeClock()
    manager = make_manager(4, max_protected=4, clock=clock)
    manager.prepare_store([b"a"], EMPTY_CONTEXT)
    manager.touch([b"a"], asks("2", 90, 10))
    clock.now = 100.0
    manager.complete_store([b"a"], EMPTY_CONTEXT)
    assert (priorities(manager), ends_at(manager)) == ({b"a": 90}, {b"a": 110.0})


def test_of_chunks_used_together_each_counts_from_its_own_store() -> None:
    """Two stores of one chain end at different times; a third is still under way."""
    clock = FakeClock()
    manager = make_manager(8, max_protected=8, clock=clock)
    chain, context = make_chain(6), asks("1", 90, 10)
    for length in (2, 4, 6):
        manager.prepare_store(chain[:length], context)
    for now, first in ((1.0, 2), (3.0, 0)):
        clock.now = now
        manager.complete_store(chain[first : first + 2], context)
    ends = [13.0, 13.0, 11.0, 11.0, None, None]
    assert ends_at(manager) == dict(zip(chain, ends, strict=True))
    manager.check_invariants()
    assert resident_keys(manager) == chain[::-1]  # the tail would still go first


def test_parts_of_a_store_that_end_apart_keep_their_order_when_they_are_cut() -> None:
    """The budget cuts what was cut before."""
    manager = make_manager(12, max_protected=12)
    chain, context = make_chain(6), asks("1", 90, 10)
    manager.prepare_store(chain, context)
    for done in (chain[1:2], chain[3:5], chain[:1], chain[2:3], chain[5:]):
        manager.complete_store(done, context)
    for most in range(5, -1, -1):
        manager._table._max_protected = most
        manager.touch([b"x"], EMPTY_CONTEXT)
        kept = {key for key, priority in priorities(manager).items() if priority == 90}
        assert kept == {*chain[:most]}
        manager.check_invariants()
    assert resident_keys(manager) == chain[::-1]


def test_a_session_that_ends_while_its_store_is_under_way_releases_it() -> None:
    manager = make_manager(2, max_protected=2)
    context = asks("1", 90, 10, session="s", release=True)
    manager.prepare_store([b"a"], context)
    manager.on_request_finished(context)
    manager.complete_store([b"a"], context)
    assert (priorities(manager), ends_at(manager)) == ({b"a": RELEASED}, {b"a": None})


def test_what_is_being_stored_counts_in_the_budget() -> None:
    manager = make_manager(8, max_protected=2)
    context = asks("1", 90, 10)
    manager.prepare_store(make_chain(4), context)
    assert manager.num_protected == 2
    manager.complete_store(make_chain(4), context)
    assert [*priorities(manager).values()].count(90) == 2


def test_a_priority_that_has_ended_gives_its_budget_back() -> None:
    """Before anything else is demoted, and whatever call comes next."""
    clock = FakeClock()
    manager = make_manager(8, max_protected=2, clock=clock)
    store(manager, make_chain(2, "x"), RAISED)
    clock.now = 100.0
    manager.touch(make_chain(2, "x"), EMPTY_CONTEXT)
    store(manager, make_chain(2, "y"), RAISED)
    assert manager.num_protected == 2
    assert counted(manager) == {}


def test_a_low_priority_ends_too_and_is_the_default_again() -> None:
    clock = FakeClock()
    manager = make_manager(8, clock=clock)
    low = ReqContext(request_id="1", hints=Hints(priority=5, ttl_s=10))
    store(manager, [b"low"], low)
    store(manager, [b"stays"], ReqContext(request_id="2", hints=Hints(priority=5)))
    clock.now = 1e6
    manager.touch([b"x"], EMPTY_CONTEXT)
    assert priorities(manager) == {b"low": 35, b"stays": 5}


def test_a_shared_chunk_keeps_the_priority_that_holds_longer() -> None:
    """Another session's equal priority does not end it sooner."""
    clock = FakeClock()
    manager = make_manager(8, max_protected=8, clock=clock)
    for session, ttl_s in (("s", 100), ("t", 10), ("u", 50)):
        hints = Hints(session=session, priority=80, ttl_s=ttl_s)
        store(manager, [b"a"], ReqContext(request_id=session, hints=hints))
    clock.now = 60.0
    manager.touch([b"x"], EMPTY_CONTEXT)
    assert priorities(manager) == {b"a": 80}


def test_a_tenants_own_chunks_give_way_to_no_lower_priority() -> None:
    manager = make_manager(4, max_protected=4)
    store(manager, make_chain(4), RAISED)
    grant = manager.prepare_store([b"new"], EMPTY_CONTEXT)
    assert grant == StoreGrant((), (), 1, "priority")


def test_a_low_tail_does_not_stop_its_high_head() -> None:
    """A store is cut from its tail; each part has the priority that it asked for."""
    manager = make_manager(4, max_protected=2)
    fill(manager, 4)
    directives = (RetentionDirective(0, 2, 90, 100), RetentionDirective(2, 9, 10, None))
    hints = Hints(retention_directives=directives)
    context = ReqContext(request_id="1", hints=hints)
    grant = manager.prepare_store(make_chain(4), context)
    assert (grant.indices, grant.num_rejected, grant.reason) == ((0, 1), 2, "priority")
