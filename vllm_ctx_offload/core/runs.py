"""All runs: what they hold, who pins it, and what time does to them."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from sortedcontainers import SortedList

from vllm_ctx_offload.context import DEFAULT_PRIORITY
from vllm_ctx_offload.core.order import MAX_MOVES, RELEASED, Run, Session
from vllm_ctx_offload.core.tenants import Account, Accounts

__all__ = ["RunTable"]


class RunTable:
    """Which run each slot's chunk is in, and each run's place in the orders.

    A run is listed, that is in its account's order, from the end of the use that made
    it until it is empty. Chunks of unlisted runs can't be chosen as victims.

    Flat arrays and dicts of plain values: a million chunks are no objects that the
    garbage collector would have to visit.
    """

    def __init__(self, num_slots: int, accounts: Accounts, max_protected: int) -> None:
        self.accounts = accounts
        self.run_of = array("q", bytes(8 * num_slots))  # slot -> id of its run
        self.pins: dict[int, int] = {}  # slot -> number of pins, where there are any
        self.num_protected = 0  # chunks of a priority above the default
        self.released: SortedList[Run] = SortedList(key=lambda run: run.rank)
        self._runs: dict[int, Run] = {}
        self._last_run_id = 0
        self._max_protected = max_protected
        self._sessions: dict[tuple[str, ...], Session] = {}
        self._expiring: SortedList[Run] = SortedList(
            key=lambda run: (run.expires_at, run.run_id)
        )

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
        run = Run(account, self._last_run_id, stamp, used_at)
        self._runs[run.run_id] = run
        return run

    def enlist(self, run: Run) -> None:
        run.account.order.add(run)
        if run.expires_at is not None:
            self._expiring.add(run)
        if (session := run.session) is not None:
            session.runs.add(run)
            # It was closed if the use that made this run emptied the last one.
            self._sessions[session.key] = session
        if run.priority == RELEASED:
            self.released.add(run)

    def delist(self, run: Run) -> None:
        run.account.order.discard(run)
        if run.expires_at is not None:
            self._expiring.remove(run)
        if run.session is not None:
            run.session.runs.discard(run)
        if run.priority == RELEASED:
            self.released.remove(run)

    def forget(self, run: Run) -> None:
        """Takes out a listed run that holds no chunk any more."""
        self.delist(run)
        del self._runs[run.run_id]
        if run.session is not None:
            self.close(run.session)

    def drop(self, key: bytes, slot: int) -> None:
        """Takes one unpinned chunk out of its listed run."""
        run = self.run(slot)
        del run.chunks[key]
        self.count_protected(run, -1)
        run.account.resident -= 1
        if not run.chunks:
            self.forget(run)

    # ---- sessions

    def session(self, key: tuple[str, ...]) -> Session:
        """Returns the session of a key; `close` it when it may have no chunks."""
        return self._sessions.setdefault(key, Session(key))

    def close(self, session: Session) -> None:
        """Forgets a session that has no runs."""
        if not session.runs:
            self._sessions.pop(session.key, None)

    def release(self, session: Session) -> None:
        """Makes the session's own chunks the first to go."""
        for run in sorted(session.runs, key=lambda run: run.rank):
            self._change(run, RELEASED, expected_at=None)
        self.close(session)

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
            run.account.protected += num_chunks
            self.num_protected += num_chunks

    def _change(self, run: Run, priority: int, expected_at: float | None) -> None:
        """Gives a run another priority, for good; its last use stays."""
        self.delist(run)
        self.count_protected(run, -len(run.chunks))
        run.priority, run.ttl_s, run.expires_at = priority, None, None
        run.expected_at = expected_at
        self.count_protected(run, len(run.chunks))
        self.enlist(run)

    def expire(self, now: float) -> None:
        """Ends the priorities whose time has passed, a bounded number at a time."""
        for _ in range(MAX_MOVES):
            if not self._expiring:
                return
            run = self._expiring[0]
            if run.expires_at is None or run.expires_at > now:
                return
            self._change(run, run.account.base_priority, run.expected_at)

    def became_readable(self, slots: Sequence[int], now: float) -> None:
        """Starts the time of stored chunks' priorities: it counts from here."""
        for run_id, count in Counter(map(self.run_of.__getitem__, slots)).items():
            run = self._runs[run_id]
            whole = count == len(run.chunks)
            for part in (run,) if whole else self._parts_in(run, {*slots}):
                part.being_stored = False
                if part.ttl_s is not None:
                    part.expires_at, part.ttl_s = now + part.ttl_s, None
                    self._expiring.add(part)

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
                run = account.order.first_above(DEFAULT_PRIORITY, now)
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
        """Raises AssertionError unless runs, pins and accounts agree."""
        protected = 0
        for account in self.accounts:
            runs = [run for run in self if run.account is account]
            assert account.resident == sum(len(run.chunks) for run in runs)
            assert account.num_pinned == sum(run.num_pinned for run in runs)
            raised = [run for run in runs if run.priority > DEFAULT_PRIORITY]
            assert account.protected == sum(len(run.chunks) for run in raised)
            protected += account.protected
            listed = {run for run in account.order.runs() if run.account is account}
            assert listed == set(runs), account.name
        assert protected == self.num_protected <= max(self._max_protected, 0)
        for run in self:
            assert run.chunks, "an empty run"
            slots = run.chunks.values()
            assert all(self.run_of[slot] == run.run_id for slot in slots)
            assert run.num_pinned == sum(slot in self.pins for slot in slots)
            assert run.expires_at is None or run in self._expiring
            assert run.expires_at is None or not run.being_stored
            assert run.ttl_s is None or run.being_stored
            assert run.priority != RELEASED or run in self.released
            assert run.session is None or run in run.session.runs
        timed = [run for run in self if run.expires_at is not None]
        released = [run for run in self if run.priority == RELEASED]
        assert len(self._expiring) == len(timed)
        assert len(self.released) == len(released)
        assert all(count > 0 for count in self.pins.values())
        sessions = {run.session for run in self if run.session is not None}
        assert set(self._sessions.values()) == sessions
