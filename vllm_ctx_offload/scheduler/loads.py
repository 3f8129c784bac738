"""Loads: lookups, the leases they take, and the copies that follow an admission."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_ctx_offload.core.manager import OffloadingManager
from vllm_ctx_offload.messages import TransferJob
from vllm_ctx_offload.plan import OffloadPlan
from vllm_ctx_offload.scheduler.jobs import JobKind, JobTable
from vllm_ctx_offload.scheduler.request_state import (
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
    given back at its next lookup, admission, end or reset.
    """

    def __init__(
        self,
        plan: OffloadPlan,
        manager: OffloadingManager,
        jobs: JobTable,
        stats: OffloadStats,
        load_wait_s: float,
    ) -> None:
        self._plan = plan
        self._manager = manager
        self._jobs = jobs
        self._stats = stats
        self._load_wait_s = load_wait_s

    def lookup(
        self, state: RequestOffloadState, num_local_tokens: int, now: float
    ) -> tuple[int | None, bool]:
        """Returns how many tokens past the local hit can be loaded, and whether any.

        None: ask again, a chunk is just being stored or the last load has failed.
        """
        self.drop_lease(state)
        if state.load_failed and not state.stepped_back:
            # vLLM freed the blocks of the failed load, but has the request still at
            # the head of those that hold blocks: if it does not fit now, nobody behind
            # it would ever run. To ask for a later call takes it out of their way.
            state.stepped_back = True
            return None, False
        lookup_tokens = max(state.request.num_tokens - num_local_tokens, 0)
        if reason := _skip_reason(state):
            state.answer = LookupAnswer(lookup_tokens, 0, reason)
            return 0, False
        first, keys = self._loadable_chain(state, num_local_tokens)
        found = self._manager.lookup(keys[first:], state.req_context)
        if found.pending and self._may_wait(state, now):
            return None, False
        if state.wait_began is not None and state.waited_s is None:
            state.waited_s = now - state.wait_began
        self._manager.touch(keys, state.req_context)
        hit_tokens = 0
        if found.num_ready:
            end = (first + found.num_ready) * self._plan.tokens_per_chunk
            hit_tokens = end - num_local_tokens
            leased = tuple(keys[first : first + found.num_ready])
            slots = self._manager.prepare_load(leased, state.req_context)
            state.lease = Lease(leased, slots, first, num_local_tokens)
        state.answer = LookupAnswer(lookup_tokens, hit_tokens, None)
        return hit_tokens, hit_tokens > 0

    def _loadable_chain(
        self, state: RequestOffloadState, num_local_tokens: int
    ) -> tuple[int, list[bytes]]:
        """Returns (first chunk to load, keys of all chunks up to the last one).

        The last token is never loaded: the model needs one to compute. The first
        chunk may begin before the end of the local hit.
        """
        plan = self._plan
        end = state.request.num_tokens - 1
        if (cap := state.req_context.hints.max_load_tokens) is not None:
            end = min(end, num_local_tokens + cap)
        keys = state.chain(end // plan.tokens_per_chunk, plan.hashes_per_chunk)
        return num_local_tokens // plan.tokens_per_chunk, keys

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
        block_ids: Sequence[int],
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
        if lease is None:
            # Should a release put a step, and so maybe a reset, between the answer and
            # its admission: without rows the workers report the job as failed, and
            # vLLM recomputes.
            targets = promised_blocks(self._plan, block_ids, num_external_tokens)
            return self._open(state, (), targets, ())
        return self._load(state, lease, block_ids, num_external_tokens)

    def _count_answer(self, state: RequestOffloadState) -> None:
        """Counts the lookup that led to this admission; repeated ones never count."""
        if state.waited_s is not None:
            self._stats.count("load_wait_seconds", by=state.waited_s)
        state.wait_began = state.waited_s = None
        answer, state.answer = state.answer, None
        if answer is None:
            return
        tenant = state.req_context.tenant
        skipped = answer.lookup_tokens if answer.skip_reason else 0
        missed = answer.lookup_tokens - answer.hit_tokens - skipped
        self._stats.count("lookup_tokens", tenant, by=answer.lookup_tokens)
        self._stats.count("hit_tokens", tenant, by=answer.hit_tokens)
        self._stats.count("missed_tokens", tenant, by=missed)
        if answer.skip_reason:
            self._stats.count("skipped_tokens", tenant, answer.skip_reason, by=skipped)
        state.lookup_tokens += answer.lookup_tokens

    def _load(
        self,
        state: RequestOffloadState,
        lease: Lease,
        block_ids: Sequence[int],
        num_tokens: int,
    ) -> TransferJob:
        """Plans the load of `num_tokens` past the local hit into the table's blocks.

        vLLM may take less than it was promised. Blocks of the local hit are never a
        target, even where it ends inside a chunk.
        """
        plan, per_chunk = self._plan, self._plan.blocks_per_chunk
        end = -(-(lease.start_token + num_tokens) // plan.tokens_per_block)
        blocks = range(lease.start_token // plan.tokens_per_block, end)
        num_chunks = blocks[-1] // per_chunk + 1 - lease.first_chunk
        self._manager.complete_load(lease.keys[num_chunks:], state.req_context)
        rows = tuple(
            lease.slots[block // per_chunk - lease.first_chunk] * per_chunk
            + block % per_chunk
            for block in blocks
        )
        targets = [block_ids[block] for block in blocks]
        return self._open(state, lease.keys[:num_chunks], targets, rows)

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
    plan: OffloadPlan, block_ids: Sequence[int], num_tokens: int
) -> tuple[int, ...]:
    """Returns the blocks of a table that a load of `num_tokens` was promised for.

    They are its end: nothing is computed in the step that admits an asynchronous load.
    The blocks before them are a local hit, which other requests may be reading.
    """
    num_blocks = -(-num_tokens // plan.tokens_per_block)
    return tuple(block_ids[-num_blocks:])


def _skip_reason(state: RequestOffloadState) -> str | None:
    if state.request.skip_reading_prefix_cache:
        return "skip_reading_prefix_cache"
    if not state.req_context.hints.load:
        return "load_off"
    if state.load_failed:
        # vLLM counts the blocks of the failed load as well when it admits another one,
        # so a long request might never be admitted; and why trust the next copy?
        return "load_failed"
    return None
