"""P2, P3, P9: what reservations and limits hold, whatever the others do.

Each with and without a reuse filter, whose tracker is on the same accounts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from core.chain_lru import StampLru
from core.strategies import CHAINS, HINTS
from helpers import make_chain
from hypothesis import example, given, settings
from hypothesis import strategies as st
from manager_probe import (
    FakeClock,
    counted,
    make_filter,
    make_manager,
    store,
    tracked,
)

from vllm_ctx_offload.context import Hints, ReqContext
from vllm_ctx_offload.core import (
    AccountTerms,
    HostMemoryManager,
    LookupResult,
    OffloadingManager,
)
from vllm_ctx_offload.core.order import RELEASED

TENANTS = ("default", "acme", "zeta", "noisy")


@st.composite
def terms(draw: st.DrawFn, num_slots: int) -> dict[str, AccountTerms]:
    """Returns reservations that fit the pool together, and limits above them."""
    accounts, unreserved = {}, num_slots
    for tenant in TENANTS:
        reserved = draw(st.integers(0, unreserved))
        unreserved -= reserved
        limit = draw(st.one_of(st.none(), st.integers(max(reserved, 1), num_slots)))
        weight = draw(st.sampled_from([0.5, 1.0, 3.0]))
        accounts[tenant] = AccountTerms(reserved, limit, weight)
    return accounts


STEPS = st.fixed_dictionaries(
    {
        "tenant": st.sampled_from(TENANTS),
        "hints": HINTS,
        "chain": CHAINS,
        "op": st.sampled_from(["store", "store", "hold", "touch", "load"]),
        "finishes": st.booleans(),
        "seconds": st.integers(0, 3),
    }
)


@dataclass
class Load:
    """Plays steps on a manager; what is held stays in flight for a few steps."""

    manager: HostMemoryManager
    clock: FakeClock
    tracker_size: int | None  # of a reuse filter before it
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.outer: OffloadingManager = self.manager
        self.pools = [self.manager]  # the tracker is one, of keys alone
        if self.tracker_size is not None:
            self.outer = make_filter(self.manager, 2, self.tracker_size)
            self.pools.append(self.outer._tracker)
        self.stores: list[tuple[list[bytes], ReqContext]] = []
        self.loads: list[tuple[list[bytes], ReqContext]] = []

    def play(self, step: dict[str, Any]) -> str:
        """Plays one step. Returns whose it was."""
        self.num_steps += 1
        self.clock.now += step["seconds"]
        manager, keys = self.outer, step["chain"]
        context = ReqContext(
            request_id=str(self.num_steps), tenant=step["tenant"], hints=step["hints"]
        )
        if step["op"] == "touch":
            manager.touch(keys, context)
        elif step["op"] == "load":
            keys = keys[: manager.lookup(keys, context).num_ready]
            manager.prepare_load(keys, context)
            self.loads.append((keys, context))
        else:
            grant = manager.prepare_store(keys, context)
            self.stores.append(([keys[index] for index in grant.indices], context))
        num_open = 3 if step["op"] in ("hold", "load") else 0
        while len(self.stores) > num_open:
            manager.complete_store(*self.stores.pop(0))
        while len(self.loads) > num_open:
            manager.complete_load(*self.loads.pop(0))
        if step["finishes"]:
            manager.on_request_finished(context)
        for pool in self.pools:
            pool.check_invariants()
        return context.tenant


def keys_of(
    pool: HostMemoryManager, tenant: str, *, released: bool = True
) -> set[bytes]:
    """Returns a tenant's chunks, with or without those that it released."""
    return {
        key
        for run in pool._table
        if run.account.name == tenant and (released or run.priority != RELEASED)
        for key in run.chunks
    }


def terms_of(pool: HostMemoryManager) -> dict[str, AccountTerms]:
    return dict(pool._policy._config.accounts)


with_and_without_a_filter = pytest.mark.parametrize("tracker_size", [None, 7, 40])


@with_and_without_a_filter
@settings(deadline=None, max_examples=150)
@given(data=st.data(), num_slots=st.integers(1, 16), steps=st.lists(STEPS, max_size=30))
def test_a_tenant_within_its_reservation_loses_nothing_to_another(
    tracker_size: int | None,
    data: st.DataObject,
    num_slots: int,
    steps: list[dict[str, Any]],
) -> None:
    """P2: but what it released itself; within its share of the tracker no count."""
    clock, accounts = FakeClock(), data.draw(terms(num_slots))
    manager = make_manager(
        num_slots, accounts=accounts, max_protected=num_slots // 3, clock=clock
    )
    load = Load(manager, clock, tracker_size)
    for step in steps:
        before = {
            (pool, tenant): keys_of(pool, tenant, released=False)
            for pool in load.pools
            for tenant in TENANTS
        }
        resident = {pool: pool.resident_by_tenant() for pool in load.pools}
        by_whom = load.play(step)
        for (pool, tenant), keys in before.items():
            is_within = resident[pool][tenant] <= terms_of(pool)[tenant].reserved
            if tenant != by_whom and is_within:
                assert keys <= keys_of(pool, tenant)
    assert not [key for key in counted(manager) if "reservation_breaches" in key]


