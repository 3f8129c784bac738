"""`RunTable` and what uses make of it: runs, sessions, pins and what time does."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import EMPTY_CONTEXT, make_chain
from manager_probe import (
    FakeClock,
    counted,
    make_manager,
    resident_keys,
    store,
)

from vllm_ctx_offload.context import Hints, ReqContext
from vllm_ctx_offload.core import AccountTerms, HostMemoryManager, LookupResult
from vllm_ctx_offload.core.order import MAX_MOVES, RELEASED

CHAIN = make_chain(4)
ACME = {"acme": AccountTerms()}


def session(name: str | None, tenant: str = "default", **hints: Any) -> ReqContext:
    request_id = f"{tenant}/{name}/{sorted(hints.items())}"
    return ReqContext(request_id, tenant=tenant, hints=Hints(session=name, **hints))


def kept(manager: HostMemoryManager) -> dict[bytes, tuple[int, float | None]]:
    """Returns each chunk's priority and estimate."""
    manager.check_invariants()
    return {
        key: (run.priority, run.expected_at)
        for run in manager._table
        for key in run.chunks
    }


def num_runs(manager: HostMemoryManager) -> int:
    return sum(1 for _ in manager._table)


# ---- runs


def test_a_chain_that_is_used_alike_is_one_run_however_often() -> None:
    manager = make_manager(8)
    for length in (1, 2, 4, 3, 4):
        store(manager, CHAIN[:length], EMPTY_CONTEXT)
    assert num_runs(manager) == 1


def test_a_use_of_its_head_leaves_the_tail_as_it_was() -> None:
    manager = make_manager(8)
    store(manager, CHAIN, EMPTY_CONTEXT)
    store(manager, [b"x"], EMPTY_CONTEXT)
    manager.touch(CHAIN[:2], EMPTY_CONTEXT)
    order = [CHAIN[3], CHAIN[2], b"x", CHAIN[1], CHAIN[0]]
    assert resident_keys(manager) == order
    assert num_runs(manager) == 3


def test_a_lookup_finds_a_chain_from_the_middle_of_a_run_on() -> None:
    """As after a local hit; and from a run's end on into the next run."""
    manager = make_manager(8)
    store(manager, CHAIN, EMPTY_CONTEXT)
    manager.touch(CHAIN[:2], EMPTY_CONTEXT)
    for start in range(4):
        found = manager.lookup(CHAIN[start:], EMPTY_CONTEXT)
        assert found == LookupResult(4 - start, pending=False)
    found = manager.lookup([*CHAIN[1:3], b"x"], EMPTY_CONTEXT)
    assert found == LookupResult(2, pending=False)


@pytest.mark.parametrize("doomed", [False, True])
def test_chunks_that_fill_a_hole_take_their_place_in_the_chain(doomed: bool) -> None:
    """CASES 23: also where a chunk before the hole waits to be dropped."""
    manager = make_manager(5)
    store(manager, CHAIN, EMPTY_CONTEXT)
    if doomed:
        manager.prepare_load(CHAIN[:1], EMPTY_CONTEXT)
    manager.remove(CHAIN[:2] if doomed else CHAIN[1:2], EMPTY_CONTEXT)
    store(manager, CHAIN, EMPTY_CONTEXT)
    manager.check_invariants()
    chain = [key for key in resident_keys(manager) if key not in manager._doomed]
    assert chain == [*reversed(CHAIN[1:] if doomed else CHAIN)]


def test_an_emptied_run_is_forgotten() -> None:
    """CASES 27: by eviction, by removal and by a use."""
    manager = make_manager(4)
    store(manager, CHAIN, session("s"))
    manager.touch(CHAIN, session("s"))
    assert num_runs(manager) == 1
    manager.remove(CHAIN[:1], EMPTY_CONTEXT)
    for number in range(4):
        store(manager, [b"x%d" % number], EMPTY_CONTEXT)
    assert num_runs(manager) == 4
    assert manager._table.sessions.by_key == {}
    manager.check_invariants()


# ---- sessions


def test_a_sessions_own_chunks_carry_its_latest_hints() -> None:
    clock = FakeClock()
    manager = make_manager(8, max_protected=8, clock=clock)
    store(manager, [b"a"], session("s", priority=90, ttl_s=50, expected_reuse_s=9))
    assert kept(manager) == {b"a": (90, 9.0)}
    clock.now = 1.0
    manager.touch([b"a"], session("s", priority=40, ttl_s=50, expected_reuse_s=3))
    assert kept(manager) == {b"a": (40, 4.0)}
    manager.touch([b"a"], session("s"))
    assert kept(manager) == {b"a": (40, None)}


