"""Chains, hints and requests of all kinds."""

from __future__ import annotations

from helpers import make_chain
from hypothesis import strategies as st

from vllm_ctx_offload.context import Hints, RetentionDirective

TENANTS = ("default", "acme", "zeta")
# Heads in common of no, one and three chunks.
CHAINS = st.builds(
    make_chain,
    st.integers(0, 6),
    st.sampled_from("xyz"),
    shared=st.sampled_from([0, 1, 3]),
)
# What the keys of a span stand for: one group of chunks, two that are alike, one of
# larger chunks beside one of smaller ones, three of which none is like another.
COLUMNS = st.sampled_from(
    [
        ((0, 1),),
        ((0, 2),),
        ((0, 3), (0, 3)),
        ((0, 1), (1, 2), (0, 2)),
        ((0, 6), (0, 2), (2, 4), (4, 6), (0, 3), (3, 6)),
    ]
)
PRIORITIES = st.sampled_from([35, 35, 10, 60, 90])
TIMES = st.sampled_from([None, 1, 3, 10])
DIRECTIVES = st.builds(
    lambda start, length, priority, ttl: RetentionDirective(
        start, None if length is None else start + length, priority, ttl
    ),
    st.integers(0, 6),
    st.sampled_from([None, 1, 4]),
    PRIORITIES,
    TIMES,
)
HINTS = st.one_of(
    st.just(Hints()),
    st.builds(Hints, priority=PRIORITIES, ttl_s=TIMES),
    st.builds(
        Hints,
        session=st.sampled_from([None, "s", "t"]),
        priority=PRIORITIES,
        ttl_s=TIMES,
        retention_directives=st.lists(DIRECTIVES, max_size=2).map(tuple),
        decode_priority=st.sampled_from([None, 0, 20, 70]),
        expected_reuse_s=st.sampled_from([None, 0, 1, 2, 5]),
        release=st.booleans(),
    ),
)
