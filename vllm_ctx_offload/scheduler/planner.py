"""Plans the transfers of each step. Events in, plans out; no tensors, no clock."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from vllm_ctx_offload.context import ReqContext
from vllm_ctx_offload.core.manager import OffloadingManager
from vllm_ctx_offload.messages import TransferJob, TransferPlan, WorkerReport
from vllm_ctx_offload.plan import OffloadPlan
from vllm_ctx_offload.scheduler.jobs import Job, JobKind, JobTable
from vllm_ctx_offload.scheduler.request_state import (
    Lease,
    LookupAnswer,
    RequestOffloadState,
    RequestView,
    Status,
    make_key_prefix,
)
from vllm_ctx_offload.stats import OffloadStats

__all__ = ["Planner", "StepEvents", "TableUpdate"]

_GROUP: Final = 0  # the one KV cache group that is offloaded


class TableUpdate(NamedTuple):
    """A change to the block table of a request that runs in this step."""

    request_id: str
    block_ids: Sequence[int]
    num_computed_tokens: int
    replace: bool  # the new table, or blocks appended to the old one


@dataclass(frozen=True, slots=True)
class StepEvents:
    """What vLLM's scheduler decided for one step."""

    num_scheduled_tokens: Mapping[str, int] = field(default_factory=dict)
    tables: Sequence[TableUpdate] = ()
    # Requests that lost their blocks since the last step.
    preempted: Collection[str] = ()


