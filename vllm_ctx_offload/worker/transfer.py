"""What a device backend does: run copy jobs beside the model and report their ends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from vllm_ctx_offload.messages import TransferJob

__all__ = ["JobResult", "Transfer", "check_job"]


class JobResult(NamedTuple):
    """The end of a job. Reported exactly once for every submitted job."""

    job: TransferJob
    to_host: bool
    ok: bool
    seconds: float  # from submission to the end


class Transfer(Protocol):
    """Runs copy jobs, in submission order within each direction.

    Called from the model's thread only; no call but `fence` and `poll` may block it.
    Nothing raises for what happens inside a copy: a failed job is a result. A job is
    reported only when no part of it can touch memory any more.
    """

    def submit(self, job: TransferJob, *, to_host: bool) -> None:
        """Starts a store (`to_host`) or a load.

        The copy comes after all compute that was submitted before this call: a store
        reads what it wrote, a load does not overwrite what it still reads.
        """

    def fence(self, job_ids: Iterable[int]) -> None:
        """Orders all compute and all loads submitted from now on after these stores.

        Their source blocks are about to be overwritten. Unknown ids have ended.
        """

    def poll(self, timeout_s: float = 0.0) -> list[JobResult]:
        """Returns the jobs that ended since the last call.

        Args:
            timeout_s: how long it may wait for the first one while any is open.
        """

    def close(self) -> None:
        """Stops after the copy that is being made; open jobs end as failed."""


def check_job(job: TransferJob, num_blocks: int, num_rows: int) -> None:
    """Raises for a job that is not within the cache and the pool.

    An index outside would be cut off in silence by a slice, and on a GPU it would end
    the process. Called by the backends off the model's thread, where it costs nothing.
    """
    if len(job.rows) != len(job.block_ids):
        raise ValueError("a job has as many rows as blocks")
    for name, ids, limit in (
        ("block", job.block_ids, num_blocks),
        ("row", job.rows, num_rows),
    ):
        if ids and not (min(ids) >= 0 and max(ids) < limit):
            raise ValueError(f"a {name} of the job lies outside 0 to {limit - 1}")
