"""Plans the transfers of each step. Events in, plans out; no tensors, no clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm_ctx_offload.core.manager import OffloadingManager
from vllm_ctx_offload.messages import TransferJob, TransferPlan, WorkerReport
from vllm_ctx_offload.plan import OffloadPlan
from vllm_ctx_offload.scheduler.jobs import Job, JobKind, JobTable
from vllm_ctx_offload.scheduler.loads import LoadPlanner
from vllm_ctx_offload.scheduler.request_state import (
    RequestOffloadState,
    RequestReading,
    RequestView,
    Status,
    make_key_prefix,
)
from vllm_ctx_offload.scheduler.stores import FinalState, StorePlanner
from vllm_ctx_offload.stats import OffloadStats

__all__ = ["Planner", "StepEvents", "TableUpdate"]


class TableUpdate(NamedTuple):
    """A change to the block table of a request that runs in this step."""

    request_id: str
    block_ids: Sequence[Sequence[int]]  # of each group
    num_computed_tokens: int
    replace: bool  # the new table, or blocks appended to the old one


@dataclass(frozen=True, slots=True)
class StepEvents:
    """What vLLM's scheduler decided for one step."""

    num_scheduled_tokens: Mapping[str, int] = field(default_factory=dict)
    tables: Sequence[TableUpdate] = ()
    # Requests that lost their blocks since the last step.
    preempted: Collection[str] = ()
    # Blocks that others are copied to, whether or not a table has them.
    copied_to: Collection[int] = ()
    # Of requests that run in this step.
    states: Mapping[str, Sequence[FinalState]] = field(default_factory=dict)


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
        reading: RequestReading,
        stats: OffloadStats,
        *,
        prompt_only: bool = True,
        load_wait_s: float = 0.05,
    ) -> None:
        self._plan = plan
        self._manager = manager
        self._make_context = reading.make_context
        self._stats = stats
        self._states: dict[str, RequestOffloadState] = {}
        self._jobs = JobTable(plan.num_workers)
        self._loads = LoadPlanner(
            plan, manager, self._jobs, stats, load_wait_s, reading.skips_loads
        )
        self._stores = StorePlanner(plan, manager, self._jobs, stats, prompt_only)
        # Jobs made since the last step, for its plan.
        self._new_loads: list[TransferJob] = []
        self._new_late_stores: list[TransferJob] = []

    @property
    def has_work(self) -> bool:
        """Whether a transfer is planned or under way."""
        return bool(self._jobs)

    @property
    def num_requests(self) -> int:
        """Requests that are known and have not finished."""
        return len(self._states)

    # ---- requests waiting to be scheduled

    def on_new_request(self, request: RequestView) -> RequestOffloadState:
        """Returns the state of a request, made at its first call."""
        state = self._states.get(request.request_id)
        if state is None:
            req_context = self._make_context(request)
            prefixes = tuple(
                make_key_prefix(req_context.namespace, group)
                for group in range(len(self._plan.groups))
            )
            state = RequestOffloadState(request, req_context, prefixes)
            self._states[request.request_id] = state
            for hint in req_context.rejected:
                self._stats.count("hints_rejected", hint.field, hint.reason)
            self._manager.on_new_request(req_context)
        return state

    def lookup(
        self, request: RequestView, num_local_tokens: int, now: float
    ) -> tuple[int | None, bool]:
        """Returns how many tokens past the local hit can be loaded, and whether any.

        None: ask again, a chunk is just being stored. `now` is any clock in seconds.
        """
        state = self.on_new_request(request)
        if state.status is Status.RUNNING:
            # Only who has no blocks is looked up: a reset took them between two steps.
            state.leave_blocks()
        return self._loads.lookup(state, num_local_tokens, now)

    def may_load(self, request: RequestView) -> bool:
        """Returns whether a lookup is likely to find something, at a glance."""
        return self._loads.may_load(self.on_new_request(request))

    def shared_tokens(self, request_id: str) -> int:
        """Returns up to where a request's prompt was met before, at its last lookup.

        A state there would be of use to the next one that shares it.
        """
        return self._states[request_id].shared_tokens

    def on_allocated(
        self,
        request: RequestView,
        block_ids: Sequence[Sequence[int]],
        num_external_tokens: int,
    ) -> None:
        """The request was admitted; `num_external_tokens` have to be loaded for it."""
        state = self.on_new_request(request)
        if job := self._loads.admit(state, block_ids, num_external_tokens):
            self._new_loads.append(job)

    # ---- one step

    def plan_step(self, events: StepEvents) -> TransferPlan:
        """Returns the transfers of the step that vLLM's scheduler just decided."""
        for request_id in events.preempted:
            state = self._states.get(request_id)
            # A resumed request is named too; it left its blocks when it was preempted.
            if state is not None and state.status is Status.RUNNING:
                state.leave_blocks()
        written = list(events.copied_to)
        for load in self._new_loads:
            written.extend(load.block_ids)
        for update in events.tables:
            written.extend(self._update_table(update))
        # Before this step's own stores are added: those come after the writes.
        fences = self._jobs.readers_of(written)
        stores = []
        for request_id, num_tokens in events.num_scheduled_tokens.items():
            state = self._states.get(request_id)
            if state is None:
                continue
            self._stores.forget_skipped(state)
            states = events.states.get(request_id, ())
            if job := self._stores.plan_store(state, num_tokens, states):
                stores.append(job)
        # Taken last: after an error above, `abandon` still has to report the loads.
        loads, self._new_loads = tuple(self._new_loads), []
        late_stores, self._new_late_stores = tuple(self._new_late_stores), []
        return TransferPlan(
            late_stores=late_stores,
            fences=fences,
            loads=loads,
            stores=tuple(stores),
            idle=not events.num_scheduled_tokens,
        )

    def _update_table(self, update: TableUpdate) -> Iterator[int]:
        """Yields the blocks that the step's forward pass may write for the first time.

        Full blocks of a hit are only read.
        """
        if (state := self._states.get(update.request_id)) is not None:
            # Blocks are appended only to a table: who has none gets a new one.
            assert update.replace or state.status is Status.RUNNING
            state.move_to(Status.RUNNING)
            self._stores.set_table(state, update.block_ids, replace=update.replace)
        num_hit = update.num_computed_tokens if update.replace else 0
        for shape, blocks in zip(self._plan.groups, update.block_ids, strict=True):
            yield from blocks[num_hit // shape.tokens_per_block :]

    # ---- results and ends

    def on_worker_report(
        self, report: WorkerReport, bad_blocks: Set[int] = frozenset()
    ) -> None:
        """Settles the jobs that all workers have ended.

        Args:
            report: of all workers.
            bad_blocks: that loads should have filled, of any connector.
        """
        if bad_blocks:
            self._jobs.fail_stores_after(bad_blocks, report)
        for job in self._jobs.settle(report):
            if job.kind is JobKind.STORE:
                self._manager.complete_store(job.keys, job.req_context, not job.failed)
                self._count_bytes("stored_bytes", job)
            else:
                self._settle_load(job)

    def _settle_load(self, job: Job) -> None:
        self._manager.complete_load(job.keys, job.req_context)
        self._count_bytes("loaded_bytes", job)
        if job.failed:
            # Or the recomputed request would find the same bad chunks again.
            self._manager.remove(job.keys, job.req_context)
        state = self._states.get(job.req_context.request_id)
        # By job: after an abort, a client may have used the request's id again.
        if state is not None and state.load_job_id == job.job_id:
            state.load_job_id = None
            state.move_to(Status.WAITING)
            state.load_failed = job.failed
            if not job.failed:
                state.loaded_tokens += state.loading_tokens

    def _count_bytes(self, name: str, job: Job) -> None:
        if not job.failed:
            num_bytes = len(job.block_ids) * self._plan.bytes_per_block
            tenant = job.req_context.tenant
            self._stats.counts[name, tenant] += num_bytes * self._plan.num_workers

    def on_finished(
        self, request: RequestView, block_ids: Sequence[Sequence[int]]
    ) -> dict[str, Any] | None:
        """The request ended in whatever way; returns its receipt if it asked for one.

        Its blocks are freed right after. Chunks that are computed but were not stored
        yet are stored late: at the start of the next step, before anything can write
        to the blocks again, or, if vLLM writes earlier, not at all.
        """
        state = self._states.pop(request.request_id, None)
        if state is None:
            return None
        self._loads.drop_lease(state)
        if state.status is Status.RUNNING:
            self._stores.set_table(state, block_ids)
            if not self._plan.writes_early and (
                job := self._stores.plan_store(state, 0)
            ):
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
            self._loads.drop_lease(state)
            if state.request.num_computed_tokens > 0:
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


def _receipt(state: RequestOffloadState) -> dict[str, Any]:
    return {
        "ctx": {
            "tenant": state.req_context.tenant,
            "priority": state.req_context.granted_priority,
            "lookup_tokens": state.lookup_tokens,
            "loaded_tokens": state.loaded_tokens,
            "stored_tokens": state.stored_tokens,
            "rejected_tokens": state.rejected_tokens,
            "rejected_reason": state.rejected_reason,
        }
    }
