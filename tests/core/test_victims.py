"""`RoomMaker`: who gives way to a store, and why nobody does."""

from __future__ import annotations

import pytest
from helpers import EMPTY_CONTEXT, make_chain
from manager_probe import FakeClock, counted, make_manager, resident_keys, store
from pytest_mock import MockerFixture

from vllm_ctx_offload.context import Hints, ReqContext
from vllm_ctx_offload.core import AccountTerms, HostMemoryManager, StoreGrant
from vllm_ctx_offload.core.tenants import Accounts

ACME = ReqContext(request_id="acme", tenant="acme")
ZETA = ReqContext(request_id="zeta", tenant="zeta")


def singles(manager: HostMemoryManager, *names: str, context: ReqContext) -> None:
    """Stores chains of one chunk, the first of them the least recently used."""
    for name in names:
        store(manager, [name.encode()], context)


def hold(manager: HostMemoryManager, *names: str) -> None:
    manager.prepare_load([name.encode() for name in names], EMPTY_CONTEXT)


def refusal(manager: HostMemoryManager, context: ReqContext) -> str | None:
    """Returns why a new chunk finds no place."""
    grant = manager.prepare_store([b"new"], context)
    assert (grant.indices, grant.num_rejected) == ((), 1)
    manager.check_invariants()
    return grant.reason


# ---- each reason of a refusal


def test_full_is_said_where_transfers_hold_on_to_all_that_could_go() -> None:
    manager = make_manager(2)
    singles(manager, "a", "b", context=EMPTY_CONTEXT)
    hold(manager, "a", "b")
    assert refusal(manager, EMPTY_CONTEXT) == "full"


def test_full_is_said_where_nobody_is_above_and_nothing_is_ones_own() -> None:
    manager = make_manager(2, accounts={"acme": AccountTerms(reserved=2)})
    singles(manager, "a", "b", context=ACME)
    assert refusal(manager, EMPTY_CONTEXT) == "full"


def test_full_is_said_where_all_payers_in_turn_are_pinned() -> None:
    accounts = {"acme": AccountTerms(), "zeta": AccountTerms()}
    manager = make_manager(6, accounts=accounts)
    singles(manager, "a", "b", "c", context=ACME)
    singles(manager, "x", "y", context=ZETA)
    singles(manager, "d", context=EMPTY_CONTEXT)
    hold(manager, "a", "b", "c", "x", "y", "d")
    for context in (ACME, ZETA, EMPTY_CONTEXT):
        assert refusal(manager, context) == "full"


def test_full_is_said_where_a_store_is_cut_at_its_own_chain() -> None:
    manager = make_manager(3)
    store(manager, make_chain(3), EMPTY_CONTEXT)
    grant = manager.prepare_store(make_chain(5), EMPTY_CONTEXT)
    assert grant == StoreGrant((), (), 2, "full")


def test_limit_is_said_where_a_tenant_at_its_limit_has_nothing_to_give() -> None:
    """Though half of the pool is free."""
    manager = make_manager(8, accounts={"acme": AccountTerms(limit=2)})
    singles(manager, "a", "b", context=ACME)
    hold(manager, "a", "b")
    assert refusal(manager, ACME) == "limit"


def test_limit_is_said_of_a_tenant_that_may_hold_nothing() -> None:
    manager = make_manager(8, accounts={"acme": AccountTerms(limit=0)})
    assert refusal(manager, ACME) == "limit"


@pytest.mark.parametrize("limit", [None, 2])
def test_priority_is_said_where_all_that_could_go_has_a_higher_one(
    limit: int | None,
) -> None:
    accounts = {"acme": AccountTerms(limit=limit)}
    manager = make_manager(2, accounts=accounts, max_protected=2)
    raised = ReqContext("1", tenant="acme", hints=Hints(priority=36, ttl_s=9))
    singles(manager, "a", "b", context=raised)
    assert refusal(manager, ACME) == "priority"
    assert store(manager, [b"equal"], raised) == [b"equal"]


def test_the_base_priority_of_a_tenant_is_what_its_stores_have() -> None:
    manager = make_manager(1, accounts={"acme": AccountTerms(base_priority=10)})
    low = ReqContext("1", tenant="acme", hints=Hints(priority=5))
    store(manager, [b"a"], ACME)
    assert refusal(manager, low) == "priority"
    assert store(manager, [b"b"], ACME) == [b"b"]


def test_expected_reuse_is_said_where_all_that_could_go_is_expected_sooner() -> None:
    clock = FakeClock()
    manager = make_manager(2, clock=clock)
    soon = ReqContext("1", hints=Hints(session="s", expected_reuse_s=10))
    singles(manager, "a", "b", context=soon)
    late = ReqContext("2", hints=Hints(session="t", expected_reuse_s=11))
    assert refusal(manager, late) == "expected_reuse"
    as_late = ReqContext("3", hints=Hints(session="u", expected_reuse_s=10))
    assert store(manager, [b"c"], as_late) == [b"c"]


