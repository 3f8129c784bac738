"""`EvictionOrder`: in which order the runs of one tenant go."""

from __future__ import annotations

import itertools

import msgspec
from helpers import make_chain
from hypothesis import given, settings
from hypothesis import strategies as st
from manager_probe import make_manager, store

from vllm_ctx_offload.context import Hints, ReqContext
from vllm_ctx_offload.core import AccountTerms
from vllm_ctx_offload.core.order import RELEASED, EvictionOrder, Run
from vllm_ctx_offload.core.tenants import Account

ACCOUNT = Account.make("acme", 1, 1, AccountTerms())
# Their runs stand before and behind those of the account in the same lists.
OTHERS = [Account.make("zeta", place, place, AccountTerms()) for place in (0, 2)]


def make_run(
    run_id: int,
    *,
    used_at: float = 0.0,
    expected_at: float | None = None,
    priority: int = 35,
    stamp: int | None = None,
) -> Run:
    run = Run.make(ACCOUNT, run_id, run_id if stamp is None else stamp, used_at)
    run.expected_at, run.priority = expected_at, priority
    return run


def make_order(*runs: Run) -> EvictionOrder:
    """Returns an order that holds runs of other accounts too."""
    order = EvictionOrder()
    for account in OTHERS:
        order.add(Run.make(account, 1, 1, 0.0))
        order.add(
            msgspec.structs.replace(Run.make(account, 2, 2, 0.0), expected_at=9.0)
        )
    for run in runs:
        order.add(run)
    return order


def ids(order: EvictionOrder, now: float, *, above: int = RELEASED - 1) -> list[int]:
    return [run.run_id for run in order.victims(ACCOUNT, now, above=above)]


def test_an_empty_order_has_no_victims() -> None:
    assert ids(EvictionOrder(), 0.0) == ids(make_order(), 0.0) == []


def test_the_lowest_priority_goes_first_and_then_the_least_recently_used() -> None:
    order = make_order(
        make_run(1, priority=90), make_run(3), make_run(2), make_run(4, priority=-1)
    )
    assert ids(order, 0.0) == [4, 2, 3, 1]


def test_time_left_and_time_since_the_last_use_are_compared() -> None:
    order = make_order(
        make_run(1, used_at=0.0),  # 10 s ago
        make_run(2, used_at=6.0),  # 4 s ago
        make_run(3, expected_at=20.0),  # in 10 s
        make_run(4, expected_at=15.0),  # in 5 s
        make_run(5, expected_at=40.0),
    )
    assert ids(order, 10.0) == [5, 1, 3, 4, 2]


def test_of_equal_estimates_the_least_recently_used_goes_first() -> None:
    """And of one chain the part behind, as without an estimate."""
    order = make_order(*(make_run(n, expected_at=50.0) for n in (3, 1, 2)))
    assert ids(order, 10.0) == [1, 2, 3]
    same_use = [make_run(n, expected_at=50.0, stamp=9) for n in (5, 6)]
    assert ids(make_order(*same_use), 10.0) == [6, 5]


def test_parts_split_off_a_run_go_before_it_the_first_of_them_first() -> None:
    head, first, second = make_run(1), make_run(2), make_run(3)
    first.become_tail_of(head)
    second.become_tail_of(head)
    older, younger = make_run(4, stamp=0), make_run(5, stamp=2)
    order = make_order(second, head, first, older, younger)
    assert ids(order, 0.0) == [4, 2, 3, 1, 5]


def test_a_discarded_run_is_gone() -> None:
    runs = [make_run(1, priority=90), make_run(2, priority=90, expected_at=5.0)]
    order = make_order(*runs, make_run(3))
    num_before = len(list(order))
    for run in runs:
        order.discard(run)
    assert ids(order, 0.0) == [3]
    assert len(list(order)) == num_before - 2


def test_the_first_above_a_priority_is_the_victim_of_the_lowest_such_one() -> None:
    order = make_order(
        make_run(1, priority=90),
        make_run(2, priority=60, used_at=5.0),
        make_run(3, priority=60, expected_at=100.0),
        make_run(4, priority=35),
    )
    assert [ids(order, now, above=35)[0] for now in (10.0, 60.0)] == [3, 2]
    assert ids(order, 0.0, above=60) == [1]


@settings(deadline=None, max_examples=150)
@given(
    runs=st.lists(
        st.tuples(
            st.sampled_from([10, 35, 90]),
            st.one_of(st.none(), st.integers(0, 30)),
            st.integers(0, 3),
        ),
        max_size=25,
    ),
    now=st.integers(20, 25),
)
def test_victims_come_by_priority_and_then_by_time_to_reuse(
    runs: list[tuple[int, int | None, int]], now: int
) -> None:
    used_at, made = 0, []
    for number, (priority, expected_at, seconds) in enumerate(runs):
        used_at = min(used_at + seconds, 20)
        made.append(
            make_run(
                number, used_at=used_at, expected_at=expected_at, priority=priority
            )
        )
    order = make_order(*reversed(made))
    found = list(order.victims(ACCOUNT, now))
    assert {*found} == {*made}
    keys = [(run.priority, -run.time_to_reuse(now)) for run in found]
    assert keys == sorted(keys)
    for one, other in itertools.pairwise(found):
        same = (one.priority, one.expected_at) == (other.priority, other.expected_at)
        assert not same or one.rank < other.rank


def test_along_a_chain_of_several_owners_each_run_is_older_than_the_one_before() -> (
    None
):
    """CASES 23: parts that are alike but not neighbours are no one run."""
    manager = make_manager(8, max_protected=8)
    chain = make_chain(6)
    session = ReqContext("1", hints=Hints(session="s"))
    nobody = ReqContext("2")
    store(manager, chain[:2], session)
    store(manager, chain[:4], nobody)
    store(manager, chain[:6], session)
    manager.touch(chain, session)
    table = manager._table
    victims = table.order.victims(table.accounts.get("default"), 0.0)
    keys = [key for run in victims for key in reversed(run.chunks)]
    assert keys == [*reversed(chain)]
