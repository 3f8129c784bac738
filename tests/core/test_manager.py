"""The life cycle of chunks; every test runs bare, in a reuse filter, as plain LRU."""

from __future__ import annotations

import pytest
from helpers import EMPTY_CONTEXT, make_chain
from manager_probe import (
    KINDS,
    LOOKUP_MISS,
    Checked,
    chunk_states,
    make_checked,
    resident_keys,
    snapshot,
)

from vllm_ctx_offload.context import ReqContext
from vllm_ctx_offload.core import ChunkState, LookupResult, StoreGrant

CHAIN = make_chain(3)
ACME = ReqContext(request_id="1", tenant="acme")
ZETA = ReqContext(request_id="2", tenant="zeta")


def fill(manager: Checked, num_chunks: int = 8) -> list[bytes]:
    """Stores single-chunk chains, the first of them the least recently used."""
    keys = [f"fill{index}".encode() for index in range(num_chunks)]
    for key in keys:
        manager.store([key], EMPTY_CONTEXT)
    return keys


def test_an_empty_manager_finds_nothing(manager: Checked) -> None:
    assert manager.lookup(CHAIN, EMPTY_CONTEXT) == LOOKUP_MISS


@pytest.mark.parametrize("num_keys", [0, 3])
def test_lookup_changes_nothing(manager: Checked, num_keys: int) -> None:
    """CASES 39: nor does it count, so a repeated lookup can't count twice."""
    manager.store(CHAIN, EMPTY_CONTEXT)
    before = snapshot(manager.inner)
    found = [manager.lookup(CHAIN[:num_keys], EMPTY_CONTEXT) for _ in range(3)]
    assert found == [LookupResult(num_keys, pending=False)] * 3
    assert snapshot(manager.inner) == before


def test_no_keys_are_neither_found_nor_pending(manager: Checked) -> None:
    """CASES 11: an empty rest of a chain is 0 chunks, never less."""
    assert manager.lookup([], EMPTY_CONTEXT) == LOOKUP_MISS
    assert manager.prepare_load([], EMPTY_CONTEXT) == ()
    assert manager.prepare_store([], EMPTY_CONTEXT) == StoreGrant((), (), 0)


def test_a_chunk_being_stored_is_pending_and_then_ready(manager: Checked) -> None:
    grant = manager.prepare_store(CHAIN, ACME)
    assert grant == StoreGrant((0, 1, 2), (0, 1, 2), 0)
    assert manager.lookup(CHAIN, ACME) == LookupResult(0, pending=True)
    manager.complete_store(CHAIN[:2], ACME)
    assert manager.lookup(CHAIN, ACME) == LookupResult(2, pending=True)
    manager.complete_store(CHAIN[2:], ACME)
    assert manager.lookup([*CHAIN, b"x"], ACME) == LookupResult(3, pending=False)


def test_lookup_ends_at_the_first_gap(manager: Checked) -> None:
    manager.store(CHAIN, EMPTY_CONTEXT)
    manager.remove([CHAIN[1]], EMPTY_CONTEXT)
    assert manager.lookup(CHAIN, EMPTY_CONTEXT) == LookupResult(1, pending=False)


def test_a_failed_store_leaves_no_trace(manager: Checked) -> None:
    manager.prepare_store(CHAIN, EMPTY_CONTEXT)
    manager.complete_store(CHAIN, EMPTY_CONTEXT, success=False)
    assert manager.lookup(CHAIN, EMPTY_CONTEXT) == LOOKUP_MISS
    assert (chunk_states(manager.inner), manager.inner.num_pinned) == ([], 0)
    assert manager.store(CHAIN, EMPTY_CONTEXT) == CHAIN


def test_resident_and_pending_chunks_are_not_granted_again(manager: Checked) -> None:
    manager.store(CHAIN[:1], ACME)
    manager.prepare_store(CHAIN[:2], ACME)
    assert manager.prepare_store(CHAIN, ZETA) == StoreGrant((2,), (2,), 0)
    assert chunk_states(manager.inner) == [
        ChunkState(CHAIN[2], 2, "zeta", pins=1, ready=False, doomed=False),
        ChunkState(CHAIN[1], 1, "acme", pins=1, ready=False, doomed=False),
        ChunkState(CHAIN[0], 0, "acme", pins=0, ready=True, doomed=False),
    ]