def test_a_chunk_without_estimate_is_expected_after_as_long_as_it_was_unused() -> None:
    clock = FakeClock()
    manager = make_manager(1, clock=clock)
    store(manager, [b"a"], EMPTY_CONTEXT)
    context = ReqContext("1", hints=Hints(session="s", expected_reuse_s=10))
    clock.now = 9.9
    assert refusal(manager, context) == "expected_reuse"
    clock.now = 10.0
    assert store(manager, [b"b"], context) == [b"b"]


def test_the_reason_is_why_the_rest_found_no_place() -> None:
    """One chunk could go, then there is a higher priority."""
    manager = make_manager(3, max_protected=2)
    raised = ReqContext("1", hints=Hints(priority=90, ttl_s=9))
    singles(manager, "a", "b", context=raised)
    singles(manager, "c", context=EMPTY_CONTEXT)
    grant = manager.prepare_store(make_chain(2, "x"), EMPTY_CONTEXT)
    assert grant == StoreGrant((0,), (2,), 1, "priority")


def test_a_pinned_chunk_says_nothing_about_why() -> None:
    """It could not go at any priority."""
    manager = make_manager(2, max_protected=2)
    raised = ReqContext("1", hints=Hints(priority=90, ttl_s=9))
    singles(manager, "a", "b", context=raised)
    hold(manager, "a", "b")
    assert refusal(manager, EMPTY_CONTEXT) == "full"


# ---- who pays


def test_free_slots_come_first() -> None:
    manager = make_manager(4)
    singles(manager, "a", "b", context=EMPTY_CONTEXT)
    assert store(manager, make_chain(2, "x"), EMPTY_CONTEXT) == make_chain(2, "x")
    assert counted(manager) == {}


def test_released_chunks_go_first_whoever_has_them_until_they_are_used_again() -> None:
    accounts = {"acme": AccountTerms(reserved=4)}
    manager = make_manager(6, accounts=accounts)
    release = Hints(session="s", release=True)
    context = ReqContext("1", tenant="acme", hints=release)
    chain = make_chain(4, "acme")
    store(manager, chain, context)
    manager.on_request_finished(context)
    singles(manager, "a", "b", "c", "d", context=EMPTY_CONTEXT)
    assert {*resident_keys(manager)} == {*chain[:2], b"a", b"b", b"c", b"d"}
    manager.touch(chain, ACME)
    singles(manager, "e", context=EMPTY_CONTEXT)
    assert {*resident_keys(manager)} == {*chain[:2], b"b", b"c", b"d", b"e"}
    manager.check_invariants()


def test_pinned_chunks_of_a_released_session_are_passed_over() -> None:
    manager = make_manager(3)
    context = ReqContext("1", hints=Hints(release=True))
    singles(manager, "a", "b", context=context)
    hold(manager, "a")
    manager.on_request_finished(context)
    singles(manager, "c", "d", context=EMPTY_CONTEXT)
    assert {*resident_keys(manager)} == {b"a", b"c", b"d"}


@pytest.mark.parametrize(
    ("context", "victim"),
    [(ACME, b"a"), (ZETA, b"a"), (EMPTY_CONTEXT, b"a")],
    ids=["the furthest itself", "the next", "the last"],
)
def test_the_furthest_above_its_reservation_pays(
    context: ReqContext, victim: bytes
) -> None:
    accounts = {"acme": AccountTerms(), "zeta": AccountTerms(reserved=2)}
    manager = make_manager(8, accounts=accounts)
    singles(manager, "x", "y", "z", context=ZETA)
    singles(manager, "d", context=EMPTY_CONTEXT)
    singles(manager, "a", "b", "c", "e", context=ACME)
    store(manager, [b"new"], context)
    assert victim not in resident_keys(manager)
    assert counted(manager) == {f'["evicted_chunks", "acme", "{context.tenant}"]': 1}


def test_of_two_as_far_above_the_storing_one_pays() -> None:
    manager = make_manager(4, accounts={"acme": AccountTerms()})
    singles(manager, "a", "b", context=ACME)
    singles(manager, "x", "y", context=EMPTY_CONTEXT)
    store(manager, [b"new"], EMPTY_CONTEXT)
    assert {*resident_keys(manager)} == {b"a", b"b", b"y", b"new"}


