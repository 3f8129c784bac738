"""What a request's hints ask for each chunk of its chain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from vllm_ctx_offload.context import DEFAULT_PRIORITY, Hints, ReqContext

__all__ = ["Segment", "Wish", "segments_of"]


class Wish(NamedTuple):
    """A priority, and how long it holds."""

    priority: int
    ttl_s: float | None  # None: for good


class Segment(NamedTuple):
    """The chunks from the end of the segment before it up to `end`."""

    end: int | None  # None: all the rest
    wish: Wish | None  # None: nothing was said, so what others said stays


_PLAIN = (Segment(None, None),)


def segments_of(
    req_context: ReqContext, tokens_per_chunk: int, keys_per_chunk: int = 1
) -> tuple[Segment, ...]:
    """Returns the wishes along a request's chain, without gaps, head first.

    The chain has `keys_per_chunk` chunks, of as many groups, for the same tokens.

    Costs O(directives) up to sorting, however long the chain is. A directive says more
    than `priority` and `decode_priority`, so it replaces them where it applies; of
    directives that overlap in a chunk the highest priority wins.
    """
    hints = req_context.hints
    cuts = {0}
    prompt_end = None
    if hints.decode_priority is not None and req_context.num_prompt_tokens is not None:
        prompt_end = -(-req_context.num_prompt_tokens // tokens_per_chunk)
        prompt_end *= keys_per_chunk
        cuts.add(prompt_end)
    elif hints.priority == DEFAULT_PRIORITY and not hints.retention_directives:
        return _PLAIN
    ranges = []
    for directive in hints.retention_directives:
        first = directive.start // tokens_per_chunk * keys_per_chunk
        end = None
        if directive.end is not None:
            end = -(-directive.end // tokens_per_chunk) * keys_per_chunk
        ranges.append((first, end, Wish(directive.priority, directive.duration_s)))
        cuts.update((first,) if end is None else (first, end))
    return tuple(_merged(sorted(cuts), ranges, hints, prompt_end))


def _merged(
    cuts: list[int],
    ranges: list[tuple[int, int | None, Wish]],
    hints: Hints,
    prompt_end: int | None,
) -> Iterator[Segment]:
    """Yields one segment for each stretch between two cuts."""
    for start, end in zip(cuts, [*cuts[1:], None], strict=True):
        wishes = [
            wish
            for first, last, wish in ranges
            if first <= start and (last is None or start < last)
        ]
        if wishes:
            # Of equal priorities the one that holds longer.
            best = max(
                wishes, key=lambda w: (w.priority, w.ttl_s is None, w.ttl_s or 0)
            )
            yield Segment(end, best)
        elif prompt_end is not None and start >= prompt_end:
            yield Segment(end, _base_wish(hints.decode_priority, hints))
        else:
            yield Segment(end, _base_wish(hints.priority, hints))


def _base_wish(priority: int | None, hints: Hints) -> Wish | None:
    if priority is None or priority == DEFAULT_PRIORITY:
        return None
    return Wish(priority, hints.ttl_s)
