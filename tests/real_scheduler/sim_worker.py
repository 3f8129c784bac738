"""A worker that moves symbols instead of bytes, as late as the contract allows.

The content of every token slot, on the device and in the host pool, is the pair
(generation of the weights, hash of the token prefix up to this position). A copy takes
its source only when the job is allowed to end or is fenced, and its destination is
unusable from its start to its end: a missing fence, pin or wait shows up as content
that belongs to somebody else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput

from vllm_ctx_offload.messages import TransferJob, TransferPlan, WorkerReport
from vllm_ctx_offload.plan import OffloadPlan

Symbol = tuple[int, int]
NOTHING: Symbol = (-1, 0)
BEING_COPIED: Symbol = (-2, 0)


class TokenView:
    """The tokens of a request as a worker sees them, with their symbols."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self.tokens: list[int] = []
        self.prefix_hashes: list[int] = []
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        before = self.prefix_hashes[-1] if self.prefix_hashes else 0
        self.tokens.append(token)
        self.prefix_hashes.append(hash((before, token)))

    def next_token(self) -> int:
        """Returns the token that the model answers to this prefix."""
        return 1 + self.prefix_hashes[-1] % 500


def in_group(group: int, prefix_hash: int) -> int:
    """Returns what layers of a group make of a prefix: of each another KV."""
    return prefix_hash if group == 0 else hash((group, prefix_hash))


class Forward(NamedTuple):
    """One request's part of a forward pass, in the attention layers of one group."""

    block_ids: list[int]
    block_size: int
    first: int  # position of the first token that is computed
    symbols: list[Symbol]  # to write from there on
    read: list[int]  # prefix hashes that the blocks must hold before `first`
    read_from: int = 0  # the first position that the layers still look at

    def run(self, device: SimDevice) -> None:
        """Raises AssertionError unless the blocks hold what is read of them."""
        for position in range(self.read_from, len(self.read)):
            block, offset = divmod(position, self.block_size)
            expected = self.read[position]
            found = device.blocks[self.block_ids[block]][offset]
            assert found == (found[0], expected), f"position {position} holds {found}"
        for position, symbol in enumerate(self.symbols, self.first):
            block, offset = divmod(position, self.block_size)
            device.blocks[self.block_ids[block]][offset] = symbol


class StateForward(NamedTuple):
    """The same of recurrent layers: one state goes in, others come out."""

    source: int | None  # block that holds the state so far
    read: int  # the prefix hash that it must be of
    states: list[tuple[int, Symbol]]  # blocks, and what they hold afterwards

    def run(self, device: SimDevice) -> None:
        if self.source is not None:
            found = device.blocks[self.source][0]
            assert found == (found[0], self.read), f"the state is {found}"
        for block_id, symbol in self.states:
            device.blocks[block_id][:] = [symbol] * len(device.blocks[block_id])


@dataclass
class Controls:
    """Decides when jobs end and whether they fail. Tests set what they need."""

    hold_stores: bool = False
    hold_loads: bool = False
    may_end: Callable[[TransferJob, bool], bool] = lambda job, to_host: True
    # (job, to host, index of the worker): whether the copy fails.
    fails: Callable[[TransferJob, bool, int], bool] = lambda job, to_host, rank: False

    def ends(self, job: TransferJob, to_host: bool) -> bool:
        held = self.hold_stores if to_host else self.hold_loads
        return not held and self.may_end(job, to_host)


@dataclass
class _Copy:
    job: TransferJob
    to_host: bool
    fails: bool
    done: bool = False  # physically, whether or not it was reported


@dataclass
class TierResult:
    loaded_requests: set[str] = field(default_factory=set)
    failed_loads: dict[str, set[int]] = field(default_factory=dict)
    report: WorkerReport = field(default_factory=WorkerReport)