def test_what_a_wrong_choice_takes_of_a_reservation_is_counted(
    mocker: MockerFixture,
) -> None:
    accounts = {"acme": AccountTerms(reserved=3), "zeta": AccountTerms(reserved=1)}
    manager = make_manager(4, accounts=accounts)
    singles(manager, "a", "b", "c", context=ACME)
    singles(manager, "d", context=EMPTY_CONTEXT)
    mocker.patch.object(Accounts, "furthest_above", lambda self: self.get("acme"))
    store(manager, [b"new"], ZETA)
    assert counted(manager) == {
        '["evicted_chunks", "acme", "zeta"]': 1,
        '["reservation_breaches", "acme"]': 1,
    }


def test_where_nobody_is_above_a_tenant_pays_itself() -> None:
    accounts = {"acme": AccountTerms(reserved=2), "zeta": AccountTerms(reserved=2)}
    manager = make_manager(4, accounts=accounts)
    singles(manager, "a", "b", context=ACME)
    singles(manager, "x", "y", context=ZETA)
    store(manager, [b"new"], ACME)
    assert {*resident_keys(manager)} == {b"b", b"new", b"x", b"y"}


def test_one_store_is_paid_chunk_by_chunk_by_whoever_is_furthest_then() -> None:
    """At 6, 3 and 0: three of the first; at 3 each the storing one has none to give."""
    accounts = {"acme": AccountTerms(), "zeta": AccountTerms()}
    manager = make_manager(9, accounts=accounts)
    singles(manager, *"abcdef", context=ACME)
    singles(manager, *"xyz", context=ZETA)
    store(manager, make_chain(4, "new"), EMPTY_CONTEXT)
    assert manager.resident_by_tenant() == {"default": 4, "acme": 2, "zeta": 3}


def test_one_store_takes_no_more_than_makes_the_two_equal() -> None:
    """At 5 and 1: two of the furthest, then one of the storing tenant's own."""
    manager = make_manager(6, accounts={"acme": AccountTerms()})
    singles(manager, "x", context=EMPTY_CONTEXT)
    chain, new = make_chain(5, "acme"), make_chain(3, "new")
    store(manager, chain, ACME)
    store(manager, new, EMPTY_CONTEXT)
    assert {*resident_keys(manager)} == {*chain[:3], *new}


def test_a_payer_that_was_pinned_pays_again_once_it_is_not() -> None:
    accounts = {"acme": AccountTerms(), "zeta": AccountTerms()}
    manager = make_manager(5, accounts=accounts)
    singles(manager, "a", "b", "c", context=ACME)
    singles(manager, "x", "y", context=ZETA)
    hold(manager, "a", "b", "c")
    singles(manager, "new", context=EMPTY_CONTEXT)
    manager.complete_load([b"a", b"b", b"c"], EMPTY_CONTEXT)
    singles(manager, "newer", context=EMPTY_CONTEXT)
    assert {*resident_keys(manager)} == {b"b", b"c", b"y", b"new", b"newer"}


def test_the_next_pays_where_the_furthest_is_pinned() -> None:
    accounts = {"acme": AccountTerms(), "zeta": AccountTerms()}
    manager = make_manager(6, accounts=accounts)
    singles(manager, "a", "b", "c", context=ACME)
    singles(manager, "x", "y", context=ZETA)
    singles(manager, "d", context=EMPTY_CONTEXT)
    hold(manager, "a", "b", "c")
    singles(manager, "new", context=ACME)  # its own are held: zeta pays
    assert {*resident_keys(manager)} >= {b"a", b"b", b"c", b"d", b"y", b"new"}
    manager.complete_load([b"a", b"b", b"c"], EMPTY_CONTEXT)
    singles(manager, "newer", context=ZETA)  # and is the furthest again
    assert {*resident_keys(manager)} == {b"b", b"c", b"d", b"y", b"new", b"newer"}
    manager.check_invariants()


def test_the_next_pays_where_all_but_the_stores_own_chain_is_pinned() -> None:
    """The walk over a tenant's own runs finds nothing; its chain is not a victim."""
    manager = make_manager(5, accounts={"acme": AccountTerms()})
    chain = make_chain(4)
    store(manager, chain[:2], ACME)
    singles(manager, "a", "b", context=ACME)
    singles(manager, "d", context=EMPTY_CONTEXT)
    hold(manager, "a", "b")
    grant = manager.prepare_store(chain, ACME)
    assert (grant.indices, grant.num_rejected, grant.reason) == ((2,), 1, "full")


def test_pinned_chunks_in_the_middle_of_a_run_keep_their_place() -> None:
    manager = make_manager(5)
    chain = make_chain(5)
    store(manager, chain, EMPTY_CONTEXT)
    manager.prepare_load(chain[2:4], EMPTY_CONTEXT)
    store(manager, make_chain(2, "x"), EMPTY_CONTEXT)
    manager.check_invariants()
    left = [key for key in resident_keys(manager) if key in chain]
    assert left == [chain[3], chain[2], chain[0]]
