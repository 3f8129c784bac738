"""`account_terms` and `Accounts`: what tenants may hold, and who is furthest above."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manager_probe import make_manager, store

from vllm_ctx_offload.config import parse_config
from vllm_ctx_offload.context import ReqContext
from vllm_ctx_offload.core import AccountTerms, account_terms
from vllm_ctx_offload.core.order import EvictionOrder
from vllm_ctx_offload.core.tenants import Accounts, check_terms

NAMES = [f"tenant{index}" for index in range(6)]


def terms_of(
    tenants: dict[str, Any], num_slots: int = 100, bytes_per_chunk: int = 1000
) -> dict[str, AccountTerms]:
    return account_terms(parse_config({"tenants": tenants}), num_slots, bytes_per_chunk)


def test_without_tenants_there_is_one_account_without_terms() -> None:
    assert terms_of({}) == {"default": AccountTerms()}


def test_sizes_are_rounded_down_to_whole_chunks_of_the_pool() -> None:
    tenants = {
        "bytes": {"reserved": 2999, "limit": 4000},
        "share": {"reserved": "12.9%", "limit": "99.99%"},
        "less than a chunk": {"reserved": 999},
        "weight": {"weight": 2.5},
    }
    assert terms_of(tenants) == {
        "bytes": AccountTerms(reserved=2, limit=4),
        "share": AccountTerms(reserved=12, limit=99),
        "less than a chunk": AccountTerms(reserved=0),
        "weight": AccountTerms(weight=2.5),
        "default": AccountTerms(),
    }


def test_undeclared_names_are_held_to_the_wildcard_together() -> None:
    tenants = {"*": {"reserved": 5000, "limit": "50%", "weight": 3.0}, "a": {}}
    assert terms_of(tenants) == {
        "a": AccountTerms(),
        "default": AccountTerms(reserved=5, limit=50, weight=3.0),
    }


def test_a_declared_default_is_what_undeclared_names_are_held_to() -> None:
    tenants = {"*": {"max_priority": 10}, "default": {"limit": 7000}}
    assert terms_of(tenants) == {"default": AccountTerms(limit=7)}


@pytest.mark.parametrize(("most", "base"), [(0, 0), (34, 34), (35, 35), (100, 35)])
def test_chunks_without_a_hint_have_no_more_priority_than_may_be_asked_for(
    most: int, base: int
) -> None:
    tenants = {"a": {"max_priority": most}}
    assert terms_of(tenants)["a"].base_priority == base


def make_accounts(*terms: AccountTerms) -> Accounts:
    by_name = dict(zip(NAMES, terms, strict=False))
    return Accounts({"default": AccountTerms(), **by_name}, None)


def test_an_undeclared_tenant_is_accounted_to_default() -> None:
    accounts = make_accounts(AccountTerms())
    assert accounts.get("tenant0").name == "tenant0"
    assert accounts.get("nobody") is accounts.get("*") is accounts.get("default")


def test_all_accounts_can_share_one_order() -> None:
    order = EvictionOrder()
    terms = {"default": AccountTerms(), "a": AccountTerms()}
    assert all(account.order is order for account in Accounts(terms, order))
    assert len({account.order for account in Accounts(terms, None)}) == 2


def test_room_below_the_limit_is_never_negative() -> None:
    accounts = make_accounts(AccountTerms(limit=3))
    account = accounts.get("tenant0")
    room = []
    for account.resident in (0, 2, 3, 4):
        room.append(account.room_below_limit())
    assert room == [3, 1, 0, 0]
    assert accounts.get("default").room_below_limit() is None


def test_nobody_is_above_a_reservation_that_is_just_full() -> None:
    accounts = make_accounts(AccountTerms(reserved=2))
    assert accounts.furthest_above() is None
    accounts.get("tenant0").resident = 2
    accounts.grew(accounts.get("tenant0"))
    assert accounts.furthest_above() is None
    accounts.get("tenant0").resident = 3
    accounts.grew(accounts.get("tenant0"))
    assert accounts.furthest_above() is accounts.get("tenant0")


def test_the_excess_counts_in_units_of_the_weight() -> None:
    accounts = make_accounts(AccountTerms(weight=4.0), AccountTerms(reserved=5))
    for name, resident in (("tenant0", 8), ("tenant1", 8), ("default", 2)):
        accounts.get(name).resident = resident
        accounts.grew(accounts.get(name))
    assert accounts.furthest_above() is accounts.get("tenant1")  # 3, 2 and 2
    assert accounts.next_excess() == 2.0


def test_an_account_set_aside_is_passed_over_until_it_grows() -> None:
    accounts = make_accounts(AccountTerms())
    first, second = accounts.get("tenant0"), accounts.get("default")
    for account, resident in ((first, 3), (second, 2)):
        account.resident = resident
        accounts.grew(account)
    found = []
    for _ in range(2):
        top = accounts.furthest_above()
        accounts.set_aside(top)
        found.append(top)
    assert found == [first, second]
    assert accounts.furthest_above() is None
    accounts.grew(second)
    assert accounts.furthest_above() is second
    accounts.grew(first)
    assert accounts.furthest_above() is first


@settings(deadline=None, max_examples=200)
@given(
    terms=st.lists(
        st.builds(
            AccountTerms,
            reserved=st.integers(0, 5),
            weight=st.sampled_from([0.5, 1.0, 3.0]),
        ),
        min_size=1,
        max_size=6,
    ),
    changes=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=120),
)
def test_the_furthest_is_found_whatever_grew_and_shrank(
    terms: list[AccountTerms], changes: list[tuple[int, int]]
) -> None:
    """And the bound on the next one holds; the heap does not grow with the changes."""
    accounts = make_accounts(*terms)
    everyone = list(accounts)
    for who, resident in changes:
        account = everyone[who % len(everyone)]
        grows = resident > account.resident
        account.resident = resident
        if grows:
            accounts.grew(account)
        if who % 2:
            above = sorted((a.excess for a in everyone if a.excess > 0), reverse=True)
            top = accounts.furthest_above()
            assert (top.excess if top else None) == (above[0] if above else None)
            if top:
                assert accounts.next_excess() >= (0.0, *above[1:2])[-1]
        assert len(accounts._heap) <= 4 * len(everyone) + 64


def test_the_heap_of_accounts_stays_small_however_often_they_grow() -> None:
    """CASES 27."""
    manager = make_manager(4)
    for number in range(500):
        store(manager, [b"%d" % number], ReqContext(request_id="r"))
    accounts = manager._table.accounts
    assert len(accounts._heap) <= 4 + 64
    assert accounts.furthest_above() is accounts.get("default")


@settings(deadline=None, max_examples=100)
@given(
    holdings=st.lists(
        st.tuples(st.integers(0, 8), st.sampled_from([0.5, 1.0, 3.0])),
        min_size=1,
        max_size=5,
    ),
    data=st.data(),
)
def test_who_protects_most_gives_up_one_by_one(
    holdings: list[tuple[int, float]], data: st.DataObject
) -> None:
    accounts = make_accounts(*(AccountTerms(weight=weight) for _, weight in holdings))
    protected = {"default": 0}
    for name, (count, _) in zip(NAMES, holdings, strict=False):
        accounts.get(name).protected = protected[name] = count
    excess = data.draw(st.integers(0, sum(protected.values())))
    shares = accounts.over_budget(excess)
    assert sum(shares.values()) == excess
    for _ in range(excess):
        most = max(protected, key=lambda n: protected[n] / accounts.get(n).weight)
        protected[most] -= 1
    assert protected == {a.name: a.protected - shares[a] for a in accounts}


@pytest.mark.parametrize(
    ("field", "value"),
    [("resident", 3), ("resident", -1), ("num_pinned", 2), ("protected", 2)],
)
def test_check_terms_sees_damage(field: str, value: int) -> None:
    accounts = make_accounts(AccountTerms(limit=2))
    accounts.get("tenant0").resident = 1
    check_terms(accounts, num_slots=2)
    setattr(accounts.get("tenant0"), field, value)
    with pytest.raises(AssertionError):
        check_terms(accounts, num_slots=2)


def test_check_terms_sees_more_chunks_than_slots() -> None:
    accounts = make_accounts(AccountTerms())
    for account in accounts:
        account.resident = 2
    with pytest.raises(AssertionError):
        check_terms(accounts, num_slots=3)
