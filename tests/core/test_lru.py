"""P1: without tenants and hints, and as plain LRU, victims are those of an LRU."""

from __future__ import annotations

from typing import Any

from core.chain_lru import StampLru
from core.strategies import CHAINS, HINTS, TENANTS
from helpers import EMPTY_CONTEXT
from hypothesis import given, settings
from hypothesis import strategies as st
from manager_probe import FakeClock, make_manager, resident_keys, store

from vllm_ctx_offload.context import ReqContext
from vllm_ctx_offload.core import AccountTerms, HostMemoryManager

NUM_SLOTS = st.integers(0, 12)


def check_use(
    manager: HostMemoryManager,
    lru: StampLru,
    chain: list[bytes],
    context: ReqContext,
    *,
    stores: bool,
) -> None:
    """Uses a chain on both sides and compares hits, victims and all that is left."""
    assert manager.lookup(chain, context).num_ready == lru.num_hits(chain)
    before = resident_keys(manager)
    if stores:
        store(manager, chain, context)
        victims = lru.store(chain)
    else:
        manager.touch(chain, context)
        lru.touch(chain)
        victims = []
    manager.check_invariants()
    after = resident_keys(manager)
    assert after == lru.in_order()
    assert {*before} - {*after} == {*victims}


@settings(deadline=None, max_examples=150)
@given(
    num_slots=NUM_SLOTS,
    max_protected=st.integers(0, 4),
    uses=st.lists(st.tuples(CHAINS, st.booleans()), max_size=40),
)
def test_without_hints_victims_are_exactly_those_of_chain_aware_lru(
    num_slots: int, max_protected: int, uses: list[tuple[list[bytes], bool]]
) -> None:
    """CASES 23."""
    manager = make_manager(num_slots, max_protected=max_protected)
    lru = StampLru(num_slots)
    for chain, stores in uses:
        check_use(manager, lru, chain, EMPTY_CONTEXT, stores=stores)


@settings(deadline=None, max_examples=100)
@given(
    num_slots=NUM_SLOTS,
    uses=st.lists(
        st.tuples(CHAINS, st.booleans(), st.sampled_from(TENANTS), HINTS), max_size=30
    ),
)
def test_plain_lru_knows_neither_hints_nor_tenants(
    num_slots: int, uses: list[tuple[Any, ...]]
) -> None:
    """Reservations, limits, priorities, sessions and releases change nothing."""
    clock = FakeClock()
    accounts = {
        "acme": AccountTerms(reserved=num_slots // 2, limit=num_slots // 2),
        "zeta": AccountTerms(limit=1, weight=5.0, base_priority=10),
    }
    manager = make_manager(num_slots, accounts=accounts, plain_lru=True, clock=clock)
    lru = StampLru(num_slots)
    for index, (chain, stores, tenant, hints) in enumerate(uses):
        context = ReqContext(request_id=str(index), tenant=tenant, hints=hints)
        clock.now = float(index)
        check_use(manager, lru, chain, context, stores=stores)
        if index % 2:
            manager.on_request_finished(context)
    assert manager.num_protected == 0
    assert manager._policy._segments == manager._table.sessions.by_key == {}


@settings(deadline=None, max_examples=100)
@given(
    num_slots=NUM_SLOTS,
    uses=st.lists(st.tuples(CHAINS, st.sampled_from(TENANTS)), max_size=30),
)
def test_accounts_without_terms_keep_the_order_of_use_among_their_own(
    num_slots: int, uses: list[tuple[list[bytes], str]]
) -> None:
    """CASES 23: whoever uses a chain, no part of it is older than one behind it."""
    accounts = {tenant: AccountTerms() for tenant in TENANTS}
    manager = make_manager(num_slots, accounts=accounts)
    stamps: dict[bytes, tuple[int, int]] = {}
    for time, (chain, tenant) in enumerate(uses):
        store(manager, chain, ReqContext(request_id="r", tenant=tenant))
        stamps.update({key: (time, -depth) for depth, key in enumerate(chain)})
        manager.check_invariants()
        for name in TENANTS:
            own = [chunk.key for chunk in manager.chunks() if chunk.tenant == name]
            assert own == sorted(own, key=stamps.__getitem__)


@settings(deadline=None, max_examples=50)
@given(num_slots=st.integers(1, 6), names=st.lists(st.integers(0, 9), max_size=60))
def test_chains_of_one_chunk_are_evicted_one_by_one_in_order_of_use(
    num_slots: int, names: list[int]
) -> None:
    """The whole sequence, against the textbook."""
    manager, order = make_manager(num_slots), []
    for name in names:
        key = bytes([name])
        granted = store(manager, [key], EMPTY_CONTEXT)
        assert granted == ([] if key in order else [key])
        order = [*[used for used in order if used != key], key][-num_slots:]
        assert resident_keys(manager) == order
