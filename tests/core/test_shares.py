"""P7: what nobody reserved is shared by weight."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from manager_probe import make_manager, store

from vllm_ctx_offload.context import ReqContext
from vllm_ctx_offload.core import AccountTerms

TENANTS = ("default", "acme", "zeta", "noisy")


@settings(deadline=None, max_examples=60)
@given(
    weights=st.lists(
        st.sampled_from([0.5, 1.0, 2.0, 3.0, 7.5]), min_size=2, max_size=4
    ),
    reserved_parts=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    num_slots=st.integers(30, 80),
    seed=st.integers(0, 2**16),
)
def test_under_demand_from_all_shares_converge_to_the_weights(
    weights: list[float], reserved_parts: list[int], num_slots: int, seed: int
) -> None:
    """Whoever held the pool before, in whatever order the demand comes."""
    rand = random.Random(seed)
    accounts = {
        tenant: AccountTerms(reserved=part * num_slots // 16, weight=weight)
        for tenant, weight, part in zip(TENANTS, weights, reserved_parts, strict=False)
    }
    manager = make_manager(num_slots, accounts=accounts)
    contexts = [ReqContext(request_id=name, tenant=name) for name in accounts]
    hog = rand.choice(contexts)
    for number in range(num_slots):
        store(manager, [b"hog%d" % number], hog)
    for number in range(3 * num_slots * len(contexts)):
        chain = [b"%d/%d" % (number, depth) for depth in range(rand.randrange(1, 4))]
        store(manager, chain, rand.choice(contexts))
    manager.check_invariants()
    unreserved = num_slots - sum(terms.reserved for terms in accounts.values())
    resident = manager.resident_by_tenant()
    coarsest = max(1 / terms.weight for terms in accounts.values())
    for tenant, terms in accounts.items():
        share = unreserved * terms.weight / sum(weights)
        # A store never takes from its own chain, so nobody is further off than by the
        # longest one of the lightest tenant.
        excess = (resident[tenant] - terms.reserved) / terms.weight
        assert abs(excess - share / terms.weight) <= 3 * coarsest


def test_an_idle_tenant_gives_way_down_to_its_share_and_not_below() -> None:
    """6 of 20 are reserved; the other 14 are shared one to one."""
    manager = make_manager(20, accounts={"idle": AccountTerms(reserved=6)})
    idle = ReqContext(request_id="idle", tenant="idle")
    store(manager, [b"idle%d" % index for index in range(20)], idle)
    for number in range(100):
        store(manager, [b"%d" % number], ReqContext(request_id="busy"))
    assert manager.resident_by_tenant() == {"default": 7, "idle": 13}