def test_what_finds_no_place_is_cut_from_the_tail(manager: Checked) -> None:
    long_chain = make_chain(11)
    grant = manager.prepare_store(long_chain, EMPTY_CONTEXT)
    assert grant == StoreGrant(tuple(range(8)), tuple(range(8)), 3, "full")


def test_holes_are_neither_granted_nor_rejected(manager: Checked) -> None:
    grant = manager.prepare_store(CHAIN, EMPTY_CONTEXT, holes={1})
    assert grant == StoreGrant((0, 2), (0, 1), 0)
    manager.complete_store([CHAIN[0], CHAIN[2]], EMPTY_CONTEXT)
    assert manager.prepare_store(CHAIN, EMPTY_CONTEXT, holes={0, 2}).indices == (1,)


def test_loads_return_the_slots_that_the_store_was_given(manager: Checked) -> None:
    fill(manager, 3)
    grant = manager.prepare_store(CHAIN, EMPTY_CONTEXT)
    manager.complete_store(CHAIN, EMPTY_CONTEXT)
    assert manager.prepare_load(CHAIN, EMPTY_CONTEXT) == grant.slots == (3, 4, 5)


def test_a_load_of_what_is_not_ready_pins_nothing(manager: Checked) -> None:
    manager.store(CHAIN[:2], EMPTY_CONTEXT)
    manager.prepare_store(CHAIN, EMPTY_CONTEXT)
    before = snapshot(manager.inner)
    for keys in (CHAIN, [*CHAIN[:2], b"absent"]):
        with pytest.raises(KeyError) as raised:
            manager.prepare_load(keys, EMPTY_CONTEXT)
        assert raised.value.args == (keys[2],)
        assert snapshot(manager.inner) == before


def test_a_load_of_a_removed_chunk_pins_nothing(manager: Checked) -> None:
    manager.store(CHAIN, EMPTY_CONTEXT)
    manager.prepare_load(CHAIN[2:], EMPTY_CONTEXT)
    manager.remove(CHAIN[2:], EMPTY_CONTEXT)
    before = snapshot(manager.inner)
    with pytest.raises(KeyError) as raised:
        manager.prepare_load(CHAIN, EMPTY_CONTEXT)
    assert raised.value.args == (CHAIN[2],)
    assert snapshot(manager.inner) == before


@pytest.mark.parametrize("keys", [CHAIN, [b"absent"], [CHAIN[0], b"absent"]])
def test_completing_what_was_not_prepared_changes_nothing(
    manager: Checked, keys: list[bytes]
) -> None:
    """CASES 25: no pin count goes below zero, whatever completes too often."""
    manager.store(CHAIN, EMPTY_CONTEXT)
    manager.prepare_load(CHAIN[:1], EMPTY_CONTEXT)
    before = snapshot(manager.inner)
    for complete in (manager.complete_load, manager.complete_store):
        with pytest.raises((KeyError, AssertionError)):
            complete(keys, EMPTY_CONTEXT)
        assert snapshot(manager.inner) == before


def test_a_load_can_not_end_a_store(manager: Checked) -> None:
    """CASES 25: in-flight chunks keep the pin of their store."""
    manager.prepare_store(CHAIN, EMPTY_CONTEXT)
    before = snapshot(manager.inner)
    with pytest.raises(AssertionError):
        manager.complete_load(CHAIN, EMPTY_CONTEXT)
    assert snapshot(manager.inner) == before


def test_each_load_has_a_pin_of_its_own(manager: Checked) -> None:
    manager.store(CHAIN[:1], EMPTY_CONTEXT)
    pins = []
    for call in ("prepare", "prepare", "complete", "complete"):
        getattr(manager, f"{call}_load")(CHAIN[:1], EMPTY_CONTEXT)
        (state,) = chunk_states(manager.inner)
        pins.append((state.pins, manager.inner.num_pinned))
    assert pins == [(1, 1), (2, 1), (1, 1), (0, 0)]


def test_eviction_takes_the_least_recently_used(manager: Checked) -> None:
    """P1."""
    keys = fill(manager)
    manager.touch([keys[0]], EMPTY_CONTEXT)
    manager.store([b"new"], EMPTY_CONTEXT)
    assert resident_keys(manager.inner) == [*keys[2:], keys[0], b"new"]


