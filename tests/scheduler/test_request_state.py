from __future__ import annotations

import itertools
from typing import Any

import pytest
from helpers import make_req_context
from scheduler.bench import FakeRequest

from vllm_ctx_offload.plan import GroupShape, OffloadPlan
from vllm_ctx_offload.scheduler.chain import ChainShape
from vllm_ctx_offload.scheduler.request_state import (
    RequestOffloadState,
    Status,
    make_key_prefix,
)

LEGAL = {
    (Status.WAITING, Status.LOADING),
    (Status.WAITING, Status.RUNNING),
    (Status.WAITING, Status.FINISHED),
    (Status.LOADING, Status.WAITING),
    (Status.LOADING, Status.FINISHED),
    (Status.RUNNING, Status.WAITING),
    (Status.RUNNING, Status.RUNNING),
    (Status.RUNNING, Status.FINISHED),
}


def make_chain(*blocks: int, blocks_per_chunk: int = 1) -> ChainShape:
    groups = tuple(GroupShape(size) for size in blocks)
    return ChainShape(OffloadPlan(groups, blocks_per_chunk, 4, 10, 1, 1))


ENDS = (b"a:", b"b:", b"c:")
ONE = make_chain(4)  # one group with a hash for each block


def make_state(num_tokens: int = 16) -> RequestOffloadState:
    request = FakeRequest("r", num_tokens)
    return RequestOffloadState(request, make_req_context("r"), (b"p:",))


@pytest.mark.parametrize(("before", "after"), list(itertools.product(Status, Status)))
def test_only_legal_transitions_happen(before: Status, after: Status) -> None:
    state = make_state()
    state.status = before
    if (before, after) in LEGAL:
        state.move_to(after)
        assert state.status is after
        return
    with pytest.raises(AssertionError, match="->"):
        state.move_to(after)
    assert state.status is before


def test_leaving_blocks_forgets_what_belonged_to_them() -> None:
    state = make_state()
    state.status = Status.RUNNING
    state.block_ids, state.num_offered, state.store_barrier = [[1, 2]], 2, True
    state.leave_blocks()
    assert state.status is Status.WAITING
    assert (state.block_ids, state.num_offered, state.store_barrier) == ([], 0, False)


def test_chain_is_as_long_as_it_is_hashed() -> None:
    state = make_state(16)
    assert state.chain(2, ONE) == [b"p:prefix-0", b"p:prefix-1"]
    assert state.chain(9, ONE) == [b"p:prefix-%d" % index for index in range(4)]
    assert state.chain(1, ONE) == [b"p:prefix-0"]
    assert state.chain(0, ONE) == []


def test_key_of_a_chunk_is_the_hash_at_its_end() -> None:
    state = make_state(20)
    two = make_chain(4, blocks_per_chunk=2)
    assert state.chain(9, two) == [b"p:prefix-1", b"p:prefix-3"]


def test_a_chain_holds_the_chunks_of_all_groups_span_by_span() -> None:
    """Blocks of 4, 12 and 12 tokens end together every 12."""
    shape = make_chain(4, 12, 12)
    assert (shape.tokens_per_span, shape.keys_per_span) == (12, 5)
    state = RequestOffloadState(FakeRequest("r", 28), make_req_context("r"), ENDS)
    chain = state.chain(9, shape)
    assert chain[:5] == [b"a:prefix-0", b"a:prefix-1", *(p + b"prefix-2" for p in ENDS)]
    assert chain[5:] == [b"a:prefix-3", b"a:prefix-4", *(p + b"prefix-5" for p in ENDS)]
    ones = [b"a:prefix-%d" % index for index in range(6)]
    for first in range(7):
        for end in range(first, 7):
            assert shape.keys_of(0, chain, first, end) == ones[first:end]
    assert shape.keys_of(2, chain, 0, 2) == [b"c:prefix-2", b"c:prefix-5"]
    for group in range(3):
        chunks = range(shape.num_chunks(group, 2))
        places = [shape.place(group, chunk) for chunk in chunks]
        found = shape.keys_of(group, chain, 0, len(places))
        assert [chain[place] for place in places] == found
        assert [shape.chunk_at(place) for place in places] == [
            (group, chunk) for chunk in chunks
        ]


def test_keys_of_a_group_cost_by_what_is_asked_for() -> None:
    """A lookup asks for one after another where states are missing."""

    class Chain(list[bytes]):
        num_read = 0

        def __getitem__(self, index: Any) -> Any:
            part = super().__getitem__(index)
            self.num_read += len(part)
            return part

    chain = Chain([b"key"] * 5000)
    assert len(make_chain(4, 12, 12).keys_of(0, chain, 2995, 2998)) == 3
    assert chain.num_read <= 10


def test_chain_grows_with_the_hashes() -> None:
    state = make_state(8)
    assert len(state.chain(9, ONE)) == 2
    assert isinstance(state.request, FakeRequest)
    state.request.num_tokens = 12
    state.request.grow_hashes("prefix")
    assert len(state.chain(9, ONE)) == 3


@pytest.mark.parametrize("kept", [1, 3])
def test_chain_starts_anew_when_hashed_tokens_were_replaced(kept: int) -> None:
    """A streaming-input session drops the last sampled token and goes on."""
    state = make_state(16)
    state.chain(9, ONE)
    state.num_offered = 4
    assert isinstance(state.request, FakeRequest)
    del state.request.block_hashes[kept:]
    if kept == 3:
        state.request.grow_hashes("replaced")
    expected = [b"p:prefix-%d" % index for index in range(kept)]
    if kept == 3:
        expected.append(b"p:replaced-3")
    assert state.chain(9, ONE) == expected
    assert state.num_offered == 0


def test_no_two_namespaces_or_groups_share_a_key_prefix() -> None:
    names = [b"", b"a", b"ab", b"a\x00", b"\x00a", b"\x00\x01a", b"a" * 600]
    prefixes = [
        make_key_prefix(name, group)
        for name, group in itertools.product(names, (0, 1, 97))
    ]
    for one, other in itertools.permutations(prefixes, 2):
        # Whatever hash follows, the keys differ.
        assert not one.startswith(other)