@pytest.mark.parametrize("other", [None, "t"])
def test_a_chunk_that_others_use_too_keeps_the_highest_priority(
    other: str | None,
) -> None:
    """Lower wishes are passed over from then on, the first session's too."""
    manager = make_manager(8, max_protected=8)
    store(manager, [b"a"], session("s", priority=60, ttl_s=50, expected_reuse_s=9))
    found = []
    for context in (
        session(other, priority=40, ttl_s=50),
        session("s", priority=20, expected_reuse_s=5),
        session(other, priority=70, ttl_s=1),
        session("s", priority=60, ttl_s=99),
    ):
        manager.touch([b"a"], context)
        found.append(kept(manager)[b"a"])
    assert found == [(60, None), (60, None), (70, None), (70, None)]


def test_another_tenants_use_is_a_use_and_says_nothing() -> None:
    clock = FakeClock()
    manager = make_manager(8, accounts=ACME, max_protected=8, clock=clock)
    store(manager, [b"a"], session("s", priority=50, ttl_s=50))
    store(manager, [b"b"], session("s"))
    clock.now = 5.0
    manager.touch([b"a"], session("s", "acme", priority=90, ttl_s=99))
    assert kept(manager) == {b"a": (50, None), b"b": (35, None)}
    assert resident_keys(manager) == [b"b", b"a"]
    clock.now = 50.0
    manager.touch([b"b"], EMPTY_CONTEXT)
    assert kept(manager)[b"a"] == (35, None)


def test_a_release_demotes_what_the_session_alone_has_used() -> None:
    """A `release` drops nothing, and a chunk that others use ignores it."""
    manager = make_manager(8, max_protected=8)
    context = session("s", priority=90, ttl_s=50, expected_reuse_s=9, release=True)
    store(manager, CHAIN, context)
    manager.touch(CHAIN[:2], session("t"))
    assert {priority for priority, _ in kept(manager).values()} == {90}
    manager.on_request_finished(context)
    assert kept(manager) == {
        **dict.fromkeys(CHAIN[:2], (90, None)),
        **dict.fromkeys(CHAIN[2:], (RELEASED, None)),
    }
    assert manager.lookup(CHAIN, context).num_ready == 4
    assert manager.num_protected == 2


def test_who_uses_what_another_session_stored_can_not_release_it() -> None:
    manager = make_manager(8)
    store(manager, CHAIN, session("s"))
    other = session("t", release=True, expected_reuse_s=5)
    manager.touch(CHAIN, other)
    manager.on_request_finished(other)
    manager.on_request_finished(session("s", release=True))
    assert {*kept(manager).values()} == {(35, None)}


def test_parts_of_a_chain_that_end_at_different_times_are_kept_apart() -> None:
    clock = FakeClock()
    manager = make_manager(8, max_protected=8, clock=clock)
    for length, ttl_s in ((4, 9), (2, 5)):
        context = session("s", priority=90, ttl_s=ttl_s)
        store(manager, CHAIN[:length], context)
    manager.touch(CHAIN, session("s"))
    clock.now = 6.0
    manager.touch([], EMPTY_CONTEXT)
    assert [kept(manager)[key][0] for key in CHAIN] == [35, 35, 90, 90]


def test_a_release_holds_for_what_other_requests_of_the_session_stored() -> None:
    manager = make_manager(8)
    store(manager, CHAIN[:2], session("s"))
    store(manager, [b"x", b"y"], session("s"))
    last = session("s", release=True)
    manager.on_request_finished(last)
    assert {*kept(manager).values()} == {(RELEASED, None)}
    manager.touch(CHAIN[:1], session("s"))
    released = {key for key, (p, _) in kept(manager).items() if p == RELEASED}
    assert released == {CHAIN[1], b"x", b"y"}


@pytest.mark.parametrize("other", ["acme", "default"])
def test_equal_names_of_other_tenants_or_namespaces_are_other_sessions(
    other: str,
) -> None:
    manager = make_manager(8, accounts=ACME)
    store(manager, CHAIN, session("s"))
    hints = Hints(session="s", release=True)
    namespace = b"" if other == "acme" else b"private"
    manager.on_request_finished(
        ReqContext("r", tenant=other, namespace=namespace, hints=hints)
    )
    assert {*kept(manager).values()} == {(35, None)}


