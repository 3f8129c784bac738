"""Random orders of what vLLM does between and during steps, and of errors of ours."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from real_scheduler.harness import Engine
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request

MakeEngine = Callable[..., Engine]


class Interleaving:
    """Schedules, hands results back and meddles in any order, with seeded luck.

    Other than `Chaos` it leaves steps in flight while it does so, gives ids to several
    requests one after the other, pauses, and has sessions that go on.
    """

    def __init__(self, engine: Engine, seed: int, most_in_flight: int) -> None:
        self.random = random.Random(seed)
        self.engine = engine
        self.most_in_flight = most_in_flight
        self.num_added = 0
        self._chance_to_end = 0.4
        self._prefixes = [
            [self.random.randrange(1, 500) for _ in range(200)] for _ in range(3)
        ]
        engine.seconds_per_step = 0.004
        engine.controls.may_end = lambda job, to_host: self._luck(self._chance_to_end)
        engine.controls.fails = lambda job, to_host, rank: self._luck(0.05)

    def _luck(self, chance: float) -> bool:
        return self.random.random() < chance

    def run(self, num_requests: int) -> None:
        scheduler = self.engine.scheduler
        while self.num_added < num_requests:
            if self._luck(0.4):
                self._add()
            self._go_on()
            self.random.choice(
                [self._abort, self._reset, self._pause, self._feed, *[_nothing] * 12]
            )()
            if self._luck(0.2):
                scheduler.set_pause_state(PauseState.UNPAUSED)
        self._chance_to_end = 1.0
        scheduler.set_pause_state(PauseState.UNPAUSED)
        self.engine.abort(*self._live(resumable=True))
        for _ in range(3000):
            if not (scheduler.has_requests() or self.engine.num_in_flight):
                return
            self._go_on()
        raise AssertionError("no end")

    def _go_on(self) -> None:
        engine = self.engine
        engine.now += engine.seconds_per_step
        may_schedule = engine.num_in_flight < self.most_in_flight
        if may_schedule and engine.scheduler.has_requests() and self._luck(0.7):
            engine.schedule()
        elif engine.num_in_flight:
            engine.update()
        self._chance_to_end = self.random.choice([0.0, 0.2, 0.8, 1.0])
        engine.check()

    def _live(self, *, resumable: bool) -> list[Request]:
        return [
            request
            for request in self.engine.scheduler.requests.values()
            if not request.is_finished() and request.resumable >= resumable
        ]

    def _tokens(self, most: int) -> list[int]:
        count = self.random.randrange(1, most)
        return [self.random.randrange(1, 500) for _ in range(count)]

    def _add(self) -> None:
        luck, engine = self.random, self.engine
        request_id = f"r{luck.randrange(10)}"
        if request_id in engine.scheduler.requests or engine.is_in_flight(request_id):
            return  # vLLM itself does not tell them apart
        prefix = luck.choice(self._prefixes)[: luck.randrange(1, 200)]
        engine.add(
            prefix + self._tokens(40),
            request_id,
            max_tokens=luck.choice([1, 2, 30]),
            resumable=self._luck(0.15),
            ctx={"session": luck.choice("xyz"), "release": self._luck(0.2)},
        )
        self.num_added += 1

    def _feed(self) -> None:
        """Goes on with a session, or ends it."""
        if sessions := self._live(resumable=True):
            session = self.random.choice(sessions)
            more = session.num_tokens < 900 and self._luck(0.8)
            self.engine.add(self._tokens(80), session.request_id, resumable=more)

    def _abort(self) -> None:
        if live := self._live(resumable=False):
            self.engine.abort(self.random.choice(live))
            if self._luck(0.5):
                self._add()

    def _reset(self) -> None:
        running, connector = self._luck(0.5), self._luck(0.2)
        try:
            self.engine.scheduler.reset_prefix_cache(running, connector)
        except RuntimeError:
            assert running  # vLLM's own limit while loads or sessions hold blocks

    def _pause(self) -> None:
        self.engine.scheduler.set_pause_state(self.random.choice(list(PauseState)))


def _nothing() -> None:
    """Most of the time."""


SETUPS: list[dict[str, Any]] = [
    {"most_in_flight": 3},
    {"most_in_flight": 2, "async_scheduling": True},
    {
        "most_in_flight": 4,
        "async_scheduling": True,
        "num_workers": 2,
        "extra": {"blocks_per_chunk": 2},
    },
    {
        "most_in_flight": 2,
        "async_scheduling": True,
        "groups": (None, 70),
        "num_blocks": 50,
    },
]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_any_order_keeps_every_promise(
    make_engine: MakeEngine, setup: dict[str, Any]
) -> None:
    """The harness sees wrong tokens, wrong content and leftovers."""
    options = {"num_slots": 12, "num_blocks": 26, "max_num_batched_tokens": 160}
    options.update(setup)
    options["extra"] = {"offload_prompt_only": False, **setup.get("extra", {})}
    most_in_flight = options.pop("most_in_flight")
    engine = make_engine(**options)
    Interleaving(engine, 7, most_in_flight).run(50)
    engine.settle()
    assert engine.count("loaded_bytes") > 0


PLACES = [
    *("planner.lookup", "planner.on_allocated", "planner.plan_step"),
    *("planner.on_worker_report", "planner.on_finished", "planner.reset"),
    *("planner._loads.admit", "planner._stores.plan_store"),
    *("planner._jobs.add", "planner._jobs.settle", "planner._jobs.readers_of"),
    *("manager.lookup", "manager.touch", "manager.prepare_load"),
    *("manager.complete_load", "manager.prepare_store", "manager.complete_store"),
]


@pytest.mark.parametrize("place", PLACES)
def test_after_an_error_anywhere_vllm_goes_on_without_us(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """With the right tokens, and without a block or a request that is left over."""
    engine = make_engine(
        num_slots=12, num_blocks=26, max_num_batched_tokens=160, async_scheduling=True
    )
    (side,) = engine.sides
    owner: Any = side
    *path, name = place.split(".")
    for step in path:
        owner = getattr(owner, step)
    call = getattr(owner, name)
    calls_left = 5 if name != "reset" else 1

    def fail(*args: Any, **options: Any) -> Any:
        nonlocal calls_left
        calls_left -= 1
        if calls_left:
            return call(*args, **options)
        engine.sides.clear()  # nothing holds for it any more
        raise ValueError(place)

    monkeypatch.setattr(owner, name, fail)
    interleaving = Interleaving(engine, PLACES.index(place), 2)
    while not side._disabled:
        interleaving.run(interleaving.num_added + 10)
    interleaving.run(interleaving.num_added + 10)
    engine.step_until(lambda: all(tier.idle for (tier,) in engine.tiers))
