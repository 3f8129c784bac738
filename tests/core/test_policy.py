"""`ChainLru`: the order in which chunks may be evicted."""

from __future__ import annotations

import pytest
from helpers import make_chain
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ctx_offload.core.policy import ChainLru, Chunk


def make_lru(*keys: bytes) -> ChainLru:
    lru = ChainLru()
    for slot, key in enumerate(keys):
        lru.add(key, Chunk(slot, "acme"))
    return lru


def order(lru: ChainLru) -> list[bytes]:
    return [key for key, _ in lru.items()]


def test_a_new_chunk_is_pinned_by_its_store_and_not_ready() -> None:
    chunk = Chunk(7, "acme")
    fields = (chunk.slot, chunk.tenant, chunk.pins, chunk.ready, chunk.doomed)
    assert fields == (7, "acme", 1, False, False)


def test_chunks_are_found_by_their_key() -> None:
    lru = make_lru(b"a", b"b")
    assert (len(lru), b"a" in lru, b"c" in lru) == (2, True, False)
    assert (lru[b"b"].slot, lru.get(b"b"), lru.get(b"c")) == (1, lru[b"b"], None)
    with pytest.raises(KeyError, match="c"):
        lru[b"c"]
    assert order(lru) == [b"a", b"b"]


def test_a_touched_chain_is_most_recent_and_its_tail_older_than_its_head() -> None:
    """CASES 23."""
    lru = make_lru(b"0", b"1", b"x", b"2")
    lru.touch([b"0", b"1", b"2"])
    assert order(lru) == [b"x", b"2", b"1", b"0"]


def test_touch_passes_over_absent_keys() -> None:
    lru = make_lru(b"0", b"x", b"2")
    lru.touch([b"0", b"1", b"2", b"3"])
    assert order(lru) == [b"x", b"2", b"0"]


def test_adding_a_resident_key_is_refused() -> None:
    lru = make_lru(b"a", b"b")
    chunk = lru[b"a"]
    with pytest.raises(AssertionError):
        lru.add(b"a", Chunk(5, "other"))
    assert (order(lru), lru[b"a"]) == ([b"a", b"b"], chunk)


def test_remove_returns_the_chunk_and_forgets_the_key() -> None:
    lru = make_lru(b"a", b"b")
    chunk = lru[b"a"]
    assert (lru.remove(b"a"), order(lru)) == (chunk, [b"b"])
    with pytest.raises(KeyError, match="a"):
        lru.remove(b"a")
    assert order(lru) == [b"b"]


@settings(deadline=None)
@given(
    touches=st.lists(
        st.tuples(st.sampled_from("xyz"), st.integers(1, 5), st.integers(0, 3)),
        max_size=30,
    )
)
def test_no_chunk_is_older_than_one_behind_it_in_its_chain(
    touches: list[tuple[str, int, int]],
) -> None:
    """CASES 23: whatever was used in whatever order, tails go first."""
    chains = [make_chain(5, tail, shared=shared) for tail in "xyz" for shared in (0, 3)]
    lru = ChainLru()
    for tail, length, shared in touches:
        chain = make_chain(length, tail, shared=3 if shared else 0)
        for key in chain:
            if key not in lru:
                lru.add(key, Chunk(0, "acme"))
        lru.touch(chain)
        age = {key: index for index, key in enumerate(order(lru))}
        for whole in chains:
            resident = [age[key] for key in whole if key in age]
            assert resident == sorted(resident, reverse=True)
