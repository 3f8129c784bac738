"""P2, P3, P9: what reservations and limits hold, whatever the others do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from core.chain_lru import StampLru
from core.strategies import CHAINS, HINTS
from helpers import make_chain
from hypothesis import example, given, settings
from hypothesis import strategies as st
from manager_probe import FakeClock, counted, make_manager, store

from vllm_ctx_offload.context import Hints, ReqContext
from vllm_ctx_offload.core import AccountTerms, HostMemoryManager, LookupResult
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
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.stores: list[tuple[list[bytes], ReqContext]] = []
        self.loads: list[tuple[list[bytes], ReqContext]] = []

    def play(self, step: dict[str, Any]) -> str:
        """Plays one step. Returns whose it was."""
        self.num_steps += 1
        self.clock.now += step["seconds"]
        manager, keys = self.manager, step["chain"]
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
        manager.check_invariants()
        return context.tenant

    def keys_of(self, tenant: str, *, released: bool = True) -> set[bytes]:
        """Returns a tenant's chunks, with or without those that it released."""
        return {
            key
            for run in self.manager._table
            if run.account.name == tenant and (released or run.priority != RELEASED)
            for key in run.chunks
        }


@settings(deadline=None, max_examples=150)
@given(data=st.data(), num_slots=st.integers(1, 16), steps=st.lists(STEPS, max_size=30))
def test_a_tenant_within_its_reservation_loses_nothing_to_another(
    data: st.DataObject, num_slots: int, steps: list[dict[str, Any]]
) -> None:
    """P2: but what it released itself."""
    clock, accounts = FakeClock(), data.draw(terms(num_slots))
    manager = make_manager(
        num_slots, accounts=accounts, max_protected=num_slots // 3, clock=clock
    )
    load = Load(manager, clock)
    for step in steps:
        before = {tenant: load.keys_of(tenant, released=False) for tenant in TENANTS}
        resident = manager.resident_by_tenant()
        by_whom = load.play(step)
        for tenant in {*TENANTS} - {by_whom}:
            if resident[tenant] <= accounts[tenant].reserved:
                assert before[tenant] <= load.keys_of(tenant)
    assert not [key for key in counted(manager) if "reservation_breaches" in key]


@settings(deadline=None, max_examples=150)
@given(data=st.data(), num_slots=st.integers(1, 16), steps=st.lists(STEPS, max_size=30))
def test_no_tenant_holds_more_than_its_limit(
    data: st.DataObject, num_slots: int, steps: list[dict[str, Any]]
) -> None:
    """P3, with what is in flight; P5 by the invariants; P4's ceiling."""
    clock, accounts = FakeClock(), data.draw(terms(num_slots))
    max_protected = num_slots // 3
    manager = make_manager(
        num_slots, accounts=accounts, max_protected=max_protected, clock=clock
    )
    load = Load(manager, clock)
    for step in steps:
        load.play(step)
        resident = manager.resident_by_tenant()
        for tenant, account in accounts.items():
            assert resident[tenant] == len(load.keys_of(tenant))
            assert account.limit is None or resident[tenant] <= account.limit
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
