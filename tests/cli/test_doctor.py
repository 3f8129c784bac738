"""`vllm-ctx-offload doctor`: what it finds, and the plan it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pytest_mock import MockerFixture

from vllm_ctx_offload import memory
from vllm_ctx_offload.cli import doctor, main
from vllm_ctx_offload.cli.doctor_plan import check_config, read_extra_config
from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.memory import MemoryLimit

GIB = 1024**3
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


class TestConfig:
    def test_every_fault_is_found_at_once(self) -> None:
        config, faults = check_config(
            {
                "blokc_size": 3,
                "store_threshold": -1,
                "block_size": 16,
                "blocks_per_chunk": 2,
                "tenants": {"a": {"reserved": "1Q", "limit": {}}, "b": 3},
            }
        )
        assert config is None
        said = [
            ("unknown key 'blokc_size'; did you mean 'block_size'?"),
            ("'store_threshold' = -1"),
            ("'tenants.a.reserved' = '1Q'"),
            ("'tenants.a.limit' = {}"),
            ("'tenants.b' = 3"),
            ("block_size = 16 and blocks_per_chunk = 2 both"),
        ]
        assert len(faults) == len(said)
        for fault, part in zip(faults, said, strict=True):
            assert part in fault

    def test_faults_of_a_policy_file_name_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "policy.yaml"
        path.write_text("tenants: {a: {weights: 2, limit: -1}}\nmax_protected: 3\n")
        _, faults = check_config({"policy_file": str(path)})
        assert len(faults) == 3
        assert all(fault.startswith(f"{path}: ") for fault in faults)

    @pytest.mark.parametrize("text", ["tenants: {", "[]", "policy_file: x"])
    def test_a_policy_file_that_is_none_is_one_fault(
        self, tmp_path: Path, text: str
    ) -> None:
        path = tmp_path / "policy.yaml"
        path.write_text(text)
        _, faults = check_config({"policy_file": str(path)})
        assert len(faults) == 1

    def test_a_sound_one_has_none(self) -> None:
        config, faults = check_config({"tenants": {"a": {"limit": "25%"}}})
        assert config is not None
        assert faults == []

    def test_it_is_read_from_text_files_and_whole_transfer_configs(
        self, tmp_path: Path
    ) -> None:
        values = {"block_size": 16}
        name = "CtxOffloadConnector"
        whole = {"kv_connector": name, "kv_connector_extra_config": values}
        path = tmp_path / "extra.json"
        path.write_text(json.dumps(values))
        assert read_extra_config(json.dumps(values)) == values
        assert read_extra_config(f"@{path}") == values
        assert read_extra_config(json.dumps(whole)) == values

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("{", "--extra-config is no JSON: "),
            ("[]", "--extra-config is no JSON object; write '{...}'."),
            ("@nowhere.json", "nowhere.json can't be read"),
            (
                '{"kv_connector": "MultiConnector", "kv_connector_extra_config": {}}',
                "'CtxOffloadConnector'; of a MultiConnector give the part that is ours",
            ),
        ],
    )
    def test_what_is_no_mapping_is_said(self, text: str, said: str) -> None:
        with pytest.raises(ConfigError) as raised:
            read_extra_config(text)
        assert said in str(raised.value)


class TestCommand:
    @pytest.fixture(autouse=True)
    def quick_machine(
        self, mocker: MockerFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A machine of 8 GiB, with vLLM's CPU build, that is looked at in no time."""
        for name in ("check_vllm", "check_torch", "check_plugin"):
            mocker.patch.object(doctor, name, return_value=[])
        limit = MemoryLimit(8 * GIB, "the machine's memory")
        for module in ("memory", "cli.doctor_machine", "cli.doctor_plan"):
            name = f"vllm_ctx_offload.{module}.available_memory"
            mocker.patch(name, return_value=limit)
        mocker.patch.object(doctor, "is_cpu_build", return_value=True)
        monkeypatch.setenv(memory.DEFAULT_ENV, str(2 * GIB))

    @pytest.fixture
    def model(self, tmp_path: Path) -> str:
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        return str(tmp_path)

    def test_without_arguments_it_looks_at_the_machine(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["doctor"]) == 0
        printed = capsys.readouterr().out
        assert "8.00 GiB of host memory available" in printed
        assert "the pool takes 2.00 GiB (CTX_OFFLOAD_DEFAULT_BYTES is set)" in printed

    @pytest.mark.parametrize("role", [{}, {"kv_role": "kv_consumer"}])
    def test_a_role_that_the_engine_refuses_is_a_fault(
        self, role: dict[str, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        whole = {"kv_connector": "CtxOffloadConnector", **role}
        assert main(["doctor", "--extra-config", json.dumps(whole)]) == 1
        assert "both stores and loads; set it to 'kv_both'" in capsys.readouterr().out
        whole["kv_role"] = "kv_both"
        assert main(["doctor", "--extra-config", json.dumps(whole)]) == 0

    def test_the_plan_has_sizes_and_accounts(
        self, model: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        extra = {"tenants": {"acme": {"reserved": "25%", "limit": "1GiB"}}}
        arguments = ["doctor", "--model", model, "--extra-config", json.dumps(extra)]
        assert main([*arguments, "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)["plan"]
        chunk = 128 * 2048
        assert plan["bytes_per_chunk"] == chunk
        assert plan["num_slots"] == 2 * GIB // chunk
        assert plan["tokens_that_fit"] == 2 * GIB // 2048
        assert plan["tenants"]["acme"] == {
            "reserved_chunks": 2048,
            "reserved_bytes": GIB // 2,
            "limit_chunks": 4096,
            "limit_bytes": GIB,
            "weight": 1.0,
        }
        assert plan["tenants"]["default"]["limit_bytes"] is None
        assert main(arguments) == 0
        printed = capsys.readouterr().out
        assert "8192, for 1048576 tokens" in printed
        assert "2048 chunks, 512.00 MiB" in printed
        assert "the whole pool" in printed

    def test_every_group_keeps_a_chunk_of_each_token(
        self, model: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        kinds = ["sliding_attention", "full_attention"] * 2
        mixed = {**LLAMA, "layer_types": kinds, "sliding_window": 512}
        (Path(model) / "config.json").write_text(json.dumps(mixed))
        assert main(["doctor", "--json", "--model", model]) == 0
        plan = json.loads(capsys.readouterr().out)["plan"]
        assert plan["num_groups"] == 2
        assert plan["bytes_per_token"] == 2048
        assert plan["bytes_per_chunk"] == 128 * 1024
        assert plan["tokens_that_fit"] == 2 * GIB // 2048
        assert main(["doctor", "--model", model]) == 0
        assert "(attention, 4 layers in 2 groups)" in capsys.readouterr().out

    def test_engines_that_share_the_host_share_the_default(
        self, model: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        sizes = ["--data-parallel-size", "2", "--tensor-parallel-size", "2"]
        assert main(["doctor", "--json", "--model", model, *sizes]) == 0
        plan = json.loads(capsys.readouterr().out)["plan"]
        assert plan["total_bytes"] == GIB
        assert plan["bytes_per_worker"] == GIB // 2

    @pytest.mark.parametrize(
        ("extra", "said"),
        [
            ({"block_size": 100}, ["no multiple of the device's block of 128"]),
            (
                {"tenants": {"a": {"limit": 1}, "b": {"limit": 2}}},
                ["'a' has limit = 1 B", "'b' has limit = 2 B"],
            ),
            (
                {"tenants": {"a": {"reserved": "60%"}, "b": {"reserved": "60%"}}},
                ["the tenants reserve"],
            ),
            ({"cpu_bytes_to_use": "9GiB"}, ["but the machine's memory has only"]),
            ({"cpu_bytes_to_use": 5}, ["cpu_bytes_to_use = 5 B holds no chunk"]),
            ({"tenant": {}}, ["did you mean 'tenants'?"]),
        ],
    )
    def test_every_fault_of_the_configuration_is_printed(
        self,
        model: str,
        capsys: pytest.CaptureFixture[str],
        extra: dict[str, Any],
        said: list[str],
    ) -> None:
        arguments = ["doctor", "--model", model, "--extra-config", json.dumps(extra)]
        assert main(arguments) == 1
        faults = [
            line
            for line in capsys.readouterr().out.splitlines()
            if line.startswith("FAULT")
        ]
        assert len(faults) == len(said)
        for fault, part in zip(faults, said, strict=True):
            assert part in fault

    def test_too_little_room_for_vllm_is_a_warning(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        extra = '{"cpu_bytes_to_use": "7.5GiB"}'
        assert main(["doctor", "--extra-config", extra]) == 0
        assert "vLLM itself needs host memory too" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("more", "level", "code"),
        [
            ({"is_encoder_decoder": True}, "fault", 1),
            ({"mamba_d_state": 16}, "warn", 0),
        ],
    )
    def test_a_model_without_a_plan_is_said(
        self,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        more: dict[str, Any],
        level: str,
        code: int,
    ) -> None:
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **more}))
        assert main(["doctor", "--json", "--model", str(tmp_path)]) == code
        report = json.loads(capsys.readouterr().out)
        assert report["plan"] is None
        (found,) = (f["level"] for f in report["findings"] if f["topic"] == "model")
        assert found == level

    def test_an_extra_config_that_is_none_is_a_fault(self) -> None:
        assert main(["doctor", "--extra-config", "nonsense"]) == 1

    @pytest.mark.parametrize("size", ["0", "-1", "x"])
    def test_sizes_have_to_be_positive(self, size: str) -> None:
        with pytest.raises(SystemExit) as raised:
            main(["doctor", "--block-size", size])
        assert raised.value.code == 2