class SimTier:
    """The worker half of one connector."""

    def __init__(
        self,
        device: list[list[Symbol]],
        plan: OffloadPlan,
        controls: Controls,
        rank: int,
    ) -> None:
        self._device = device
        self._fences_all = plan.writes_early
        self.host: list[list[Symbol]] = [[] for _ in range(plan.num_rows)]
        self.controls = controls
        self._rank = rank
        self._stores: deque[_Copy] = deque()
        self._loads: deque[_Copy] = deque()
        self._refused: list[TransferJob] = []
        self.num_fences = 0

    def before_forward(self, plan: TransferPlan) -> None:
        for job in plan.late_stores:
            self._start(job, to_host=True)
        waiting = set(plan.fences)
        self.num_fences += len(waiting)
        for copy in self._stores:
            if not waiting:
                break
            self._finish(copy)
            waiting.discard(copy.job.job_id)

    def start_loads(self, plan: TransferPlan) -> None:
        for job in plan.loads:
            if len(job.rows) != len(job.block_ids):
                self._refused.append(job)
            else:
                self._start(job, to_host=False)

    def start_stores(self, plan: TransferPlan) -> None:
        for job in plan.stores:
            self._start(job, to_host=True)
            if self._fences_all:  # as the worker does, see there
                self._finish(self._stores[-1])

    def _start(self, job: TransferJob, *, to_host: bool) -> None:
        fails = self.controls.fails(job, to_host, self._rank)
        copy = _Copy(job, to_host, fails)
        if to_host:
            self._stores.append(copy)
            for row in job.rows:
                self.host[row] = [BEING_COPIED]
        else:
            self._loads.append(copy)
            for block_id in job.block_ids:
                size = len(self._device[block_id])
                self._device[block_id][:] = [BEING_COPIED] * size

    def _finish(self, copy: _Copy) -> None:
        if copy.done:
            return
        copy.done = True
        if copy.fails:
            return
        for block_id, row in zip(copy.job.block_ids, copy.job.rows, strict=True):
            if copy.to_host:
                self.host[row] = list(self._device[block_id])
            else:
                self._device[block_id][:] = self.host[row]

    def finish_step(self) -> TierResult:
        """Ends what the controls let end, each direction in its order."""
        result = TierResult()
        for job in self._refused:
            result.loaded_requests.add(job.request_id)
            result.failed_loads[job.request_id] = set(job.block_ids)
            result.report.num_done[job.job_id] += 1
            result.report.failed.add(job.job_id)
        self._refused = []
        for queue in (self._stores, self._loads):
            while queue and self.controls.ends(queue[0].job, queue[0].to_host):
                copy = queue.popleft()
                self._finish(copy)
                self._report(copy, result)
        return result

    def _report(self, copy: _Copy, result: TierResult) -> None:
        result.report.num_done[copy.job.job_id] += 1
        if copy.fails:
            result.report.failed.add(copy.job.job_id)
        if not copy.to_host:
            result.loaded_requests.add(copy.job.request_id)
            if copy.fails:
                result.failed_loads[copy.job.request_id] = set(copy.job.block_ids)

    def wait_until_idle(self) -> None:
        """Ends all copies; they are reported as ever."""
        for copy in (*self._stores, *self._loads):
            self._finish(copy)

    @property
    def idle(self) -> bool:
        return not (self._stores or self._loads or self._refused)


class SimDevice:
    """The cache of one worker."""

    # Blocks of some groups hold that many times more tokens.
    MOST_TIMES = 6

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: list[list[Symbol]] = [
            [NOTHING] * block_size * self.MOST_TIMES for _ in range(num_blocks)
        ]

    def lose_contents(self) -> None:
        """What is left of the cache after its memory was given away."""
        for block in self.blocks:
            block[:] = [NOTHING] * len(block)

    def prepare(self, output: SchedulerOutput) -> None:
        """Zeroes and copies blocks for a step, when the model runner does."""
        for block_id in output.new_block_ids_to_zero or ():
            self.blocks[block_id][:] = [NOTHING] * len(self.blocks[block_id])
        for copied in output.kv_cache_block_copies or ():
            source = self.blocks[copied.src_block_id]
            self.blocks[copied.dst_block_id][:] = source
