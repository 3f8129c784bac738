"""Stores: which chunks of a request are complete, and the copies that keep them."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from typing import Final, NamedTuple

from vllm_ctx_offload.core.manager import OffloadingManager
from vllm_ctx_offload.messages import TransferJob
from vllm_ctx_offload.plan import GroupShape, OffloadPlan
from vllm_ctx_offload.scheduler.chain import ChainShape
from vllm_ctx_offload.scheduler.jobs import JobKind, JobTable
from vllm_ctx_offload.scheduler.request_state import NULL_BLOCK, RequestOffloadState
from vllm_ctx_offload.stats import OffloadStats

__all__ = ["FinalState", "StorePlanner"]

# The part by which a chain has to grow before it is offered again.
_GROWTH: Final = 64


class FinalState(NamedTuple):
    """A recurrent group's state that nothing will write to any more."""

    group: int
    block_id: int
    num_tokens: int  # that it stands for


class _Holes(Container[int]):
    """The places in a chain of chunks that are not final, or not whole any more.

    States are as soon as they are in their table. What no layer of a group looks at
    from the chunk's end on may be missing.
    """

    def __init__(
        self,
        plan: OffloadPlan,
        chain: ChainShape,
        tables: Sequence[Sequence[int]],
        num_final: int,
    ) -> None:
        self._plan = plan
        self._chain = chain
        self._tables = tables
        self._num_final = num_final * chain.keys_per_span

    def __contains__(self, place: object) -> bool:
        assert isinstance(place, int)
        group, chunk = self._chain.chunk_at(place)
        shape, per_chunk = self._plan.groups[group], self._plan.blocks_per_chunk
        if place >= self._num_final and not shape.recurrent:
            return True
        if shape.looks_at_all:
            return False
        end = (chunk + 1) * per_chunk
        first = shape.first_needed(end * shape.tokens_per_block)
        first_block = max(first // shape.tokens_per_block, chunk * per_chunk)
        return NULL_BLOCK in self._tables[group][first_block:end]


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
        self._chain = ChainShape(plan)
        self._may_have_holes = not all(shape.looks_at_all for shape in plan.groups)
        # Spans that may wait to be offered before their first block is freed.
        self._patience = min(map(self._num_kept, plan.groups))
        self._manager = manager
        self._jobs = jobs
        self._stats = stats
        self._prompt_only = prompt_only

    def _num_kept(self, shape: GroupShape) -> float:
        """Returns how many spans a request surely holds behind its last one."""
        if shape.looks_at_all:
            return math.inf
        if shape.window is None:
            return 0
        return shape.window // 2 // self._chain.tokens_per_span

    def plan_store(
        self,
        state: RequestOffloadState,
        num_new_tokens: int,
        states: Sequence[FinalState] = (),
    ) -> TransferJob | None:
        """Offers the request's chain if it has grown; returns the copy to make.

        The whole chain is offered, not only its new part: the manager skips what is
        resident, so what was refused or evicted meanwhile is tried again, and nothing
        that had no hash yet is ever passed over for good.

        Args:
            state: of a running request.
            num_new_tokens: that the step being planned computes on top of
                `num_computed_tokens`.
            states: of recurrent groups, that are final once the step has run.
        """
        if not state.req_context.hints.store or state.store_barrier:
            return None
        shape, lookahead = self._chain, self._plan.draft_lookahead
        num_tokens = self._num_storable(state, num_new_tokens, lookahead)
        num_spans = num_tokens // shape.tokens_per_span
        if not states and not self._has_grown(state, num_spans, num_new_tokens == 0):
            return None
        if states:  # drafts are nothing to them
            num_tokens = self._num_storable(state, num_new_tokens, 0)
        keys = state.chain(num_tokens // shape.tokens_per_span, shape)
        num_spans = min(num_spans, len(keys) // shape.keys_per_span)
        if num_spans <= state.num_offered and not states:
            return None  # complete, but not hashed yet
        state.num_offered = num_spans
        self._show(state, states)
        job = self._offer(state, keys, num_spans)
        self._show(state, [final._replace(block_id=NULL_BLOCK) for final in states])
        return job

    def _has_grown(
        self, state: RequestOffloadState, num_spans: int, at_its_end: bool
    ) -> bool:
        """Whether a chain is worth to be offered again, which costs by its length.

        While a request decodes, chains of n chunks wait for n/64 more, or for its end;
        so a chunk costs the same however long the chain is; where blocks are freed
        before the end, no longer than they could be stored.
        """
        if at_its_end or num_spans <= state.num_offered:
            return num_spans > state.num_offered
        num_in_prompt = state.request.num_prompt_tokens // self._chain.tokens_per_span
        if state.num_offered < num_in_prompt:
            return True
        most = min(state.num_offered / _GROWTH, self._patience)
        return num_spans - state.num_offered >= most

    def _show(self, state: RequestOffloadState, states: Sequence[FinalState]) -> None:
        """Puts states into the tables; only there can they be stored."""
        for group, block_id, num_tokens in states:
            block, rest = divmod(num_tokens, self._plan.groups[group].tokens_per_block)
            # vLLM may also keep the one at the end of a prompt, inside a block.
            if not rest:
                state.block_ids[group][block - 1] = block_id

    def set_table(
        self,
        state: RequestOffloadState,
        block_ids: Sequence[Sequence[int]],
        *,
        replace: bool = True,
    ) -> None:
        """Takes new tables, or blocks to append to them.

        A state is copied on from block to block and written to all the time, so the
        blocks of a recurrent group count only when vLLM hands them over.
        """
        if replace:
            state.block_ids = [[] for _ in block_ids]
        for shape, table, more in zip(
            self._plan.groups, state.block_ids, block_ids, strict=True
        ):
            table.extend([NULL_BLOCK] * len(more) if shape.recurrent else more)

    def _num_storable(
        self, state: RequestOffloadState, num_new_tokens: int, lookahead: int
    ) -> int:
        """Returns the tokens whose KV is final once the planned step has run.

        That of the last `lookahead` tokens changes with those that come after.
        """
        request = state.request
        # Beyond num_tokens are drafts and tokens that are not known yet.
        num_tokens = min(
            request.num_computed_tokens + num_new_tokens, request.num_tokens
        )
        num_tokens -= lookahead
        groups = self._plan.groups
        for shape, table in zip(
            groups, state.block_ids or [[]] * len(groups), strict=True
        ):
            num_tokens = min(num_tokens, len(table) * shape.tokens_per_block)
        if self._prompt_only:
            num_tokens = min(num_tokens, request.num_prompt_tokens)
        if (cap := state.req_context.hints.max_offload_tokens) is not None:
            num_tokens = min(num_tokens, cap)
        return num_tokens

    def _offer(
        self, state: RequestOffloadState, keys: list[bytes], num_final: int
    ) -> TransferJob | None:
        """Offers a chain of which `num_final` spans, and all states, are final."""
        holes: Container[int] = ()
        if self._may_have_holes:
            holes = _Holes(self._plan, self._chain, state.block_ids, num_final)
        grant = self._manager.prepare_store(keys, state.req_context, holes=holes)
        state.rejected_tokens = self._plan.worth_in_tokens(grant.num_rejected)
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
        state.stored_tokens += self._plan.worth_in_tokens(len(grant.indices))
        size = self._plan.blocks_per_chunk
        block_ids: list[int] = []
        rows: list[int] = []
        for place, slot in zip(grant.indices, grant.slots, strict=True):
            group, chunk = self._chain.chunk_at(place)
            blocks = state.block_ids[group][chunk * size : (chunk + 1) * size]
            for row, block_id in enumerate(blocks, slot * size):
                if block_id != NULL_BLOCK:
                    block_ids.append(block_id)
                    rows.append(row)
        return self._jobs.add(
            JobKind.STORE,
            state.req_context,
            tuple(keys[index] for index in grant.indices),
            tuple(block_ids),
            tuple(rows),
        )

    def forget_skipped(self, state: RequestOffloadState) -> None:
        """Follows vLLM, which frees what no layer of a group can attend to any more.

        It tells nobody, so a table that was appended to would name blocks that belong
        to others by now.
        """
        num_computed = state.request.num_computed_tokens
        for shape, block_ids in zip(self._plan.groups, state.block_ids, strict=False):
            if shape.recurrent:
                continue
            num_skipped = shape.first_needed(num_computed) // shape.tokens_per_block
            for index in range(min(num_skipped, len(block_ids)) - 1, -1, -1):
                if block_ids[index] == NULL_BLOCK:
                    break
                block_ids[index] = NULL_BLOCK
