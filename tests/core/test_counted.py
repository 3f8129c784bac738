"""`Counted` sees the loops that would make a call slow, whoever runs them."""

from __future__ import annotations

import functools
import heapq
import itertools
import sys
from collections import Counter, deque

import pytest
from core.counted import Counted
from sortedcontainers import SortedList

ITEMS = list(range(1_000))
COPY = list(ITEMS)


class Loops:
    """Each goes over all items."""

    def by_hand(self) -> object:
        total = 0
        for item in ITEMS:
            total += item
        return total

    def comprehended(self) -> object:
        return [item for item in ITEMS]  # noqa: C416

    def generated(self) -> object:
        return sum(item for item in ITEMS)

    def in_order(self) -> object:
        return sorted(ITEMS)

    def listed(self) -> object:
        return list({}.fromkeys(ITEMS))

    def mapped(self) -> object:
        return sum(map(abs, ITEMS))

    def zipped(self) -> object:
        return dict(zip(ITEMS, ITEMS, strict=True))

    def heap(self) -> object:
        return heapq.heapify(ITEMS)

    def least(self) -> object:
        return min(ITEMS)

    def counter(self) -> object:
        return Counter(ITEMS)

    def in_deque(self) -> object:
        return deque(ITEMS, maxlen=1)

    def sorted_in_place(self) -> object:
        return ITEMS.sort()

    def copied(self) -> object:
        return ITEMS.copy()

    def updated(self) -> object:
        return {}.update({}.fromkeys(ITEMS))

    def sliced(self) -> object:
        return ITEMS[1:]

    def unpacked(self) -> object:
        return (*ITEMS, 1)

    def added(self) -> object:
        return ITEMS + ITEMS

    def in_list(self) -> object:
        return -1 in ITEMS

    def equal(self) -> object:
        return ITEMS == COPY

    def skipped(self) -> object:
        return next(itertools.islice(ITEMS, 999, None))

    def reduced(self) -> object:
        return functools.reduce(max, ITEMS)

    def in_sorted_list(self) -> object:
        return SortedList(ITEMS)


class Steps:
    """None goes over many."""

    def length(self) -> object:
        return len(ITEMS)

    def item(self) -> object:
        return ITEMS[500]

    def appended(self) -> object:
        return [].append(ITEMS)

    def in_dict(self) -> object:
        return 7 in {}.fromkeys((1, 2))

    def first(self) -> object:
        return next(iter(ITEMS))

    def first_found(self) -> object:
        return next(item for item in ITEMS if item > 5)

    def lazy(self) -> object:
        return map(abs, ITEMS)


COUNTED = Counted([sys.modules[__name__]])


def written_in(cls: type) -> list[str]:
    return [name for name in vars(cls) if not name.startswith("_")]


@pytest.mark.parametrize("name", written_in(Loops))
def test_a_loop_counts_by_its_items(name: str) -> None:
    assert COUNTED.count(getattr(Loops(), name)) >= len(ITEMS) - 1


@pytest.mark.parametrize("name", written_in(Steps))
def test_what_does_not_loop_counts_as_little(name: str) -> None:
    assert COUNTED.count(getattr(Steps(), name)) < 30


def test_the_code_is_as_it_was_afterwards_also_where_the_call_fails() -> None:
    before = Loops.by_hand.__code__
    with pytest.raises(ZeroDivisionError):
        COUNTED.count(lambda: 1 / 0)
    assert Loops.by_hand.__code__ is before
