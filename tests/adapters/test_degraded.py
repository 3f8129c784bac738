"""Warnings when offloading does less than it should."""

from __future__ import annotations

import logging

import pytest

from vllm_ctx_offload.adapters.catalogue import METRICS, PREFIX
from vllm_ctx_offload.adapters.degraded import _KINDS, DegradationLog
from vllm_ctx_offload.stats import OffloadStats, of_connector


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> DegradationLog:
    caplog.set_level(logging.DEBUG)
    return DegradationLog()


@pytest.mark.parametrize("kind", _KINDS, ids=" ".join)
@pytest.mark.parametrize("connector", [0, 1])
def test_each_kind_is_said_once_with_the_metric_to_look_at(
    log: DegradationLog,
    caplog: pytest.LogCaptureFixture,
    kind: tuple[str, str],
    connector: int,
) -> None:
    name, label = kind
    stats = OffloadStats()
    for value in ("acme", "acme", "zeta"):
        labels = [label] if len(METRICS[name].labels) == 1 else [value, label]
        stats.count(name, *labels)
        log.look_at(of_connector(connector, stats.take()))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f"{_KINDS[kind]}. Said once; {PREFIX}{name}_total counts."
    )


def test_a_declared_counter_and_usual_figures_are_no_trouble(
    log: DegradationLog, caplog: pytest.LogCaptureFixture
) -> None:
    stats = OffloadStats()
    stats.declare("transfer_failures", "load")
    stats.count("rejected_stores", "acme", "priority")
    stats.count("evicted_chunks", "acme", "acme")
    stats.observe("load_wait_seconds", value=1.0)
    stats.set("resident_bytes", "acme", to=5)
    log.look_at(stats.take())
    log.look_at({})
    assert not caplog.records
    stats.count("transfer_failures", "load")
    log.look_at(stats.take())
    assert len(caplog.records) == 1