@pytest.mark.parametrize("hints", [{"release": True}, {"expected_reuse_s": 9}])
def test_a_request_without_session_that_needs_one_is_its_own(
    hints: dict[str, Any],
) -> None:
    manager = make_manager(8)
    one = ReqContext("one", hints=Hints(**hints))
    two = ReqContext("two", hints=Hints(**hints))
    store(manager, [b"a"], one)
    store(manager, [b"b"], two)
    assert len(manager._table.sessions.by_key) == 2
    manager.on_request_finished(one)
    released = {key for key, (p, _) in kept(manager).items() if p == RELEASED}
    assert released == ({b"a"} if "release" in hints else set())


def test_an_estimate_of_nothing_is_no_estimate() -> None:
    manager = make_manager(8)
    store(manager, [b"a"], session(None, expected_reuse_s=0))
    assert kept(manager) == {b"a": (35, None)}
    assert manager._table.sessions.by_key == {}


def test_a_store_that_ends_after_the_release_stays_released() -> None:
    clock = FakeClock()
    manager = make_manager(8, max_protected=8, clock=clock)
    context = session("s", priority=90, ttl_s=5, release=True)
    manager.prepare_store(CHAIN, context)
    manager.on_request_finished(context)
    clock.now = 1.0
    manager.complete_store(CHAIN, context)
    assert {*kept(manager).values()} == {(RELEASED, None)}
    assert manager.num_protected == 0


def test_requests_that_end_leave_nothing_behind() -> None:
    """CASES 27."""
    manager = make_manager(8)
    for number in range(50):
        hints = Hints(session=str(number), priority=10, release=bool(number % 2))
        context = ReqContext(str(number), hints=hints)
        store(manager, [b"%d" % number], context)
        manager.on_request_finished(context)
    manager.on_request_finished(session("never seen", release=True))
    manager.reset()
    manager.check_invariants()
    assert manager._table.sessions.by_key == manager._policy._segments == {}
    assert (num_runs(manager), len(manager._table.released)) == (0, 0)


# ---- time


def test_an_estimate_that_has_passed_counts_as_none() -> None:
    clock = FakeClock()
    manager = make_manager(8, clock=clock)
    store(manager, [b"a"], session("s", expected_reuse_s=5))
    for clock.now in (4.9, 5.0):
        manager.touch([], EMPTY_CONTEXT)
        is_expected = kept(manager)[b"a"][1] is not None
        assert is_expected == (clock.now < 5.0)


def test_an_estimate_and_a_priority_end_each_at_its_time() -> None:
    clock = FakeClock()
    manager = make_manager(8, max_protected=8, clock=clock)
    store(manager, [b"a"], session("s", priority=90, ttl_s=5, expected_reuse_s=9))
    store(manager, [b"b"], session("t", priority=90, ttl_s=9, expected_reuse_s=5))
    found = []
    for clock.now in (4.0, 5.0, 9.0):
        manager.touch([], EMPTY_CONTEXT)
        found.append((kept(manager)[b"a"], kept(manager)[b"b"]))
    assert found == [
        ((90, 9.0), (90, 5.0)),
        ((35, 9.0), (90, None)),
        ((35, None), (35, None)),
    ]


@pytest.mark.parametrize(
    "hints", [{"priority": 90, "ttl_s": 5}, {"expected_reuse_s": 5}]
)
def test_many_times_that_pass_at_once_end_in_bounded_steps(
    hints: dict[str, Any],
) -> None:
    """A use of many keys ends more, so that no more are made than end."""
    clock, num_chunks = FakeClock(), 4 * MAX_MOVES + 10
    manager = make_manager(num_chunks, max_protected=num_chunks, clock=clock)
    for number in range(num_chunks):
        store(manager, [b"%d" % number], session(str(number), **hints))
    clock.now = 5.0
    left = []
    for num_keys in (0, 2 * MAX_MOVES, 0, 0):
        manager.touch([b"absent"] * num_keys, EMPTY_CONTEXT)
        left.append(sum(value != (35, None) for value in kept(manager).values()))
    assert left == [3 * MAX_MOVES + 10, MAX_MOVES + 10, 10, 0]


