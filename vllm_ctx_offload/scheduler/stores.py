"""Stores: which chunks of a request are complete, and the copies that keep them."""

from __future__ import annotations

import itertools

from vllm_ctx_offload.core.manager import OffloadingManager
from vllm_ctx_offload.messages import TransferJob
from vllm_ctx_offload.plan import OffloadPlan
from vllm_ctx_offload.scheduler.jobs import JobKind, JobTable
from vllm_ctx_offload.scheduler.request_state import RequestOffloadState
from vllm_ctx_offload.stats import OffloadStats

__all__ = ["StorePlanner"]


class StorePlanner:
    """Offers the chains of running requests to the manager and plans the copies."""

    def __init__(
        self,
        plan: OffloadPlan,
        manager: OffloadingManager,
        jobs: JobTable,
        stats: OffloadStats,
        prompt_only: bool,
    ) -> None:
        self._plan = plan
        self._manager = manager
        self._jobs = jobs
        self._stats = stats
        self._prompt_only = prompt_only

    def plan_store(
        self, state: RequestOffloadState, num_new_tokens: int
    ) -> TransferJob | None:
        """Offers the request's chain if it has grown; returns the copy to make.

        The whole chain is offered, not only its new part: the manager skips what is
        resident, so what was refused or evicted meanwhile is tried again, and nothing
        that had no hash yet is ever passed over for good.

        Args:
            state: of a running request.
            num_new_tokens: that the step being planned computes on top of
                `num_computed_tokens`.
        """
        if not state.req_context.hints.store or state.store_barrier:
            return None
        plan = self._plan
        num_chunks = self._num_storable(state, num_new_tokens) // plan.tokens_per_chunk
        if num_chunks <= state.num_offered:
            return None
        keys = state.chain(num_chunks, plan.hashes_per_chunk)
        if len(keys) <= state.num_offered:
            return None  # complete, but not hashed yet
        return self._offer(state, keys)

    def _num_storable(self, state: RequestOffloadState, num_new_tokens: int) -> int:
        """Returns the tokens whose KV is final once the planned step has run."""
        request = state.request
        # Beyond num_tokens are drafts and tokens that are not known yet.
        num_tokens = min(
            request.num_computed_tokens + num_new_tokens,
            request.num_tokens,
            len(state.block_ids) * self._plan.tokens_per_block,
        )
        if self._prompt_only:
            num_tokens = min(num_tokens, request.num_prompt_tokens)
        if (cap := state.req_context.hints.max_offload_tokens) is not None:
            num_tokens = min(num_tokens, cap)
        return num_tokens

    def _offer(
        self, state: RequestOffloadState, keys: list[bytes]
    ) -> TransferJob | None:
        grant = self._manager.prepare_store(keys, state.req_context)
        state.num_offered = len(keys)
        plan, per_chunk = self._plan, self._plan.blocks_per_chunk
        state.rejected_tokens = grant.num_rejected * plan.tokens_per_chunk
        state.rejected_reason = grant.reason
        if grant.reason is not None:
            self._stats.count(
                "rejected_stores",
                state.req_context.tenant,
                grant.reason,
                by=grant.num_rejected,
            )
        if not grant.indices:
            return None
        state.stored_tokens += len(grant.indices) * plan.tokens_per_chunk
        block_ids = itertools.chain.from_iterable(
            state.block_ids[index * per_chunk : (index + 1) * per_chunk]
            for index in grant.indices
        )
        rows = itertools.chain.from_iterable(
            range(slot * per_chunk, (slot + 1) * per_chunk) for slot in grant.slots
        )
        return self._jobs.add(
            JobKind.STORE,
            state.req_context,
            tuple(keys[index] for index in grant.indices),
            tuple(block_ids),
            tuple(rows),
        )
