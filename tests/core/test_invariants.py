"""`check_invariants`: what the other tests rely on sees what it is there for."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import make_chain
from manager_probe import make_manager, store

from vllm_ctx_offload.context import Hints, ReqContext

CHAIN = make_chain(3)
CONTEXT = ReqContext("r", hints=Hints(session="s", priority=10, ttl_s=5))


@pytest.mark.parametrize(
    "damage",
    [
        lambda manager, slot: manager._pins.update({slot: -1}),
        lambda manager, slot: manager._pins.update({slot: 1}),
        lambda manager, slot: manager._ready[CHAIN[1][-1]].pop(CHAIN[1]),
        lambda manager, slot: manager._doomed.update({CHAIN[1]: slot}),
        lambda manager, slot: manager._table.run(slot).chunks.update({CHAIN[1]: 0}),
        lambda manager, slot: setattr(manager._table.run(slot), "priority", 36),
        lambda manager, slot: setattr(manager._table.run(slot).account, "resident", 9),
    ],
    ids=[
        "pins below 0",
        "miscounted pins",
        "neither stored nor ready",
        "undead",
        "one slot for two",
        "protection not counted",
        "miscounted residents",
    ],
)
def test_the_manager_sees_damage(damage: Any) -> None:
    manager = make_manager(4)
    store(manager, CHAIN, CONTEXT)
    manager.check_invariants()
    damage(manager, 1)
    with pytest.raises(AssertionError):
        manager.check_invariants()


@pytest.mark.parametrize(
    "damage",
    [
        lambda table, run: run.chunks.clear(),
        lambda table, run: setattr(run, "num_pinned", 1),
        lambda table, run: setattr(table, "num_protected", 1),
        lambda table, run: table.run_of.__setitem__(0, 99),
        lambda table, run: run.session.batch.clear(),
        lambda table, run: setattr(run.session, "num_runs", 0),
        lambda table, run: table._due.clear(),
        lambda table, run: table.released.add(run),
        lambda table, run: table.sessions.get(("left over",)),
        lambda table, run: table.order.discard(run),
    ],
)
def test_the_table_of_runs_sees_damage(damage: Any) -> None:
    manager = make_manager(4)
    store(manager, CHAIN, CONTEXT)
    (run,) = manager._table
    manager._table.check_invariants()
    damage(manager._table, run)
    with pytest.raises(AssertionError):
        manager._table.check_invariants()
