"""The real vLLM scheduler with our connector and simulated workers.

Every `step` schedules, runs the plan on the simulated workers, hands the result back
(one step late under async scheduling) and checks the invariants.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from real_scheduler.invariants import check_connector, check_idle, check_requests
from real_scheduler.sim_model import SimModel
from real_scheduler.sim_worker import Controls, SimDevice, SimTier, TokenView
from real_scheduler.vllm_setup import (
    Groups,
    index_of,
    make_kv_cache_config,
    make_scheduler,
    make_vllm_config,
    page_size,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorWorkerMetadata,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_ctx_offload.adapters.scheduler_side import SchedulerSide
from vllm_ctx_offload.adapters.vllm_api import CtxOffloadWorkerMetadata
from vllm_ctx_offload.connector import CtxOffloadConnector
from vllm_ctx_offload.stats import merge_stats, parse_key

init_none_hash(sha256)


def ours(**extra: Any) -> dict[str, Any]:
    """Returns the `kv_transfer_config` that names our connector."""
    return {
        "kv_connector": "CtxOffloadConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


class Engine:
    """One scheduler, its workers, and what came out of them.

    `num_slots` chunks fit in the host pool of each of our connectors.
    """

    def __init__(
        self,
        monkeypatch: Any,
        *,
        num_blocks: int = 64,
        num_slots: int = 64,
        block_size: int = 32,
        async_scheduling: bool = False,
        num_workers: int = 1,
        kv_transfer: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
        groups: Groups = (None,),
        second_runner: bool | None = None,
        **setup: Any,
    ) -> None:
        self.now = 0.0
        self.seconds_per_step = 0.001
        monkeypatch.setattr(
            "vllm_ctx_offload.adapters.scheduler_side.time",
            types.SimpleNamespace(monotonic=lambda: self.now),
        )
        self.block_size = block_size
        self.num_drafts: int = setup.get("num_drafts", 0)
        kv_cache_config = make_kv_cache_config(
            num_blocks, block_size, groups, self.num_drafts
        )
        page_bytes = page_size(block_size)
        per_chunk = (extra or {}).get("blocks_per_chunk", 1)
        pool = {"cpu_bytes_to_use": num_slots * per_chunk * page_bytes * num_workers}
        self.config = make_vllm_config(
            kv_transfer=kv_transfer or ours(**{**pool, **(extra or {})}),
            num_blocks=num_blocks,
            block_size=block_size,
            async_scheduling=async_scheduling,
            num_workers=num_workers,
            **setup,
        )
        if second_runner is not None:
            # Once the configuration stands, which wants Triton for it: no model runs.
            monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(second_runner)))
        self.scheduler = make_scheduler(self.config, kv_cache_config)
        self.hash_size = self.scheduler.hash_block_size
        self._async = async_scheduling
        lookahead = getattr(self.config, "num_hash_lookahead_tokens", 0)
        more = (lookahead,) if lookahead else ()
        self._hasher = get_request_block_hasher(self.hash_size, sha256, *more)
        self.model = SimModel(self.scheduler)
        self._make_workers(num_blocks, num_workers)
        self._init_records()

    def _make_workers(self, num_blocks: int, num_workers: int) -> None:
        self.controls = Controls()
        connector = self.scheduler.connector
        self.connectors: list[Any] = getattr(connector, "sub_connectors", [connector])
        self.sides: list[SchedulerSide] = [
            c._scheduler for c in self.connectors if isinstance(c, CtxOffloadConnector)
        ]
        self.loads_fail_whole = self.sides[0]._plan.loads_fail_whole
        # As the model runner of the release does; from 0.34 on there is one only.
        self.writes_early = getattr(self.config, "use_v2_model_runner", True)
        self.devices = [
            SimDevice(num_blocks, self.block_size) for _ in range(num_workers)
        ]
        self.tiers = [
            [self._make_tier(c, device, rank) for c in self.connectors]
            for rank, device in enumerate(self.devices)
        ]
        self._aggregator = KVOutputAggregator.from_connector(connector, num_workers)

    def _make_tier(self, connector: Any, device: SimDevice, rank: int) -> Any:
        if isinstance(connector, CtxOffloadConnector):
            plan = connector._scheduler.planner._plan
            return SimTier(device.blocks, plan, self.controls, rank)
        return connector.make_sim_tier(device)

    def _init_records(self) -> None:
        self.requests: dict[str, Request] = {}  # that may still get block hashes
        self.chunk_symbols: dict[bytes, list[int]] = {}  # block hash -> whole prefix
        self.tokens: dict[str, list[int]] = {}  # that came out, per request
        self.receipts: dict[str, Any] = {}
        self.finished: list[str] = []
        self.stats: dict[str, Any] = {}
        self.num_steps = 0
        self.last_output: SchedulerOutput = SchedulerOutput.make_empty()
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._next_id = 0

    # ---- requests

    def add(
        self,
        prompt: Sequence[int],
        request_id: str | None = None,
        *,
        max_tokens: int = 1,
        ctx: dict[str, Any] | None = None,
        params: dict[str, Any] | None = None,
        resumable: bool = False,
        **sampling: Any,
    ) -> Request:
        if request_id is None:
            request_id = f"r{self._next_id}"
            self._next_id += 1
        transfer = {**(params or {}), **({"ctx": ctx} if ctx else {})}
        request = Request(
            request_id,
            list(prompt),
            SamplingParams(
                max_tokens=max_tokens,
                temperature=0,
                extra_args={"kv_transfer_params": transfer or None},
                **sampling,
            ),
            None,
            block_hasher=self._hasher,
            resumable=resumable,
        )
        if request_id not in self.scheduler.requests:  # or it goes on with a session
            self.tokens[request_id] = []
            self.requests[request_id] = request
        self.scheduler.add_request(request)
        return self.requests[request_id]

    def abort(self, *requests: Request) -> None:
        self.scheduler.finish_requests(
            {request.request_id for request in requests},
            RequestStatus.FINISHED_ABORTED,
        )
        self.check()

    def run(self, prompt: Sequence[int], **options: Any) -> Request:
        """Adds a request and steps until nothing is left to do."""
        request = self.add(prompt, **options)
        self.drain()
        return request

    def drain(self, max_steps: int = 500) -> int:
        """Steps until all requests and transfers have ended; returns the steps."""
        for count in range(max_steps):
            if not self.scheduler.has_requests() and not self._in_flight:
                return count
            self.step()
        raise AssertionError(f"no end after {max_steps} steps")

    def settle(self) -> None:
        """Drains and checks that nothing is left in any table."""
        self.drain()
        check_idle(self)

    def answer(self, prompt: Sequence[int], count: int) -> list[int]:
        """Returns what the model says to `prompt`."""
        view = TokenView(prompt)
        for _ in range(count):
            view.append(view.next_token())
        return view.tokens[len(prompt) :]

    # ---- one step

    def step(self, count: int = 1) -> SchedulerOutput:
        for _ in range(count):
            self._step()
        return self.last_output

    def step_until(self, reached: Callable[[], bool], max_steps: int = 300) -> None:
        for _ in range(max_steps):
            if reached():
                return
            self.step()
        raise AssertionError(f"not reached in {max_steps} steps")

    def _step(self) -> None:
        self.num_steps += 1
        self.now += self.seconds_per_step
        if self.scheduler.has_requests() or not self._in_flight:
            self.schedule()
        elif self._async:
            self.update()
            return
        if len(self._in_flight) > self._async:
            self.update()
        self.check()

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def is_in_flight(self, request_id: str) -> bool:
        return any(
            request_id in output.num_scheduled_tokens for output, _ in self._in_flight
        )

    def flush(self) -> None:
        """Hands back all results: no step is in flight, as while vLLM is paused."""
        while self._in_flight:
            self.update()

    def schedule(self) -> None:
        """Schedules a step and computes it; its result stays in flight."""
        output = self.last_output = self.scheduler.schedule()
        self._learn_hashes()
        check_requests(self)
        self._in_flight.append((output, self._execute(output)))

    def update(self) -> None:
        """Hands back the oldest result in flight."""
        output, result = self._in_flight.popleft()
        for core_outputs in self.scheduler.update_from_output(output, result).values():
            stats = core_outputs.scheduler_stats
            if stats is not None and stats.kv_connector_stats:
                self._count(stats.kv_connector_stats)
            for item in core_outputs.outputs:
                self.tokens[item.request_id].extend(item.new_token_ids)
                if item.finish_reason is not None:
                    self.finished.append(item.request_id)
                    self.receipts[item.request_id] = item.kv_transfer_params
        self._learn_hashes()
        self.model.draft(output)
        self.check()

    def _count(self, increments: dict[str, Any]) -> None:
        if "CtxOffloadConnector" in increments:  # as a MultiConnector reports it
            increments = increments["CtxOffloadConnector"]
        for value in increments.values():
            assert isinstance(value, list) or value >= 0, increments
        self.stats = merge_stats(self.stats, increments)

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        metadata = output.kv_connector_metadata
        plans = getattr(metadata, "metadata", [metadata])
        forwards, sampled = self.model.forward(output)
        results = []
        for device, tiers in zip(self.devices, self.tiers, strict=True):
            if self.writes_early:
                device.prepare(output)
            for tier, part in zip(tiers, plans, strict=True):
                tier.before_forward(part.plan)
            if not self.writes_early:
                device.prepare(output)
            for tier, part in zip(tiers, plans, strict=True):
                tier.start_loads(part.plan)
            for forward in forwards:
                forward.run(device)
            for tier, part in zip(tiers, plans, strict=True):
                tier.start_stores(part.plan)
            results.append(self._result(tiers, sampled))
        aggregated = self._aggregator.aggregate(results)
        assert aggregated is not None
        return aggregated

    def _result(
        self, tiers: list[Any], sampled: dict[str, list[int]]
    ) -> ModelRunnerOutput:
        kv_output = KVConnectorOutput()
        kv_output.finished_recving = set()
        metas: list[CtxOffloadWorkerMetadata | None] = []
        for tier in tiers:
            ended = tier.finish_step()
            kv_output.finished_recving |= ended.loaded_requests
            if self.loads_fail_whole:
                kv_output.failed_recving |= ended.failed_loads.keys()
            else:
                kv_output.invalid_block_ids.update(*ended.failed_loads.values())
            report = ended.report
            metas.append(CtxOffloadWorkerMetadata(report) if report else None)
        if len(self.connectors) == 1:
            kv_output.kv_connector_worker_meta = metas[0]
        elif any(metas):
            kv_output.kv_connector_worker_meta = MultiKVConnectorWorkerMetadata(
                metadata=tuple(metas)
            )
        return ModelRunnerOutput(
            req_ids=list(sampled),
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=kv_output,
            **index_of(sampled),
        )

    # ---- checks

    def _learn_hashes(self) -> None:
        """Remembers which tokens each block hash stands for."""
        for request in list(self.requests.values()):
            hashes = request.block_hashes
            if hashes and hashes[-1] not in self.chunk_symbols:
                prefix = TokenView(request.all_token_ids).prefix_hashes
                for index, block_hash in enumerate(hashes, 1):
                    known = prefix[: index * self.hash_size]
                    self.chunk_symbols[bytes(block_hash)] = known
            if request.request_id not in self.scheduler.requests:
                del self.requests[request.request_id]

    def check(self) -> None:
        for index, connector in enumerate(self.connectors):
            side = getattr(connector, "_scheduler", None)
            if side in self.sides:
                check_connector(self, side, [tiers[index] for tiers in self.tiers])
        for request_id, request in self.requests.items():
            if request.resumable:
                continue  # its prompt grows by its answers
            tokens = self.tokens[request_id]
            prompt = list(request.prompt_token_ids or [])
            assert tokens == self.answer(prompt, len(tokens)), request_id

    @property
    def num_scheduled(self) -> dict[str, int]:
        """Tokens computed, per request."""
        return self.model.num_scheduled

    @property
    def side(self) -> SchedulerSide:
        (side,) = self.sides
        return side

    def count(self, name: str) -> float:
        """Returns the sum of a counter over its labels."""
        return sum(
            value for key, value in self.stats.items() if parse_key(key).name == name
        )
