"""All runs: what they hold, who pins it, and what time does to them."""

from __future__ import annotations

import copy
import itertools
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence

from sortedcontainers import SortedKeyList

from vllm_ctx_offload.context import DEFAULT_PRIORITY
from vllm_ctx_offload.core.order import (
    MAX_MOVES,
    RELEASED,
    EvictionOrder,
    Run,
)
from vllm_ctx_offload.core.sessions import Session, Sessions
from vllm_ctx_offload.core.tenants import Account, Accounts

__all__ = ["RunTable"]


class RunTable:
    """Which run each slot's chunk is in, and each run's place in the orders.

    A run is listed, that is in the eviction order, from the end of the use that made it
    until it is empty. Chunks of unlisted runs can't be chosen as victims.

    What happens to many runs at once, because their time has passed or their session
    was released, is done to a bounded number of them with each use (`catch_up`).

    Flat arrays and dicts of plain values: a million chunks are no objects that the
    garbage collector would have to visit.
    """

    def __init__(self, num_slots: int, accounts: Accounts, max_protected: int) -> None:
        self.accounts = accounts
        self.run_of = array("q", bytes(8 * num_slots))  # slot -> id of its run
        self.pins: dict[int, int] = {}  # slot -> number of pins, where there are any
        self._max_protected = max_protected
        self._last_run_id = 0
        # What resets have forgotten and is not taken apart yet.
        self._forgotten: deque[RunTable] = deque()
        self._begin()

    def _begin(self) -> None:
        """Begins anew, without a run."""
        self.num_protected = 0  # chunks of a priority above the default
        self.order = EvictionOrder()
        self.released: SortedKeyList[Run, tuple[float, ...]] = SortedKeyList(key=_rank)
        self._runs: dict[int, Run] = {}
        self.sessions = Sessions()
        self._due: SortedKeyList[Run, tuple[float, ...]] = SortedKeyList(key=_due)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs.values())

    def __getitem__(self, run_id: int) -> Run:
        return self._runs[run_id]

    def run(self, slot: int) -> Run:
        """Returns the run that holds the chunk in `slot`."""
        return self._runs[self.run_of[slot]]

    # ---- runs come and go

    def make(self, account: Account, stamp: int, used_at: float) -> Run:
        """Returns a new run, unlisted."""
        self._last_run_id += 1
        run = Run.make(account, self._last_run_id, stamp, used_at)
        self._runs[run.run_id] = run
        return run

    def enlist(self, run: Run) -> None:
        self.sessions.join(run)
        self._list(run)

    def forget(self, run: Run) -> None:
        """Takes out a listed run that holds no chunk any more."""
        self._unlist(run)
        del self._runs[run.run_id]
        self.sessions.leave(run)

    def _list(self, run: Run) -> None:
        self.order.add(run)
        if run.due_at is not None:
            self._due.add(run)
        if run.priority == RELEASED:
            self.released.add(run)

    def _unlist(self, run: Run) -> None:
        """Needs the run's priority and times to be as they were."""
        self.order.discard(run)
        if run.due_at is not None:
            self._due.remove(run)
        if run.priority == RELEASED:
            self.released.remove(run)

    def drop(self, key: bytes, slot: int) -> None:
        """Takes one unpinned chunk out of its listed run."""
        run = self.run(slot)
        del run.chunks[key]
        self.count_protected(run, -1)
        run.account.resident -= 1
        self.accounts.changed(run.account)
        if not run.chunks:
            self.forget(run)

    def reset(self) -> dict[bytes, int]:
        """Forgets every chunk but the pinned ones, which it returns with their slots.

        These keep their pins and who is accounted for them. Costs O(accounts) and O(1)
        per chunk of runs that are pinned: what was forgotten is taken apart later.
        """
        self._forgotten.append(copy.copy(self))
        pinned_runs = dict.fromkeys(map(self.run, self.pins))
        self._begin()
        self.accounts.clear()
        kept: dict[bytes, int] = {}
        for old in pinned_runs:
            run = self.make(old.account, stamp=0, used_at=0.0)
            chunks = {k: slot for k, slot in old.chunks.items() if slot in self.pins}
            kept |= chunks
            run.chunks, run.num_pinned = chunks, len(chunks)
            run.being_stored = old.being_stored
            for slot in chunks.values():
                self.run_of[slot] = run.run_id
            run.account.resident += len(chunks)
            run.account.num_pinned += len(chunks)
            self.accounts.changed(run.account)
            self.enlist(run)
        return kept

    def _take_apart(self, most: int) -> None:
        """Lets go of up to `most` forgotten runs: of all at once would take long."""
        for _ in range(most):
            if not self._forgotten:
                return
            table = self._forgotten[0]
            if (run := next(iter(table.order), None)) is None:
                self._forgotten.popleft()
            else:
                table.forget(run)

    # ---- releases

    def release(self, session: Session) -> None:
        """Makes the session's own chunks the first to go."""
        self.sessions.release(session)
        self._end_releases(MAX_MOVES)

    def _end_releases(self, most: int) -> None:
        """Makes up to `most` runs the first to go; those released first come first."""
        for _ in range(most):
            if (run_id := self.sessions.next_released()) is None:
                return
            run = self._runs[run_id]
            run.batch = None
            self._change(run, RELEASED, expected_at=None)

    # ---- pins

    def pin(self, slots: Iterable[int]) -> None:
        """Adds a pin to each of the chunks in `slots`."""
        pins = self.pins
        pinned = []
        for slot in slots:
            if slot in pins:
                pins[slot] += 1
            else:
                pins[slot] = 1
                pinned.append(slot)
        self._count_pinned(pinned, 1)

    def unpin(self, slots: Iterable[int]) -> None:
        """Takes a pin off each of the chunks in `slots`."""
        pins = self.pins
        unpinned = []
        for slot in slots:
            if (count := pins.pop(slot)) > 1:
                pins[slot] = count - 1
            else:
                unpinned.append(slot)
        self._count_pinned(unpinned, -1)

    def _count_pinned(self, slots: list[int], sign: int) -> None:
        for run_id, count in Counter(map(self.run_of.__getitem__, slots)).items():
            run = self._runs[run_id]
            run.num_pinned += sign * count
            run.account.num_pinned += sign * count

    # ---- priorities

    def count_protected(self, run: Run, num_chunks: int) -> None:
        """Has to be told of chunks that come to a run or leave it."""
        if run.priority > DEFAULT_PRIORITY:
            self.accounts.protect(run.account, num_chunks)
            self.num_protected += num_chunks

    def _change(self, run: Run, priority: int, expected_at: float | None) -> None:
        """Gives a run another priority, for good; its last use stays."""
        self._unlist(run)
        self.count_protected(run, -len(run.chunks))
        run.priority, run.ttl_s, run.expires_at = priority, None, None
        run.expected_at = expected_at
        self.count_protected(run, len(run.chunks))
        self._list(run)

    def catch_up(self, now: float, num_keys: int) -> None:
        """Does what time and releases have left to do, as part of a use of `num_keys`.

        No more of it than in proportion to the call, and no less than uses make.
        """
        most = max(MAX_MOVES, num_keys)
        self._end_times(now, most)
        self._end_releases(most)
        self._take_apart(most)

    def _end_times(self, now: float, most: int) -> None:
        """Ends the priorities and the estimates of up to `most` runs."""
        for _ in range(most):
            if not self._due or _due(run := self._due[0])[0] > now:
                return
            expected_at = run.expected_at
            if expected_at is not None and expected_at <= now:
                expected_at = None  # it has passed and counts as none
            if run.expires_at is not None and run.expires_at <= now:
                self._change(run, run.account.base_priority, expected_at)
            else:
                self._unlist(run)
                run.expected_at = expected_at
                self._list(run)

    def became_readable(self, slots: Sequence[int], now: float) -> None:
        """Starts the time of stored chunks' priorities: it counts from here."""
        for run_id, count in Counter(map(self.run_of.__getitem__, slots)).items():
            run = self._runs[run_id]
            whole = count == len(run.chunks)
            for part in (run,) if whole else self._parts_in(run, {*slots}):
                part.being_stored = False
                if part.ttl_s is not None:
                    if part.due_at is not None:
                        self._due.remove(part)
                    part.expires_at, part.ttl_s = now + part.ttl_s, None
                    self._due.add(part)

    def _parts_in(self, run: Run, slots: set[int]) -> Iterator[Run]:
        """Cuts a run where `slots` begin and end; yields the parts that lie in them."""
        tail_first = itertools.groupby(
            reversed(run.chunks.values()), slots.__contains__
        )
        parts = [(inside, sum(1 for _ in part)) for inside, part in tail_first]
        for inside, num_chunks in parts:
            is_rest = num_chunks == len(run.chunks)
            part = run if is_rest else self._split(run, num_chunks)
            if inside:
                yield part

    def enforce_budget(self, now: float) -> int:
        """Treats as of default priority what exceeds the protection budget.

        Returns the number of chunks that lost their priority.
        """
        excess = max(self.num_protected - self._max_protected, 0)
        for account, count in self.accounts.over_budget(excess).items():
            left = count
            while left:
                run = next(self.order.victims(account, now, above=DEFAULT_PRIORITY))
                if len(run.chunks) > left:
                    run = self._split(run, left)
                left -= len(run.chunks)
                self._change(run, account.base_priority, run.expected_at)
        return excess

    def _split(self, run: Run, num_chunks: int) -> Run:
        """Moves the deepest chunks of a run to one of their own, just older than it."""
        tail = self.make(run.account, run.rank[0], run.used_at)
        tail.become_tail_of(run)
        moved = [run.chunks.popitem() for _ in range(num_chunks)]
        tail.chunks.update(reversed(moved))
        for _, slot in moved:
            self.run_of[slot] = tail.run_id
            if slot in self.pins:
                run.num_pinned -= 1
                tail.num_pinned += 1
        self.enlist(tail)
        return tail

    def check_invariants(self) -> None:
        """Raises AssertionError unless runs, pins, sessions and accounts agree."""
        protected = 0
        for account in self.accounts:
            runs = [run for run in self if run.account is account]
            assert account.resident == sum(len(run.chunks) for run in runs)
            assert account.num_pinned == sum(run.num_pinned for run in runs)
            raised = [run for run in runs if run.priority > DEFAULT_PRIORITY]
            assert account.protected == sum(len(run.chunks) for run in raised)
            protected += account.protected
        assert protected == self.num_protected <= max(self._max_protected, 0)
        for run in self:
            assert run.chunks, "an empty run"
            slots = run.chunks.values()
            assert all(self.run_of[slot] == run.run_id for slot in slots)
            assert run.num_pinned == sum(slot in self.pins for slot in slots)
            assert run.expires_at is None or not run.being_stored
            assert run.ttl_s is None or run.being_stored
            assert run.batch is None or run.run_id in run.batch
        assert all(count > 0 for count in self.pins.values())
        self._check_lists()

    def _check_lists(self) -> None:
        """Raises AssertionError unless each list holds the runs that it should."""
        assert sorted(self.order, key=_rank) == sorted(self, key=_rank)
        assert list(self._due) == sorted(
            (run for run in self if run.due_at is not None), key=_due
        )
        assert list(self.released) == sorted(
            (run for run in self if run.priority == RELEASED), key=_rank
        )
        self.sessions.check_invariants(self)


def _rank(run: Run) -> tuple[int, ...]:
    return run.rank


def _due(run: Run) -> tuple[float, int]:
    assert run.due_at is not None
    return run.due_at, run.run_id
