"""P8, searched for: no call of the manager costs more in a larger pool, of any shape.

Only `resident_by_tenant`, which costs by the tenants, `chunks` and `check_invariants`
are left out: they are for tests and tools.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest
from core.counted import count_operations
from core.shapes import METHODS, SHAPES, VARIED, Asked, Call, Shape
from hypothesis import HealthCheck, Phase, given, settings, target
from pytest_mock import MockerFixture

from vllm_ctx_offload.core import HostMemoryManager, runs

SOAK = "CTX_OFFLOAD_COST_EXAMPLES"  # how many shapes are tried, at random then
SMALL, LARGE = 128, 512


class Cost(NamedTuple):
    """What a call took, in operations."""

    call: Call
    num_things: int  # keys, or what else it may cost by
    operations: int


def costs(shape: Shape, size: int) -> list[Cost]:
    return [
        Cost(call, num_things, count_operations(run))
        for call, num_things, run in shape.play(size)
    ]


def excess(small: Cost, large: Cost) -> float:
    """Returns by how much a call costs more in a larger pool than it may."""
    # Keys are the same: what is pinned costs a choice of victims something, or a reset.
    per_thing = 120 if small.call.method == "reset" else 30
    more = max(large.num_things - small.num_things, 0)
    return large.operations - 1.1 * small.operations - 60 - per_thing * more


def worst(shape: Shape, small: int, large: int) -> tuple[float, Cost, Cost]:
    """Returns the call that grows most between pools of two sizes, and by how much."""
    pairs = zip(costs(shape, small), costs(shape, large), strict=True)
    pair = max(pairs, key=lambda pair: excess(*pair))
    return excess(*pair), *pair


@pytest.fixture
def small_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a call move few runs, so that a small pool shows what a large one would."""
    monkeypatch.setattr(runs, "MAX_MOVES", 4)


@settings(
    deadline=None,
    max_examples=int(os.environ.get(SOAK, "80")),
    derandomize=SOAK not in os.environ,
    phases=[Phase.generate, Phase.target],  # what fails takes minutes to shrink
    suppress_health_check=list(HealthCheck),
    database=None,
)
@given(shape=SHAPES)
def test_no_shape_makes_a_call_cost_more_in_a_larger_pool(
    small_world: None, shape: Shape
) -> None:
    growth, small, large = worst(shape, SMALL, LARGE)
    target(growth)
    assert growth <= 0, (small, large)


# As many things as can go wrong at once, where one fill takes seconds.
EVERY_CALL = tuple(
    Call(method, num_keys, asked=Asked("one", 90, 5, 5))
    for method in [*METHODS[:-1], "store", "reset", "store"]
    for num_keys in (1, 12)
)
WORST = {
    "one session, released with each request": Shape(
        asked=(Asked("one"), Asked("one", 90, 5)), budget=0.5, calls=EVERY_CALL
    ),
    "sessions whose estimates have passed, over the budget": Shape(
        asked=(Asked("each", 90, VARIED, 5), Asked("each", VARIED, VARIED, 5)),
        budget=0.9,
        seconds=10,
        calls=EVERY_CALL,
    ),
    "many tenants that shrank and protect": Shape(
        asked=(Asked(None, 90), Asked("one", 50, 500, VARIED)),
        tenants="many",
        budget=0.5,
        removed=3,
        calls=EVERY_CALL,
    ),
    "many tenants without a say": Shape(
        tenants="many", plain_lru=True, chain_length=8, calls=EVERY_CALL
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", WORST.values(), ids=WORST)
def test_the_worst_shapes_cost_no_more_in_a_hundred_times_the_pool(
    shape: Shape,
) -> None:
    """But for runs that a call moves when there are any left, of which it moves few."""
    growth, small, large = worst(shape, 1_000, 100_000)
    assert growth <= 60 * runs.MAX_MOVES, (small, large)


def test_every_method_of_the_manager_is_called_in_the_search(
    mocker: MockerFixture,
) -> None:
    public = {
        name
        for name, value in vars(HostMemoryManager).items()
        if callable(value) and not name.startswith("_")
    }
    public |= {"on_new_request"}
    spies = {name: mocker.spy(HostMemoryManager, name) for name in public}
    calls = tuple(Call(method) for method in METHODS)
    for _, _, call in Shape(calls=calls).play(size=32):
        call()
    not_called = {name for name, spy in spies.items() if not spy.call_count}
    assert not_called == {"resident_by_tenant", "chunks", "check_invariants"}
