"""Stores: which chunks of a request are complete, and the copies that keep them."""

from __future__ import annotations

import itertools

from vllm_ctx_offload.core.manager import OffloadingManager
from vllm_ctx_offload.messages import TransferJob
from vllm_ctx_offload.plan import OffloadPlan
from vllm_ctx_offload.scheduler.jobs import JobKind, JobTable
from vllm_ctx_offload.scheduler.request_state import NULL_BLOCK, RequestOffloadState
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
        num_chunks = len(keys) // len(plan.groups)
        if num_chunks <= state.num_offered:
            return None  # complete, but not hashed yet
        state.num_offered = num_chunks
        return self._offer(state, keys)

    def _num_storable(self, state: RequestOffloadState, num_new_tokens: int) -> int:
        """Returns the tokens whose KV is final once the planned step has run."""
        request = state.request
        # Beyond num_tokens are drafts and tokens that are not known yet.
        num_tokens = min(
            request.num_computed_tokens + num_new_tokens, request.num_tokens
        )
        # A drafter's part of the last tokens changes with those that come after.
        num_tokens -= self._plan.draft_lookahead
        for block_ids in state.block_ids or ([],):
            num_tokens = min(num_tokens, len(block_ids) * self._plan.tokens_per_block)
        if self._prompt_only:
            num_tokens = min(num_tokens, request.num_prompt_tokens)
        if (cap := state.req_context.hints.max_offload_tokens) is not None:
            num_tokens = min(num_tokens, cap)
        return num_tokens

    def _offer(
        self, state: RequestOffloadState, keys: list[bytes]
    ) -> TransferJob | None:
        holes = self._holes(state, len(keys))
        grant = self._manager.prepare_store(keys, state.req_context, holes=holes)
        plan, per_chunk = self._plan, self._plan.blocks_per_chunk
        state.rejected_tokens = self._num_tokens(grant.num_rejected)
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
        state.stored_tokens += self._num_tokens(len(grant.indices))
        block_ids: list[int] = []
        for place in grant.indices:
            index, group = divmod(place, len(plan.groups))
            table = state.block_ids[group]
            block_ids.extend(table[index * per_chunk : (index + 1) * per_chunk])
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

    def _holes(self, state: RequestOffloadState, num_keys: int) -> frozenset[int]:
        """Returns the places of chunks that are not whole on the device any more."""
        num_groups, per_chunk = len(self._plan.groups), self._plan.blocks_per_chunk
        return frozenset(
            place
            for group, shape in enumerate(self._plan.groups)
            if not shape.looks_at_all
            for place in range(group, num_keys, num_groups)
            if NULL_BLOCK
            in state.block_ids[group][
                place // num_groups * per_chunk : (place // num_groups + 1) * per_chunk
            ]
        )

    def _num_tokens(self, num_chunks: int) -> int:
        """Returns what chunks of all groups together are worth in tokens."""
        return num_chunks * self._plan.tokens_per_chunk // len(self._plan.groups)

    def forget_skipped(self, state: RequestOffloadState) -> None:
        """Follows vLLM, which frees what no layer of a group can attend to any more.

        It tells nobody, so a table that was appended to would name blocks that belong
        to others by now.
        """
        num_computed = state.request.num_computed_tokens
        for shape, block_ids in zip(self._plan.groups, state.block_ids, strict=False):
            num_skipped = (
                shape.first_needed(num_computed) // self._plan.tokens_per_block
            )
            for index in range(min(num_skipped, len(block_ids)) - 1, -1, -1):
                if block_ids[index] == NULL_BLOCK:
                    break
                block_ids[index] = NULL_BLOCK
