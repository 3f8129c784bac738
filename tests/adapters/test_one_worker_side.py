"""The one worker side of a process: whose it is, and what it agrees on."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from real_scheduler.harness import ours
from real_scheduler.vllm_setup import HEAD_SIZE, make_kv_cache_config, make_vllm_config
from vllm.distributed.kv_transfer import (
    ensure_kv_transfer_shutdown,
    get_kv_transfer_group,
    has_kv_transfer_group,
    kv_transfer_state,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
)
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_ctx_offload import memory
from vllm_ctx_offload.adapters import vllm_api
from vllm_ctx_offload.connector import CtxOffloadConnector
from vllm_ctx_offload.errors import ConfigError

NUM_BLOCKS = 11
BLOCK = 32


def make_connector(role: KVConnectorRole, **extra: Any) -> CtxOffloadConnector:
    extra = extra or {"cpu_bytes_to_use": "1MiB"}
    config = make_vllm_config(kv_transfer=ours(**extra), num_blocks=NUM_BLOCKS)
    return CtxOffloadConnector(config, role, make_kv_cache_config(NUM_BLOCKS, BLOCK))


def make_caches() -> dict[str, torch.Tensor]:
    return {"layer": torch.zeros(NUM_BLOCKS, 2, BLOCK, 2, HEAD_SIZE)}


@pytest.fixture
def worker_side(monkeypatch: pytest.MonkeyPatch) -> Iterator[CtxOffloadConnector]:
    """One with caches, where vLLM's worker puts it."""
    gc.collect()  # the scheduler sides of other tests
    connector = make_connector(KVConnectorRole.WORKER)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
    connector.register_kv_caches(make_caches())
    yield connector
    ensure_kv_transfer_shutdown()


def test_a_second_engine_of_a_process_is_refused_while_the_first_lives(
    worker_side: CtxOffloadConnector,
) -> None:
    """Its caches would take the place of the first one's, which would read them."""
    first = make_connector(KVConnectorRole.SCHEDULER)
    transfer = worker_side._worker_side._transfer
    with pytest.raises(ConfigError, match="another engine of this process uses the"):
        worker_side.register_kv_caches(make_caches())
    assert worker_side._worker_side._transfer is transfer
    assert get_kv_transfer_group() is worker_side
    first.shutdown()


@pytest.mark.parametrize("ended", ["shut down", "collected"])
def test_what_an_engine_left_behind_is_closed_for_the_next(
    worker_side: CtxOffloadConnector, ended: str
) -> None:
    """1. An engine starts; it is shut down without its worker, or just forgotten.

    2. The next one is given the worker side of the first, whose plan is another.

    3. It is refused; once more, and vLLM makes a worker side of its own.
    """
    first = make_connector(KVConnectorRole.SCHEDULER)
    if ended == "shut down":
        first.shutdown()
    else:
        first.itself = first  # only the collector finds it
        del first
    with pytest.raises(ConfigError, match="it is closed now, so start this engine"):
        worker_side.register_kv_caches(make_caches())
    assert not worker_side._worker_side.is_registered
    assert not has_kv_transfer_group()


def test_a_worker_side_that_was_closed_takes_caches_again(
    worker_side: CtxOffloadConnector,
) -> None:
    worker_side.shutdown()
    worker_side.register_kv_caches(make_caches())
    assert worker_side._worker_side.is_registered


def test_a_worker_that_was_given_another_environment_stops_the_start(
    worker_side: CtxOffloadConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(memory.DEFAULT_ENV, "1000000")
    worker_side.shutdown()
    other = make_connector(KVConnectorRole.WORKER, store_threshold=0)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", other)
    monkeypatch.setenv(memory.DEFAULT_ENV, "2000000")
    scheduler_side = make_connector(KVConnectorRole.SCHEDULER, store_threshold=0)
    found = other.get_handshake_metadata()
    assert found is not None
    with pytest.raises(
        ConfigError,
        match=r"worker 3 has another plan \(num_slots is 61 on the worker and 122 on",
    ):
        scheduler_side.set_xfer_handshake_metadata_pp_aware({(0, 3): found})


def test_the_terms_of_equal_sides_and_what_others_say_are_taken(
    worker_side: CtxOffloadConnector,
) -> None:
    scheduler_side = make_connector(KVConnectorRole.SCHEDULER)
    found = worker_side.get_handshake_metadata()
    assert isinstance(found, vllm_api.CtxOffloadTerms)
    others = type("NixlsOwn", (KVConnectorHandshakeMetadata,), {})()
    scheduler_side.set_xfer_handshake_metadata_pp_aware({(0, 0): found, (0, 1): others})


def test_inside_of_another_connector_the_answer_is_left_to_others(
    worker_side: CtxOffloadConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A MultiConnector passes on one answer, and NIXL can't do without its own."""
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", object())
    assert worker_side.get_handshake_metadata() is None
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", worker_side)


def test_every_step_brings_the_terms_that_the_worker_compares(
    worker_side: CtxOffloadConnector,
) -> None:
    same = make_connector(KVConnectorRole.SCHEDULER)
    worker_side.handle_preemptions(
        same.build_connector_meta(SchedulerOutput.make_empty())
    )
    assert not worker_side._worker_side._refuses
    other = make_connector(KVConnectorRole.SCHEDULER, cpu_bytes_to_use="2MiB")
    worker_side.handle_preemptions(
        other.build_connector_meta(SchedulerOutput.make_empty())
    )
    assert worker_side._worker_side._refuses
