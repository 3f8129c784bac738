"""Who gives way to a store, chunk by chunk, in the order of docs/policy.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple

from vllm_ctx_offload.core.order import Run
from vllm_ctx_offload.core.runs import RunTable
from vllm_ctx_offload.core.tenants import Account

__all__ = [
    "REJECT_FULL",
    "REJECT_LIMIT",
    "REJECT_PRIORITY",
    "REJECT_REUSE",
    "Room",
    "RoomMaker",
]

# Why a chunk found no place.
REJECT_FULL: Final = "full"  # transfers hold on to all that could go
REJECT_LIMIT: Final = "limit"  # the same, of a tenant that is at its limit
REJECT_PRIORITY: Final = "priority"  # all that could go has a higher priority
REJECT_REUSE: Final = "expected_reuse"  # all that could go is expected back sooner


class Room(NamedTuple):
    """What was found for a number of chunks."""

    num_granted: int
    reason: str | None  # why not more


class _Queue:
    """Runs in the order in which they go; one that has nothing to give leaves it."""

    __slots__ = ("_runs", "head")

    def __init__(self, runs: Iterator[Run]) -> None:
        self._runs = runs
        self.head = next(runs, None)

    def drop_head(self) -> None:
        self.head = next(self._runs, None)


class RoomMaker:
    """Makes room for one store; its victims are out of their runs and accounts.

    For each chunk in turn: a free slot; of a tenant at its limit only its own chunks;
    chunks of released sessions; else a chunk of the tenant furthest above its
    reservation, the storing one included, which pays too where nobody is above. What
    is granted is accounted to the storing tenant at once, so it counts for the next
    chunk. Pinned chunks are passed over.

    A tenant's own chunk gives way to no chunk that is worth less to the tenant: of a
    lower priority, or of the same and expected back later.

    Chunks may be taken one by one from several accounts in turn, so what is passed over
    is passed over once: the orders change only when `finish` is called.
    """

    def __init__(
        self,
        table: RunTable,
        account: Account,
        num_free: int,
        now: float,
        expected_at: float | None,
    ) -> None:
        self._table = table
        self._account = account
        self._num_free = num_free
        self._now = now
        self._time_left = None if expected_at is None else expected_at - now
        self._num_resident = len(table.run_of) - num_free
        self._reason = REJECT_FULL
        self._num_granted = 0
        self._aside: list[Account] = []
        self._payers: set[Account] = set()
        self._released = _Queue(iter(table.released))
        self._queues: dict[int, _Queue] = {}  # by the accounts' places in the order
        self._emptied: list[Run] = []
        # The pinned chunks that were found at the end of a run, the last one first.
        self._passed: dict[Run, list[tuple[bytes, int]]] = {}
        self.victims: list[tuple[bytes, int]] = []  # key and slot
        self.evicted: Counter[str] = Counter()  # by the name of who held them
        # Of these, what others took of a reservation, released chunks aside. Always
        # empty, as long as the choice of who pays is right.
        self.breached: Counter[str] = Counter()

    def make(self, wanted: int, priority: int) -> Room:
        """Grants as many of `wanted` chunks of a priority as there is room for."""
        account, granted = self._account, 0
        while granted < wanted:
            want = wanted - granted
            below = account.room_below_limit()
            if below == 0:
                got = self._take_own(want, priority, REJECT_LIMIT)
            else:
                if below is not None:
                    want = min(want, below)
                if self._num_free:
                    got = min(want, self._num_free)
                    self._num_free -= got
                else:
                    got = self._take_any(want, priority)
            if not got:
                return Room(granted, self._reason)
            account.resident += got
            self._num_granted += got
            granted += got
        return Room(granted, None)

    def finish(self) -> None:
        """Brings the orders and the accounts' places up to date."""
        for run, pinned in self._passed.items():
            run.chunks.update(reversed(pinned))
        for run in self._emptied:
            self._table.forget(run)
        for account in {*self._payers, *self._aside, self._account}:
            self._table.accounts.changed(account)

    def _take_any(self, want: int, priority: int) -> int:
        account, accounts = self._account, self._table.accounts
        if got := self._take(self._released, want):
            return got
        if accounts.one_order:
            return self._take_own(want, priority, REJECT_FULL)
        own_is_pinned = False
        while True:
            top = accounts.furthest_above()
            if not own_is_pinned and (top is None or account.excess >= top.excess):
                got = self._take_own(want, priority, REJECT_FULL)
                if got or self._reason in (REJECT_PRIORITY, REJECT_REUSE):
                    return got
                own_is_pinned = True
            elif top is None:
                return 0
            elif top is account or not (got := self._take_from(top, want)):
                accounts.set_aside(top)
                self._aside.append(top)
            else:
                return got

    def _take_own(self, want: int, priority: int, reason: str) -> int:
        self._reason = reason
        if not self._num_evictable():
            return 0
        return self._take(self._queue(self._account), want, priority)

    def _num_evictable(self) -> int:
        """Returns how many chunks in the account's order are not pinned."""
        if self._table.accounts.one_order:
            return self._num_resident - len(self.victims) - len(self._table.pins)
        # What was granted already has no pins yet.
        account = self._account
        return account.resident - account.num_pinned - self._num_granted

    def _take_from(self, other: Account, want: int) -> int:
        """Takes from the furthest account for as long as it stays the furthest."""
        if other.num_pinned == other.resident:
            return 0
        account = self._account
        rates = 1 / account.weight + 1 / other.weight
        ahead_of_us = (other.excess - account.excess) / rates
        ahead_of_next = (
            other.excess - self._table.accounts.next_excess()
        ) * other.weight
        most = max(int(min(ahead_of_us, ahead_of_next)), 1)
        got = self._take(self._queue(other), min(want, most))
        if other.resident < other.reserved:
            self.breached[other.name] += min(got, other.reserved - other.resident)
        return got

    def _queue(self, account: Account) -> _Queue:
        queue = self._queues.get(account.place)
        if queue is None:
            queue = _Queue(self._table.order.victims(account, self._now))
            self._queues[account.place] = queue
        return queue

    def _take(self, queue: _Queue, want: int, priority: int | None = None) -> int:
        """Takes up to `want` chunks, none worth more than a store of `priority`."""
        got = 0
        while got < want and (run := queue.head) is not None:
            num_passed = len(self._passed.get(run, ()))
            if run.num_pinned == len(run.chunks) + num_passed:
                queue.drop_head()
                continue
            if priority is not None and (reason := self._worth_more(run, priority)):
                self._reason = reason
                break
            got += self._take_tail(run, want - got)
        return got

    def _worth_more(self, run: Run, priority: int) -> str | None:
        """Returns why a run of the same tenant is worth more than what is stored."""
        if run.priority > priority:
            return REJECT_PRIORITY
        if (
            run.priority == priority
            and self._time_left is not None
            and run.time_to_reuse(self._now) < self._time_left
        ):
            return REJECT_REUSE
        return None

    def _take_tail(self, run: Run, want: int) -> int:
        """Takes up to `want` unpinned chunks from the end of a run."""
        chunks, pins, victims = run.chunks, self._table.pins, self.victims
        num_before = len(victims)
        if not run.num_pinned:
            count = min(want, len(chunks))
            victims.extend([chunks.popitem() for _ in range(count)])
        else:
            passed = self._passed.setdefault(run, [])
            while chunks and len(victims) - num_before < want:
                item = chunks.popitem()
                (passed if item[1] in pins else victims).append(item)
        if not chunks and not run.num_pinned:
            self._emptied.append(run)
        got = len(victims) - num_before
        run.account.resident -= got
        self._table.count_protected(run, -got)
        self.evicted[run.account.name] += got
        self._payers.add(run.account)
        return got
