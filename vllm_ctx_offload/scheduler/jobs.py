"""The transfers that are planned or under way, until every worker has ended them."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

from vllm_ctx_offload.context import ReqContext
from vllm_ctx_offload.messages import TransferJob, WorkerReport

__all__ = ["Job", "JobKind", "JobTable"]


class JobKind(enum.Enum):
    """The direction of a transfer."""

    STORE = enum.auto()  # device to host
    LOAD = enum.auto()  # host to device


@dataclass(slots=True)
class Job:
    """The scheduler's record of a transfer."""

    job_id: int
    kind: JobKind
    req_context: ReqContext
    keys: tuple[bytes, ...]  # pinned by this job
    block_ids: Sequence[int]
    num_pending: int  # workers that have not ended it
    failed: bool = False  # on any worker so far


class JobTable:
    """Jobs by id. Ids are never reused, so a late report can't hit the wrong job."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._next_id = 0
        self._jobs: dict[int, Job] = {}
        # Device block -> the latest store that reads it. Workers run stores in the
        # order of their ids, so whoever waits for that one waits for all before it.
        self._readers: dict[int, int] = {}
        self.num_loads = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def add(
        self,
        kind: JobKind,
        req_context: ReqContext,
        keys: tuple[bytes, ...],
        block_ids: Sequence[int],
        rows: tuple[int, ...],
    ) -> TransferJob:
        """Opens a job and returns what the workers need to know of it."""
        job_id = self._next_id
        self._next_id += 1
        self._jobs[job_id] = Job(
            job_id, kind, req_context, keys, block_ids, self._num_workers
        )
        if kind is JobKind.LOAD:
            self.num_loads += 1
        else:
            self._readers.update(dict.fromkeys(block_ids, job_id))
        return TransferJob(job_id, req_context.request_id, tuple(block_ids), rows)

    def readers_of(self, block_ids: Iterable[int]) -> tuple[int, ...]:
        """Returns the open stores that read one of `block_ids`, in order."""
        readers = self._readers
        if not readers:
            return ()
        return tuple(sorted({readers[b] for b in block_ids if b in readers}))

    def settle(self, report: WorkerReport) -> Iterator[Job]:
        """Takes in a report; yields the jobs that it ended, in order, once each."""
        for job_id in sorted(report.num_done):
            job = self._jobs[job_id]
            job.num_pending -= report.num_done[job_id]
            job.failed |= job_id in report.failed
            if job.num_pending > 0:
                continue
            del self._jobs[job_id]
            if job.kind is JobKind.LOAD:
                self.num_loads -= 1
            else:
                self._forget_reads(job)
            yield job

    def fail_stores_after(self, bad_blocks: Set[int], report: WorkerReport) -> None:
        """Fails all open stores if a load that was not ours left bad blocks.

        They may hold what was computed from it. Our own loads that failed are part of
        the report; nothing was computed from those.
        """
        own = [self._jobs[job_id].block_ids for job_id in report.failed]
        if not bad_blocks <= set().union(*own):
            for job in self._jobs.values():
                job.failed |= job.kind is JobKind.STORE

    def _forget_reads(self, job: Job) -> None:
        for block_id in job.block_ids:
            if self._readers.get(block_id) == job.job_id:
                del self._readers[block_id]

    def loading_requests(self) -> set[str]:
        """Returns the ids of the requests that an open load belongs to."""
        return {
            job.req_context.request_id
            for job in self._jobs.values()
            if job.kind is JobKind.LOAD
        }

    def check_invariants(self) -> None:
        loads = [job for job in self._jobs.values() if job.kind is JobKind.LOAD]
        assert len(loads) == self.num_loads
        for job in self._jobs.values():
            assert 0 < job.num_pending <= self._num_workers
        for block_id, job_id in self._readers.items():
            assert block_id in self._jobs[job_id].block_ids
