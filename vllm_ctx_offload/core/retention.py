"""What a request's hints ask for each chunk of its chain."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

from vllm_ctx_offload.context import DEFAULT_PRIORITY, Hints, ReqContext

__all__ = ["Columns", "Segment", "Wish", "segments_of"]

# A chain repeats a span of keys. For each of them, in order: the tokens of its chunk,
# from one up to another, counted from where the span begins; the last ones end it.
Columns = Sequence[tuple[int, int]]


class Wish(NamedTuple):
    """A priority, and how long it holds."""

    priority: int
    ttl_s: float | None  # None: for good


class Segment(NamedTuple):
    """The chunks from the end of the segment before it up to `end`."""

    end: int | None  # None: all the rest
    wish: Wish | None  # None: nothing was said, so what others said stays


class _Claim(NamedTuple):
    """A wish for the chunks from one place in the chain up to another."""

    first: int
    rank: tuple[float, ...]  # of claims that overlap the lowest one wins
    end: float
    wish: Wish | None


_PLAIN = (Segment(None, None),)


def segments_of(req_context: ReqContext, columns: Columns) -> tuple[Segment, ...]:
    """Returns the wishes along a request's chain, without gaps, head first.

    A chunk gets what is asked for any of its tokens. A directive says more than
    `priority` and `decode_priority`, so it replaces them where it applies; of
    directives that overlap in a chunk the highest priority wins, and of equal ones the
    one that holds longer. A chunk with a token of the prompt is one of the prompt.

    Costs O(directives * columns) up to sorting, however long the chain is.
    """
    hints, num_prompt_tokens = req_context.hints, req_context.num_prompt_tokens
    wish = _base_wish(hints.priority, hints)
    claims = [_Claim(0, (2,), math.inf, wish)]
    if hints.decode_priority is not None and num_prompt_tokens is not None:
        decoded = _base_wish(hints.decode_priority, hints)
        claims = [_Claim(0, (2,), math.inf, decoded)]
        for first, end in _touched(columns, 0, num_prompt_tokens):
            claims.append(_Claim(first, (1,), end, wish))
    elif wish is None and not hints.retention_directives:
        return _PLAIN
    for start, stop, priority, ttl_s in hints.retention_directives:
        rank = (0, -priority, -math.inf if ttl_s is None else -ttl_s)
        for first, end in _touched(columns, start, math.inf if stop is None else stop):
            claims.append(_Claim(first, rank, end, Wish(priority, ttl_s)))
    return tuple(_winners(claims))


def _touched(columns: Columns, start: int, stop: float) -> Iterator[tuple[int, float]]:
    """Yields the stretches of a chain whose chunks hold tokens from `start` to `stop`.

    Inside a span the range may begin or end with some chunks of each group; whole spans
    lie between.
    """
    if stop <= start:
        return
    size, num_keys = columns[-1][1], len(columns)
    first = last = start // size
    if stop == math.inf:
        yield (first + 1) * num_keys, math.inf
    elif (last := (int(stop) - 1) // size) > first + 1:
        yield (first + 1) * num_keys, last * num_keys
    for span in {first, last}:
        place, begin = span * num_keys, span * size
        touched = [c < stop - begin and start - begin < end for c, end in columns]
        for is_touched, stretch in itertools.groupby(touched):
            end_place = place + sum(1 for _ in stretch)
            if is_touched:
                yield place, end_place
            place = end_place


def _winners(claims: list[_Claim]) -> list[Segment]:
    """Returns who wins where; one of the claims is for the whole chain."""
    claims.sort(key=itemgetter(0), reverse=True)
    cuts = sorted({cut for claim in claims for cut in (claim.first, claim.end)})
    segments: list[Segment] = []
    held: list[tuple[tuple[float, ...], float, Wish | None]] = []
    for place, end in itertools.pairwise(cuts):
        while claims and claims[-1].first <= place:
            heapq.heappush(held, claims.pop()[1:])
        while held[0][1] <= place:
            heapq.heappop(held)
        wish = held[0][2]
        if segments and segments[-1].wish == wish:
            segments.pop()
        segments.append(Segment(None if end == math.inf else int(end), wish))
    return segments


def _base_wish(priority: int, hints: Hints) -> Wish | None:
    if priority == DEFAULT_PRIORITY:
        return None
    return Wish(priority, hints.ttl_s)
