"""Which chunks are kept: what a use of a chain and its hints make of them."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Final, NamedTuple

from vllm_ctx_offload.config import OffloadConfig
from vllm_ctx_offload.context import ReqContext
from vllm_ctx_offload.core.order import Run
from vllm_ctx_offload.core.retention import Columns, Segment, Wish, segments_of
from vllm_ctx_offload.core.runs import RunTable
from vllm_ctx_offload.core.sessions import Session
from vllm_ctx_offload.core.tenants import (
    Account,
    Accounts,
    AccountTerms,
    account_terms,
)

__all__ = ["PolicyConfig", "RetentionPolicy", "Use", "policy_of"]


class PolicyConfig(NamedTuple):
    """What the eviction rules are set to."""

    accounts: Mapping[str, AccountTerms]  # by tenant; `default` among them
    max_protected: int  # chunks that priorities above the default may protect together
    columns: Columns = ((0, 1),)  # hints are given in tokens
    plain_lru: bool = False  # ignore every hint and tenant


def policy_of(
    config: OffloadConfig,
    num_slots: int,
    bytes_per_chunk: int,
    columns: Columns,
) -> PolicyConfig:
    """Returns what a configuration means for a pool of `num_slots` chunks."""
    return PolicyConfig(
        accounts=account_terms(config, num_slots, bytes_per_chunk),
        max_protected=config.max_protected.resolve(num_slots),
        columns=columns,
        plain_lru=config.eviction_policy == "lru",
    )


class Use:
    """One use of a chain by a request: the runs that its chunks move to.

    They are unlisted until `RetentionPolicy.end_use`, so a store can't choose victims
    from its own chain.
    """

    __slots__ = (
        "account",
        "expected_at",
        "now",
        "place",
        "runs",
        "segments",
        "session",
        "stamp",
    )

    def __init__(
        self,
        account: Account,
        session: Session | None,
        segments: Sequence[Segment],
        stamp: int,
        now: float,
    ) -> None:
        self.account: Final = account
        self.session: Final = session
        self.segments: Final = segments
        self.stamp: Final = stamp
        self.now: Final = now
        self.expected_at: float | None = None
        self.runs: list[Run] = []
        # What the chunks of the last run have in common. Only neighbours share a run,
        # so that along the chain each run is older than the one before it.
        self.place: tuple[object, ...] | None = None

    def stretches(self, num_chunks: int) -> Iterator[tuple[int, int, Wish | None]]:
        """Yields (first, end, wish) over the chunks of a chain."""
        start = 0
        for end, wish in self.segments:
            stop = num_chunks if end is None else min(end, num_chunks)
            if start < stop:
                yield start, stop, wish
                start = stop


_PLAIN: Final = (Segment(None, None),)
_first: Final = itemgetter(0)


class RetentionPolicy:
    """Turns uses and hints into runs, and so into the order in which chunks go.

    - A use moves the chunks of a chain to new runs, the most recently used ones.
    - Chunks that one session alone has used carry that session's latest hints. Others
      keep the highest priority that still holds, and no estimate.
    - Another tenant's use of a chunk counts as a use and says nothing about it.
    - A released session's own chunks go before all others, until they are used again.
    """

    def __init__(self, num_slots: int, config: PolicyConfig) -> None:
        self._config = config
        terms = config.accounts
        if config.plain_lru:
            terms = dict.fromkeys(terms, AccountTerms())
        accounts = Accounts(terms, one_order=config.plain_lru)
        self.table = RunTable(num_slots, accounts, config.max_protected)
        self._stamp = 0
        # Of live requests that gave hints, by request id.
        self._segments: dict[str, tuple[Segment, ...]] = {}

    def begin_use(self, req_context: ReqContext, now: float, num_keys: int) -> Use:
        """Returns a new use; chunks are moved and added to it, then it is ended."""
        self._stamp += 1
        self.table.catch_up(now, num_keys)
        account = self.table.accounts.get(req_context.tenant)
        if self._config.plain_lru:
            return Use(account, None, _PLAIN, self._stamp, now)
        segments = self._segments_for(req_context)
        use = Use(account, self._session(req_context), segments, self._stamp, now)
        if req_context.hints.expected_reuse_s:
            use.expected_at = now + req_context.hints.expected_reuse_s
        return use

    def _segments_for(self, req_context: ReqContext) -> tuple[Segment, ...]:
        segments = self._segments.get(req_context.request_id)
        if segments is None:
            segments = segments_of(req_context, self._config.columns)
            if segments != _PLAIN:
                self._segments[req_context.request_id] = segments
        return segments

    def _session(self, req_context: ReqContext) -> Session | None:
        """Returns whose the chunks are that a request stores; None: nobody's."""
        hints = req_context.hints
        if hints.session is not None:
            namespace = req_context.namespace.hex()
            return self.table.sessions.get(
                (req_context.tenant, namespace, hints.session)
            )
        if hints.release or hints.expected_reuse_s:
            return self.table.sessions.get((req_context.request_id,))
        return None

    def move(
        self, use: Use, keys: Sequence[bytes], slots: Sequence[int | None]
    ) -> None:
        """Moves a chain's resident chunks, those with a slot, to the use's runs."""
        table, run_of, pins = self.table, self.table.run_of, self.table.pins
        num_before: dict[Run, int] = {}
        for start, end, wish in use.stretches(len(keys)):
            chunks = [
                (run_of[slot], key, slot)
                for key, slot in zip(keys[start:end], slots[start:end], strict=True)
                if slot is not None
            ]
            for run_id, piece in itertools.groupby(chunks, key=_first):
                old = table[run_id]
                num_before.setdefault(old, len(old.chunks))
                new = self._target(use, old, wish)
                for _, key, slot in piece:
                    del old.chunks[key]
                    new.chunks[key] = slot
                    run_of[slot] = new.run_id
                    if slot in pins:
                        old.num_pinned -= 1
                        new.num_pinned += 1
        for run, num_chunks in num_before.items():
            table.count_protected(run, len(run.chunks) - num_chunks)
            if not run.chunks:
                table.forget(run)

    def add(
        self, use: Use, keys: Sequence[bytes], indices: Sequence[int], slots: list[int]
    ) -> None:
        """Adds new chunks, pinned by their store: `keys` at `indices` in `slots`."""
        run_of, pins = self.table.run_of, self.table.pins
        for start, end, wish in use.stretches(len(keys)):
            first, last = bisect_left(indices, start), bisect_left(indices, end)
            if first == last:
                continue
            new = self._target(use, None, wish)
            places, new_slots = indices[first:last], slots[first:last]
            new_keys = map(keys.__getitem__, places)
            new.chunks.update(zip(new_keys, new_slots, strict=True))
            for slot in new_slots:
                run_of[slot] = new.run_id
            pins.update(dict.fromkeys(new_slots, 1))
            new.num_pinned += last - first
            new.account.num_pinned += last - first

    def _target(self, use: Use, old: Run | None, wish: Wish | None) -> Run:
        """Returns the use's run for chunks that were in `old`, or that are new."""
        account = use.account if old is None else old.account
        mine = old is None or (old.session is not None and old.session is use.session)
        session = use.session if mine else None
        expected_at = use.expected_at if mine else None
        being_stored = old is None or old.being_stored
        kept = priority, ttl_s, expires_at = _granted(use, old, wish, mine)
        place = (account.index, session, being_stored, kept, expected_at)
        if place != use.place:
            run = self.table.make(account, use.stamp, use.now)
            run.session, run.expected_at = session, expected_at
            run.being_stored = being_stored
            run.priority, run.ttl_s, run.expires_at = priority, ttl_s, expires_at
            use.runs.append(run)
            use.place = place
        return use.runs[-1]

    def end_use(self, use: Use) -> int:
        """Lists the use's runs; returns how many chunks lost a raised priority."""
        for run in use.runs:
            self.table.enlist(run)
            self.table.count_protected(run, len(run.chunks))
        if use.session is not None:
            self.table.sessions.close(use.session)
        return self.table.enforce_budget(use.now)

    def finish(self, req_context: ReqContext) -> None:
        """The request ended: forgets it, and releases its session if it says so."""
        self._segments.pop(req_context.request_id, None)
        if not req_context.hints.release or self._config.plain_lru:
            return
        session = self._session(req_context)
        assert session is not None  # whoever releases has one
        self.table.release(session)


def _granted(
    use: Use, old: Run | None, wish: Wish | None, mine: bool
) -> tuple[int, float | None, float | None]:
    """Returns (priority, its ttl, when it ends) of chunks after a use.

    The time of chunks that are being stored starts when they become readable, however
    long that takes. Until then they have a ttl, and from then on an end.
    """
    if wish is not None and (mine or _raises(use, old, wish)):
        if wish.ttl_s is None or old is None or old.being_stored:
            return wish.priority, wish.ttl_s, None
        return wish.priority, None, use.now + wish.ttl_s
    if old is not None and not old.is_released:
        return old.priority, old.ttl_s, old.expires_at
    account = use.account if old is None else old.account
    return account.base_priority, None, None


def _raises(use: Use, old: Run | None, wish: Wish) -> bool:
    if old is None or old.account is not use.account:
        return False
    if wish.priority == old.priority and wish.ttl_s is not None:
        if old.being_stored:
            return old.ttl_s is not None and wish.ttl_s >= old.ttl_s
        return old.expires_at is not None and use.now + wish.ttl_s >= old.expires_at
    return wish.priority >= old.priority
