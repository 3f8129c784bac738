"""Random schedules: everything at once, invariants after every step."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from real_scheduler.harness import Engine
from real_scheduler.sim_worker import TokenView
from real_scheduler.vllm_setup import STATE, Group
from vllm.v1.request import Request

from vllm_ctx_offload.messages import TransferJob

MakeEngine = Callable[..., Engine]
NUM_REQUESTS = 150


class Chaos:
    """Drives an engine with seeded luck."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._random = random.Random(seed)
        self._engine = engine
        self._live: list[Request] = []
        self._follows = engine.side._config.reset_with_device_cache
        self._prefixes = [
            [self._random.randrange(1, 500) for _ in range(260)] for _ in range(4)
        ]
        self.num_added = 0
        self.chance_to_end = 0.4
        engine.seconds_per_step = 0.004
        engine.controls.may_end = self._may_end
        engine.controls.fails = self._fails

    def _may_end(self, job: TransferJob, to_host: bool) -> bool:
        return self._random.random() < self.chance_to_end

    def _fails(self, job: TransferJob, to_host: bool, rank: int) -> bool:
        return self._random.random() < 0.05

    def drafts(self, view: TokenView) -> list[int]:
        """Returns drafts of which the first ones are right."""
        count = self._engine.num_drafts
        answer = self._engine.answer(view.tokens, count)
        return (answer[: self._random.randrange(count + 1)] + [3] * count)[:count]

    def _luck(self, chance: float) -> bool:
        return self._random.random() < chance

    def run(self) -> None:
        while self.num_added < NUM_REQUESTS:
            if self._luck(0.35):
                self._add()
            self._engine.step()
            self._meddle()
        self.chance_to_end = 1.0
        self._engine.settle()

    def _meddle(self) -> None:
        engine, scheduler = self._engine, self._engine.scheduler
        self._live = [r for r in self._live if not r.is_finished()]
        if self._live and self._luck(0.05):
            engine.abort(self._random.choice(self._live))
        if self._luck(0.02):
            engine.flush()
            try:
                scheduler.reset_prefix_cache(reset_running_requests=True)
            except RuntimeError:
                # vLLM's own limit while loads hold blocks.
                assert engine.side.planner._jobs.num_loads or any(
                    scheduler.kv_holding_waiting
                )
            else:
                engine.model.generation += self._follows
            self._check()
        if self._luck(0.01):
            self._reset_all()
        self.chance_to_end = self._random.choice([0.0, 0.2, 0.8, 1.0])

    def _reset_all(self) -> None:
        """New weights, as far as nothing of the old ones is left in vLLM."""
        engine = self._engine
        engine.flush()
        if engine.scheduler.reset_prefix_cache(reset_connector=not self._follows):
            engine.model.generation += 1
        self._check()

    def _check(self) -> None:
        # What a device's reset has made old goes with the next hook, not before.
        if not self._follows:
            self._engine.check()

    def _add(self) -> None:
        luck = self._random
        prefix = luck.choice(self._prefixes)[: luck.randrange(1, 260)]
        tail = [luck.randrange(1, 500) for _ in range(luck.randrange(1, 40))]
        params: dict[str, Any] = {}
        if self._luck(0.1):
            params["max_load_tokens"] = luck.randrange(0, 200)
        if self._luck(0.1):
            params["max_offload_tokens"] = luck.randrange(0, 200)
        request = self._engine.add(
            prefix + tail * self._luck(0.8),
            max_tokens=luck.choice([1, 2, 20, 70]),
            stop_token_ids=[luck.randrange(1, 500) for _ in range(12)],
            ctx={"store": not self._luck(0.1), "load": not self._luck(0.1)},
            params=params,
            skip_reading_prefix_cache=self._luck(0.05) or None,
        )
        self._live.append(request)
        self.num_added += 1


SETUPS: list[dict[str, Any]] = [
    {"async_scheduling": False},
    {"async_scheduling": True},
    {"async_scheduling": True, "extra": {"blocks_per_chunk": 3}},
    {"num_workers": 2, "extra": {"blocks_per_chunk": 2}},
    {"async_scheduling": True, "extra": {"store_threshold": 2}, "num_workers": 2},
    {"extra": {"reset_with_device_cache": True}},
    {
        "groups": (None, 70, 70),
        "num_blocks": 60,
        "num_slots": 27,
        "async_scheduling": True,
        "num_workers": 2,
        "extra": {"reset_with_device_cache": True, "store_threshold": 2},
    },
    {"groups": (None, 70, 70), "num_blocks": 60, "num_slots": 27},
    {
        "groups": (33, None),
        "num_blocks": 45,
        "num_slots": 18,
        "async_scheduling": True,
        "extra": {"blocks_per_chunk": 3},
    },
    {"groups": (100,), "async_scheduling": True, "num_workers": 2},
    {
        "groups": (Group(times=2), Group(70), Group(70)),
        "num_blocks": 60,
        "num_slots": 27,
    },
    {
        "groups": (Group(150, times=3), None, Group(70, times=2)),
        "num_blocks": 60,
        "num_slots": 27,
        "async_scheduling": True,
    },
    {"groups": (None, STATE), "num_blocks": 40, "num_slots": 18},
    {
        "groups": (STATE, Group(70), None, STATE),
        "num_blocks": 60,
        "num_slots": 30,
        "async_scheduling": True,
        "extra": {"blocks_per_chunk": 2},
    },
    {"groups": (STATE,), "num_slots": 6, "async_scheduling": True},
    {
        "groups": (Group(times=2), STATE),
        "num_blocks": 40,
        "num_slots": 18,
        "async_scheduling": True,
        "num_workers": 2,
    },
    {
        "groups": (None, STATE),
        "tokens_per_hash": 8,
        "num_blocks": 40,
        "num_slots": 18,
        "async_scheduling": True,
    },
    {"groups": (None, STATE), "num_drafts": 3, "num_blocks": 50, "num_slots": 18},
    {
        "groups": (Group(70), STATE, Group(times=2)),
        "num_drafts": 2,
        "num_blocks": 70,
        "num_slots": 24,
        "extra": {"blocks_per_chunk": 2},
    },
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_random_schedule_keeps_every_promise(
    make_engine: MakeEngine, setup: dict[str, Any], seed: int
) -> None:
    """Shared prefixes, a device and a host pool each far too small.

    Copies held back at random, failed copies, aborts, preemptions and resets. The
    harness sees wrong tokens, wrong content and leftovers.
    """
    extra = {"offload_prompt_only": seed % 2 == 0, **setup.get("extra", {})}
    options = {"num_slots": 9, "num_blocks": 26, "max_num_batched_tokens": 160}
    engine = make_engine(**{**options, **setup, "extra": extra})
    chaos = Chaos(engine, seed)
    if "num_drafts" in setup:
        engine.model.make_drafts = chaos.drafts
    chaos.run()
    assert engine.count("loaded_bytes") > 0
    assert engine.count("stored_bytes") > 0
