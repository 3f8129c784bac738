"""A planner over a real manager, with hand-made requests and worker reports."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from helpers import make_req_context

from vllm_ctx_offload.core import AccountTerms, HostMemoryManager, PolicyConfig
from vllm_ctx_offload.messages import TransferPlan, WorkerReport
from vllm_ctx_offload.plan import GroupShape, OffloadPlan
from vllm_ctx_offload.scheduler import (
    FinalState,
    Planner,
    RequestReading,
    StepEvents,
    TableUpdate,
)
from vllm_ctx_offload.scheduler.chain import ChainShape
from vllm_ctx_offload.stats import OffloadStats

TOKENS_PER_BLOCK = 4


@dataclass
class FakeRequest:
    """The attributes of a vLLM request that are read."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    kv_transfer_params: dict[str, Any] | None = None
    skips_loads: bool = False  # as the adapter reads it

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or self.num_tokens
        if not self.block_hashes:
            self.grow_hashes("prefix")

    def grow_hashes(self, text: str) -> None:
        """Hashes all full blocks; equal texts are equal prefixes."""
        for index in range(len(self.block_hashes), self.num_tokens // TOKENS_PER_BLOCK):
            self.block_hashes.append(f"{text}-{index}".encode())


class Bench:
    """A planner, its manager, and shorthands for the events of a step."""

    def __init__(
        self,
        *,
        num_slots: int = 16,
        blocks_per_chunk: int = 1,
        num_workers: int = 1,
        hashes_per_block: int = 1,
        groups: tuple[GroupShape, ...] = (GroupShape(TOKENS_PER_BLOCK),),
        writes_early: bool = False,
        draft_lookahead: int = 0,
        **options: Any,
    ) -> None:
        self.stats = OffloadStats()
        plan = OffloadPlan(
            groups=groups,
            blocks_per_chunk=blocks_per_chunk,
            tokens_per_hash=TOKENS_PER_BLOCK // hashes_per_block,
            bytes_per_block=10,
            num_workers=num_workers,
            num_slots=num_slots,
            writes_early=writes_early,
            draft_lookahead=draft_lookahead,
        )
        policy = PolicyConfig(
            {"default": AccountTerms()},
            max_protected=num_slots,
            columns=ChainShape(plan).token_columns,
        )
        self.manager = HostMemoryManager(num_slots, self.stats, policy, lambda: 0.0)
        self.chain = ChainShape(plan)
        self.planner = Planner(
            plan,
            self.manager,
            RequestReading(
                lambda request: make_req_context(
                    request.request_id, params=request.kv_transfer_params
                ),
                lambda request: request.skips_loads,
            ),
            self.stats,
            **options,
        )

    def add(self, num_tokens: int, request_id: str = "r", **fields: Any) -> FakeRequest:
        request = FakeRequest(request_id, num_tokens, **fields)
        self.planner.on_new_request(request)
        return request

    def lookup(
        self, request: FakeRequest, num_local: int = 0, now: float = 0.0
    ) -> tuple[int | None, bool]:
        return self.planner.lookup(request, num_local, now)

    def run(
        self,
        request: FakeRequest,
        num_tokens: int,
        block_ids: list[int] | None = None,
        *more_groups: list[int],
        replace: bool = True,
        states: tuple[FinalState, ...] = (),
    ) -> TransferPlan:
        """Schedules tokens of one request; tables given are its new blocks."""
        tables = []
        if block_ids is not None:
            computed = request.num_computed_tokens
            blocks = [block_ids, *more_groups]
            tables = [TableUpdate(request.request_id, blocks, computed, replace)]
        plan = self.planner.plan_step(
            StepEvents(
                num_scheduled_tokens={request.request_id: num_tokens},
                tables=tables,
                states={request.request_id: states},
            )
        )
        request.num_computed_tokens += num_tokens
        return plan

    def idle(self, **events: Any) -> TransferPlan:
        return self.planner.plan_step(StepEvents(**events))

    def end(self, *job_ids: int, failed: bool = False, workers: int = 1) -> None:
        self.planner.on_worker_report(
            WorkerReport(
                Counter(dict.fromkeys(job_ids, workers)),
                set(job_ids) if failed else set(),
            )
        )

    def store(self, num_tokens: int, request_id: str = "first") -> None:
        """Stores a whole prompt and forgets the request."""
        request = self.add(num_tokens, request_id)
        self.lookup(request)
        self.planner.on_allocated(request, [[]], 0)
        num_blocks = -(-num_tokens // TOKENS_PER_BLOCK)
        plan = self.run(request, num_tokens, list(range(100, 100 + num_blocks)))
        self.end(*(job.job_id for job in plan.stores))
        self.planner.on_finished(request, [[]])

    def check(self) -> None:
        self.planner.check_invariants()
        self.manager.check_invariants()
