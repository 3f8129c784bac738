"""The tenants' accounts: who holds how many chunks, and who is furthest above."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from msgspec import Struct
from sortedcontainers import SortedList

from vllm_ctx_offload.config import (
    DEFAULT_TENANT,
    WILDCARD_TENANT,
    OffloadConfig,
    TenantConfig,
)
from vllm_ctx_offload.context import DEFAULT_PRIORITY

__all__ = ["Account", "AccountTerms", "Accounts", "account_terms"]


@dataclass(frozen=True, slots=True)
class AccountTerms:
    """What a tenant's configuration means in chunks of one pool."""

    reserved: int = 0  # chunks that no other tenant can take
    limit: int | None = None  # most chunks it may hold, in flight ones too; None: all
    weight: float = 1.0  # of its share of what nobody reserved
    base_priority: int = DEFAULT_PRIORITY  # of chunks without a hint


def account_terms(
    config: OffloadConfig, num_slots: int, bytes_per_chunk: int
) -> dict[str, AccountTerms]:
    """Returns the terms of every account, by tenant; `default` always has one.

    Undeclared names are accounted to `default`, on the terms of "*" unless `default`
    is declared itself.
    """
    pool_bytes = num_slots * bytes_per_chunk

    def terms(tenant: TenantConfig) -> AccountTerms:
        limit = None
        if tenant.limit is not None:
            limit = tenant.limit.resolve(pool_bytes) // bytes_per_chunk
        return AccountTerms(
            reserved=tenant.reserved.resolve(pool_bytes) // bytes_per_chunk,
            limit=limit,
            weight=tenant.weight,
            base_priority=tenant.base_priority,
        )

    accounts = {
        name: terms(tenant)
        for name, tenant in config.tenants.items()
        if name != WILDCARD_TENANT
    }
    accounts.setdefault(DEFAULT_TENANT, terms(config.tenant(DEFAULT_TENANT)))
    return accounts


class Account(Struct, gc=False, eq=False):
    """What one tenant holds. Counts are in chunks and include those in flight."""

    name: str
    index: int
    place: int  # where its runs are in the eviction order
    reserved: int
    limit: int | None
    weight: float
    base_priority: int
    resident: int = 0
    num_pinned: int = 0  # of `resident`
    protected: int = 0  # of `resident`: those above the default priority
    # The excess that `Accounts` has listed; None: it is set aside.
    listed: float | None = None

    @classmethod
    def make(cls, name: str, index: int, place: int, terms: AccountTerms) -> Account:
        """Returns an account that holds nothing."""
        limits = (terms.reserved, terms.limit, terms.weight, terms.base_priority)
        return cls(name, index, place, *limits)

    @property
    def excess(self) -> float:
        """How far above its reservation the account is, in units of its weight."""
        return (self.resident - self.reserved) / self.weight

    @property
    def protection(self) -> float:
        """How much it protects, in units of its weight."""
        return self.protected / self.weight

    def room_below_limit(self) -> int | None:
        """Returns how many chunks more it may hold; None: any number."""
        return None if self.limit is None else max(self.limit - self.resident, 0)


class Accounts:
    """All accounts by name, and who is furthest above its reservation or protects most.

    Both are sorted lists of numbers, corrected as accounts change, each in O(log
    accounts). While a store makes room, accounts may hold less than is listed: those
    are corrected when they are found at the front.
    """

    def __init__(self, terms: Mapping[str, AccountTerms], *, one_order: bool) -> None:
        """Makes the accounts, whose chunks go in one order or each in its own."""
        self.one_order: Final = one_order
        self._accounts = [
            Account.make(name, index, 0 if one_order else index, account)
            for index, (name, account) in enumerate(terms.items())
        ]
        self._by_name = {account.name: account for account in self._accounts}
        # (-excess or -protection, index): the most first.
        self._above: SortedList[tuple[float, int]] = SortedList()
        self._protecting: SortedList[tuple[float, int]] = SortedList()
        self._changed: set[Account] = set()
        self.clear()

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts)

    def get(self, name: str) -> Account:
        """Returns the account of tenant `name`, which may be undeclared."""
        return self._by_name.get(name) or self._by_name[DEFAULT_TENANT]

    def clear(self) -> None:
        """Has all accounts hold nothing. Costs O(accounts)."""
        for account in self._accounts:
            if account.resident:
                self._changed.add(account)
            account.resident = account.num_pinned = account.protected = 0
            account.listed = account.excess
        self._above.clear()
        self._above.update((-a.excess, a.index) for a in self._accounts)
        self._protecting.clear()

    # ---- what they hold

    def changed(self, account: Account) -> None:
        """Has to be told after an account has come to hold more or less."""
        self._changed.add(account)
        if account.listed == account.excess:
            return
        if account.listed is not None:
            self._above.remove((-account.listed, account.index))
        account.listed = account.excess
        self._above.add((-account.listed, account.index))

    def take_changed(self) -> set[Account]:
        """Returns the accounts that have changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def furthest_above(self) -> Account | None:
        """Returns the account with the largest positive excess, if there is one."""
        while self._above:
            listed, index = self._above[0]
            account = self._accounts[index]
            if -listed == account.excess:
                return account if listed < 0 else None
            self.changed(account)
        return None

    def next_excess(self) -> float:
        """Returns no less than the second largest positive excess, or 0.

        Needs the furthest account at the front: call it after `furthest_above`.
        """
        return max(-self._above[1][0], 0.0) if len(self._above) > 1 else 0.0

    def set_aside(self, account: Account) -> None:
        """Leaves the furthest account out until it is told to have changed."""
        self._above.pop(0)
        account.listed = None

    # ---- what they protect

    def protect(self, account: Account, num_chunks: int) -> None:
        """Counts protected chunks that come to an account, or leave it."""
        if account.protected:
            self._protecting.remove((-account.protection, account.index))
        account.protected += num_chunks
        if account.protected:
            self._protecting.add((-account.protection, account.index))

    def over_budget(self, excess: int) -> Counter[Account]:
        """Returns who has to give up how many of `excess` protected chunks.

        One by one, whoever protects the most then, in units of its weight.
        """
        shares: Counter[Account] = Counter()
        others = iter(self._protecting)
        other = next(others, None)
        payers: list[tuple[float, int]] = []  # a heap of those that protect most
        for _ in range(excess):
            if other is not None and (not payers or other < payers[0]):
                heapq.heappush(payers, other)
                other = next(others, None)
            account = self._accounts[payers[0][1]]
            shares[account] += 1
            left = account.protected - shares[account]
            heapq.heapreplace(payers, (-left / account.weight, account.index))
        return shares


def check_terms(accounts: Iterable[Account], num_slots: int) -> None:
    """Raises AssertionError unless what accounts hold is within their terms."""
    total = 0
    for account in accounts:
        total += account.resident
        assert 0 <= account.num_pinned <= account.resident, account.name
        assert 0 <= account.protected <= account.resident, account.name
        assert account.limit is None or account.resident <= account.limit, account.name
    assert total <= num_slots
