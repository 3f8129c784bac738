"""Translation of vLLM's objects, and what is refused at the start."""

from __future__ import annotations

import functools
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from real_scheduler.harness import ours
from real_scheduler.vllm_setup import (
    make_kv_cache_config,
    make_vllm_config,
    page_size,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from vllm_ctx_offload.adapters import vllm_api
from vllm_ctx_offload.connector import CtxOffloadConnector
from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.messages import WorkerReport

PAGE_BYTES = page_size(32)


def make_config(**options: Any) -> Any:
    extra = options.pop("extra", {"cpu_bytes_to_use": "1MiB"})
    return make_vllm_config(kv_transfer=ours(**extra), **options)


class TestRefusals:
    """One sentence: what is wrong, and what to do instead."""

    def test_supported_configuration_is_accepted(self) -> None:
        vllm_api.check_environment(make_config(), make_kv_cache_config(8, 32))

    @pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
    def test_role_that_only_stores_or_loads(self, role: str) -> None:
        config = make_config()
        config.kv_transfer_config.kv_role = role
        with pytest.raises(ConfigError, match=f"'{role}'.*'kv_both'"):
            vllm_api.check_environment(config, make_kv_cache_config(8, 32))

    @pytest.mark.parametrize(
        "name",
        [
            "pipeline_parallel_size",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
        ],
    )
    def test_parallelism_that_splits_what_a_worker_sees(self, name: str) -> None:
        config = make_config()
        setattr(config.parallel_config, name, 2)
        with pytest.raises(ConfigError, match=f"{name} = 2 is not supported"):
            vllm_api.check_environment(config, make_kv_cache_config(8, 32))

    def test_untested_release_is_a_warning(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(vllm, "__version__", "0.99.0")
        with caplog.at_level(logging.WARNING):
            vllm_api.check_environment(make_config(), make_kv_cache_config(8, 32))
        assert "vLLM 0.99.0 is outside of the range" in caplog.text

    @pytest.mark.parametrize(
        ("engine_id", "num_local", "warned"),
        [("abc_dp1", 1, True), ("abc_dp1", 2, False), ("abc", 1, False)],
    )
    def test_an_engine_that_does_not_know_of_others_says_so(
        self,
        engine_id: str,
        num_local: int,
        warned: bool,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        config = make_config()
        config.kv_transfer_config.engine_id = engine_id
        config.parallel_config.data_parallel_size_local = num_local
        with caplog.at_level(logging.WARNING):
            vllm_api.warn_of_other_engines(config)
        assert ("one of several data-parallel engines" in caplog.text) == warned


class TestConnector:
    @staticmethod
    def make(**options: Any) -> CtxOffloadConnector:
        return CtxOffloadConnector(
            make_config(**options),
            KVConnectorRole.SCHEDULER,
            make_kv_cache_config(64, 32),
        )

    def test_failed_loads_are_recomputed_whatever_was_configured(self) -> None:
        config = make_config()
        config.kv_transfer_config.kv_load_failure_policy = "fail"
        CtxOffloadConnector(
            config, KVConnectorRole.SCHEDULER, make_kv_cache_config(64, 32)
        )
        assert config.kv_transfer_config.kv_load_failure_policy == "recompute"

    def test_lost_store_is_no_lost_delivery(self) -> None:
        """CONTRACT 16."""
        assert self.make().requires_kv_delivery is False

    def test_start_says_the_plan(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO):
            self.make(extra={"cpu_bytes_to_use": "1MiB"})
        assert "plan: chunks of 32 tokens (16.00 KiB), 64 slots" in caplog.text

    def test_accounts_that_do_not_fit_the_pool_stop_the_start(self) -> None:
        tenants = {"acme": {"reserved": "2MiB"}}
        with pytest.raises(ConfigError, match=r"'acme' the most with 2\.00 MiB"):
            self.make(extra={"cpu_bytes_to_use": "1MiB", "tenants": tenants})

    def test_hooks_of_the_other_side_are_a_mistake(self) -> None:
        connector = self.make()
        with pytest.raises(AssertionError, match="on the scheduler"):
            connector.register_kv_caches({})
        worker = CtxOffloadConnector(
            make_config(), KVConnectorRole.WORKER, make_kv_cache_config(64, 32)
        )
        with pytest.raises(AssertionError, match="on a worker"):
            worker.reset_cache()

    def test_unknown_key_stops_the_start(self) -> None:
        with pytest.raises(ConfigError, match="did you mean 'load_wait_ms'"):
            self.make(extra={"load_wait": 3})


class TestWorkerMetadata:
    def test_reports_of_all_workers_add_up(self) -> None:
        """CONTRACT 21."""
        one, other = WorkerReport(), WorkerReport()
        one.num_done.update([1, 2])
        other.num_done.update([2, 3])
        other.failed.add(3)
        merged = vllm_api.CtxOffloadWorkerMetadata(one).aggregate(
            vllm_api.CtxOffloadWorkerMetadata(other)
        )
        assert isinstance(merged, vllm_api.CtxOffloadWorkerMetadata)
        assert merged.report.num_done == {1: 1, 2: 2, 3: 1}
        assert merged.report.failed == {3}


class TestStats:
    """CONTRACT 25."""

    def test_increments_survive_aggregation_and_plain_data(self) -> None:
        one = vllm_api.CtxOffloadStats({'["loaded_bytes", "default"]': 2**20})
        other = CtxOffloadConnector.build_kv_connector_stats(
            {'["loaded_bytes", "default"]': 2**20, '["transfer_failures", "load"]': 1}
        )
        assert other is not None
        total = one.aggregate(other)
        assert total.reduce()["loaded MiB"] == 2
        assert total.reduce()["failed transfers"] == 1
        assert not total.is_empty()
        total.reset()
        assert total.is_empty()

    def test_two_in_a_multi_connector_are_kept_apart(self) -> None:
        """It adds up the figures of connectors of one class."""
        kv_cache_config = make_kv_cache_config(64, 32)
        connectors = [
            CtxOffloadConnector(make_config(), role, kv_cache_config)
            for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER) * 2
        ]
        assert [connector._position for connector in connectors] == [0, 0, 1, 1]
        first, second = (c.get_kv_connector_stats() for c in connectors[::2])
        assert first is not None
        assert second is not None
        total = first.aggregate(second).data
        assert total['["capacity_bytes"]'] == total['[1, "capacity_bytes"]'] == 2**20
        assert len(total) == len(first.data) + len(second.data)
        assert connectors[1].get_kv_connector_stats() is None

    def test_one_that_is_made_again_keeps_its_place(self) -> None:
        config, kv_cache_config = make_config(), make_kv_cache_config(64, 32)
        for _ in range(2):
            connector = CtxOffloadConnector(
                config, KVConnectorRole.SCHEDULER, kv_cache_config
            )
            assert connector._position == 0

    def test_metrics_that_fail_are_logged_once_and_end_nothing(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        registry = CollectorRegistry()
        types = {
            kind: functools.partial(kind, registry=registry)
            for kind in (Counter, Gauge, Histogram)
        }
        metrics = CtxOffloadConnector.build_prom_metrics(
            make_config(), types, ["engine"], {0: ["0"]}
        )
        metrics.observe({'["hit_tokens", "acme"]': 1}, 0)
        for _ in range(2):
            metrics.observe({'["hit_tokens", "acme"]': 1}, 9)  # no such engine
        metrics.observe({'["hit_tokens", "acme"]': 1}, 0)
        assert caplog.text.count("Said once; please report it") == 1
        labels = {"engine": "0", "connector": "0", "tenant": "acme"}
        name = "vllm:ctx_offload_hit_tokens_total"
        assert registry.get_sample_value(name, labels) == 2

    def test_hits_are_from_the_host_in_vllms_own_figures(self) -> None:
        source = CtxOffloadConnector._cache_hit_source
        if source is None:
            pytest.skip("this release of vLLM does not ask")
        connector = TestConnector.make()
        request: Any = SimpleNamespace()
        hits = connector.get_external_cache_hit_sources(request, 7)
        assert {source.value: count for source, count in hits.items()} == {"host": 7}

    def test_nothing_is_an_empty_object(self) -> None:
        empty = CtxOffloadConnector.build_kv_connector_stats()
        assert empty is not None
        assert empty.is_empty()
        assert empty.aggregate(vllm_api.CtxOffloadStats()).is_empty()


def test_before_sleep_mode_a_worker_waits_for_its_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connector = CtxOffloadConnector(
        make_config(), KVConnectorRole.WORKER, make_kv_cache_config(64, 32)
    )
    waits: list[str] = []
    worker = connector._worker_side
    monkeypatch.setattr(worker, "wait_until_idle", lambda: waits.append("waited"))
    connector.unregister_kv_caches()
    assert waits == ["waited"]
