"""The tenants' accounts: who holds how many chunks, and who is furthest above."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from vllm_ctx_offload.config import (
    DEFAULT_TENANT,
    WILDCARD_TENANT,
    OffloadConfig,
    TenantConfig,
)
from vllm_ctx_offload.context import DEFAULT_PRIORITY
from vllm_ctx_offload.core.order import EvictionOrder

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


class Account:
    """What one tenant holds. Counts are in chunks and include those in flight."""

    __slots__ = (
        "base_priority",
        "index",
        "limit",
        "listed",
        "name",
        "num_pinned",
        "order",
        "protected",
        "reserved",
        "resident",
        "weight",
    )

    def __init__(
        self, name: str, index: int, terms: AccountTerms, order: EvictionOrder
    ) -> None:
        self.name: Final = name
        self.index: Final = index
        self.reserved: Final = terms.reserved
        self.limit: Final = terms.limit
        self.weight: Final = terms.weight
        self.base_priority: Final = terms.base_priority
        self.order: Final = order
        self.resident = 0
        self.num_pinned = 0  # of `resident`
        self.protected = 0  # of `resident`: those above the default priority
        # Key of this account's one valid entry in the heap of `Accounts`.
        self.listed = -self.excess

    @property
    def excess(self) -> float:
        """How far above its reservation the account is, in units of its weight."""
        return (self.resident - self.reserved) / self.weight

    def room_below_limit(self) -> int | None:
        """Returns how many chunks more it may hold; None: any number."""
        return None if self.limit is None else max(self.limit - self.resident, 0)


class Accounts:
    """All accounts by name, and the one that is furthest above its reservation.

    A heap holds one valid entry per account, whose key is at least its excess: it is
    renewed when an account grows, and corrected when it is found at the top after the
    account shrank. So finding the furthest costs O(log accounts) amortised.
    """

    def __init__(
        self, terms: Mapping[str, AccountTerms], shared_order: EvictionOrder | None
    ) -> None:
        """Makes the accounts, each with an order of its own unless all share one."""
        self._accounts = [
            Account(name, index, account, shared_order or EvictionOrder())
            for index, (name, account) in enumerate(terms.items())
        ]
        self._by_name = {account.name: account for account in self._accounts}
        self._heap: list[tuple[float, int]] = []
        self._relist_all()

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts)

    def get(self, name: str) -> Account:
        """Returns the account of tenant `name`, which may be undeclared."""
        return self._by_name.get(name) or self._by_name[DEFAULT_TENANT]

    def grew(self, account: Account) -> None:
        """Has to be told whenever an account holds more than before."""
        account.listed = -account.excess
        heapq.heappush(self._heap, (account.listed, account.index))
        if len(self._heap) > 4 * len(self._accounts) + 64:
            self._relist_all()

    def _relist_all(self) -> None:
        for account in self._accounts:
            account.listed = -account.excess
        self._heap = [(account.listed, account.index) for account in self._accounts]
        heapq.heapify(self._heap)

    def furthest_above(self) -> Account | None:
        """Returns the account with the largest positive excess, if there is one."""
        heap = self._heap
        while heap:
            listed, index = heap[0]
            account = self._accounts[index]
            if listed != account.listed:
                heapq.heappop(heap)  # renewed since
                continue
            if listed == -account.excess:
                return account if listed < 0 else None
            account.listed = -account.excess
            heapq.heapreplace(heap, (account.listed, index))
        return None

    def next_excess(self) -> float:
        """Returns no less than the second largest positive excess, or 0.

        Needs the furthest account at the top: call it after `furthest_above`.
        """
        return max((0.0, *(-listed for listed, _ in self._heap[1:3])))

    def set_aside(self, account: Account) -> None:
        """Leaves the furthest account out until it is told to have grown."""
        heapq.heappop(self._heap)
        account.listed = float("nan")

    def over_budget(self, excess: int) -> Counter[Account]:
        """Returns who has to give up how many of `excess` protected chunks.

        One by one, whoever protects the most then, in units of its weight.
        """
        shares: Counter[Account] = Counter()
        if not excess:
            return shares
        heap = [(-a.protected / a.weight, a.index) for a in self._accounts]
        heapq.heapify(heap)
        for _ in range(excess):
            account = self._accounts[heap[0][1]]
            shares[account] += 1
            protected = account.protected - shares[account]
            heapq.heapreplace(heap, (-protected / account.weight, account.index))
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
