"""In which order the chunks of one tenant would go."""

from __future__ import annotations

import itertools
import operator
import sys
from bisect import insort
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from sortedcontainers import SortedList

if TYPE_CHECKING:
    from vllm_ctx_offload.core.tenants import Account

__all__ = ["RELEASED", "EvictionOrder", "Run", "Session"]

# The priority of chunks whose session was released: below all that can be asked for.
RELEASED: Final = -1
# Runs whose time has passed are moved by so many a call, so that no call is long.
MAX_MOVES: Final = 256


class Session:
    """The runs that only this session's requests have used."""

    __slots__ = ("key", "runs")

    def __init__(self, key: tuple[str, ...]) -> None:
        self.key: Final = key
        self.runs: set[Run] = set()


class Run:
    """Chunks of one account that were last used together and are kept alike.

    The unit in which anything is ordered, so that hints and uses cost by the request
    and not by the chunk. `chunks` maps keys to slots along the chain, its head first:
    the last one goes first.
    """

    __slots__ = (
        "account",
        "being_stored",
        "chunks",
        "expected_at",
        "expires_at",
        "num_pinned",
        "num_splits",
        "priority",
        "rank",
        "run_id",
        "session",
        "ttl_s",
        "used_at",
    )

    def __init__(
        self, account: Account, run_id: int, stamp: int, used_at: float
    ) -> None:
        self.account: Final = account
        self.run_id: Final = run_id
        # Of what was used together the part made later is the deeper one: it is older.
        # Of one run the parts split off its end are older, the first one most.
        self.rank: tuple[int, ...] = (stamp, -run_id, sys.maxsize)
        self.num_splits = 0
        self.used_at: Final = used_at
        self.chunks: dict[bytes, int] = {}
        self.num_pinned = 0  # of `chunks`
        self.being_stored = False  # all of `chunks`, or none
        self.priority = account.base_priority  # the effective one
        # Of chunks that are being stored: it starts when they become readable.
        self.ttl_s: float | None = None
        self.expires_at: float | None = None  # when `priority` ends, once it started
        self.expected_at: float | None = None  # when its session may come back
        self.session: Session | None = None  # None: nobody's, or several use it

    def time_to_reuse(self, now: float) -> float:
        """Returns the time left of an estimate, or else the time since the last use."""
        expected_at = self.expected_at
        return now - self.used_at if expected_at is None else expected_at - now

    def num_leading(self, keys: Sequence[bytes], start: int) -> int:
        """Returns how many of `keys` from `start` on are this run's from its head."""
        same = map(operator.eq, self.chunks, itertools.islice(keys, start, None))
        try:
            return operator.indexOf(same, False)
        except ValueError:
            return min(len(self.chunks), len(keys) - start)

    def become_tail_of(self, other: Run) -> None:
        """Makes this the part behind `other`, kept alike."""
        other.num_splits += 1
        self.rank = (*other.rank[:-1], other.num_splits, sys.maxsize)
        self.being_stored = other.being_stored
        self.priority, self.ttl_s = other.priority, other.ttl_s
        self.expires_at, self.expected_at = other.expires_at, other.expected_at
        self.session = other.session


class _Level:
    """The runs of one priority in two orders, by last use and by expected return."""

    __slots__ = ("by_return", "by_use")

    def __init__(self) -> None:
        # Least recently used first; runs without an estimate that lies ahead.
        self.by_use: SortedList[Run] = SortedList(key=lambda run: run.rank)
        # Runs with an estimate that lies ahead, latest first.
        self.by_return: SortedList[Run] = SortedList(
            key=lambda run: (-(run.expected_at or 0.0), run.rank)
        )

    def __len__(self) -> int:
        return len(self.by_use) + len(self.by_return)

    def end_estimates(self, now: float) -> None:
        """An estimate that has passed counts as none."""
        for _ in range(MAX_MOVES):
            if not self.by_return or self.by_return[-1].time_to_reuse(now) > 0:
                return
            run = self.by_return.pop()
            run.expected_at = None
            self.by_use.add(run)

    def victims(self, now: float) -> Iterator[Run]:
        """Yields the runs, longest expected time until reuse first.

        The time left where an estimate lies ahead, else the time since the last use.
        Nothing may be added or discarded meanwhile.
        """
        self.end_estimates(now)
        used, returning = iter(self.by_use), iter(self.by_return)
        oldest, latest = next(used, None), next(returning, None)
        while oldest is not None or latest is not None:
            if latest is None or (
                oldest is not None
                and oldest.time_to_reuse(now) >= latest.time_to_reuse(now)
            ):
                assert oldest is not None
                yield oldest
                oldest = next(used, None)
            else:
                yield latest
                latest = next(returning, None)


class EvictionOrder:
    """The runs of an account by effective priority, the lowest first."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._priorities: list[int] = []  # of the levels that hold a run, ascending

    def add(self, run: Run) -> None:
        level = self._levels.get(run.priority)
        if level is None:
            level = self._levels[run.priority] = _Level()
            insort(self._priorities, run.priority)
        (level.by_use if run.expected_at is None else level.by_return).add(run)

    def discard(self, run: Run) -> None:
        """Takes a run out; needs its priority and estimate to be as they were."""
        level = self._levels[run.priority]
        (level.by_use if run.expected_at is None else level.by_return).remove(run)
        if not level:
            del self._levels[run.priority]
            self._priorities.remove(run.priority)

    def victims(self, now: float) -> Iterator[Run]:
        """Yields runs in the order in which they should go; see `_Level.victims`."""
        for priority in self._priorities:
            yield from self._levels[priority].victims(now)

    def first_above(self, priority: int, now: float) -> Run:
        """Returns the run above `priority` that should go first."""
        level = self._levels[next(p for p in self._priorities if p > priority)]
        return next(level.victims(now))

    def runs(self) -> Iterator[Run]:
        """Iterates over all runs, level by level."""
        for priority in self._priorities:
            level = self._levels[priority]
            yield from itertools.chain(level.by_use, level.by_return)