@with_and_without_a_filter
@settings(deadline=None, max_examples=150)
@given(data=st.data(), num_slots=st.integers(1, 16), steps=st.lists(STEPS, max_size=30))
def test_no_tenant_holds_more_than_its_limit(
    tracker_size: int | None,
    data: st.DataObject,
    num_slots: int,
    steps: list[dict[str, Any]],
) -> None:
    """P3, with what is in flight; P5 by the invariants; P4's ceiling."""
    clock, accounts = FakeClock(), data.draw(terms(num_slots))
    max_protected = num_slots // 3
    manager = make_manager(
        num_slots, accounts=accounts, max_protected=max_protected, clock=clock
    )
    load = Load(manager, clock, tracker_size)
    for step in steps:
        load.play(step)
        for pool in load.pools:
            for tenant, account in terms_of(pool).items():
                num_held = len(keys_of(pool, tenant))
                assert pool.resident_by_tenant()[tenant] == num_held
                assert account.limit is None or num_held <= account.limit
        resident = manager.resident_by_tenant()
        assert manager.num_protected <= max_protected
        assert sum(resident.values()) + manager._slots.num_free == num_slots


def test_at_its_limit_a_tenants_own_oldest_goes_first() -> None:
    """CASES 40: though the pool has room, and though a neighbour is far above."""
    manager = make_manager(10, accounts={"acme": AccountTerms(limit=3)})
    store(manager, make_chain(5, "other"), ReqContext(request_id="0"))
    acme = ReqContext(request_id="1", tenant="acme")
    chain = make_chain(3)
    assert store(manager, chain, acme) == chain
    assert store(manager, [b"new"], acme) == [b"new"]
    assert manager.lookup(chain, acme) == LookupResult(2, pending=False)
    assert manager.resident_by_tenant() == {"default": 5, "acme": 3}


def private_chain(tenant: str, number: int, length: int) -> list[bytes]:
    """Returns a chain that shares two chunks with the tenant's other chains."""
    tail = make_chain(length, str(number), shared=2)
    return [tenant.encode() + b"/" + key for key in tail]


REQUESTS = st.lists(
    st.tuples(st.sampled_from(TENANTS), st.integers(0, 5), st.integers(1, 7)),
    max_size=60,
)


@settings(deadline=None, max_examples=200)
@given(data=st.data(), num_slots=st.integers(1, 24), requests=REQUESTS)
@example(
    data=None,
    num_slots=10,
    requests=[("acme", n % 4, 4) for n in range(8)]
    + [("noisy", n, 7) for n in range(30)]
    + [("acme", n % 4, 4) for n in range(8)],
)
def test_every_request_hits_what_a_partition_of_its_own_would_give(
    data: Any, num_slots: int, requests: list[tuple[str, int, int]]
) -> None:
    """P9: the reservation is worth no less than a private LRU of its size."""
    if data is None:
        accounts = {**dict.fromkeys(TENANTS, AccountTerms()), "acme": AccountTerms(10)}
    else:
        # Limits above the reservation are part of what must not hurt.
        accounts = data.draw(terms(num_slots))
    manager = make_manager(num_slots, accounts=accounts)
    partitions = {name: StampLru(terms.reserved) for name, terms in accounts.items()}
    for tenant, number, length in requests:
        chain = private_chain(tenant, number, length)
        context = ReqContext(request_id="r", tenant=tenant)
        num_hits = manager.lookup(chain, context).num_ready
        partition = partitions[tenant]
        assert num_hits >= partition.num_hits(chain)
        store(manager, chain, context)
        partition.store(chain)
        held = {chunk.key for chunk in manager.chunks()}
        for partition in partitions.values():
            assert {*partition.stamps} <= held


class Partition:
    """A tenant's own pool behind a reuse filter of its own, by time stamps."""

    def __init__(self, num_chunks: int, num_keys: int) -> None:
        self.pool = StampLru(num_chunks)
        self.tracker = StampLru(num_keys)
        self.counts: dict[bytes, int] = {}

    def num_due(self, chain: Sequence[bytes]) -> int:
        """Counts one request more. Returns the leading run that two have offered."""
        for victim in self.tracker.store(chain):
            del self.counts[victim]
        for key in chain:
            if key in self.tracker.stamps:
                self.counts[key] = self.counts.get(key, 0) + 1
        return num_leading(self.counts, chain)


