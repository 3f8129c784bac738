"""Loads: lookups, the leases they take, and the copies that follow an admission."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm_ctx_offload.core.manager import OffloadingManager
from vllm_ctx_offload.messages import TransferJob
from vllm_ctx_offload.plan import OffloadPlan
from vllm_ctx_offload.scheduler.chain import ChainShape
from vllm_ctx_offload.scheduler.jobs import JobKind, JobTable
from vllm_ctx_offload.scheduler.request_state import (
    NULL_BLOCK,
    Lease,
    LookupAnswer,
    RequestOffloadState,
    Status,
)
from vllm_ctx_offload.stats import OffloadStats

__all__ = ["LoadPlanner", "promised_blocks"]


class LoadPlanner:
    """Answers lookups and plans loads.

    A positive answer may be asked for again, trimmed, or never followed by an
    admission, so it only takes a lease: pins on its chunks, owned by the request and
    given back at its next lookup, unless that finds the same, and at its admission, end
    or reset.
    """

    def __init__(
        self,
        plan: OffloadPlan,
        manager: OffloadingManager,
        jobs: JobTable,
        stats: OffloadStats,
        load_wait_s: float,
        skips_loads: Callable[[Any], bool],
    ) -> None:
        self._plan = plan
        self._chain = ChainShape(plan)
        self._all_seeing: list[int] = []
        self._short_sighted: list[int] = []
        for group, shape in enumerate(plan.groups):
            sight = self._all_seeing if shape.looks_at_all else self._short_sighted
            sight.append(group)
        self._manager = manager
        self._jobs = jobs
        self._stats = stats
        self._load_wait_s = load_wait_s
        self._skips_loads = skips_loads

    def lookup(
        self, state: RequestOffloadState, num_local_tokens: int, now: float
    ) -> tuple[int | None, bool]:
        """Returns how many tokens past the local hit can be loaded, and whether any.

        None: ask again, a chunk is just being stored or the last load has failed.
        """
        if state.load_failed and not state.stepped_back:
            # vLLM freed the blocks of the failed load, but has the request still at
            # the head of those that hold blocks: if it does not fit now, nobody behind
            # it would ever run. To ask for a later call takes it out of their way.
            state.stepped_back = True
            return None, False
        lookup_tokens = max(state.request.num_tokens - num_local_tokens, 0)
        if reason := self._skip_reason(state):
            state.answer = LookupAnswer(lookup_tokens, 0, reason)
            return 0, False
        keys = self._loadable_chain(state, num_local_tokens)
        end, pending = self._hit_boundary(state, keys, num_local_tokens)
        if pending and self._may_wait(state, now):
            self.drop_lease(state)
            return None, False
        if state.wait_began is not None and state.waited_s is None:
            state.waited_s = now - state.wait_began
        hit_tokens = max(end - num_local_tokens, 0)
        found = keys, num_local_tokens, hit_tokens
        if state.lease is None or not state.lease.is_on(*found):
            self.drop_lease(state)
            if hit_tokens:
                self._take_lease(state, keys, num_local_tokens, end)
            self._manager.touch(keys, state.req_context)
        state.answer = LookupAnswer(lookup_tokens, hit_tokens, None)
        return hit_tokens, hit_tokens > 0

    def may_load(self, state: RequestOffloadState) -> bool:
        """Guesses whether a lookup will find something, from the chain's head alone."""
        head = state.chain(1, self._chain)
        if not head or self._skip_reason(state):
            return False
        if not self._all_seeing:
            return True  # the head may be gone where the end is there
        first = self._chain.keys_of(self._all_seeing[0], head, 0, 1)
        found = self._manager.lookup(first, state.req_context)
        return found.num_ready > 0 or found.pending

    def _skip_reason(self, state: RequestOffloadState) -> str | None:
        if self._skips_loads(state.request):
            return "skip_reading_prefix_cache"
        if not state.req_context.hints.load:
            return "load_off"
        if state.load_failed:
            # vLLM counts the blocks of the failed load as well when it admits another,
            # so a long request might never be admitted; and why trust the next copy?
            return "load_failed"
        return None

    def _loadable_chain(
        self, state: RequestOffloadState, num_local_tokens: int
    ) -> list[bytes]:
        """Returns the keys of all spans up to the last one that may be loaded.

        The last token is never loaded: the model needs one to compute. Tokens that are
        looked up only to be dropped come on top.
        """
        end = state.request.num_tokens - 1
        if (cap := state.req_context.hints.max_load_tokens) is not None:
            end = min(end, num_local_tokens + cap)
        end = min(end + self._plan.dropped_tokens, state.request.num_tokens)
        return state.chain(end // self._chain.tokens_per_span, self._chain)

    def _hit_boundary(
        self, state: RequestOffloadState, keys: Sequence[bytes], num_local_tokens: int
    ) -> tuple[int, bool]:
        """Returns the tokens up to which every group can go on, and if one is coming.

        Groups that look at everything need all chunks past the local hit, others only
        those they still look at from the boundary, recurrent ones the state there. A
        chunk that is missing moves the boundary before it, and so what the others need.
        See `dropped_tokens` of the plan for what is found at the end but not loaded.
        """
        boundary, pending = len(keys) // self._chain.keys_per_span, False
        for group in self._all_seeing:  # they agree to any shorter one too
            boundary, coming = self._reach(
                state, keys, group, boundary, num_local_tokens
            )
            pending |= coming
        if self._all_seeing:
            state.shared_tokens = boundary * self._chain.tokens_per_span
        agreed = 0
        while boundary and agreed != boundary:
            agreed = boundary
            for group in self._short_sighted:
                boundary, coming = self._reach(
                    state, keys, group, boundary, num_local_tokens
                )
                pending |= coming
        return self._end_of_hit(boundary), pending

    def _end_of_hit(self, boundary: int) -> int:
        """Returns the tokens that can be had where that many spans were found."""
        end = boundary * self._chain.tokens_per_span - self._plan.dropped_tokens
        return max(end, 0)

    def _reach(
        self,
        state: RequestOffloadState,
        keys: Sequence[bytes],
        group: int,
        boundary: int,
        num_local_tokens: int,
    ) -> tuple[int, bool]:
        """Returns (the boundary, or where one group misses a chunk; if it is coming).

        Other than one that looks at everything, the group may miss something there too.
        """
        first, end = self._needed_chunks(group, boundary, num_local_tokens)
        needed = self._chain.keys_of(group, keys, first, end)
        found = self._manager.lookup(needed, state.req_context)
        if found.num_ready < len(needed):
            if self._plan.groups[group].recurrent:
                return boundary - 1, found.pending
            boundary = self._chain.num_whole_spans(group, first + found.num_ready)
        return boundary, found.pending

    def _needed_chunks(
        self, group: int, boundary: int, num_local_tokens: int
    ) -> tuple[int, int]:
        """Returns (first, end) of the chunks with which a group can go on.

        The first may begin before the end of the local hit.

        Args:
            group: of layers.
            boundary: the spans that are to be found.
            num_local_tokens: of these, in whole blocks, that need not be loaded.
        """
        shape, size = self._plan.groups[group], self._plan.tokens_per_chunk(group)
        num_tokens = self._end_of_hit(boundary)
        end = self._chain.num_chunks(group, boundary)
        if shape.recurrent:
            end = num_tokens // size  # no drafter has such layers
        first = max(shape.first_needed(num_tokens), num_local_tokens) // size
        return min(first, end), end

    def _take_lease(
        self,
        state: RequestOffloadState,
        keys: Sequence[bytes],
        num_local_tokens: int,
        end: int,
    ) -> None:
        end_found = end + self._plan.dropped_tokens
        boundary = end_found // self._chain.tokens_per_span
        places = tuple(
            sorted(
                self._chain.place(group, chunk)
                for group in range(len(self._plan.groups))
                for chunk in range(
                    *self._needed_chunks(group, boundary, num_local_tokens)
                )
            )
        )
        leased = tuple([keys[place] for place in places])
        slots = self._manager.prepare_load(leased, state.req_context)
        state.lease = Lease(
            leased, slots, places, num_local_tokens, end - num_local_tokens
        )

    def _may_wait(self, state: RequestOffloadState, now: float) -> bool:
        began = now if state.wait_began is None else state.wait_began
        if now >= began + self._load_wait_s:
            return False
        state.wait_began, state.waited_s = began, None
        return True

    def drop_lease(self, state: RequestOffloadState) -> None:
        if state.lease is not None:
            self._manager.complete_load(state.lease.keys, state.req_context)
            state.lease = None

    def admit(
        self,
        state: RequestOffloadState,
        block_ids: Sequence[Sequence[int]],
        num_external_tokens: int,
    ) -> TransferJob | None:
        """Settles the last answer; returns the load to make, if there is one.

        Zero tokens are common: no hit, another connector's load, or the second call
        after a load.
        """
        self._count_answer(state)
        if num_external_tokens <= 0:
            self.drop_lease(state)
            return None
        lease, state.lease = state.lease, None
        state.move_to(Status.LOADING)
        state.loading_tokens = num_external_tokens
        if lease is not None and self._covers(lease, num_external_tokens):
            return self._load(state, lease, block_ids, num_external_tokens)
        # Should a release put a step, and so maybe a reset, between the answer and its
        # admission, or take less than a window was found for: without rows the
        # workers report the job as failed, and vLLM recomputes.
        keys = () if lease is None else lease.keys
        targets = promised_blocks(self._plan, block_ids, num_external_tokens)
        return self._open(state, keys, targets, ())

    def _covers(self, lease: Lease, num_tokens: int) -> bool:
        """Whether a lease holds all that is needed to go on after `num_tokens`."""
        return num_tokens == lease.num_tokens or not self._short_sighted

    def _count_answer(self, state: RequestOffloadState) -> None:
        """Counts the lookup that led to this admission; repeated ones never count."""
        if state.waited_s is not None:
            self._stats.observe("load_wait_seconds", value=state.waited_s)
        state.wait_began = state.waited_s = None
        answer, state.answer = state.answer, None
        if answer is None:
            return
        tenant = state.req_context.tenant
        skipped = answer.lookup_tokens if answer.skip_reason else 0
        missed = answer.lookup_tokens - answer.hit_tokens - skipped
        counts = self._stats.counts
        counts["lookup_tokens", tenant] += answer.lookup_tokens
        counts["hit_tokens", tenant] += answer.hit_tokens
        counts["missed_tokens", tenant] += missed
        if answer.skip_reason:
            self._stats.count("skipped_tokens", tenant, answer.skip_reason, by=skipped)
        state.lookup_tokens += answer.lookup_tokens

    def _load(
        self,
        state: RequestOffloadState,
        lease: Lease,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int,
    ) -> TransferJob:
        """Plans the load of `num_tokens` past the local hit into the table's blocks.

        vLLM may take less than it was promised. Blocks of the local hit are never a
        target, even where it ends inside a chunk, nor holes of a table.
        """
        per_chunk = self._plan.blocks_per_chunk
        # Of each group, the first block to load and the end.
        ranges = [
            (
                lease.start_token // group.tokens_per_block,
                -(-(lease.start_token + num_tokens) // group.tokens_per_block),
            )
            for group in self._plan.groups
        ]
        keys: list[bytes] = []
        unused: list[bytes] = []
        targets: list[int] = []
        rows: list[int] = []
        for key, slot, place in zip(lease.keys, lease.slots, lease.places, strict=True):
            group, chunk = self._chain.chunk_at(place)
            start, (first, end) = chunk * per_chunk, ranges[group]
            if start >= end:
                unused.append(key)
                continue
            keys.append(key)
            for block in range(max(start, first), min(start + per_chunk, end)):
                if (block_id := block_ids[group][block]) != NULL_BLOCK:
                    targets.append(block_id)
                    rows.append(slot * per_chunk + block - start)
        self._manager.complete_load(unused, state.req_context)
        return self._open(state, tuple(keys), targets, tuple(rows))

    def _open(
        self,
        state: RequestOffloadState,
        keys: tuple[bytes, ...],
        block_ids: Sequence[int],
        rows: tuple[int, ...],
    ) -> TransferJob:
        job = self._jobs.add(JobKind.LOAD, state.req_context, keys, block_ids, rows)
        state.load_job_id = job.job_id
        return job


def promised_blocks(
    plan: OffloadPlan, block_ids: Sequence[Sequence[int]], num_tokens: int
) -> tuple[int, ...]:
    """Returns the blocks of the tables that a load of `num_tokens` was promised for.

    They are their ends: nothing is computed in the step that admits an asynchronous
    load. The blocks before them are a local hit, which other requests may be reading.
    """
    return tuple(
        block_id
        for group, table in zip(plan.groups, block_ids, strict=True)
        for block_id in table[(-num_tokens) // group.tokens_per_block :]
        if block_id != NULL_BLOCK
    )
