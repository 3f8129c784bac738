"""How the chunks of all groups make up one chain for each request."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_ctx_offload.plan import OffloadPlan

__all__ = ["ChainShape"]


class ChainShape:
    """Where in a chain the chunks of each group are.

    A chain is made of spans, head first; a span holds the keys of the first group's
    chunks, then those of the next one's. With blocks of one size that is one key of
    each group.
    """

    def __init__(self, plan: OffloadPlan) -> None:
        self.tokens_per_span = plan.tokens_per_span
        self.hashes_per_span = plan.tokens_per_span // plan.tokens_per_hash
        self._chunks = plan.chunks_per_span
        self._starts: list[int] = []  # of each group, in a span
        # Of each key in a span: its group and the place among that group's chunks,
        # the same with the place of the hash at the chunk's end, and the chunk's tokens
        # from where the span begins, up to its end.
        self._columns: list[tuple[int, int]] = []
        self.hash_columns: list[tuple[int, int]] = []
        self.token_columns: list[tuple[int, int]] = []
        for group, num_chunks in enumerate(self._chunks):
            self._starts.append(len(self._columns))
            per_chunk = self.hashes_per_span // num_chunks
            size = plan.tokens_per_chunk(group)
            for index in range(num_chunks):
                self._columns.append((group, index))
                self.hash_columns.append((group, (index + 1) * per_chunk - 1))
                self.token_columns.append((index * size, (index + 1) * size))
        self.keys_per_span = len(self._columns)

    def num_chunks(self, group: int, num_spans: int) -> int:
        return self._chunks[group] * num_spans

    def num_whole_spans(self, group: int, num_chunks: int) -> int:
        return num_chunks // self._chunks[group]

    def place(self, group: int, chunk: int) -> int:
        """Returns where in a chain the key of a group's chunk is."""
        span, index = divmod(chunk, self._chunks[group])
        return span * self.keys_per_span + self._starts[group] + index

    def chunk_at(self, place: int) -> tuple[int, int]:
        """Returns (group, chunk of that group) of the key at a place."""
        span, column = divmod(place, self.keys_per_span)
        group, index = self._columns[column]
        return group, span * self._chunks[group] + index

    def keys_of(
        self, group: int, chain: Sequence[bytes], first: int, end: int
    ) -> list[bytes]:
        """Returns the keys of one group's chunks from `first` up to `end`, in order."""
        count, start = self._chunks[group], self._starts[group]
        span = first // count
        spans = chain[span * self.keys_per_span : -(-end // count) * self.keys_per_span]
        keys = [b""] * (len(spans) // self.keys_per_span * count)
        for index in range(count):
            keys[index::count] = spans[start + index :: self.keys_per_span]
        return keys[first - span * count : end - span * count]