def test_eviction_takes_no_more_than_it_needs(manager: Checked) -> None:
    keys = fill(manager, 6)
    manager.store(CHAIN, EMPTY_CONTEXT)
    assert resident_keys(manager.inner) == [*keys[1:], *reversed(CHAIN)]


def test_of_one_chain_the_tail_goes_first(manager: Checked) -> None:
    """CASES 23, in whatever order the copies end."""
    chain = make_chain(8)
    manager.prepare_store(chain, EMPTY_CONTEXT)
    for key in chain:
        manager.complete_store([key], EMPTY_CONTEXT)
    manager.store([b"x", b"y"], EMPTY_CONTEXT)
    assert manager.lookup(chain, EMPTY_CONTEXT) == LookupResult(6, pending=False)


def test_a_shared_head_outlives_every_tail(manager: Checked) -> None:
    """CASES 23."""
    one, two = make_chain(4, "a", shared=2), make_chain(4, "b", shared=2)
    manager.store(one, EMPTY_CONTEXT)
    manager.store(two, EMPTY_CONTEXT)
    manager.store(make_chain(4, "c"), EMPTY_CONTEXT)
    assert resident_keys(manager.inner)[:4] == [two[3], two[2], two[1], two[0]]
    assert one[:2] == two[:2]


def test_a_store_never_evicts_its_own_chain(manager: Checked) -> None:
    """CASES 22: not even where its chunks are the least recently used."""
    chain = make_chain(6)
    manager.store(chain[:4], EMPTY_CONTEXT)
    others = fill(manager, 4)
    grant = manager.prepare_store(chain, EMPTY_CONTEXT)
    assert (grant.indices, grant.num_rejected) == ((4, 5), 0)
    assert resident_keys(manager.inner) == [*others[2:], *reversed(chain)]


def test_a_chain_larger_than_the_pool_keeps_its_head(manager: Checked) -> None:
    """CASES 22: its own chunks are no room for its tail."""
    chain = make_chain(10)
    manager.store(chain[:8], EMPTY_CONTEXT)
    assert manager.prepare_store(chain, EMPTY_CONTEXT) == StoreGrant((), (), 2, "full")
    assert manager.lookup(chain, EMPTY_CONTEXT) == LookupResult(8, pending=False)


def test_a_refused_store_evicts_nothing_and_counts_as_a_use(manager: Checked) -> None:
    chain = make_chain(9)
    manager.store(chain[:8], EMPTY_CONTEXT)
    manager.prepare_load(chain[:8], EMPTY_CONTEXT)
    assert manager.prepare_store([chain[0], b"x"], EMPTY_CONTEXT) == StoreGrant(
        (), (), 1, "full"
    )
    assert resident_keys(manager.inner) == [*reversed(chain[:8])]
    assert manager.inner._stats.take() == {}


def test_chunks_being_stored_are_never_evicted(manager: Checked) -> None:
    """CASES 25: in-flight eviction."""
    manager.prepare_store(CHAIN, EMPTY_CONTEXT)
    fill(manager, 20)
    states = chunk_states(manager.inner)
    assert [s.key for s in states if s.pins] == [*reversed(CHAIN)]
    manager.complete_store(CHAIN, EMPTY_CONTEXT)
    assert manager.lookup(CHAIN, EMPTY_CONTEXT) == LookupResult(3, pending=False)


def test_pinning_prevents_eviction_between_lookup_and_load(manager: Checked) -> None:
    """CASES 5: what a lookup promised is there, whatever wants room meanwhile."""
    manager.store(CHAIN, EMPTY_CONTEXT)
    slots = manager.prepare_load(CHAIN, EMPTY_CONTEXT)
    fill(manager, 20)
    assert manager.lookup(CHAIN, EMPTY_CONTEXT) == LookupResult(3, pending=False)
    assert manager.prepare_load(CHAIN, EMPTY_CONTEXT) == slots


def test_a_chunk_can_go_once_its_last_pin_is_gone(manager: Checked) -> None:
    manager.store(CHAIN, EMPTY_CONTEXT)
    manager.prepare_load(CHAIN, EMPTY_CONTEXT)
    manager.complete_load(CHAIN, EMPTY_CONTEXT)
    keys = fill(manager)
    assert resident_keys(manager.inner) == keys