def release_many(num_chunks: int) -> HostMemoryManager:
    """Returns a full pool of two tenants; one session of `acme` was just released."""
    manager = make_manager(num_chunks + 9, accounts=ACME)
    for number in range(num_chunks):
        store(manager, [b"acme%d" % number], session("s", "acme"))
    store(manager, make_chain(9), EMPTY_CONTEXT)
    manager.on_request_finished(session("s", "acme", release=True))
    return manager


def released(manager: HostMemoryManager) -> set[bytes]:
    return {key for key, (priority, _) in kept(manager).items() if priority == RELEASED}


def test_a_release_of_much_takes_effect_in_bounded_steps() -> None:
    """With the calls that follow, whoever makes them; once, however often asked for."""
    num_chunks = 4 * MAX_MOVES + 10
    manager = release_many(num_chunks)
    num_released = [len(released(manager))]
    for num_keys in (0, 2 * MAX_MOVES, 0, 0):
        manager.touch([b"absent"] * num_keys, EMPTY_CONTEXT)
        num_released.append(len(released(manager)))
    steps = [num_chunks - 3 * MAX_MOVES - 10, 2 * MAX_MOVES, 4 * MAX_MOVES]
    assert num_released == [*steps, num_chunks, num_chunks]
    manager.on_request_finished(session("s", "acme", release=True))
    assert (
        manager._table.sessions.releasing == type(manager._table.sessions.releasing)()
    )


def test_a_store_finds_as_many_released_chunks_as_it_needs() -> None:
    num_chunks = 6 * MAX_MOVES
    manager = release_many(num_chunks)
    chain = make_chain(num_chunks, "new")
    assert store(manager, chain, EMPTY_CONTEXT) == chain
    assert manager.resident_by_tenant() == {"default": num_chunks + 9, "acme": 0}
    assert counted(manager) == {'["evicted_chunks", "acme", "default"]': num_chunks}


def test_what_is_used_again_before_its_release_took_effect_is_not_released() -> None:
    """It has the default priority again, as if the release had come to it."""
    num_chunks = 3 * MAX_MOVES
    manager = make_manager(num_chunks, max_protected=num_chunks)
    chain = [b"%d" % number for number in range(num_chunks)]
    for key in chain:
        store(manager, [key], session("s", priority=90))
    manager.on_request_finished(session("s", release=True))
    pending = next(key for key in chain if key not in released(manager))
    manager.touch([pending], session("s"))
    assert kept(manager)[pending] == (35, None)
    for _ in range(3):
        manager.touch([], EMPTY_CONTEXT)
    assert released(manager) == {*chain} - {pending}
    manager.on_request_finished(session("s", release=True))
    assert released(manager) == {*chain}


# ---- resets


@pytest.mark.parametrize("num_chunks", [3, 3 * MAX_MOVES])
def test_what_a_reset_forgot_is_let_go_of_with_the_uses_that_follow(
    num_chunks: int,
) -> None:
    """CASES 27: nothing of it is left in the end, and two resets are no other."""
    manager = make_manager(2 * num_chunks, max_protected=num_chunks)
    for _ in range(2):
        for number in range(num_chunks):
            context = session(str(number % 3), priority=90, ttl_s=9, expected_reuse_s=9)
            store(manager, [b"%d" % number], context)
        manager.reset()
        assert kept(manager) == {}
        assert (manager.num_resident, manager.num_protected) == (0, 0)
    assert manager._table._forgotten
    for _ in range(2 * 256):
        manager.touch([], EMPTY_CONTEXT)
    assert not manager._table._forgotten
    assert not manager._forgotten


def test_what_is_pinned_outlives_a_reset_on_its_account_and_protects_nothing() -> None:
    manager = make_manager(8, accounts=ACME, max_protected=8)
    context = session("s", "acme", priority=90)
    store(manager, CHAIN, context)
    manager.prepare_load(CHAIN[1:3], context)
    manager.prepare_store([b"x"], EMPTY_CONTEXT)
    manager.reset()
    assert kept(manager) == dict.fromkeys([*CHAIN[1:3], b"x"], (35, None))
    assert manager.resident_by_tenant() == {"default": 1, "acme": 2}
    assert manager.num_protected == 0
    manager.on_request_finished(session("s", "acme", release=True))
    assert released(manager) == set()
    manager.complete_load(CHAIN[1:3], context)
    manager.complete_store([b"x"], EMPTY_CONTEXT)
    assert (kept(manager), manager.num_resident) == ({}, 0)