def num_leading(counts: dict[bytes, int], chain: Sequence[bytes]) -> int:
    return next(
        (i for i, key in enumerate(chain) if counts.get(key, 0) < 2), len(chain)
    )


@settings(deadline=None, max_examples=300)
@given(
    data=st.data(),
    num_slots=st.integers(1, 24),
    tracker_size=st.integers(1, 80),
    requests=REQUESTS,
)
@example(
    data=None,
    num_slots=10,
    tracker_size=30,
    requests=[("acme", n % 2, 4) for n in range(4)]
    + [("noisy", n, 7) for n in range(30)]
    + [("acme", n % 2, 4) for n in range(8)],
)
def test_behind_a_reuse_filter_too_a_reservation_is_worth_its_share(
    data: Any,
    num_slots: int,
    tracker_size: int,
    requests: list[tuple[str, int, int]],
) -> None:
    """P9 with the filter on, against a pool and a tracker of the tenant's own.

    The filter passes at least what a tracker of its own would pass, and of what passes
    the pool holds at least what one of its own would. Who gets no more than its share
    of the tracker therefore hits at least what it would all by itself. Who borrows more
    may have more stored, which only its own chunks can pay for.
    """
    if data is None:
        accounts = {**dict.fromkeys(TENANTS, AccountTerms()), "acme": AccountTerms(5)}
    else:
        accounts = data.draw(terms(num_slots))
    manager = make_manager(num_slots, accounts=accounts)
    outer = make_filter(manager, 2, tracker_size)
    shares = terms_of(outer._tracker)
    alone, beside = (
        {
            name: Partition(account.reserved, shares[name].reserved)
            for name, account in accounts.items()
        }
        for _ in range(2)
    )
    offered: dict[str, set[bytes]] = {name: set() for name in accounts}
    for number, (tenant, name, length) in enumerate(requests):
        chain = private_chain(tenant, name, length)
        context = ReqContext(request_id=str(number), tenant=tenant)
        share, partition = shares[tenant].reserved, alone[tenant]
        num_hits = manager.lookup(chain, context).num_ready
        offered[tenant] |= {*chain}
        if len(offered[tenant]) <= share or shares[tenant].limit == share:
            assert num_hits >= partition.pool.num_hits(chain)
        assert num_hits >= beside[tenant].pool.num_hits(chain)
        store(outer, chain, context)
        num_due, num_passed = (
            partition.num_due(chain),
            num_leading(tracked(outer), chain),
        )
        assert num_passed >= num_due
        partition.pool.store(chain[:num_due])
        beside[tenant].pool.store(chain[:num_passed])
        outer.on_request_finished(context)
        assert {*partition.tracker.stamps} <= {*tracked(outer)}
        assert {*beside[tenant].pool.stamps} <= {c.key for c in manager.chunks()}


def test_one_shot_requests_leave_a_quiet_tenant_its_counts() -> None:
    """40 of 50 chunks each between any two of its own, through one small tracker."""
    rates = []
    for num_noisy in (0, 40):
        manager = make_manager(100, accounts={"quiet": AccountTerms(reserved=20)})
        outer = make_filter(manager, 2, 200)
        num_hits = num_chunks = 0
        for turn in range(40):
            chain = private_chain("quiet", turn % 4, 5)
            context = ReqContext(f"quiet{turn}", tenant="quiet")
            num_hits += outer.lookup(chain, context).num_ready
            num_chunks += len(chain)
            store(outer, chain, context)
            for noise in range(num_noisy):
                one_shot = private_chain("noisy", 40 * turn + noise, 50)
                store(outer, one_shot[2:], ReqContext(f"noisy{turn}/{noise}"))
        rates.append(num_hits / num_chunks)
    assert rates[0] == rates[1] > 0.8


def test_a_quiet_tenant_keeps_its_hits_beside_a_noisy_one() -> None:
    """What this project is for: a fifth of the pool against five times the load."""
    manager = make_manager(100, accounts={"quiet": AccountTerms(reserved=20)})
    quiet = ReqContext(request_id="q", tenant="quiet")
    num_hits = 0
    for turn in range(40):
        chain = private_chain("quiet", turn % 4, 5)
        num_hits += manager.lookup(chain, quiet).num_ready
        store(manager, chain, quiet)
        for noise in range(5):
            one_shot = private_chain("noisy", 5 * turn + noise, 20)
            hints = Hints(session=str(noise), priority=90, ttl_s=60)
            store(manager, one_shot, ReqContext(request_id="n", hints=hints))
    # All but the first sight of each: the two chunks in common, and three each.
    assert num_hits == 40 * 5 - (2 + 4 * 3)
