"""What the scheduler side and the worker side tell each other."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Terms", "TransferJob", "TransferPlan", "WorkerReport", "difference"]

# What the scheduler side and every worker come to by themselves and must agree on, by
# name. Plain values, so that other releases of this package can read it.
Terms = dict[str, int | str]


def difference(scheduler: Terms, worker: Terms) -> str:
    """Returns the terms that differ with both values; nothing if none does."""
    return ", ".join(
        f"{name} is {worker.get(name)} on the worker and {scheduler.get(name)} on the "
        "scheduler side"
        for name in {**scheduler, **worker}
        if scheduler.get(name) != worker.get(name)
    )


@dataclass(frozen=True, slots=True)
class TransferJob:
    """One batched copy between device blocks and rows of the host pool.

    A row holds one block, all layers of it; chunk slot s of b blocks is the rows
    s * b to s * b + b - 1. `block_ids[i]` and `rows[i]` belong together.
    """

    job_id: int  # unique in an engine's life; never reused
    request_id: str
    block_ids: tuple[int, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """The transfers of one step, in the order in which the worker takes them."""

    # Stores whose blocks were freed and whose data earlier steps computed: they start
    # before this step's forward pass.
    late_stores: tuple[TransferJob, ...] = ()
    # Stores, of this or earlier plans, whose source blocks this step writes anew: its
    # forward pass and its loads come after them.
    fences: tuple[int, ...] = ()
    loads: tuple[TransferJob, ...] = ()
    # Stores of blocks that this step's forward pass completes: they start after it.
    stores: tuple[TransferJob, ...] = ()
    # No tokens are scheduled: the worker may wait for transfers instead of spinning.
    idle: bool = False


@dataclass(slots=True)
class WorkerReport:
    """Jobs that ended since the last report, summed over the workers of an engine."""

    # How many workers ended the job, well or not; each reports a job exactly once.
    num_done: Counter[int] = field(default_factory=Counter)
    failed: set[int] = field(default_factory=set)  # on at least one worker

    def __bool__(self) -> bool:
        return bool(self.num_done)

    def merge(self, other: WorkerReport) -> WorkerReport:
        """Returns the sum of two reports."""
        return WorkerReport(self.num_done + other.num_done, self.failed | other.failed)
