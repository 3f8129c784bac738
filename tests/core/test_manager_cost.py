"""P8: what calls cost, counted in operations; a long run at full occupancy."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from core.counted import count_operations
from helpers import EMPTY_CONTEXT
from manager_probe import FakeClock, make_manager, store

from vllm_ctx_offload.context import Hints, ReqContext
from vllm_ctx_offload.core import AccountTerms, HostMemoryManager, StoreGrant
from vllm_ctx_offload.core.order import MAX_MOVES

MILLION = 1_000_000
CHAIN_LENGTH = 10
SIZES = (100, 10_000, 100_000)
HINTS = Hints(session="s", priority=90, ttl_s=500, expected_reuse_s=500)


def full_manager(
    num_slots: int, *, pinned: bool = False, hints: Hints | None = None
) -> HostMemoryManager:
    """Returns a full pool of chains that three tenants used in turn."""
    clock = FakeClock()
    accounts = {name: AccountTerms() for name in ("acme", "zeta")}
    manager = make_manager(
        num_slots, accounts=accounts, max_protected=num_slots // 3, clock=clock
    )
    for number in range(num_slots // CHAIN_LENGTH):
        clock.now += 0.001
        tenant = ("default", "acme", "zeta")[number % 3]
        context = ReqContext(str(number), tenant=tenant, hints=hints or Hints())
        chain = chain_of(number)
        if pinned:
            manager.prepare_store(chain, context)
        else:
            store(manager, chain, context)
    return manager


def chain_of(number: int) -> list[bytes]:
    return [b"%d/%d" % (number, depth) for depth in range(CHAIN_LENGTH)]


def flat(works: list[int], slack: float = 1.2) -> bool:
    """Whether the largest pool costs no more than the smallest, but for chance."""
    return works[-1] <= slack * works[0] + 5


CALLS: dict[str, Callable[[HostMemoryManager, ReqContext], object]] = {
    "lookup": lambda manager, context: manager.lookup(chain_of(3), context),
    "touch": lambda manager, context: manager.touch(chain_of(3), context),
    "prepare_load": lambda manager, context: manager.prepare_load(chain_of(3), context),
    "store": lambda manager, context: store(manager, [b"x", b"y"], context),
    "store a long chain": lambda manager, context: store(
        manager, chain_of(-1) + chain_of(-2), context
    ),
    "remove": lambda manager, context: manager.remove(chain_of(5), context),
    "finish": lambda manager, context: manager.on_request_finished(context),
}


@pytest.fixture(scope="module")
def managers() -> list[HostMemoryManager]:
    return [full_manager(size) for size in SIZES]


@pytest.fixture(scope="module")
def hinted_managers() -> list[HostMemoryManager]:
    return [full_manager(size, hints=HINTS) for size in SIZES]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("hints", [Hints(), HINTS], ids=["plain", "hints"])
def test_no_call_costs_more_in_a_larger_pool(
    managers: list[HostMemoryManager], name: str, hints: Hints
) -> None:
    context = ReqContext(request_id="r", tenant="acme", hints=hints)
    works = [
        count_operations(lambda m=manager: CALLS[name](m, context))
        for manager in managers
    ]
    assert flat(works), works


@pytest.mark.parametrize("name", CALLS)
def test_no_call_costs_more_where_all_gave_hints(
    hinted_managers: list[HostMemoryManager], name: str
) -> None:
    """Estimates, priorities that end, and a budget that is used up."""
    context = ReqContext(request_id="r", tenant="acme", hints=HINTS)
    works = [
        count_operations(lambda m=manager: CALLS[name](m, context))
        for manager in hinted_managers
    ]
    assert flat(works), works


def test_when_all_ends_at_once_a_call_does_a_bounded_part_of_it() -> None:
    """Ten thousand priorities and estimates that pass while nobody calls."""
    manager = full_manager(100_000, hints=HINTS)
    clock: Any = manager._clock
    num_before = manager.num_protected
    clock.now += 1_000
    context = ReqContext(request_id="r", tenant="acme")
    works, protected = [], [num_before]
    for number in range(20):
        works.append(
            count_operations(lambda n=number: store(manager, [b"new%d" % n], context))
        )
        protected.append(manager.num_protected)
    assert max(works) < 150 * MAX_MOVES
    assert protected[0] > protected[10] > protected[20]


@pytest.mark.parametrize("num_slots", SIZES)
def test_a_store_costs_nothing_when_all_chunks_are_pinned(num_slots: int) -> None:
    """CASES 26: not one run is looked at, in a pool of any size."""
    manager = full_manager(num_slots, pinned=True)
    chain = [b"x", b"y"]
    work = count_operations(lambda: manager.prepare_store(chain, EMPTY_CONTEXT))
    assert work < 700  # what the call itself takes
    refused = manager.prepare_store(chain, EMPTY_CONTEXT)
    assert refused == StoreGrant((), (), 2, "full")


@pytest.mark.parametrize("num_pinned", [0, 50])
def test_eviction_passes_over_the_pinned_only(num_pinned: int) -> None:
    """CASES 26: by the run, however many chunks it has, and by no other run."""
    works = []
    for size in SIZES[:2]:
        manager = full_manager(size)
        oldest = [chain_of(3 * number) for number in range(num_pinned // CHAIN_LENGTH)]
        for chain in oldest if size > 100 else oldest[:3]:
            manager.prepare_load(chain, EMPTY_CONTEXT)
        works.append(
            count_operations(lambda m=manager: store(m, [b"x"], EMPTY_CONTEXT))
        )
    assert works[1] <= works[0] + 20 * (num_pinned // CHAIN_LENGTH)


def test_a_store_passes_over_pinned_chunks_once_though_accounts_give_in_turn() -> None:
    """The tails of two chains are being loaded; their heads go one by one."""
    works, length = [], 400
    for first_pinned in (length, length // 2):
        accounts = {name: AccountTerms() for name in ("acme", "zeta")}
        manager = make_manager(2 * length, accounts=accounts)
        for tenant in accounts:
            chain = [b"%s/%d" % (tenant.encode(), depth) for depth in range(length)]
            context = ReqContext(tenant, tenant=tenant)
            store(manager, chain, context)
            manager.prepare_load(chain[first_pinned:], context)
        chain = [b"new/%d" % depth for depth in range(100)]
        works.append(
            count_operations(
                lambda m=manager, c=chain: m.prepare_store(c, EMPTY_CONTEXT)
            )
        )
        manager.check_invariants()
        assert len(manager._storing) == 100
    assert works[1] <= works[0] + 10 * length


def test_hints_cost_by_the_request_and_not_by_the_chunk() -> None:
    """A release of a session that holds everything takes as long as one of a chain."""
    works = []
    for length in (10, 1_000):
        manager = make_manager(length)
        hints = Hints(session="s", release=True)
        context = ReqContext(request_id="r", hints=hints)
        store(manager, [b"%d" % index for index in range(length)], context)
        works.append(
            count_operations(lambda m=manager, c=context: m.on_request_finished(c))
        )
    assert works[0] == works[1]


def tracked_by_the_collector(num_tenants: int, runs_per_tenant: int) -> int:
    """Returns how many objects a pool of single chunks adds to the collector's work."""
    gc.collect()
    num_before = len(gc.get_objects())
    accounts = dict.fromkeys(
        (f"tenant{number}" for number in range(num_tenants)), AccountTerms()
    )
    num_chunks = num_tenants * runs_per_tenant
    manager = make_manager(num_chunks, accounts=accounts, max_protected=num_chunks // 2)
    for number in range(num_chunks):
        hints = replace(HINTS, session=str(number), priority=35 + number % 3)
        tenant = f"tenant{number % num_tenants}"
        store(manager, [b"%d" % number], ReqContext("r", tenant=tenant, hints=hints))
    manager._stats.take()
    del accounts, hints
    gc.collect()
    assert manager.num_resident == num_chunks
    return len(gc.get_objects()) - num_before


def test_tenants_sessions_and_runs_are_no_work_for_the_garbage_collector() -> None:
    """It would stop the scheduler for as long as it takes to look at them all."""
    few = tracked_by_the_collector(num_tenants=10, runs_per_tenant=10)
    many_tenants = tracked_by_the_collector(num_tenants=1_000, runs_per_tenant=1)
    many_runs = tracked_by_the_collector(num_tenants=10, runs_per_tenant=300)
    # A sorted list is cut into pieces of a thousand: that is all.
    assert max(many_tenants, many_runs) - few < 100


OTHER_HINTS = (
    Hints(priority=80, ttl_s=20),
    Hints(session="s", priority=60, ttl_s=5, release=True),
    Hints(session="s", expected_reuse_s=3),
    Hints(priority=10, expected_reuse_s=8, release=True),
)


class RandomLoad:
    """Random calls that keep a small pool full."""

    def __init__(self, seed: int, num_slots: int) -> None:
        self.random = random.Random(seed)
        self.clock = FakeClock()
        self.manager = make_manager(
            num_slots,
            accounts={
                "tenant1": AccountTerms(reserved=8, limit=20),
                "tenant2": AccountTerms(reserved=4, weight=3.0),
                "tenant3": AccountTerms(limit=6),
            },
            max_protected=num_slots // 3,
            clock=self.clock,
        )
        self.contexts = [
            ReqContext(request_id=str(index), tenant=f"tenant{index % 4}", hints=hints)
            for index, hints in enumerate([*[Hints()] * 4, *OTHER_HINTS])
        ]
        self.chains = [
            [f"{index // 2 ** (6 - depth)}/{depth}".encode() for depth in range(6)]
            for index in range(64)
        ]
        self.stores: list[list[bytes]] = []
        self.loads: list[list[bytes]] = []
        self.num_operations = 0  # one for each chunk of each call

    def step(self) -> None:
        rand, manager = self.random, self.manager
        self.clock.now += rand.random()
        context = rand.choice(self.contexts)
        keys = rand.choice(self.chains)[: rand.randrange(1, 7)]
        op = rand.randrange(60)
        if op < 25:
            grant = manager.prepare_store(keys, context)
            if grant.indices:
                self.stores.append([keys[index] for index in grant.indices])
        elif op < 45:
            num_ready = manager.lookup(keys, context).num_ready
            self.num_operations += num_ready
            if manager.prepare_load(keys[:num_ready], context):
                self.loads.append(keys[:num_ready])
        elif op < 58:
            manager.touch(keys, context)
        elif op < 59:
            manager.remove(keys, context)
        else:
            manager.on_request_finished(context)
        self.num_operations += len(keys)
        self._complete_some(context)

    def _complete_some(self, context: ReqContext) -> None:
        rand = self.random
        if len(self.stores) > rand.randrange(5):
            done = self.stores.pop(rand.randrange(len(self.stores)))
            self.manager.complete_store(done, context, success=rand.random() > 0.1)
            self.num_operations += len(done)
        if len(self.loads) > rand.randrange(5):
            done = self.loads.pop(rand.randrange(len(self.loads)))
            self.manager.complete_load(done, context)
            self.num_operations += len(done)


@pytest.mark.slow
def test_a_million_random_operations_at_full_occupancy_stay_sound() -> None:
    """CASES 24."""
    load = RandomLoad(seed=24, num_slots=40)
    num_steps = num_full_steps = 0
    while load.num_operations < MILLION:
        load.step()
        num_steps += 1
        num_full_steps += not load.manager._slots.num_free
        if num_steps % 5_000 == 0:
            load.manager.check_invariants()
    assert num_full_steps > 0.5 * num_steps
    for keys in load.stores:
        load.manager.complete_store(keys, EMPTY_CONTEXT)
    for keys in load.loads:
        load.manager.complete_load(keys, EMPTY_CONTEXT)
    load.manager.check_invariants()
    assert load.manager.num_pinned == 0
