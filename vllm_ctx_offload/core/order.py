"""In which order the chunks of each tenant would go."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from msgspec import Struct
from sortedcontainers import SortedKeyList

if TYPE_CHECKING:
    from vllm_ctx_offload.core.sessions import Session
    from vllm_ctx_offload.core.tenants import Account

__all__ = ["RELEASED", "EvictionOrder", "Run"]

# The priority of chunks whose session was released: below all that can be asked for.
RELEASED: Final = -1
# Runs whose time has passed or whose session was released are moved by so many a call,
# or as many as the call has keys, so that no call is long.
MAX_MOVES: Final = 64


class Run(Struct, gc=False, eq=False):
    """Chunks of one account that were last used together and are kept alike.

    The unit in which anything is ordered, so that hints and uses cost by the request
    and not by the chunk. [Note: Unseen by the garbage collector] There may be as many
    runs as chunks, and a collection would take 0.2 us for each. The collector does not
    track them, so what a run refers to must not refer to runs.
    """

    account: Account
    run_id: int
    # Of what was used together the part made later is the deeper one: it is older. Of
    # one run the parts split off its end are older, the first one most.
    rank: tuple[int, ...]  # of its last use, below it minus its id and its parts
    used_at: float
    priority: int  # the effective one
    # Keys to slots along the chain, its head first: the last one goes first.
    chunks: dict[bytes, int] = {}
    num_pinned: int = 0  # of `chunks`
    being_stored: bool = False  # all of `chunks`, or none
    num_splits: int = 0
    # Of chunks that are being stored: it starts when they become readable.
    ttl_s: float | None = None
    expires_at: float | None = None  # when `priority` ends, once it started
    expected_at: float | None = None  # when its session may come back
    session: Session | None = None  # None: nobody's, or several use it
    # Its place in what a release of its session takes, until that has happened.
    batch: dict[int, None] | None = None

    @classmethod
    def make(cls, account: Account, run_id: int, stamp: int, used_at: float) -> Run:
        """Returns an empty run of default priority."""
        rank = (stamp, -run_id, sys.maxsize)
        return cls(account, run_id, rank, used_at, account.base_priority)

    @property
    def is_released(self) -> bool:
        """Whether its session was released since its last use."""
        return self.session is not None and self.batch is not self.session.batch

    @property
    def due_at(self) -> float | None:
        """When the next of its times passes, that of its priority or its estimate."""
        if self.expires_at is None or self.expected_at is None:
            return self.expected_at if self.expires_at is None else self.expires_at
        return min(self.expires_at, self.expected_at)

    def time_to_reuse(self, now: float) -> float:
        """Returns the time left of an estimate, or else the time since the last use."""
        expected_at = self.expected_at
        return now - self.used_at if expected_at is None else expected_at - now

    def become_tail_of(self, other: Run) -> None:
        """Makes this the part behind `other`, kept alike."""
        other.num_splits += 1
        self.rank = (*other.rank[:-1], other.num_splits, sys.maxsize)
        self.being_stored = other.being_stored
        self.priority, self.ttl_s = other.priority, other.ttl_s
        self.expires_at, self.expected_at = other.expires_at, other.expected_at
        self.session, self.batch = other.session, other.batch


class EvictionOrder:
    """The runs of all accounts, for each of them the one that goes first at the front.

    Two sorted lists hold all accounts: one of runs without an estimate that lies ahead,
    the least recently used first, and one of runs with such an estimate, the latest
    first; in both the lowest priority comes before that. An account's victims are two
    stretches of them, merged. So an account that holds nothing has no structure of its
    own, and thousands of them are no work for the garbage collector.
    """

    def __init__(self) -> None:
        self._by_use: SortedKeyList[Run, tuple[float, ...]] = SortedKeyList(
            key=_use_key
        )
        self._by_return: SortedKeyList[Run, tuple[float, ...]] = SortedKeyList(
            key=_return_key
        )

    def __iter__(self) -> Iterator[Run]:
        yield from self._by_use
        yield from self._by_return

    def add(self, run: Run) -> None:
        (self._by_use if run.expected_at is None else self._by_return).add(run)

    def discard(self, run: Run) -> None:
        """Takes a run out; needs its priority and estimate to be as they were."""
        (self._by_use if run.expected_at is None else self._by_return).remove(run)

    def victims(
        self, account: Account, now: float, *, above: int = RELEASED - 1
    ) -> Iterator[Run]:
        """Yields an account's runs of a priority above `above`, the lowest first.

        Of equal priority the longest expected time until reuse comes first: the time
        left where an estimate lies ahead, else the time since the last use. Nothing may
        be added or discarded meanwhile.
        """
        start, end = (account.place, above + 1), (account.place + 1,)
        return heapq.merge(
            self._by_use.irange_key(start, end),
            self._by_return.irange_key(start, end),
            key=lambda run: (run.priority, -run.time_to_reuse(now)),
        )


def _use_key(run: Run) -> tuple[int, ...]:
    return (run.account.place, run.priority, *run.rank)


def _return_key(run: Run) -> tuple[float, ...]:
    return (
        *(run.account.place, run.priority, -(run.expected_at or 0.0)),
        *run.rank,
    )
