"""What is loaded from the host is what a device cache without end would have hit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from real_scheduler.harness import Engine
from real_scheduler.vllm_setup import STATE, Group

MakeEngine = Callable[..., Engine]
LAYOUTS: dict[str, tuple[Any, ...]] = {
    "full": (None,),
    "windows": (None, 70, 70),
    "small pages": (Group(times=2), Group(70), Group(70)),
    "pages of three sizes": (Group(150, times=3), None, Group(70, times=2)),
    "states": (None, STATE),
    "states and larger blocks": (Group(times=2), STATE),
    "states, windows, attention": (STATE, Group(70), None, STATE),
    "states alone": (STATE,),
}


def prompts(seed: int, count: int = 30) -> list[list[int]]:
    luck = random.Random(seed)
    heads = [[luck.randrange(1, 500) for _ in range(500)] for _ in range(3)]
    asked = []
    for _ in range(count):
        shared = luck.choice(heads)[: luck.randrange(1, 500)]
        tail = [luck.randrange(1, 500) for _ in range(luck.randrange(0, 150))]
        asked.append(shared + tail)
    return asked + asked[:5]


def computed_tokens(engine: Engine, asked: list[list[int]], **ctx: Any) -> list[int]:
    """Returns how many tokens of each prompt were neither hit nor loaded."""
    counts = []
    for prompt in asked:
        if ctx["load"]:
            engine.scheduler.reset_prefix_cache()
        request = engine.run(prompt, ctx=ctx)
        engine.settle()
        counts.append(engine.num_scheduled[request.request_id])
    return counts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loads_are_as_long_as_hits_in_an_endless_device_cache(
    make_engine: MakeEngine, layout: str, async_scheduling: bool
) -> None:
    options: dict[str, Any] = {
        "groups": LAYOUTS[layout],
        "async_scheduling": async_scheduling,
        "num_blocks": 2000,
        "num_slots": 2000,
        "max_num_batched_tokens": 160,
    }
    asked = prompts(seed=len(layout))
    alone = make_engine(**options)
    hits = computed_tokens(alone, asked, load=False, store=False)
    assert sum(hits) < 0.7 * sum(map(len, asked))
    engine = make_engine(**options)
    assert computed_tokens(engine, asked, load=True) == hits
    assert engine.count("loaded_bytes") > alone.count("loaded_bytes") == 0


@pytest.mark.parametrize("groups", [(100,), (STATE,), (None, STATE), (None, 100)])
def test_a_load_that_failed_is_computed_from_where_nothing_is_missing(
    make_engine: MakeEngine, groups: tuple[Any, ...], async_scheduling: bool
) -> None:
    """Before its first block the table of a window or a state has only holes."""
    engine = make_engine(groups=groups, async_scheduling=async_scheduling)
    prompt = list(range(1, 240))
    engine.run(prompt)
    engine.settle()
    engine.scheduler.reset_prefix_cache()
    engine.controls.fails = lambda job, to_host, rank: not to_host
    request = engine.run(prompt)
    engine.settle()
    assert engine.num_scheduled[request.request_id] == len(prompt)
