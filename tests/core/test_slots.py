"""`SlotAllocator`: each slot has one owner at a time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ctx_offload.core.slots import SlotAllocator


def state(slots: SlotAllocator) -> object:
    return (list(slots._freed), slots._next_unused, bytes(slots._in_use))


def test_unused_slots_come_in_ascending_order() -> None:
    slots = SlotAllocator(4)
    assert slots.take(4) == [0, 1, 2, 3]
    slots.check_invariants()


def test_the_slot_freed_last_is_reused_before_any_other() -> None:
    slots = SlotAllocator(5)
    slots.take(4)
    slots.free([1, 3])
    slots.check_invariants()
    assert slots.take(1) == [3]
    assert slots.take(2) == [1, 4]
    slots.check_invariants()


def test_slots_of_several_victims_come_in_runs() -> None:
    slots = SlotAllocator(9)
    slots.take(8)
    slots.free([6, 5])  # two chains, the tail of each first
    slots.free([4, 3, 2])
    assert slots.take(6) == [2, 3, 4, 5, 6, 8]
    slots.check_invariants()


def test_an_empty_pool_begins_anew() -> None:
    slots = SlotAllocator(5)
    slots.take(4)
    slots.free([2, 0])
    slots.free([3, 1])
    slots.check_invariants()
    assert slots.num_free == 5
    assert [slots.take(2), slots.take(3)] == [[0, 1], [2, 3, 4]]


def test_num_free_counts_freed_and_unused_slots() -> None:
    slots = SlotAllocator(3)
    free = [slots.num_free]
    slots.take(2)
    free.append(slots.num_free)
    slots.free([0])
    free.append(slots.num_free)
    assert free == [3, 1, 2]


@pytest.mark.parametrize("num_slots", [0, 2])
def test_a_full_pool_refuses_and_stays_as_it_is(num_slots: int) -> None:
    slots = SlotAllocator(num_slots)
    slots.take(num_slots)
    before = state(slots)
    with pytest.raises(IndexError, match="1 slots wanted, 0 are free"):
        slots.take(1)
    assert state(slots) == before
    slots.check_invariants()


@pytest.mark.parametrize("slot", [-1, 1, 2, 3, 10**9])
def test_freeing_what_is_not_in_use_is_refused(slot: int) -> None:
    """CASES 25: a double free (slot 1), an unused slot, or none of the pool's."""
    slots = SlotAllocator(3)
    slots.take(2)
    slots.free([1])
    before = state(slots)
    with pytest.raises(ValueError, match=f"slot {slot} is not in use"):
        slots.free([slot])
    assert state(slots) == before
    slots.check_invariants()


@pytest.mark.parametrize("wrong", [0, 2, 7])
def test_of_several_slots_none_is_freed_when_one_is_not_in_use(wrong: int) -> None:
    """The same slot twice in one call is such a fault too."""
    slots = SlotAllocator(3)
    slots.take(2)
    before = state(slots)
    with pytest.raises(ValueError, match=f"slot {wrong} is not in use"):
        slots.free([0, 1, wrong])
    assert state(slots) == before
    slots.check_invariants()


def test_no_slots_are_taken_where_too_few_are_free() -> None:
    slots = SlotAllocator(5)
    slots.take(3)
    slots.free([1])
    before = state(slots)
    with pytest.raises(IndexError, match="4 slots wanted, 3 are free"):
        slots.take(4)
    assert state(slots) == before
    assert slots.take(0) == []


def test_a_negative_number_of_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="num_slots = -1 is negative"):
        SlotAllocator(-1)


@settings(deadline=None)
@given(num_slots=st.integers(0, 9), ops=st.lists(st.integers(0, 12), max_size=60))
def test_no_slot_is_handed_out_twice(num_slots: int, ops: list[int]) -> None:
    """P5, CASES 25: free + owned = capacity, and no two owners of one slot."""
    slots, owned = SlotAllocator(num_slots), []
    for op in ops:
        if op % 2 or not owned:
            unused = slots.num_free - len(slots._freed)
            last = slots._freed[::-1][: op // 2]
            taken = slots.take(min(op // 2, slots.num_free))
            assert taken == sorted(taken)
            # What was freed last, and only then what was never used.
            assert set(last) <= set(taken)
            assert len(taken) - len(last) <= unused
            owned += taken
        else:
            slots.free([owned.pop(op // 2 % len(owned))])
        slots.check_invariants()
        assert len(set(owned)) == len(owned)
        assert set(owned) <= set(range(num_slots))
        assert slots.num_free + len(owned) == num_slots


@pytest.mark.parametrize(
    "damage",
    [
        lambda slots: slots._freed.append(0),
        lambda slots: slots._freed.append(1),
        lambda slots: slots._in_use.__setitem__(2, 1),
    ],
    ids=["freed twice", "freed while in use", "in use without owner"],
)
def test_check_invariants_sees_damage(damage: object) -> None:
    slots = SlotAllocator(3)
    slots.take(2)
    slots.free([0])
    slots.check_invariants()
    damage(slots)
    with pytest.raises(AssertionError):
        slots.check_invariants()


@settings(deadline=None)
@given(data=st.data(), num_slots=st.integers(0, 9))
def test_a_reset_leaves_in_use_what_it_shall_and_nothing_else(
    data: st.DataObject, num_slots: int
) -> None:
    """Also where what is kept lies among slots that are taken or freed later."""
    slots = SlotAllocator(num_slots)
    owned = slots.take(data.draw(st.integers(0, num_slots)))
    kept = [slot for slot in owned if data.draw(st.booleans())]
    slots.reset(kept)
    slots.check_invariants()
    assert slots.num_free == num_slots - len(kept)
    taken = slots.take(data.draw(st.integers(0, slots.num_free)))
    assert taken == sorted({*range(num_slots)} - {*kept})[: len(taken)]
    slots.check_invariants()
    slots.free(kept)
    slots.check_invariants()
    others = slots.take(slots.num_free)
    assert {*taken, *others} == {*range(num_slots)}
    assert len(taken) + len(others) == num_slots