class Planner:
    """The scheduler side of the connector, one method per event.

    A request is known from its first event to `on_finished`. Transfers are accounted
    by job, not by request: a job ends when every worker has reported it, whatever has
    become of its request by then. See docs/architecture.md for the orderings.
    """

    def __init__(
        self,
        plan: OffloadPlan,
        manager: OffloadingManager,
        make_context: Callable[[RequestView], ReqContext],
        stats: OffloadStats,
        *,
        prompt_only: bool = True,
        load_wait_s: float = 0.05,
    ) -> None:
        self._plan = plan
        self._manager = manager
        self._make_context = make_context
        self._stats = stats
        self._prompt_only = prompt_only
        self._load_wait_s = load_wait_s
        self._states: dict[str, RequestOffloadState] = {}
        self._jobs = JobTable(plan.num_workers)
        # Jobs made since the last step, for its plan.
        self._new_loads: list[TransferJob] = []
        self._new_late_stores: list[TransferJob] = []

    @property
    def has_work(self) -> bool:
        """Whether a transfer is planned or under way."""
        return bool(self._jobs)

    # ---- requests waiting to be scheduled

    def on_new_request(self, request: RequestView) -> RequestOffloadState:
        """Returns the state of a request, made at its first call."""
        state = self._states.get(request.request_id)
        if state is None:
            req_context = self._make_context(request)
            prefix = make_key_prefix(req_context.namespace, _GROUP)
            state = RequestOffloadState(request, req_context, prefix)
            self._states[request.request_id] = state
            for hint in req_context.rejected:
                self._stats.count("hints_rejected", hint.field, hint.reason)
            self._manager.on_new_request(req_context)
        return state

    def lookup(
        self, request: RequestView, num_local_tokens: int, now: float
    ) -> tuple[int | None, bool]:
        """Returns how many tokens past the local hit can be loaded, and whether any.

        None: ask again, a chunk is just being stored. A positive answer takes a lease
        on its chunks, which a next lookup, allocation, end or reset gives back.
        """
        state = self.on_new_request(request)
        self._drop_lease(state)
        lookup_tokens = max(request.num_tokens - num_local_tokens, 0)
        if reason := _skip_reason(state):
            state.answer = LookupAnswer(lookup_tokens, 0, reason)
            return 0, False
        first, keys = self._loadable_chain(state, num_local_tokens)
        found = self._manager.lookup(keys[first:], state.req_context)
        if found.pending and self._may_wait(state, now):
            return None, False
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
        end = state.request.num_tokens - 1
        if (cap := state.req_context.hints.max_load_tokens) is not None:
            end = min(end, num_local_tokens + cap)
        keys = self._chain(state, end)
        return num_local_tokens // self._plan.tokens_per_chunk, keys

    def _chain(self, state: RequestOffloadState, num_tokens: int) -> list[bytes]:
        plan = self._plan
        return state.chain(num_tokens // plan.tokens_per_chunk, plan.hashes_per_chunk)

    def _may_wait(self, state: RequestOffloadState, now: float) -> bool:
        if state.wait_until is None:
            state.wait_until = now + self._load_wait_s
        return now < state.wait_until

    def _drop_lease(self, state: RequestOffloadState) -> None:
        if state.lease is not None:
            self._manager.complete_load(state.lease.keys, state.req_context)
            state.lease = None

    def on_allocated(
        self, request: RequestView, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """The request was admitted; `num_external_tokens` have to be loaded for it.

        Zero is common: no hit, another connector's load, or the second call after a
        load. Then the lease, if any, is given back.
        """
        state = self.on_new_request(request)
        state.wait_until = None
        self._count_answer(state, num_external_tokens)
        lease, state.lease = state.lease, None
        if num_external_tokens > 0:
            self._start_load(state, lease, block_ids, num_external_tokens)
        elif lease is not None:
            self._manager.complete_load(lease.keys, state.req_context)

    def _count_answer(self, state: RequestOffloadState, num_loaded: int) -> None:
        """Counts the lookup that led to this admission; repeated ones never count."""
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
        state.loaded_tokens += num_loaded

    def _start_load(
        self,
        state: RequestOffloadState,
        lease: Lease | None,
        block_ids: Sequence[int],
        num_tokens: int,
    ) -> None:
        """Plans the load of `num_tokens` past the local hit into the table's blocks."""
        plan, per_chunk = self._plan, self._plan.blocks_per_chunk
        start = lease.start_token if lease else 0
        blocks = range(
            start // plan.tokens_per_block,
            -(-(start + num_tokens) // plan.tokens_per_block),
        )
        used: tuple[bytes, ...] = ()
        rows: tuple[int, ...] = ()
        if lease is not None:
            # vLLM may take less than it was promised.
            num_chunks = (blocks[-1] // per_chunk) + 1 - lease.first_chunk
            used = lease.keys[:num_chunks]
            self._manager.complete_load(lease.keys[num_chunks:], state.req_context)
            rows = tuple(
                lease.slots[block // per_chunk - lease.first_chunk] * per_chunk
                + block % per_chunk
                for block in blocks
            )
        # Without a lease nothing can be promised about the bytes: the job has no rows,
        # the worker reports it as failed, and vLLM recomputes.
        job = self._jobs.add(
            JobKind.LOAD,
            state.req_context,
            used,
            [block_ids[block] for block in blocks],
            rows,
        )
        self._new_loads.append(job)
        state.move_to(Status.LOADING)

    # ---- one step

    def plan_step(self, events: StepEvents) -> TransferPlan:
        """Returns the transfers of the step that vLLM's scheduler just decided."""
        for request_id in events.preempted:
            if (state := self._states.get(request_id)) is not None:
                state.leave_blocks()
        loads, self._new_loads = tuple(self._new_loads), []
        late_stores, self._new_late_stores = tuple(self._new_late_stores), []
        written: list[int] = []
        for load in loads:
            written.extend(load.block_ids)
        for update in events.tables:
            written.extend(self._update_table(update))
        # Before this step's own stores are added: those come after the writes.
        fences = self._jobs.readers_of(written)
        stores = []
        for request_id, num_tokens in events.num_scheduled_tokens.items():
            state = self._states.get(request_id)
            if state is not None and (job := self._plan_store(state, num_tokens)):
                stores.append(job)
        return TransferPlan(
            late_stores=late_stores,
            fences=fences,
            loads=loads,
            stores=tuple(stores),
            idle=not events.num_scheduled_tokens,
        )

    def _update_table(self, update: TableUpdate) -> Iterable[int]:
        """Returns the blocks that the step's forward pass may write for the first time.

        Full blocks of a hit are only read.
        """
        state = self._states.get(update.request_id)
        if update.replace:
            new = update.block_ids[
                update.num_computed_tokens // self._plan.tokens_per_block :
            ]
        else:
            new = update.block_ids
        if state is not None:
            state.move_to(Status.RUNNING)
            if update.replace:
                state.block_ids = list(update.block_ids)
            else:
                state.block_ids.extend(update.block_ids)
        return new

    def _plan_store(
        self, state: RequestOffloadState, num_new_tokens: int
    ) -> TransferJob | None:
        """Offers the request's chain if it has grown; returns the copy to make.

        The whole chain is offered, not only its new part: the manager skips what is
        resident, so what was refused or evicted meanwhile is tried again, and nothing
        that had no hash yet is ever passed over for good.
        """
        request, hints = state.request, state.req_context.hints
        if not hints.store or state.store_barrier:
            return None
        # Beyond num_tokens are drafts and tokens that are not known yet.
        num_tokens = min(
            request.num_computed_tokens + num_new_tokens,
            request.num_tokens,
            len(state.block_ids) * self._plan.tokens_per_block,
        )
        if self._prompt_only:
            num_tokens = min(num_tokens, request.num_prompt_tokens)
        if hints.max_offload_tokens is not None:
            num_tokens = min(num_tokens, hints.max_offload_tokens)
        if num_tokens // self._plan.tokens_per_chunk <= state.num_offered:
            return None
        keys = self._chain(state, num_tokens)
        if len(keys) <= state.num_offered:
            return None
        return self._offer(state, keys)

    def _offer(
        self, state: RequestOffloadState, keys: list[bytes]
    ) -> TransferJob | None:
        grant = self._manager.prepare_store(keys, state.req_context)
        state.num_offered = len(keys)
        chunk_tokens, per_chunk = self._plan.tokens_per_chunk, self._plan.blocks_per_chunk
        if grant.num_rejected:
            tenant = state.req_context.tenant
            self._stats.count("rejected_stores", tenant, "full", by=grant.num_rejected)
        state.rejected_tokens = grant.num_rejected * chunk_tokens
        if not grant.indices:
            return None
        state.stored_tokens += len(grant.indices) * chunk_tokens
        blocks = itertools.chain.from_iterable(
            state.block_ids[index * per_chunk : (index + 1) * per_chunk]
            for index in grant.indices
        )
        rows = itertools.chain.from_iterable(
            range(slot * per_chunk, (slot + 1) * per_chunk) for slot in grant.slots
        )
        granted = tuple(keys[index] for index in grant.indices)
        return self._jobs.add(
            JobKind.STORE, state.req_context, granted, list(blocks), tuple(rows)
        )

    # ---- results and ends

    def on_worker_report(self, report: WorkerReport) -> None:
        """Settles the jobs that all workers have ended."""
        for job in self._jobs.settle(report):
            req_context = job.req_context
            if job.kind is JobKind.STORE:
                self._manager.complete_store(job.keys, req_context, not job.failed)
                self._count_bytes("stored_bytes", job)
                continue
            self._manager.complete_load(job.keys, req_context)
            self._count_bytes("loaded_bytes", job)
            if job.failed:
                # Or the recomputed request would find the same bad chunks again.
                self._manager.remove(job.keys, req_context)
            state = self._states.get(req_context.request_id)
            if state is not None:
                state.move_to(Status.WAITING)

    def _count_bytes(self, name: str, job: Job) -> None:
        if not job.failed:
            num_bytes = len(job.block_ids) * self._plan.bytes_per_block
            tenant = job.req_context.tenant
            self._stats.count(name, tenant, by=num_bytes * self._plan.num_workers)

    def on_finished(
        self, request: RequestView, block_ids: Sequence[int]
    ) -> dict[str, Any] | None:
        """The request ended in whatever way; returns its receipt if it asked for one.

        Its blocks are freed right after. Chunks that are computed but were not stored
        yet are stored late: at the start of the next step, before anything can write
        to the blocks again.
        """
        state = self._states.pop(request.request_id, None)
        if state is None:
            return None
        self._drop_lease(state)
        if state.status is Status.RUNNING:
            state.block_ids = list(block_ids)
            if job := self._plan_store(state, 0):
                self._new_late_stores.append(job)
            self._manager.touch(state.keys, state.req_context)
        state.move_to(Status.FINISHED)
        self._manager.on_request_finished(state.req_context)
        return _receipt(state) if state.req_context.hints.receipt else None

    def reset(self) -> bool:
        """Forgets every chunk. Returns False while a load of old KV is under way.

        KV that live requests computed before the reset is not stored after it.
        """
        for state in self._states.values():
            self._drop_lease(state)
            state.answer = None
            if state.status is not Status.WAITING:
                state.store_barrier = True
        self._manager.reset()
        return not self._jobs.num_loads

    def abandon(self) -> tuple[TransferJob, ...]:
        """Gives up after an internal error; returns the loads that vLLM waits for.

        They have no rows, so every worker reports them as failed, and vLLM recomputes.
        """
        loads, self._new_loads = self._new_loads, []
        return tuple(dataclasses.replace(load, rows=()) for load in loads)

    def check_invariants(self) -> None:
        """Raises AssertionError unless states and jobs agree."""
        self._jobs.check_invariants()
        loading = {
            request_id
            for request_id, state in self._states.items()
            if state.status is Status.LOADING
        }
        assert loading <= self._jobs.loading_requests()
        for state in self._states.values():
            assert state.status is not Status.FINISHED
            assert state.lease is None or state.status is Status.WAITING


def _skip_reason(state: RequestOffloadState) -> str | None:
    if state.request.skip_reading_prefix_cache:
        return "skip_reading_prefix_cache"
    if not state.req_context.hints.load:
        return "load_off"
    return None


def _receipt(state: RequestOffloadState) -> dict[str, Any]:
    return {
        "ctx": {
            "tenant": state.req_context.tenant,
            "priority": state.req_context.hints.priority,
            "lookup_tokens": state.lookup_tokens,
            "loaded_tokens": state.loaded_tokens,
            "stored_tokens": state.stored_tokens,
            "rejected_tokens": state.rejected_tokens,
            "rejected_reason": "full" if state.rejected_tokens else None,
        }
    }
