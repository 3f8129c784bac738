"""A naive model of `HostMemoryManager`: a flat list, one victim at a time, full scans.

Every rule is said once, for one chunk, as DESIGN 5.2 and the docstrings of `core` say
it. Nothing is kept sorted and nothing is counted ahead.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from vllm_ctx_offload.context import ReqContext
from vllm_ctx_offload.core import (
    AccountTerms,
    ChunkState,
    LookupResult,
    PolicyConfig,
    StoreGrant,
)

DEFAULT, RELEASED = 35, -1
SessionKey = tuple[str, ...]


@dataclass
class Record:
    """A resident chunk."""

    key: bytes
    account: str
    slot: int = -1  # learnt from the manager under test
    stores: int = 1
    loads: int = 0
    ready: bool = False
    doomed: bool = False
    used: tuple[int, int] = (0, 0)  # number of the last use, and depth there below 0
    used_at: float = 0.0
    session: SessionKey | None = None  # the only one that has used it
    priority: int = DEFAULT
    # How long the priority holds once the chunk is readable, and from then on its end.
    ttl_s: float = math.inf
    expires_at: float = math.inf
    expected_at: float | None = None

    @property
    def pins(self) -> int:
        return self.stores + self.loads

    @property
    def state(self) -> ChunkState:
        return ChunkState(
            self.key, self.slot, self.account, self.pins, self.ready, self.doomed
        )


class NaiveManager:
    """The same calls as the manager has, and what they counted."""

    def __init__(
        self, num_slots: int, policy: PolicyConfig, clock: Callable[[], float]
    ) -> None:
        self.num_slots = num_slots
        self.policy = policy
        self.clock = clock
        self.terms = dict(policy.accounts)
        if policy.plain_lru:
            self.terms = dict.fromkeys(self.terms, AccountTerms())
        self.records: list[Record] = []
        self.evicted: Counter[tuple[str, str]] = Counter()  # (whose, for whom)
        self.num_over_budget = 0
        self._num_uses = 0

    # ---- the life cycle

    def find(self, key: bytes) -> Record | None:
        return next((r for r in self.records if r.key == key), None)

    def lookup(self, keys: Sequence[bytes]) -> LookupResult:
        for length, key in enumerate(keys):
            record = self.find(key)
            if record is None or record.doomed or not record.ready:
                pending = record is not None and not record.doomed
                return LookupResult(length, pending)
        return LookupResult(len(keys), pending=False)

    def prepare_load(self, keys: Sequence[bytes]) -> tuple[int, ...]:
        records = [record for record in self.records if record.key in keys]
        for record in records:
            record.loads += 1
        return tuple(self.find(key).slot for key in keys)

    def complete_load(self, keys: Collection[bytes]) -> None:
        for key in keys:
            self.find(key).loads -= 1
        self._drop_dead()

    def complete_store(self, keys: Collection[bytes], success: bool) -> None:
        stored = [record for record in self.records if record.key in keys]
        for record in stored:
            record.stores -= 1
            record.ready = record.ready or success
            record.doomed = record.doomed or not success
            self._keep(record, record.priority, record.ttl_s)
        self._drop_dead()

    def remove(self, keys: Collection[bytes]) -> None:
        for record in self.records:
            record.doomed = record.doomed or record.key in keys
        self._drop_dead()

    def reset(self) -> None:
        """Removes all; what is pinned is nobody's and protects nothing any more."""
        for record in self.records:
            record.session, record.priority = None, DEFAULT
        self.remove([record.key for record in self.records])

    def _drop_dead(self) -> None:
        self.records = [r for r in self.records if r.pins or not r.doomed]

    # ---- uses

    def touch(self, keys: Sequence[bytes], context: ReqContext) -> None:
        self._begin_use()
        self._use_resident(keys, context)
        self._enforce_budget()

    def prepare_store(self, keys: Sequence[bytes], context: ReqContext) -> StoreGrant:
        self._begin_use()
        self._use_resident(keys, context)
        before = {record.key for record in self.records if not record.doomed}
        absent = [i for i, key in enumerate(keys) if self.find(key) is None]
        granted: list[int] = []
        reason = None
        for index in absent:
            reason = self._make_room(context, index)
            if reason is not None:
                break
            record = Record(keys[index], self.account_of(context))
            self._use(record, index, context, is_new=True)
            self.records.append(record)
            granted.append(index)
        self._enforce_budget()
        if granted and before & {*keys[granted[0] :]}:
            self.touch(keys, context)  # a hole was filled: back into the chain's order
        num_rejected = len(absent) - len(granted)
        return StoreGrant(tuple(granted), (), num_rejected, reason)

    def finish(self, context: ReqContext) -> None:
        if not context.hints.release or self.policy.plain_lru:
            return
        for record in self.records:
            if record.session == self.session_of(context):
                self._keep(record, RELEASED)
                record.expected_at = None

    def account_of(self, context: ReqContext) -> str:
        return context.tenant if context.tenant in self.terms else "default"

    def session_of(self, context: ReqContext) -> SessionKey | None:
        hints = context.hints
        if self.policy.plain_lru:
            return None
        if hints.session is not None:
            return (context.tenant, context.namespace.hex(), hints.session)
        if hints.release or hints.expected_reuse_s:
            return (context.request_id,)
        return None

    def wish_for(self, context: ReqContext, index: int) -> tuple[int, float] | None:
        """Returns the priority that is asked for a chunk, and for how long."""
        hints = context.hints
        if self.policy.plain_lru:
            return None
        first, end = self.tokens_of(index)
        asked = [
            (d.priority, math.inf if d.duration_s is None else d.duration_s)
            for d in hints.retention_directives
            if d.start < end and (d.end is None or d.end > first)
        ]
        if asked:
            return max(asked)
        priority, prompt_end = hints.priority, context.num_prompt_tokens
        is_decoded = prompt_end is not None and first >= prompt_end
        if is_decoded and hints.decode_priority is not None:
            priority = hints.decode_priority
        if priority == DEFAULT:
            return None
        return priority, math.inf if hints.ttl_s is None else hints.ttl_s

    def tokens_of(self, index: int) -> tuple[int, int]:
        """Returns the tokens, from one up to another, of a chunk in a chain."""
        columns = self.policy.columns
        span, column = divmod(index, len(columns))
        start = span * max(end for _, end in columns)
        return start + columns[column][0], start + columns[column][1]

    def _begin_use(self) -> None:
        self._num_uses += 1
        for record in self.records:
            if record.expires_at <= self.clock():
                self._keep(record, self.terms[record.account].base_priority)

    def _use_resident(self, keys: Sequence[bytes], context: ReqContext) -> None:
        for index, key in enumerate(keys):
            record = self.find(key)
            if record is not None and not record.doomed:
                self._use(record, index, context, is_new=False)

    def _use(
        self, record: Record, index: int, context: ReqContext, *, is_new: bool
    ) -> None:
        session, now = self.session_of(context), self.clock()
        mine = is_new or (session is not None and record.session == session)
        record.session = session if mine else None
        record.used, record.used_at = (self._num_uses, -index), now
        record.expected_at = None
        if mine and session is not None and context.hints.expected_reuse_s:
            record.expected_at = now + context.hints.expected_reuse_s
        wish = self.wish_for(context, index)
        if wish is not None and (mine or self._raises(record, wish, context)):
            self._keep(record, *wish)
        elif is_new or record.priority == RELEASED:
            self._keep(record, self.terms[record.account].base_priority)

    def _keep(self, record: Record, priority: int, ttl_s: float = math.inf) -> None:
        """Gives a chunk a priority, whose time counts from when it can be read."""
        record.priority, record.ttl_s, record.expires_at = priority, ttl_s, math.inf
        if record.ready:
            record.ttl_s, record.expires_at = math.inf, self.clock() + ttl_s

    def _raises(
        self, record: Record, wish: tuple[int, float], context: ReqContext
    ) -> bool:
        """Whether a wish for a chunk that several use is higher, or holds longer."""
        asked, held = wish[1], record.ttl_s
        if record.ready:
            asked, held = self.clock() + wish[1], record.expires_at
        return record.account == self.account_of(context) and (
            (wish[0], asked) >= (record.priority, held)
        )

    # ---- who gives way

    def _make_room(self, context: ReqContext, index: int) -> str | None:
        """Makes room for one chunk. Returns why not, or None."""
        own = self.account_of(context)
        limit = self.terms[own].limit
        if limit is not None and self.resident(own) >= limit:
            return self._evict_own(context, index, "limit")
        if len(self.records) < self.num_slots:
            return None
        released = [r for r in self._candidates() if r.priority == RELEASED]
        if self._evict_first(sorted(released, key=lambda r: r.used), own):
            return None
        accounts = {own: self.excess(own)}
        if not self.policy.plain_lru:
            above = {name: self.excess(name) for name in self.terms}
            accounts |= {name: excess for name, excess in above.items() if excess > 0}
        for name in sorted(accounts, key=lambda n: (-accounts[n], n != own)):
            if name == own:
                reason = self._evict_own(context, index, "full")
                if reason != "full":
                    return reason
            elif self._evict_first(self._in_order(name), own):
                return None
        return "full"

    def resident(self, account: str) -> int:
        return sum(record.account == account for record in self.records)

    def excess(self, account: str) -> float:
        terms = self.terms[account]
        return (self.resident(account) - terms.reserved) / terms.weight

    def _candidates(self, account: str | None = None) -> list[Record]:
        """Returns chunks that are not in use by this very store, pinned ones too."""
        return [
            record
            for record in self.records
            if record.used[0] != self._num_uses and account in (None, record.account)
        ]

    def _in_order(self, account: str) -> list[Record]:
        shared = self.policy.plain_lru
        return sorted(self._candidates(None if shared else account), key=self.order)

    def order(self, record: Record) -> tuple[object, ...]:
        """Returns the sort key: lowest priority, longest time until reuse, oldest."""
        is_expected = self._time_left(record) is not None
        return record.priority, -self._time_to_reuse(record), is_expected, record.used

    def _time_left(self, record: Record) -> float | None:
        """Returns the time left of an estimate that lies ahead."""
        if record.expected_at is None or record.expected_at <= self.clock():
            return None
        return record.expected_at - self.clock()

    def _time_to_reuse(self, record: Record) -> float:
        time_left = self._time_left(record)
        return self.clock() - record.used_at if time_left is None else time_left

    def _evict_first(self, records: Sequence[Record], for_whom: str) -> bool:
        """Evicts the first that is not pinned. Returns whether there was one."""
        victim = next((record for record in records if not record.pins), None)
        if victim is None:
            return False
        self.records.remove(victim)
        self.evicted[victim.account, for_whom] += 1
        return True

    def _evict_own(self, context: ReqContext, index: int, reason: str) -> str | None:
        own = self.account_of(context)
        wish = self.wish_for(context, index)
        priority = self.terms[own].base_priority if wish is None else wish[0]
        time_left = None if self.policy.plain_lru else context.hints.expected_reuse_s
        record = next((r for r in self._in_order(own) if not r.pins), None)
        if record is None:
            return reason
        if record.priority > priority:
            return "priority"
        time_to_reuse = self._time_to_reuse(record)
        if record.priority == priority and time_left and time_to_reuse < time_left:
            return "expected_reuse"
        self._evict_first([record], own)
        return None

    # ---- the protection budget

    def protected(self, account: str) -> list[Record]:
        return [
            r for r in self.records if r.account == account and r.priority > DEFAULT
        ]

    def _enforce_budget(self) -> None:
        """The account that protects most for its weight gives up a chunk, and again."""
        total = sum(record.priority > DEFAULT for record in self.records)
        excess = total - self.policy.max_protected
        for _ in range(excess):
            most = max(
                self.terms, key=lambda n: len(self.protected(n)) / self.terms[n].weight
            )
            record = min(self.protected(most), key=self.order)
            self._keep(record, self.terms[most].base_priority)
        self.num_over_budget += excess > 0
