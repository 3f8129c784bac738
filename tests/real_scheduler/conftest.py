"""Engines that are checked to be empty when their test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from real_scheduler.harness import Engine


@pytest.fixture
def make_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(**options: Any) -> Engine:
        engine = Engine(monkeypatch, **options)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.controls.hold_stores = engine.controls.hold_loads = False
        engine.controls.may_end = lambda job, to_host: True
        engine.settle()
        engine.scheduler.shutdown()


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def async_scheduling(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)
