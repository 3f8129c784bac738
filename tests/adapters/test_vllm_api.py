"""Translation of vLLM's objects, and what is refused at the start."""

from __future__ import annotations

import functools
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from real_scheduler.harness import ours
from real_scheduler.vllm_setup import make_kv_cache_config, make_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.output import (
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_ctx_offload.adapters import vllm_api
from vllm_ctx_offload.connector import CtxOffloadConnector
from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.messages import WorkerReport
from vllm_ctx_offload.plan import ModelShape
from vllm_ctx_offload.scheduler import StepEvents, TableUpdate

PAGE_BYTES = 32 * 2 * 2 * 32 * 4  # tokens, K and V, heads, head size, float32


def make_config(**options: Any) -> Any:
    extra = options.pop("extra", {"cpu_bytes_to_use": "1MiB"})
    return make_vllm_config(kv_transfer=ours(**extra), **options)


def new_request(request_id: str, block_ids: list[int], computed: int) -> NewRequestData:
    return NewRequestData(
        req_id=request_id,
        prompt_token_ids=[1, 2, 3],
        mm_features=[],
        sampling_params=None,
        pooling_params=None,
        block_ids=(block_ids,),
        num_computed_tokens=computed,
        lora_request=None,
    )


def cached(**requests: tuple[list[int] | None, int, bool]) -> CachedRequestData:
    """Takes request id -> (new block ids, computed tokens, resumed)."""
    return CachedRequestData(
        req_ids=list(requests),
        resumed_req_ids={name for name, (_, _, resumed) in requests.items() if resumed},
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None if b is None else (b,) for b, _, _ in requests.values()],
        num_computed_tokens=[computed for _, computed, _ in requests.values()],
        num_output_tokens=[0] * len(requests),
    )


FULL: dict[str, Any] = {
    "block_size": 32,
    "num_kv_heads": 2,
    "head_size": 32,
    "dtype": torch.float32,
}


class TestStepEvents:
    def test_empty_step_has_no_events(self) -> None:
        events = vllm_api.step_events(SchedulerOutput.make_empty())
        assert events == StepEvents(tables=[], preempted=set())

    def test_tables_of_new_and_resumed_requests_replace(self) -> None:
        """CASES 8; running ones without new blocks are not named."""
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = {"new": 3, "runs": 1, "back": 9, "same": 1}
        output.scheduled_new_reqs = [new_request("new", [1, 2], 32)]
        output.scheduled_cached_reqs = cached(
            runs=([3], 64, False), back=([4, 5], 0, True), same=(None, 7, False)
        )
        output.preempted_req_ids = {"lost"}
        events = vllm_api.step_events(output)
        assert events == StepEvents(
            num_scheduled_tokens={"new": 3, "runs": 1, "back": 9, "same": 1},
            tables=[
                TableUpdate("new", ([1, 2],), 32, replace=True),
                TableUpdate("runs", ([3],), 64, replace=False),
                TableUpdate("back", ([4, 5],), 0, replace=True),
            ],
            preempted={"lost", "back"},
        )

    def test_release_that_names_no_preempted_requests_is_understood(self) -> None:
        output = SchedulerOutput.make_empty()
        output.preempted_req_ids = None
        output.scheduled_cached_reqs = cached(back=([4], 0, True))
        assert vllm_api.step_events(output).preempted == {"back"}


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

    @pytest.mark.parametrize("name", ["RSWASpec", "SinkFullAttentionSpec"])
    def test_attention_whose_tables_are_of_another_kind(self, name: str) -> None:
        kv_cache_config = make_kv_cache_config(8, 32)
        spec = type(name, (FullAttentionSpec,), {})(**FULL)
        kv_cache_config.kv_cache_groups = [KVCacheGroupSpec(["layer"], spec)]
        with pytest.raises(ConfigError, match=rf"1 KV cache group.*{name}"):
            vllm_api.check_environment(make_config(), kv_cache_config)

    def test_groups_whose_blocks_differ_in_size(self) -> None:
        kv_cache_config = make_kv_cache_config(8, 32)
        spec = FullAttentionSpec(**{**FULL, "block_size": 64})
        kv_cache_config.kv_cache_groups.append(KVCacheGroupSpec(["other"], spec))
        with pytest.raises(ConfigError, match=r"blocks of \[32, 64\] tokens"):
            vllm_api.check_environment(make_config(), kv_cache_config)

    def test_groups_on_a_release_that_can_not_recompute_them(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(vllm_api, "KVConnectorTransferResults", None)
        kv_cache_config = make_kv_cache_config(8, 32)
        vllm_api.check_environment(make_config(), kv_cache_config)
        kv_cache_config.kv_cache_groups *= 2
        with pytest.raises(ConfigError, match="2 KV cache groups, and vLLM"):
            vllm_api.check_environment(make_config(), kv_cache_config)

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


class TestShape:
    def test_shape_is_what_vllm_settled_on(self) -> None:
        config = make_config(num_workers=2)
        assert vllm_api.model_shape(config, make_kv_cache_config(8, 32)) == ModelShape(
            tokens_per_block=32,
            tokens_per_hash=32,
            bytes_per_block=PAGE_BYTES,
            num_device_blocks=8,
            num_workers=2,
        )

    @pytest.mark.parametrize(
        ("block_stride", "expected"), [(0, 3 * PAGE_BYTES), (64, 64)]
    )
    def test_tensors_of_older_releases_are_added_up_or_packed(
        self, block_stride: int, expected: int
    ) -> None:
        """Before placements: one tensor a layer, or the stride of all together."""
        kv_cache_config = make_kv_cache_config(8, 32)
        tensors = [
            SimpleNamespace(size=8 * PAGE_BYTES, block_stride=block_stride)
            for _ in range(3)
        ]
        kv_cache_config.kv_cache_tensors = tensors  # type: ignore[assignment]
        shape = vllm_api.model_shape(make_config(), kv_cache_config)
        assert shape.bytes_per_block == expected

    def test_mla_and_wrapped_full_attention_are_one_group(self) -> None:
        full = FullAttentionSpec(
            block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32
        )
        wide = FullAttentionSpec(
            block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32
        )
        mla = MLAAttentionSpec(
            block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16
        )
        wrapped = UniformTypeKVCacheSpecs(
            block_size=16, kv_cache_specs={"a": full, "b": wide}
        )
        for spec in (mla, wrapped):
            kv_cache_config = make_kv_cache_config(8, 16)
            kv_cache_config.kv_cache_groups = [KVCacheGroupSpec(["a", "b"], spec)]
            config = make_config(block_size=32)
            vllm_api.check_environment(config, kv_cache_config)
            assert vllm_api.model_shape(config, kv_cache_config).tokens_per_block == 16


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
        with pytest.raises(ConfigError, match=r"'acme' the most with 2097152, more"):
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
