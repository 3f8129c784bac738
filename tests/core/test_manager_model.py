"""`HostMemoryManager` against a naive model, and against an LRU of another kind."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from helpers import EMPTY_CONTEXT, make_chain
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from manager_probe import NaiveManager, chunk_states, resident_keys, snapshot

from vllm_ctx_offload.context import ReqContext
from vllm_ctx_offload.core import HostMemoryManager, StoreGrant
from vllm_ctx_offload.stats import OffloadStats

CONTEXTS = st.sampled_from(
    [ReqContext(request_id=name, tenant=name) for name in ("acme", "zeta", "default")]
)
# Heads in common of no, one and three chunks.
CHAINS = st.builds(
    make_chain,
    st.integers(0, 6),
    st.sampled_from("xyz"),
    shared=st.sampled_from([0, 1, 3]),
)


class ManagerMachine(RuleBasedStateMachine):
    """P1, P5, CASES 22, 23, 25: calls in any order do what the naive model does."""

    @initialize(num_slots=st.integers(0, 12))
    def start(self, num_slots: int) -> None:
        self.stats = OffloadStats()
        self.manager = HostMemoryManager(num_slots, self.stats)
        self.naive = NaiveManager(num_slots)
        self.stores: list[tuple[Sequence[bytes], ReqContext]] = []
        self.loads: list[tuple[Sequence[bytes], ReqContext]] = []

    @rule(keys=CHAINS, context=CONTEXTS)
    def lookup(self, keys: list[bytes], context: ReqContext) -> None:
        assert self.manager.lookup(keys, context) == self.naive.lookup(keys)

    @rule(keys=CHAINS, context=CONTEXTS)
    def touch(self, keys: list[bytes], context: ReqContext) -> None:
        self.manager.touch(keys, context)
        self.naive.touch(keys)

    @rule(keys=CHAINS, context=CONTEXTS)
    def prepare_store(self, keys: list[bytes], context: ReqContext) -> None:
        in_use = {record.slot for record in self.naive.records}
        grant = self.manager.prepare_store(keys, context)
        expected = self.naive.prepare_store(keys, context.tenant)
        assert grant == expected._replace(slots=grant.slots)
        in_use -= {slot for slot in in_use if not self._holds(slot)}
        assert len({*grant.slots}) == len(grant.slots) == len(grant.indices)
        assert not in_use & {*grant.slots}
        assert {*grant.slots} <= {*range(self.naive.num_slots)}
        for index, slot in zip(grant.indices, grant.slots, strict=True):
            self.naive.find(keys[index]).slot = slot
        if grant.indices:
            self.stores.append(([keys[index] for index in grant.indices], context))

    def _holds(self, slot: int) -> bool:
        return any(record.slot == slot for record in self.naive.records)

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), success=st.booleans(), partly=st.booleans())
    def complete_store(self, data: st.DataObject, success: bool, partly: bool) -> None:
        index = data.draw(st.integers(0, len(self.stores) - 1))
        keys, context = self.stores.pop(index)
        if partly and len(keys) > 1:
            self.stores.append((keys[1:], context))
            keys = keys[:1]
        self.manager.complete_store(keys, context, success)
        self.naive.complete_store(keys, success)

    @rule(keys=CHAINS, context=CONTEXTS)
    def prepare_load(self, keys: list[bytes], context: ReqContext) -> None:
        if self.naive.lookup(keys).num_ready < len(keys):
            before = snapshot(self.manager)
            with pytest.raises(KeyError):
                self.manager.prepare_load(keys, context)
            assert snapshot(self.manager) == before
            return
        assert self.manager.prepare_load(keys, context) == self.naive.prepare_load(keys)
        self.loads.append((keys, context))

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def complete_load(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.loads) - 1))
        keys, context = self.loads.pop(index)
        self.manager.complete_load(keys, context)
        self.naive.complete_load(keys)

    @rule(keys=CHAINS, context=CONTEXTS)
    def remove(self, keys: list[bytes], context: ReqContext) -> None:
        self.manager.remove(keys, context)
        self.naive.remove(keys)

    @rule()
    def reset(self) -> None:
        self.manager.reset()
        self.naive.remove([record.key for record in self.naive.records])

    @invariant()
    def both_hold_the_same_in_the_same_order(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_invariants()
        assert chunk_states(self.manager) == self.naive.states()
        assert self.manager.num_resident == len(self.naive.records)
        pinned = sum(bool(record.pins) for record in self.naive.records)
        assert self.manager.num_pinned == pinned
        expected = OffloadStats()
        for _, whose, for_whom in self.naive.victims:
            expected.count("evicted_chunks", whose, for_whom)
        assert self.stats._counts == expected._counts

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for keys, context in self.stores:
            self.manager.complete_store(keys, context)
        for keys, context in self.loads:
            self.manager.complete_load(keys, context)
        assert self.manager.num_pinned == 0
        self.manager.check_invariants()


TestManagerAgainstModel = ManagerMachine.TestCase
TestManagerAgainstModel.settings = settings(
    deadline=None, max_examples=100, stateful_step_count=40
)


def victims_by_timestamp(
    uses: Sequence[Sequence[bytes]], num_slots: int
) -> list[set[bytes]]:
    """Returns what each use of a chain evicts, by time stamps in place of an order.

    All chunks of a chain are stamped with the time of its use and their depth.
    """
    stamps: dict[bytes, tuple[int, int]] = {}
    victims = []
    for time, chain in enumerate(uses):
        evicted = set()
        for depth, key in enumerate(chain):
            if key in stamps:
                stamps[key] = (time, -depth)
        for depth, key in enumerate(chain):
            if key not in stamps and len(stamps) == num_slots:
                oldest = min(stamps, key=stamps.__getitem__)
                if oldest in chain:
                    break
                evicted.add(oldest)
                del stamps[oldest]
            stamps[key] = (time, -depth)
        victims.append(evicted)
    return victims


@settings(deadline=None, max_examples=200)
@given(num_slots=st.integers(1, 12), uses=st.lists(CHAINS, max_size=40))
def test_without_hints_victims_are_exactly_those_of_chain_aware_lru(
    num_slots: int, uses: list[list[bytes]]
) -> None:
    """P1, CASES 23."""
    manager = HostMemoryManager(num_slots, OffloadStats())
    victims = []
    for chain in uses:
        before = {*resident_keys(manager)}
        grant = manager.prepare_store(chain, EMPTY_CONTEXT)
        manager.complete_store([chain[i] for i in grant.indices], EMPTY_CONTEXT)
        victims.append(before - {*resident_keys(manager)})
        manager.check_invariants()
    assert victims == victims_by_timestamp(uses, num_slots)


@settings(deadline=None)
@given(num_slots=st.integers(1, 6), names=st.lists(st.integers(0, 9), max_size=60))
def test_chains_of_one_chunk_are_evicted_one_by_one_in_order_of_use(
    num_slots: int, names: list[int]
) -> None:
    """P1: the whole sequence, against the textbook."""
    manager, expected, order = HostMemoryManager(num_slots, OffloadStats()), [], []
    granted = []
    for name in names:
        key = bytes([name])
        grant = manager.prepare_store([key], EMPTY_CONTEXT)
        manager.complete_store([key] * len(grant.indices), EMPTY_CONTEXT)
        granted.append(grant._replace(slots=()))
        expected.append(StoreGrant(() if key in order else (0,), (), 0))
        order = [*[used for used in order if used != key], key][-num_slots:]
        assert resident_keys(manager) == order
    assert granted == expected