def test_evictions_are_counted_by_owner_and_cause(manager: Checked) -> None:
    manager.store(make_chain(8), ACME)
    manager.store(CHAIN, ACME)
    manager.store(make_chain(2, "z"), ZETA)
    assert manager.inner._stats.take() == {'["evicted_chunks", "acme", "zeta"]': 2}


def test_a_chunk_stays_its_first_tenants(manager: Checked) -> None:
    manager.store(CHAIN, ACME)
    manager.store(CHAIN, ZETA)
    assert {s.tenant for s in chunk_states(manager.inner)} == {"acme"}


def test_remove_forgets_at_once_and_frees_the_slots(manager: Checked) -> None:
    manager.store(CHAIN, EMPTY_CONTEXT)
    manager.remove([CHAIN[1], b"absent"], EMPTY_CONTEXT)
    assert resident_keys(manager.inner) == [CHAIN[2], CHAIN[0]]
    assert manager.prepare_store(CHAIN, EMPTY_CONTEXT) == StoreGrant((1,), (1,), 0)


def test_a_removed_chunk_keeps_its_slot_until_its_last_load_ends(
    manager: Checked,
) -> None:
    """CASES 25: nobody else writes to a slot that a load still reads."""
    manager.store(CHAIN, EMPTY_CONTEXT)
    manager.prepare_load(CHAIN, EMPTY_CONTEXT)
    manager.prepare_load(CHAIN[:1], EMPTY_CONTEXT)
    manager.remove(CHAIN, EMPTY_CONTEXT)
    assert manager.lookup(CHAIN, EMPTY_CONTEXT) == LOOKUP_MISS
    assert manager.prepare_store(CHAIN, EMPTY_CONTEXT) == StoreGrant((), (), 0)
    resident = []
    for keys in (CHAIN[1:], CHAIN[:1], CHAIN[:1]):
        manager.complete_load(keys, EMPTY_CONTEXT)
        resident.append(resident_keys(manager.inner))
    assert resident == [CHAIN[:1], CHAIN[:1], []]


@pytest.mark.parametrize("success", [True, False])
@pytest.mark.parametrize("forget", ["remove", "reset"])
def test_a_chunk_removed_while_it_is_stored_never_becomes_ready(
    manager: Checked, forget: str, success: bool
) -> None:
    manager.prepare_store(CHAIN, EMPTY_CONTEXT)
    if forget == "remove":
        manager.remove(CHAIN, EMPTY_CONTEXT)
    else:
        manager.reset()
    assert manager.lookup(CHAIN, EMPTY_CONTEXT) == LOOKUP_MISS
    assert manager.inner.num_resident == 3
    manager.complete_store(CHAIN, EMPTY_CONTEXT, success)
    assert manager.lookup(CHAIN, EMPTY_CONTEXT) == LOOKUP_MISS
    assert chunk_states(manager.inner) == []


def test_reset_forgets_all_and_waits_for_what_is_pinned(manager: Checked) -> None:
    manager.store(CHAIN, ACME)
    fill(manager, 4)
    manager.prepare_load(CHAIN[:1], ACME)
    manager.reset()
    assert chunk_states(manager.inner) == [
        ChunkState(CHAIN[0], 0, "acme", pins=1, ready=True, doomed=True)
    ]
    manager.complete_load(CHAIN[:1], ACME)
    assert (manager.inner.num_resident, manager.inner.num_pinned) == (0, 0)


def test_completions_may_come_after_the_request_has_ended(manager: Checked) -> None:
    manager.on_new_request(ACME)
    manager.prepare_store(CHAIN, ACME)
    manager.on_request_finished(ACME)
    manager.complete_store(CHAIN, ACME)
    assert manager.lookup(CHAIN, ZETA) == LookupResult(3, pending=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_without_slots_refuses_everything(kind: str) -> None:
    manager = make_checked(kind, 0)
    assert manager.prepare_store(CHAIN, EMPTY_CONTEXT) == StoreGrant((), (), 3, "full")
    assert manager.lookup(CHAIN, EMPTY_CONTEXT) == LOOKUP_MISS
    manager.reset()
