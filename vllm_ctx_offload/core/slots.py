"""The free slots of the host pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["SlotAllocator"]


class SlotAllocator:
    """Hands out the slots 0 to `num_slots` - 1, each to one owner at a time.

    The slot freed last is reused first, so memory that was never touched stays so as
    long as it can. Slots taken together come in ascending order, and an empty pool
    begins anew, so chunks that are stored together lie side by side where they can and
    copies are long. In a full pool there is no other choice: what a store takes is what
    was evicted for it.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 0:
            raise ValueError(f"num_slots = {num_slots} is negative")
        self.num_slots = num_slots
        self.num_free = num_slots
        self._freed: list[int] = []
        # From here on no slot was used, but those that `reset` has left in use.
        self._next_unused = 0
        self._in_use = bytearray(num_slots)

    def take(self, count: int) -> list[int]:
        """Returns `count` free slots in ascending order.

        Raises IndexError when there are not so many.
        """
        if count > self.num_free:
            raise IndexError(f"{count} slots wanted, {self.num_free} are free")
        reused = min(count, len(self._freed))
        slots = self._freed[len(self._freed) - reused :]
        del self._freed[len(self._freed) - reused :]
        slots.sort()
        slots.extend(self._take_unused(count - reused))
        for slot in slots:
            self._in_use[slot] = 1
        self.num_free -= count
        return slots

    def _take_unused(self, count: int) -> Sequence[int]:
        start, end = self._next_unused, self._next_unused + count
        slots: Sequence[int] = range(start, end)
        if self._in_use.find(1, start, end) >= 0:
            slots = []
            for _ in range(count):
                slots.append(start := self._in_use.find(0, start))
                start += 1
            end = start
        self._next_unused = end
        return slots

    def free(self, slots: Sequence[int]) -> None:
        """Takes slots back. Raises ValueError when one is not in use; none is then."""
        in_use = self._in_use
        for index, slot in enumerate(slots):
            if not 0 <= slot < self.num_slots or not in_use[slot]:
                for taken in slots[:index]:
                    in_use[taken] = 1
                raise ValueError(f"slot {slot} is not in use")
            in_use[slot] = 0
        self.num_free += len(slots)
        self._freed.extend(filter(self._next_unused.__gt__, slots))
        if self.num_free == self.num_slots:
            self._freed.clear()
            self._next_unused = 0

    def reset(self, kept: Iterable[int]) -> None:
        """Takes all slots back but those `kept`, and begins anew."""
        self._in_use = bytearray(self.num_slots)
        self._freed.clear()
        self._next_unused = 0
        self.num_free = self.num_slots
        for slot in kept:
            self._in_use[slot] = 1
            self.num_free -= 1

    def check_invariants(self) -> None:
        assert len(set(self._freed)) == len(self._freed), "a slot is free twice"
        assert not any(self._in_use[slot] for slot in self._freed)
        assert all(slot < self._next_unused for slot in self._freed)
        assert sum(self._in_use) + self.num_free == self.num_slots
