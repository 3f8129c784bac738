"""`HostMemoryManager` against a naive model of the whole policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from core.naive_manager import NaiveManager
from core.strategies import CHAINS, COLUMNS, HINTS, TENANTS
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from manager_probe import FakeClock, counted, snapshot

from vllm_ctx_offload.context import Hints, ReqContext
from vllm_ctx_offload.core import AccountTerms, HostMemoryManager, PolicyConfig
from vllm_ctx_offload.stats import OffloadStats


@st.composite
def policies(draw: st.DrawFn, num_slots: int) -> PolicyConfig:
    accounts, unreserved = {}, num_slots
    for tenant in TENANTS:
        reserved = draw(st.integers(0, min(4, unreserved)))
        unreserved -= reserved
        limit = draw(st.one_of(st.none(), st.integers(max(reserved, 1), 9)))
        accounts[tenant] = AccountTerms(
            reserved=reserved,
            limit=limit,
            weight=draw(st.sampled_from([1.0, 2.0, 3.0])),
            base_priority=draw(st.sampled_from([35, 35, 20])),
        )
    return PolicyConfig(
        accounts=accounts,
        max_protected=draw(st.integers(0, 6)),
        columns=draw(COLUMNS),
        plain_lru=draw(st.sampled_from([False, False, False, True])),
    )


class ManagerMachine(RuleBasedStateMachine):
    """P1 to P5, CASES 22, 23, 25, 40, 41: any calls do what the naive model does."""

    @initialize(data=st.data(), num_slots=st.integers(0, 14))
    def start(self, data: st.DataObject, num_slots: int) -> None:
        self.clock = FakeClock()
        policy = data.draw(policies(num_slots))
        self.manager = HostMemoryManager(num_slots, OffloadStats(), policy, self.clock)
        self.naive = NaiveManager(num_slots, policy, self.clock)
        self.num_requests = 0
        self.live: list[ReqContext] = []
        self.stores: list[tuple[Sequence[bytes], ReqContext]] = []
        self.loads: list[tuple[Sequence[bytes], ReqContext]] = []
        for tenant in TENANTS:
            self.add_request(tenant, Hints(), None)

    @rule(
        tenant=st.sampled_from(TENANTS),
        hints=HINTS,
        num_prompt_tokens=st.sampled_from([None, 3]),
    )
    def add_request(
        self, tenant: str, hints: Hints, num_prompt_tokens: int | None
    ) -> None:
        self.num_requests += 1
        context = ReqContext(
            request_id=str(self.num_requests),
            tenant=tenant,
            hints=hints,
            num_prompt_tokens=num_prompt_tokens,
        )
        self.live.append(context)
        self.manager.on_new_request(context)

    def any_request(self, data: st.DataObject) -> ReqContext:
        # The latest first: those that a shrunk example needs have hints.
        return self.live[-1 - data.draw(st.integers(0, len(self.live) - 1))]

    @precondition(lambda self: len(self.live) > 1)
    @rule(data=st.data())
    def finish_request(self, data: st.DataObject) -> None:
        context = self.any_request(data)
        self.live.remove(context)
        self.manager.on_request_finished(context)
        self.naive.finish(context)

    @rule(tenant=st.sampled_from(TENANTS), session=st.sampled_from("st"))
    def release_session(self, tenant: str, session: str) -> None:
        hints = Hints(session=session, release=True)
        context = ReqContext("release", tenant=tenant, hints=hints)
        self.manager.on_request_finished(context)
        self.naive.finish(context)

    @rule(seconds=st.integers(1, 4))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @rule(keys=CHAINS, data=st.data(), num_local=st.integers(0, 2))
    def lookup(self, keys: list[bytes], data: st.DataObject, num_local: int) -> None:
        keys = keys[num_local:]
        found = self.manager.lookup(keys, self.any_request(data))
        assert found == self.naive.lookup(keys)

    @rule(keys=CHAINS, data=st.data())
    def touch(self, keys: list[bytes], data: st.DataObject) -> None:
        context = self.any_request(data)
        self.manager.touch(keys, context)
        self.naive.touch(keys, context)

    @rule(keys=CHAINS, data=st.data(), ends=st.booleans())
    def prepare_store(self, keys: list[bytes], data: st.DataObject, ends: bool) -> None:
        context = self.any_request(data)
        grant = self.manager.prepare_store(keys, context)
        expected = self.naive.prepare_store(keys, context)
        assert grant == expected._replace(slots=grant.slots)
        taken = {record.slot for record in self.naive.records}
        assert len({*grant.slots}) == len(grant.slots) == len(grant.indices)
        assert not taken & {*grant.slots}
        assert {*grant.slots} <= {*range(self.naive.num_slots)}
        for index, slot in zip(grant.indices, grant.slots, strict=True):
            self.naive.find(keys[index]).slot = slot
        if grant.indices:
            self.stores.append(([keys[index] for index in grant.indices], context))
            if ends:
                self.end_store(-1, success=True)

    def end_store(self, index: int, *, success: bool) -> None:
        keys, context = self.stores.pop(index)
        self.manager.complete_store(keys, context, success)
        self.naive.complete_store(keys, success)

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), success=st.booleans(), partly=st.booleans())
    def complete_store(self, data: st.DataObject, success: bool, partly: bool) -> None:
        index = data.draw(st.integers(0, len(self.stores) - 1))
        keys, context = self.stores[index]
        if partly and len(keys) > 1:
            self.stores[index] = (keys[:1], context)
            self.stores.append((keys[1:], context))
        self.end_store(index, success=success)

    @rule(keys=CHAINS, data=st.data())
    def prepare_load(self, keys: list[bytes], data: st.DataObject) -> None:
        context = self.any_request(data)
        num_ready = self.naive.lookup(keys).num_ready
        if num_ready < len(keys):
            before = snapshot(self.manager)
            with pytest.raises(KeyError):
                self.manager.prepare_load(keys, context)
            assert snapshot(self.manager) == before
        keys = keys[:num_ready]
        slots = self.manager.prepare_load(keys, context)
        assert slots == self.naive.prepare_load(keys)
        if keys:
            self.loads.append((keys, context))

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def complete_load(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.loads) - 1))
        keys, context = self.loads.pop(index)
        self.manager.complete_load(keys, context)
        self.naive.complete_load(keys)

    @rule(keys=CHAINS, data=st.data())
    def remove(self, keys: list[bytes], data: st.DataObject) -> None:
        self.manager.remove(keys, self.any_request(data))
        self.naive.remove(keys)

    @precondition(lambda self: self.num_requests > 8)
    @rule()
    def reset(self) -> None:
        self.manager.reset()
        self.naive.reset()

    @invariant()
    def both_hold_the_same(self) -> None:
        if not hasattr(self, "manager"):
            return
        manager, naive = self.manager, self.naive
        manager.check_invariants()
        assert {*manager.chunks()} == {record.state for record in naive.records}
        assert manager.resident_by_tenant() == {
            tenant: naive.resident(tenant) for tenant in TENANTS
        }
        assert self.what_is_kept() == self.what_should_be_kept()
        expected = {
            f'["evicted_chunks", "{whose}", "{for_whom}"]': count
            for (whose, for_whom), count in naive.evicted.items()
        }
        if naive.num_over_budget:
            expected['["hints_rejected", "priority", "budget"]'] = naive.num_over_budget
        assert counted(manager) == expected

    def what_is_kept(self) -> list[tuple[Any, ...]]:
        """Returns the chunks in the order of use, with what the policy knows of each.

        Chooses no victims, because that may bring things up to date.
        """
        return [
            (
                *(key, run.used_at, run.session and run.session.key, run.priority),
                math.inf if run.ttl_s is None else run.ttl_s,
                math.inf if run.expires_at is None else run.expires_at,
                self.still_ahead(run.expected_at),
            )
            for run in sorted(self.manager._table, key=lambda run: run.rank)
            for key in reversed(run.chunks)
            if key not in self.manager._doomed
        ]

    def what_should_be_kept(self) -> list[tuple[Any, ...]]:
        return [
            (
                *(record.key, record.used_at, record.session, record.priority),
                *(record.ttl_s, record.expires_at),
                self.still_ahead(record.expected_at),
            )
            for record in sorted(self.naive.records, key=lambda record: record.used)
            if not record.doomed
        ]

    def still_ahead(self, expected_at: float | None) -> float | None:
        is_ahead = expected_at is not None and expected_at > self.clock.now
        return expected_at if is_ahead else None

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for keys, context in self.stores:
            self.manager.complete_store(keys, context)
        for keys, context in self.loads:
            self.manager.complete_load(keys, context)
        for context in self.live:
            self.manager.on_request_finished(context)
        self.manager.check_invariants()
        assert self.manager.num_pinned == 0
        assert self.manager._policy._segments == {}
        self.manager.reset()
        self.manager.check_invariants()
        assert (self.manager.num_resident, self.manager.num_protected) == (0, 0)
        assert self.manager._table.sessions.by_key == {}


TestManagerAgainstModel = ManagerMachine.TestCase
TestManagerAgainstModel.settings = settings(
    deadline=None, max_examples=150, stateful_step_count=40
)
