"""`account_terms` and `Accounts`: what tenants may hold, and who is furthest above."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ctx_offload.config import parse_config
from vllm_ctx_offload.core import AccountTerms, account_terms
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
    return Accounts({"default": AccountTerms(), **by_name}, one_order=False)


def test_an_undeclared_tenant_is_accounted_to_default() -> None:
    accounts = make_accounts(AccountTerms())
    assert accounts.get("tenant0").name == "tenant0"
    assert accounts.get("nobody") is accounts.get("*") is accounts.get("default")


def test_all_accounts_can_have_one_place_in_the_order() -> None:
    terms = {"default": AccountTerms(), "a": AccountTerms()}
    for one_order, places in ((True, {0}), (False, {0, 1})):
        accounts = Accounts(terms, one_order=one_order)
        assert {account.place for account in accounts} == places


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
    accounts.changed(accounts.get("tenant0"))
    assert accounts.furthest_above() is None
    accounts.get("tenant0").resident = 3
    accounts.changed(accounts.get("tenant0"))
    assert accounts.furthest_above() is accounts.get("tenant0")


def test_the_excess_counts_in_units_of_the_weight() -> None:
    accounts = make_accounts(AccountTerms(weight=4.0), AccountTerms(reserved=5))
    for name, resident in (("tenant0", 8), ("tenant1", 8), ("default", 2)):
        accounts.get(name).resident = resident
        accounts.changed(accounts.get(name))
    assert accounts.furthest_above() is accounts.get("tenant1")  # 3, 2 and 2
    assert accounts.next_excess() == 2.0


def test_an_account_set_aside_is_passed_over_until_it_changes() -> None:
    accounts = make_accounts(AccountTerms())
    first, second = accounts.get("tenant0"), accounts.get("default")
    for account, resident in ((first, 3), (second, 2)):
        account.resident = resident
        accounts.changed(account)
    found = []
    for _ in range(2):
        top = accounts.furthest_above()
        accounts.set_aside(top)
        found.append(top)
    assert found == [first, second]
    assert accounts.furthest_above() is None
    accounts.changed(second)
    assert accounts.furthest_above() is second
    accounts.changed(first)
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
    """And the next one, as long as all was told; a bound on it otherwise."""
    accounts = make_accounts(*terms)
    everyone = list(accounts)
    for who, resident in changes:
        account = everyone[who % len(everyone)]
        grows = resident > account.resident
        account.resident = resident
        if grows or who % 3:
            accounts.changed(account)
        if who % 2:
            above = sorted((a.excess for a in everyone if a.excess > 0), reverse=True)
            top = accounts.furthest_above()
            assert (top.excess if top else None) == (above[0] if above else None)
            if top:
                assert accounts.next_excess() >= (0.0, *above[1:2])[-1]
        assert len(accounts._above) == len(everyone)
    for account in everyone:
        accounts.changed(account)
    above = sorted((0.0, 0.0, *(a.excess for a in everyone)), reverse=True)
    accounts.furthest_above()
    assert accounts.next_excess() == above[1]


def test_who_changed_is_told_once() -> None:
    accounts = make_accounts(AccountTerms(), AccountTerms())
    first = accounts.get("tenant0")
    accounts.changed(first)
    assert [accounts.take_changed(), accounts.take_changed()] == [{first}, set()]
    first.resident = first.protected = first.num_pinned = 2
    accounts.clear()
    assert accounts.take_changed() == {first}
    assert (first.resident, first.protected, first.num_pinned) == (0, 0, 0)


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
        protected[name] = count
        accounts.protect(accounts.get(name), count)
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
