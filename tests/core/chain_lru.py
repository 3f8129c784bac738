"""Chain-aware LRU by time stamps: what there is without hints and tenants."""

from __future__ import annotations

from collections.abc import Sequence


class StampLru:
    """Keys with the number of their last use and their depth in the chain used then.

    Shares no idea with the code under test: no order is kept, the oldest is searched.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.stamps: dict[bytes, tuple[int, int]] = {}
        self.num_uses = 0

    def num_hits(self, chain: Sequence[bytes]) -> int:
        """Returns the length of the leading run that is there."""
        missing = (i for i, key in enumerate(chain) if key not in self.stamps)
        return next(missing, len(chain))

    def touch(self, chain: Sequence[bytes]) -> None:
        self.num_uses += 1
        for depth, key in enumerate(chain):
            if key in self.stamps:
                self.stamps[key] = (self.num_uses, -depth)

    def store(self, chain: Sequence[bytes]) -> list[bytes]:
        """Uses and stores a chain. Returns the victims in their order."""
        self.touch(chain)
        victims = []
        for depth, key in enumerate(chain):
            if key not in self.stamps and len(self.stamps) >= self.num_slots:
                oldest = min(self.stamps, key=self.stamps.__getitem__, default=key)
                if oldest in chain:
                    break
                victims.append(oldest)
                del self.stamps[oldest]
            self.stamps[key] = (self.num_uses, -depth)
        return victims

    def in_order(self) -> list[bytes]:
        """Returns the keys, the next victim first."""
        return sorted(self.stamps, key=self.stamps.__getitem__)
